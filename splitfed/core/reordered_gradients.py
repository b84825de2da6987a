"""Weights whose gradients a cut adds up in another order, and so rounds differently.

Autograd adds what all readers of a value send back in one go, the latest reader first. Behind a cut, the readers in one
piece are added up by themselves, and their sum is sent. Where that gives another order than in the uncut model, the
gradients of all weights that the value was computed from may differ in their last digits; those of no other weight may.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx, nn

from splitfed.core.aliasing import find_overwritten_node, memory_of
from splitfed.core.grouping import group_pairs
from splitfed.core.topology import Original

Place = tuple[fx.GraphModule, fx.Node]


def reordered_weights(original: Original) -> frozenset[str]:
    """Return the names of the weights of the uncut model whose gradients may be rounded differently by the pieces.

    Empty for segments made by hand, which are compared one by one.
    """
    if original.reordered is not None:
        return original.reordered
    graphs = [module for module, _, _ in original.pieces if isinstance(module, fx.GraphModule)]
    makers = {n.name: (g, n) for g in graphs for n in g.graph.nodes if n.op not in ("placeholder", "output")}
    for module, _, names in original.pieces:
        if isinstance(module, fx.GraphModule):
            # Also of what a piece hands on under another name.
            returned = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes
            makers |= {name: (module, n) for name, n in zip(names, returned, strict=True)}
    found = {
        id(w) for value in _reordered_values(original, graphs, makers) for w in _upstream_weights(makers[value], makers)
    }
    named = original.model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, weight in named if id(weight) in found)


def _reordered_values(original: Original, graphs: Iterable[fx.GraphModule], makers: dict[str, Place]) -> list[str]:
    """Return the values that cross a cut and whose gradient is summed in another order than in the uncut model.

    Two summands may change places; with three and more, a partial sum that is made elsewhere changes the rounding.
    """
    reads_of_value = group_pairs(
        (node.name, _reads(module, node))
        for module in graphs
        for node in module.graph.nodes
        if node.op == "placeholder" and node.name in makers
    )
    reordered = []
    for value, reads in reads_of_value.items():
        # The loss of an output comes last in the uncut model, and is added after what crosses by a party.
        by_loss = value in original.outputs
        partial = max(reads) > 1 and sum(reads) + _reads(*makers[value]) + by_loss > max(reads)
        if partial or (by_loss and len(reads) > 1):
            reordered.append(value)
    return reordered


def _upstream_weights(place: Place, makers: dict[str, Place]) -> list[nn.Parameter]:
    """Return all weights that the value made at `place` is computed from, through all pieces before."""
    weights: list[nn.Parameter] = []
    visited: set[fx.Node] = set()
    pending = [place]
    while pending:
        module, node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.op == "placeholder":
            pending += [makers[node.name]] if node.name in makers else []
            continue
        if node.op == "call_module":
            weights += module.get_submodule(str(node.target)).parameters()
        elif node.op == "get_attr":
            inner, _, name = str(node.target).rpartition(".")
            attribute = getattr(module.get_submodule(inner), name, None)
            weights += [attribute] if isinstance(attribute, nn.Parameter) else []
        # What is written into the same memory is a part of the value as well.
        memory = memory_of(module, module.graph)
        writers = [n for n in memory if memory[n] is memory[node] and find_overwritten_node(module, n) is not None]
        pending += [(module, other) for other in (*node.all_input_nodes, *writers)]
    return weights


def _reads(module: fx.GraphModule, node: fx.Node) -> int:
    """Return in how many places `node` is used, taking a submodule that has some of its own for two."""
    found = 0
    for user in node.users:
        if user.op != "output":
            whole = user.op == "call_module" and any(True for _ in module.get_submodule(str(user.target)).children())
            found += max(2 if whole else 1, _count(node, (*user.args, *user.kwargs.values())))
    return found


def _count(node: fx.Node, arguments: Any) -> int:
    if isinstance(arguments, (list, tuple)):
        return sum(_count(node, argument) for argument in arguments)
    return int(arguments is node)
