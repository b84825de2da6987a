"""How weights move between the parties of a local engine: handed over, averaged by a fed server, copied and merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from splitfed.aggregation.base import Gathering
from splitfed.aggregation.running_mean import RunningMean, shares
from splitfed.core.messages import Message, Stamp
from splitfed.engines.base import FED
from splitfed.engines.message_link import LocalLink
from splitfed.engines.parties import RunParties
from splitfed.engines.secure_summation import Summing


class WeightTransfer:
    """Moves weights between the parties of `crew` over `link`; `seed`: the run's, from which secure sums draw."""

    def __init__(self, crew: RunParties, link: LocalLink, seed: int) -> None:
        self.crew = crew
        self.link = link
        self.seed = seed
        # The secure sums of this round, by role.
        self._sums: dict[str, Summing] = {}

    def hand_over(self, source: int, target: int, role: str, epoch: int, via: str | None = None) -> None:
        """Send the weights of `role` from one lane's party to another's; `via` sees them if given."""
        sender, receiver = self.crew.party(source, role), self.crew.party(target, role)
        stamp, kept = Stamp("train", source, epoch, 0), self.crew.placement.kept
        if via is None:
            arrived = self.link.deliver(sender.state.upload(receiver.name, stamp, kept=kept))
        else:
            stop = self.link.deliver(sender.state.upload(via, stamp, kept=kept))
            arrived = self.link.deliver(stop._replace(sender=via, receiver=receiver.name))
        receiver.state.adopt(arrived.tensors, kept)

    def download(self, lanes: Sequence[int], epoch: int) -> None:
        """Send what the fed server holds to the parties of `lanes` in every fused role."""
        place = self.crew.placement
        for role, fed in self.crew.fed.items():
            for lane in lanes:
                party = self.crew.party(lane, role)
                message = fed.state.upload(party.name, Stamp("train", lane, epoch, 0), place.buffers, place.kept)
                party.state.adopt(self.link.deliver(message).tensors, place.kept)
            if place.secure is not None:
                self._sums[role] = self._open(role, lanes, epoch)

    def upload(self, weights: Mapping[int, float], epoch: int) -> None:
        """Send the fused roles' weights of these lanes to the fed server, which keeps what they are fused to."""
        place = self.crew.placement
        for role, fed in self.crew.fed.items():
            if place.secure is not None:
                fed.state.adopt(self._summed(role, weights, epoch), place.kept)
                continue
            fused = self._gathering()
            for lane, share in shares(weights).items():
                fused.add(self.link.deliver(self._upload(lane, role, epoch)).tensors, share)
            fed.state.adopt(fused.value(), place.kept)

    def branch(self, lanes: Sequence[int]) -> None:
        """Let the copies of every copied role start from the merged one."""
        for role, copies in self.crew.copies.items():
            tensors = self.crew.shared[role].state.contents()
            for lane in lanes:
                copies[lane].state.adopt(tensors)

    def merge(self, weights: Mapping[int, float]) -> None:
        """Replace every copied role's segments by what its copies are fused to."""
        for role, copies in self.crew.copies.items():
            fused = self._gathering()
            for lane, share in shares(weights).items():
                fused.add(copies[lane].state.contents(), share)
            self.crew.shared[role].state.adopt(fused.value())

    def _gathering(self) -> Gathering:
        fusion = self.crew.placement.fusion
        return RunningMean() if fusion is None else fusion.start()

    def _upload(self, lane: int, role: str, epoch: int) -> Message:
        place = self.crew.placement
        return self.crew.party(lane, role).state.upload(FED, Stamp("train", lane, epoch, 0), place.buffers, place.kept)

    def _open(self, role: str, lanes: Iterable[int], epoch: int) -> Summing:
        plan = self.crew.placement.secure
        assert plan is not None
        names = {lane: self.crew.party(lane, role).name for lane in lanes}
        return Summing(plan, role, names, epoch, self.seed, self.link.deliver).open()

    def _summed(self, role: str, weights: Mapping[int, float], epoch: int) -> dict[str, Tensor]:
        """Return the weighted mean as a secure sum gives it; who misbehaves bends its upload before it is masked."""
        summing = self._sums.pop(role, None) or self._open(role, weights, epoch)
        uploads = {}
        for lane in weights:
            message = self._upload(lane, role, epoch)
            tap = self.link.taps.get(message.sender)
            uploads[lane] = (message if tap is None else tap(message)).tensors
        return summing.close(uploads, weights)
