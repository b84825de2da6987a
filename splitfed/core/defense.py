"""The contract of a defense: a frozen value that acts on what leaves a party at an edge, on its loss or its weights.

`Defense` says where it stands and what it is worth. What it does it declares by inheriting capabilities, one or more:
`ReleaseDefense`, `GradientDefense`, `PenaltyDefense` and so on. A step asks each defense for what it inherits, and a
hook that is defined without its capability is refused where the class is made. The algorithms stand in
`splitfed.defenses`, one a file.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.annealing import numbers_of
from splitfed.core.argument_kinds import check_overrides
from splitfed.core.errors import InvalidInput, check_fields, short
from splitfed.core.nearest_names import nearest_names
from splitfed.core.privacy_events import Event

if TYPE_CHECKING:
    from splitfed.core.defense_context import Context, DefenseSite
    from splitfed.core.gradient_privatizer import GradientPrivatizer, PrivatizedParty
    from splitfed.core.tasks import Task
    from splitfed.core.topology import Topology
    from splitfed.core.topology_facts import TopologyFacts


class Strength(NamedTuple):
    """How strong a defense is set: the `value` of its parameter `name`, in `unit` ("": a plain number).

    `rises`: whether more of it is stronger. Of an epsilon, of bits and of what is kept, less is.
    """

    name: str
    value: float
    unit: str = ""
    rises: bool = True


class PenaltyGradient(NamedTuple):
    """Penalty given as its gradient dP/dz, same shape as z, where there is a shorter way to it than autograd's.

    For a penalty that reaches the weights through `z` alone.
    """

    gradient: Tensor


def as_strength(unit: str = "", rises: bool = True) -> dict[str, Any]:
    """Return the metadata of the field that says how strong a defense is set; `unit` and `rises` as in `Strength`."""
    return {"strength": (unit, rises)}


UPLOAD = "->fed_server"
"""Ends the name of the place where a kind of message of a federated method reaches the aggregation server."""

Calibrate = Callable[[Callable[[float], Iterable[tuple[Event, int]]], float, float, str], float]


@dataclass(frozen=True)
class Terms:
    """What a run is, for a defense that promises something of all of it; public, as its designer knows it.

    `topologies`, `facts` and `rows` (of training): of each client. `others`: the run's other defenses. `poisson`: how
    batches are drawn, each row with the chance `rate`, or in a new order every epoch. `batch_size`: of all clients, the
    largest where they differ; then each client's in `batch_sizes`. `steps` of each client over the whole run. `epochs`:
    the largest number of a client's steps that one of its rows takes part in. `obstacle`: what else is in the run that
    nobody could account for; `doubt`: why nothing is promised although it trains. `calibrate(uses, epsilon, delta,
    accountant)` returns the least noise multiplier with which the (event, times) that `uses(multiplier)` returns keep
    to epsilon and delta.
    """

    topologies: tuple[Topology, ...]
    facts: tuple[TopologyFacts, ...]
    others: tuple[Defense, ...]
    rows: tuple[int, ...]
    batch_size: int
    poisson: bool
    steps: tuple[int, ...]
    epochs: tuple[int, ...]
    calibrate: Calibrate
    obstacle: str | None = None
    doubt: str | None = None
    batch_sizes: tuple[int, ...] = ()

    def rate(self, client: int) -> float:
        """Return the chance, in (0, 1], of a training row of `client` to be in one of its batches drawn at random."""
        size = self.batch_sizes[client] if self.batch_sizes else self.batch_size
        return min(1.0, size / self.rows[client])


@dataclass(frozen=True, kw_only=True)
class Defense:
    """Base of all defenses. `on` names the edges it guards; empty means every edge that leaves a data owner.

    A few can also guard what the clients of a federated method send, by its kind: `on=("prototype->fed_server",)`.

    `clients`: which clients have it, by number; empty means all. See `splitfed.core.per_client_defenses` for what some
    can have alone.
    """

    on: tuple[str, ...] = ()
    clients: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse parameters that are not what their fields require."""
        check_fields(self)
        for name, kind, each in (("on", str, "names of edges"), ("clients", int, "numbers of clients")):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)) or not all(isinstance(one, kind) for one in given):
                raise InvalidInput(f"{name}={short(given)} is not allowed; expected a list of {each}")

    def __init_subclass__(cls, *, capability: bool = False, **options: Any) -> None:
        """Take the public names of a `capability` as hooks; refuse any other class that would not be asked for one."""
        super().__init_subclass__(**options)
        if capability:
            _CAPABILITIES.update((name, cls) for name in vars(cls) if not name.startswith("_"))
            return
        _check_hooks(cls)
        for contract in (kind for kind in cls.__mro__ if kind in (Defense, *_CAPABILITIES.values())):
            check_overrides(cls, contract)

    @property
    def uploads(self) -> tuple[str, ...]:
        """The kinds of messages to the aggregation server that it guards, named in `on` as `prototype->fed_server`."""
        return tuple(name.removesuffix(UPLOAD) for name in self.on if name.endswith(UPLOAD))

    @property
    def least_rows(self) -> int:
        """The smallest batch this defense can work on in training."""
        return 1

    @property
    def strength(self) -> Strength | None:
        """The parameter that says how strong the defense is, for people and plots; None where there is none.

        By default the field that is marked so by `as_strength`; of a course of numbers the last one. For a defense that
        promises privacy it is epsilon, where an epsilon was asked for.
        """
        strengths = (
            Strength(one.name, numbers_of(getattr(self, one.name))[-1], *one.metadata["strength"])
            for one in fields(self)
            if "strength" in one.metadata
        )
        return next(strengths, None)

    @property
    def guarantee(self) -> str:
        """The formal promise, in one line; most defenses have none and say so."""
        return "no formal guarantee"

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return the names of the crossings this defense guards in `topology`, or refuse in one line."""
        crossings = {e.name: e for e in topology.crossings}
        named = tuple(name for name in self.on if not name.endswith(UPLOAD))
        if self.uploads and not (isinstance(self, ReleaseDefense) and self.on_uploads):
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

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Refuse, before training, a topology, model or data to which this defense cannot apply."""


_CAPABILITIES: dict[str, type[Defense]] = {}
"""Hook -> the capability that it belongs to."""


class ReleaseDefense(Defense, capability=True):
    """Acts on what leaves a party's segment for another party."""

    @abstractmethod
    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of `z`: (batch, ...), attached to its graph; called in every phase.

        `z` itself stays as it is.
        """
        raise NotImplementedError

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        """Return the differentiable release that a white-box adversary would model: the mean over the noise."""
        return self.release(name, z, context)

    @property
    def peeks(self) -> bool:
        """Whether `release` looks at more than what it is handed, so that it may not stand behind a private one."""
        return False

    @property
    def on_uploads(self) -> bool:
        """Whether it can also act on what the clients of a federated method send; see `uploads`."""
        return False


class GradientDefense(Defense, capability=True):
    """Acts on the gradients that go back over an edge."""

    @abstractmethod
    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        """Return what leaves in place of the gradient `g`: (batch, ...), of the batch-mean loss."""
        raise NotImplementedError


class Codec(Defense, capability=True):
    """Sends what it leaves of a release or a gradient in a shorter form than its tensor."""

    @abstractmethod
    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
        """Return the bytes that (rows, *shape) of `dtype` takes on the wire as this defense sends it; None: as it is.

        `kind`: "activation" or "gradient". It may depend on nothing else, so that it is known before training.
        """
        raise NotImplementedError


class PenaltyDefense(Defense, capability=True):
    """Adds a penalty on what leaves to the loss of the party that sends it."""

    @abstractmethod
    def penalty(self, z: Tensor, context: Context) -> Tensor | PenaltyGradient | None:
        """Return a scalar to add to this party's loss; `z`: all that leaves on the edge, (batch, ...)."""
        raise NotImplementedError

    @property
    def penalty_reads_layers(self) -> bool:
        """Whether `penalty` reads layers that `fit` puts into the sender's segment, so that only its layout has it."""
        return False


class ReceiverPenaltyDefense(Defense, capability=True):
    """Adds a penalty to the loss of the party that reads what comes on an edge."""

    @abstractmethod
    def penalty_at_receiver(self, context: Context) -> Tensor | None:
        """Return a scalar to add to the loss of the party that has read what came on the edge; `context` is its own."""
        raise NotImplementedError


class TaskWeightDefense(Defense, capability=True):
    """Multiplies the loss of the task."""

    @property
    def weighs_task(self) -> bool:
        """Whether the task's loss is ever multiplied by anything but one while this defense is on."""
        return True

    @abstractmethod
    def task_weight(self, epoch: int) -> float:
        """Return what the task's loss is multiplied by in `epoch`, if this defense weighs it."""
        raise NotImplementedError


class LayerDefense(Defense, capability=True):
    """Changes the segments before they are trained, most often by layers of its own."""

    @abstractmethod
    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return the topology to train, which may be this very one.

        Layers put into a segment belong to it: they are trained, averaged, handed over and stored with it.
        """
        raise NotImplementedError


class LearnedDefense(Defense, capability=True):
    """Trains something of its own, such as an adversary's network, at each party and edge that it guards."""

    def start(self, place: DefenseSite) -> Any:
        """Return what this defense keeps for one party and edge: what has `state_dict` and its reverse, or None."""
        return None

    @abstractmethod
    def learn(self, state: Any) -> None:
        """Take a training step on `state`, which `start` returned; called after each step of its party."""
        raise NotImplementedError


class LabelDefense(Defense, capability=True):
    """Changes labels in training, once or at every step."""

    @abstractmethod
    def heads(self, topology: Topology) -> tuple[str, ...]:
        """Return the heads whose labels this defense changes in training."""
        raise NotImplementedError

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return the labels to train on in place of `y` (rows,), once, when their holder takes its rows."""
        return y

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return what the loss compares with in place of `y` (batch,), anew at every training step."""
        return y


class WeightDefense(Defense, capability=True):
    """Makes the gradients of a party's weights private before its optimizer's step."""

    @abstractmethod
    def guards(self, topology: Topology) -> tuple[str, ...]:
        """Return the roles whose weights this defense guards, in `privatizer`."""
        raise NotImplementedError

    @abstractmethod
    def privatizer(self, holder: PrivatizedParty) -> GradientPrivatizer:
        """Return what makes the gradients of `holder` private before its optimizer's step."""
        raise NotImplementedError

    def norms(self, topology: Topology) -> tuple[tuple[str, str], ...]:
        """Return (sender, receiver) for all guarded roles that exchange norms of rows' gradients in a training step."""
        return ()

    def clip_norm(self, topology: Topology, role: str) -> float | None:
        """Return the L2 norm to which every row's gradient of the weights of `role`, by itself, is clipped; public.

        None: nothing is clipped there, or by more than what `role` computes.
        """
        return None

    def weight_uses(self, client: int, steps: int, epochs: int) -> tuple[Event, int] | None:
        """Return the event by which the weights it guards cost an example of `client`, and how often it happened.

        `steps`: those in which the client took part; `epochs`: largest number of them that any single row took part in.
        None: no promise.
        """
        return None


class Accounted(Defense, capability=True):
    """Promises differential privacy, which the ledger of a run accounts for."""

    @abstractmethod
    def event(self) -> Event | None:
        """Return what one release, one gradient sent or one row's labels cost in privacy; None: no promise."""
        raise NotImplementedError


class Calibrated(Defense, capability=True):
    """Needs to know the whole run before it begins."""

    @abstractmethod
    def calibrate(self, terms: Terms) -> Defense:
        """Return this defense with all that depends on the whole run worked out, or refuse the run in one line."""
        raise NotImplementedError

    @property
    def stated_delta(self) -> float | None:
        """The delta at which its user asked for an epsilon of the whole run; None where nobody did."""
        return None


def privacy_event(defense: Defense) -> Event | None:
    """Return `Accounted.event` of a defense; None where it promises nothing."""
    return defense.event() if isinstance(defense, Accounted) else None


def penalty_term(penalty: Tensor | PenaltyGradient | None, z: Tensor) -> Tensor:
    """Return a scalar whose gradient is that of `penalty`, what `PenaltyDefense.penalty` returned of `z`.

    Its value is the penalty's own, except for a `PenaltyGradient`, which has none.
    """
    if penalty is None:
        return z.new_zeros(())
    return (z * penalty.gradient).sum() if isinstance(penalty, PenaltyGradient) else penalty


def concatenate_values(values: Sequence[Tensor]) -> Tensor:
    """Return all that leaves on an edge as one tensor: itself, or the values side by side, flattened: (batch, ...)."""
    return values[0] if len(values) == 1 else torch.cat([v.reshape(len(v), -1) for v in values], 1)


def packed_bytes(
    defenses: Iterable[Defense], kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype
) -> int | None:
    """Return the bytes of `rows` rows of one value after `defenses`, in their order; None where none encodes it.

    kind: "activation" or "gradient"; shape: of one row. A later defense that changes the value undoes the encoding.
    """
    nbytes: int | None = None
    for defense in defenses:
        size = defense.packed(kind, rows, shape, dtype) if isinstance(defense, Codec) else None
        if size is not None or isinstance(defense, ReleaseDefense if kind == "activation" else GradientDefense):
            nbytes = size
    return nbytes


def _check_hooks(cls: type[Defense]) -> None:
    """Refuse a class with a hook that nobody would call, or without one that its capability needs."""
    fields = {name for kind in cls.__mro__ for name in inspect.get_annotations(kind)}
    for hook, capability in _CAPABILITIES.items():
        if not issubclass(cls, capability):
            if hook in fields or hasattr(cls, hook):
                raise InvalidInput(
                    f"{cls.__name__}.{hook} would never be called: inherit {capability.__name__}, whose hook it is, or "
                    "give it another name"
                )
        elif hook not in fields and getattr(getattr(cls, hook), "__isabstractmethod__", False):
            raise InvalidInput(f"{cls.__name__} is a {capability.__name__} without {hook!r}: define it")
    known = [*_CAPABILITIES, *(name for name in vars(Defense) if not name.startswith("_"))]
    for name, member in vars(cls).items():
        if name.startswith("_") or name in known or not (callable(member) or isinstance(member, property)):
            continue
        if near := nearest_names(name, known, 1, 0.8):
            raise InvalidInput(
                f"{cls.__name__}.{name} would never be called: no hook is called so; did you mean {near[0]!r}? "
                "The name of a helper of your own may begin with _"
            )


def same_form(hook: Callable[..., Tensor], made: Tensor, given: Tensor, dims: int | None = None) -> Tensor:
    """Return what `hook` of a defense has `made` of the tensor `given`; refuse what is no tensor of that shape.

    `dims`: how many of the first dimensions have to agree (None: all).
    """
    if not isinstance(made, Tensor):
        raise InvalidInput(f"{hook.__qualname__} returned a {type(made).__name__}; expected a tensor")
    if made.shape[:dims] != given.shape[:dims]:
        raise InvalidInput(
            f"{hook.__qualname__} returned shape {tuple(made.shape)} for {tuple(given.shape)}; expected "
            f"{'the same' if dims is None else 'as many rows'}"
        )
    return made
