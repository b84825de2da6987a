"""What `train` is given beside model, data and algorithm: adversaries, what is measured, and what is kept of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.argument_kinds import takes
from splitfed.core.errors import (
    InvalidInput,
    check_count,
    check_fields,
    check_kind,
    check_path,
    require_count,
    require_name,
    require_number,
    short,
)
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import LocalLink, Recording
from splitfed.costs.speeds import Speeds
from splitfed.detectors.base import Detector
from splitfed.engines.wire_format import ByteLink
from splitfed.poisoning.base import Poisoning
from splitfed.poisoning.injection import check_poisonings
from splitfed.threats.training_time import resolve_attack
from splitfed.training.callbacks import Callback, check_callbacks

RoundProgress = Callable[[int, int, Mapping[str, Any]], None]

LINKS: Mapping[str, type[LocalLink]] = {"memory": LocalLink, "bytes": ByteLink}


@dataclass(frozen=True)
class Adversaries:
    """Training-time attacks and poisoning clients of a training, and the detectors against them.

    `training_attacks`: party -> an attack that runs inside training there, or its name. `evaluate_every`: party -> how
    many rounds lie between the scorings of its attack on the victims, of which it learns nothing; the last round is
    always scored. `poisoning`: what misbehaving clients do; the run's data are then the poisoned ones. `detectors`:
    client (or the clients' role) -> the detector that watches its gradients. Raises `InvalidInput` for other kinds of
    values and counts below one; whether the parties are there is checked by `train`.
    """

    training_attacks: Mapping[str, TrainingAttack | str] = field(default_factory=dict)
    evaluate_every: Mapping[str, int] = field(default_factory=dict)
    poisoning: Poisoning | Sequence[Poisoning] = ()
    detectors: Mapping[str, Detector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values of other kinds, and counts below one."""
        for name in ("training_attacks", "evaluate_every", "detectors"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidInput(f"{name}={getattr(self, name)!r} is not allowed; expected a table by party")
        object.__setattr__(self, "poisoning", check_poisonings(self.poisoning))
        for given in self.training_attacks.values():
            resolve_attack(given)
        for name, detector in self.detectors.items():
            if not isinstance(detector, Detector):
                raise InvalidInput(
                    f"detectors[{name!r}]={detector!r} is not allowed; expected a detector, such as SplitGuard()"
                )
        for party, every in self.evaluate_every.items():
            check_count(f"evaluate_every[{party!r}]", every, low=1)

    @property
    def resolved_attacks(self) -> dict[str, TrainingAttack]:
        """The attack at every party, in place of a name the usual budget of the one named."""
        return {party: resolve_attack(given) for party, given in self.training_attacks.items()}

    @property
    def poisonings(self) -> tuple[Poisoning, ...]:
        """What misbehaving clients do, one after another."""
        return check_poisonings(self.poisoning)

    @property
    def off_protocol(self) -> str | None:
        """The party or poisoning that does not follow the protocol inside a step, None where all do.

        Whoever bends an upload only processes what is there; inside a step, one row may be made to show in another's.
        """
        active = (party for party, attack in self.resolved_attacks.items() if attack.active)
        inside = (type(one).__name__ for one in self.poisonings if type(one).enter is not Poisoning.enter)
        return next(active, None) or next(inside, None)

    def due(self, number: int, rounds: int) -> list[str]:
        """Return the parties whose attack is scored after round `number` (from 0) of `rounds`."""
        return [party for party, every in self.evaluate_every.items() if _is_due(every, number, rounds)]

    def describe(self) -> dict[str, dict[str, Any] | None]:
        """Return as plain values what a resumed run must have too, None where there is none."""
        return {
            "training_attacks": {party: repr(attack) for party, attack in self.resolved_attacks.items()} or None,
            "evaluate_every": dict(self.evaluate_every) or None,
            "detectors": {name: repr(detector) for name, detector in self.detectors.items()} or None,
            "poisoning": {str(i): repr(one) for i, one in enumerate(self.poisonings)} or None,
        }

    def user_objects(self) -> dict[str, object]:
        """Return what may hold code of the user's, by its place."""
        return {
            **{f"training attack at {party!r}": attack for party, attack in self.resolved_attacks.items()},
            **{f"detector at {name!r}": detector for name, detector in self.detectors.items()},
            **{f"poisoning {type(one).__name__} ({i})": one for i, one in enumerate(self.poisonings)},
        }


@dataclass(frozen=True)
class Evaluation:
    """What of a run is measured, and how often.

    `every`: validation and test rows are scored after every so many rounds, and after the last. `across_clients`:
    whether every client's model is also scored on the others' rows (`Run.across`). `delta`: in (0, 1), at which the
    privacy ledger states epsilon (default: that of a target epsilon, or 1 / (10 rows)). `speeds`: machines and links;
    with them a simulated clock runs beside training. `keep`: whose model the run answers with when training ends, that
    of the "last" round or of the "best", the scored round with the best metric on all clients' validation rows. Raises
    `InvalidInput` for numbers out of range.
    """

    every: int = field(default=1, metadata=require_count("evaluation every", low=1))
    across_clients: bool = False
    delta: float | None = field(
        default=None, metadata=require_number("delta", low=0.0, high=1.0, open_low=True, open_high=True)
    )
    speeds: Speeds | None = None
    keep: str = field(default="last", metadata=require_name("evaluation keep", ("last", "best")))

    def __post_init__(self) -> None:
        """Refuse numbers out of their range, and a switch that is none."""
        check_fields(self)
        check_kind("across_clients", self.across_clients, bool, "True or False")
        check_kind("speeds", self.speeds, (Speeds, type(None)), "splitfed.Speeds(...)")

    def due(self, number: int, rounds: int) -> bool:
        """Return whether round `number` (from 0) of `rounds` is scored."""
        return _is_due(self.every, number, rounds)


@dataclass(frozen=True)
class Logging:
    """What is kept of a run, and how its messages are carried.

    `folder`: where metrics and a checkpoint of every round go; with `resume` the run goes on from the newest one, to
    the same bits as if it had never stopped; code, data and settings that have changed are refused, but an edited value
    in a closure is not noticed. `record`: whose view to keep during training. `link`: "memory", or
    "bytes", which sends every message as bytes with a checked header, to the same result.
    `progress(round, rounds, metrics)` is called after every round; `callbacks` at more moments, see
    `splitfed.Callback`. Raises `InvalidInput` for an unknown link, for what is no callback, and for
    `resume` without a folder.
    """

    folder: str | Path | None = None
    resume: bool = False
    record: Recording | None = None
    link: str = field(default="memory", metadata=require_name("link", LINKS))
    progress: RoundProgress | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        """Refuse an unknown link, what is no callback, and to resume what has no folder."""
        check_fields(self)
        if self.folder is not None:
            check_path("folder", self.folder)
        check_kind("resume", self.resume, bool, "True or False")
        check_kind("record", self.record, (Recording, type(None)), "splitfed.Recording(...)")
        if not (self.progress is None or takes(self.progress, 3)):
            raise InvalidInput(
                f"progress={short(self.progress)} is not allowed; expected a function of round, rounds and metrics"
            )
        object.__setattr__(self, "callbacks", check_callbacks(self.callbacks))
        if self.resume and self.folder is None:
            raise InvalidInput("resume=True needs the folder of the run to resume")


def _is_due(every: int, number: int, rounds: int) -> bool:
    """Return whether round `number` (from 0) of `rounds` is one of `every` so many, or the last."""
    return (number + 1) % every == 0 or number + 1 == rounds


GROUPS: Mapping[str, type] = {
    "local": LocalUpdate,
    "adversaries": Adversaries,
    "evaluation": Evaluation,
    "logging": Logging,
}
"""Parameter of `train` -> the class of its value."""
