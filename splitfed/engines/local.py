"""The local engine: every party in this process, messages handed over without a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.defense import Defense
from splitfed.engines.base import CONSULTED, FED, Placement, Prediction, Source
from splitfed.engines.fusion import Gathering
from splitfed.engines.mean import Mean, shares
from splitfed.engines.placing import Crew
from splitfed.engines.residents import Inside, Sentry
from splitfed.engines.summing import Summing
from splitfed.engines.taking import Taking
from splitfed.executor import Combine, Lane, exchange, exchange_together, predict_step
from splitfed.graph import Topology, weights
from splitfed.optim import Optim
from splitfed.party import Batch, Party
from splitfed.probe import Facts
from splitfed.traffic import Traffic
from splitfed.view import Message, Recorder, Recording, Stamp, View

Tap = Callable[[Message], Message]


class LocalLink:
    """Counts a message, lets its receiver's recorder see it, and hands it over."""

    def __init__(self, traffic: Traffic, recorders: Mapping[str, Recorder]) -> None:
        self.traffic = traffic
        self.recorders = dict(recorders)
        self.taps: dict[str, Tap] = {}
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.readers: dict[str, Tap] = {}

    def deliver(self, message: Message) -> Message:
        """Carry `message`; an adversary's tap may replace what its party sends, its reader what that party uses."""
        tap = self.taps.get(message.sender)
        if tap is not None:
            message = tap(message)
        self.traffic.count(message)
        recorder = self.recorders.get(message.receiver)
        if recorder is not None:
            recorder.receive(message)
        listener = self.listeners.get(message.receiver)
        if listener is not None:
            listener(message)
        if message.sender == FED and FED in self.recorders:
            # What came back says little without what it was made from.
            self.recorders[FED].receive(message)
        reader = self.readers.get(message.receiver)
        return message if reader is None else reader(message)


class LocalEngine:
    """Parties of `lanes` clients on one topology: data owners one a lane, the other roles shared by all lanes.

    A list of topologies, one a lane, gives clients segments of different make on the same shared roles.
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
    ) -> None:
        self.topologies = [topology] * lanes if isinstance(topology, Topology) else list(topology)
        self.all_facts = [facts] * lanes if isinstance(facts, Facts) else list(facts)
        self.topology, self.facts = self.topologies[0], self.all_facts[0]
        self.defenses = tuple(defenses)
        self.optims = dict(optims or {})
        # By how many rows each lane divides a step's losses, where batches are drawn so that their size varies.
        self._expected = None if expected is None else tuple(expected)
        self._taken = [Taking() for _ in range(lanes)]
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.crew = Crew(
            self.topologies, self.all_facts, placement or Placement(), defenses, optims or {}, seed, self.device
        )
        recorders = (recording or Recording()).recorders(tuple(self.parties), folder)
        self.link = LocalLink(self.traffic, recorders)
        self._watched: dict[str, Recorder] = {}
        self.insiders: dict[str, Inside] = {}
        self.sentries: dict[str, Sentry] = {}
        self._seed = seed
        # The secure sums of this round, by role.
        self._sums: dict[str, Summing] = {}

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        return len(self.crew.lanes)

    @property
    def parties(self) -> dict[str, Party]:
        """Every party by name; where a role has copies, the party that merges them."""
        return self.crew.parties

    def party(self, lane: int, role: str) -> Party:
        """Return the party that plays `role` for `lane`, as it trains."""
        return self.crew.lanes[lane].parties[role]

    def join(self, party: str, insider: Inside) -> None:
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
            mine = {v: t for v, t in inputs.items() if topology.inputs[v] == role}
            known = {h.value: labels[h.value] for h in topology.heads if h.labels == role and h.value in labels}
            self.party(lane, role).own(part, mine, known, relabel, among)

    def drop(self, lane: int, part: str) -> None:
        """Let the data owners of `lane` forget the rows called `part`."""
        for role in self.topologies[lane].data_roles:
            self.party(lane, role).drop(part)

    def show(self, lane: int, part: str, rows: Tensor) -> None:
        """Let `part` of `lane` be these `rows` of its part "train", as the data owners train on them."""
        for role in self.topologies[lane].data_roles:
            self.party(lane, role).show(part, rows)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self._seed

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return self.party(lane, self.topology.data_roles[0]).rows(part)

    def train(
        self,
        lane: int,
        epoch: int,
        batches: Sequence[Tensor],
        first: int = 0,
        part: str = "train",
        task: float = 1.0,
    ) -> list[float]:
        """Train `lane` on `batches` of `part`; return the total loss of each step that had rows.

        `task` multiplies the losses of the heads; at 0 no label crosses.
        """
        place = self.crew.lanes[lane]
        losses = []
        self._taken[lane].add(epoch, batches, part)
        # What a method has trained besides belongs to the epoch that the lane has come to.
        counts_as = None if part == "train" else self._taken[lane].newest
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

    def train_at_once(self, turns: Mapping[int, Sequence[tuple[int, Sequence[Tensor]]]]) -> dict[int, list[float]]:
        """Train several lanes; here one after another, which gives each the same bits."""
        return {
            lane: [loss for epoch, batches in epochs for loss in self.train(lane, epoch, batches)]
            for lane, epochs in turns.items()
        }

    def train_together(
        self,
        epoch: int,
        step: int,
        batches: Mapping[int, Tensor],
        scales: Mapping[int, float],
        combine: Combine | None = None,
    ) -> dict[int, float]:
        """Take one step of every party on the sum of the lanes' losses; see `Trainer.train_together`."""
        for lane, rows in batches.items():
            self._taken[lane].add(epoch, [rows])
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
        made: dict[str, list[Tensor]] = {}
        with self.borrowed(lane, borrow):
            for step, rows in enumerate(torch.arange(self.rows(lane, part)).split(batch_size)):
                stamp = place.stamp(phase, number, step, part)
                for name, value in predict_step(place, self.link, Batch(part, rows), stamp, heads, also).items():
                    if name in outputs:
                        outputs[name].append(value.cpu())
                    if name in also:
                        made.setdefault(name, []).append(value)
        labels = {}
        for h in heads:
            known = place.parties[h.labels].labels(part)
            if h.value in known:
                labels[h.value] = known[h.value].cpu()
        joined, besides = ({name: torch.cat(parts) for name, parts in found.items()} for found in (outputs, made))
        return Prediction(joined, labels, besides)

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
        place, newest = self._serving(lane), max(0, *(taken.newest for taken in self._taken))
        with self.borrowed(lane, borrow), _untouched([m for p in place.parties.values() for m in p.modules.values()]):
            for step, rows in enumerate(torch.arange(self.rows(lane, part)).split(batch_size)):
                batch = Batch(part, rows, counts_as=newest)
                exchange(place, self.link, batch, place.stamp("rehearse", number, step, part))
                for party in place.parties.values():
                    for module in party.modules.values():
                        module.zero_grad(set_to_none=True)

    def gradient(self, lane: int, batches: Sequence[Tensor], part: str = "train") -> dict[str, Tensor]:
        """Return the gradient of the mean loss of `lane` over the rows of `batches`: `segment/name` -> tensor.

        In training mode; no weight moves, no buffer changes, and nobody learns of it.
        """
        place, total = self._serving(lane), sum(len(rows) for rows in batches)
        newest = max(0, *(taken.newest for taken in self._taken))
        modules = {name: m for party in place.parties.values() for name, m in party.modules.items()}
        with _untouched(list(modules.values())):
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
    def borrowed(self, lane: int, source: Source | None) -> Iterator[None]:
        """Let the data owners of `lane` use the segments of `source` for the length of the block."""
        if source is None or source == lane:
            yield
            return
        if isinstance(source, Mapping):
            with self._filled(lane, source):
                yield
            return
        place = self.crew.placement
        lenders = self.crew.fed if isinstance(source, str) else self.crew.lanes[source].parties
        borrowers = {role: self.party(lane, role) for role in self.topology.data_roles if role in lenders}
        kept = {role: party.modules for role, party in borrowers.items()}
        try:
            for role, party in borrowers.items():
                lent = {n: party.modules[n] if n in place.kept else m for n, m in lenders[role].modules.items()}
                party.modules = lent if place.buffers else _with_weights(party.modules, lent)
            yield
        finally:
            for role, party in borrowers.items():
                party.modules = kept[role]

    def held_by(self, party: str, lane: int) -> dict[str, nn.Module]:
        """Return the segments that `party` holds for `lane`: the party's own modules, not copies."""
        mine = {p.name: p for p in self._serving(lane).parties.values()}
        return mine.get(party, self.parties[party]).modules

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one lane's party to another's; `via` sees them if given."""
        sender, receiver = self.party(source, role), self.party(target, role)
        stamp, kept = Stamp("train", source, epoch, 0), self.crew.placement.kept
        if via is None:
            arrived = self.link.deliver(sender.upload(receiver.name, stamp, kept=kept))
        else:
            stop = self.link.deliver(sender.upload(via, stamp, kept=kept))
            arrived = self.link.deliver(stop._replace(sender=via, receiver=receiver.name))
        receiver.adopt(arrived.tensors, kept)

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """Send what the fed server holds to the parties of `lanes` in every fused role."""
        place = self.crew.placement
        for role, fed in self.crew.fed.items():
            for lane in lanes:
                party = self.party(lane, role)
                message = fed.upload(party.name, Stamp("train", lane, epoch, 0), place.buffers, place.kept)
                party.adopt(self.link.deliver(message).tensors, place.kept)
            if place.secure is not None:
                self._sums[role] = self._open(role, lanes, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Send the fused roles' weights of these lanes to the fed server, which keeps what they are fused to."""
        place = self.crew.placement
        for role, fed in self.crew.fed.items():
            if place.secure is not None:
                fed.adopt(self._summed(role, weights, epoch), place.kept)
                continue
            fused = self._gathering()
            for lane, share in shares(weights).items():
                fused.add(self.link.deliver(self._upload(lane, role, epoch)).tensors, share)
            fed.adopt(fused.value(), place.kept)

    def branch(self, lanes: Sequence[int]) -> None:
        """Let the copies of every copied role start from the merged one."""
        for role, copies in self.crew.copies.items():
            tensors = self.crew.shared[role].contents()
            for lane in lanes:
                copies[lane].adopt(tensors)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Replace every copied role's segments by what its copies are fused to."""
        for role, copies in self.crew.copies.items():
            fused = self._gathering()
            for lane, share in shares(weights).items():
                fused.add(copies[lane].contents(), share)
            self.crew.shared[role].adopt(fused.value())

    def end_round(self) -> None:
        """Advance every party's learning-rate scheduler."""
        for party in self.crew.members().values():
            party.end_round()

    def modules(self, lane: int, borrow: Source | None = None) -> dict[str, nn.Module]:
        """Return the modules `lane` would use by segment, for the experimenter: the parties' own, not copies."""
        with self.borrowed(lane, borrow):
            return {n: m for party in self._serving(lane).parties.values() for n, m in party.modules.items()}

    def view(self, party: str) -> View:
        """Return what was recorded of `party`, with the segments it holds."""
        recorder = self.link.recorders.get(party, Recorder(party))
        return recorder.view(self.parties[party].modules)

    @contextmanager
    def watching(self, party: str | None) -> Iterator[Recorder]:
        """Record everything `party` receives inside the block (None: nobody); the run's own recorders rest."""
        kept, outer = self.link.recorders, self._watched
        recorder = Recorder(party or "", budget=2**62)
        self._watched = {} if party is None else {**outer, party: recorder}
        self.link.recorders = self._watched
        try:
            yield recorder
        finally:
            self.link.recorders, self._watched = kept, outer

    def state(self) -> dict[str, Any]:
        """Return the state of every party, recorder and counter."""
        return {
            "parties": {name: party.state() for name, party in self.crew.members().items()},
            "recorders": {name: recorder.state() for name, recorder in self.link.recorders.items()},
            "traffic": self.traffic.state(),
            "taken": [taken.state() for taken in self._taken],
            "insiders": {name: insider.state() for name, insider in self.insiders.items()},
            "sentries": {name: sentry.state() for name, sentry in self.sentries.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        for name, party in self.crew.members().items():
            party.load_state(state["parties"][name])
        for name, recorder in self.link.recorders.items():
            recorder.load_state(state["recorders"][name])
        self.traffic.load_state(state["traffic"])
        for taken, counts in zip(self._taken, state["taken"], strict=True):
            taken.load_state(counts)
        for name, insider in self.insiders.items():
            insider.load_state(state["insiders"][name])
        for name, sentry in self.sentries.items():
            sentry.load_state(state["sentries"][name])
        # A sum lasts from a download to the upload of the same round.
        self._sums = {}

    def taken(self, lane: int) -> tuple[int, int]:
        """Return in how many steps `lane` has taken part in training, and in how many its row that was in most."""
        return self._taken[lane].steps, self._taken[lane].most

    def _gathering(self) -> Gathering:
        fusion = self.crew.placement.fusion
        return Mean() if fusion is None else fusion.start()

    def _upload(self, lane: int, role: str, epoch: int) -> Message:
        place = self.crew.placement
        return self.party(lane, role).upload(FED, Stamp("train", lane, epoch, 0), place.buffers, place.kept)

    def _open(self, role: str, lanes: Iterable[int], epoch: int) -> Summing:
        plan = self.crew.placement.secure
        assert plan is not None
        names = {lane: self.party(lane, role).name for lane in lanes}
        return Summing(plan, role, names, epoch, self._seed, self.link.deliver).open()

    def _summed(self, role: str, weights: Mapping[int, float], epoch: int) -> dict[str, Tensor]:
        """Return the weighted mean as a secure sum gives it; who misbehaves bends its upload before it is masked."""
        summing = self._sums.pop(role, None) or self._open(role, weights, epoch)
        uploads = {}
        for lane in weights:
            message = self._upload(lane, role, epoch)
            tap = self.link.taps.get(message.sender)
            uploads[lane] = (message if tap is None else tap(message)).tensors
        return summing.close(uploads, weights)

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
        for party in {id(p): p for place in places for p in place.parties.values()}.values():
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
    def _filled(self, lane: int, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the data owners of `lane` use copies of their segments with `tensors` in them."""
        borrowers = [self.party(lane, role) for role in self.topologies[lane].data_roles]
        kept = [party.modules for party in borrowers]
        try:
            for party in borrowers:
                party.modules = _with_tensors(party.modules, tensors)
            yield
        finally:
            for party, modules in zip(borrowers, kept, strict=True):
                party.modules = modules


@contextmanager
def _untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put buffers back, also those that a module replaces, and leave no gradient, however the block ends."""
    inner = {id(m): m for module in modules for m in module.modules()}.values()
    kept = [(m, {name: None if b is None else b.clone() for name, b in m._buffers.items()}) for m in inner]
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)
        for module in modules:
            module.zero_grad(set_to_none=True)


def _with_tensors(own: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return modules like `own` with `tensors`, named `segment/name`, in them as far as they go.

    Weights are not copied, buffers are: nobody trains what is lent, but a forward pass may change statistics.
    """
    held: dict[int, Any] = {}
    for segment, module in own.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            given = tensors.get(f"{segment}/{name}", weight).detach().to(weight.device)
            held[id(weight)] = nn.Parameter(given, weight.requires_grad)
    # Copied together, so that weights which a party shares between its segments stay shared.
    made = copy.deepcopy(dict(own), held)
    for segment, module in made.items():
        for name, buffer in module.named_buffers():
            if f"{segment}/{name}" in tensors:
                buffer.copy_(tensors[f"{segment}/{name}"])
    return made


def _with_weights(own: Mapping[str, nn.Module], lent: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return copies of `own` with the weights of `lent` and buffers of their own."""
    made = copy.deepcopy(dict(own))
    for name, module in made.items():
        module.load_state_dict({**module.state_dict(), **weights(lent[name])})
    return made


def _total(lane: Lane, losses: Mapping[str, float]) -> float:
    """The loss of a step: that of every head, times its weight."""
    return sum(head.weight * losses[head.value] for head in lane.topology.heads if head.value in losses)
