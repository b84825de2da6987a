"""DP-SGD: clips every row's gradient and adds Gaussian noise to their sum, at each party that holds weights.

Paper: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016.

It protects the weights, and all that is computed from them alone; releases, gradients and labels that cross in training
are not covered. A row of the gradient at a cut belongs to one example, so each party clips separately, to its own norm
C_p, with noise of sigma C_p. P parties that process the same example are together one Gaussian mechanism of multiplier
sigma / sqrt(P): divided by its sigma C_p, the part of each party has sensitivity 1 / sigma. With `clip="joint"` all
clip by the norm of the row's whole gradient, as in the uncut model, and the multiplier is sigma; for that the squared
norms of the rows cross unprotected in every step.

There is a guarantee only if all weights that learn are guarded: the gradients of guarded parts depend on all other
parts, which must not learn from private rows without noise. Neighbours: with Poisson sampling one example is added or
taken away, at rate batch_size / rows; with shuffling one is replaced (sensitivity 2 C) and each batch that contains it
is one use, without amplification: one use an epoch, whatever number of epochs or part of one a round has. The client of
the example is public, as are the sizes of all data sets. All parties must follow the protocol: a party that alters
gradients can make a row's gradient depend on another row.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace as changed
from functools import partial

from torch import nn

from splitfed.core.defense import (
    Accounted,
    Calibrated,
    Defense,
    GradientDefense,
    LayerDefense,
    LearnedDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
    Strength,
    Terms,
    WeightDefense,
)
from splitfed.core.errors import (
    LARGEST_NORM,
    InvalidInput,
    check_kind,
    check_names,
    check_number,
    require_name,
    require_number,
)
from splitfed.core.gradient_privatizer import PrivatizedParty
from splitfed.core.held_arrays import is_elsewhere
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects
from splitfed.core.random import derive, stream
from splitfed.core.row_independence import in_training
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.private_noise import LARGEST_MULTIPLIER, check_precision
from splitfed.defenses.private_step import PrivateStep
from splitfed.defenses.row_gradients import check_batch_norm, check_rowwise
from splitfed.privacy.row_mixing import release_mixes

CLIPS = ("party", "joint")
ACCOUNTANTS = ("best", "gaussian", "rdp", "prv")
_MIXING: dict[type[Defense], str] = {
    PenaltyDefense: "penalty",
    ReceiverPenaltyDefense: "penalty_at_receiver",
    GradientDefense: "gradient",
    LearnedDefense: "learn",
}


@dataclass(frozen=True)
class DpSgd(WeightDefense, LayerDefense, Accounted, Calibrated):
    """Clips each row's gradient to `max_norm` and adds noise of `noise_multiplier` times that norm to every sum.

    `max_norm`: one number, or one for each role. Instead of a multiplier, `epsilon` and `delta`: the multiplier is then
    the least, to one in a million, whose bound by `accountant` meets them over the planned run. `roles`: roles whose
    weights are guarded, empty for all that have any. `clip`: by the norm of each "party"'s part of a row's gradient, or
    by the "joint" norm. `replace`: whether layers are replaced by ones with per-row gradients, such as batch norm by
    group norm.
    """

    max_norm: float | Mapping[str, float] = 1.0
    noise_multiplier: float | None = field(
        default=None, metadata=require_number("dp_sgd noise_multiplier", low=0.0, high=LARGEST_MULTIPLIER)
    )
    epsilon: float | None = field(default=None, metadata=require_number("dp_sgd epsilon", low=0.0, open_low=True))
    delta: float | None = field(
        default=None, metadata=require_number("dp_sgd delta", low=0.0, high=1.0, open_low=True, open_high=True)
    )
    roles: tuple[str, ...] = ()
    clip: str = field(default="party", metadata=require_name("clip", CLIPS))
    accountant: str = field(default="best", metadata=require_name("accountant", ACCOUNTANTS))
    replace: bool = False
    _terms: Terms | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters out of range, and for a target epsilon beside a multiplier."""
        super().__post_init__()
        norms = self.max_norm if isinstance(self.max_norm, Mapping) else {"": self.max_norm}
        for role, norm in norms.items():
            what = f"dp_sgd max_norm{f' of {role!r}' if role else ''}"
            check_number(what, norm, low=0.0, high=LARGEST_NORM, open_low=True)
        check_kind("dp_sgd roles", self.roles, (tuple, list), "a tuple of names of roles")
        if self.clip == "joint" and isinstance(self.max_norm, Mapping):
            raise InvalidInput("dp_sgd with clip='joint' has one max_norm for all roles; a table was given")
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise InvalidInput("dp_sgd takes a noise_multiplier, or epsilon and delta; give one of the two")
        if self.epsilon is not None and self.delta is None:
            raise InvalidInput("dp_sgd epsilon needs a delta, such as 1 / (10 x rows)")
        if self.on:
            raise InvalidInput(f"dp_sgd guards weights, no edge: on={self.on!r} is not allowed; give roles")

    @property
    def strength(self) -> Strength:
        """The target epsilon, or else the noise multiplier."""
        if self.epsilon is not None:
            return Strength("epsilon", self.epsilon, f"of the run, at delta {self.delta:g}", rises=False)
        assert self.noise_multiplier is not None
        return Strength("noise_multiplier", self.noise_multiplier, "clipping norms")

    @property
    def guarantee(self) -> str:
        """The formal guarantee, in one line."""
        if self._terms is not None and self.event() is None:
            return f"no formal guarantee: {self._missing_guarantee(self._terms)}"
        return "differential privacy of the weights, example by example, if all that learn are guarded"

    @property
    def stated_delta(self) -> float | None:
        """The delta of the target epsilon, if there is one."""
        return self.delta

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return no edge, as only weights are guarded."""
        return ()

    def guards(self, topology: Topology) -> tuple[str, ...]:
        """Return `roles`, by default every role with trainable weights."""
        able = _trainable_roles(topology)
        for role in (*self.roles, *(self.max_norm if isinstance(self.max_norm, Mapping) else ())):
            check_names("role of dp_sgd", topology.roles, role)
            if role not in able:
                raise InvalidInput(f"dp_sgd cannot guard role {role!r}: it has no weight that learns")
        if not able:
            raise InvalidInput("dp_sgd has nothing to guard: no weight learns")
        return self.roles or able

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for a model without per-row gradients, and for a role without a norm."""
        guarded = self.guards(topology)
        for role in guarded:
            self._norm(role)
            for segment in topology.segments_of(role):
                for name, weight in segment.module.named_parameters():
                    check_precision("dp_sgd", f"weight {name!r} of segment {segment.name!r}", weight.dtype)
        check_rowwise(topology, facts, guarded)

    def fit(self, topology: Topology, facts: TopologyFacts, seed: int) -> Topology:
        """Return `topology` with the layers replaced that Opacus can replace, if `replace`.

        Refuse remaining batch norm.

        Batch norm is refused here, before a check of the batch size that batch norm needs could report it differently.
        """
        made = self._replaced(topology, seed) if self.replace else topology
        check_batch_norm(made)
        return made

    def _replaced(self, topology: Topology, seed: int) -> Topology:
        segments, replaced = [], []
        for segment in topology.segments:
            with stream(derive(seed, "replace", segment.name)):
                module, names = _replace_layers(segment)
            segments.append(changed(segment, module=module) if names else segment)
            replaced += names
        if not replaced:
            return topology
        warnings.warn(f"dp_sgd replaced {', '.join(replaced)}", UserWarning, stacklevel=2)
        return changed(topology, segments=tuple(segments))

    def privatizer(self, holder: PrivatizedParty) -> PrivateStep:
        """Return what clips and adds noise at one party; raise `InvalidInput` before the multiplier is calibrated."""
        if self.noise_multiplier is None:
            raise InvalidInput("dp_sgd has a target epsilon and no noise_multiplier yet: train() computes it")
        return PrivateStep(holder, self._norm(holder.role), self.noise_multiplier)

    def norms(self, topology: Topology) -> tuple[tuple[str, str], ...]:
        """Return every pair of guarded roles that exchange row norms; empty unless they clip by the joint norm."""
        guarded = self.guards(topology) if self.clip == "joint" else ()
        return tuple((sender, receiver) for sender in guarded for receiver in guarded if sender != receiver)

    def clip_norm(self, topology: Topology, role: str) -> float | None:
        """Return `max_norm` if the role clips by its own part of a row's gradient, or holds all of it; else None."""
        guarded = self.guards(topology)
        alone = self.clip == "party" or guarded == (role,)
        return self._norm(role) if role in guarded and alone else None

    def calibrate(self, terms: Terms) -> Defense:
        """Return this defense with the multiplier for its target epsilon.

        Raises `InvalidInput` if it cannot be accounted for.
        """
        if terms.obstacle is not None:
            raise InvalidInput(f"dp_sgd cannot be accounted for with {terms.obstacle}")
        for other in terms.others:
            _check_beside(other, terms)
        settled = self
        if self.epsilon is not None and self.noise_multiplier is None:
            if (doubt := self._missing_guarantee(terms)) is not None:
                raise InvalidInput(f"dp_sgd epsilon={self.epsilon:g} cannot be guaranteed: {doubt}")
            settled = changed(self, noise_multiplier=self._calibrated(terms), epsilon=None)
        settled = changed(settled)
        object.__setattr__(settled, "_terms", terms)
        return settled

    def weight_uses(self, client: int, steps: int, epochs: int) -> tuple[Event, int] | None:
        """Return the joint event of all guarded parties, and its number of uses for an example of `client`."""
        if self._terms is None or not self.noise_multiplier or self._missing_guarantee(self._terms) is not None:
            return None
        return self._uses(self._terms, self.noise_multiplier, client, steps, epochs)

    def event(self) -> Event | None:
        """Return the event of one use for an example of the client with the greatest cost; None without a guarantee."""
        if self._terms is None:
            return None
        found = [self.weight_uses(client, 1, 1) for client in range(len(self._terms.rows))]
        return max((u[0] for u in found if u is not None), key=lambda e: e.sampling_rate, default=None)

    def _norm(self, role: str) -> float:
        if not isinstance(self.max_norm, Mapping):
            return float(self.max_norm)
        check_names("role in dp_sgd max_norm:", self.max_norm, role)
        return float(self.max_norm[role])

    def _missing_guarantee(self, terms: Terms) -> str | None:
        """Return why there is no guarantee; None if there is one."""
        if self.noise_multiplier == 0:
            return "noise_multiplier=0 adds no noise"
        for topology in terms.topologies:
            for role in _trainable_roles(topology):
                if role not in self.guards(topology):
                    return f"the weights of role {role!r} learn from the same rows unguarded"
        return terms.doubt

    def _uses(self, terms: Terms, multiplier: float, client: int, steps: int, epochs: int) -> tuple[Event, int]:
        parties = 1 if self.clip == "joint" else len(self.guards(terms.topologies[client]))
        joint = multiplier / math.sqrt(parties)
        if not terms.poisson:
            return Event(Gaussian(joint / 2), Protects.WEIGHTS, neighbours=Neighbours.REPLACE), epochs
        neighbours, rate = Neighbours.ADD_REMOVE, terms.rate(client)
        return Event(Gaussian(joint), Protects.WEIGHTS, neighbours=neighbours, sampling_rate=rate), steps

    def _calibrated(self, terms: Terms) -> float:
        """Return the largest of the multipliers that the clients need."""
        assert self.epsilon is not None
        assert self.delta is not None

        def uses(client: int, sigma: float) -> list[tuple[Event, int]]:
            return [self._uses(terms, sigma, client, terms.steps[client], terms.epochs[client])]

        # Clients with equal uses at one multiplier have equal ones at any.
        plans = {tuple(uses(client, 1.0)): client for client, steps in enumerate(terms.steps) if steps}
        return max(
            (
                terms.calibrate(partial(uses, client), self.epsilon, self.delta, self.accountant)
                for client in plans.values()
            ),
            default=1.0,
        )


def _trainable_roles(topology: Topology) -> tuple[str, ...]:
    """Return the roles with trainable weights."""
    return tuple(
        role
        for role in topology.roles
        if any(p.requires_grad for s in topology.segments_of(role) for p in s.module.parameters())
    )


def _replace_layers(segment: Segment) -> tuple[nn.Module, list[str]]:
    """Return a copy of the segment's module with its replaceable layers replaced, and each replacement described."""
    from opacus.validators import ModuleValidator

    module, training = copy.deepcopy(segment.module), in_training(segment.module)
    names = []
    for name, layer in list(module.named_modules()):
        fixer = ModuleValidator.FIXERS.get(type(layer))
        frozen = isinstance(layer, nn.modules.batchnorm._BatchNorm) and not training.get_submodule(name).training
        if fixer is None or frozen or is_elsewhere(layer):
            continue
        # With as many groups as values, what Opacus makes of flat features would be constant.
        flat = isinstance(layer, nn.BatchNorm1d)
        substitute = nn.GroupNorm(1, layer.num_features, affine=layer.affine) if flat else fixer(layer)
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
            if not layer.track_running_stats:
                continue
            # That of Opacus goes on with the statistics.
            substitute.register_buffer("running_mean", None)
            substitute.register_buffer("running_var", None)
            substitute.register_buffer("num_batches_tracked", None)
        substitute.train(layer.training)
        # A call of a submodule of a segment cut by replay is one operation of it.
        if (standing_for := getattr(vars(layer).get("forward"), "standing_for", None)) is not None:
            vars(substitute)["forward"] = standing_for(substitute)
        names.append(f"{name or 'all'} of {segment.name}: {type(layer).__name__} by {type(substitute).__name__}")
        if not name:
            return substitute, names
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, substitute)
    return module, names


def _check_beside(other: Defense, terms: Terms) -> None:
    """Raise `InvalidInput` for a defense that makes a row's gradient depend on other rows."""
    kind = type(other)
    for capability, word in _MIXING.items():
        if isinstance(other, capability):
            raise InvalidInput(f"dp_sgd cannot stand beside {kind.__name__}: its {word} may mix the rows of a batch")
    topology, facts = terms.topologies[0], terms.facts[0]
    for name in other.edges(topology) if isinstance(other, ReleaseDefense) else ():
        if release_mixes(other, topology, facts, name):
            raise InvalidInput(
                f"dp_sgd cannot stand beside {kind.__name__}: its release mixes the rows of a batch on {name!r}"
            )
