"""In-place operations and cuts: find the one case that a cut would silently change.

A receiver that overwrites what it received gets a copy of its own, which is right as long as nobody else reads
that memory afterwards. In the uncut model a later reader would see the overwritten value; across a cut it cannot.
"""

from __future__ import annotations

import operator

from torch import fx, nn

from splitfed.core.errors import InvalidInput

AUGMENTED = "augmented"
"""Marks a node that stands for `x += y` and the like, and computes `x + y`."""
_IN_PLACE_OPERATORS = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.imatmul}
# Whatever may hand back the memory of its first argument; taking a copy for a view refuses too much, never too little.
_VIEW_NAMES = """
view view_as reshape reshape_as flatten unflatten transpose swapaxes swapdims movedim moveaxis permute adjoint
squeeze unsqueeze chunk unsafe_chunk split unsafe_split split_with_sizes tensor_split hsplit vsplit dsplit
unbind narrow select slice diagonal expand expand_as broadcast_to broadcast_tensors as_strided unfold t ravel
alias contiguous to type type_as float double half bfloat16 cpu cuda getattr getitem detach positive conj real
imag resolve_conj resolve_neg view_as_real view_as_complex atleast_1d atleast_2d atleast_3d requires_grad_
as_tensor asarray mT mH dropout alpha_dropout feature_dropout dropout1d dropout2d dropout3d
"""
_VIEWS = frozenset(_VIEW_NAMES.split())
_TENSORS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
"""Attributes that are tensors."""
_VIEW_MODULES = (nn.Flatten, nn.Identity, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def check_in_place(model: nn.Module, graph: fx.Graph, part: dict[fx.Node, int]) -> None:
    """Refuse a graph where one piece overwrites memory that another piece, or another name, reads afterwards."""
    written = [(node, found) for node in graph.nodes if (found := find_overwritten_node(model, node)) is not None]
    memory = memory_of(model, graph) if written else {}
    position = {node: index for index, node in enumerate(memory)}
    for node, overwritten in written:
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


def find_augmented(model: nn.Module, graph: fx.Graph) -> tuple[fx.Node, fx.Node] | None:
    """Return a node that stands for `x += y`, and one behind it that reads that memory by what it was called before.

    In the model that one reads the sum, in the graph `x`.
    """
    augmented = [node for node in graph.nodes if node.meta.get(AUGMENTED)]
    memory = memory_of(model, graph) if augmented else {}
    position = {node: index for index, node in enumerate(memory)}
    for node in augmented:
        root = memory[node.args[0]]
        # Shapes are plain numbers.
        if root.target is getattr or root.target in ("size", "dim", "numel"):
            continue
        before = (other for other in memory if memory[other] is root and position[other] < position[node])
        if (reader := next((r for one in before for r in one.users if position[r] > position[node]), None)) is not None:
            return node, reader
    return None


def memory_of(model: nn.Module, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map every node to the first node that holds the same memory: through views and in-place operations."""
    root: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = find_overwritten_node(model, node)
        if source is None and _is_view(model, node):
            source = _first(node)
        root[node] = node if source is None else root[source]
    return root


def _first(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def find_overwritten_node(model: nn.Module, node: fx.Node) -> fx.Node | None:
    """Return the node whose memory `node` overwrites, if it does."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        written = bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    else:
        written = node.op in ("call_method", "call_function") and (
            (name.endswith("_") and not name.endswith("__"))
            or node.kwargs.get("inplace") is True
            or node.target in _IN_PLACE_OPERATORS
        )
    return _first(node) if written else None


def _is_view(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _VIEW_MODULES)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.target is getattr:
        return node.args[1] in _TENSORS
    return node.op in ("call_method", "call_function") and name in _VIEWS
