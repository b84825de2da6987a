"""What a party holds: segments, data, labels, an optimizer, and what defenses and local objectives keep there."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from splitfed.core.defense import LabelDefense, LearnedDefense
from splitfed.core.defense_context import DefenseSite
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, is_own
from splitfed.core.model_snapshot import generator_states, set_generators
from splitfed.core.optimizers import Optim, advance
from splitfed.core.payload import copy_modules
from splitfed.core.random import derive, wide_generator
from splitfed.core.rows import RowSource, read_rows
from splitfed.core.state_encoding import check_state
from splitfed.core.topology import Head, weights
from splitfed.core.unsaved_state import (
    check_comes_back,
    first_state,
    load_unsaved_state,
    module_of,
    things_digest,
    unsaved_state,
)
from splitfed.core.usage_counts import SCORED, RowOrigins, UsageCounts, labels_of_head

if TYPE_CHECKING:
    from splitfed.core.gradient_privatizer import GradientPrivatizer
    from splitfed.core.local_objective import LocalObjective
    from splitfed.core.step_plan import EdgeDefense, SegmentPlan


class PartyState:
    """Keeps the segments in `modules` (copied) for the `segment_plans` of `role`, with an optimizer of its own.

    `full_names`: segment -> the name of one of its weights in the whole model, of its name there; parameter groups go
    by those. `copies`: what copies the segments.
    """

    def __init__(
        self,
        name: str,
        role: str,
        segment_plans: Sequence[SegmentPlan],
        modules: Mapping[str, nn.Module],
        optim: Optim,
        seed: int,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str = "cpu",
        task_weight: Callable[[int], float] | None = None,
        relabelled: Mapping[str, tuple[Head, tuple[EdgeDefense[LabelDefense], ...]]] | None = None,
        full_names: Mapping[str, Callable[[str], str]] | None = None,
        copies: Callable[[Mapping[str, nn.Module]], dict[str, nn.Module]] = copy_modules,
        saved: bool = True,
    ) -> None:
        self.name = name
        self.role = role
        self.device = torch.device(device)
        self.segment_plans = {d.segment: d for d in segment_plans}
        self.one_way = {port.edge for d in segment_plans for port in d.arrivals if not port.returns}
        # Copied together, so that weights a party shares between its own segments stay shared.
        self.modules = copies({d.segment: modules[d.segment] for d in segment_plans})
        # A party that is never saved needs none of it.
        self._first = {d.segment: first_state(modules[d.segment]) for d in segment_plans} if saved else {}
        tasks = {h.value: h.task for d in segment_plans for h in d.heads if saved and h.task is not None}
        self._tasks = {value: [task.loss, task.metric] for value, task in tasks.items()}
        self._tasks_first = {value: things_digest(task) for value, task in self._tasks.items()}
        self._copies = copies
        # What the user froze (batch norm in evaluation mode, say) stays frozen.
        self.frozen = {d.segment: d.frozen for d in segment_plans}
        for module in self.modules.values():
            module.to(self.device)
        self.uses = UsageCounts()
        self.objective: LocalObjective | None = None
        self.privatizer: GradientPrivatizer | None = None
        self.seed = seed
        self.task_weight = task_weight
        self.data: dict[str, tuple[dict[str, Tensor | RowSource], dict[str, Tensor]]] = {}
        # Of parts whose rows are those of "train", or others': which they are.
        self.origins: dict[str, RowOrigins] = {}
        # The weights when the run begins, and which of them learn: the optimizer holds no others.
        self._at_first = dict(self._weights())
        self._learning = {name: weight.requires_grad for name, weight in self._at_first.items()}
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for segment, module in self.modules.items():
            full = (full_names or {}).get(segment, str)
            for inner, weight in module.named_parameters():
                if weight.requires_grad:
                    unique.setdefault(id(weight), (full(inner), weight))
        self.parameters = [weight for _, weight in unique.values()]
        self._optim, self._named = optim, tuple(unique.values())
        self._scheduled_by_round = optim.scheduler_every == "round"
        if not isinstance(optim.name, str):
            # What a user wrote is refused before anything is computed.
            _ = self._built
        # What the optimizer remembers of steps that go on from a state of their own, by name: see `separate_optimizer`.
        self._separate: dict[str, defaultdict[Tensor, Any]] = {}
        # Head -> the head and the defenses that change its labels, which are this party's.
        self.relabelled = dict(relabelled or {})
        inputs = {v: shapes[v] for segment_plan in segment_plans for v in segment_plan.own}
        guards = {
            (port.edge, guard.position): (port, guard)
            for segment_plan in segment_plans
            for port in (*segment_plan.arrivals, *segment_plan.departures)
            for guard in port.guards
        }
        relabelling = [guard for _, found in self.relabelled.values() for guard in found]
        self.counts_uses = any(guard.counts for guard in (*(guard for _, guard in guards.values()), *relabelling))
        # What each defense keeps at each place, and those that learn with it.
        self.defense_states: dict[tuple[str, int], Any] = dict.fromkeys(guards)
        self.learned_defenses: list[tuple[LearnedDefense, Any]] = []
        for (edge, position), (port, guard) in guards.items():
            if isinstance(guard.defense, LearnedDefense):
                sent, words = {v: shapes[v] for v in port.defended}, ("start", name, edge, position)
                state = guard.defense.start(DefenseSite(name, edge, sent, inputs, derive(seed, *words), self.device))
                self.defense_states[edge, position] = state
                self.learned_defenses.append((guard.defense, state))

    @cached_property
    def _built(self) -> tuple[torch.optim.Optimizer | None, LRScheduler | None]:
        # When it is first asked for: the first one of a process loads torch's compiler, and a plan needs none.
        return self._optim.build(self._named) if self._named else (None, None)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of its weights; None where no weight learns."""
        return self._built[0]

    @cached_property
    def _scheduler(self) -> LRScheduler | None:
        return self._built[1]

    def own(
        self,
        part: str,
        inputs: Mapping[str, Tensor | RowSource],
        labels: Mapping[str, Tensor],
        relabel: bool = True,
        origins: RowOrigins | None = None,
    ) -> None:
        """Take `inputs` (value -> rows) and `labels` (head -> rows) as this party's data under the name `part`.

        A `RowSource` is read by batch; on another device than the CPU one in memory is put there as a whole.
        `relabel`: whether its defenses change labels to train on; not where they have already been changed. `origins`:
        where the rows come from that are not of a part of their own.
        """
        self.origins.pop(part, None)
        if origins is not None:
            self.origins[part] = RowOrigins(*(one.cpu() for one in origins))
        own_inputs = {name: self._keep(x) for name, x in inputs.items()}
        own_labels = {name: self._keep_tensor(y) for name, y in labels.items()}
        if relabel and part not in SCORED:
            own_labels = relabel_for_training(own_labels, self.relabelled, self.seed, self.name, part)
            for name, (_, guards) in self.relabelled.items():
                for guard in guards if name in own_labels else ():
                    if "once" in guard.counts:
                        self.uses.take(labels_of_head(name), guard.position, part, len(own_labels[name]))
        self.data[part] = (own_inputs, own_labels)

    def drop(self, part: str) -> None:
        """Forget the rows called `part`."""
        self.data.pop(part, None)
        self.origins.pop(part, None)

    def show(self, part: str, rows: Tensor) -> None:
        """Let `part` be these `rows` of "train", with the labels that the party trains on there."""
        held, known = self.data["train"]
        inputs = {
            n: x.select(rows.cpu()) if isinstance(x, RowSource) else x[rows.to(self.device)] for n, x in held.items()
        }
        labels = {name: y[rows.to(self.device)] for name, y in known.items()}
        self.own(part, inputs, labels, relabel=False, origins=RowOrigins.own(rows))

    def inputs(self, part: str) -> dict[str, Tensor]:
        """Return all its raw inputs in `part`, value -> (rows, ...); see `read_rows` for those not in memory."""
        return {name: read_rows(f"{self.name}: {part}", x) for name, x in self.data[part][0].items()}

    def _keep(self, x: Tensor | RowSource) -> Tensor | RowSource:
        if isinstance(x, Tensor):
            return self._keep_tensor(x)
        return x.take(torch.arange(len(x))).to(self.device) if x.resident and self.device.type != "cpu" else x

    def _keep_tensor(self, tensor: Tensor) -> Tensor:
        # What is a part of a larger tensor would bring the rows of others along.
        return tensor.to(self.device) if is_own(tensor) else tensor.detach().clone().to(self.device)

    def check_optimizer(self) -> None:
        """Refuse an optimizer of one's own that keeps of a step, taken on copies, what no checkpoint holds."""
        if isinstance(self._optim.name, str) or not self._named:
            return
        weights = [(name, nn.Parameter(weight.detach().clone())) for name, weight in self._named]
        generators = generator_states()
        try:
            optimizer, _ = self._optim.build(weights)
            held = [weight for _, weight in weights]
            before = things_digest(_attributes(optimizer), held)
            for _ in range(_TRIED_STEPS):
                for _, weight in weights:
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
            changed = things_digest(_attributes(optimizer), held) != before
        finally:
            set_generators(generators)
        if changed:
            raise InvalidInput(
                f"optimizer {self._optim.label} remembers its steps in its attributes, which no checkpoint holds: keep "
                "what it remembers in its `state`, or in `param_groups`"
            )
        check_state(optimizer.state_dict(), f"the state of optimizer {self._optim.label}")

    @property
    def rate(self) -> float | None:
        """The learning rate that its optimizer stands at, for weights in no group; None where it has none."""
        rate = None if self.optimizer is None else self.optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    def rows(self, part: str) -> int:
        """Return how many rows this party has in `part`."""
        inputs, labels = self.data[part]
        return len(next(iter((*inputs.values(), *labels.values()))))

    def labels(self, part: str) -> dict[str, Tensor]:
        """Return this party's labels in `part` by head; for the experimenter who scores the run."""
        return dict(self.data[part][1]) if part in self.data else {}

    def restart(self) -> None:
        """Let the optimizer forget its state, such as momentum, and every separate one."""
        self._separate.clear()
        if self.optimizer is not None:
            self.optimizer.state.clear()

    @contextmanager
    def separate_optimizer(self, name: str, rate: float | None = None) -> Iterator[None]:
        """Let steps inside the block go on from an optimizer state of their own under `name`, empty at first.

        The state of all other steps, such as momentum, is what it was before. `rate`: the learning rate inside the
        block, groups with rates of their own in proportion (None: the one of all other steps).
        """
        if self.optimizer is None:
            yield
            return
        kept, groups = self.optimizer.state, self.optimizer.param_groups
        rates = [] if rate is None else [group["lr"] for group in groups]
        if rate is not None:
            for group in groups:
                group["lr"] = rate * (group["lr"] / rates[0])
        self.optimizer.state = self._separate.get(name, defaultdict(dict))
        try:
            yield
        finally:
            self._separate[name], self.optimizer.state = self.optimizer.state, kept
            for group, own in zip(groups, rates, strict=False):
                group["lr"] = own

    def momentum(self) -> dict[str, Tensor]:
        """Return the momentum that the optimizer holds, as `segment/name` -> tensor: its own; none where it has none.

        Of weights that are tied, the first name.
        """
        if self.optimizer is None:
            return {}
        return {
            f"{segment}/{name}": buffer
            for segment, module in self.modules.items()
            for name, weight in module.named_parameters()
            if (buffer := self.optimizer.state.get(weight, {}).get("momentum_buffer")) is not None
        }

    def end_round(self) -> None:
        """Advance the learning-rate scheduler, where there is one that is stepped once a round."""
        if self._scheduler is None or not self._scheduled_by_round:
            return
        with warnings.catch_warnings():
            # A client that took no part in a round has taken no step; its rate falls with everybody's.
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)` before")
            advance(self._scheduler)

    def contents(self, buffers: bool = True, kept: Sequence[str] = (), copies: bool = True) -> dict[str, Tensor]:
        """Return copies of all weights, and of the buffers unless told not to, as `segment/name` -> tensor.

        The segments in `kept` are left out. Without `copies` the tensors are the party's own, to be read at once.
        """
        return {
            f"{segment}/{name}": tensor.clone() if copies else tensor
            for segment, module in self.modules.items()
            if segment not in kept
            for name, tensor in (module.state_dict() if buffers else weights(module)).items()
        }

    def upload(self, receiver: str, stamp: Stamp, buffers: bool = True, kept: Sequence[str] = ()) -> Message:
        """Return `contents` as a message to `receiver`."""
        return Message(self.name, receiver, "weights", f"weights->{self.role}", self.contents(buffers, kept), stamp)

    def adopt(self, tensors: Mapping[str, Tensor], kept: Sequence[str] = ()) -> None:
        """Take over weights and buffers as `contents` names them; the optimizer state stays the party's own.

        Buffers that are not among them, and the segments in `kept`, stay as they are.
        """
        for segment, module in self.modules.items():
            if segment in kept:
                continue
            state = module.state_dict()
            if missing := {n for n in weights(module) if f"{segment}/{n}" not in tensors}:
                raise KeyError(f"{segment}/{missing.pop()}")
            given = {n: tensors.get(f"{segment}/{n}", t) for n, t in state.items()}
            _fit_buffers(module, given)
            module.load_state_dict(given)

    def _weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        for segment, module in self.modules.items():
            yield from ((f"{segment}/{name}", weight) for name, weight in module.named_parameters())

    def check_frozen(self) -> None:
        """Refuse a gradient of a weight that was frozen when the run began, which no optimizer would step on."""
        for name, weight in self.frozen_weights:
            if weight.grad is not None:
                segment, _, inner = name.partition("/")
                raise InvalidInput(
                    f"weight {inner!r} of segment {segment!r} was frozen (requires_grad) when the run began and learns "
                    "now, and no optimizer holds it: let it learn from the start, or begin another run from the "
                    "weights of this one"
                )

    @cached_property
    def frozen_weights(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Name and weight of all that did not learn when the run began."""
        return tuple((name, weight) for name, weight in self._at_first.items() if not self._learning[name])

    def _unsaved(self) -> dict[str, Any]:
        """Return what the segments hold besides their state dicts, where it changed; refuse what cannot be kept."""
        for name, weight in self._weights():
            if weight is not self._at_first.get(name):
                segment, _, inner = name.partition("/")
                raise InvalidInput(
                    f"segment {segment!r}: the weight {inner!r} is not the one from before training, and no checkpoint "
                    "can hold it: register all weights before the run, and change them in place"
                )
        for value, task in self._tasks.items():
            if things_digest(task) != self._tasks_first[value]:
                raise InvalidInput(
                    f"the loss or the metric of {value!r} is not as it was before training, and no checkpoint can hold "
                    "what it remembers: keep that in a buffer of the model, or train without a folder"
                )
        found = {}
        for name, module in self.modules.items():
            try:
                found[name] = unsaved_state(module, self._first[name])
            except InvalidInput as error:
                raise InvalidInput(f"segment {name!r}: {error}") from None
        if found := {name: state for name, state in found.items() if state}:
            # Together, as segments of one party may share state; a party holds no module that others have.
            held, fresh = nn.Module(), nn.Module()
            held._modules.update(self.modules)
            fresh._modules.update(self._copies({name: module_of(first) for name, first in self._first.items()}))
            check_comes_back(held, found, fresh)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state: tensors and plain values only, safe to load without unpickling code.

        Raises `InvalidInput` for what a segment holds since training began and no checkpoint can hold.
        """
        separate = {}
        for name in tuple(self._separate):
            with self.separate_optimizer(name):
                assert self.optimizer is not None
                separate[name] = copy.deepcopy(self.optimizer.state_dict()["state"])
        unsaved = self._unsaved()
        switched = [name for name, weight in self._weights() if weight.requires_grad != self._learning[name]]
        return {
            **({"separate optimizers": separate} if separate else {}),
            **({"unsaved": unsaved} if unsaved else {}),
            **({"switched": switched} if switched else {}),
            "segments": {name: copy.deepcopy(module.state_dict()) for name, module in self.modules.items()},
            "optimizer": None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": None if self._scheduler is None else copy.deepcopy(self._scheduler.state_dict()),
            "objective": None if self.objective is None else self.objective.state(),
            "defenses": {
                f"{edge}#{i}": d.state_dict() for (edge, i), d in self.defense_states.items() if d is not None
            },
            "uses": self.uses.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`."""
        for name, module in self.modules.items():
            # Before the state dict, which may have buffers that were registered late.
            load_unsaved_state(module, state.get("unsaved", {}).get(name, ()))
            module.load_state_dict(state["segments"][name])
        for name, weight in self._weights():
            weight.requires_grad_(self._learning[name] != (name in state.get("switched", ())))
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self._separate.clear()
            for name, held in state.get("separate optimizers", {}).items():
                with self.separate_optimizer(name):
                    self.optimizer.load_state_dict({**state["optimizer"], "state": held})
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        if self.objective is not None:
            self.objective.load_state(state["objective"])
        for (edge, i), defense in self.defense_states.items():
            if defense is not None:
                defense.load_state_dict(state["defenses"][f"{edge}#{i}"])
        self.uses.load_state(state.get("uses", {}))


_TRIED_STEPS = 8
"""Steps by which an optimizer of one's own shows whether it remembers any in its attributes."""


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the class of the optimizer holds besides what every optimizer does."""
    plain = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    return {name: value for name, value in vars(optimizer).items() if name not in plain}


def _fit_buffers(module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Let buffers of another shape than in `given`, such as a history that grows, have that one."""
    for name, buffer in tuple(module.named_buffers()):
        if name in given and buffer.shape != given[name].shape:
            path, _, own = name.rpartition(".")
            module.get_submodule(path)._buffers[own] = buffer.new_empty(given[name].shape)


def relabel_for_training(
    labels: Mapping[str, Tensor],
    relabelling: Mapping[str, tuple[Head, tuple[EdgeDefense[LabelDefense], ...]]],
    seed: int,
    party: str,
    part: str,
) -> dict[str, Tensor]:
    """Return `labels` (head -> rows) of `part` as `party` trains on them: as those defenses leave them that act once.

    `relabelling`: head -> the head and the defenses that change its labels.
    """
    new_labels = dict(labels)
    for name, (head, guards) in relabelling.items():
        for guard in guards if name in new_labels else ():
            assert head.task is not None
            random = wide_generator(seed, "relabel", party, name, guard.position, part, device=new_labels[name].device)
            new_labels[name] = guard.defense.relabel(new_labels[name], head.task, random)
    return new_labels
