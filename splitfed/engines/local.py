"""The local engine: every party in this process, messages handed over in memory, or as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitfed.core.defense import Defense
from splitfed.core.executor import Combine, Lane, exchange, exchange_together
from splitfed.core.messages import Recording, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.probe import Facts
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.core.traffic import Traffic
from splitfed.engines.base import LaneBatches, Placement
from splitfed.engines.engine import Engine
from splitfed.engines.message_link import LocalLink
from splitfed.engines.observers import AttackObserver, DetectorObserver
from splitfed.engines.parties import RunParties
from splitfed.engines.weight_transfer import WeightTransfer


class LocalEngine(WeightTransfer, Engine):
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
        self.device = torch.device(device)
        self.traffic = Traffic()
        crew = RunParties(
            self.topologies, self.all_facts, placement or Placement(), defenses, optims or {}, seed, self.device
        )
        recorders = (recording or Recording()).recorders(tuple(crew.parties), folder)
        super().__init__(crew, link(self.traffic, recorders), seed)
        self.parties, self._participation = crew.parties, crew.participation
        self.insiders: dict[str, AttackObserver] = {}
        self.sentries: dict[str, DetectorObserver] = {}

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
