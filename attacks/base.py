"""The contract of an attack: it maps a view and declared knowledge to a prediction, without access to the ground truth.

The base class checks that the run grants what the attack requires, hides all other knowledge, passes the random
generator, measures the time, and clamps the prediction to the value range of the data. A subclass writes `run` only.
Scoring is done by `splitfed.threats`, which knows the truth.

An attack is code in the same process, not in a sandbox. It is handed tensors that hold only what was sent or granted,
and copies, so that writing into them changes neither the run nor the next attack. Python code that searches further
(the stack, the garbage collector, closures) is not stopped: read an attack before you run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from splitfed.attacks.budgets import Budgets, quick_look
from splitfed.attacks.knowledge import Knowledge, check_classes, unwrap
from splitfed.attacks.local_models import Clone, DefenseStates, Imitate, Imitation, Releases, TrainedAttack
from splitfed.attacks.search_space import Space, Span
from splitfed.attacks.selection import Selection
from splitfed.attacks.threat_model import BACKWARD, FORWARD, IN_TRAINING, STEPS, DefenseEffect, Needs, Phase, Target
from splitfed.core.argument_kinds import check_overrides
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
    "PredictsLabelSet",
    "Progress",
    "Releases",
    "Space",
    "Span",
    "StatesStepRows",
    "Target",
    "TrainedAttack",
    "UsesFurther",
    "check_classes",
    "hints_of",
    "label_set_of",
    "quick_look",
    "unwrap",
]

Progress = Callable[[int, int], None]


@runtime_checkable
class UsesFurther(Protocol):
    """An attack that uses optional knowledge beyond what it requires."""

    @property
    def uses(self) -> frozenset[Needs]:
        """Needs that are not required, but shown to the attack where the run grants them."""
        ...


@runtime_checkable
class StatesStepRows(Protocol):
    """An attack that states how many victims pass in one training step."""

    @property
    def step_rows(self) -> int:
        """Number of victims in a step, the last step having the remaining ones; 0: the batch size of the run."""
        ...


@runtime_checkable
class AsksForHints(Protocol):
    """An attack whose adversary must know the labels of some victims in advance."""

    def asks(self, classes: int | None) -> Mapping[int, int]:
        """Return how many victims of each class must be known: class -> count."""
        ...


@runtime_checkable
class PredictsLabelSet(Protocol):
    """An attack that predicts a label set of the data other than the main one."""

    @property
    def label_set(self) -> str | None:
        """Name of the predicted label set; None: the main one."""
        ...


@runtime_checkable
class NamesClasses(Protocol):
    """An attack on labels that may cluster the victims without knowing which cluster is which class."""

    @property
    def names_classes(self) -> bool:
        """Whether clusters are matched to classes; if not, the score also has the accuracy of the best assignment."""
        ...


@runtime_checkable
class KnowsFewLabels(Protocol):
    """An attack whose adversary knows the labels of only a few auxiliary rows."""

    @property
    def labelled(self) -> int:
        """Number of auxiliary rows of each class whose labels are known."""
        ...


@dataclass(frozen=True)
class Outcome:
    """A prediction, (victims, ...), the wall-clock seconds it took, and what an attack may return beside it.

    `clone`: of the upstream segments, trained by the attack; `error_bound`: (victims,) largest absolute error in each
    row, infinity where unknown; `selection`: how an attack that chooses among several has chosen; `member`: the chosen
    attack if it is a single one, which may adapt to other defenses than the attack that chose it
    (`splitfed.threats.adaptation`). The base class sets `seconds`.
    """

    prediction: Tensor
    seconds: float = 0.0
    clone: Clone | None = None
    error_bound: Tensor | None = None
    selection: Selection | None = None
    member: Attack | None = None


@dataclass(frozen=True)
class Attack:
    """Base of all attacks: a frozen dataclass of parameters with one method to write, `run`.

    `target` and `phase` state what is predicted and when the victims pass; `requires` names what must be granted;
    `reads` lists kinds of messages of a federated method, at least one of which must be sent (empty: none are read).
    `budgets` maps "quick" (seconds on a laptop, a quick look) and "full" (the authors' settings) to parameters, and
    "standard", where measured, to the budget at which doubling the time gains next to nothing. `space` states the
    values among which a parameter may be tuned on the attacker's own rows. `trains_decoder`: whether the prediction
    comes from a network trained on such rows, which more training may improve.
    """

    target: ClassVar[Target] = Target.INPUTS
    reads: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[Phase] = Phase.INFERENCE
    requires: ClassVar[frozenset[Needs]] = frozenset()
    budgets: ClassVar[Budgets] = {"quick": {}, "full": {}}
    space: ClassVar[Space] = {}
    trains_decoder: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise `InvalidInput` for a method that overrides one of this class and takes other arguments."""
        super().__init_subclass__(**options)
        check_overrides(cls, Attack)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters that violate the requirements in their fields' metadata."""
        check_fields(self)

    @property
    def adapts_to(self) -> frozenset[DefenseEffect] | None:
        """Effects of defenses that the attack adapts to; None: undeclared. Defined in `splitfed.threats.adaptation`."""
        return None

    @classmethod
    def usual(cls) -> str:
        """Return the name of the default budget: "standard" if the attack has it, else "quick"."""
        return "standard" if "standard" in cls.budgets else "quick"

    @classmethod
    def with_budget(cls, name: str | None = None, **changes: Any) -> Self:
        """Return the attack with the parameters of a budget (None: the usual one), overridden by `changes`."""
        name = cls.usual() if name is None else name
        check_names(f"budget of {cls.__name__}", cls.budgets, name)
        return cls(**{**cls.budgets[name], **changes})

    @property
    def quick(self) -> bool:
        """Whether every parameter set by the budget "quick" has its value from that budget."""
        least = self.budgets["quick"]
        return quick_look(self.budgets, "quick") and all(getattr(self, name) == value for name, value in least.items())

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor | Outcome:
        """Return the prediction, one row a victim; call `progress(done, total)` from time to time.

        With a clone, a bound of the error or a selection it is returned as an `Outcome`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define run(view, knowledge, generator, progress)")

    def __call__(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress | None = None
    ) -> Outcome:
        """Check the requirements, run the attack and return its timed outcome.

        Raises `InvalidInput` that names the missing requirements.
        """
        self._check(view, knowledge)
        started = time.perf_counter()
        with torch.enable_grad(), stream(int(torch.randint(2**62, (), generator=generator)), knowledge.device):
            result = self.run(*self._copy(view, knowledge), generator, progress or (lambda done, total: None))
        found = Outcome(result) if isinstance(result, Tensor) else result
        prediction = found.prediction.detach().cpu()
        bound = None if found.error_bound is None else found.error_bound.detach().cpu()
        if self.target is Target.INPUTS and knowledge.value_range is not None:
            prediction = prediction.clamp(*knowledge.value_range)
        return replace(found, prediction=prediction, seconds=time.perf_counter() - started, error_bound=bound)

    def _check(self, view: View, knowledge: Knowledge) -> None:
        if missing := knowledge.missing(self.requires, view):
            raise InvalidInput(f"{type(self).__name__} needs {', '.join(missing)}; this run does not grant that")

    def _copy(self, view: View, knowledge: Knowledge) -> tuple[View, Knowledge]:
        further = self.uses if isinstance(self, UsesFurther) else frozenset()
        return view.copy(), knowledge.only(self.requires | further).copy()


def prepare_attack(attack: Attack, view: View, knowledge: Knowledge) -> tuple[View, Knowledge]:
    """Return copies of the parts of `view` and `knowledge` that `attack` is given.

    Raises `InvalidInput` if any is missing.
    """
    attack._check(view, knowledge)
    return attack._copy(view, knowledge)


def check_rows(attack: Attack, discrete: bool, data: str, unscaled: bool = False) -> None:
    """Raise `InvalidInput` for an attack that predicts another kind of rows than the data set called `data` has.

    `discrete`: whether its rows are categorical whole numbers, such as token ids. `unscaled`: whether its rows are
    images without a value range.
    """
    if unscaled and attack.target in (Target.INPUTS, Target.REPRESENTATIVES):
        raise InvalidInput(
            f"{data} holds images without a value range, which scores need: pass it where the data set is built, "
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
    """Return how many victims of each class the adversary must know for `attack`: class -> count; empty for most."""
    return attack.asks(classes) if isinstance(attack, AsksForHints) else {}


def label_set_of(attack: Attack) -> str | None:
    """Return the name of the label set that `attack` predicts; None: the main one, or it predicts no labels."""
    return attack.label_set if isinstance(attack, PredictsLabelSet) else None
