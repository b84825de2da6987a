"""The contract of a defense: a frozen value that acts on what leaves a party at an edge, or on its loss.

Every method is optional; the defaults do nothing. A step asks a defense for what it has: see `overrides`. The
algorithms stand in `splitfed.defenses`, one a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.privacy_events import Event
from splitfed.core.probe import Facts
from splitfed.core.random import generator, wide_generator
from splitfed.core.tasks import Task
from splitfed.core.topology import Topology
from splitfed.old_names import adopt


@dataclass(frozen=True)
class DefenseSite:
    """Where a defense starts to work: one party and one edge.

    `shapes`: of what leaves on the edge, `inputs`: of the party's raw inputs, both value -> shape of a row. `device`:
    where the party computes. `seed`: of all that the defense draws to begin with.
    """

    party: str
    edge: str
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, tuple[int, ...]]
    seed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class Context:
    """What a defense may know: what its own party holds at this step, and nothing of any other.

    `inputs`: the party's raw inputs of this batch (value -> tensor), empty where it owns none. `labels`: its labels
    of this batch by head, likewise. `state`: what `Defense.start` returned for this party and edge. `module`: the
    party's own segment that the edge leaves, or that its gradient comes from; None for whoever imitates the party.
    `counts_as`: the epoch of training that a rehearsed step stands for; None: the stamp says it. `arrived`: what the
    party has received in this batch and not sent back yet, value -> (batch, ...).
    """

    party: str
    edge: str
    stamp: Stamp
    seed: int
    position: int
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    state: Any = None
    module: nn.Module | None = None
    counts_as: int | None = None
    arrived: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch of training, counted from 0 over the whole run."""
        return self.stamp.epoch if self.counts_as is None else self.counts_as

    def generator(self, value: str, device: torch.device) -> torch.Generator:
        """Return the random numbers of this defense, party, edge, `value`, phase, part, epoch and step."""
        return generator(self.seed, *self._words(value), device=device)

    def noise(self, value: str, z: Tensor) -> torch.Generator:
        """Return the same for a mechanism that promises privacy, which is about to release `z` as `value`.

        It has as many states as there may be releases. A step of training happens once in a run. Outside of training
        the same words may come again with other rows or weights, when a run is scored again or loaded and asked again,
        and noise that is used twice cancels in a difference: so there `z` itself is one of the words. Asked again for
        the same, the same is released, and nothing new is told.
        """
        told = () if self.stamp.phase == "train" else (_digest(z),)
        return wide_generator(self.seed, *self._words(value), *told, device=z.device)

    def _words(self, value: str) -> tuple[str | int, ...]:
        return ("defense", self.position, self.party, self.edge, value, *self.stamp)


def _digest(z: Tensor) -> str:
    """Return a digest of the shape, type and bits of `z`."""
    held = z.detach().cpu().contiguous()
    found = hashlib.blake2b(f"{held.dtype}{tuple(held.shape)}".encode(), digest_size=32)
    found.update(held.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Strength(NamedTuple):
    """How strong a defense is set: the `value` of its parameter `name`, in `unit` ("": a plain number).

    `rises`: whether more of it is stronger. Of an epsilon, of bits and of what is kept, less is.
    """

    name: str
    value: float
    unit: str = ""
    rises: bool = True


class PenaltyGradient(NamedTuple):
    """A penalty told by its gradient in `z`, of its shape, where there is a shorter way to it than autograd's.

    For a penalty that reaches the weights through `z` alone.
    """

    gradient: Tensor


@dataclass(frozen=True)
class PrivatizedParty:
    """A party whose weights a defense guards: its segments by name, and the roles it tells the norms of its rows."""

    party: str
    role: str
    modules: Mapping[str, nn.Module]
    seed: int
    position: int
    device: torch.device
    tells: tuple[str, ...] = ()


class GradientPrivatizer(Protocol):
    """Stands between a party's gradients and its optimizer, for the length of a step of one lane.

    `active`: whether this is a step that will move weights. `tells`: the roles that are told the norms of its rows.
    """

    active: bool
    tells: tuple[str, ...]

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        """Start a step of `rows` rows whose losses are summed and divided by `divisor`."""
        ...

    def watching(self, module: nn.Module) -> AbstractContextManager[None]:
        """Take note of what goes through the weights of `module` inside the block."""
        ...

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Send `gradients` back from `roots`: into the `grad` of `leaves`, and kept row by row for the weights."""
        ...

    def total(self) -> float:
        """Return a number that is finite only if the gradients kept are."""
        ...

    def norms(self) -> Tensor:
        """Return the squared norm of every row's own gradient: (rows,)."""
        ...

    def hear(self, norms: Tensor) -> None:
        """Take the squared norms of the same rows' gradients at another party: (rows,)."""
        ...

    def finish(self) -> int:
        """Leave in the `grad` of the weights what their optimizer may see; return how many rows were not finite."""
        ...

    def drop(self) -> None:
        """Forget the step."""
        ...


UPLOAD = "->fed_server"
"""Ends the name of the place where a kind of message of a federated method reaches the fed server."""

Calibrate = Callable[[Callable[[float], Iterable[tuple[Event, int]]], float, float, str], float]


@dataclass(frozen=True)
class Terms:
    """What a run is, for a defense that promises something of all of it; public, as its designer knows it.

    `topologies`, `facts` and `rows` (of training): of each client. `others`: the run's other defenses. `poisson`: how
    batches are drawn, each row with the chance `batch_size` / rows, or in a new order every epoch. `steps` of each
    client over the whole run, and `epochs`: how many of them the row is in that is in most. `obstacle`: what else is in
    the run that nobody could account for; `doubt`: why nothing is promised although it trains. `calibrate(uses,
    epsilon, delta, accountant)` returns the least noise multiplier with which the (event, times) that
    `uses(multiplier)` returns keep to epsilon and delta.
    """

    topologies: tuple[Topology, ...]
    facts: tuple[Facts, ...]
    others: tuple[Defense, ...]
    rows: tuple[int, ...]
    batch_size: int
    poisson: bool
    steps: tuple[int, ...]
    epochs: tuple[int, ...]
    calibrate: Calibrate
    obstacle: str | None = None
    doubt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Defense:
    """Base of all defenses. `on` names the edges it guards; empty means every edge that leaves a data owner.

    A few can also guard what the clients of a federated method send, by its kind: `on=("prototype->fed_server",)`.

    `clients`: which clients have it, by number; empty means all. See `splitfed.core.per_client_defenses` for what some
    can have alone.
    """

    on: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Take a hook under its old name for one release."""
        super().__init_subclass__(**options)
        adopt(cls, {"shield": "privatizer"})

    @property
    def on_uploads(self) -> bool:
        """Whether it can also act on what the clients of a federated method send; see `uploads`."""
        return False

    @property
    def uploads(self) -> tuple[str, ...]:
        """The kinds of messages to the fed server that it guards, named in `on` as `prototype->fed_server`."""
        return tuple(name.removesuffix(UPLOAD) for name in self.on if name.endswith(UPLOAD))

    @property
    def weighs_task(self) -> bool:
        """Whether the task's loss is ever multiplied by anything but one while this defense is on."""
        return False

    def task_weight(self, epoch: int) -> float:
        """Return what the task's loss is multiplied by in `epoch`, if this defense weighs it."""
        return 1.0

    @property
    def least_rows(self) -> int:
        """The smallest batch this defense can work on in training."""
        return 1

    @property
    def strength(self) -> Strength | None:
        """The parameter that says how strong the defense is, for people and plots; None where there is none.

        For a defense that promises privacy it is epsilon, where an epsilon was asked for.
        """
        return None

    @property
    def guarantee(self) -> str:
        """The formal promise, in one line; most defenses have none and say so."""
        return "no formal guarantee"

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return the names of the crossings this defense guards in `topology`, or refuse in one line."""
        crossings = {e.name: e for e in topology.crossings}
        named = tuple(name for name in self.on if not name.endswith(UPLOAD))
        if self.uploads and not self.on_uploads:
            raise InvalidInput(
                f"{type(self).__name__} cannot guard {self.uploads[0] + UPLOAD!r}: it acts on edges of the topology, "
                "not on what the clients of a federated method send"
            )
        for name in named:
            if name not in crossings:
                topology.edge(name)
                raise InvalidInput(f"edge {name!r} stays within one party: nothing crosses there to defend")
        owners = set(topology.inputs.values())
        default = tuple(n for n, e in crossings.items() if topology.role_of(e.source) in owners)
        if not (self.on or default):
            raise InvalidInput(f"{type(self).__name__} has no edge to guard: no data owner sends anything here")
        return named if self.on else default

    def check(self, topology: Topology, facts: Facts) -> None:
        """Refuse, before training, a topology, model or data to which this defense cannot apply."""

    def fit(self, topology: Topology, facts: Facts, seed: int) -> Topology:
        """Return the topology to train: this one, unless the defense puts layers of its own into a segment.

        Such layers belong to the segment: they are trained, averaged, handed over and stored with it.
        """
        return topology

    def heads(self, topology: Topology) -> tuple[str, ...]:
        """Return the heads whose labels this defense changes in training; none."""
        return ()

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return the labels to train on in place of `y` (rows,), once, when their holder takes its rows."""
        return y

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return what the loss compares with in place of `y` (batch,), anew at every training step."""
        return y

    def start(self, place: DefenseSite) -> Any:
        """Return what this defense keeps for one party and edge: anything with `state_dict` and its reverse."""
        return None

    def learn(self, state: Any) -> None:
        """Let what `start` returned take its own step; called after its party's, in training."""

    @property
    def stated_delta(self) -> float | None:
        """The delta at which its user asked for an epsilon of the whole run; None where nobody did."""
        return None

    def guards(self, topology: Topology) -> tuple[str, ...]:
        """Return the roles whose weights this defense guards, in `privatizer`; none."""
        return ()

    def privatizer(self, holder: PrivatizedParty) -> GradientPrivatizer:
        """Return what stands between the gradients of `holder` and its optimizer."""
        raise NotImplementedError

    def norms(self, topology: Topology) -> tuple[tuple[str, str], ...]:
        """Return who tells whom, among the roles it guards, the norms of each row's gradients in a training step."""
        return ()

    def settle(self, terms: Terms) -> Defense:
        """Return this defense with all that depends on the whole run worked out, or refuse the run in one line."""
        return self

    def weight_uses(self, client: int, steps: int, epochs: int) -> tuple[Event, int] | None:
        """Return the event by which the weights it guards cost an example of `client`, and how often it happened.

        `steps`: those in which the client took part; `epochs`: those of them that the row was in that was in most.
        None: no promise.
        """
        return None

    def event(self) -> Event | None:
        """Return what one release, one gradient sent or one row's labels cost in privacy; None: no promise."""
        return None

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of `z`: (batch, ...), attached to its graph; called in every phase.

        `z` itself stays as it is.
        """
        return z

    @property
    def peeks(self) -> bool:
        """Whether `release` looks at more than what it is handed, so that it may not stand behind a private one."""
        return False

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the differentiable release that a white-box adversary would model: the mean over the noise."""
        return self.release(name, z, context)

    def penalty(self, z: Tensor, context: Context) -> Tensor | PenaltyGradient | None:
        """Return a scalar to add to this party's loss; `z`: all that leaves on the edge, (batch, ...)."""
        return None

    @property
    def penalty_reads_layers(self) -> bool:
        """Whether `penalty` reads layers that `fit` puts into the sender's segment, so that only its layout has it."""
        return False

    def penalty_at_receiver(self, context: Context) -> Tensor | None:
        """Return a scalar to add to the loss of the party that has read what came on the edge; `context` is its own."""
        return None

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of the gradient `g`: (batch, ...), of the batch-mean loss."""
        return g

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes that (rows, *shape) of `dtype` takes on the wire as this defense sends it; None: as it is.

        `kind`: "activation" or "gradient". It may depend on nothing else, so that it is known before training.
        """
        return None


def penalty_term(penalty: Tensor | PenaltyGradient | None, z: Tensor) -> Tensor:
    """Return a scalar whose gradient is that of `penalty`, what `Defense.penalty` returned of `z`.

    Its value is the penalty's own, except for a `PenaltyGradient`, which has none.
    """
    if penalty is None:
        return z.new_zeros(())
    return (z * penalty.gradient).sum() if isinstance(penalty, PenaltyGradient) else penalty


def concatenate_values(values: Sequence[Tensor]) -> Tensor:
    """Return all that leaves on an edge as one tensor: itself, or the values side by side, flattened: (batch, ...)."""
    return values[0] if len(values) == 1 else torch.cat([v.reshape(len(v), -1) for v in values], 1)


def overrides(defense: Defense, *methods: str) -> bool:
    """Return whether `defense` has any of these methods from elsewhere than the base, be it on itself alone.

    For the methods that a step may call: those of the base do nothing.
    """
    return any(getattr(getattr(defense, name), "__func__", None) is not getattr(Defense, name) for name in methods)


def packed_bytes(
    defenses: Iterable[Defense], kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> int | None:
    """Return the bytes of one value behind `defenses`, in their order; None where it crosses as it is.

    What a later defense changes is no longer in the short form that an earlier one gave it.
    """
    nbytes: int | None = None
    for defense in defenses:
        size = defense.packed(kind, rows, shape, dtype)
        if size is not None:
            nbytes = size
        elif overrides(defense, "release" if kind == "activation" else "gradient"):
            nbytes = None
    return nbytes
