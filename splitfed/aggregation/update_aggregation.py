"""How an aggregation server aggregates the uploads of a federated method: rule, secure sum, quorum, server step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from splitfed.aggregation.base import Accumulator, AggregationRule
from splitfed.aggregation.lookup import aggregation_of, parameters_of_table, secure_of
from splitfed.aggregation.participants import check_part, is_count, part_of
from splitfed.aggregation.server_steps import Memory, ServerStep, server_step_of
from splitfed.core.errors import InvalidInput
from splitfed.secure_sum.base import SecureSumPlan


@dataclass(frozen=True, kw_only=True)
class UpdateAggregation:
    """Settings by which a federated method aggregates its clients' uploads.

    `rule`: a name among the aggregation rules, a table with the name and its parameters, or an `AggregationRule`.

    `secure`: whether the aggregation server learns the sum of the uploads only: true or "masks", "ckks", a table with
    such a name and parameters, or a `SecureSumPlan`. `quorum`: how many clients, as a number or as a fraction of those
    selected, must finish a round; if fewer do, no client uploads and the aggregation server's weights do not change.
    `server_step`: how the aggregation server moves towards the aggregate (a name, a table, or a `ServerStep`); None: it
    takes the aggregate itself.
    """

    rule: str | Mapping[str, Any] | AggregationRule = "mean"
    secure: bool | str | Mapping[str, Any] | SecureSumPlan = False
    quorum: int | float = 1
    server_step: str | Mapping[str, Any] | ServerStep | None = None

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for unknown settings, and for a rule that reads single uploads under a secure sum."""
        check_part("quorum", self.quorum)
        object.__setattr__(self, "rule", aggregation_of(self.rule))
        object.__setattr__(self, "secure", secure_of(self.secure))
        object.__setattr__(self, "server_step", server_step_of(self.server_step))
        if self.secure and self._rule.by_itself:
            raise InvalidInput(
                f"rule={self.rule!r} reads every upload, but secure shows the server their sum only: set one"
            )

    @property
    def _rule(self) -> AggregationRule:
        return aggregation_of(self.rule)

    @property
    def sum(self) -> SecureSumPlan | None:
        """The secure sum; None where uploads are sent in the clear."""
        return secure_of(self.secure) or None

    def settings(self) -> dict[str, object]:
        """Return the settings that differ from a plain mean of all clients that finish: name -> value."""
        found: dict[str, object] = {"rule": self._rule} if self._rule.by_itself else {}
        if self.quorum != 1 or not is_count(self.quorum):
            found["quorum"] = self.quorum
        others = {"secure": self.sum, "server_step": self.server_step}
        return found | {name: one for name, one in others.items() if one is not None}

    def required(self, asked: int) -> int:
        """Return how many of `asked` selected clients must finish: the larger of quorum and what a secure sum needs."""
        return max(part_of(self.quorum, asked), 0 if self.sum is None else self.sum.required_members(asked))

    def check(self, asked: int, leaving: bool) -> None:
        """Raise `InvalidInput` for a quorum that cannot be met, and for too few clients for the rule or the secure sum.

        `asked`: the number of clients selected for a round; `leaving`: whether some of them may drop out.
        """
        if is_count(self.quorum) and self.quorum > asked:
            raise InvalidInput(f"quorum={self.quorum} is not allowed; {asked} clients take part in a round")
        if self._rule.by_itself:
            self._rule.check(self.required(asked) if leaving else asked)
        if self.sum is not None:
            self.sum.check(asked)

    def start(self) -> Accumulator:
        """Return an empty accumulator of uploads."""
        return self._rule.start()

    def move(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str], memory: dict[str, Memory]
    ) -> dict[str, Tensor]:
        """Return the aggregation server's tensors after a round, given those `before` it and the aggregate `after` it.

        Weights in `names` take the server step, whose state is read from and kept in `memory`; others are the
        aggregate.
        """
        step, moved = server_step_of(self.server_step), dict(after)
        for name in names:
            if step is None or after[name].is_meta:
                break  # a plan knows nothing but shapes
            change = after[name].double() - before[name].double()
            way = step.move(change, memory.setdefault(name, {}))
            moved[name] = (before[name].double() + way).to(after[name].dtype)
        return moved


def update_aggregation_of(given: object) -> UpdateAggregation:
    """Return the aggregation settings that `given` describes; None: a plain mean.

    `given`: a rule, its name or its table, a table of settings, or the settings. Raises `InvalidInput` for others.
    """
    if isinstance(given, UpdateAggregation):
        return given
    allowed = [field.name for field in fields(UpdateAggregation)]
    if isinstance(given, Mapping) and "name" not in given:
        return UpdateAggregation(**parameters_of_table("parameter of aggregation", UpdateAggregation, given))
    if given is None or isinstance(given, (str, Mapping, AggregationRule)):
        return UpdateAggregation() if given is None else UpdateAggregation(rule=given)
    raise InvalidInput(
        f"aggregation={given!r} is not allowed; expected the name of a rule, a table with a name and parameters, an "
        f"AggregationRule, an UpdateAggregation, or a table of {', '.join(allowed)}"
    )
