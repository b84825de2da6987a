"""What a client does with its rows in a round: the part of a training's settings that schedules read.

Whoever adds such a setting adds a field here: `splitfed.train` takes it in `local`, a study under its name in
`[training]`, and a run's description, arguments and plan have it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from splitfed.core.errors import InvalidInput, check_fields, require_count, require_name

Sampling = Literal["shuffle", "poisson"]
"""How rows are drawn for a batch: every row once an epoch, or each by chance at every step."""

Start = Literal["shared", "own"]
"""Weights that clients may start from; None leaves it to the topologies."""


@dataclass(frozen=True, kw_only=True)
class LocalUpdate:
    """What a client does with its rows in a round: how often it goes over them, how it draws them, what it starts from.

    `local_epochs`: passes a round, at least 1. `sampling`: "shuffle", every row once an epoch, or "poisson": every row
    with probability batch_size / rows at each of ceil(rows / batch_size) steps an epoch, where losses are summed and
    divided by the expected size of a batch.

    `restart_optimizers`: whether every party's optimizer forgets its state (momentum, Adam's moments) at the start of
    every round, or keeps it as long as the run lasts. `starts`: whether clients start from one "shared" state or each
    from weights of its "own"; None: as the topologies have it. `drop_last`: whether the last batch of an epoch is left
    out where it is incomplete, with other rows in every epoch; a client with fewer rows than a batch keeps its one.
    What weighs clients by their rows, such as an average of weights, counts all of them nevertheless.

    `accumulate`: number of batches, at least 1, behind which every party's optimizer takes a step, on the mean of the
    batches' losses; the last step of an epoch, or of a client that leaves, has those that are left. Messages cross a
    batch at a time. Raises `InvalidInput`.
    """

    local_epochs: int = field(default=1, metadata=require_count("local_epochs", low=1))
    sampling: Sampling = field(default="shuffle", metadata=require_name("sampling", get_args(Sampling)))
    restart_optimizers: bool = False
    starts: Start | None = field(default=None, metadata=require_name("starts", get_args(Start)))
    drop_last: bool = False
    accumulate: int = field(default=1, metadata=require_count("accumulate", low=1))

    def __post_init__(self) -> None:
        """Refuse values out of their range, and what batches of random size cannot be."""
        check_fields(self)
        if self.drop_last and self.sampling == "poisson":
            raise InvalidInput(
                "drop_last=True is not allowed with sampling='poisson': every batch is of random size, none is a last "
                "incomplete one; take 'shuffle'"
            )
        if self.accumulate > 1 and self.sampling == "poisson":
            raise InvalidInput(
                f"accumulate={self.accumulate} is not allowed with sampling='poisson': every batch drawn by chance is "
                "a step of its own; take a larger batch_size"
            )
