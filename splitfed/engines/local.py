"""The local engine: every party in this process, messages handed over without a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.defense import Defense
from splitfed.duty import duties
from splitfed.engines.base import Prediction
from splitfed.errors import InvalidInput
from splitfed.executor import Lane, predict_step, train_step
from splitfed.graph import Topology
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

    def deliver(self, message: Message) -> Message:
        """Carry `message`; an active adversary's tap at the sender may replace what it sends."""
        tap = self.taps.get(message.sender)
        if tap is not None:
            message = tap(message)
        self.traffic.count(message)
        recorder = self.recorders.get(message.receiver)
        if recorder is not None:
            recorder.receive(message)
        return message


class LocalEngine:
    """Parties of `lanes` clients on one topology: data owners one a lane, the other roles shared by all lanes."""

    def __init__(
        self,
        topology: Topology,
        facts: Facts,
        lanes: int,
        *,
        defenses: Sequence[Defense] = (),
        optims: Mapping[str, Optim] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        recording: Recording | None = None,
        folder: Path | None = None,
    ) -> None:
        self.topology = topology
        self.facts = facts
        self.defenses = tuple(defenses)
        self.device = torch.device(device)
        self.traffic = Traffic()
        work = duties(topology, facts, defenses)
        weight = prod(d.task_weight for d in defenses)
        modules = {s.name: s.module for s in topology.segments}

        def party(role: str, name: str) -> Party:
            optim = (optims or {}).get(role, Optim())
            return Party(name, role, work[role], modules, optim, seed, facts.shapes, device, weight)

        shared = {role: party(role, role) for role in topology.roles if role not in topology.data_roles}
        own = [{role: party(role, f"{role}{i}") for role in topology.data_roles} for i in range(lanes)]
        self._lanes = [
            Lane(i, {role: {**parties, **shared}[role] for role in topology.roles}) for i, parties in enumerate(own)
        ]
        self.parties: dict[str, Party] = {}
        for place in self._lanes:
            for member in place.parties.values():
                if self.parties.setdefault(member.name, member) is not member:
                    raise InvalidInput(f"two parties would be called {member.name!r}; rename a role of the topology")
        recorders = (recording or Recording()).recorders(tuple(self.parties), folder)
        self.link = LocalLink(self.traffic, recorders)

    @property
    def lanes(self) -> int:
        """How many clients there are."""
        return len(self._lanes)

    def party(self, lane: int, role: str) -> Party:
        """Return the party that plays `role` for `lane`."""
        return self._lanes[lane].parties[role]

    def own(self, lane: int, part: str, inputs: Mapping[str, Tensor], labels: Mapping[str, Tensor]) -> None:
        """Give each data owner of `lane` the inputs and labels that are its own."""
        for role in self.topology.data_roles:
            mine = {v: t for v, t in inputs.items() if self.topology.inputs[v] == role}
            known = {h.value: labels[h.value] for h in self.topology.heads if h.labels == role and h.value in labels}
            self.party(lane, role).own(part, mine, known)

    def rows(self, lane: int, part: str) -> int:
        """Return how many rows `lane` has in `part`."""
        return self.party(lane, self.topology.data_roles[0]).rows(part)

    def train(self, lane: int, epoch: int, batches: Sequence[Tensor]) -> list[float]:
        """Train `lane` on `batches`; return the total loss of each step."""
        place = self._lanes[lane]
        losses = []
        for step, rows in enumerate(batches):
            stamp = Stamp("train", lane, epoch, step)
            values = train_step(self.topology, place, self.link, Batch("train", rows), stamp)
            losses.append(sum(head.weight * values[head.value] for head in self.topology.heads))
        return losses

    def predict(
        self,
        lane: int,
        part: str,
        phase: str,
        number: int = 0,
        borrow: int | None = None,
        batch_size: int = 256,
    ) -> Prediction:
        """Run `part` of `lane` forward in evaluation mode; see `Engine.predict`."""
        place = self._lanes[lane]
        outputs: dict[str, list[Tensor]] = {head.value: [] for head in self.topology.heads}
        with self._borrowed(lane, borrow):
            for step, rows in enumerate(torch.arange(self.rows(lane, part)).split(batch_size)):
                stamp = Stamp(phase, lane, number, step, part)
                found = predict_step(self.topology, place, self.link, Batch(part, rows), stamp)
                for name, value in found.items():
                    outputs[name].append(value.cpu())
        labels = {}
        for head in self.topology.heads:
            known = place.parties[head.labels].labels(part)
            if head.value in known:
                labels[head.value] = known[head.value].cpu()
        return Prediction({name: torch.cat(parts) for name, parts in outputs.items()}, labels)

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one lane's party to another's; `via` sees them if given."""
        sender, receiver = self.party(source, role), self.party(target, role)
        stamp = Stamp("train", source, epoch, 0)
        if via is None:
            arrived = self.link.deliver(sender.upload(receiver.name, stamp))
        else:
            stop = self.link.deliver(sender.upload(via, stamp))
            arrived = self.link.deliver(Message(via, receiver.name, stop.kind, stop.edge, stop.tensors, stamp))
        receiver.adopt(arrived.tensors)

    def end_round(self) -> None:
        """Advance every party's learning-rate scheduler."""
        for party in self.parties.values():
            party.end_round()

    def modules(self, lane: int) -> dict[str, nn.Module]:
        """Return the modules of `lane` by segment, for the experimenter: the parties' own, not copies."""
        return {n: m for party in self._lanes[lane].parties.values() for n, m in party.modules.items()}

    def view(self, party: str) -> View:
        """Return what was recorded of `party`, with the segments it holds."""
        recorder = self.link.recorders.get(party, Recorder(party))
        return recorder.view(self.parties[party].modules)

    @contextmanager
    def watching(self, party: str) -> Iterator[Recorder]:
        """Record everything `party` receives inside the block, apart from the run's own recorder."""
        kept = self.link.recorders.get(party)
        recorder = self.link.recorders[party] = Recorder(party, budget=2**62)
        try:
            yield recorder
        finally:
            if kept is None:
                del self.link.recorders[party]
            else:
                self.link.recorders[party] = kept

    def state(self) -> dict[str, Any]:
        """Return the state of every party, recorder and counter."""
        return {
            "parties": {name: party.state() for name, party in self.parties.items()},
            "recorders": {name: recorder.state() for name, recorder in self.link.recorders.items()},
            "traffic": self.traffic.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        for name, party in self.parties.items():
            party.load_state(state["parties"][name])
        for name, recorder in self.link.recorders.items():
            recorder.load_state(state["recorders"][name])
        self.traffic.load_state(state["traffic"])

    @contextmanager
    def _borrowed(self, lane: int, source: int | None) -> Iterator[None]:
        """Let the data owners of `lane` use the segments of `source` for the length of the block."""
        if source is None or source == lane:
            yield
            return
        roles = self.topology.data_roles
        kept = {role: self.party(lane, role).modules for role in roles}
        try:
            for role in roles:
                self.party(lane, role).modules = self.party(source, role).modules
            yield
        finally:
            for role in roles:
                self.party(lane, role).modules = kept[role]
