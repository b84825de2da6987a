"""The local engine: all parties in this process, with messages passed in memory or as bytes.

It runs steps, and moves weights between parties: handed over, averaged by an aggregation server, copied and merged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.aggregation.base import Accumulator
from splitfed.aggregation.running_mean import RunningMean, shares
from splitfed.core.defense import Defense
from splitfed.core.executor import ClientReplica, Combine, exchange, exchange_together
from splitfed.core.messages import LocalLink, Message, Recording, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.shared_state import SharedState
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.traffic import Traffic
from splitfed.engines.base import FED, Batches, Placement, ReplicaBatches, Scales
from splitfed.engines.engine import Engine
from splitfed.engines.observers import AttackObserver, DetectorObserver
from splitfed.engines.parties import RunParties
from splitfed.engines.secure_summation import SecureSummation


class LocalEngine(Engine):
    """Parties of `replicas` clients on one topology: data owners one a replica, the other roles shared by all replicas.

    A list of topologies, one a replica, allows client segments of different architectures on the same shared roles.
    `link`: delivers the messages, such as `ByteLink`. `accumulate`: the number of batches in one optimizer step.
    """

    def __init__(
        self,
        topology: Topology | Sequence[Topology],
        facts: TopologyFacts | Sequence[TopologyFacts],
        replicas: int,
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
        accumulate: int = 1,
    ) -> None:
        self.topologies = [topology] * replicas if isinstance(topology, Topology) else list(topology)
        self.all_facts = [facts] * replicas if isinstance(facts, TopologyFacts) else list(facts)
        self.topology, self.facts, self.replicas = self.topologies[0], self.all_facts[0], replicas
        self.defenses = tuple(defenses)
        self.optims = dict(optims or {})
        self.accumulate = accumulate
        # Number of rows by which each replica divides a step's losses, with batches of random size.
        self._expected = None if expected is None else tuple(expected)
        self.device = torch.device(device)
        self.traffic = Traffic()
        run_parties = RunParties(
            self.topologies, self.all_facts, placement or Placement(), defenses, optims or {}, seed, self.device
        )
        recorders = (recording or Recording()).recorders(tuple(run_parties.parties), folder)
        self.run_parties, self.link, self.seed = run_parties, link(self.traffic, recorders), seed
        # The secure sums of this round, by role.
        self._sums: dict[str, SecureSummation] = {}
        self.parties, self._participation = run_parties.parties, run_parties.participation
        self.training_attacks: dict[str, AttackObserver] = {}
        self.detectors: dict[str, DetectorObserver] = {}
        self._shared = SharedState(s.module for t in self.topologies for s in t.segments)
        run_parties.maker.introduce(self.parties, self.link.deliver, Stamp("train", 0, 0, 0))

    def train(
        self, replica: int, epoch: int, batches: Batches, first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Train `replica` on `batches` of `part`; return the total loss of each step that had rows.

        `task` multiplies the losses of the heads; at 0 no label is sent. Every `accumulate` batches have one optimizer
        step, on the mean of their losses; the last step may have fewer batches.
        """
        place = self.run_parties.replicas[replica]
        losses = []
        self._participation[replica].add(epoch, batches, part)
        # Further training by a method counts for the replica's current epoch.
        counts_as = None if part == "train" else self._participation[replica].newest
        # Only batches of the client's own rows have a random size.
        expected = None if self._expected is None or part != "train" else self._expected[replica]
        for start in range(0, len(batches), self.accumulate):
            group = batches[start : start + self.accumulate]
            # Batches of random size are not accumulated: an empty one is alone.
            if self._expected is not None and len(group[0]) == 0:
                for party in place.parties.values():
                    party.skip(self._expected[replica], place.stamp("train", epoch, first + start, part))
                continue
            tied = TiedGradients(place.members) if len(group) > 1 else None
            for step, rows in enumerate(group, first + start):
                stamp = place.stamp("train", epoch, step, part)
                batch = self._replace_batch(place, Batch(part, rows, expected, counts_as, task), stamp)
                losses.append(_total(place, exchange(place, self.link, batch, stamp, 1 / len(group))))
                if tied is not None:
                    tied.add_batch()
            if tied is not None:
                tied.put_back()
            self._update([place])
        return losses

    def train_together(
        self, epoch: int, step: int, batches: ReplicaBatches, scales: Scales, combine: Combine | None = None
    ) -> dict[int, float]:
        """Take one step of every party on the sum of the replicas' losses; see `Trainer.train_together`."""
        for replica, rows in batches.items():
            self._participation[replica].add(epoch, [rows])
        places = [self.run_parties.replicas[replica] for replica in batches]
        stamps = [place.stamp("train", epoch, step) for place in places]
        turns = []
        for place, stamp in zip(places, stamps, strict=True):
            expected = None if self._expected is None else self._expected[place.index]
            batch = Batch("train", batches[place.index], expected)
            turns.append((place, self._replace_batch(place, batch, stamp), stamp, scales[place.index]))
        if combine is None:
            values = [exchange(place, self.link, batch, stamp, scale) for place, batch, stamp, scale in turns]
        else:
            values = exchange_together(turns, self.link, combine)
        self._update(places)
        return {place.index: _total(place, found) for place, found in zip(places, values, strict=True)}

    def state(self) -> dict[str, Any]:
        """Return the state of all parties, recorders and counters; raise `InvalidInput` for changes outside of it."""
        self._shared.check()
        return {
            "parties": {name: party.state.state_dict() for name, party in self.run_parties.members().items()},
            "recorders": {name: recorder.state() for name, recorder in self.link.recorders.items()},
            "traffic": self.traffic.state(),
            "participation": [counts.state() for counts in self._participation],
            "training_attacks": {name: attack.state() for name, attack in self.training_attacks.items()},
            "detectors": {name: detector.state() for name, detector in self.detectors.items()},
            **({"keys": keys} if (keys := self.run_parties.maker.state()) else {}),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.run_parties.maker.check_state(state.get("keys", {}))
        for name, party in self.run_parties.members().items():
            party.state.load_state_dict(state["parties"][name])
        for name, recorder in self.link.recorders.items():
            recorder.load_state(state["recorders"][name])
        self.traffic.load_state(state["traffic"])
        for counts, counted in zip(self._participation, state["participation"], strict=True):
            counts.load_state(counted)
        for name, attack in self.training_attacks.items():
            attack.load_state(state["training_attacks"][name])
        for name, detector in self.detectors.items():
            detector.load_state(state["detectors"][name])
        # A sum lasts from a download to the upload of the same round.
        self._sums = {}

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one replica's party to another's; `via` sees them if given."""
        sender, receiver = self.party(source, role), self.party(target, role)
        stamp, kept = Stamp("train", source, epoch, 0), self.run_parties.placement.kept
        if via is None:
            arrived = self.link.deliver(sender.state.upload(receiver.name, stamp, kept=kept))
        else:
            stop = self.link.deliver(sender.state.upload(via, stamp, kept=kept))
            arrived = self.link.deliver(stop._replace(sender=via, receiver=receiver.name))
        receiver.state.adopt(arrived.tensors, kept)

    def download(self, replicas: Sequence[int], epoch: int) -> None:
        """Send the aggregation server's weights to the parties of `replicas` in every averaged role."""
        place = self.run_parties.placement
        for role, fed in self.run_parties.fed.items():
            for replica in replicas:
                party = self.party(replica, role)
                message = fed.state.upload(party.name, Stamp("train", replica, epoch, 0), place.buffers, place.kept)
                party.state.adopt(self.link.deliver(message).tensors, place.kept)
            if place.secure is not None:
                self._sums[role] = self._open(role, replicas, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Send the averaged roles' weights of these replicas to the aggregation server, which keeps their aggregate."""
        place = self.run_parties.placement
        for role, fed in self.run_parties.fed.items():
            if place.secure is not None:
                fed.state.adopt(self._summed(role, weights, epoch), place.kept)
                continue
            averaged = self._gathering()
            for replica, share in shares(weights).items():
                averaged.add(self.link.deliver(self._upload(replica, role, epoch)).tensors, share)
            fed.state.adopt(averaged.value(), place.kept)

    def branch(self, replicas: Sequence[int]) -> None:
        """Start the copies of every copied role from the merged one."""
        for role, copies in self.run_parties.copies.items():
            tensors = self.run_parties.shared[role].state.contents()
            for replica in replicas:
                copies[replica].state.adopt(tensors)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Replace every copied role's segments by the aggregate of its copies."""
        for role, copies in self.run_parties.copies.items():
            averaged = self._gathering()
            for replica, share in shares(weights).items():
                averaged.add(copies[replica].state.contents(), share)
            self.run_parties.shared[role].state.adopt(averaged.value())

    def _replace_batch(self, place: ClientReplica, batch: Batch, stamp: Stamp) -> Batch:
        """Return the rows of a step, or the replacement that a detector at one of its parties makes."""
        for party in place.members:
            if detector := self.detectors.get(party.name):
                batch = detector.batch(party, batch, stamp)
        return batch

    def _update(self, places: Sequence[ClientReplica]) -> None:
        """Let every party of a step update its weights unless its detector refuses; then run the training attacks."""
        for party in _distinct(places):
            detector = self.detectors.get(party.name)
            if detector is None or detector.keeps(party):
                party.update()
            else:
                party.drop_gradients()
        for attack in self.training_attacks.values():
            attack.step_ended()

    def _gathering(self) -> Accumulator:
        rule = self.run_parties.placement.aggregation
        return RunningMean() if rule is None else rule.start()

    def _upload(self, replica: int, role: str, epoch: int) -> Message:
        place = self.run_parties.placement
        return self.party(replica, role).state.upload(FED, Stamp("train", replica, epoch, 0), place.buffers, place.kept)

    def _open(self, role: str, replicas: Iterable[int], epoch: int) -> SecureSummation:
        plan = self.run_parties.placement.secure
        assert plan is not None
        names = {replica: self.party(replica, role).name for replica in replicas}
        return SecureSummation(plan, role, names, epoch, self.seed, self.link.deliver).open()

    def _summed(self, role: str, weights: Mapping[int, float], epoch: int) -> dict[str, Tensor]:
        """Return the weighted mean by a secure sum; poisoned clients change their uploads before these are masked."""
        summing = self._sums.pop(role, None) or self._open(role, weights, epoch)
        uploads = {}
        for replica in weights:
            message = self._upload(replica, role, epoch)
            tap = self.link.taps.get(message.sender)
            uploads[replica] = (message if tap is None else tap(message)).tensors
        return summing.close(uploads, weights)


def _total(replica: ClientReplica, losses: Mapping[str, float]) -> float:
    """Return the loss of a step: the sum over heads, each times its weight."""
    total = 0.0
    for head in replica.topology.heads:
        if head.value in losses:
            total += head.weight * losses[head.value]
    return total


def _distinct(places: Sequence[ClientReplica]) -> Sequence[Party]:
    """Return every party of `places` once."""
    if len(places) == 1:
        return places[0].members
    return list({id(party): party for place in places for party in place.members}.values())


class TiedGradients:
    """Gradients, by batch, of weights that several segments of one of `parties` share.

    Accumulated over several batches they are bit-identical to repeated backward passes of the uncut model. The `grad`
    of a weight accumulates by itself; of a shared weight the parts of one batch must be added to each other before they
    are added to earlier batches, as in the uncut model, because the order of sums determines the last bits.
    """

    def __init__(self, parties: Sequence[Party]) -> None:
        self._weights = [weight for party in parties for weight in tied_weights(party)]
        self._sums: list[Tensor | None] = [None] * len(self._weights)

    def add_batch(self) -> None:
        """Add the gradients of the current batch to those of earlier batches, and remove them from the weights."""
        for i, weight in enumerate(self._weights):
            gradient, before = weight.grad, self._sums[i]
            if gradient is not None:
                self._sums[i] = gradient if before is None else before.add_(gradient)
                weight.grad = None

    def put_back(self) -> None:
        """Set the accumulated sums as the gradients of the weights."""
        for weight, found in zip(self._weights, self._sums, strict=True):
            weight.grad = found


def tied_weights(party: Party) -> list[nn.Parameter]:
    """Return the weights of `party` that more than one of its segments uses."""
    found: dict[int, nn.Parameter] = {}
    uses: Counter[int] = Counter()
    for module in party.state.modules.values():
        own = {id(weight): weight for weight in module.parameters() if weight.requires_grad}
        found |= own
        uses.update(own.keys())
    return [weight for key, weight in found.items() if uses[key] > 1]
