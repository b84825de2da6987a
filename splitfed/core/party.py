"""A party: somebody who plays a role and holds segments, data, labels, an optimizer and random state.

The one forward and the one backward path of the whole package. A party is handed messages and returns messages. What
arrives becomes a fresh leaf, so gradients stop at the cut and go back as messages; an edge within the party is a leaf
too, which keeps the backward walk the exact reverse of the forward.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from splitfed.core.defense import Defense, PenaltyGradient, concatenate_values, packed_bytes, same_form
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.local_objective import LocalObjective
from splitfed.core.messages import Message, Stamp, copy_shared_gradients, is_own
from splitfed.core.model_call import set_mode
from splitfed.core.party_state import PartyState
from splitfed.core.payload import Layout, infinite_rows
from splitfed.core.random import stream, wide_generator
from splitfed.core.rows import Draw, RowSource
from splitfed.core.step_plan import EdgeDefense, Port, SegmentPlan
from splitfed.core.step_state import Batch, StepState, forward_seed
from splitfed.core.topology import Head
from splitfed.core.usage_counts import labels_of_head

TRAINING = ("train", "rehearse")
"""The phases in which segments are in training mode and gradients are taken."""

_OPTIMIZER_MODULE = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it under its own name


class Party:
    """Runs the segments in `state` as the segment plans there say, a step of a replica at a time."""

    def __init__(self, state: PartyState) -> None:
        self.state = state
        self.name, self.role, self.device = state.name, state.role, state.device
        self._training = True
        self._step_states: dict[int, StepState] = {}

    def inputs(self, replica: int) -> dict[str, Tensor]:
        """Return this party's raw inputs of the step that `replica` is in; for a training attack at this very party."""
        return dict(self._step_states[replica].inputs)

    def begin(self, batch: Batch, stamp: Stamp, scale: float = 1.0) -> None:
        """Start a step of the replica in `stamp`; `scale` multiplies its losses, as when replicas share a step."""
        self._training = stamp.phase in TRAINING
        for name, module in self.state.modules.items():
            if module.training != self._training:
                set_mode(module, self._training)
                # By name: the segments may be lent by another party of the same make.
                for frozen in self.state.frozen[name]:
                    module.get_submodule(frozen).training = False
        if batch.expected is not None:
            scale *= len(batch.rows) / batch.expected
        if self.state.privatizer is not None:
            self.state.privatizer.begin(len(batch.rows), len(batch.rows) / scale, stamp, stamp.phase == "train")
        own = batch.rows.clone() if self.state.counts_uses else None
        step_state = StepState(batch.part, own, batch.counts_as, batch.task, scale=scale)
        self._step_states[stamp.replica] = step_state
        if batch.part in self.state.data:
            inputs, labels = self.state.data[batch.part]
            # Of images this takes a third of the time of t[batch.rows].
            step_state.inputs = {
                name: self._read(x, batch, stamp)
                if isinstance(x, RowSource)
                else x.index_select(0, batch.rows.to(x.device))
                for name, x in inputs.items()
            }
            step_state.labels = {name: t.index_select(0, batch.rows.to(t.device)) for name, t in labels.items()}
            if self.state.relabelled and self._training and batch.task:
                self._replace_targets(step_state, stamp)

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
                return Party.forward(self, segment, received, stamp, peers, edges)
        segment_plan, step_state = self.state.segment_plans[segment], self._step_states[stamp.replica]
        for message in received:
            returns = message.edge not in self.state.one_way
            for name, value in self._arrived(message):
                asks = returns and name not in segment_plan.dataless
                step_state.held[name] = self._leaf(value, step_state, asks)
        outputs = self._run(segment_plan, self._arguments(segment_plan, step_state), stamp)
        step_state.values.update(zip(segment_plan.outputs, outputs, strict=True))
        if self._training and segment_plan.penalized_arrivals:
            self._add_penalties(segment_plan, step_state, stamp)
        return [
            self._message("activation", p, peers, self._release(segment_plan, p, step_state, stamp), stamp)
            for p in segment_plan.ports_to_others
            if edges is None or p.edge in edges
        ]

    def give_labels(self, head: Head, stamp: Stamp, receiver: str) -> Message:
        """Return this step's labels of `head` as a message to the party that computes its loss."""
        labels = {head.value: self._step_states[stamp.replica].labels[head.value]}
        return Message(self.name, receiver, "label", f"labels->{head.value}", labels, stamp)

    def loss(self, segment: str, head: Head, stamp: Stamp, received: Message | None) -> Tensor:
        """Compute the loss of `head` on `segment`, keep it for the backward, return it detached and unweighted."""
        step_state = self._step_states[stamp.replica]
        labels = step_state.labels if received is None else received.tensors
        if self.state.objective is not None and received is not None:
            step_state.received_labels |= {name: y.clone() for name, y in labels.items()}
        assert head.task is not None
        value = head.task.loss(step_state.values[head.value], labels[head.value].to(self.device))
        scale = head.weight * step_state.scale * step_state.task
        if self.state.task_weight is not None:
            epoch = stamp.epoch if step_state.counts_as is None else step_state.counts_as
            scale = head.weight * self.state.task_weight(epoch) * step_state.scale * step_state.task
        step_state.losses[segment].append((value, scale))
        return value.detach()

    def backpropagate(
        self, segment: str, received: Sequence[Message], stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Send the gradients `received` for what left `segment`, and its losses, back through it."""
        segment_plan, step_state = self.state.segment_plans[segment], self._step_states[stamp.replica]
        if self.state.objective is not None and not step_state.objective_added:
            self._add_objective_terms(self.state.objective, step_state, stamp)
        roots: list[Tensor] = []
        gradients: list[Tensor | float] = []
        pairs: list[tuple[Tensor, Tensor | float]] = [*step_state.returned.pop(segment, ())]
        for message in received:
            sent_values = step_state.sent.pop(message.edge)
            arrived = self._arrived(message)
            if segment_plan.arrivals:
                step_state.crossed.update([gradient.untyped_storage().data_ptr() for _, gradient in arrived])
            pairs.extend([(sent_values[name], gradient) for name, gradient in arrived])
        for z, slope, version in step_state.slopes.pop(segment, ()):
            if z._version != version:
                raise InvalidInput(f"{self.name}: a defense changed in place what leaves {segment!r}; not allowed")
            pairs.append((z, slope))
        pairs.extend(step_state.losses.pop(segment, ()))
        for z, g in pairs:
            # Segments without weights that read raw data only have nothing to send a gradient to.
            if z.requires_grad:
                roots.append(z)
                gradients.append(g)
        if roots and self.state.privatizer is not None and self.state.privatizer.active:
            leaves = (*step_state.leaves[segment].values(), *step_state.held.values())
            needing = [leaf for leaf in leaves if leaf.requires_grad]
            self.state.privatizer.backward(roots, gradient_tensors(roots, gradients), needing)
        elif roots:
            run_backward(roots, gradients)
        # What is over is let go at once, so that its memory serves the rest of the step.
        del pairs, roots, gradients
        for name in segment_plan.outputs:
            step_state.values.pop(name, None)
        messages = self._return_gradients(segment_plan, step_state, stamp, peers)
        if not step_state.crossed:
            return messages
        return [copy_shared_gradients(message, step_state.crossed) for message in messages]

    def gradient_sum(self) -> float:
        """Return the sum of the gradient that each backward pass reaches last: that of the first weight that has one.

        What is not finite anywhere behind it shows here, unless it was masked on its way; a gradient that is not
        finite in a later weight alone is found at the next step, by the loss.
        """
        if self.state.privatizer is not None and self.state.privatizer.active:
            return self.state.privatizer.total()
        for parameter in self.state.parameters:
            if parameter.grad is not None:
                total = parameter.grad.sum()
                return float(total.abs() if total.is_complex() else total)
        return 0.0

    def update(self) -> None:
        """Take one optimizer step with the gradients gathered since the last one."""
        if self.state.frozen_weights:
            self.state.check_frozen()
        if self.state.privatizer is not None:
            self.state.uses.replace(f"gradients at {self.name}", self.state.privatizer.finish())
        if self.state.objective is not None:
            self.state.objective.correct(self.state.modules)
        if self.state.optimizer is not None:
            take_step(self.state.optimizer)
        self.drop_gradients()
        for learned, state in self.state.learned_defenses:
            learned.learn(state)

    def drop_gradients(self) -> None:
        """Forget the gradients gathered since the last update."""
        if self.state.privatizer is not None:
            self.state.privatizer.drop()
        for parameter in self.state.parameters:
            parameter.grad = None

    def tell_norms(self, stamp: Stamp, peers: Mapping[str, str]) -> list[Message]:
        """Return the squared norm of every row's gradient as messages to the parties that clip by all of them."""
        if self.state.privatizer is None or not self.state.privatizer.active:
            return []
        norms = {"squared norm": self.state.privatizer.norms()}
        tells = self.state.privatizer.tells
        return [Message(self.name, peers[role], "norm", f"norms->{role}", norms, stamp) for role in tells]

    def hear_norms(self, message: Message) -> None:
        """Take what `tell_norms` returned at another party."""
        assert self.state.privatizer is not None
        self.state.privatizer.hear(message.tensors["squared norm"].to(self.device))

    def skip(self, expected: float, stamp: Stamp) -> None:
        """Take the step of a batch that happens to be empty: only guarded weights move, so that nobody can tell."""
        if self.state.privatizer is not None:
            self.state.privatizer.begin(0, expected, stamp, True)
            self.update()

    def forget(self, replica: int) -> None:
        """Forget what is kept of the step of `replica`."""
        self._step_states.pop(replica, None)

    def output(self, value: str, replica: int) -> Tensor:
        """Return the model output `value` of this step; for the experimenter who scores the run."""
        return self._step_states[replica].values[value].detach()

    def has_value(self, value: str, replica: int) -> bool:
        """Return whether this step has come to `value`."""
        return value in self._step_states[replica].values

    def _arrived(self, message: Message) -> list[tuple[str, Tensor]]:
        """Return name and tensor of all that has arrived, each as it lay at the sender."""
        found, layouts = [(name, tensor.to(self.device)) for name, tensor in message.tensors.items()], message.layouts
        return [(n, layouts[n].lay_out(one) if n in layouts else one) for n, one in found] if layouts else found

    def _read(self, rows: RowSource, batch: Batch, stamp: Stamp) -> Tensor:
        """Return the rows of a batch, as training sees them in a step of training, else as they are."""
        draw = None
        if rows.draws and self._training:
            draw = Draw(self.state.seed, stamp.epoch if batch.counts_as is None else batch.counts_as)
        return rows.take(batch.rows.cpu(), draw).to(self.device)

    def _arguments(self, segment_plan: SegmentPlan, step_state: StepState) -> list[Tensor]:
        leaves = step_state.leaves[segment_plan.segment] = {}
        arguments = []
        for name in segment_plan.inputs:
            if name in segment_plan.own:
                value = step_state.inputs[name]
            elif name in step_state.held:
                value = step_state.held[name]
            else:
                if name not in leaves:
                    asks = name not in segment_plan.dataless
                    leaves[name] = self._leaf(step_state.values[name], step_state, asks)
                value = leaves[name]
            # An operation in place may neither touch a leaf nor the sender's memory.
            arguments.append(value.clone() if name in segment_plan.overwritten else value)
        return arguments

    def _leaf(self, value: Tensor, step_state: StepState, returns: bool = True) -> Tensor:
        # Masks and whole numbers have no gradient.
        leaf = value.detach().requires_grad_(self._training and returns and value.is_floating_point())
        if leaf.requires_grad:
            # torch keeps a leaf's gradient in the leaf's strides, but the order of sums behind it follows its own.
            leaf.register_hook(partial(_note_layout, step_state.layouts, id(leaf), leaf.stride()))
        return leaf

    def _run(self, segment_plan: SegmentPlan, arguments: list[Tensor], stamp: Stamp) -> tuple[Tensor, ...]:
        module, privatizer = self.state.modules[segment_plan.segment], self.state.privatizer
        watched = privatizer is not None and privatizer.active
        draws = segment_plan.stochastic or segment_plan.plain_draws
        if watched or draws:
            with ExitStack() as blocks:
                if privatizer is not None and watched:
                    blocks.enter_context(privatizer.watching(module))
                if draws:
                    seed = forward_seed(self.state.seed, self.name, segment_plan.segment, stamp)
                    blocks.enter_context(stream(seed, self.device, everywhere=segment_plan.plain_draws))
                result = module(*arguments)
        else:
            result = module(*arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _release(self, segment_plan: SegmentPlan, port: Port, step_state: StepState, stamp: Stamp) -> dict[str, Tensor]:
        """Apply the edge's defenses in order; keep what left attached, hand it out detached."""
        values = {name: step_state.values[name] for name in port.values}
        for guard in port.release_defenses:
            context = self._context(segment_plan, port, guard.position, step_state, stamp)
            if self._training and guard.penalty_defense is not None:
                z = concatenate_values([values[name] for name in port.defended])
                penalty = guard.penalty_defense.penalty(z, context)
                self._add_penalty(segment_plan.segment, z, penalty, guard.share * step_state.scale, step_state)
            if guard.release_defense is None:
                continue
            if "activation" in guard.counts:
                self.state.uses.replace(port.edge, sum(infinite_rows(values[name]) for name in port.defended))
            release = guard.release_defense.release
            for name in port.defended:
                made, given = release(name, values[name], context), values[name]
                values[name] = made if _is_like(made, given) else same_form(release, made, given)
            if "activation" in guard.counts:
                self._count(port.edge, guard, step_state, stamp, len(port.defended))
        fresh = not step_state.sent
        step_state.sent[port.edge] = values
        leaving = {}
        for name, z in values.items():
            leaving[name] = z.detach()
            # What an operation has just made, and is no view, is new memory; to ask that costs less than to compare.
            fresh = fresh and z.grad_fn is not None and z._base is None
        return leaving if fresh else self._copy_shared_values(port.edge, leaving, step_state)

    def _copy_shared_values(self, edge: str, leaving: dict[str, Tensor], step_state: StepState) -> dict[str, Tensor]:
        """Return `leaving` with copies of what has come in, or has left already: no other party may write into that."""
        others = (step_state.inputs, step_state.held, *(sent for left, sent in step_state.sent.items() if left != edge))
        addresses = {t.untyped_storage().data_ptr() for tensors in others for t in tensors.values()}
        # The link copies the rest of what is not alone in its memory.
        shared = [n for n, z in leaving.items() if z.untyped_storage().data_ptr() in addresses and is_own(z)]
        return {**leaving, **{n: leaving[n].clone() for n in shared}} if shared else leaving

    def _add_penalty(
        self, segment: str, z: Tensor, penalty: Tensor | PenaltyGradient | None, weight: float, step_state: StepState
    ) -> None:
        """Add the `penalty` of `z`, which leaves, to the segment's losses, or to what goes back through it."""
        if isinstance(penalty, PenaltyGradient):
            gradient = penalty.gradient if weight == 1.0 else penalty.gradient * weight
            step_state.slopes.setdefault(segment, []).append((z, gradient, z._version))
        elif penalty is not None:
            step_state.losses[segment].append((penalty, weight))

    def _add_penalties(self, segment_plan: SegmentPlan, step_state: StepState, stamp: Stamp) -> None:
        """Add what the defenses of the edges that a segment has read want at this end to its losses."""
        for port in segment_plan.penalized_arrivals:
            for guard in port.receiver_defenses:
                context = self._context(segment_plan, port, guard.position, step_state, stamp)
                penalty = guard.defense.penalty_at_receiver(context)
                if penalty is not None:
                    step_state.losses[segment_plan.segment].append((penalty, guard.share * step_state.scale))

    def _return_gradients(
        self, segment_plan: SegmentPlan, step_state: StepState, stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Return the gradients of what the segment has read: kept for the party's own segments, sent to others."""
        leaves = step_state.leaves.pop(segment_plan.segment)
        messages = []
        for port in segment_plan.arrivals:
            if port.role is None:
                back = [(step_state.values[name], _gradient(leaves[name], step_state)) for name in port.returned]
                step_state.returned.setdefault(port.segment, []).extend(back)
                continue
            held_leaves = {name: step_state.held.pop(name) for name in port.values}
            tensors = {name: _gradient(held_leaves[name], step_state) for name in port.returned}
            if not tensors:
                continue
            for guard in port.gradient_defenses:
                context = self._context(segment_plan, port, guard.position, step_state, stamp)
                defend = guard.defense.gradient
                tensors = {n: same_form(defend, defend(n, g, context), g) for n, g in tensors.items()}
                if "gradient" in guard.counts:
                    self._count(port.edge, guard, step_state, stamp, len(tensors))
            messages.append(self._message("gradient", port, peers, tensors, stamp))
        return messages

    def _message(
        self, kind: str, port: Port, peers: Mapping[str, str], tensors: dict[str, Tensor], stamp: Stamp
    ) -> Message:
        assert port.role is not None
        receiver = peers[port.role]
        if not (port.packs or port.dataless):
            return Message(self.name, receiver, kind, port.edge, tensors, stamp)
        defenses = [guard.defense for guard in port.guards]
        sizes = {
            n: packed_bytes(defenses, kind, len(t), tuple(t.shape[1:]), t.dtype) if n in port.defended else None
            for n, t in tensors.items()
        }
        short = any(size is not None for size in sizes.values())
        packed = sum(t.nbytes if (size := sizes[n]) is None else size for n, t in tensors.items()) if short else None
        return Message(self.name, receiver, kind, port.edge, tensors, stamp, packed, None, port.dataless)

    def _add_objective_terms(self, objective: LocalObjective, step_state: StepState, stamp: Stamp) -> None:
        """Add the terms of the local objective to the losses, while all values of the step are still there."""
        step_state.objective_added = True
        if self._training:
            labels = step_state.received_labels | step_state.labels
            for segment, term in objective.terms(step_state.values, labels, stamp).items():
                step_state.losses[segment].append((term, step_state.scale))

    def _replace_targets(self, step_state: StepState, stamp: Stamp) -> None:
        """Replace the labels of a training step by what its defenses want the loss to compare with."""
        for name, (head, guards) in self.state.relabelled.items():
            for guard in guards if name in step_state.labels else ():
                assert head.task is not None
                words = ("targets", self.name, name, guard.position, *stamp)
                random = wide_generator(self.state.seed, *words, device=self.device)
                labels, targets = step_state.labels[name], guard.defense.targets
                step_state.labels[name] = same_form(targets, targets(labels, head.task, random), labels, 1)
                # What is only rehearsed leaves nothing behind, and nobody learns of it.
                if "step" in guard.counts and stamp.phase == "train":
                    self._count(labels_of_head(name), guard, step_state, stamp)

    def _count(
        self, where: str, guard: EdgeDefense[Defense], step_state: StepState, stamp: Stamp, times: int = 1
    ) -> None:
        rows, origins = step_state.rows, self.state.origins.get(step_state.part)
        assert rows is not None
        for part, counted in [(step_state.part, rows)] if origins is None else origins.select(rows.cpu()):
            self.state.uses.add((where, guard.position, stamp.replica, part), counted, times)

    def _context(
        self, segment_plan: SegmentPlan, port: Port, position: int, step_state: StepState, stamp: Stamp
    ) -> Context:
        state, module = self.state.defense_states[port.edge, position], self.state.modules[segment_plan.segment]
        held = (step_state.inputs, step_state.labels, state, module, step_state.counts_as, step_state.held)
        return Context(self.name, port.edge, stamp, self.state.seed, position, *held)


def _is_like(made: object, given: Tensor) -> bool:
    return isinstance(made, Tensor) and made.shape == given.shape


def _note_layout(layouts: dict[int, Layout], leaf: int, strides: tuple[int, ...], gradient: Tensor | None) -> None:
    """Keep how the `gradient` of a leaf lies, where that is not as the leaf does, with `strides`; refuse none."""
    if gradient is None:
        raise InvalidInput(
            "a function with a backward of its own sends no gradient back to what arrived (None), for which zeros "
            "would be sent: read that outside of it as well, or cut behind it"
        )
    if gradient.stride() != strides:
        layouts[leaf] = Layout.of(gradient)


def _gradient(leaf: Tensor, step_state: StepState) -> Tensor:
    """Return the gradient of a leaf as it lay when it came; zeros where nothing used it in this step."""
    found, layout = leaf.grad, step_state.layouts.get(id(leaf))
    if found is None:
        return torch.zeros_like(leaf)
    return found if layout is None or layout.strides == found.stride() else layout.lay_out(found)


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | float]) -> None:
    """Add to the gradient of every leaf behind `roots` what their `gradients` send back; see `gradient_tensors`.

    Frees the graph behind the roots. Goes straight into torch's engine: `torch.autograd.backward` first compares shapes
    by symbolic algebra and saves a context for compilers, which costs a short step as much as all the rest of a cut.
    """
    given = tuple(gradient_tensors(roots, gradients))
    engine = Variable._execution_engine
    engine.run_backward(tuple(roots), given, False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradient_tensors(roots: Sequence[Tensor], gradients: Sequence[Tensor | float]) -> list[Tensor]:
    """Return the `gradients` of `roots` as tensors: a number is the weight of a loss.

    To weigh a loss there costs nothing; a multiplication would be a node in the graph. Raises `ValueError` for a
    gradient of another shape than its root, and for a loss of several numbers.
    """
    tensors = []
    for root, gradient in zip(roots, gradients, strict=True):
        if isinstance(gradient, Tensor):
            if (given := gradient.shape) != root.shape:
                raise ValueError(f"a gradient of shape {tuple(given)} is not allowed; expected {tuple(root.shape)}")
            tensors.append(gradient)
        elif root.numel() != 1:
            raise ValueError(f"a loss of shape {tuple(root.shape)} is not allowed; expected a single number")
        else:
            tensors.append(torch.ones_like(root) if gradient == 1.0 else torch.full_like(root, gradient))
    return tensors


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of `optimizer`, without the mark for torch's profiler where nobody has hooked into its steps.

    Behind convolutions, with cold caches, two marks cost a training step of 9 ms about a per cent.
    """
    step = type(optimizer).step
    marked = getattr(step, "hooked", False) and not getattr(step.__wrapped__, "hooked", False)  # type: ignore[attr-defined]
    if marked and "step" not in vars(optimizer) and not _has_step_hooks(optimizer):
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        # Replaced on the optimizer itself, as by a scheduler that counts steps, or on its class; or hooked.
        optimizer.step()


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook waits for a step; what cannot be found out counts as one."""
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or getattr(_OPTIMIZER_MODULE, "_global_optimizer_pre_hooks", True)
        or getattr(_OPTIMIZER_MODULE, "_global_optimizer_post_hooks", True)
    )
