"""The two sides of an equivalence test: the uncut model as anybody trains it, and parties that hold its segments.

Both run one batch in one mode and say what it has left behind; see `splitfed.core.equivalence` for the comparison.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.errors import InvalidInput
from splitfed.core.executor import ClientReplica, exchange, forward
from splitfed.core.messages import LocalLink
from splitfed.core.model_call import call_of, set_mode
from splitfed.core.model_snapshot import generator_states
from splitfed.core.module_copies import is_compiled
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.core.payload import copy_modules
from splitfed.core.plain_values import equal_tensors
from splitfed.core.replay_plan import flatten_result
from splitfed.core.step_plan import segment_plans
from splitfed.core.step_state import Batch
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Original, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.core.traffic import Traffic
from splitfed.core.weight_sharing import addresses, share_modules

LR, MOMENTUM, WEIGHT_DECAY = 2.0**-7, 0.9, 0.01
"""The steps of both sides: with momentum and decay, so that a gradient of zeros differs from none."""
TRAINING, EVALUATION, NO_GRADIENTS = "training", "evaluation", "evaluation without gradients"

Values = Mapping[str, Tensor]


class RehearsalStep:
    """Steps of SGD over `weights`, by the arithmetic of `torch.optim.SGD`.

    The first optimizer of torch that a process makes loads its compiler, which takes longer than all the comparison.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = list(weights)
        self._buffers: dict[int, Tensor] = {}
        self.skipped: frozenset[int] = frozenset()
        """Addresses of weights that are not stepped on here: those that both sides share."""

    @torch.no_grad()
    def step(self) -> None:
        """Step on the gradients that there are."""
        for number, weight in enumerate(self._weights):
            if weight.grad is None or weight.data_ptr() in self.skipped:
                continue
            gradient = weight.grad.to_dense().add(weight, alpha=WEIGHT_DECAY)
            if (buffer := self._buffers.get(number)) is None:
                buffer = self._buffers[number] = gradient.clone()
            else:
                buffer.mul_(MOMENTUM).add_(gradient)
            weight.add_(buffer, alpha=-LR)

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for weight in self._weights:
            weight.grad = None


class _RehearsalOptim(Optim):
    """Gives a party `RehearsalStep` for its optimizer."""

    def __post_init__(self) -> None:
        """Nothing is left to check."""

    def build(self, parameters: Iterable[Any]) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Return the steps over `parameters`, weights or pairs of a name and a weight."""
        weights = [one[1] if isinstance(one, tuple) else one for one in parameters]
        return cast(torch.optim.Optimizer, RehearsalStep(weights)), None


@dataclass
class StepResult:
    """What one batch leaves behind: outputs by value, gradients and state by name, modes and random generators.

    `attached`: whether autograd knows where each output comes from. `buffers`: all of the uncut model;
    `copies`: every buffer of every segment, with the names of both. `attributes` and `attribute_copies`: the same of
    tensors that are plain attributes.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    attached: dict[str, bool] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    copies: list[tuple[str, str, Tensor]] = field(default_factory=list)
    attributes: dict[str, Tensor] = field(default_factory=dict)
    attribute_copies: list[tuple[str, str, Tensor]] = field(default_factory=list)
    modes: dict[str, bool] = field(default_factory=dict)
    generators: tuple[Any, ...] = ()


class Side(Protocol):
    """One of the two."""

    def run(self, stage: str, inputs: Values, targets: Values, step: int) -> StepResult:
        """Run one batch of `inputs`, in training towards `targets` with a step of the optimizer at the end."""

    def modules(self) -> dict[str, nn.Module]:
        """Return the submodules without submodules of their own, by their names in the uncut model."""


class Uncut:
    """The user's own model, trained in place.

    `shared`: addresses of the weights that the parties compute with too; only `step_shared` steps on these.
    """

    def __init__(self, original: Original, in_training: bool, shared: frozenset[int] = frozenset()) -> None:
        self._original, self._shared = original, shared
        self._model = original.model
        # What `forward` never reads has no rows, and may have to be given all the same.
        self._call = call_of(original.model, tuple(original.arguments.values()))
        # A model given in evaluation mode as a whole is trained; what is frozen inside stays so.
        self._frozen = [n for n, m in self._model.named_modules() if in_training and not m.training]
        self._step = RehearsalStep(p for p in self._model.parameters() if p.requires_grad)
        self._step.skipped = shared
        # Compiled submodules run as they are written, as parties run them.
        self._compiled = any(is_compiled(module) for module in self._model.modules())

    def run(self, stage: str, inputs: Values, targets: Values, step: int) -> StepResult:
        """Run one batch as a plain call of the model; see `Side.run`."""
        set_mode(self._model, stage == TRAINING)
        for name in self._frozen if stage == TRAINING else ():
            self._model.get_submodule(name).training = False
        names = self._original.arguments
        copies = {name: value.clone() for name, value in inputs.items()}
        with torch.set_grad_enabled(stage != NO_GRADIENTS), self._as_written():
            if names:
                result = self._call(self._model, {names[value]: copies[value] for value in names})
            else:
                result = self._model(*(copies[value] for value in self._original.pieces[0][1]))
        outputs = dict(zip(self._original.outputs, flatten_result(result, self._original.output).values(), strict=True))
        step_result = StepResult(
            {v: t.detach().clone() for v, t in outputs.items()}, {v: t.requires_grad for v, t in outputs.items()}
        )
        if stage == TRAINING:
            losses = [_linear(outputs[value], target) for value, target in targets.items()]
            if learning := [loss for loss in losses if loss.requires_grad]:
                torch.autograd.backward(learning)
            step_result.gradients = _gradients(self._model)
            self._step.step()
            self._step.drop_gradients()
        saved = self._model.state_dict()
        return replace(
            step_result,
            state={n: _kept(t, self._shared) for n, t in saved.items()},
            buffers={n: t.clone() for n, t in self._model.named_buffers(remove_duplicate=False)},
            attributes=_plain_attributes(self._model),
            modes={name: module.training for name, module in self.modules().items()},
            generators=generator_states(),
        )

    @torch.no_grad()
    def step_shared(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Step on the weights that are shared, once for both sides, by `gradients`: the first that they come to."""
        for name, weight in self._model.named_parameters():
            if (gradient := gradients.get(name)) is not None and weight.data_ptr() in self._shared:
                weight.add_(gradient.add(weight, alpha=WEIGHT_DECAY), alpha=-LR)

    def _as_written(self) -> AbstractContextManager[Any]:
        if self._compiled:
            return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))
        return nullcontext()

    def modules(self) -> dict[str, nn.Module]:
        """Return the innermost submodules by name."""
        return {name: m for name, m in self._model.named_modules() if _is_innermost(m)}


class Parties:
    """Copies of the segments, each with the party of its role, trained by messages as in a run.

    `replaced`: gradients by name of weight with which the step of the next batch is taken in place of its own; what
    `run` returns are its own. `sharing`: whether the copies share the memory of weights; `shared`: where those begin.
    """

    def __init__(
        self, unit: Topology, facts: TopologyFacts, frozen: Mapping[str, tuple[str, ...]], sharing: bool = False
    ) -> None:
        self.replaced: Values = {}
        self.expected: Mapping[str, Tensor | None] = {}
        """Gradients by name of weight; one that comes out the same, bit for bit, takes no memory of its own."""
        self._outcome = StepResult()
        heads = tuple(self._with_loss(head) for head in unit.heads)
        self._topology = replace(unit, heads=heads)
        self._facts = facts
        work = segment_plans(self._topology, facts, (), frozen)
        modules = {s.name: s.module for s in unit.segments}
        self._parties = {
            role: Party(
                PartyState(
                    role,
                    role,
                    work[role],
                    modules,
                    _RehearsalOptim(),
                    0,
                    facts.shapes,
                    copies=share_modules if sharing else copy_modules,
                    saved=False,
                )
            )
            for role in self._topology.roles
        }
        # What a run's messages are carried by, so that values arrive as they do there.
        self._link = LocalLink(Traffic(), {})
        self._replica = ClientReplica(0, self._topology, self._parties, 0)
        self._modules = {name: m for party in self._parties.values() for name, m in party.state.modules.items()}
        self.shared = addresses(modules.values()) & addresses(self._modules.values())
        for party in self._parties.values() if self.shared else ():
            if (step := party.state.optimizer) is not None:
                cast(RehearsalStep, step).skipped = self.shared

    def run(self, stage: str, inputs: Values, targets: Values, step: int) -> StepResult:
        """Run one batch as an exchange of messages; see `Side.run`."""
        step_result = self._outcome = StepResult()
        rows = len(next(iter(inputs.values())))
        for role, party in self._parties.items():
            own_inputs = {v: t.clone() for v, t in inputs.items() if self._topology.inputs[v] == role}
            party.state.own(
                "train", own_inputs, {h.value: targets[h.value] for h in self._topology.heads if h.labels == role}
            )
        batch = Batch("train", torch.arange(rows))
        if stage == TRAINING:
            hooks = self._let_go_of_equal() if self.shared else []
            try:
                exchange(self._replica, self._link, batch, self._replica.stamp("train", 0, step))
            finally:
                for hook in hooks:
                    hook.remove()
            step_result.gradients = {
                segment.full(name): gradient
                for segment in self._topology.segments
                for name, gradient in _gradients(self._modules[segment.name]).items()
            }
            self._replace_gradients()
            for party in self._parties.values():
                party.update()
        elif stage == NO_GRADIENTS:
            # As `executor.predict_step`, which refuses outputs that are not finite; here they are compared.
            forward(self._replica, self._link, batch, self._replica.stamp("evaluate", 0, step), [])
            step_result.outputs = {h.value: self._parties[h.role].output(h.value, 0) for h in self._topology.heads}
        else:
            self._chain(inputs, step_result)
        return replace(
            step_result,
            state={n: _kept(t, self.shared) for n, t in self._topology.state_dict(self._modules).items()},
            copies=[
                (segment.name, segment.full(name), buffer.clone())
                for segment in self._topology.segments
                for name, buffer in self._modules[segment.name].named_buffers(remove_duplicate=False)
            ],
            attribute_copies=[
                (segment.name, segment.full(name), tensor)
                for segment in self._topology.segments
                for name, tensor in _plain_attributes(self._modules[segment.name]).items()
                if name in getattr(self._modules[segment.name], "read_attributes", (name,))
            ],
            modes={name: module.training for name, module in self.modules().items()},
            generators=generator_states(),
        )

    def modules(self) -> dict[str, nn.Module]:
        """Return the innermost submodules by name."""
        return {
            segment.full(name): m
            for segment in self._topology.segments
            for name, m in self._modules[segment.name].named_modules()
            if name and _is_innermost(m)
        }

    def _let_go_of_equal(self) -> list[Any]:
        """Let every gradient give way to the one that is `expected` as soon as it is there, if it is the same."""
        weights = [
            (weight, self.expected.get(segment.full(name)))
            for segment in self._topology.segments
            for name, weight in self._modules[segment.name].named_parameters()
        ]
        # A weight of two segments gets its gradient in parts.
        times = Counter(id(weight) for weight, _ in weights)

        def let_go(weight: Tensor, same: Tensor) -> None:
            if weight.grad is not None and weight.grad.stride() == same.stride() and equal_tensors(weight.grad, same):
                weight.grad = same

        return [
            weight.register_post_accumulate_grad_hook(partial(let_go, same=gradient))
            for weight, gradient in weights
            if gradient is not None and weight.requires_grad and times[id(weight)] == 1
        ]

    def _replace_gradients(self) -> None:
        for segment in self._topology.segments if self.replaced else ():
            for name, weight in self._modules[segment.name].named_parameters():
                gradient = self.replaced.get(segment.full(name))
                if gradient is not None and weight.grad is not None and gradient.shape == weight.grad.shape:
                    weight.grad = gradient.clone()

    def _with_loss(self, head: Head) -> Head:
        """Return `head` with a loss that is linear in the output, and that notes the output."""

        def loss(output: Tensor, target: Tensor) -> Tensor:
            self._outcome.outputs[head.value] = output.detach().clone()
            self._outcome.attached[head.value] = output.requires_grad
            return _linear(output, target)

        return Head(head.value, head.role, head.labels, Task("equivalence", loss, lambda _, __: 0.0, "none", None))

    def _chain(self, inputs: Values, step_result: StepResult) -> None:
        """Run the segments one after the other, as attacks and exported models do, without a cut in the graph."""
        values = {name: value.clone() for name, value in inputs.items()}
        for module in self._modules.values():
            module.eval()
        with torch.enable_grad():
            for s in self._topology.segments:
                overwritten = self._facts.overwritten[s.name]
                arguments = (values[n].clone() if n in overwritten else values[n] for n in s.inputs)
                values.update(zip(s.outputs, as_tuple(self._modules[s.name](*arguments)), strict=True))
        for head in self._topology.heads:
            step_result.outputs[head.value] = values[head.value].detach()
            step_result.attached[head.value] = values[head.value].requires_grad


def _plain_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of tensors that are plain attributes, no results of weights and no shapes of others, by name."""
    return {
        f"{path}.{name}" if path else name: tensor.clone()
        for path, inner in module.named_modules(remove_duplicate=False)
        for name, tensor in vars(inner).items()
        if isinstance(tensor, Tensor) and not tensor.is_meta and not tensor.requires_grad
    }


def _is_innermost(module: nn.Module) -> bool:
    return not module._modules or next(module.children(), None) is None


def required_arguments(model: nn.Module) -> list[str]:
    """Return the arguments of `forward` that have a name and no default."""
    parameters = inspect.signature(model.forward).parameters.items()
    return [n for n, p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]


def _linear(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is linear in the numbers of `output` but the largest: what masks is -inf, or next to it."""
    numbers = output if output.is_floating_point() or output.is_complex() else output.to(target.dtype)
    kept = numbers.abs() < torch.finfo(numbers.dtype).max / 2
    return (numbers.masked_fill(~kept, 0.0) * target).sum()


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """Return what a model or a segment returned as a tuple of tensors."""
    found = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    for value in found:
        if not isinstance(value, Tensor):
            raise InvalidInput(f"a model that returns a {type(value).__name__} cannot be cut; return tensors")
    return found


def unit_of(segments: list[Segment], original: Original, inputs: Values) -> Topology:
    """Return a topology of `segments` alone, with a head on every output of `original`."""
    readers = {v: {s.role for s in segments if v in s.inputs} for v in inputs}
    if any(len(roles) != 1 for roles in readers.values()):
        # Raw data never crosses; here the rows of one owner go into several segments.
        segments = [Segment(s.name, "model", s.module, s.inputs, s.outputs, s.prefix) for s in segments]
        readers = {v: {"model"} for v in readers}
    role_of = {v: s.role for s in segments for v in s.outputs}
    heads = tuple(Head(v, role_of[v], role_of[v]) for v in dict.fromkeys(original.outputs) if v in role_of)
    # Nothing leaves the comparison, whatever is cut.
    owners = {v: min(roles) for v, roles in readers.items()}
    return Topology("model", tuple(segments), owners, heads, sent_inputs=tuple(owners))


def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
    named = module.named_parameters(remove_duplicate=False)
    # Nothing writes into them any more: those of the next batch are new ones.
    return {name: None if p.grad is None else p.grad.to_dense() for name, p in named}


def _kept(value: Any, shared: frozenset[int]) -> Tensor:
    """Return what stays of an entry of a state: a copy, and nothing where it is no tensor, or in `shared` memory."""
    if not isinstance(value, Tensor) or (value.data_ptr() in shared and value.numel()):
        return torch.zeros(0)
    return value.clone()
