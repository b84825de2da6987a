"""Validation of a whole run before training: topology, data, schedule, method, defenses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from splitfed.core.defense import (
    Accounted,
    Defense,
    LabelDefense,
    LayerDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
)
from splitfed.core.errors import InvalidInput, about, check_kind
from splitfed.core.example_pass import check_equal_shapes
from splitfed.core.initial_weights import first_weights, local_segments, resolve_starts
from splitfed.core.optimizers import Optim
from splitfed.core.per_client_defenses import check_clients, of_client
from splitfed.core.random import derive
from splitfed.core.rows import RowSource
from splitfed.core.step_plan import segment_plans
from splitfed.core.task_checks import check_own_parts
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.usage_counts import counted_labels
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.features import feed_rows
from splitfed.engines.base import Placement
from splitfed.federated.base import Method, MethodContext
from splitfed.planning.batch_counts import check_ways
from splitfed.planning.computation import plan_of
from splitfed.planning.example_passes import ExamplePasses, check_outputs, facts_with
from splitfed.planning.optimizer_checks import check_accumulation, check_optimizers, optims_of
from splitfed.planning.row_trial import promises_passes, promises_rows, protects_labels, with_findings
from splitfed.registry import load
from splitfed.schedules.base import Schedule, Training, shared_roles
from splitfed.schedules.sampling_and_dropout import Sampled
from splitfed.topologies.heterogeneous import heterogeneous


@dataclass(frozen=True)
class Prepared:
    """The checked parts of a run: a topology and its facts for every replica, schedule, method, defenses, optimizers.

    `training`: the settings that hold for this run, with `restart_optimizers` as the method sets it, if it does, and
    with `starts` resolved to "shared", "own" or "given" (topologies one a client, with their own weights).
    """

    topologies: tuple[Topology, ...]
    facts: tuple[TopologyFacts, ...]
    data: Federation
    schedule: Schedule
    placement: Placement
    defenses: tuple[Defense, ...]
    optims: Mapping[str, Optim]
    training: Training
    method: Method | None = None

    @property
    def topology(self) -> Topology:
        """The first replica's topology, which is that of all replicas unless clients differ."""
        return self.topologies[0]

    @property
    def local(self) -> list[tuple[str, ...]]:
        """For every replica, the client segments that keep their own initial weights when training starts."""
        moved = self.schedule.binds(len(self.topologies)) is not None
        return [
            local_segments(
                t, self.placement.kept, () if self.method is None else self.method.traits(t).broadcast_segments, moved
            )
            for t in self.topologies
        ]

    def first_weights(self) -> list[dict[str, Tensor]]:
        """Return for each client the initial weights that replace its topology's; see `initial_weights`."""
        return first_weights(self.training.starts or "shared", self.topologies, self.local, self.training.seed)


def prepare(
    topology: Topology | Sequence[Topology],
    data: Federation,
    *,
    schedule: str | Schedule,
    defenses: Defense | Sequence[Defense],
    optimizer: str | Optim | Mapping[str, Optim] | None,
    training: Training,
    method: str | Method | None = None,
    example_passes: ExamplePasses | None = None,
) -> Prepared:
    """Return the parts of a run after all checks; nothing is computed except for example batches of each topology.

    `topology`: one for all clients, or one a client. `example_passes`: results of other runs with the same objects.
    Raises `InvalidInput` for parts that do not fit together.
    """
    plan, extra, given = _resolve_algorithms(schedule, method, defenses)
    check_kind("data", data, Federation, "what Dataset.clients(count) returns")
    topologies, facts = assemble(topology, data, plan, extra, training.seed, example_passes)
    return complete(topologies, facts, data, plan, extra, given, optimizer, training)


def assemble(
    topology: Topology | Sequence[Topology],
    data: Federation,
    plan: Schedule,
    method: Method | None,
    seed: int,
    example_passes: ExamplePasses | None = None,
) -> tuple[tuple[Topology, ...], tuple[TopologyFacts, ...]]:
    """Return every client's topology as schedule and method train it, and facts; raise `InvalidInput` for misfits."""
    found = ExamplePasses() if example_passes is None else example_passes
    with about("topology"):
        given = _topology_per_client(topology, len(data.clients))
        _check_together(given, plan)
        ready = _each_make(
            given, lambda replica: _assemble_one(given[replica], data, replica, plan, method, seed, found)
        )
        for one in {id(one): one for one in given}.values():
            found.check_held(one, data)
        return ready


def complete(
    topologies: Sequence[Topology],
    facts: Sequence[TopologyFacts],
    data: Federation,
    plan: Schedule,
    method: Method | None,
    defenses: tuple[Defense, ...],
    optimizer: str | Optim | Mapping[str, Optim] | None,
    training: Training,
) -> Prepared:
    """Return the result of `assemble` joined with all other parts of a run; raise `InvalidInput` for misfits."""
    clients = len(data.clients)

    def defend(replica: int) -> tuple[Topology, TopologyFacts]:
        rows = data.clients[replica].train
        fitted, found = fit_defenses(topologies[replica], facts[replica], rows, defenses, training.seed)
        if method is not None or any(isinstance(d, PenaltyDefense | ReceiverPenaltyDefense) for d in defenses):
            # Loss terms of objectives may give a gradient where the losses of the heads give none.
            found = replace(found, no_gradient=frozenset())
        check_outputs(fitted, found)
        for head in fitted.heads:
            assert head.task is not None
            check_own_parts(head.task, found.shapes[head.value], rows.label(head.target))
        return fitted, found

    with about("defenses"):
        check_coupling(defenses, data)
        ready, known = _each_make(topologies, defend)
        if _differ(ready):
            check_equal_shapes(ready, known)
    with about("batch_size"):
        check_batches(known, defenses, data, training)
    with about("topology"):
        check_ways(ready, data, training, method)
    with about("sampling"):
        check_sampling(plan, training)
    with about("accumulate"):
        check_accumulation(plan, method, defenses, ready[0], training)
    with about("defenses"):
        if promises_rows(defenses, method, ready[0]):
            sums = method is not None and bool(method.traits(ready[0]).message_events)
            passes, counted = promises_passes(defenses, method, ready[0]), sums or training.sampling == "poisson"
            known = with_findings(ready, known, data, training, passes, counted)
        for one, fact in {id(t): (t, f) for t, f in zip(ready, known, strict=True)}.values():
            check_clients(defenses, one, clients)
            segment_plans(one, fact, defenses)
    with about("optimizer"):
        rates = plan.rates(ready[0], clients)
        optims = {role: o.scaled(rates.get(role, 1.0)) for role, o in optims_of(ready[0], optimizer).items()}
        check_optimizers(ready, defenses, optims)
    with about("computation"):
        computation = plan_of(ready[0])
        asked = plan.placement(ready[0])
        rest = defenses, optims, training, asked, clients
        ready, known = _each_make(ready, lambda r: (computation.with_parameters(ready[r], known[r], *rest), known[r]))
    with about("method"):
        place = computation.placement(ready[0], asked) if method is None else combine_placement(method, plan, ready)
        if method is not None:
            training = check_method(method, plan, ready, known, defenses, data, optims, training)
    with about("schedule"):
        _check_averaged(ready, known, place, method)
    prepared = Prepared(ready, known, data, plan, place, defenses, optims, training, method)
    with about("starts"):
        starts = resolve_starts(training.starts, ready, prepared.local[0])
        prepared = replace(prepared, training=replace(training, starts=starts))
        prepared.first_weights()
    return prepared


def check_method(
    method: Method,
    plan: Schedule,
    topologies: Sequence[Topology],
    facts: Sequence[TopologyFacts],
    defenses: Sequence[Defense],
    data: Federation,
    optims: Mapping[str, Optim],
    training: Training,
) -> Training:
    """Return `training` with the optimizer restarts that `method` sets; raise `InvalidInput` if it cannot train so."""
    check_training_steps(method, plan, training, topologies[0])
    check_label_reading(method, topologies, defenses)
    check_aggregation(method, plan, topologies[0], len(data.clients))
    if any(client.train.source.couples for client in data.clients) and method.traits(topologies[0]).message_events:
        raise InvalidInput(
            f"mixup makes a row part of other examples, and the guarantee of {type(method).__name__} private is by "
            "row: leave one of them out"
        )
    public = [len(client.shown) for client in data.clients]
    of_clients = {role: optims[role] for role in topologies[0].data_roles}
    method.check_run(MethodContext(topologies, facts, plan.binds(len(data.clients)), public, of_clients))
    if method.restart is None:
        return training
    check_kind(f"{type(method).__name__} restart", method.restart, bool, "True, False, or None for the run's")
    return replace(training, restart_optimizers=method.restart)


def _check_averaged(
    topologies: Sequence[Topology], facts: Sequence[TopologyFacts], place: Placement, method: Method | None
) -> None:
    """Raise `InvalidInput` for a buffer that changes its shape in training and would be averaged."""
    for topology, found in zip(topologies, facts, strict=True):
        roles = {*place.copied, *(place.averaged if place.buffers else ())}
        if method is not None and method.traits(topology).aggregates_weights and getattr(method, "buffers", True):
            roles |= set(topology.data_roles)
        for segment, name in found.resized:
            if topology.role_of(segment) in roles and segment not in place.kept:
                raise InvalidInput(
                    f"buffer {name!r} of segment {segment!r} changes its shape in training, so that it cannot be "
                    "averaged: allocate its final shape from the start, or hand segments over ('sequential', "
                    "'alternate')"
                )


def combine_placement(method: Method, plan: Schedule, topologies: Sequence[Topology]) -> Placement:
    """Return the placement for the schedule `plan` with `method`; raise `InvalidInput` if they cannot be combined."""
    place, traits, name = plan.placement(topologies[0]), method.traits(topologies[0]), type(method).__name__
    if place.secure is not None and traits.secure is None:
        advice = "give the method secure as well" if hasattr(method, "secure") else "leave one of them out"
        raise InvalidInput(
            f"secure hides the weights that clients upload, not the other messages of method {name}: {advice}"
        )
    if traits.aggregates_weights and place.averaged:
        raise InvalidInput(
            f"schedule {type(plan).__name__} averages weights, and so does method {name}: take 'independent' for "
            "whole models, 'splitfed_v3' for split ones"
        )
    if traits.trains_between_rounds and (place.averaged or plan.binds(len(topologies))):
        raise InvalidInput(
            f"method {name} also trains clients outside of the schedule's round, and {type(plan).__name__} replaces "
            "their segments: take 'independent' for whole models, 'splitfed_v3' or 'sequential' with hand_over='none' "
            "for split ones"
        )
    return replace(place, kept=traits.private_segments, aggregation_server=True)


def check_aggregation(method: Method, plan: Schedule, topology: Topology, clients: int) -> None:
    """Raise `InvalidInput` for a method whose aggregation needs more clients than `plan` may provide."""
    traits = method.traits(topology)
    asked, drop_out = (plan.clients_asked(clients), plan.drop_out) if isinstance(plan, Sampled) else (clients, 0.0)
    if traits.aggregation is not None:
        traits.aggregation.check(asked, drop_out > 0)
    if traits.secure is not None:
        traits.secure.check(asked)


def check_training_steps(method: Method, plan: Schedule, training: Training, topology: Topology) -> None:
    """Raise `InvalidInput` for a method with steps of its own if sampling or schedule determine the steps."""
    name, traits = type(method).__name__, method.traits(topology)
    if training.sampling == "poisson" and traits.weighted_by_batch_size:
        raise InvalidInput(
            f"sampling='poisson' makes the rows of a step random in number, and method {name} weighs steps by that: "
            "take 'shuffle'"
        )
    if not traits.own_steps:
        return
    if not plan.independent:
        raise InvalidInput(
            f"method {name} controls each client's training, and schedule {type(plan).__name__} takes steps of "
            "several clients together: take 'independent'"
        )
    if training.sampling == "poisson":
        raise InvalidInput(
            f"sampling='poisson' draws every step's rows, and method {name} trains in steps of its own: take 'shuffle'"
        )


def check_label_reading(method: Method, topologies: Sequence[Topology], defenses: Sequence[Defense]) -> None:
    """Raise `InvalidInput` for a method that reads the labels of a step if a defense replaces them."""
    for topology in topologies:
        for head in topology.heads if method.traits(topology).reads_labels else ():
            for defense in (d for d in defenses if isinstance(d, LabelDefense)):
                if head.value in defense.heads(topology) and "step" in counted_labels(defense, head.task):
                    raise InvalidInput(
                        f"method {type(method).__name__} reads the labels of every step, which "
                        f"{type(defense).__name__} replaces by noisy numbers: take a defense that changes labels once"
                    )


def rows_of(topology: Topology, rows: Dataset) -> Mapping[str, Tensor | RowSource]:
    """Return input -> rows to be read by batch, from `rows`, for every input of `topology`."""
    return feed_rows(rows.source, topology.inputs, rows.features)


def labels_of(topology: Topology, rows: Dataset) -> dict[str, Tensor]:
    """Return head -> labels for `topology`; parties with the same labels get separate copies."""
    first: dict[str | None, str] = {}
    found = {}
    for head in topology.heads:
        y = rows.label(head.target)
        found[head.value] = y if first.setdefault(head.target, head.labels) == head.labels else y.clone()
    return found


def check_coupling(defenses: Sequence[Defense], data: Federation) -> None:
    """Raise `InvalidInput` for mixup together with a guarantee by row: a row would be part of several examples."""
    private = (d for d in defenses if isinstance(d, Accounted) and not protects_labels(d))
    if any(client.train.source.couples for client in data.clients) and (first := next(private, None)) is not None:
        raise InvalidInput(
            f"mixup makes a row part of other examples, and the guarantee of {type(first).__name__} is by row: leave "
            "one of them out"
        )


def check_batches(
    facts: Sequence[TopologyFacts], defenses: Sequence[Defense], data: Federation, training: Training
) -> None:
    """Raise `InvalidInput` unless batch sizes are one for all or one a client, and large enough for all segments."""
    if training.batch_sizes and len(training.batch_sizes) != len(data.clients):
        raise InvalidInput(
            f"batch_size has {len(training.batch_sizes)} entries for {len(data.clients)} clients; expected one a "
            "client, or one for all"
        )
    for number, (client, client_facts) in enumerate(zip(data.clients, facts, strict=True)):
        needs = [
            *((2, f"batch norm in segment {name!r}") for name in sorted(client_facts.batch_norm)),
            *((d.least_rows, type(d).__name__) for d in of_client(defenses, number)),
        ]
        least, who = max(needs, key=lambda need: need[0], default=(1, ""))
        rows = len(client.train)
        if training.sampling == "poisson" and least > 1:
            raise InvalidInput(
                f"sampling='poisson' may draw a batch of any size, and {who} needs {least} rows or more: take 'shuffle'"
            )
        own = training.of_client(number)
        smallest = own.smallest_batch(rows)
        if smallest < least:
            way_out = "choose another size"
            if replace(own, drop_last=True).smallest_batch(rows) >= least:
                way_out += ", or leave that batch out with drop_last=True"
            raise InvalidInput(
                f"{client.name} has {rows} training rows, so batch_size={own.batch_size} leaves a batch of "
                f"{'one' if smallest == 1 else smallest}, and {who} needs {least} rows or more: {way_out}"
            )


def check_sampling(schedule: Schedule, training: Training) -> None:
    """Raise `InvalidInput` for batches of random size in a schedule with joint steps of several clients."""
    if training.sampling == "poisson" and not schedule.independent:
        raise InvalidInput(
            f"sampling='poisson' is not allowed with {type(schedule).__name__}: its steps take the rows of several "
            "clients at once; take 'shuffle'"
        )


def fit_defenses(
    topology: Topology, facts: TopologyFacts, rows: Dataset, defenses: Sequence[Defense], seed: int
) -> tuple[Topology, TopologyFacts]:
    """Return `topology` with the layers that `defenses` insert, and its facts."""
    layers = [(position, d) for position, d in enumerate(defenses) if isinstance(d, LayerDefense)]
    for position, defense in layers:
        fitted = defense.fit(topology, facts, derive(seed, "fit", position))
        if fitted is not topology and defense.clients:
            raise InvalidInput(
                f"{type(defense).__name__} for some clients alone is not allowed: it changes segments, and all clients "
                "have the same"
            )
        topology, facts = fitted, facts if fitted is topology else facts_with(fitted, rows)
    return topology, facts


def _resolve_algorithms(
    schedule: str | Schedule, method: str | Method | None, defenses: Defense | Sequence[Defense]
) -> tuple[Schedule, Method | None, tuple[Defense, ...]]:
    """Return schedule, method and defenses; names are resolved to values with default parameters."""
    plan: Schedule = load("schedules", schedule)() if isinstance(schedule, str) else schedule
    extra: Method | None = load("methods", method)() if isinstance(method, str) else method
    stated: object = defenses
    several = isinstance(stated, Sequence) and not isinstance(stated, str)
    given = tuple(cast("Sequence[Defense]", defenses)) if several else (cast("Defense", defenses),)
    check_kind("schedule", plan, Schedule, "a name or a schedule, such as splitfed.schedules.SplitFedV1()")
    if extra is not None:
        check_kind("method", extra, Method, "a name or a method, such as splitfed.federated.FedProto()")
    for one in given:
        check_kind("defenses", one, Defense, "defenses, such as splitfed.defenses.Noise(scale=0.5)")
    return plan, extra, given


def _differ(topologies: Sequence[Topology]) -> bool:
    return len({id(t) for t in topologies}) > 1


def _check_together(topologies: Sequence[Topology], plan: Schedule) -> None:
    """Raise `InvalidInput` for different topologies, one a client, that do not match or that `plan` cannot train."""
    if not _differ(topologies):
        return
    if reason := plan.binds(len(topologies)):
        raise InvalidInput(
            f"schedule {type(plan).__name__} {reason}, which differ here: take one that leaves them alone, such as "
            "'splitfed_v3' or 'blind'"
        )
    check = heterogeneous if any(shared_roles(t) for t in topologies) else _check_whole
    check(topologies)


def _each_make(
    topologies: Sequence[Topology], prepare_one: Callable[[int], tuple[Topology, TopologyFacts]]
) -> tuple[tuple[Topology, ...], tuple[TopologyFacts, ...]]:
    """Return the results of `prepare_one` for every client's topology, by client number; equal topologies once."""
    prepared: dict[int, tuple[Topology, TopologyFacts]] = {}
    for replica, one in enumerate(topologies):
        if id(one) in prepared:
            continue
        try:
            prepared[id(one)] = prepare_one(replica)
        except InvalidInput as error:
            if not _differ(topologies):
                raise
            raise InvalidInput(f"client {replica}: {error}") from error
    ready, facts = zip(*(prepared[id(t)] for t in topologies), strict=True)
    return ready, facts


def _topology_per_client(topology: Topology | Sequence[Topology], clients: int) -> list[Topology]:
    if isinstance(topology, Topology):
        return [topology] * clients
    topologies: list[Topology] = list(topology) if isinstance(topology, (list, tuple)) else [cast(Topology, topology)]
    for one in topologies:
        check_kind("topology", one, Topology, "what a builder of splitfed.topologies returns, or one a client")
    if len(topologies) != clients:
        raise InvalidInput(
            f"{len(topologies)} topologies were given for {clients} clients; expected one a client, or one"
        )
    return topologies


def _check_whole(given: Sequence[Topology]) -> None:
    """Raise `InvalidInput` for clients without a shared party whose inputs or outputs differ."""
    for client, one in enumerate(given):
        for what, mine, first in (
            ("inputs", dict(one.inputs), dict(given[0].inputs)),
            ("outputs", [h.value for h in one.heads], [h.value for h in given[0].heads]),
        ):
            if mine != first:
                raise InvalidInput(f"client {client} has {what} {mine}; the first client has {first}")


def _assemble_one(
    topology: Topology,
    data: Federation,
    replica: int,
    schedule: Schedule,
    method: Method | None,
    seed: int,
    example_passes: ExamplePasses,
) -> tuple[Topology, TopologyFacts]:
    rows, clients = data.clients[replica].train, len(data.clients)
    with about("schedule"):
        schedule.check(topology.with_tasks(rows.tasks), clients)
    ready, facts = example_passes.run(topology, rows)

    def fit_method(topology: Topology, facts: TopologyFacts) -> Topology:
        if method is None:
            return topology
        method.check(topology, clients)
        return method.fit(topology, facts, derive(seed, "method"))

    changes: dict[str, Callable[[Topology, TopologyFacts], Topology]] = {
        "schedule": lambda given, known: schedule.prepare(given, known, seed),
        "computation": lambda given, _: plan_of(given).divide(given, schedule, method, clients),
        "method": fit_method,
    }
    for part, change in changes.items():
        with about(part):
            changed = change(ready, facts)
            ready, facts = changed, facts if changed is ready else facts_with(changed, rows)
    return ready, facts
