"""Look-up of what a method needs in a topology: embeddings, logits, and the labels at the same party."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from splitfed.core.errors import InvalidInput, unknown

if TYPE_CHECKING:
    from splitfed.core.topology import Head, Segment, Topology


def making_segment(topology: Topology, value: str) -> Segment:
    """Return the segment that computes `value`; raise `InvalidInput` for an unknown value."""
    for segment in topology.segments:
        if value in segment.outputs:
            return segment
    raise unknown("value", value, [v for s in topology.segments for v in s.outputs])


def made_of_own_data(topology: Topology, value: str) -> bool:
    """Return whether a data owner computes `value` from its own inputs alone, so that nothing is sent for it."""
    if value in topology.inputs:
        return True
    segment = next((s for s in topology.segments if value in s.outputs), None)
    if segment is None or segment.role not in topology.data_roles:
        return False
    same = all(topology.inputs.get(v, segment.role) == segment.role for v in segment.inputs)
    makers = [s.role for s in topology.segments if set(s.outputs) & set(segment.inputs)]
    return (
        same and all(r == segment.role for r in makers) and all(made_of_own_data(topology, v) for v in segment.inputs)
    )


def embedding(who: str, topology: Topology, wanted: str | None) -> str:
    """Return the name of the embedding: `wanted`, or the last value that a client computes from its own data alone.

    In a split replica that is the release at the first cut; a whole model needs a cut at the embedding. Raises
    `InvalidInput` if there is none.
    """
    own = [v for s in topology.segments for v in s.outputs if made_of_own_data(topology, v)]
    heads = {head.value for head in topology.heads}
    if wanted is not None:
        making_segment(topology, wanted)
        if wanted not in own:
            raise InvalidInput(
                f"{who} embedding={wanted!r} is not computed from a client's own data alone; expected one of {own}"
            )
        return wanted
    left = [v for v in own if v not in heads]
    if not left:
        raise InvalidInput(
            f"topology {topology.name!r} has no embedding for {who}: its clients compute the model's output only; cut "
            "the model where the embedding is (splitfed.topologies.local(model, cuts=...))"
        )
    return left[-1]


def labelled_head(who: str, topology: Topology, role: str) -> Head:
    """Return the head whose labels the party in `role` holds; raise `InvalidInput` if there is none."""
    for head in topology.heads:
        if head.labels == role:
            return head
    holders = {head.labels for head in topology.heads}
    others = [v for s in topology.segments for v in s.outputs if s.role in holders and made_of_own_data(topology, v)]
    advice = (
        f"name another by embedding=, such as {others[0]!r}"
        if others
        else ("nor does another that makes a value for embedding=: give the labels to one that does")
    )
    raise InvalidInput(f"{who} needs labels where the embedding is made; role {role!r} holds none: {advice}")


def count_classes(head: Head) -> int:
    """Return the number of classes of `head`; raise `InvalidInput` if its task has no known number of outputs."""
    if head.task is None or head.task.outputs is None:
        raise InvalidInput(f"head {head.value!r} has no task of a known number of classes")
    return head.task.outputs


def makers(topology: Topology, value: str) -> tuple[str, ...]:
    """Return the segments that `value` depends on, in the order they run."""
    return topology.makers((value,))


def clients_hold_all(topology: Topology) -> bool:
    """Return whether every client is one party that holds a whole model."""
    return len(topology.data_roles) == 1 and all(s.role in topology.data_roles for s in topology.segments)


class Roles(Protocol):
    """The roles of some parties in a topology: those of a learner, or of a local objective's place."""

    @property
    def topology(self) -> Topology:
        """The topology."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles."""


def averaging_roles(topology: Topology, shared: Collection[str]) -> tuple[str, ...]:
    """Return the roles that form federations of their own where the weights of the segments `shared` are averaged.

    None where a client is a single party; a role whose segments hold no weights has nothing to average.
    """
    if len(topology.data_roles) == 1:
        return ()
    sharing = {s.role for s in map(topology.segment, shared) if s.module.state_dict()}
    return tuple(role for role in topology.data_roles if role in sharing)


def held_by(parties: Roles, segments: Collection[str]) -> tuple[str, ...]:
    """Return those of `segments` that these parties hold."""
    return tuple(name for name in segments if parties.topology.segment(name).role in parties.roles)


def only_client(who: str, topology: Topology) -> str:
    """Return the one role that owns inputs and labels; raise `InvalidInput`, naming the method `who`, for several."""
    if len(topology.data_roles) == 1:
        return topology.data_roles[0]
    raise InvalidInput(
        f"{who} needs clients of one party that holds rows and labels; in topology {topology.name!r} the roles "
        f"{', '.join(topology.data_roles)} share them: take fedavg or another method that averages weights role by role"
    )


def only_head(who: str, topology: Topology, classes: bool = True) -> Head:
    """Return the one head; raise `InvalidInput` for several, and with `classes` for one that is no classification."""
    head = topology.heads[0]
    if len(topology.heads) > 1:
        raise InvalidInput(f"{who} supports one output; topology {topology.name!r} has {len(topology.heads)}")
    if classes and (head.task is None or head.task.name != "classification"):
        raise InvalidInput(f"{who} compares class probabilities; the task here is {head.task and head.task.name!r}")
    return head
