"""The tasks of one training step of a replica, computations and transfers, and their dependencies.

Derived once from topology, shapes and operations; sizes are per row of a batch. Segments that do not read each other
(the branches of a vertical topology) do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from splitfed.core.errors import check_number
from splitfed.core.grouping import group_pairs
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import value_bytes
from splitfed.costs.measure import SegmentCost


@dataclass(frozen=True)
class WorkItem:
    """A task: `role` computes (`receiver` None, `size` operations a row) or sends `size` bytes a row to `receiver`.

    It waits for the tasks `after` of the same step and for the tasks `previous` of the step before. `backward`: whether
    it belongs to the backward pass.
    """

    name: str
    role: str
    receiver: str | None
    size: float
    after: tuple[int, ...]
    backward: bool = False
    previous: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepShape:
    """The tasks of a step, in an order in which none waits for a later one."""

    tasks: tuple[WorkItem, ...]

    @cached_property
    def followers(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each task, the indices of the tasks that wait for it: those of the same step, those of the next."""
        return _invert([task.after for task in self.tasks]), _invert([task.previous for task in self.tasks])


def _invert(waits: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return task -> the tasks that wait for it, from `waits`: task -> the tasks that it waits for."""
    followers: list[list[int]] = [[] for _ in waits]
    for index, awaited in enumerate(waits):
        for before in awaited:
            followers[before].append(index)
    return followers


def step_shape(
    topology: Topology, facts: TopologyFacts, flops: Mapping[str, SegmentCost], label_bytes: float = 8
) -> StepShape:
    """Return the shape of a training step of `topology`.

    `flops`: the result of `segment_flops`, per row; `label_bytes`: the size of one row's label at each head. Labels are
    sent when the step starts. A party starts its next step when its own part of the last one has ended, so without
    returned gradients (`TopologyFacts.returned`) a client runs ahead of its server. Optimizer steps and losses take no
    time. Raises `InvalidInput` for a size that is negative or not finite.
    """
    check_number("label_bytes", label_bytes, low=0)
    for segment in topology.segments:
        for direction, size in flops[segment.name]._asdict().items():
            check_number(f"{direction} flops of segment {segment.name!r}", size, low=0)
    tasks: list[WorkItem] = []
    ran, labelled = _add_forward(tasks, topology, facts, flops), _add_labels(tasks, topology, label_bytes)
    _add_backward(tasks, topology, facts, flops, ran, labelled)
    return StepShape(_link_steps(tasks))


def _add_forward(
    tasks: list[WorkItem], topology: Topology, facts: TopologyFacts, flops: Mapping[str, SegmentCost]
) -> dict[str, set[int]]:
    """Add the forward tasks; return segment -> its forward task."""
    forward_tasks: dict[str, set[int]] = {}
    task_of_value: dict[tuple[str, str], int] = {}  # (value, role) -> the task that made it there or brought it
    for segment in topology.segments:
        role, name = segment.role, segment.name
        before = {task_of_value[v, role] for v in segment.inputs if v not in topology.inputs}
        index = _add(tasks, f"forward {name}", role, None, flops[name].forward, before)
        forward_tasks[name] = {index}
        task_of_value.update({(v, role): index for v in segment.outputs})
        for edge in topology.crossings:
            if edge.source == name:
                to, size = topology.role_of(edge.target), _bytes(facts, edge.values)
                transfer = _add(tasks, f"activation {edge.name}", role, to, size, {index})
                task_of_value.update({(v, to): transfer for v in edge.values})
    return forward_tasks


def _add_labels(tasks: list[WorkItem], topology: Topology, size: float) -> dict[str, set[int]]:
    """Add the transfers of labels, hop by hop; return head -> the task that brings them to the loss."""
    labelled: dict[str, set[int]] = {}
    for head in topology.heads:
        for sender, receiver in pairwise(head.path):
            before = labelled.get(head.value, set())
            labelled[head.value] = {_add(tasks, f"label {head.value}", sender, receiver, size, before)}
    return labelled


def _add_backward(
    tasks: list[WorkItem],
    topology: Topology,
    facts: TopologyFacts,
    flops: Mapping[str, SegmentCost],
    forward_tasks: Mapping[str, set[int]],
    labelled: Mapping[str, set[int]],
) -> None:
    """Add the backward tasks: a segment waits for its forward pass, its labels and the gradients of its outputs."""
    waits = {name: set(own_tasks) for name, own_tasks in forward_tasks.items()}
    for head in topology.heads:
        maker = next(s.name for s in topology.segments if head.value in s.outputs)
        waits[maker] |= labelled.get(head.value, set())
    readers: dict[tuple[str, str], set[int]] = {}  # (value, role) -> the backwards of those that read it there
    for segment in reversed(topology.segments):
        name, role = segment.name, segment.role
        index = _add(tasks, f"backward {name}", role, None, flops[name].backward, waits[name], True)
        for value in segment.inputs:
            readers.setdefault((value, role), set()).add(index)
        for edge in topology.edges:
            if edge.target == name and (returned := facts.returned(topology, edge)):
                back = index
                if edge in topology.crossings:
                    # A gradient for several segments of a party is sent once, after the last of them.
                    awaited = set().union(*(readers[v, role] for v in edge.values))
                    to, size = topology.role_of(edge.source), _bytes(facts, returned)
                    back = _add(tasks, f"gradient {edge.name}", role, to, size, awaited, True)
                waits[edge.source].add(back)


def _link_steps(tasks: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
    """Make the first tasks of each role in a step wait for its last tasks in the step before."""
    items = tuple(tasks)
    ends = group_pairs(
        (task.role, index)
        for index, task in enumerate(items)
        if task.receiver is None and task.backward
        if not any(index in t.after for t in items if t.receiver is None and t.role == task.role)
    )
    ready = []
    for index, task in enumerate(items):
        begins = not task.backward if task.receiver is None else not task.after
        # A party with labels only sends those of one step after those of the step before.
        ready.append(replace(task, previous=tuple(ends.get(task.role, [index]))) if begins else task)
    return tuple(ready)


def _add(
    tasks: list[WorkItem],
    name: str,
    role: str,
    receiver: str | None,
    size: float,
    after: Iterable[int],
    backward: bool = False,
) -> int:
    tasks.append(WorkItem(name, role, receiver, size, tuple(sorted(after)), backward))
    return len(tasks) - 1


def _bytes(facts: TopologyFacts, values: Iterable[str]) -> int:
    return sum(value_bytes(facts, v) for v in values)
