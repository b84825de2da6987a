"""The local engine: every party in this process, messages handed over in memory, or as bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense
from splitfed.core.executor import Combine, Lane, exchange, exchange_together, predict_step
from splitfed.core.messages import Recorder, Recording, Stamp, View
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.probe import Facts
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.core.traffic import Traffic
from splitfed.engines.base import CONSULTED, LaneBatches, Placement, Prediction, Source, Trainer
from splitfed.engines.borrowed_weights import preserve_buffers, with_tensors, with_weights
from splitfed.engines.message_link import LocalLink
from splitfed.engines.observers import AttackObserver, DetectorObserver
from splitfed.engines.participation import Participation
from splitfed.engines.parties import RunParties
from splitfed.engines.weight_transfer import WeightTransfer


class LocalEngine(WeightTransfer, Trainer):
    """Parties of `lanes` clients on one topology: data owners one a lane, the other roles shared by all lanes.

    A list of topologies, one a lane, gives clients segments of different make on the same shared roles. `link`: what
    carries the messages, such as `ByteLink`.
    """

    def __init__(
        self,
        topology: Topology | Sequence[Topology],
        facts: Facts | Sequence[Facts],
        lanes: int,
        *,
        defenses: Sequence[Defense] = (),
        optims: Mapping[str, Optim] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        recording: Recording | None = None,
        folder: Path | None = None,
        placement: Placement | None = None,
        expected: Sequence[float] | None = None,
        link: type[LocalLink] = LocalLink,
    ) -> None:
        self.topologies = [topology] * lanes if isinstance(topology, Topology) else list(topology)
        self.all_facts = [facts] * lanes if isinstance(facts, Facts) else list(facts)
        self.topology, self.facts, self.lanes = self.topologies[0], self.all_facts[0], lanes
        self.defenses = tuple(defenses)
        self.optims = dict(optims or {})
        # By how many rows each lane divides a step's losses, where batches are drawn so that their size varies.
        self._expected = None if expected is None else tuple(expected)
        self._participation = [Participation() for _ in range(lanes)]
        self.device = torch.device(device)
        self.traffic = Traffic()
        crew = RunParties(
            self.topologies, self.all_facts, placement or Placement(), defenses, optims or {}, seed, self.device
        )
        recorders = (recording or Recording()).recorders(tuple(crew.parties), folder)
        super().__init__(crew, link(self.traffic, recorders), seed)
        self._watched: dict[str, Recorder] = {}
        self.insiders: dict[str, AttackObserver] = {}
        self.sentries: dict[str, DetectorObserver] = {}

    @property
    def parties(self) -> dict[str, Party]:
        """Every party by name; where a role has copies, the party that merges them."""
        return self.crew.parties

    def join(self, party: str, insider: AttackObserver) -> None:
        """Let `insider` see all that `party` receives, and stand where it sends."""
        self.insiders[party] = insider
        self.link.listeners[party] = insider.receive
        self.link.taps[party] = insider.send

    def own(
        self,
        lane: int,
        part: str,
        inputs: Mapping[str, Tensor],
        labels: Mapping[str, Tensor],
        relabel: bool = True,
        among: Tensor | None = None,
    ) -> None:
        """Give each data owner of `lane` the inputs and labels that are its own.

        `relabel`: whether defenses change the labels to train on. `among`: as in `Party.own`.
        """
        topology = self.topologies[lane]
        for role in topology.data_roles:
            own_inputs = {v: t for v, t in inputs.items() if topology.inputs[v] == role}
            own_labels = {h.value: labels[h.value] for h in topology.heads if h.labels == role and h.value in labels}
            self.party(lane, role).state.own(part, own_inputs, own_labels, relabel, among)

    def drop(self, lane: int, part: str) -> None:
        """Let the data owners of `lane` forget the rows called `part`."""
        for role in self.topologies[lane].data_roles:
            self.party(lane, role).state.drop(part)

    def show(self, lane: int, part: str, rows: Tensor) -> None:
        """Let `part` of `lane` be these `rows` of its part "train", as the data owners train on them."""
        for role in self.topologies[lane].data_roles:
            self.party(lane, role).state.show(part, rows)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._seed

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return self.party(lane, self.topology.data_roles[0]).state.rows(part)

    def train(
        self, lane: int, epoch: int, batches: Sequence[Tensor], first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Train `lane` on `batches` of `part`; return the total loss of each step that had rows.

        `task` multiplies the losses of the heads; at 0 no label crosses.
        """
        place = self.crew.lanes[lane]
        losses = []
        self._participation[lane].add(epoch, batches, part)
        # What a method has trained besides belongs to the epoch that the lane has come to.
        counts_as = None if part == "train" else self._participation[lane].newest
        for step, rows in enumerate(batches, first):
            stamp = place.stamp("train", epoch, step, part)
            if self._expected is not None and len(rows) == 0:
                for party in place.parties.values():
                    party.skip(self._expected[lane], stamp)
                continue
            values = exchange(place, self.link, self._batch(place, rows, stamp, task, counts_as), stamp)
            self._update([place])
            losses.append(_total(place, values))
        return losses

    def train_together(
        self, epoch: int, step: int, batches: LaneBatches, scales: Mapping[int, float], combine: Combine | None = None
    ) -> dict[int, float]:
        """Take one step of every party on the sum of the lanes' losses; see `Trainer.train_together`."""
        for lane, rows in batches.items():
            self._participation[lane].add(epoch, [rows])
        places = [self.crew.lanes[lane] for lane in batches]
        stamps = [place.stamp("train", epoch, step) for place in places]
        turns = [
            (place, self._batch(place, batches[place.index], stamp), stamp, scales[place.index])
            for place, stamp in zip(places, stamps, strict=True)
        ]
        if combine is None:
            values = [exchange(place, self.link, batch, stamp, scale) for place, batch, stamp, scale in turns]
        else:
            values = exchange_together(turns, self.link, combine)
        self._update(places)
        return {place.index: _total(place, found) for place, found in zip(places, values, strict=True)}

    def predict(
        self,
        lane: int,
        part: str,
        phase: str,
        number: int = 0,
        borrow: Source | None = None,
        batch_size: int = 256,
        head: str | None = None,
        also: Collection[str] = (),
    ) -> Prediction:
        """Run `part` of `lane` forward in evaluation mode; see `Engine.predict`."""
        place = self._serving(lane)
        topology = place.topology
        heads = [h for h in topology.heads if h.value == head] if head else topology.answering
        outputs: dict[str, list[Tensor]] = {h.value: [] for h in heads}
        further: dict[str, list[Tensor]] = {}
        with self.borrow_segments(lane, borrow):
            for step, rows in enumerate(torch.arange(self.rows(lane, part)).split(batch_size)):
                stamp = place.stamp(phase, number, step, part)
                for name, value in predict_step(place, self.link, Batch(part, rows), stamp, heads, also).items():
                    if name in outputs:
                        outputs[name].append(value.cpu())
                    if name in also:
                        further.setdefault(name, []).append(value)
        labels = {}
        for h in heads:
            part_labels = place.parties[h.labels].state.labels(part)
            if h.value in part_labels:
                labels[h.value] = part_labels[h.value].cpu()
        joined_outputs, joined_values = (
            {name: torch.cat(parts) for name, parts in tensors_by_name.items()}
            for tensors_by_name in (outputs, further)
        )
        return Prediction(joined_outputs, labels, joined_values)

    def consult(self, lane: int, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Pass `rows` of `part` of `lane` forward in evaluation mode; return the output `value` of the model."""
        place, found = self.crew.lanes[lane], []
        for step, few in enumerate(rows.split(CONSULTED)):
            stamp = place.stamp("consult", number, step, part)
            found.append(predict_step(place, self.link, Batch(part, few), stamp)[value])
        return torch.cat(found)

    def rehearse(self, lane: int, part: str, number: int, borrow: Source | None = None, batch_size: int = 64) -> None:
        """Send `part` of `lane` through training steps that move no weight and leave no trace in buffer or gradient.

        They count as steps of the newest epoch of training.
        """
        place, newest = self._serving(lane), max(0, *(taken.newest for taken in self._participation))
        with (
            self.borrow_segments(lane, borrow),
            preserve_buffers([m for p in place.parties.values() for m in p.state.modules.values()]),
        ):
            for step, rows in enumerate(torch.arange(self.rows(lane, part)).split(batch_size)):
                batch = Batch(part, rows, counts_as=newest)
                exchange(place, self.link, batch, place.stamp("rehearse", number, step, part))
                for party in place.parties.values():
                    for module in party.state.modules.values():
                        module.zero_grad(set_to_none=True)

    def gradient(self, lane: int, batches: Sequence[Tensor], part: str = "train") -> dict[str, Tensor]:
        """Return the gradient of the mean loss of `lane` over the rows of `batches`: `segment/name` -> tensor.

        In training mode; no weight moves, no buffer changes, and nobody learns of it.
        """
        place, total = self._serving(lane), sum(len(rows) for rows in batches)
        newest = max(0, *(taken.newest for taken in self._participation))
        modules = {name: m for party in place.parties.values() for name, m in party.state.modules.items()}
        with preserve_buffers(list(modules.values())):
            for step, rows in enumerate(batches):
                stamp = place.stamp("rehearse", 0, step, part)
                exchange(place, self.link, Batch(part, rows, counts_as=newest), stamp, len(rows) / total)
            return {
                f"{segment}/{name}": weight.grad.clone()
                for segment, module in modules.items()
                for name, weight in module.named_parameters()
                if weight.grad is not None
            }

    @contextmanager
    def borrow_segments(self, lane: int, source: Source | None) -> Iterator[None]:
        """Let the data owners of `lane` use the segments of `source` for the length of the block."""
        if source is None or source == lane:
            yield
            return
        if isinstance(source, Mapping):
            with self._fill_segments(lane, source):
                yield
            return
        place = self.crew.placement
        lenders = self.crew.fed if isinstance(source, str) else self.crew.lanes[source].parties
        borrowers = {role: self.party(lane, role) for role in self.topology.data_roles if role in lenders}
        own_modules = {role: party.state.modules for role, party in borrowers.items()}
        try:
            for role, party in borrowers.items():
                lent = {
                    n: party.state.modules[n] if n in place.kept else m for n, m in lenders[role].state.modules.items()
                }
                party.state.modules = lent if place.buffers else with_weights(party.state.modules, lent)
            yield
        finally:
            for role, party in borrowers.items():
                party.state.modules = own_modules[role]

    def modules_of_party(self, party: str, lane: int) -> dict[str, nn.Module]:
        """Return the segments that `party` holds for `lane`: the party's own modules, not copies."""
        mine = {p.name: p for p in self._serving(lane).parties.values()}
        return mine.get(party, self.parties[party]).state.modules

    def restart_optimizers(self) -> None:
        """Let every party's optimizer forget its state, such as momentum; weights and learning rates stay."""
        for party in self.crew.members().values():
            party.state.restart()

    def start_from(self, lane: int, tensors: Mapping[str, Tensor]) -> None:
        """Let the client of `lane` start from `tensors`, `segment/name` -> tensor, in place of its topology's."""
        for role in self.topologies[lane].data_roles if tensors else ():
            party = self.party(lane, role)
            party.state.adopt({**party.state.contents(copies=False), **tensors})

    def end_round(self) -> None:
        """Advance every party's learning-rate scheduler."""
        for party in self.crew.members().values():
            party.state.end_round()

    def modules(self, lane: int, borrow: Source | None = None) -> dict[str, nn.Module]:
        """Return the modules `lane` would use by segment, for the experimenter: the parties' own, not copies."""
        with self.borrow_segments(lane, borrow):
            return {n: m for party in self._serving(lane).parties.values() for n, m in party.state.modules.items()}

    def view(self, party: str) -> View:
        """Return what was recorded of `party`, with the segments it holds."""
        recorder = self.link.recorders.get(party, Recorder(party))
        return recorder.view(self.parties[party].state.modules)

    @contextmanager
    def record_party(self, party: str | None) -> Iterator[Recorder]:
        """Record everything `party` receives inside the block (None: nobody); the run's own recorders rest."""
        recorders, outer = self.link.recorders, self._watched
        recorder = Recorder(party or "", budget=2**62)
        self._watched = {} if party is None else {**outer, party: recorder}
        self.link.recorders = self._watched
        try:
            yield recorder
        finally:
            self.link.recorders, self._watched = recorders, outer

    def state(self) -> dict[str, Any]:
        """Return the state of every party, recorder and counter."""
        return {
            "parties": {name: party.state.state_dict() for name, party in self.crew.members().items()},
            "recorders": {name: recorder.state() for name, recorder in self.link.recorders.items()},
            "traffic": self.traffic.state(),
            "taken": [taken.state() for taken in self._participation],
            "insiders": {name: insider.state() for name, insider in self.insiders.items()},
            "sentries": {name: sentry.state() for name, sentry in self.sentries.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        for name, party in self.crew.members().items():
            party.state.load_state_dict(state["parties"][name])
        for name, recorder in self.link.recorders.items():
            recorder.load_state(state["recorders"][name])
        self.traffic.load_state(state["traffic"])
        for taken, counts in zip(self._participation, state["taken"], strict=True):
            taken.load_state(counts)
        for name, insider in self.insiders.items():
            insider.load_state(state["insiders"][name])
        for name, sentry in self.sentries.items():
            sentry.load_state(state["sentries"][name])
        # A sum lasts from a download to the upload of the same round.
        self._sums = {}

    def step_counts(self, lane: int) -> tuple[int, int]:
        """Return in how many steps `lane` has taken part in training, and in how many its row that was in most."""
        return self._participation[lane].steps, self._participation[lane].most

    def _batch(self, place: Lane, rows: Tensor, stamp: Stamp, task: float = 1.0, counts_as: int | None = None) -> Batch:
        """Return the rows of a step, or what a sentry of the lane puts in their place."""
        # Rows of another part than the client's own are not drawn by chance.
        drawn = self._expected if stamp.part == "train" else None
        batch = Batch(stamp.part, rows, None if drawn is None else drawn[place.index], counts_as, task)
        for party in place.parties.values() if self.sentries else ():
            if sentry := self.sentries.get(party.name):
                batch = sentry.batch(party, batch, stamp)
        return batch

    def _update(self, places: Sequence[Lane]) -> None:
        """Let every party of a step learn, unless its sentry objects; then let the insiders do their own."""
        for party in _distinct(places):
            sentry = self.sentries.get(party.name)
            if sentry is None or sentry.keeps(party):
                party.update()
            else:
                party.drop_gradients()
        for insider in self.insiders.values():
            insider.step_ended()

    def _serving(self, lane: int) -> Lane:
        """The lane as it predicts: with the merged segments where it trains a copy."""
        place = self.crew.lanes[lane]
        if not self.crew.copies:
            return place
        merged = {role: self.crew.shared[role] for role in self.crew.copies}
        return Lane(place.index, place.topology, {**place.parties, **merged}, place.circuit)

    @contextmanager
    def _fill_segments(self, lane: int, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the data owners of `lane` use copies of their segments with `tensors` in them."""
        borrowers = [self.party(lane, role) for role in self.topologies[lane].data_roles]
        own_modules = [party.state.modules for party in borrowers]
        try:
            for party in borrowers:
                party.state.modules = with_tensors(party.state.modules, tensors)
            yield
        finally:
            for party, modules in zip(borrowers, own_modules, strict=True):
                party.state.modules = modules


def _total(lane: Lane, losses: Mapping[str, float]) -> float:
    """The loss of a step: that of every head, times its weight."""
    total = 0.0
    for head in lane.topology.heads:
        if head.value in losses:
            total += head.weight * losses[head.value]
    return total


def _distinct(places: Sequence[Lane]) -> Sequence[Party]:
    """Every party of `places` once."""
    if len(places) == 1:
        return places[0].members
    return list({id(party): party for place in places for party in place.members}.values())
