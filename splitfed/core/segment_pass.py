"""The pass of one party through a user's `forward`: others' operations by shapes, its own as they are, and the end.

Before its segment and behind it a party goes by the plan. Behind the last cut, where nobody comes after it, it goes by
the numbers of its own tensors, whatever way that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from splitfed.core.errors import InvalidInput
from splitfed.core.forward_path import INPUT, CrossingForm, ForwardPath, OperationOutput
from splitfed.core.grouping import group_pairs, nest
from splitfed.core.held_arrays import OTHERS
from splitfed.core.meta_pass import LIKE, MetaPass
from splitfed.core.model_call import ModelCall
from splitfed.core.nested_tensors import autograd_leaves, autograd_nodes, is_plain, replace_tensors, tensors_of
from splitfed.core.replay_passes import Stop
from splitfed.core.replay_plan import flatten_result
from splitfed.core.replay_sizes import Sizes, Ways, every_way
from splitfed.core.replay_values import UNSEEN


@dataclass(frozen=True)
class ReplayPlan:
    """How the segments of one model are replayed: training, gradients -> the ways; input -> its shape a row and type.

    The first way of each mode is that of the example; others follow from other numbers in tensors, see
    `replay_branches`. `forms`: what crosses -> what it looks like. `call`: how `forward` takes its rows. `memory`: for
    a mode, segment, number of rows, device and way, what operations of other segments return, on the meta device.
    `rows`: of the example; `sizes`: other numbers of rows -> mode -> their ways, where these are others; `tried`: what
    `replay_rows` has found of other numbers of rows. `output`: the only result that is used. `beyond`: ways that part
    behind the last cut. Shared by all copies of a segment.
    """

    model: str
    ways: Ways
    inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    forms: Mapping[str, CrossingForm] = field(default_factory=dict)
    call: ModelCall = field(default_factory=ModelCall)
    memory: dict[Any, dict[int, Any]] = field(default_factory=dict, compare=False, repr=False)
    rows: int = 2
    sizes: Sizes = field(default_factory=dict)
    tried: dict[tuple[bool, int, int], str] = field(default_factory=dict, compare=False, repr=False)
    output: str | None = None
    beyond: tuple[ForwardPath, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayPlan:
        """Return itself: it holds no state."""
        return self

    def ways_of(self, training: bool, gradients: bool, rows: int) -> tuple[ForwardPath, ...]:
        """Return the ways that a batch of `rows` may take in a mode."""
        return self.sizes.get(rows, {}).get((training, gradients)) or self.ways[training, gradients]

    def every_way(self) -> list[ForwardPath]:
        """Return all ways, of all modes and numbers of rows."""
        return every_way(self.ways, self.sizes)


class SegmentPass(MetaPass):
    """The pass of one party: shapes before its segment, numbers in it, and the end after it.

    `key`: under which the plan's memory stands, mode, whether there are gradients, segment and number of rows first;
    `ways`: those that may be taken, all of the mode unless given.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        segment: int,
        given: Mapping[str, Tensor],
        device: torch.device,
        key: tuple[Any, ...],
        ways: Sequence[ForwardPath] = (),
    ) -> None:
        ways = ways or plan.ways_of(key[0], key[1], key[3])
        super().__init__(device, 0, {})
        self._plan, self._segment, self._given, self._key = plan, segment, given, key
        self.held: dict[OperationOutput, Tensor] = {}
        self._off = False
        # Nobody comes behind the last segment, so that its party goes there by its own numbers.
        self._free, self.astray = segment == len(ways[0].ends) and any(way.branches for way in ways), False
        self._follow(ways)

    def _follow(self, ways: Sequence[ForwardPath]) -> None:
        """Go on in one of `ways`, which are the same up to the next answer that is told."""
        self._ways, self._way = ways, ways[0]
        self._first, self.stop = self._way.bounds(self._segment)
        self.draws, self.overwritten = self._way.draws, self._way.overwritten
        horizon = self._way.next_told(self.number) if len(ways) > 1 else None
        self._received_values: dict[OperationOutput, Tensor] = {}
        wanted: dict[OperationOutput, None] = {}
        for way in ways:
            near = [c for c in way.received[self._segment].values() if horizon is None or c.made.operation <= horizon]
            self._received_values |= {c.made: c.receive(self._given[c.name]) for c in near}
            wanted |= {c.made: None for c in way.sent(self._segment).values()}
        self._received = nest(
            (made.operation, place, tensor)
            for made, tensor in self._received_values.items()
            for place in self._way.repeated.get(made, (made.place,))
        )
        self._wanted = group_pairs((made.operation, made.place) for made in wanted)
        planned = self._plan.ways_of(self._key[0], self._key[1], self._key[3])
        number = next(n for n, way in enumerate(planned) if way is self._way)
        self._memory = self._plan.memory.setdefault((*self._key, number), {})

    @property
    def branches(self) -> bool:
        """Whether it is behind the last cut, in a model that may go other ways there."""
        return self._free and not self._off and self._way.branches

    def is_elsewhere(self) -> bool:
        """Return whether it goes through code before its segment, or has reached its end."""
        number = self.number - bool(self.inside)
        return number < self._first or (number >= self.stop and self._segment < len(self._way.ends))

    @property
    def received_inputs(self) -> Mapping[int, Tensor]:
        """The inputs of the model that were sent, by their place."""
        return self._received.get(INPUT, {})

    def returned(self, names: Sequence[str], rows: int, result: Any = None) -> tuple[Tensor, ...]:
        """Return what the segment sends under `names`, of a batch of `rows`; `result`: what `forward` returned."""
        sent, found = self._way.sent(self._segment), []
        results: Mapping[str, Tensor] = {}
        if self._free and not self._off and self.number >= self._first:
            results = dict(zip(self._way.results, flatten_result(result, self._plan.output).values(), strict=False))
        elif self._off or self.number != self.stop:
            raise self.strayed()
        for name in names:
            if name in results and not results[name].is_meta:
                found.append(results[name])
                continue
            if self._free and self.astray:
                raise self.beyond("returns there what no operation of its party has made")
            if name not in sent:
                # In this way there is none; whoever reads it comes the same way.
                shape, dtype, _ = self._plan.forms[name]
                found.append(torch.zeros((rows, *shape), dtype=dtype, device=self.device))
                continue
            made = sent[name].made
            value = self._received_values[made] if made in self._received_values else self.held[made]
            if value.is_meta:
                raise InvalidInput(
                    f"segment {self._segment} of {self._plan.model} returns a tensor without numbers: {UNSEEN}"
                )
            found.append(sent[name].send(value, rows))
        return tuple(found)

    def check_gradients(self, returned: Sequence[Tensor]) -> None:
        """Refuse a way on which nothing learns from a received value: weights would get zeros in place of none."""
        way, nodes, leaves = self._way, autograd_nodes(returned), autograd_leaves(*returned)
        # What a relay has handed on is known by another name.
        names = {name: value.origin or name for name, value in way.received[self._segment].items()}
        learning = [n for n, known in names.items() if known in way.connected and self._given[n].requires_grad]
        read = [n for n in learning if id(self._given[n]) in leaves or self._given[n].grad_fn in nodes]
        behind = set().union(*(way.upstream[names[name]] for name in read))
        for name in learning:
            if not way.upstream[names[name]] <= behind:
                raise self.beyond(f"does not read there {name!r}, so that weights behind it would have no gradient")

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Answer, run, or end."""
        number = self.number
        if self._free and number >= self._first and not self._off:
            return self._run_freely(name, func, args, kwargs, module)
        if self._off or (number >= self.stop and self._segment == len(self._way.ends)):
            raise self.strayed()
        if number >= self.stop:
            raise Stop
        if self._way.names[number] != name:
            raise self.strayed()
        if number in self._way.numbers and number < self._first and number not in self._way.told:
            # Whoever holds that tensor has looked, or else nothing would have been sent.
            self.number += 1
            return self._way.numbers[number]
        if number < self._first or number in self._way.constants:
            return self._decide(number, self._hold(number, self._answer(number, name, func, args, kwargs, module)))
        self.number += 1
        return self._decide(number, self._hold(number, self._run(number, name, func, args, kwargs, module)))

    def _run_freely(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run an operation behind the last cut, whatever way `forward` takes there."""
        number, way = self.number, self._way
        self.astray = self.astray or number >= self.stop or way.names[number] != name
        if not self.astray and number in way.constants:
            return self._answer(number, name, func, args, kwargs, module)
        self.number += 1
        return self._run(number, name, func, args, kwargs, module)

    def _run(
        self, number: int, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> Any:
        """Run an operation of the segment."""
        if name in LIKE and module is None and tensors_of((args, dict(kwargs)))[0].is_meta:
            return self.on_shapes(name, func, args, kwargs)
        if module is None and (self.astray or number not in self._way.by_holders):
            for one in tensors_of((args, dict(kwargs))) if self.astray else args:
                # Products of numbers and of shapes alone would come out as what memory happens to hold.
                if isinstance(one, Tensor) and one.is_meta:
                    raise self._without_numbers(name)
        elif module is not None and self.astray and OTHERS in vars(module):
            raise self.beyond(f"calls there {name!r}, which another party holds")
        if module is None:
            returned = func(*args, **kwargs)
        else:
            # What happens within a submodule of its own is nobody's business, and costs nothing.
            torch.overrides.TorchFunctionMode.__exit__(self, None, None, None)
            try:
                returned = func(*args, **kwargs)
            finally:
                torch.overrides.TorchFunctionMode.__enter__(self)
        return returned

    def _decide(self, number: int, returned: Any) -> Any:
        """Go on by a number that was taken out of a tensor; where no way is planned for it, nothing more runs."""
        way = self._way
        if number not in way.numbers or number in way.free:
            return returned
        if number in way.told and not isinstance(way.numbers[number], bool):
            return returned
        if returned == way.numbers[number]:
            agreeing = [one for one in self._ways if one.numbers.get(number) == returned]
        else:
            agreeing = [one for one in self._ways if number in one.told and one.asked.get(number) == returned]
        # An error that `forward` raises of itself at such a number comes first.
        self._off = not agreeing
        if agreeing and len(self._ways) > 1:
            self._follow(agreeing)
        return returned

    def _hold(self, number: int, returned: Any) -> Any:
        """Keep what the segment sends, and return all."""
        for place in self._wanted.get(number, ()):
            self.held[OperationOutput(number, place)] = tensors_of(returned)[place]
        return returned

    def _answer(
        self, number: int, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> Any:
        """Return what an operation of another segment returned: shapes, constants, and what crossed."""
        received = self._received.get(number, {})
        if number in self._way.overwrites:
            # What was received is as its sender has left it.
            arrived = {id(tensor) for tensor in self._received_values.values()}
            for tensor in tensors_of((args, dict(kwargs))):
                if id(tensor) in arrived:
                    self.number += 1
                    return tensor
        if number in self._memory:
            self.number += 1
            # All parties share what is remembered: what was received is put into a copy.
            return replace_tensors(self._memory[number], received, copies=True)
        if number in self._way.calls:
            self.number += 1
            known = self._way.calls[number]
            returned = known.build(self._key[3], tensors_of((args, dict(kwargs))))
            if not known.hands_through:
                self._memory[number] = returned
            return replace_tensors(returned, received, copies=True)
        # Others' work is none of this party's, where operations or memory are counted.
        with _disable_current_modes():
            returned = super().operation(name, func, args, kwargs, module)
        tensors = tensors_of(returned)
        written = any(tensor is one for tensor in tensors for one in tensors_of((args, dict(kwargs))))
        lasting = not written and self._way.lasts(number) and not self._way.reshapes and is_plain(returned)
        if tensors and lasting and all(tensor.is_meta for tensor in tensors):
            # Without its graph, which would keep what was received in this step.
            bare = dict(enumerate(tensor.detach() for tensor in tensors))
            self._memory[number] = replace_tensors(returned, bare, copies=True)
        return replace_tensors(returned, received) if received else returned

    def _without_numbers(self, name: str) -> InvalidInput:
        """Return the error of an operation of this segment that reads what the party has no numbers of."""
        if self.astray:
            return self.beyond(f"reads there, by {name!r}, what another party has")
        return InvalidInput(
            f"{name!r}, operation {self.number - 1} of {self._plan.model}, reads a tensor of which its party has no "
            f"numbers: {UNSEEN}"
        )

    def beyond(self, what: str) -> InvalidInput:
        """Return the error of a way behind the last cut, other than that of the example, that its party cannot go."""
        return InvalidInput(
            f"forward of {self._plan.model} takes another way behind the last cut than with its example, and {what}: "
            "cut with an example whose rows take that way too, read in every case (torch.where) what is read in one, "
            "or cut behind the branch"
        )

    def strayed(self) -> InvalidInput:
        """Return the error of a pass that is another one than the plan's."""
        return InvalidInput(
            f"forward of {self._plan.model} takes another way than when it was cut, at operation {self.number} of "
            f"{len(self._way.names)}: a branch that depends on more than the mode cannot be cut (state that is None at "
            "first can begin as zeros)"
        )
