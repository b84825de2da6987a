"""A party: somebody who plays a role and holds segments, data, labels, an optimizer and random state.

The one forward and the one backward path of the whole package. A party is handed messages and returns messages;
it never sees another party. What arrives becomes a fresh leaf, so gradients stop at the cut and go back as
messages; an edge within the party is a leaf too, which keeps the backward walk the exact reverse of the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from splitfed.core.backprop import first_gradients, send_back
from splitfed.core.defense import Context, Slope, joined, packed_bytes
from splitfed.core.errors import InvalidInput
from splitfed.core.local_objective import Tutor
from splitfed.core.messages import Message, Stamp
from splitfed.core.optimizers import take_step
from splitfed.core.party_state import Belongings
from splitfed.core.payload import infinite_rows, is_own
from splitfed.core.random import derive, stream, wide_generator
from splitfed.core.step_plan import Duty, Guard, Port
from splitfed.core.step_state import Batch, Tape
from splitfed.core.topology import Head
from splitfed.core.usage_counts import labels_of_head

TRAINING = ("train", "rehearse")
"""The phases in which segments are in training mode and gradients are taken."""


class Party(Belongings):
    """Runs its segments as its `duties` say; see `Belongings` for what it is made of."""

    @cached_property
    def _tapes(self) -> dict[int, Tape]:
        """What is kept of the step that each lane is in."""
        return {}

    def inputs(self, lane: int) -> dict[str, Tensor]:
        """Return this party's raw inputs of the step that `lane` is in; for an insider at this very party."""
        return dict(self._tapes[lane].inputs)

    def begin(self, batch: Batch, stamp: Stamp, scale: float = 1.0) -> None:
        """Start a step of the lane in `stamp`: forget the last one, read this one's rows, switch the mode.

        `scale` multiplies every loss and penalty of the step, as when several lanes share one step.
        """
        self._training = stamp.phase in TRAINING
        for name, module in self.modules.items():
            if module.training != self._training:
                module.train(self._training)
                # By name: the segments may be lent by another party of the same make.
                for frozen in self._frozen[name]:
                    module.get_submodule(frozen).training = False
        if batch.expected is not None:
            scale *= len(batch.rows) / batch.expected
        if self.shield is not None:
            self.shield.begin(len(batch.rows), len(batch.rows) / scale, stamp, stamp.phase == "train")
        own = batch.rows.clone() if self._counting else None
        tape = self._tapes[stamp.lane] = Tape(batch.part, own, batch.counts_as, batch.task, scale=scale)
        if batch.part in self._data:
            inputs, labels = self._data[batch.part]
            # Of images this takes a third of the time of t[batch.rows].
            tape.inputs = {name: t.index_select(0, batch.rows.to(t.device)) for name, t in inputs.items()}
            tape.labels = {name: t.index_select(0, batch.rows.to(t.device)) for name, t in labels.items()}
            if self._relabelled and self._training and batch.task:
                self._aim(tape, stamp)

    def forward(
        self,
        segment: str,
        received: Sequence[Message],
        stamp: Stamp,
        peers: Mapping[str, str],
        edges: Collection[str] | None = None,
    ) -> list[Message]:
        """Run `segment` on what was `received` and what the party has; return what leaves, one message an edge.

        `edges`: the names of those on which something leaves (None: all).
        """
        # Switching the mode costs as much as a message.
        if torch.is_grad_enabled() is not self._training:
            with torch.set_grad_enabled(self._training):
                return self.forward(segment, received, stamp, peers, edges)
        duty, tape = self._duties[segment], self._tapes[stamp.lane]
        for message in received:
            returns = message.edge not in self._one_way
            for name, value in message.tensors.items():
                value = value.to(self.device)
                if message.layouts is not None and name in message.layouts:
                    value = message.layouts[name].lay_out(value)
                tape.held[name] = self._leaf(value, returns)
        outputs = self._run(duty, self._arguments(duty, tape), stamp)
        tape.made.update(zip(duty.outputs, outputs, strict=True))
        if self._training and duty.judged:
            self._add_penalties(duty, tape, stamp)
        return [
            self._message("activation", p, peers, self._release(duty, p, tape, stamp), stamp)
            for p in duty.leaving
            if edges is None or p.edge in edges
        ]

    def give_labels(self, head: Head, stamp: Stamp, receiver: str) -> Message:
        """Return this step's labels of `head` as a message to the party that computes its loss."""
        labels = {head.value: self._tapes[stamp.lane].labels[head.value]}
        return Message(self.name, receiver, "label", f"labels->{head.value}", labels, stamp)

    def loss(self, segment: str, head: Head, stamp: Stamp, received: Message | None) -> Tensor:
        """Compute the loss of `head` on `segment`, keep it for the backward, return it detached and unweighted."""
        tape = self._tapes[stamp.lane]
        labels = tape.labels if received is None else received.tensors
        assert head.task is not None
        value = head.task.loss(tape.made[head.value], labels[head.value].to(self.device))
        scale = head.weight * tape.scale * tape.task
        if self._task_weight is not None:
            epoch = stamp.epoch if tape.counts_as is None else tape.counts_as
            scale = head.weight * self._task_weight(epoch) * tape.scale * tape.task
        tape.add(segment, value, scale)
        return value.detach()

    def backpropagate(
        self, segment: str, received: Sequence[Message], stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Send the gradients `received` for what left `segment`, and its losses, back through it."""
        duty, tape = self._duties[segment], self._tapes[stamp.lane]
        if self.tutor is not None and not tape.taught:
            self._teach(self.tutor, tape, stamp)
        roots: list[Tensor] = []
        gradients: list[Tensor | float] = []
        pairs: list[tuple[Tensor, Tensor | float]] = [*tape.returned.pop(segment, ())]
        for message in received:
            sent = tape.sent.pop(message.edge)
            if duty.arrivals:
                tape.crossed.update([t.untyped_storage().data_ptr() for t in message.tensors.values()])
            pairs.extend([(sent[name], gradient.to(self.device)) for name, gradient in message.tensors.items()])
        for z, slope, version in tape.slopes.pop(segment, ()):
            if z._version != version:
                raise InvalidInput(f"{self.name}: a defense changed in place what leaves {segment!r}; not allowed")
            pairs.append((z, slope))
        pairs.extend(tape.losses.pop(segment, ()))
        for z, g in pairs:
            # Segments without weights that read raw data only have nothing to send a gradient to.
            if z.requires_grad:
                roots.append(z)
                gradients.append(g)
        if roots and self.shield is not None and self.shield.active:
            leaves = (*tape.leaves[segment].values(), *tape.held.values())
            needing = [leaf for leaf in leaves if leaf.requires_grad]
            self.shield.backward(roots, first_gradients(roots, gradients), needing)
        elif roots:
            send_back(roots, gradients)
        # What is over is let go at once, so that its memory serves the rest of the step.
        del pairs, roots, gradients
        for name in duty.outputs:
            tape.made.pop(name, None)
        messages = self._returned(duty, tape, stamp, peers)
        return [_apart(message, tape.crossed) for message in messages] if tape.crossed else messages

    def gradient_sum(self) -> float:
        """Return the sum of the gradient that each backward pass reaches last: that of the first weight that has one.

        What is not finite anywhere behind it shows here, unless it was masked on its way; a gradient that is not
        finite in a later weight alone is found at the next step, by the loss.
        """
        if self.shield is not None and self.shield.active:
            return self.shield.total()
        for parameter in self._parameters:
            if parameter.grad is not None:
                return float(parameter.grad.sum())
        return 0.0

    def update(self) -> None:
        """Take one optimizer step with the gradients gathered since the last one."""
        if self.shield is not None:
            self.uses.replace(f"gradients at {self.name}", self.shield.finish())
        if self.tutor is not None:
            self.tutor.correct(self.modules)
        if self._optimizer is not None:
            take_step(self._optimizer)
        self.drop_gradients()
        for place in self._learning:
            self._guards[place].defense.learn(self._defenses[place])

    def drop_gradients(self) -> None:
        """Forget the gradients gathered since the last update."""
        if self.shield is not None:
            self.shield.drop()
        for parameter in self._parameters:
            parameter.grad = None

    def tell_norms(self, stamp: Stamp, peers: Mapping[str, str]) -> list[Message]:
        """Return the squared norm of every row's gradient as messages to the parties that clip by all of them."""
        if self.shield is None or not self.shield.active:
            return []
        norms = {"squared norm": self.shield.norms()}
        return [Message(self.name, peers[role], "norm", f"norms->{role}", norms, stamp) for role in self.shield.tells]

    def hear_norms(self, message: Message) -> None:
        """Take what `tell_norms` returned at another party."""
        assert self.shield is not None
        self.shield.hear(message.tensors["squared norm"].to(self.device))

    def skip(self, expected: float, stamp: Stamp) -> None:
        """Take the step of a batch that happens to be empty: only guarded weights move, so that nobody can tell."""
        if self.shield is not None:
            self.shield.begin(0, expected, stamp, True)
            self.update()

    def forget(self, lane: int) -> None:
        """Forget what is kept of the step of `lane`."""
        self._tapes.pop(lane, None)

    def output(self, value: str, lane: int) -> Tensor:
        """Return the model output `value` of this step; for the experimenter who scores the run."""
        return self._tapes[lane].made[value].detach()

    def made(self, value: str, lane: int) -> bool:
        """Tell whether this step has come to `value`."""
        return value in self._tapes[lane].made

    def compute(self, value: str, part: str, rows: int = 256) -> Tensor:
        """Return `value` of all rows of `part`, (rows, ...), in evaluation mode, from this party's own data alone.

        Raises `KeyError` for a value that needs what others send.
        """
        inputs, _ = self._data[part]
        total = len(next(iter(inputs.values())))
        wanted, found = {value}, []
        needed: list[Duty] = []
        for duty in reversed(self._duties.values()):
            if wanted.intersection(duty.outputs):
                wanted.update(duty.inputs)
                needed.insert(0, duty)
        with torch.no_grad():
            for step, chosen in enumerate(torch.arange(total).split(rows)):
                stamp = Stamp("evaluate", -1, 0, step, part)
                self.begin(Batch(part, chosen), stamp)
                tape = self._tapes[-1]
                for duty in needed:
                    if all(n in tape.made or n in tape.inputs for n in duty.inputs):
                        tape.made.update(
                            zip(duty.outputs, self._run(duty, self._arguments(duty, tape), stamp), strict=True)
                        )
                found.append(tape.made[value])
                self.forget(-1)
        return torch.cat(found)

    def _arguments(self, duty: Duty, tape: Tape) -> list[Tensor]:
        leaves = tape.leaves[duty.segment] = {}
        arguments = []
        for name in duty.inputs:
            if name in duty.own:
                value = tape.inputs[name]
            elif name in tape.held:
                value = tape.held[name]
            else:
                if name not in leaves:
                    leaves[name] = self._leaf(tape.made[name])
                value = leaves[name]
            # An operation in place may neither touch a leaf nor the sender's memory.
            arguments.append(value.clone() if name in duty.overwritten else value)
        return arguments

    def _leaf(self, value: Tensor, returns: bool = True) -> Tensor:
        return value.detach().requires_grad_(self._training and returns)

    def _run(self, duty: Duty, arguments: list[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
        module = self.modules[duty.segment]
        if self.shield is not None and self.shield.active:
            with self.shield.watching(module):
                result = self._call(duty, module, arguments, stamp)
        elif duty.stochastic:
            result = self._call(duty, module, arguments, stamp)
        else:
            result = module(*arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _call(self, duty: Duty, module: nn.Module, arguments: list[Tensor], stamp: Stamp) -> Any:
        if not duty.stochastic:
            return module(*arguments)
        with stream(forward_seed(self._seed, self.name, duty.segment, stamp), self.device):
            return module(*arguments)

    def _release(self, duty: Duty, port: Port, tape: Tape, stamp: Stamp) -> dict[str, Tensor]:
        """Apply the edge's defenses in order; keep what left attached, hand it out detached."""
        values = {name: tape.made[name] for name in port.values}
        for guard in port.sending:
            context = self._context(duty, port, guard.position, tape, stamp)
            if self._training:
                self._add_penalty(duty.segment, guard, joined(list(values.values())), context, tape)
            if "activation" in guard.counts:
                self.uses.replace(port.edge, sum(map(infinite_rows, values.values())))
            values = {name: guard.defense.release(name, z, context) for name, z in values.items()}
            if "activation" in guard.counts:
                self._count(port.edge, guard, tape, stamp, len(values))
        fresh = not tape.sent
        tape.sent[port.edge] = values
        leaving = {}
        for name, z in values.items():
            leaving[name] = z.detach()
            # What an operation has just made, and is no view, is new memory; to ask that costs less than to compare.
            fresh = fresh and z.grad_fn is not None and z._base is None
        return leaving if fresh else self._unshared(port.edge, leaving, tape)

    def _unshared(self, edge: str, leaving: dict[str, Tensor], tape: Tape) -> dict[str, Tensor]:
        """Return `leaving` with copies of what has come in, or has left already: no other party may write into that."""
        others = (tape.inputs, tape.held, *(sent for left, sent in tape.sent.items() if left != edge))
        taken = {t.untyped_storage().data_ptr() for tensors in others for t in tensors.values()}
        # The link copies the rest of what is not alone in its memory.
        shared = [n for n, z in leaving.items() if z.untyped_storage().data_ptr() in taken and is_own(z)]
        return {**leaving, **{n: leaving[n].clone() for n in shared}} if shared else leaving

    def _add_penalty(self, segment: str, guard: Guard, z: Tensor, context: Context, tape: Tape) -> None:
        """Add what a defense wants of `z`, which leaves, to the segment's losses, or to what goes back through it."""
        penalty, weight = guard.defense.penalty(z, context), guard.share * tape.scale
        if isinstance(penalty, Slope):
            gradient = penalty.gradient if weight == 1.0 else penalty.gradient * weight
            tape.slopes.setdefault(segment, []).append((z, gradient, z._version))
        elif penalty is not None:
            tape.add(segment, penalty, weight)

    def _add_penalties(self, duty: Duty, tape: Tape, stamp: Stamp) -> None:
        """Add what the defenses of the edges that a segment has read want at this end to its losses."""
        for port in duty.judged:
            for guard in port.judging:
                context = self._context(duty, port, guard.position, tape, stamp)
                penalty = guard.defense.penalty_at_receiver(context)
                if penalty is not None:
                    tape.add(duty.segment, penalty, guard.share * tape.scale)

    def _returned(self, duty: Duty, tape: Tape, stamp: Stamp, peers: Mapping[str, str]) -> list[Message]:
        """Return the gradients of what the segment has read: kept for the party's own segments, sent to others."""
        leaves = tape.leaves.pop(duty.segment)
        messages = []
        for port in duty.arrivals:
            if port.role is None:
                back = [(tape.made[name], _gradient(leaves[name])) for name in port.returned]
                tape.returned.setdefault(port.segment, []).extend(back)
                continue
            held = {name: tape.held.pop(name) for name in port.values}
            tensors = {name: _gradient(held[name]) for name in port.returned}
            if not tensors:
                continue
            for guard in port.returning:
                context = self._context(duty, port, guard.position, tape, stamp)
                tensors = {n: guard.defense.gradient(n, g, context) for n, g in tensors.items()}
                if "gradient" in guard.counts:
                    self._count(port.edge, guard, tape, stamp, len(tensors))
            messages.append(self._message("gradient", port, peers, tensors, stamp))
        return messages

    def _message(
        self, kind: str, port: Port, peers: Mapping[str, str], tensors: dict[str, Tensor], stamp: Stamp
    ) -> Message:
        assert port.role is not None
        receiver = peers[port.role]
        if not port.packs:
            return Message(self.name, receiver, kind, port.edge, tensors, stamp)
        defenses = [guard.defense for guard in port.guards]
        sizes = {n: packed_bytes(defenses, kind, len(t), tuple(t.shape[1:]), t.dtype) for n, t in tensors.items()}
        short = any(size is not None for size in sizes.values())
        packed = sum(t.nbytes if (size := sizes[n]) is None else size for n, t in tensors.items()) if short else None
        return Message(self.name, receiver, kind, port.edge, tensors, stamp, packed)

    def _teach(self, tutor: Tutor, tape: Tape, stamp: Stamp) -> None:
        """Add what the tutor wants to the losses, while all that this party has made in the step is still there."""
        tape.taught = True
        if self._training:
            for segment, term in tutor.terms(tape.made, tape.labels, stamp).items():
                tape.add(segment, term, tape.scale)

    def _aim(self, tape: Tape, stamp: Stamp) -> None:
        """Replace the labels of a training step by what its defenses want the loss to compare with."""
        for name, (head, guards) in self._relabelled.items():
            for guard in guards if name in tape.labels else ():
                assert head.task is not None
                words = ("targets", self.name, name, guard.position, *stamp)
                random = wide_generator(self._seed, *words, device=self.device)
                tape.labels[name] = guard.defense.targets(tape.labels[name], head.task, random)
                # What is only rehearsed leaves nothing behind, and nobody learns of it.
                if "step" in guard.counts and stamp.phase == "train":
                    self._count(labels_of_head(name), guard, tape, stamp)

    def _count(self, where: str, guard: Guard, tape: Tape, stamp: Stamp, times: int = 1) -> None:
        part, rows = tape.part, tape.rows
        assert rows is not None
        if part in self._among:
            part, rows = "train", self._among[part][rows.cpu()]
            rows = rows[rows >= 0]
        self.uses.add((where, guard.position, stamp.lane, part), rows, times)

    def _context(self, duty: Duty, port: Port, position: int, tape: Tape, stamp: Stamp) -> Context:
        state, module = self._defenses[port.edge, position], self.modules[duty.segment]
        held = (tape.inputs, tape.labels, state, module, tape.counts_as, tape.held)
        return Context(self.name, port.edge, stamp, self._seed, position, *held)


def forward_seed(seed: int, party: str, segment: str, stamp: Stamp) -> int:
    """Return the seed from which a segment that draws random numbers (dropout) draws at one step."""
    return derive(seed, "forward", party, segment, *stamp)


def _gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf; zeros where nothing used it in this step, so that the sender gets what it expects."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _apart(message: Message, crossed: Collection[int]) -> Message:
    """Return `message` with copies of what shares memory with a gradient that arrived, whose addresses are `crossed`.

    A segment may pass a gradient on as it is; the next one may then add to it in place.
    """
    if all(t.untyped_storage().data_ptr() not in crossed for t in message.tensors.values()):
        return message
    return message.copy()
