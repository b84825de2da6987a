"""Shared by attacks that invert gradients: the client's gradient, from its update, and gradients of predictions.

Paper: Zhu, Liu, Han, "Deep leakage from gradients", NeurIPS 2019 (matching the gradient of a prediction to a client's).

An aggregation server knows the weights it sent, w, and those that came back, w'. After one step of SGD at rate r the
step was d = (w - w') / r, and the gradient is d - decay w - momentum d', with d' the client's previous step. If the
clients hold the whole model, or train on a loss of their own, that gradient is a function of rows and labels. If they
hold the bottom of a split model, the gradient returned at the cut takes the place of the labels: the server does not
know it, and optimizes it along with the rows (an extension; the papers have no cut). So are the outputs of defenses on
a row's release and on the returned gradient, and the factor by which a row's gradient is clipped.

If the client clips the gradient of every row (DP-SGD), those of predictions are clipped to the same norm, which is part
of the protocol; the noise is taken at its mean.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.gradients.local_training import LocalTraining, check_one_step
from splitfed.attacks.knowledge import Knowledge, unwrap
from splitfed.attacks.networks.frozen_copy import run_segments
from splitfed.attacks.uploads.exchanged_model import ExchangedRound
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import WEIGHT_GRADIENT, Message, View
from splitfed.core.task_checks import check_class_probabilities, describe_function, has_own_loss
from splitfed.core.topology import Head, weights


@dataclass(frozen=True)
class Step:
    """One step of a client: the weights before it, and the gradient of its loss, both as `segment/name` -> tensor."""

    before: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]
    rows: int


def newest_step(view: View, local: LocalTraining) -> Step:
    """Return the step of the newest upload in a view that holds the messages of one client.

    Raises `InvalidInput` if the update does not determine a gradient, or if a needed message was not recorded.
    """
    check_one_step(local)
    if local.sends_gradients:
        return _sent_gradient(view, local)
    rate, momentum = float(local.options["lr"]), float(local.options.get("momentum", 0.0))
    rounds = _recorded_rounds(view)
    if not rounds:
        raise InvalidInput(f"the view of {view.party!r} holds no weights that went to a client and came back")
    if rate == 0:
        raise InvalidInput("the client's learning rate is 0; its update holds no gradient")
    first, *_ = rounds
    if momentum and first.number > 0:
        raise InvalidInput(f"momentum={momentum:g} needs the view from round 0 on; it begins at {first.number}")
    if not momentum:
        rounds = rounds[-1:]
    held: dict[str, Tensor] = {}
    gradient: dict[str, Tensor] = {}
    for _, sent, came in rounds:
        step = {n: (w.double() - came[n].double()) / rate for n, w in sent.items()}
        gradient = {n: d - momentum * held[n] if held else d for n, d in step.items()}
        held = step
    decay = float(local.options.get("weight_decay", 0.0))
    before = rounds[-1].before
    gradient = {n: g - decay * before[n].double() for n, g in gradient.items()}
    return Step(before, gradient, local.batches[0])


def _sent_gradient(view: View, local: LocalTraining) -> Step:
    """Return the step of a client that sends its gradient itself, and leaves the step to the aggregation server."""
    came = _by_round(m for m in view.select(kind=WEIGHT_GRADIENT).messages if m.receiver == view.party)
    sent = _by_round(m for m in view.select(kind="weights").messages if m.sender == view.party)
    if not came or (newest := max(came)) not in sent:
        raise InvalidInput(f"the view of {view.party!r} holds no weights with a gradient of them that came back")
    return Step(sent[newest], {n: g.double() for n, g in came[newest].items()}, sum(local.batches))


def _recorded_rounds(view: View) -> list[ExchangedRound]:
    """Return the weights sent to the client and those that came back, of every round in which both were recorded."""
    messages = view.select(kind="weights").messages
    sent = _by_round(m for m in messages if m.sender == view.party)
    came = _by_round(m for m in messages if m.receiver == view.party)
    return [ExchangedRound(number, sent[number], came[number]) for number in sorted(sent.keys() & came.keys())]


def _by_round(messages: Iterable[Message]) -> dict[int, dict[str, Tensor]]:
    """Return round -> the tensors of its messages together; each party of a group sends what it holds."""
    found: dict[int, dict[str, Tensor]] = {}
    for message in messages:
        found.setdefault(message.stamp.epoch, {}).update(message.tensors)
    return found


def _check_known(local: LocalTraining, step: Step) -> None:
    """Raise `InvalidInput` for a client that keeps some segments to itself, as their outputs are unknown."""
    own = [s for s in local.segments if any(f"{s.name}/{name}" not in step.before for name in weights(s.module))]
    sent = [s for s in local.segments if s not in own and weights(s.module)]
    for one in own:
        for other in sent:
            if {*one.outputs} & {*other.inputs} or {*other.outputs} & {*one.inputs}:
                raise InvalidInput(
                    f"the client keeps the weights of {one.name!r} to itself: the gradient of {other.name!r} cannot be "
                    "worked out for a prediction"
                )


class ClientGradient:
    """The gradient of the client's weights, at the weights of a step, as a function of rows and other unknowns."""

    def __init__(
        self, segments: Mapping[str, nn.Module], local: LocalTraining, step: Step, device: torch.device | str
    ) -> None:
        self.local, self.rows, self.device = local, step.rows, device
        _check_known(local, step)
        for head in local.heads:
            if head.task is not None and head.task.name in ("classification", "binary"):
                check_class_probabilities(head.task, "gradient matching")
        # Who only fuses weights holds no segment; the layout is known all the same.
        self._modules = {s.name: copy.deepcopy(segments.get(s.name, s.module)) for s in local.segments}
        for module in self._modules.values():
            module.to(device).double()
        # All in training mode, but for what was frozen in evaluation mode inside a segment.
        for segment in local.segments:
            for own, given in zip(self._modules[segment.name].modules(), segment.module.modules(), strict=True):
                own.training = given.training or not segment.module.training
        for name, module in self._modules.items():
            module.load_state_dict({n: step.before.get(f"{name}/{n}", t) for n, t in module.state_dict().items()})
        known = {f"{s}/{n}": p for s, m in self._modules.items() for n, p in m.named_parameters() if p.requires_grad}
        known = {name: weight for name, weight in known.items() if name in step.gradient}
        if not known:
            raise InvalidInput("the client's segments have no weights; there is no gradient to invert")
        self._weights = list(known.values())
        self.target = [step.gradient[name].to(device) for name in known]
        self._named = dict(zip(known, self.target, strict=True))

    def draw_unknowns(
        self, shape: Sequence[int], generator: torch.Generator
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw starts for the labels of every head, as logits, and for the gradient of every released value."""
        with torch.no_grad():
            made = self._forward(torch.zeros(self.rows, *shape, dtype=torch.float64, device=self.device))
        labels = {h.value: self.draw(made[h.value].shape, generator) for h in self.local.heads}
        return labels, {v: self.draw(made[v].shape, generator, 1 / self.rows) for v in self.local.released}

    def draw(self, shape: Sequence[int], generator: torch.Generator, scale: float = 1.0) -> Tensor:
        """Return normal random numbers of `shape`, times `scale`, that require a gradient."""
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device=generator.device)
        return (drawn * scale).to(self.device).requires_grad_()

    def gradient(self, x: Tensor, labels: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradient of the loss in every weight, in the order of the weights.

        Differentiable in all arguments.

        x: rows (n, *shape); `labels`: head -> logits (n, outputs); `back`: released value -> its gradient, same shape.
        """
        if self.local.clip is None or not self.local.heads:
            # What comes back at a cut is searched for every row, and what a row is clipped by with it.
            return self._gradient(x, labels, back)
        rows = []
        for one in torch.arange(len(x)).split(1):
            own = {name: y[one] for name, y in labels.items()}
            # What comes back is that of the mean loss, of which a row's own is as many times as there are rows.
            returned = {value: len(x) * g[one] for value, g in back.items()}
            rows.append(clip_gradient(self._gradient(x[one], own, returned), self.local.clip))
        return [torch.stack(parts).mean(0) for parts in zip(*rows, strict=True)]

    def _gradient(self, x: Tensor, labels: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradient of the mean loss of rows x, without clipping."""
        made = self._forward(x)
        loss = x.new_zeros(())
        for head in self.local.heads:
            assert head.task is not None
            loss = loss + head.weight * head.task.loss(made[head.value], soft_labels(head, labels[head.value]))
        for value, g in back.items():
            loss = loss + (made[value] * g).sum()
        found = torch.autograd.grad(loss, self._weights, create_graph=True, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(self._weights, found, strict=True)]

    def outputs(self, x: Tensor, head: Head) -> Tensor:
        """Return the output of the client's model at `head` for rows x: (n, outputs)."""
        with torch.no_grad():
            return self._forward(x)[head.value]

    def last_layer(self, head: Head) -> Tensor:
        """Return the gradient of the bias of the linear layer that computes the output at `head`: (outputs,).

        Raises `InvalidInput` if the output is not that of a linear layer with a bias.
        """
        segment = next(s for s in self.local.segments if head.value in s.outputs)
        linear = [(n, m) for n, m in self._modules[segment.name].named_modules() if isinstance(m, nn.Linear)]
        if not linear or linear[-1][1].bias is None:
            raise InvalidInput(
                f"the output {head.value!r} is not computed by a linear layer with a bias, which would reveal labels"
            )
        return self._named[f"{segment.name}/{linear[-1][0]}.bias".replace("/.", "/")] / head.weight

    def _forward(self, x: Tensor) -> dict[str, Tensor]:
        return run_segments(self.local.segments, self._modules, self.local.feed(x))


def clip_gradient(gradient: list[Tensor], norm: float) -> list[Tensor]:
    """Return the `gradient` of one row, scaled down to the L2 norm `norm` over all its numbers if it is longer."""
    length = sum((g.square().sum() for g in gradient), gradient[0].new_zeros(())).clamp_min(1e-300).sqrt()
    factor = (norm / length).clamp(max=1.0)
    return [g * factor for g in gradient]


def client_gradient(view: View, knowledge: Knowledge) -> ClientGradient:
    """Return the gradient function of the client in `view` at its newest step; raises as `newest_step` does."""
    local = unwrap(knowledge.local)
    return ClientGradient(view.segments, local, newest_step(view, local), knowledge.device)


def soft_labels(head: Head, free: Tensor) -> Tensor:
    """Return labels for the unbounded numbers `free`: their softmax or sigmoid; for regression `free` itself."""
    name = "" if head.task is None else head.task.name
    if name == "classification":
        return free.softmax(1)
    if name == "binary":
        return free.reshape(len(free)).sigmoid()
    if name == "regression":
        return free
    raise InvalidInput(f"task {name!r} of {head.value!r} is not allowed; expected classification, binary or regression")


def classes_of(head: Head) -> int:
    """Return the number of classes at `head`; raise `InvalidInput` unless it learns by cross-entropy."""
    if head.task is None or head.task.name != "classification" or head.task.outputs is None:
        name = None if head.task is None else head.task.name
        raise InvalidInput(
            f"classes can be derived only from the gradient of a classification; {head.value!r} has task {name!r}"
        )
    if has_own_loss(head.task):
        raise InvalidInput(
            f"classes can be derived only from the gradient of cross-entropy; {head.value!r} has the loss "
            f"{describe_function(head.task.loss)}"
        )
    return head.task.outputs


def class_logits(labels: Tensor, outputs: int) -> Tensor:
    """Return logits (rows, outputs) whose `soft_labels` are one-hot for `labels` (rows,) int64, up to 1e-6."""
    return functional.one_hot(labels, outputs).double() * 20.0


def single_class(head: Head, client: ClientGradient) -> Tensor:
    """Return the class of a batch of one row, (1,), from the gradient of the last bias.

    That gradient is p - y, negative at the true class alone.
    """
    return client.last_layer(head).argmin().view(1)


def single_class_logits(head: Head, client: ClientGradient) -> Tensor:
    """Return the class of a batch of one row as logits, (1, outputs)."""
    return class_logits(single_class(head, client), classes_of(head))


def batch_logits(head: Head, client: ClientGradient, usual: Tensor) -> Tensor:
    """Return the classes of a batch as logits, (rows, outputs): exact for one row, estimated counts for several.

    `usual`: rows (n, *shape) on which the client's model is assumed to have the same mean output as on its own.
    """
    outputs = classes_of(head)
    if client.rows == 1:
        return single_class_logits(head, client)
    said = client.outputs(usual, head).softmax(1).mean(0)
    return class_logits(class_counts(client.last_layer(head), said, client.rows), outputs)


def class_counts(bias: Tensor, confidences: Tensor, rows: int) -> Tensor:
    """Return the most plausible classes of a batch, (rows,) int64 in ascending order.

    bias: (classes,) gradient of the last bias, the batch mean of p - y; confidences: (classes,) assumed mean of p. The
    count of a class is about rows (p - bias); rows are assigned one at a time to the class with the largest remainder.
    """
    missing = rows * (confidences - bias)
    classes = []
    for _ in range(rows):
        classes.append(int(missing.argmax()))
        missing[classes[-1]] -= 1
    return torch.tensor(sorted(classes), device=bias.device)
