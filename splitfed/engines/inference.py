"""Passes through the parties that change no weight (predictions, gradients), and access to the parties' segments."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from splitfed.core.evaluation_changes import left_as_they_were
from splitfed.core.executor import ClientReplica, exchange, predict_step
from splitfed.core.messages import LocalLink
from splitfed.core.party import Party
from splitfed.core.step_state import Batch
from splitfed.core.topology import weights
from splitfed.engines.base import Prediction, Source
from splitfed.engines.parties import RunParties

ROWS_AT_ONCE = 256
"""Number of rows in one forward pass of scoring, prediction, or a method's query."""


class Inference(Protocol):
    """Passes over the parties of `run_parties`, whose messages `link` delivers."""

    run_parties: RunParties
    link: LocalLink

    def predict(
        self,
        replica: int,
        part: str,
        phase: str,
        number: int = 0,
        borrow: Source | None = None,
        batch_size: int = ROWS_AT_ONCE,
        head: str | None = None,
        also: Collection[str] = (),
    ) -> Prediction:
        """Run `part` of `replica` forward through the parties in evaluation mode, to `head` (None: to all heads).

        `number` distinguishes passes, so that defenses draw new noise. `also`: intermediate values to return as well,
        before any defense. `borrow`: the source of client segments to use in place of the replica's own, for example to
        score the newest model on all clients' data; no message is counted for it.
        """
        place = self.run_parties.serving(replica)
        topology = place.topology
        heads = [h for h in topology.heads if h.value == head] if head else topology.answering
        outputs: dict[str, list[Tensor]] = {h.value: [] for h in heads}
        further: dict[str, list[Tensor]] = {}
        with self.borrow_segments(replica, borrow), self._kept(place):
            for step, rows in enumerate(
                torch.arange(self.run_parties.owners(replica)[0].state.rows(part)).split(batch_size)
            ):
                stamp = place.stamp(phase, number, step, part)
                for name, value in predict_step(place, self.link, Batch(part, rows), stamp, heads, also).items():
                    if name in outputs:
                        outputs[name].append(value.cpu())
                    if name in also:
                        further.setdefault(name, []).append(value)
        held = {h.value: place.parties[h.labels].state.labels(part) for h in heads}
        labels = {value: known[value].cpu() for value, known in held.items() if value in known}
        joined_outputs, joined_values = (
            {name: torch.cat(parts) for name, parts in tensors_by_name.items()}
            for tensors_by_name in (outputs, further)
        )
        return Prediction(joined_outputs, labels, joined_values)

    def consult(self, replica: int, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        """Pass `rows` of `part` of `replica` forward in evaluation mode; return the output `value`, (rows, ...)."""
        place = self.run_parties.replicas[replica]
        with self._kept(place):
            found = [
                predict_step(place, self.link, Batch(part, few), place.stamp("consult", number, step, part))[value]
                for step, few in enumerate(rows.split(ROWS_AT_ONCE))
            ]
            return torch.cat(found)

    def rehearse(
        self, replica: int, part: str, number: int, borrow: Source | None = None, batch_size: int = 64
    ) -> None:
        """Send `part` of `replica` through training steps that change no weight, buffer or gradient.

        They count as steps of the newest epoch of training.
        """
        place, newest = self.run_parties.serving(replica), self.run_parties.newest_epoch
        with (
            self.borrow_segments(replica, borrow),
            self._kept(place),
            preserve_buffers([m for p in place.parties.values() for m in p.state.modules.values()]),
        ):
            for step, rows in enumerate(
                torch.arange(self.run_parties.owners(replica)[0].state.rows(part)).split(batch_size)
            ):
                batch = Batch(part, rows, counts_as=newest)
                exchange(place, self.link, batch, place.stamp("rehearse", number, step, part))
                for party in place.parties.values():
                    for module in party.state.modules.values():
                        module.zero_grad(set_to_none=True)

    def gradient(self, replica: int, batches: Sequence[Tensor], part: str = "train") -> dict[str, Tensor]:
        """Return the gradient of the mean loss of `replica` over the rows of `batches`: `segment/name` -> tensor.

        In training mode, without a change of weights or buffers, and without recorded or counted messages.
        """
        place, total = self.run_parties.serving(replica), sum(len(rows) for rows in batches)
        newest = self.run_parties.newest_epoch
        modules = {name: m for party in place.parties.values() for name, m in party.state.modules.items()}
        with self._kept(place), preserve_buffers(list(modules.values())):
            for step, rows in enumerate(batches):
                stamp = place.stamp("rehearse", 0, step, part)
                exchange(place, self.link, Batch(part, rows, counts_as=newest), stamp, len(rows) / total)
            return {
                f"{segment}/{name}": weight.grad.clone()
                for segment, module in modules.items()
                for name, weight in module.named_parameters()
                if weight.grad is not None
            }

    def _kept(self, place: ClientReplica) -> AbstractContextManager[None]:
        """Return a context that restores the segments that a pass in evaluation mode changes; others are not copied."""
        changed = self.run_parties.facts[place.index].changed_in_evaluation
        if not changed:
            return nullcontext()
        modules = {id(m): m for p in place.members for n, m in p.state.modules.items() if n in changed}
        return left_as_they_were(modules.values())

    @contextmanager
    def borrow_segments(self, replica: int, source: Source | None) -> Iterator[None]:
        """Let the data owners of `replica` use the segments of `source` within the block."""
        if source is None or source == replica:
            yield
            return
        borrowers = {party.role: party for party in self.run_parties.owners(replica)}
        if isinstance(source, Mapping):
            lent = {role: with_tensors(party.state.modules, source) for role, party in borrowers.items()}
        else:
            lenders = self.run_parties.fed if isinstance(source, str) else self.run_parties.replicas[source].parties
            lent = {r: self._lend(p.state.modules, lenders[r]) for r, p in borrowers.items() if r in lenders}
        own_modules = {role: borrowers[role].state.modules for role in lent}
        try:
            for role, modules in lent.items():
                borrowers[role].state.modules = modules
            yield
        finally:
            for role, modules in own_modules.items():
                borrowers[role].state.modules = modules

    def _lend(self, own: dict[str, nn.Module], lender: Party) -> dict[str, nn.Module]:
        """Return the modules `own` with the `lender`'s weights, except for segments that never leave their party."""
        place = self.run_parties.placement
        lent = {n: own[n] if n in place.kept else m for n, m in lender.state.modules.items()}
        return lent if place.buffers else with_weights(own, lent)

    def modules_of_party(self, party: str, replica: int) -> dict[str, nn.Module]:
        """Return the segments of `party` for `replica`: the party's own modules, not copies."""
        mine = {p.name: p for p in self.run_parties.serving(replica).parties.values()}
        return mine.get(party, self.run_parties.parties[party]).state.modules

    def modules(self, replica: int, borrow: Source | None = None) -> dict[str, nn.Module]:
        """Return segment -> module of `replica`, for the experimenter: the parties' own modules, not copies."""
        with self.borrow_segments(replica, borrow):
            return {
                n: m
                for party in self.run_parties.serving(replica).parties.values()
                for n, m in party.state.modules.items()
            }


@contextmanager
def preserve_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore buffers, also replaced ones, and remove gradients at the end of the block, also after an exception."""
    inner = {id(m): m for module in modules for m in module.modules()}.values()
    saved = [(m, {name: None if b is None else b.clone() for name, b in m._buffers.items()}) for m in inner]
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)
        for module in modules:
            module.zero_grad(set_to_none=True)


def with_tensors(own: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return modules like `own` in which `tensors`, named `segment/name`, replace the tensors of the same names.

    Weights are not copied, buffers are: the modules are not trained, but a forward pass may change statistics.
    """
    memo: dict[int, Any] = {}
    for segment, module in own.items():
        for name, weight in module.named_parameters(remove_duplicate=False):
            tensor = tensors.get(f"{segment}/{name}", weight).detach().to(weight.device)
            memo[id(weight)] = nn.Parameter(tensor, weight.requires_grad)
    # Copied together, so that weights shared between segments of a party stay shared.
    modules = copy.deepcopy(dict(own), memo)
    for segment, module in modules.items():
        for name, buffer in module.named_buffers():
            if f"{segment}/{name}" in tensors:
                buffer.copy_(tensors[f"{segment}/{name}"])
    return modules


def with_weights(own: Mapping[str, nn.Module], lent: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return copies of `own`, with its buffers, in which the weights are those of `lent`."""
    made = copy.deepcopy(dict(own))
    for name, module in made.items():
        module.load_state_dict({**module.state_dict(), **weights(lent[name])})
    return made
