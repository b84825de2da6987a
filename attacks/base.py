"""The contract of an attack: a view and declared knowledge go in, a guess comes out; no label, no ground truth.

The base checks that the run grants what the attack requires, hides everything else from it, draws its random
numbers from the generator it is given, times it, and brings the guess into the range of the data. A subclass
writes `run` only. Scoring happens elsewhere, by somebody who knows the truth.

An attack is code in the same process, not in a sandbox. What is guaranteed is what it is handed: tensors that hold the
numbers which were sent or granted and nothing else, and copies, so that whatever it writes into them changes neither
the run nor the next attack. Python code that looks for more (the stack, the garbage collector, closures) finds it:
read an attack before you run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from splitfed.attacks.gradients.local_training import LocalTraining
from splitfed.attacks.search_space import Choice
from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.messages import View
from splitfed.core.payload import copy_nested
from splitfed.core.random import stream

Releases = Mapping[str, Tensor]
STEPS = ("activation", "gradient", "label", "norm")
"""The kinds of messages that cross in a training step; all others are sent between them."""

Progress = Callable[[int, int], None]


class Phase(StrEnum):
    """When the victims' rows pass the adversary: at inference, in a training step, or long ago, in training itself."""

    INFERENCE = "inference"
    STEP = "a training step"
    TRAINING = "a round of training that was recorded"


class Target(StrEnum):
    """What an attack guesses: the victims' inputs, (victims, *shape), or their labels, as scores (victims, classes).

    For two classes the scores of labels may also be (victims,): the greater, the more likely class 1. MEMBERS: which of
    the candidates were trained on, (candidates,), the greater, the more likely. REPRESENTATIVES: a row for each
    class, (classes, *shape). SHARES: how much of a client's training rows is of each class, (classes,).
    """

    INPUTS = "inputs"
    LABELS = "labels"
    MEMBERS = "members"
    REPRESENTATIVES = "a row that stands for each class"
    SHARES = "the share of each class"


class Needs(StrEnum):
    """What an attack may require of the run, beyond the view itself."""

    RELEASES = "releases"
    GRADIENTS = "gradients at the cut"
    QUERIES = "queries"
    UPSTREAM = "upstream weights"
    AUXILIARY = "auxiliary data"
    AUXILIARY_LABELS = "labels of the auxiliary data"
    UPDATES = "weights before and after local training"
    ATTRIBUTES = "private attributes of the auxiliary data"
    CANDIDATES = "candidates with their labels"
    PREDICTIONS = "predictions of the whole model"
    MODEL = "weights of the whole model"
    IMITATION = "architecture and way of training"
    ARCHITECTURE = "architecture of the upstream segments"
    DOWNSTREAM = "segments of its own from what arrives to a loss on the main labels"
    OWN_INPUTS = "inputs of its own"
    HEAD = "architecture of the head"
    UPLOADS = "what the clients of a federated method send"
    EXTRACTOR = "weights of a client's segments before what it sends class means of"
    INSIDER = "an attack in the training, train(..., adversaries=Adversaries({party: ...}))"


class Imitation(Protocol):
    """A model that the adversary trained as the run's was trained, on rows of its own choice."""

    def predict(self, x: Tensor) -> Tensor:
        """Return the copy's output for `x` (rows, *shape): (rows, outputs)."""
        ...


Imitate = Callable[[Tensor, Tensor, int | None, int | None, int], Imitation]
"""From rows, labels, epochs, batch size (None: as many as the run had) and seed to a trained copy."""


class DefenseStates(Protocol):
    """What defenses that an adversary imitates keep for themselves, such as a decoder that they train against."""

    def learn(self) -> None:
        """Let each take its own step, as after a training step of the party that has it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what they have learnt."""
        ...

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go back to `states`."""
        ...


class Clone(Protocol):
    """The upstream function as the architecture says, with weights of the adversary's own making."""

    def __call__(self, x: Tensor) -> Releases:
        """Return what would arrive at the adversary for `x` (rows, *shape), with every defense at its mean."""
        ...

    def sample(self, x: Tensor, number: int | None = None) -> Releases:
        """Return the same with defenses that draw afresh; draw `number` is always the same one."""
        ...

    def in_training(
        self, x: Tensor, number: int | None = None, epoch: int | None = None
    ) -> tuple[Releases, Tensor, float]:
        """Return `sample(x, number)`, what the defenses add to the client's loss then, and the weight of its task.

        The term is a scalar whose gradient is right; its value is not where a defense gives its penalty by the gradient
        alone. `epoch`: of the run, for defenses that change over it; the run's last one where it is not given.
        """
        ...

    @property
    def defenses(self) -> DefenseStates:
        """Return what the imitated defenses keep and learn."""
        ...

    @property
    def least_rows(self) -> int:
        """Return the smallest batch that `in_training` can take."""
        ...

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Return its segments by name."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its weights."""
        ...


class TrainedAttack(Protocol):
    """Somebody who was there in training, as `plan` said, and can turn a view into a guess."""

    @property
    def plan(self) -> Attack:
        """What it was sent to do."""
        ...

    def guess(self, view: View, target: Target) -> Tensor:
        """Return a guess of `target`, a row a victim."""
        ...

    def copy(self) -> TrainedAttack:
        """Return somebody who has learnt the same, for an attack that may change what it is given."""
        ...


@dataclass(frozen=True)
class Knowledge:
    """What the adversary knows beside its view; a field is None where the threat model does not grant it.

    `shape`, `value_range`: of one row of the data; `classes`: how many there are, None for regression (both public).
    `auxiliary`: (rows, *shape), no victim among them, with `auxiliary_labels` (rows,).
    All tensors are, and a guess may be, on `device`.
    `query(x)`: what arrives at the adversary when the victims' own parties process x, defenses included.
    `upstream(x)`: the same as a differentiable function, from the upstream weights, with every defense at its mean;
    `sample(x)`: with defenses that draw afresh, on the adversary's own machine; both come with the weights.
    `architecture(seed)`: the upstream function with weights drawn anew from the seed; nothing of the trained ones.
    `loss(x, releases, y)`: the mean loss of the adversary's own frozen segments on `releases` for labels y (rows,);
    x is the rows that the releases came from, for segments that read data of the adversary's own.
    `insider`: the intruder that the adversary had in the training.
    `attributes`: label set -> (labels of the auxiliary rows, how many classes or None), the main one left out.
    `candidates`: rows that were or were not trained on, (n, *shape), in the order of the view, `candidate_labels` (n,).
    `predict(x)`: the first head's output through the victims' own parties, (rows, outputs); black box.
    `model(x)`: the same as a differentiable function, from all weights, with every defense at its mean.
    `local`: how the client trains between the weights it is sent and those it sends back.
    `own`: what the adversary itself feeds for the victims' rows, input -> (victims, ...); empty if it has no raw data.
    `own_auxiliary`: the same of the auxiliary rows, input -> (rows, ...).
    `places`: input of the topology -> (k,) where in a flattened row the numbers stand that it reads (public).
    `origins`: value that may arrive -> the inputs that it is computed from (public).
    `head()`: from what the adversary sends to the loss's logits: the architecture, with fresh weights at every call.
    `hints`: class -> positions of victims (count,) that are known to belong to it.
    `extractor(x)`: a differentiable function from the client's weights after training: kind of message -> what of rows
    x (n, *shape) a message of that kind holds class means of, (n, ...), in evaluation mode.
    `imitate`: trains a copy from fresh weights as the run did: topology, defenses and optimizers.
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
    insider: TrainedAttack | None = None
    attributes: Mapping[str, tuple[Tensor, int | None]] = field(default_factory=dict)
    candidates: Tensor | None = None
    candidate_labels: Tensor | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    model: Callable[[Tensor], Tensor] | None = None
    imitate: Imitate | None = None
    extractor: Callable[[Tensor], Releases] | None = None
    architecture: Callable[[int], Clone] | None = None
    loss: Callable[[Tensor, Releases, Tensor], Tensor] | None = None
    local: LocalTraining | None = None
    own: Mapping[str, Tensor] | None = None
    head: Callable[[], nn.Module] | None = None
    hints: Mapping[int, Tensor] = field(default_factory=dict)
    own_auxiliary: Mapping[str, Tensor] | None = None
    places: Mapping[str, Tensor] = field(default_factory=dict)
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def only(self, needs: frozenset[Needs]) -> Knowledge:
        """Return this knowledge without anything that `needs` does not name."""
        return replace(
            self,
            auxiliary=self.auxiliary if Needs.AUXILIARY in needs else None,
            auxiliary_labels=self.auxiliary_labels if Needs.AUXILIARY_LABELS in needs else None,
            query=self.query if Needs.QUERIES in needs else None,
            upstream=self.upstream if Needs.UPSTREAM in needs else None,
            sample=self.sample if Needs.UPSTREAM in needs else None,
            insider=self.insider if Needs.INSIDER in needs else None,
            local=self.local if Needs.UPDATES in needs else None,
            attributes=self.attributes if Needs.ATTRIBUTES in needs else {},
            candidates=self.candidates if Needs.CANDIDATES in needs else None,
            candidate_labels=self.candidate_labels if Needs.CANDIDATES in needs else None,
            predict=self.predict if Needs.PREDICTIONS in needs else None,
            model=self.model if Needs.MODEL in needs else None,
            imitate=self.imitate if Needs.IMITATION in needs else None,
            extractor=self.extractor if Needs.EXTRACTOR in needs else None,
            architecture=self.architecture if Needs.ARCHITECTURE in needs else None,
            loss=self.loss if Needs.DOWNSTREAM in needs else None,
            own=self.own if Needs.OWN_INPUTS in needs else None,
            own_auxiliary=self.own_auxiliary if needs >= {Needs.OWN_INPUTS, Needs.AUXILIARY_LABELS} else None,
            head=self.head if Needs.HEAD in needs else None,
        )

    def copy(self) -> Knowledge:
        """Return this knowledge with tensors and modules of its own, for an attack that may change what it is given."""
        own: dict[str, Any] = {name: copy_nested(getattr(self, name)) for name in _HELD}
        insider = None if self.insider is None else self.insider.copy()
        return replace(self, **own, insider=insider, local=None if self.local is None else self.local.copy())

    def missing(self, needs: frozenset[Needs], view: View) -> list[str]:
        """Return what `needs` names and neither this knowledge nor the view holds."""
        held = {
            Needs.RELEASES: bool(view.select(kind="activation").messages),
            Needs.GRADIENTS: bool(view.select(kind="gradient").messages),
            Needs.QUERIES: self.query is not None,
            Needs.UPSTREAM: self.upstream is not None,
            Needs.INSIDER: self.insider is not None,
            Needs.AUXILIARY: self.auxiliary is not None and len(self.auxiliary) > 0,
            Needs.AUXILIARY_LABELS: self.auxiliary_labels is not None and len(self.auxiliary_labels) > 0,
            Needs.UPDATES: self.local is not None and bool(view.select(kind="weights").messages),
            Needs.ATTRIBUTES: bool(self.attributes),
            Needs.CANDIDATES: self.candidates is not None,
            Needs.PREDICTIONS: self.predict is not None,
            Needs.MODEL: self.model is not None,
            Needs.IMITATION: self.imitate is not None,
            Needs.UPLOADS: any(m.receiver == view.party and m.kind not in STEPS for m in view.messages),
            Needs.EXTRACTOR: self.extractor is not None,
            Needs.ARCHITECTURE: self.architecture is not None,
            Needs.DOWNSTREAM: self.loss is not None,
            Needs.OWN_INPUTS: self.own is not None,
            Needs.HEAD: self.head is not None,
        }
        return [str(need) for need in Needs if need in needs and not held[need]]


# What of `Knowledge` holds tensors; what it can call returns new ones.
_HELD = (
    *("auxiliary", "auxiliary_labels", "attributes", "candidates", "candidate_labels"),
    *("own", "own_auxiliary", "hints", "places", "origins"),
)


class GuessAndClone(NamedTuple):
    """A guess, (victims, ...), and the upstream function that an attack stole on the way."""

    guess: Tensor
    clone: Clone


@dataclass(frozen=True)
class Outcome:
    """A guess, (victims, ...), the wall-clock seconds it took, and the stolen upstream function if there is one."""

    guess: Tensor
    seconds: float
    clone: Clone | None = None


@dataclass(frozen=True)
class Attack:
    """Base of all attacks: frozen parameters, one method to write.

    `target` and `phase` say what is guessed and when the victims pass; `requires` names what must be granted, `reads`
    the kinds of messages of a federated method, of which one at least must be sent (empty: it reads none);
    `presets` maps "fast" (seconds on a laptop, a quick look) and "paper" (the authors' settings) to parameters, and
    "default", where it was measured, to the budget at which twice the time gains next to nothing. `space` says among
    which values a parameter may be tuned, on the attacker's own rows.
    """

    target: ClassVar[Target] = Target.INPUTS
    reads: ClassVar[tuple[str, ...]] = ()
    phase: ClassVar[Phase] = Phase.INFERENCE
    requires: ClassVar[frozenset[Needs]] = frozenset()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fast": {}, "paper": {}}
    space: ClassVar[Mapping[str, Choice]] = {}

    @property
    def label_set(self) -> str | None:
        """Which label set of the data an attack on labels guesses; None is the main one."""
        return None

    @classmethod
    def usual(cls) -> str:
        """Return the preset that is meant where none is named: "default", or "fast" where there is no such budget."""
        return "default" if "default" in cls.presets else "fast"

    @classmethod
    def preset(cls, name: str | None = None, **changes: Any) -> Self:
        """Return the attack with the parameters of a preset (None: the usual one), some of them changed."""
        name = cls.usual() if name is None else name
        if name not in cls.presets:
            raise unknown(f"preset of {cls.__name__}", name, cls.presets)
        return cls(**{**cls.presets[name], **changes})

    @classmethod
    def quick_look(cls, preset: str) -> bool:
        """Tell whether `preset` is "fast", and other than the authors' settings: with more work it may find more."""
        return preset == "fast" and cls.presets["fast"] != cls.presets["paper"]

    @property
    def quick(self) -> bool:
        """Whether all that the preset "fast" sets is as it says, a quick look."""
        return self.quick_look("fast") and all(getattr(self, k) == v for k, v in self.presets["fast"].items())

    def asks(self, classes: int | None) -> Mapping[int, int]:
        """Return how many victims of which class the adversary must know beforehand: class -> count; none."""
        return {}

    def run(
        self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress
    ) -> Tensor | GuessAndClone:
        """Return the guess, a row a victim, alone or with a clone; call `progress(done, all)` now and then."""
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
            granted = knowledge.only(self.requires).copy()
            found = self.run(view.copy(), granted, generator, progress or (lambda done, total: None))
        guess, clone = found if isinstance(found, GuessAndClone) else (found, None)
        guess = guess.detach().cpu()
        if self.target is Target.INPUTS and knowledge.value_range is not None:
            guess = guess.clamp(*knowledge.value_range)
        return Outcome(guess, time.perf_counter() - started, clone)
