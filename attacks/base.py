"""The contract of an attack: a view and declared knowledge go in, a prediction comes out; no label, no ground truth.

The base checks that the run grants what the attack requires, hides everything else from it, draws its random
numbers from the generator it is given, times it, and brings the prediction into the range of the data. A subclass
writes `run` only. Scoring happens elsewhere, by somebody who knows the truth.

An attack is code in the same process, not in a sandbox. What is guaranteed is what it is handed: tensors that hold the
numbers which were sent or granted and nothing else, and copies, so that whatever it writes into them changes neither
the run nor the next attack. Python code that looks for more (the stack, the garbage collector, closures) finds it:
read an attack before you run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from splitfed.attacks.budgets import Budgets, quick_look, usual_budget
from splitfed.attacks.knowledge import Knowledge, unwrap
from splitfed.attacks.local_models import Clone, DefenseStates, Imitate, Imitation, Releases, TrainedAttack
from splitfed.attacks.search_space import Space
from splitfed.attacks.selection import Selection
from splitfed.attacks.threat_model import BACKWARD, FORWARD, IN_TRAINING, STEPS, DefenseEffect, Needs, Phase, Target
from splitfed.core.errors import InvalidInput, check_fields, check_names
from splitfed.core.messages import View
from splitfed.core.random import stream

__all__ = [
    "BACKWARD",
    "FORWARD",
    "IN_TRAINING",
    "STEPS",
    "AsksForHints",
    "Attack",
    "Budgets",
    "Clone",
    "DefenseEffect",
    "DefenseStates",
    "Imitate",
    "Imitation",
    "Knowledge",
    "KnowsFewLabels",
    "NamesClasses",
    "Needs",
    "Outcome",
    "Phase",
    "PredictionAndBound",
    "PredictionAndClone",
    "PredictionAndSelection",
    "PredictsLabelSet",
    "Progress",
    "Releases",
    "StatesStepRows",
    "Target",
    "TrainedAttack",
    "UsesFurther",
    "hints_of",
    "label_set_of",
    "quick_look",
    "unwrap",
]

Progress = Callable[[int, int], None]


class PredictionAndClone(NamedTuple):
    """A prediction, (victims, ...), and the upstream function that an attack stole on the way."""

    prediction: Tensor
    clone: Clone


class PredictionAndBound(NamedTuple):
    """A prediction, (victims, ...), and the largest error of a number of each row, (victims,); infinity: unknown."""

    prediction: Tensor
    error_bound: Tensor


class PredictionAndSelection(NamedTuple):
    """A prediction, (victims, ...), how it was chosen among several, and the attack that made it, where one did."""

    prediction: Tensor
    selection: Selection
    member: Attack | None = None


@runtime_checkable
class UsesFurther(Protocol):
    """An attack that is shown more than it requires, where that is granted."""

    @property
    def uses(self) -> frozenset[Needs]:
        """What it is shown where it is granted."""
        ...


@runtime_checkable
class StatesStepRows(Protocol):
    """An attack that says how many victims pass in one training step."""

    @property
    def step_rows(self) -> int:
        """Victims in a step, the last one has what is left; 0: as many as the run trained on in one."""
        ...


@runtime_checkable
class AsksForHints(Protocol):
    """An attack whose adversary must know the labels of some victims beforehand."""

    def asks(self, classes: int | None) -> Mapping[int, int]:
        """Return how many victims of which class must be known: class -> count."""
        ...


@runtime_checkable
class PredictsLabelSet(Protocol):
    """An attack on labels that predicts another label set of the data than the main one."""

    @property
    def label_set(self) -> str | None:
        """Which one; None is the main one."""
        ...


@runtime_checkable
class NamesClasses(Protocol):
    """An attack on labels that may tell classes apart without knowing what they are called."""

    @property
    def names_classes(self) -> bool:
        """Whether it knows: else it is also scored by the best assignment of its classes to the true ones."""
        ...


@runtime_checkable
class KnowsFewLabels(Protocol):
    """An attack whose adversary knows the labels of some auxiliary rows alone."""

    @property
    def labelled(self) -> int:
        """Of how many rows of each class."""
        ...


@dataclass(frozen=True)
class Outcome:
    """A prediction, (victims, ...), the wall-clock seconds it took, and the stolen upstream function, if any.

    `error_bound`: the largest error of a number of each row that the attack vouches for, (victims,), if it does;
    `selection`: how an attack that chooses among several has chosen; `member`: the attack that it chose, where that may
    adapt to other defenses than itself (`splitfed.threats.adaptation`).
    """

    prediction: Tensor
    seconds: float
    clone: Clone | None = None
    error_bound: Tensor | None = None
    selection: Selection | None = None
    member: Attack | None = None


@dataclass(frozen=True)
class Attack:
    """Base of all attacks: frozen parameters, one method to write.

    `target` and `phase` say what is predicted and when the victims pass; `requires` names what must be granted, `reads`
    the kinds of messages of a federated method, of which one at least must be sent (empty: it reads none);
    `budgets` maps "fast" (seconds on a laptop, a quick look) and "paper" (the authors' settings) to parameters, and
    "default", where it was measured, to the budget at which twice the time gains next to nothing. `space` says among
    which values a parameter may be tuned, on the attacker's own rows. `trains_decoder`: whether a network that
    was trained on such rows makes the prediction, which more training may improve.
    """

    target: ClassVar[Target] = Target.INPUTS
    reads: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[Phase] = Phase.INFERENCE
    requires: ClassVar[frozenset[Needs]] = frozenset()
    budgets: ClassVar[Budgets] = {"fast": {}, "paper": {}}
    space: ClassVar[Space] = {}
    trains_decoder: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse parameters that are not what their fields require."""
        check_fields(self)

    @property
    def adapts_to(self) -> frozenset[DefenseEffect] | None:
        """The effects of defenses that what it learns from, or models, has as well; None: it states nothing.

        What that means, and which of them matter to an attack at all, is said in `splitfed.threats.adaptation`.
        """
        return None

    @classmethod
    def usual(cls) -> str:
        """Return the budget that is meant where none is named: "default", or "fast" where there is no such budget."""
        return usual_budget(cls.budgets)

    @classmethod
    def with_budget(cls, name: str | None = None, **changes: Any) -> Self:
        """Return the attack with the parameters of a budget (None: the usual one), some of them changed."""
        name = cls.usual() if name is None else name
        check_names(f"budget of {cls.__name__}", cls.budgets, name)
        return cls(**{**cls.budgets[name], **changes})

    @property
    def quick(self) -> bool:
        """Whether all that the budget "fast" sets is as it says, a quick look."""
        return quick_look(self.budgets, "fast") and all(getattr(self, k) == v for k, v in self.budgets["fast"].items())

    def run(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress
    ) -> Tensor | PredictionAndClone | PredictionAndBound | PredictionAndSelection:
        """Return the prediction, a row a victim, alone, or with a clone, a bound of its error or how it was chosen.

        It calls `progress(done, all)` now and then.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define run(view, knowledge, generator, progress)")

    def __call__(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress | None = None
    ) -> Outcome:
        """Check requirements, run, time; raises `InvalidInput` that names what is missing."""
        self._check(view, knowledge)
        started = time.perf_counter()
        with torch.enable_grad(), stream(int(torch.randint(2**62, (), generator=generator)), knowledge.device):
            found = self.run(*self._copy(view, knowledge), generator, progress or (lambda done, total: None))
        prediction = (found if isinstance(found, Tensor) else found.prediction).detach().cpu()
        clone = found.clone if isinstance(found, PredictionAndClone) else None
        bound = found.error_bound.detach().cpu() if isinstance(found, PredictionAndBound) else None
        selection, member = (
            (found.selection, found.member) if isinstance(found, PredictionAndSelection) else (None, None)
        )
        if self.target is Target.INPUTS and knowledge.value_range is not None:
            prediction = prediction.clamp(*knowledge.value_range)
        return Outcome(prediction, time.perf_counter() - started, clone, bound, selection, member)

    def _check(self, view: View, knowledge: Knowledge) -> None:
        if missing := knowledge.missing(self.requires, view):
            raise InvalidInput(f"{type(self).__name__} needs {', '.join(missing)}; this run does not grant that")

    def _copy(self, view: View, knowledge: Knowledge) -> tuple[View, Knowledge]:
        further = self.uses if isinstance(self, UsesFurther) else frozenset()
        return view.copy(), knowledge.only(self.requires | further).copy()


def prepare_attack(attack: Attack, view: View, knowledge: Knowledge) -> tuple[View, Knowledge]:
    """Return what `attack` is shown of `view` and `knowledge`, as a call hands it over; raises `InvalidInput` as it."""
    attack._check(view, knowledge)
    return attack._copy(view, knowledge)


def check_rows(attack: Attack, discrete: bool, data: str, unscaled: bool = False) -> None:
    """Refuse an attack that predicts rows of another kind than the data set called `data` has.

    `discrete`: whether its rows are whole numbers that stand for things, such as token ids. `unscaled`: whether they
    are images without a value range.
    """
    if unscaled and attack.target in (Target.INPUTS, Target.REPRESENTATIVES):
        raise InvalidInput(
            f"{data} holds images without a value range, so no score has a scale: say it where the data set is made, "
            "from_arrays(..., value_range=(0, 1))"
        )
    if discrete and attack.target in (Target.INPUTS, Target.REPRESENTATIVES):
        raise InvalidInput(
            f"{type(attack).__name__} reconstructs real numbers, and rows of {data} are whole ones, such as token ids: "
            "take token_decoder"
        )
    if not discrete and attack.target is Target.TOKENS:
        raise InvalidInput(
            f"{type(attack).__name__} reconstructs token ids, and rows of {data} are real numbers: take inverse_network"
        )


def hints_of(attack: Attack, classes: int | None) -> Mapping[int, int]:
    """Return how many victims of which class the adversary must know for `attack`: class -> count; mostly none."""
    return attack.asks(classes) if isinstance(attack, AsksForHints) else {}


def label_set_of(attack: Attack) -> str | None:
    """Return which label set of the data `attack` predicts, if it predicts labels; None is the main one."""
    return attack.label_set if isinstance(attack, PredictsLabelSet) else None
