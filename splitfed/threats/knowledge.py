"""What a threat model may grant an adversary of a run: queries, segments, auxiliary rows, the training protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.attacks.base import Imitate, Knowledge, Releases
from splitfed.attacks.gradients.local_training import LocalTraining, local_training
from splitfed.attacks.training_time.training_attack import TrainingAttackState
from splitfed.core.defense import WeightDefense
from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.messages import View
from splitfed.core.optimizers import Optim
from splitfed.core.per_client_defenses import of_client
from splitfed.core.random import derive
from splitfed.core.rows import RowSource
from splitfed.core.tasks import Task
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.features import feed, feed_rows, places
from splitfed.engines.base import FED, Source
from splitfed.engines.engine import Engine
from splitfed.federated.base import Method
from splitfed.federated.traits import MethodTraits
from splitfed.schedules.base import Schedule, Training
from splitfed.schedules.sampling_and_dropout import Sampled
from splitfed.threats.fresh_segments import Architecture
from splitfed.threats.imitated_defenses import Feed
from splitfed.threats.repeated_releases import mean_release, release_seed
from splitfed.threats.retraining import Rerun
from splitfed.threats.segment_runner import SegmentRunner

LEAST_AT_ONCE = 16
"""Minimum number of rows in one query, as a thousand queries of one row would take very long."""


@dataclass(eq=False)
class KnowledgeGrants:
    """Computes what the parties of `engine` may know of a run.

    `newest(client)` returns the source of the client's current segments. `training`, `rounds`, `schedule` and `method`
    are those of the run; `planned_kinds()` returns the kinds of messages that its clients will send for the method,
    asked before any has been sent. `trained_rounds()` returns for how many rounds the current segments were trained.
    """

    engine: Engine
    data: Federation
    seed: int
    newest: Callable[[int], Source]
    training: Training
    rounds: int
    schedule: Schedule
    method: Method | None
    planned_kinds: Callable[[], frozenset[str]]
    trained_rounds: Callable[[], int]

    def knowledge(
        self, party: str, client: int, stream: int, releases: int = 1, at_once: int | None = None
    ) -> Knowledge:
        """Return all that a threat model may grant `party`; an attack sees only what it requires.

        `releases`: number of releases of each row, victims' and queried ones; the adversary gets their mean. `at_once`:
        number of victims that arrived in one batch (default: all). Queries use batches of that size, at least
        `LEAST_AT_ONCE` rows, as a defense may depend on the batch.
        """
        engine = self.engine
        topology, auxiliary = engine.topologies[client], self.data.auxiliary
        upstream = self.trained_segments(client, engine.parties[party].role, releases=releases)
        whole = self.trained_segments(client, None)
        installed, value = engine.training_attacks.get(party), topology.heads[0].value
        at_once = max(at_once or len(self.data.victims), LEAST_AT_ONCE)
        query, predict = self._query(party, client, stream, releases, at_once), self._send(None, client)
        calls = count(1)
        return Knowledge(
            self.data.shape,
            self.data.victims.value_range,
            auxiliary.x.to(engine.device),
            query,
            upstream,
            partial(_in_batches, upstream.sample, at_once),
            engine.device,
            classes=self.classes,
            auxiliary_labels=auxiliary.y.to(engine.device),
            attributes={
                name: (target.y.to(engine.device), class_count(target.task))
                for name, target in auxiliary.targets.items()
            },
            predict=lambda x: predict(x, derive(stream, "predict", next(calls)))[0][value].to(engine.device),
            model=lambda x: whole(x)[value],
            imitate=self.imitate(client),
            training_attack=installed if isinstance(installed, TrainingAttackState) else None,
            architecture=self.architecture(party, client, releases),
            loss=self._downstream_loss(party, client),
            places=places(self.data.shape, topology.inputs, self.data.features),
            origins={
                v: topology.origins(v) for e in topology.crossings for v in engine.all_facts[client].data(e.values)
            },
        )

    def trained_segments(
        self, client: int, role: str | None, replaced: Mapping[str, nn.Module] | None = None, releases: int = 1
    ) -> SegmentRunner:
        """Return a runner of the trained segments of `client` up to `role`, or up to all heads (`role` None).

        `replaced`: segment -> module that replaces the trained one. `releases`: as in `SegmentRunner`.
        """
        engine, topology = self.engine, self.engine.topologies[client]
        members = (engine.party(client, role) for role in topology.roles)
        return SegmentRunner(
            topology,
            engine.all_facts[client],
            {**engine.modules(client, self.newest(client)), **(replaced or {})},
            self.feed(client),
            role=role,
            values={head.value: head.value for head in topology.heads},
            defenses=of_client(engine.defenses, client),
            states={key: state for member in members for key, state in member.state.defense_states.items()},
            seed=self.seed,
            releases=releases,
        )

    def _downstream_loss(self, party: str, client: int) -> Callable[[Tensor, Releases, Tensor], Tensor] | None:
        """Return the main-label loss as a function of what `party` receives; None if others compute a part of it."""
        engine, topology, role = self.engine, self.engine.topologies[client], self.engine.parties[party].role
        head = next((h for h in topology.heads if h.role == role and h.target is None and h.task is not None), None)
        if head is None or head.task is None:
            return None
        arriving = {v for e in topology.crossings if topology.role_of(e.target) == role for v in e.values}
        segments = [topology.segment(name) for name in topology.makers([head.value], given=arriving)]
        read = {head.value, *(value for segment in segments for value in segment.inputs)}
        if not arriving.intersection(read) or any(segment.role != role for segment in segments):
            return None
        value, task, modules = head.value, head.task, engine.modules_of_party(party, client)
        own = SegmentRunner(
            topology,
            engine.all_facts[client],
            modules,
            self.feed(client),
            values={value: value},
            given=arriving,
        )
        if not {v for v in arriving.intersection(read) if v not in engine.all_facts[client].data(arriving)}:
            return lambda x, releases, y: task.loss(own(x, releases)[value], y)
        # Masks arrive beside the releases, and are sent as they are.
        upstream = self.trained_segments(client, role)
        return lambda x, releases, y: task.loss(own(x, {**upstream.dataless(x), **releases})[value], y)

    def architecture(self, party: str, client: int, releases: int = 1) -> Architecture:
        """Return a function that draws the segments upstream of `party` afresh; no trained weight is reachable."""
        engine = self.engine
        topology, role = engine.topologies[client], engine.parties[party].role
        own, guards = engine.modules_of_party(party, client), of_client(engine.defenses, client)
        epochs = self.trained_rounds() * self.training.local_epochs
        return Architecture(
            topology,
            engine.all_facts[client],
            guards,
            role,
            self.seed,
            own,
            self.feed(client),
            engine.device,
            max(epochs - 1, 0),
            releases,
        )

    def lend(self, client: int, part: str, x: Tensor | RowSource, rows: Dataset | None = None) -> None:
        """Give the parties of `client` the rows `x` as their data called `part`, with the labels of `rows` if given.

        Raises `InvalidInput` if shape or dtype of the rows differ from those of the training data.
        """
        check_client(self.engine, client)
        shape = tuple(x.shape) if isinstance(x, RowSource) else tuple(x.shape[1:])
        if shape != self.data.shape:
            raise InvalidInput(f"x has rows of shape {shape}; this run was trained on {self.data.shape}")
        if x.dtype.is_floating_point == self.data.victims.discrete:
            kinds = ("whole numbers (int64)", "real numbers")[:: 1 if self.data.victims.discrete else -1]
            raise InvalidInput(f"x has rows of {x.dtype}; this run was trained on {kinds[0]}")
        heads = self.engine.topologies[client].heads
        labels = {} if rows is None else {head.value: rows.label(head.target) for head in heads}
        names, features = self.engine.topologies[client].inputs, self.data.victims.features
        self.engine.own(
            client,
            part,
            feed_rows(x, names, features) if isinstance(x, RowSource) else feed(x, names, features),
            labels,
        )

    def own_inputs(self, party: str, client: int, x: Tensor) -> dict[str, Tensor]:
        """Return the inputs that `party` itself holds for the rows `x`: input -> (n, ...), on the engine's device."""
        if party not in {p.name for p in self.engine.run_parties.replicas[client].parties.values()}:
            return {}
        owners, role = self.engine.topologies[client].inputs, self.engine.parties[party].role
        return {n: t.to(self.engine.device) for n, t in self.feed(client)(x).items() if owners[n] == role}

    def batches(self, client: int, number: int) -> list[Tensor]:
        """Return the positions of the rows in every step that `client` took in round `number`."""
        plan, rows = self.training, len(self.data.clients[client].train)
        if isinstance(self.schedule, Sampled):
            # A client that stays to the end, as one must that has sent something.
            turn = self.schedule.turn(plan, rows, number, client, (1.0, 1.0))
            return [found for _, batches in turn.epochs for found in batches]
        return [found for epoch in plan.epochs(number) for found in plan.batches(rows, epoch, client)]

    def local(self, party: str, client: int) -> LocalTraining | None:
        """Return how `client` trains, if `party` is an aggregation server; None for every other party."""
        if party != FED:
            return None
        # Where a method alone meets there, it fuses what the clients' own parties hold.
        roles = tuple(self.engine.run_parties.fed) or self.engine.topology.data_roles
        roles = tuple(role for role in roles if self.engine.party(client, role).state.optimizer is not None)
        if not roles:
            return None
        optimizer, options, clip = self._steps_of(client, roles)
        batches, topology = self.batches(client, 0), self.engine.topologies[client]
        if self.training.restart_optimizers and "momentum" in options and len(batches) == 1:
            # A step that comes first has none to go on with.
            options["momentum"] = 0.0
        traits = self.traits(client)
        sends_gradients = traits is not None and traits.sends_gradients
        sizes = [len(rows) for rows in (_first_epoch(batches) if sends_gradients else batches)]
        private = () if traits is None else traits.private_segments
        soft, hidden = ({}, ()) if traits is None else (traits.soft_labels, traits.hidden_gradients)
        local = local_training(
            topology, roles, self.feed(client), optimizer, options, sizes, sends_gradients, private, soft, hidden
        )
        if local is None:
            return None
        rows = len(torch.cat(list(batches)).unique())
        return replace(local, clip=clip, rows=rows, accumulate=self.engine.accumulate)

    def _steps_of(self, client: int, roles: Sequence[str]) -> tuple[str, dict[str, Any], float | None]:
        """Return the optimizer of the client's parties in `roles`, its options, and the norm of per-row gradients.

        Raises `InvalidInput` if the parties of a group do not train as one model would.
        """
        found = []
        for role in roles:
            optimizer, optim = self.engine.party(client, role).state.optimizer, self.engine.optims.get(role, Optim())
            assert optimizer is not None
            options = {n: v for n, v in optimizer.param_groups[0].items() if n != "params"}
            options |= {"clip_norm": optim.clip_norm, "groups": len(optim.groups)}
            found.append((optim.label, options, self._clip_norm(client, role)))
        for role, other in zip(roles, found, strict=True):
            if other != found[0]:
                raise InvalidInput(
                    f"the parties {roles[0]!r} and {role!r} of a group train by steps of different kinds; an attack "
                    "on their updates follows one optimizer: give both the same"
                )
        if len(roles) > 1 and (found[0][1]["clip_norm"] or found[0][2] is not None):
            raise InvalidInput(
                "each party of a group clips the gradient of its own segments; an attack on their updates clips that "
                "of the whole model, which is another: leave clipping out"
            )
        return found[0]

    def traits(self, client: int) -> MethodTraits | None:
        """Return the traits of the run's method for the model of `client`; None without a method."""
        return None if self.method is None else self.method.traits(self.engine.topologies[client])

    def _clip_norm(self, client: int, role: str) -> float | None:
        """Return the norm to which the defenses of `client` clip per-row gradients at `role`; None if none clips."""
        topology, guards = self.engine.topologies[client], of_client(self.engine.defenses, client)
        norms = [d.clip_norm(topology, role) for d in guards if isinstance(d, WeightDefense)]
        return next((norm for norm in norms if norm is not None), None)

    def feed(self, client: int) -> Feed:
        """Return the function from raw rows to the inputs of the client's topology; it holds no data."""
        return feed_of(self.engine.topologies[client], self.data)

    @property
    def classes(self) -> int | None:
        """Number of classes of the main labels; None for regression."""
        return class_count(self.data.task)

    def imitate(self, client: int) -> Imitate:
        """Return a function that trains a copy of the client's whole model from fresh weights, as the run did."""

        def imitate(x: Tensor, y: Tensor, epochs: int | None, batch_size: int | None, seed: int) -> Rerun:
            plan = self.training.of_client(client)
            passes = self.trained_rounds() * plan.local_epochs if epochs is None else epochs
            copied = Rerun(self.engine, client, self.feed(client), seed)
            size = plan.batch_size if batch_size is None else batch_size
            copied.train(x, y, passes, size, plan.local_epochs if plan.restart_optimizers else None, plan.drop_last)
            return copied

        return imitate

    def _query(self, party: str, client: int, seed: int, releases: int, at_once: int) -> Callable[[Tensor], Releases]:
        """Return a query: the mean of what `party` receives in `releases` passes of rows, drawn afresh in each call."""
        calls, send = count(1), self._send(party, client)

        def query(x: Tensor) -> Releases:
            call = next(calls)
            views = (send(x, release_seed(seed, call, release=release))[1] for release in range(releases))
            arrived = (view.select(kind="activation").tensors(self.engine.device) for view in views)
            return mean_release(arrived, releases)[0]

        return partial(_in_batches, query, at_once)

    def _send(self, party: str | None, client: int) -> Callable[[Tensor, int], tuple[Mapping[str, Tensor], View]]:
        """Return a function (rows, draw number) -> (outputs, view of `party`) that runs all parties of `client`.

        With `party` None the view is empty.
        """

        def send(x: Tensor, number: int) -> tuple[Mapping[str, Tensor], View]:
            self.lend(client, "query", x)
            with torch.no_grad(), self.engine.record_party(party) as recorder:
                prediction = self.engine.predict(client, "query", "query", number, borrow=self.newest(client))
            return prediction.outputs, recorder.view()

        return send


def feed_of(topology: Topology, data: Federation) -> Feed:
    """Return the function from raw rows of `data` to the inputs of `topology`; it holds no data."""
    return partial(feed, names=topology.inputs, features=data.victims.features)


def find_party(engine: Engine, name: str) -> str:
    """Return the party called `name`, or the only party of that role; raise `InvalidInput` for none or several."""
    if name in engine.parties:
        return name
    playing = [party for party, one in engine.parties.items() if one.role == name]
    if len(playing) > 1:
        raise InvalidInput(f"{len(playing)} parties play the role {name!r}: name one, such as {playing[0]!r}")
    if not playing:
        raise unknown("party", name, engine.parties)
    return playing[0]


def check_client(engine: Engine, client: int) -> None:
    """Raise `InvalidInput` unless `client` is the number of a client of `engine`."""
    if not 0 <= client < engine.replicas:
        raise InvalidInput(f"client={client} is not allowed; expected 0 to {engine.replicas - 1}")


def _in_batches(ask: Callable[[Tensor], Releases], size: int, x: Tensor) -> Releases:
    """Return the result of `ask` for rows x (n, *shape), called on `size` rows at a time: value -> (n, ...)."""
    parts = [ask(rows) for rows in x.split(size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]


def class_count(task: Task) -> int | None:
    """Return the number of classes of `task`; None for regression."""
    return {"classification": task.outputs, "binary": 2}.get(task.name)


def _first_epoch(batches: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the batches of the first epoch, whose mean gradient equals that of several epochs at the same weights.

    Raises `InvalidInput` if the batches end inside an epoch.
    """
    counts = torch.cat(list(batches)).unique(return_counts=True)[1]
    if int(counts.min()) != int(counts.max()):
        raise InvalidInput(
            "some rows of the client count more often than others in the gradient it sends; expected whole epochs"
        )
    sizes = torch.tensor([len(rows) for rows in batches]).cumsum(0)
    return batches[: 1 + int((sizes < len(counts)).sum())]


def curious(topology: Topology) -> str:
    """Return the default adversary: the first party without data; raise `InvalidInput` if every party holds data."""
    if (role := next((r for r in topology.roles if r not in topology.data_roles), None)) is None:
        raise InvalidInput(f"topology {topology.name!r} has no party without data: name the adversary")
    return role
