"""Decomposition of a server segment into stages that can be computed on ciphertexts: affine maps and squares.

A trace of the segment is split wherever a second layer with weights follows the first on a path through it, and at
every square. Whether a part is affine is tested numerically, in float64, with the matrix that the part gives for the
unit vectors, not inferred from the names of layers.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from splitfed.core.errors import InvalidInput, describe_error
from splitfed.core.random import generator

_SQUARES = {torch.square, operator.mul, torch.mul, operator.pow, torch.pow, "square", "pow", "mul"}
# Tolerance in float64 for the order of sums, sufficient for matrices of thousands of numbers.
_TOLERANCE = 1e-9


class Square(nn.Module):
    """The square of every number: (..., ) to the same shape; what a server can compute on ciphertexts."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the square of `x`."""
        return x * x


@dataclass(frozen=True)
class AffineMap:
    """Affine map of flattened rows, x W' + b. `weight`: (results, features) and `bias`: (results,), float64."""

    weight: Tensor
    bias: Tensor
    shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the map of rows `x` (rows, features): (rows, results) in float64."""
        return x.double() @ self.weight.T + self.bias


def read_stages(name: str, module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the stages of `module`, each a `Square` or a module that is yet to be tested for being affine.

    `name`: the segment's name in errors. The stages share the weights of `module`. Raises `InvalidInput` for a module
    that cannot be traced, reads or returns more than one value, or passes a value around a stage.
    """
    try:
        graph = module if isinstance(module, fx.GraphModule) else fx.symbolic_trace(module)
    except Exception as error:  # what a user's own forward raises under a trace can be anything
        raise InvalidInput(
            f"segment {name!r} cannot be evaluated on ciphertexts, as it cannot be traced: {describe_error(error)}"
        ) from error
    places = _find_places(graph)
    stages: list[nn.Module] = []
    given = _only([node for node in graph.graph.nodes if node.op == "placeholder"], name)
    for place in sorted(set(places.values())):
        nodes = [node for node, at in places.items() if at == place]
        inside = set(nodes)
        made = _only([n for n in nodes if any(user not in inside for user in n.users)], name)
        if {n for node in nodes for n in node.all_input_nodes} - inside != {given}:
            raise InvalidInput(
                f"segment {name!r} cannot be evaluated on ciphertexts: a value bypasses one of its layers; expected "
                "layers and squares in sequence"
            )
        stages.append(Square() if any(map(_is_square, nodes)) else _part(graph, nodes, given, made))
        given = made
    return tuple(stages) if len(stages) != 1 or isinstance(stages[0], Square) else (module,)


def _only(nodes: Sequence[fx.Node], name: str) -> fx.Node:
    """Return the single node of `nodes`; raise `InvalidInput` for a segment `name` with none or several."""
    if len(nodes) != 1:
        raise InvalidInput(
            f"segment {name!r} cannot be evaluated on ciphertexts: {len(nodes)} values go in or out of a layer"
        )
    return nodes[0]


def _part(graph: fx.GraphModule, nodes: Sequence[fx.Node], given: fx.Node, made: fx.Node) -> fx.GraphModule:
    """Return the part of `graph` that computes node `made` from node `given`; its weights keep their names."""
    part = fx.Graph()
    copies = {given: part.placeholder("x")}
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[made])
    return fx.GraphModule(graph, part)


def affine_map(name: str, module: nn.Module, shape: Sequence[int]) -> AffineMap:
    """Return the affine map that `module` computes on rows of `shape`.

    Raises `InvalidInput`, naming `name`, for a module that is not affine, or behaves differently in training mode.
    """
    tried = copy.deepcopy(module).cpu().double()
    features = math.prod(shape)
    rows = torch.randn(4, features, dtype=torch.float64, generator=generator(0, "affine", features))
    found: AffineMap | None = None
    for training in (True, False):
        tried.train(training)
        with torch.no_grad():
            zero = tried(torch.zeros(2, *shape, dtype=torch.float64))
            bias, result_shape = zero[0].flatten(), tuple(zero.shape[1:])
            units = tried(torch.eye(features, dtype=torch.float64).view(-1, *shape))
            # Linear modules may return views of what they read.
            found = AffineMap((units.flatten(1) - bias).T.contiguous(), bias.clone(), result_shape)
            made = tried(rows.view(-1, *shape).clone()).flatten(1)
        size = float(found.weight.abs().sum(1).max() + found.bias.abs().max()) * float(rows.abs().max())
        if not float((made - found(rows)).abs().max()) <= _TOLERANCE * max(size, 1e-300):
            raise InvalidInput(
                f"segment {name!r} cannot be evaluated on ciphertexts: {_kinds(module)} is not linear; expected linear "
                "layers, convolutions and squares, everything else at the key holder"
            )
    assert found is not None
    return found


def check_linear_in_weights(name: str, module: nn.Module, shape: Sequence[int]) -> None:
    """Raise `InvalidInput` for a `module` whose output for rows of `shape` is not linear in its weights."""
    tried, drawn = copy.deepcopy(module).cpu().double().eval(), generator(0, "shares", *shape)
    rows = torch.randn(3, *shape, dtype=torch.float64, generator=drawn)

    def draw() -> dict[str, Tensor]:
        return {n: torch.randn(p.shape, dtype=torch.float64, generator=drawn) for n, p in tried.named_parameters()}

    def run(weights: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(tried, dict(weights), (rows.clone(),))
        return result

    with torch.no_grad():
        first, second = draw(), draw()
        one, two, both = run(first), run(second), run({n: w + second[n] for n, w in first.items()})
    if not float((both - one - two).abs().max()) <= _TOLERANCE * float((one.abs() + two.abs()).max()):
        raise InvalidInput(
            f"segment {name!r} cannot be trained in shares: {_kinds(module)} is not linear in its weights; expected "
            "linear layers and convolutions"
        )


def _find_places(graph: fx.GraphModule) -> dict[fx.Node, int]:
    """Return the stage of each operation of `graph`."""
    # A node's stage, and whether some way to it has passed weights in this stage.
    known: dict[fx.Node, tuple[int, bool]] = {}
    places: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        before = [known[n] for n in node.all_input_nodes]
        stage = max((stage for stage, _ in before), default=0)
        heavy = any(used for at, used in before if at == stage)
        if node.op in ("placeholder", "output"):
            known[node] = (0, False)
            continue
        if node.op == "get_attr":
            # Counted where it is used.
            known[node] = (0, True)
        elif _is_square(node):
            places[node] = stage + any(places.get(n) == stage for n in node.all_input_nodes)
            known[node] = (places[node] + 1, False)
            continue
        else:
            weighs = _has_weights(graph, node)
            stage += weighs and heavy
            known[node] = (stage, heavy or weighs)
        places[node] = known[node][0]
    return places


def _has_weights(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return False
    return any(True for _ in graph.get_submodule(str(node.target)).parameters())


def _is_square(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in _SQUARES:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "square":
        return True
    first, second = (*node.args, None, None)[:2]
    return bool(second == 2) if name == "pow" else first is second


def _kinds(module: nn.Module) -> str:
    kinds = dict.fromkeys(type(m).__name__ for m in module.modules() if not any(True for _ in m.children()))
    return ", ".join(kinds) or type(module).__name__
