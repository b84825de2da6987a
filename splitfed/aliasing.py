"""In-place operations and cuts: find the one case that a cut would silently change.

A receiver that overwrites what it received gets a copy of its own, which is right as long as nobody else reads
that memory afterwards. In the uncut model a later reader would see the overwritten value; across a cut it cannot.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from splitfed.errors import InvalidInput

_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul}
_VIEWS = {
    *(
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "unflatten",
        "transpose",
        "swapaxes",
        "movedim",
        "permute",
    ),
    *("squeeze", "unsqueeze", "chunk", "split", "unbind", "narrow", "select", "diagonal", "expand", "expand_as"),
    *("contiguous", "to", "float", "double", "type_as", "getattr", "detach", "unfold", "t", "ravel"),
}


def check_in_place(model: nn.Module, graph: fx.Graph, part: dict[fx.Node, int]) -> None:
    """Refuse a graph where one piece overwrites memory that another piece, or another name, reads afterwards."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    memory = _memory(model, graph)
    for node in graph.nodes:
        overwritten = _overwritten(model, node)
        if overwritten is None:
            continue
        here = part[node]
        before = [m for m in memory if memory[m] is memory[overwritten] and position[m] < position[node]]
        arrived = [m for m in before if part[m] != here and any(part[r] == here for r in m.users)]
        for alias in before:
            for reader in alias.users:
                elsewhere = part[reader] != here or (alias in arrived and len(arrived) > 1)
                if position[reader] > position[node] and elsewhere:
                    raise InvalidInput(
                        f"{node.name!r} overwrites {alias.name!r} in place, and {reader.name!r} reads it after a "
                        "cut: the cut would change the model; make that operation not in place"
                    )


def _memory(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map every node to the first node that holds the same memory: through views and in-place operations."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _overwritten(model, node)
        if source is None and _is_view(model, node):
            source = _first(node)
        root[node] = node if source is None else root[source]
    return root


def _first(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _overwritten(model: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the node whose memory `node` overwrites, if it does."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        written = bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    elif node.op in ("call_method", "call_function"):
        written = (
            (name.endswith("_") and not name.endswith("__"))
            or node.kwargs.get("inplace") is True
            or node.target in _IN_PLACE_OPERATORS
        )
    else:
        written = False
    return _first(node) if written else None


def _is_view(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), (nn.Flatten, nn.Identity, nn.Unflatten))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op in ("call_method", "call_function") and (name in _VIEWS or name == "getitem")
