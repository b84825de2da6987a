"""Shapes and properties of a topology on a client's rows, from one example batch before training."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from splitfed.core.equivalence import EXAMPLES, check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.reordered_gradients import reordered_weights
from splitfed.core.topology import Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.data.dataset import Dataset, Federation
from splitfed.data.features import feed
from splitfed.data.transform import transform_of
from splitfed.planning.held_rows import check_held_rows


class ExamplePasses:
    """Cache of the properties of topologies on clients' rows, for runs that differ in schedule, defenses or method."""

    def __init__(self) -> None:
        # Values hold the objects whose ids are the keys, so that the ids stay unique.
        self._found: dict[tuple[int, int], tuple[Topology, Dataset, Topology, TopologyFacts]] = {}
        self._held: dict[tuple[int, int], tuple[Topology, Federation]] = {}

    def run(self, topology: Topology, rows: Dataset) -> tuple[Topology, TopologyFacts]:
        """Return `topology` with the tasks of `rows`, without a reference to the user's model, and its properties.

        It is compared with that model once. Raises `InvalidInput` for a difference.
        """
        key = id(topology), id(rows)
        if key not in self._found:
            checked = topology.with_tasks(rows.tasks)
            check_transform(checked, rows)
            check_label_holder(checked, rows)
            facts = facts_with(checked, rows)
            check_outputs(checked, facts)
            check_topology(checked, inputs_of(checked, rows.rows(range(min(EXAMPLES, len(rows))))))
            # The returned topology must not refer to the user's model.
            bare = replace(checked, segments=tuple(map(_without_model, checked.segments)))
            self._found[key] = topology, rows, bare, facts
        return self._found[key][2:]

    def check_held(self, topology: Topology, data: Federation) -> None:
        """Raise `InvalidInput` for segments of `topology` that hold rows of `data`, checked once; see `held_rows`."""
        key = id(topology), id(data)
        if key not in self._held:
            check_held_rows(topology, data)
            self._held[key] = topology, data


def _without_model(segment: Segment) -> Segment:
    reordered: frozenset[str] = frozenset() if segment.original is None else reordered_weights(segment.original)
    return replace(segment, original=None, reordered=reordered)


def inputs_of(topology: Topology, rows: Dataset) -> dict[str, Tensor]:
    """Return input -> tensor, from `rows`, for every input of `topology`."""
    return feed(rows.x, topology.inputs, rows.features)


def check_transform(topology: Topology, rows: Dataset) -> None:
    """Raise `InvalidInput` for a transform of whole rows whose parts are held by several parties."""
    if transform_of(rows.source) is not None and len(holders := sorted(set(topology.inputs.values()))) > 1:
        raise InvalidInput(
            f"the rows have a transform, and their parts are held by {', '.join(map(repr, holders))}: it would mix "
            "one party's numbers into another's part; transform the parts before they are joined"
        )


def check_label_holder(topology: Topology, rows: Dataset) -> None:
    """Raise `InvalidInput` for labels at another role than their holder, if roles are the parties of the rows."""
    held = rows.label_holder
    for head in topology.heads if held is not None and any(name in rows.features for name in topology.inputs) else ():
        if head.target is None and head.labels != held:
            raise InvalidInput(
                f"topology {topology.name!r} has the labels of {head.value!r} at {head.labels!r}, and those of these "
                f"rows are held by {held!r}: build it with labels={held!r}, or align with labels={head.labels!r}"
            )


def facts_with(topology: Topology, rows: Dataset) -> TopologyFacts:
    """Return the properties of `topology` on a few of `rows` (repeated if there is only one)."""
    few = {name: x[:4] for name, x in inputs_of(topology, rows.rows(range(min(4, len(rows))))).items()}
    return pass_example(topology, {n: x if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1)) for n, x in few.items()})


def check_outputs(topology: Topology, facts: TopologyFacts) -> None:
    """Raise `InvalidInput` for a model whose output is not as wide as its task needs."""
    for head in topology.heads:
        assert head.task is not None
        shape = facts.shapes[head.value]
        wanted = head.task.outputs
        if wanted is not None and shape != (wanted,) and not (wanted == 1 and shape == ()):
            raise InvalidInput(
                f"the model returns {shape} a row at {head.value!r}; {head.task.name} here needs ({wanted},)"
            )
