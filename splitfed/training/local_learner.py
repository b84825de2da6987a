"""A run's clients as a federated method sees them, and the local objectives that it puts beside their parties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.local_objective import LocalObjective
from splitfed.core.messages import Message, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.own_values import compute_own_value
from splitfed.core.party import Party
from splitfed.core.random import derive
from splitfed.core.topology import Topology, member
from splitfed.core.upload_defenses import Sent, apply_upload_defenses, count, find_upload_defenses
from splitfed.core.usage_counts import OTHERS, RowOrigins
from splitfed.engines.base import FED
from splitfed.engines.engine import Engine
from splitfed.federated.base import ObjectivePlacement
from splitfed.planning.validation import Prepared


@dataclass(frozen=True)
class LocalLearner:
    """A replica of a local engine; what it sends goes over the engine's link.

    `known`: what `compute` would return for a value and a part, where that is known already. `role`: of the one party
    that it stands for (None: all of the client that own data).
    """

    engine: Engine
    replica: int
    turns: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)
    known: Mapping[tuple[str, str], Tensor] = field(default_factory=dict, compare=False, repr=False)
    role: str | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles whose parties it stands for."""
        return self.topology.data_roles if self.role is None else (self.role,)

    @property
    def pseudonym(self) -> int:
        """Number by which a step's stamp names the client."""
        return self.engine.run_parties.replicas[self.replica].pseudonym

    def at(self, role: str) -> LocalLearner:
        """Return the client's party in `role` alone."""
        return replace(self, role=role)

    @property
    def topology(self) -> Topology:
        """The replica's topology."""
        return self.engine.topologies[self.replica]

    @property
    def objectives(self) -> Mapping[str, LocalObjective]:
        """The local objectives at the client's own parties, by role."""
        return {role: found for role in self.roles if (found := self.objective(role)) is not None}

    def objective(self, role: str) -> LocalObjective | None:
        """Return the local objective at the party that plays `role` for the client."""
        return self.engine.party(self.replica, role).state.objective

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.engine.seed

    def rows(self, part: str = "train") -> int:
        """Return how many rows the client has in `part`."""
        return self.engine.rows(self.replica, part)

    @property
    def shown(self) -> Tensor:
        """Which rows of "train" are the public ones."""
        return self.engine.party(self.replica, self.topology.data_roles[0]).state.origins["public"].numbers

    def inputs(self, part: str = "train") -> dict[str, Tensor]:
        """Return the client's raw inputs in `part`: name -> (rows, ...)."""
        return {name: x for party in self._parties().values() for name, x in party.state.inputs(part).items()}

    @property
    def rate(self) -> float:
        """The learning rate that the optimizer of the client's first party with weights stands at."""
        return next((p.state.rate for p in self._parties().values() if p.state.rate is not None), 0.0)

    @property
    def optim(self) -> Optim:
        """The optimizer of the client's first party, as it was asked for."""
        return self.engine.optims.get(self.roles[0], Optim())

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum that the client's optimizers hold, as `segment/name` -> tensor."""
        return {name: held for party in self._parties().values() for name, held in party.state.momentum().items()}

    def hold(
        self, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor], origins: RowOrigins | None = None
    ) -> None:
        """Keep further rows under the name `part`, input or head -> (rows, ...); see `Learner.hold`."""
        rows = len(next(iter((*inputs.values(), *labels.values()))))
        self.engine.own(self.replica, part, inputs, labels, False, origins or RowOrigins.shown(OTHERS, rows))

    def train(
        self, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Take one training step on each of `batches` (row numbers of `part`); return the loss of each step."""
        return self.engine.train(self.replica, epoch, batches, first, part, task)

    def consult(self, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Return `value` of some `rows` of `part` in evaluation mode: (rows, ...)."""
        return self.engine.consult(self.replica, value, rows, part, number)

    def compute(self, value: str, part: str = "train") -> Tensor:
        """Return `value` of all rows of `part` in evaluation mode: (rows, ...)."""
        if (value, part) in self.known:
            return self.known[value, part]
        maker = next((s for s in self.topology.segments if value in s.outputs), None)
        if maker is None or maker.role not in self.topology.data_roles:
            raise InvalidInput(f"value {value!r} is not made at a client of topology {self.topology.name!r}")
        try:
            return compute_own_value(self.engine.party(self.replica, maker.role), value, part)
        except KeyError:
            raise InvalidInput(f"value {value!r} cannot be computed from a client's own data alone") from None

    @contextmanager
    def separate_optimizer(self, name: str, rate: float | None = None) -> Iterator[None]:
        """Let steps inside the block go on from an optimizer state of their own under `name`."""
        with ExitStack() as stack:
            for party in self.engine.run_parties.replicas[self.replica].parties.values():
                stack.enter_context(party.state.separate_optimizer(name, rate))
            yield

    def labels(self, head: str, part: str = "train") -> Tensor:
        """Return the client's labels of `head` in `part`: (rows,)."""
        holder = next(h.labels for h in self.topology.heads if h.value == head)
        return self.engine.party(self.replica, holder).state.labels(part)[head]

    def contents(self, segments: Sequence[str], copies: bool = True) -> dict[str, Tensor]:
        """Return copies of the weights and buffers of `segments`, or those themselves."""
        found: dict[str, Tensor] = {}
        for role, party in self._parties().items():
            others = [s.name for s in self.topology.segments_of(role) if s.name not in segments]
            found |= party.state.contents(kept=others, copies=copies)
        return found

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Put `tensors` in place of the client's."""
        named = {name.partition("/")[0] for name in tensors}
        for role, party in self._parties().items():
            party.state.adopt(tensors, [s.name for s in self.topology.segments_of(role) if s.name not in named])

    def lend(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let the client's segments hold `tensors` inside the block."""
        return self.engine.borrow_segments(self.replica, tensors)

    def gradient(self, batches: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over the rows of `batches`; nothing moves."""
        return self.engine.gradient(self.replica, batches)

    def send(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Send `tensors` to the aggregation server, defenses on messages of this kind applied; return what arrives."""
        defenses = find_upload_defenses(self.engine.defenses, kind, self.replica)
        if not defenses:
            return self._carry(self._name(role), FED, kind, tensors, number)
        party = self.engine.party(self.replica, role or self.roles[0])
        detached = {name: t.detach().clone() for name, t in tensors.items()}
        sent = Sent(kind, detached, party.name, self.replica, number, self._turn(kind, number))
        count(party.state.uses, sent, defenses, self.engine.run_parties.replicas[self.replica].pseudonym)
        return self.engine.link.deliver(apply_upload_defenses(sent, defenses, self.engine.seed)).tensors

    def receive(
        self, kind: str, tensors: Mapping[str, Tensor], number: int, role: str | None = None
    ) -> Mapping[str, Tensor]:
        """Have `tensors` sent from the aggregation server; return what has arrived."""
        return self._carry(FED, self._name(role), kind, tensors, number)

    def _turn(self, kind: str, number: int) -> int:
        """Return how many messages of `kind` the client has sent before in round `number`."""
        newest, turn = self.turns.get(kind, (-1, 0))
        self.turns[kind] = number, turn + 1 if newest == number else 0
        return self.turns[kind][1]

    def _name(self, role: str | None) -> str:
        return self.engine.party(self.replica, role or self.roles[0]).name

    def _parties(self) -> dict[str, Party]:
        return {role: self.engine.party(self.replica, role) for role in self.roles}

    def _carry(
        self, sender: str, receiver: str, kind: str, tensors: Mapping[str, Tensor], number: int
    ) -> Mapping[str, Tensor]:
        detached = {name: t.detach().clone() for name, t in tensors.items()}
        stamp = Stamp("train", self.replica, number, 0)
        return self.engine.link.deliver(Message(sender, receiver, kind, f"{kind}->{receiver}", detached, stamp)).tensors


def place_objectives(engine: Engine, prepared: Prepared) -> None:
    """Put the local objectives of the run's method beside the parties of every replica."""
    method = prepared.method
    if method is None:
        return
    placed: set[int] = set()
    for replica, place in enumerate(engine.run_parties.replicas):
        for role, party in place.parties.items():
            if id(party) in placed:
                continue
            placed.add(id(party))
            own = role in place.topology.data_roles
            placement = ObjectivePlacement(
                party.name,
                role,
                replica if own else None,
                place.topology,
                engine.all_facts[replica],
                derive(prepared.training.seed, "tutor", member(role, replica) if own else role),
                engine.device,
                party.state.modules,
            )
            party.state.objective = method.objective(placement)
