"""The contract of an attack: a view and declared knowledge go in, a guess comes out; no label, no ground truth.

The base checks that the run grants what the attack requires, hides everything else from it, draws its random
numbers from the generator it is given, times it, and brings the guess into the range of the data. A subclass
writes `run` only. Scoring happens elsewhere, by somebody who knows the truth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from splitfed.errors import InvalidInput, unknown
from splitfed.seeding import stream
from splitfed.view import View

Releases = Mapping[str, Tensor]
Progress = Callable[[int, int], None]


class Phase(StrEnum):
    """When the victims' rows pass the adversary: at inference, or in a training step."""

    INFERENCE = "inference"
    STEP = "a training step"


class Target(StrEnum):
    """What an attack guesses: the victims' inputs, (victims, *shape), or their labels, as scores (victims, classes).

    For two classes the scores of labels may also be (victims,): the greater, the more likely class 1.
    """

    INPUTS = "inputs"
    LABELS = "labels"


class Needs(StrEnum):
    """What an attack may require of the run, beyond the view itself."""

    RELEASES = "releases"
    GRADIENTS = "gradients at the cut"
    QUERIES = "queries"
    UPSTREAM = "upstream weights"
    AUXILIARY = "auxiliary data"
    AUXILIARY_LABELS = "labels of the auxiliary data"


@dataclass(frozen=True)
class Knowledge:
    """What the adversary knows beside its view; a field is None where the threat model does not grant it.

    `shape`, `value_range`: of one row of the data; `classes`: how many there are, None for regression (both public).
    `auxiliary`: (rows, *shape), no victim among them, with `auxiliary_labels` (rows,).
    All tensors are, and a guess may be, on `device`.
    `query(x)`: what arrives at the adversary when the victims' own parties process x, defenses included.
    `upstream(x)`: the same as a differentiable function, from the upstream weights, with every defense at its mean;
    `sample(x)`: with defenses that draw afresh, on the adversary's own machine; both come with the weights.
    """

    shape: tuple[int, ...]
    value_range: tuple[float, float] | None = None
    auxiliary: Tensor | None = None
    query: Callable[[Tensor], Releases] | None = None
    upstream: Callable[[Tensor], Releases] | None = None
    sample: Callable[[Tensor], Releases] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    classes: int | None = None
    auxiliary_labels: Tensor | None = None

    def only(self, needs: frozenset[Needs]) -> Knowledge:
        """Return this knowledge without anything that `needs` does not name."""
        return replace(
            self,
            auxiliary=self.auxiliary if Needs.AUXILIARY in needs else None,
            auxiliary_labels=self.auxiliary_labels if Needs.AUXILIARY_LABELS in needs else None,
            query=self.query if Needs.QUERIES in needs else None,
            upstream=self.upstream if Needs.UPSTREAM in needs else None,
            sample=self.sample if Needs.UPSTREAM in needs else None,
        )

    def missing(self, needs: frozenset[Needs], view: View) -> list[str]:
        """Return what `needs` names and neither this knowledge nor the view holds."""
        held = {
            Needs.RELEASES: bool(view.select(kind="activation").messages),
            Needs.GRADIENTS: bool(view.select(kind="gradient").messages),
            Needs.QUERIES: self.query is not None,
            Needs.UPSTREAM: self.upstream is not None,
            Needs.AUXILIARY: self.auxiliary is not None and len(self.auxiliary) > 0,
            Needs.AUXILIARY_LABELS: self.auxiliary_labels is not None and len(self.auxiliary_labels) > 0,
        }
        return [str(need) for need in Needs if need in needs and not held[need]]


@dataclass(frozen=True)
class Outcome:
    """A guess, (victims, ...), and the wall-clock seconds it took."""

    guess: Tensor
    seconds: float


@dataclass(frozen=True)
class Attack:
    """Base of all attacks: frozen parameters, one method to write.

    `target` and `phase` say what is guessed and when the victims pass; `requires` names what must be granted;
    `presets` maps "fast" (seconds on a laptop) and "paper" (the authors' settings) to parameters.
    """

    target: ClassVar[Target] = Target.INPUTS
    phase: ClassVar[Phase] = Phase.INFERENCE
    requires: ClassVar[frozenset[Needs]] = frozenset()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fast": {}, "paper": {}}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return the attack with the parameters of a preset, some of them changed."""
        if name not in cls.presets:
            raise unknown(f"preset of {cls.__name__}", name, cls.presets)
        return cls(**{**cls.presets[name], **changes})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        """Return the guess, a row a victim; call `progress(done, all)` now and then."""
        raise NotImplementedError

    def __call__(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress | None = None
    ) -> Outcome:
        """Check requirements, run, time; raises `InvalidInput` that names what is missing."""
        missing = knowledge.missing(self.requires, view)
        if missing:
            raise InvalidInput(f"{type(self).__name__} needs {', '.join(missing)}; this run does not grant that")
        started = time.perf_counter()
        with torch.enable_grad(), stream(int(torch.randint(2**62, (), generator=generator)), knowledge.device):
            guess = self.run(view, knowledge.only(self.requires), generator, progress or (lambda done, total: None))
        guess = guess.detach().cpu()
        if self.target is Target.INPUTS and knowledge.value_range is not None:
            guess = guess.clamp(*knowledge.value_range)
        return Outcome(guess, time.perf_counter() - started)
