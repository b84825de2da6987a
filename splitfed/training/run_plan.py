"""A run before it begins: what the user asked for, checked as a whole, without a step computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from splitfed.core.defense import Defense, privacy_event
from splitfed.core.errors import InvalidInput, about, check_kind, short
from splitfed.core.local_update import LocalUpdate
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.federated.base import Method
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.private import planned_ledger
from splitfed.planning.simulation import check_speeds
from splitfed.planning.uploads import check_uploads
from splitfed.planning.validation import Prepared, prepare
from splitfed.poisoning.base import Poisoning
from splitfed.poisoning.injection import poison_data
from splitfed.privacy.ledger import Ledger
from splitfed.schedules.base import Schedule, Training
from splitfed.training.best_round import check_keep
from splitfed.training.callbacks import Callback, check_deciding, deciding
from splitfed.training.settings import Adversaries, Evaluation, Logging


@dataclass(frozen=True)
class RunPlan:
    """How a run trains: `prepared` for `rounds` rounds on `device`, and what is measured and kept of them.

    `given`: the same before its method and defenses were told the number of rounds. Raises `InvalidInput`, when it is
    made, for what does not fit together.
    """

    given: Prepared
    rounds: int
    device: torch.device | str = "cpu"
    adversaries: Adversaries = Adversaries()
    evaluation: Evaluation = Evaluation()
    logging: Logging = Logging()
    prepared: Prepared = field(init=False)

    def __post_init__(self) -> None:
        """Calibrate method and defenses for the number of rounds, and check the whole."""
        with about("device"):
            find_device(self.device)
        obstacle = "detectors, which train on rows of their own choice" if self.adversaries.detectors else None
        off = self.adversaries.off_protocol
        with about("defenses"):
            doubt = f"{off!r} does not follow the protocol" if off else None
            object.__setattr__(self, "prepared", calibrate_defenses(self.given, self.rounds, obstacle, doubt))
            check_uploads(self.prepared)
        with about("accumulate"):
            check_adversaries(self.prepared.training, self.adversaries)
        with about("across"):
            check_across(self.evaluation.across_clients, self.prepared.defenses)
        if self.evaluation.keep == "best":
            with about("keep"):
                check_keep(self.evaluation, self.prepared, self.rounds)
        with about("speeds"):
            check_speeds(self.prepared.topology, self.evaluation.speeds)
        with about("callbacks"):
            check_deciding(self.logging.callbacks, self.prepared)

    @property
    def deciders(self) -> tuple[Callback, ...]:
        """The callbacks that may end training early beside a defense that promises something."""
        private = any(privacy_event(defense) is not None for defense in self.prepared.defenses)
        return tuple(deciding(self.logging.callbacks)) if private else ()

    @cached_property
    def ledger(self) -> Ledger:
        """The privacy ledger of all rounds, whatever will be trained of them."""
        planned = planned_ledger(self.prepared, self.rounds, self.evaluation.every, self.evaluation.delta)
        said = [f"when training ends, by {one.decides_by}, said to be public" for one in self.deciders]
        return replace(planned, uncharged=(*planned.uncharged, *said))

    def lengthen(self, rounds: int) -> RunPlan:
        """Return the plan of the same run for `rounds` rounds, more than these.

        Raises `InvalidInput` where the length was part of what was worked out.
        """
        if self.deciders:
            raise InvalidInput(
                f"the privacy of this run is stated for {self.rounds} rounds, as a callback could end it before; "
                "train it again with more"
            )
        if self.evaluation.keep == "best" and self.rounds % self.evaluation.every:
            raise InvalidInput(
                f"round {self.rounds} was scored because it was the last (every={self.evaluation.every}), which a run "
                f'of {rounds} rounds would not choose from by keep="best": train it again with more'
            )
        longer = replace(self, rounds=rounds)
        mine, then = ((one.prepared.method, *one.prepared.defenses) for one in (self, longer))
        for now, later in zip(mine, then, strict=True):
            if repr(now) != repr(later):
                raise InvalidInput(
                    f"{type(now).__name__} was worked out for {self.rounds} rounds, and would be another one for "
                    f"{rounds}: train the run again with more"
                )
        return longer


def plan_run(
    topology: Topology | Sequence[Topology],
    data: Federation,
    rounds: int,
    logging: Logging,
    *,
    schedule: str | Schedule,
    method: str | Method | None,
    defenses: Defense | Sequence[Defense],
    batch_size: int | Sequence[int],
    optimizer: str | Optim | Mapping[str, Optim] | None,
    seed: int,
    device: torch.device | str,
    local: LocalUpdate,
    adversaries: Adversaries,
    evaluation: Evaluation,
) -> RunPlan:
    """Return the plan of the run that `train` is asked for; raises `InvalidInput` for anything that does not fit."""
    with about("device"):
        find_device(device)
    prepared = prepare(
        topology,
        poison_data(data, adversaries.poisonings, seed),
        schedule=schedule,
        defenses=defenses,
        optimizer=optimizer,
        training=Training.of(local, batch_size, seed),
        method=method,
    )
    return RunPlan(prepared, rounds, device, adversaries, evaluation, logging)


def check_adversaries(training: Training, adversaries: Adversaries) -> None:
    """Refuse to gather the gradients of several batches where somebody acts on those of every batch, or step."""
    if training.accumulate == 1:
        return
    acting = [
        *(f"training attack {type(attack).__name__}" for attack in adversaries.resolved_attacks.values()),
        *(f"detector {type(one).__name__}" for one in adversaries.detectors.values()),
        *(type(one).__name__ for one in adversaries.poisonings if type(one).enter is not Poisoning.enter),
    ]
    if acting:
        raise InvalidInput(
            f"accumulate={training.accumulate} is not allowed beside {acting[0]}, which acts on every batch and "
            "expects a step behind it; take a larger batch_size"
        )


def check_across(across: bool, defenses: Sequence[Defense]) -> None:
    """Refuse to score every client's model on the others' rows where a defense promises something of what it plans."""
    private = next((d for d in defenses if privacy_event(d) is not None), None)
    if across and private is not None:
        raise InvalidInput(
            f"across=True puts everybody's rows through everybody's segments, which is not in the plan of what "
            f"{type(private).__name__} promises: leave one of them out"
        )


def find_device(name: torch.device | str) -> torch.device:
    """Return the device called `name`; refuse one that torch does not train on here."""
    check_kind("device", name, (str, torch.device), "cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise InvalidInput(f"device={short(name)} is not allowed; expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device={str(name)!r} is not allowed; expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device={str(name)!r} is not there; this machine has {torch.cuda.device_count()} GPUs")
    return device
