"""Cut a traceable model after named submodules; values that cross, skips included, are found by `torch.fx`.

Each piece is a `GraphModule` that keeps the model's own submodules under the model's own names, so a state dict
goes in and out unchanged. The model given is neither copied nor altered.

A value used in three or more places on two sides of a cut gets its gradient summed in another order than in the
uncut model, and may differ from it in the last bit; everything else is bit-identical.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import fx, nn

from splitfed.aliasing import check_in_place
from splitfed.errors import InvalidInput, unknown


@dataclass(frozen=True)
class Piece:
    """One piece of a cut model: `module` reads `inputs` and returns `outputs` (names of values)."""

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def cut(model: nn.Module, at: Sequence[str]) -> tuple[Piece, ...]:
    """Cut `model` after each submodule named in `at`, in the order they run; returns `len(at) + 1` pieces.

    Raises `InvalidInput` for a name that is not there, for a cut that leaves an empty piece, for weights used on
    two sides of a cut, for an in-place operation whose effect would have to cross a cut, and for a model that
    cannot be traced (pass `Segment`s of your own then).
    """
    names = (at,) if isinstance(at, str) else tuple(at)
    modules = {name for name, _ in model.named_modules() if name}
    for name in names:
        if name not in modules:
            raise unknown(f"submodule of {type(model).__name__}", name, modules)
    own = set(vars(model))
    try:
        graph = _trace(model)
        part = _assign(model, graph, names)
        check_in_place(model, graph, part)
        return _build(model, graph, part, len(names) + 1)
    finally:
        _forget_constants(model, own)


def _forget_constants(model: nn.Module, own: set[str]) -> None:
    """Remove the constants that tracing has left on the model."""
    for name in set(vars(model)) - own:
        delattr(model, name)


def _trace(model: nn.Module) -> fx.Graph:
    was_training = {name: module.training for name, module in model.named_modules()}
    own = set(vars(model))
    graphs = []
    try:
        for mode in (False, True):
            _forget_constants(model, own)
            graphs.append(fx.Tracer().trace(model.train(mode)))
    except (fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise InvalidInput(
            f"{type(model).__name__} cannot be traced{_where(error)}: {str(error).splitlines()[0]}; "
            "rewrite that line, or pass segments by hand (splitfed.Segment)"
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    for calm, busy in zip(graphs[0].nodes, graphs[1].nodes, strict=False):
        if calm.format_node() != busy.format_node():
            raise InvalidInput(
                f"{type(model).__name__} behaves otherwise in training at '{busy.name}', and a trace would freeze "
                "that: use a module (say nn.Dropout) there, or pass segments by hand (splitfed.Segment)"
            )
    return graphs[1]


def _where(error: BaseException) -> str:
    library = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((library, __file__))]
    if not frames:
        return ""
    return f" at {frames[-1].line!r} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _assign(model: nn.Module, graph: fx.Graph, names: tuple[str, ...]) -> dict[fx.Node, int]:
    """Give every node the number of the piece it belongs to."""
    nodes = list(graph.nodes)
    last = {name: _last_node(nodes, name) for name in names}
    for name, index in last.items():
        if index < 0:
            raise InvalidInput(f"submodule {name!r} is never called by {type(model).__name__}; nothing to cut after")
    ends = [last[name] for name in names]
    for (left, i), (right, j) in zip(last.items(), list(last.items())[1:], strict=False):
        if j < i:
            raise InvalidInput(f"cut {right!r} runs before {left!r}; name the cuts in the order they run")
    if len(set(ends)) < len(names):
        raise InvalidInput(f"cuts {', '.join(map(repr, names))} leave an empty segment: two are the same place")
    part = {n: sum(index > end for end in ends) for index, n in enumerate(nodes)}
    working = {part[n] for n in nodes if n.op.startswith("call_")}
    for index in range(len(names) + 1):
        if index not in working:
            place = f"after {names[-1]!r}" if index == len(names) else f"before {names[index]!r}"
            raise InvalidInput(f"cut {names[min(index, len(names) - 1)]!r} leaves an empty segment {place}")
    for node in nodes:
        if node.op == "get_attr" and node.users:
            _place_attribute(model, node, part)
    return part


def _last_node(nodes: list[fx.Node], name: str) -> int:
    inside = -1
    for index, node in enumerate(nodes):
        stack = node.meta.get("nn_module_stack") or {}
        owners = [entry[0] for entry in stack.values()]
        if name in owners or (node.op == "call_module" and node.target == name):
            inside = index
    return inside


def _place_attribute(model: nn.Module, node: fx.Node, part: dict[fx.Node, int]) -> None:
    """A parameter read directly belongs where it is used, not where the trace happened to fetch it."""
    users = {part[user] for user in node.users}
    part[node] = min(users)
    if len(users) > 1 and str(node.target) in dict(model.named_parameters()):
        raise InvalidInput(
            f"parameter {str(node.target)!r} is used on two sides of a cut: weights tied across a cut are refused"
        )


def _build(model: nn.Module, graph: fx.Graph, part: dict[fx.Node, int], count: int) -> tuple[Piece, ...]:
    pieces: list[fx.Graph] = [fx.Graph() for _ in range(count)]
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
    reads: list[list[str]] = [[] for _ in range(count)]
    crossing: dict[fx.Node, None] = {}
    final: list[fx.Node] = []

    def fetch(index: int, node: fx.Node) -> fx.Node:
        if node not in copies[index]:
            if node.op == "get_attr":
                copies[index][node] = pieces[index].node_copy(node)
            else:
                copies[index][node] = pieces[index].placeholder(node.name)
                reads[index].append(node.name)
                crossing[node] = None
        return copies[index][node]

    for index in range(count):
        for node in graph.nodes:
            if node.op == "output":
                final = _outputs(node)
            elif part[node] == index and node.op == "placeholder":
                if node.users:
                    home = min(part[user] for user in node.users)
                    copies[home][node] = pieces[home].placeholder(node.name)
                    reads[home].append(node.name)
            elif part[node] == index:
                copies[index][node] = pieces[index].node_copy(node, partial(fetch, index))
    built = []
    for index in range(count):
        returned = [n for n in graph.nodes if part[n] == index and (n in crossing or n in final)]
        returned = [n for n in returned if n.op != "placeholder"]
        copied = tuple(copies[index][n] for n in returned)
        pieces[index].output(copied[0] if len(copied) == 1 else copied)
        pieces[index].lint()
        module = fx.GraphModule(model, pieces[index], class_name=f"{type(model).__name__}Part{index}")
        module.training = model.training
        # Constants of the code are no state of the model.
        module._non_persistent_buffers_set |= {n for n in module._buffers if n.startswith("_tensor_constant")}
        built.append(Piece(module, tuple(reads[index]), tuple(n.name for n in returned)))
    return tuple(built)


def _outputs(node: fx.Node) -> list[fx.Node]:
    value = node.args[0]
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(v, fx.Node) for v in values):
        raise InvalidInput("the model must return a tensor or a tuple of tensors to be cut")
    return [v for v in values if isinstance(v, fx.Node)]
