"""The edges on which a returned gradient reveals labels: from a party that knows them to one that does not.

A party knows the labels of a head that it holds, relays or computes the loss with. Gradients further upstream are
computed from the gradients on these edges, so a defense on these edges protects labels upstream too.
"""

from __future__ import annotations

from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Edge, Head, Topology


class LabelGuard(Defense):
    """A defense on the edges whose returned gradient reveals labels, or on those of them that `on` names."""

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return the edges whose gradient reveals labels to a party that does not hold them."""
        return guarded_edges(type(self).__name__, topology, self.on)


def guarded_edges(name: str, topology: Topology, on: tuple[str, ...]) -> tuple[str, ...]:
    """Return the edges that the defense called `name` guards: `on`, or all whose gradients reveal labels.

    Raises `InvalidInput` if there is none, and for an edge of `on` that is not among them.
    """
    leaking = tuple(edge.name for edge in topology.crossings if leaking_heads(topology, edge))
    for edge in on:
        topology.edge(edge)
    if not leaking:
        label_holders = " and ".join(f"{head.value!r} are known to {', '.join(head.path)}" for head in topology.heads)
        raise InvalidInput(
            f"{name} has no gradient to guard: none goes from a party that knows labels to one that does not (labels "
            f"of {label_holders}); use u_shaped, or vertical with the labels at the server or at a head"
        )
    for edge in on:
        if edge not in leaking:
            raise InvalidInput(
                f"{name} cannot guard edge {edge!r}: no gradient goes back on it from a party that knows labels to one "
                f"that does not (allowed: {', '.join(leaking)})"
            )
    return on or leaking


def leaking_heads(topology: Topology, edge: Edge) -> tuple[Head, ...]:
    """Return the heads whose labels the gradient on `edge` reveals to its receiver, which does not hold them."""
    if edge.name in topology.forward_only:
        return ()
    sender, receiver = topology.role_of(edge.target), topology.role_of(edge.source)
    behind = _values_with_gradients(topology, edge)
    return tuple(h for h in topology.heads if h.value in behind and sender in h.path and receiver not in h.path)


def _values_with_gradients(topology: Topology, edge: Edge) -> set[str]:
    """Return the values whose gradients reach the target of `edge`."""
    reached = set(topology.segment(edge.target).outputs)
    for segment in topology.segments:
        for value in reached.intersection(segment.inputs):
            if not _returns_no_gradient(topology, value, segment.name):
                reached.update(segment.outputs)
                break
    return reached


def _returns_no_gradient(topology: Topology, value: str, reader: str) -> bool:
    """Return whether `value` arrives at the role `reader` over an edge that returns no gradient."""
    role = topology.role_of(reader)
    return any(
        value in edge.values and topology.role_of(edge.target) == role
        for edge in topology.crossings
        if edge.name in topology.forward_only
    )
