"""Cut a traceable model after named submodules; values that cross, skips included, are found by `torch.fx`.

Each piece is a `GraphModule` that keeps the model's own submodules under the model's own names, so a state dict
goes in and out unchanged: weights that no operation reads stay in it too. The model given is neither copied nor
altered. What a trace cannot show (autocast, `no_grad`, Python state, an overridden `train`) is found by comparing the
pieces with the model, in `splitfed.core.equivalence`.

A value used in three or more places on two sides of a cut gets its gradient summed in another order than in the
uncut model, and may differ from it in the last bits, as may what follows from it. Models with such a value are compared
loosely; see `splitfed.core.equivalence`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitfed.core.aliasing import check_in_place, find_augmented, find_overwritten_node
from splitfed.core.cut_names import Cut, check_places, relays
from splitfed.core.errors import InvalidInput, check_names, describe_error, line_of, others_code
from splitfed.core.held_arrays import find_foreign, leave_out_unread, state_of
from splitfed.core.model_call import set_mode
from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.module_copies import copy_computed, deep_copy
from splitfed.core.topology import CutPiece, Original
from splitfed.core.tracer import ModelTracer, find_untraceable_code


class NotTraceable(InvalidInput):
    """A model whose operations a trace cannot follow; replay may."""


def cut_by_trace(
    model: nn.Module,
    cuts: Sequence[Cut],
    output: str | None = None,
    chain: Sequence[str] = (),
    snapshot: ModelSnapshot | None = None,
    given: Collection[str] = (),
) -> Original:
    """Return the pieces of `model` between `cuts`; `output`: the only result of the model that is used.

    `chain`: the party of each piece, where neighbours alone send to each other; see `cut_names.relays`.
    `snapshot`: one of `model` as it is, where there is one. `given`: arguments that there are rows of; another whose
    default is a plain number or text has that. Raises `InvalidInput` for what cannot be traced or cut.
    """
    if called := [cut for cut in cuts if cut.call is not None]:
        raise NotTraceable(f"cut {called[0].name!r} names a call of a submodule, which a trace does not show")
    snapshot = snapshot or ModelSnapshot(model)
    graph, constants = _trace(model, snapshot)
    try:
        _set_defaults(graph, given)
        vars(model).update(constants)
        part = _assign(model, graph, cuts)
        _check_weights(model, graph)
        check_in_place(model, graph, part)
        _assign_unread_state(model, graph, part)
        outputs = _outputs(graph, output)
        pieces = _build(model, graph, part, len(cuts) + 1, outputs, chain)
    finally:
        for name in constants:
            vars(model).pop(name, None)
    for module, _, _ in pieces:
        module.training = model.training
    arguments = {n.name: str(n.target) for n in graph.nodes if n.op == "placeholder" and n.users}
    results, names = tuple(n.name for n in outputs), tuple(cut.name for cut in cuts)
    return Original(model, arguments, results, pieces, names, output=output)


class PieceModule(fx.GraphModule):
    """A piece as a module, whose copies share its graph and code, and keep what belongs to the model's state apart.

    `trace_constants`: names of the buffers that are none of the model's, but tensors that its `forward` reads.
    """

    trace_constants: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Any) -> PieceModule:
        """Return a copy with weights of its own; to write and compile the same code again takes longer than a step."""
        made: PieceModule = object.__new__(type(self))
        memo[id(self)] = made
        # The graph is never changed again; what it says of its owner would lead from copy to copy.
        self.graph._owning_module = None
        memo[id(self.graph)] = self.graph
        memo |= copy_computed(self)
        made.__dict__.update(deep_copy(self.__dict__, (self,), memo))
        return made


def _trace(model: nn.Module, snapshot: ModelSnapshot) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return the graph of `model`, and the constants that it reads under names that the model does not have."""
    if (what := find_untraceable_code(model)) is not None:
        raise NotTraceable(f"{type(model).__name__} cannot be traced: {what}")
    _check_hooks(model)
    graphs, own_names, constants = [], set(vars(model)), dict[str, Tensor]()
    tracer = ModelTracer()
    with tracer.watch():
        for mode in (True, False):
            try:
                # The user's own forward may raise anything of what it is not meant for.
                # Whatever tells training from use, by itself or by torch: the mode, and whether there are gradients.
                with others_code(partial(_not_traceable, model)), torch.set_grad_enabled(mode):
                    set_mode(model, mode)
                    graphs.append(tracer.trace(model))
                constants |= {n: v for n, v in vars(model).items() if n not in own_names and isinstance(v, Tensor)}
                _check_replaced(model)
                if (name := snapshot.changed_constant()) is not None:
                    raise NotTraceable(
                        f"forward of {type(model).__name__} changes the {name}, a tensor that a trace takes for a "
                        "constant: keep it in a buffer"
                    )
            finally:
                snapshot.restore()
    for training_node, evaluation_node in zip(graphs[0].nodes, graphs[1].nodes, strict=False):
        if evaluation_node.format_node() != training_node.format_node():
            raise NotTraceable(
                f"{type(model).__name__} behaves otherwise in training at '{training_node.name}', and a trace would "
                "freeze that: use a module (say nn.Dropout) there, or pass segments by hand (splitfed.Segment)"
            )
    if (found := find_augmented(model, graphs[0])) is not None:
        raise NotTraceable(
            f"{type(model).__name__} cannot be traced: {found[0].name!r} overwrites in place what {found[1].name!r} "
            "reads under another name"
        )
    return graphs[0], constants


def _check_hooks(model: nn.Module) -> None:
    """Refuse a hook that is a method of a module around its own, of which a piece would hold a copy."""
    modules = set(model.modules())
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, nn.Module) and owner in modules.difference(module.modules()):
                raise NotTraceable(
                    f"{type(model).__name__} cannot be traced: a hook on {path!r} is a method of "
                    f"{type(owner).__name__}, of which a piece would hold a copy; do in forward what it does, or pass "
                    "segments by hand (splitfed.Segment)"
                )


def _set_defaults(graph: fx.Graph, given: Collection[str]) -> None:
    """Put the default in the place of an argument that takes a plain number or text, of which nobody has rows."""
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.args]:
        (default,) = node.args
        if node.target in given or not isinstance(default, (bool, int, float, str)):
            continue
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), partial(_replace, node, default))
        graph.erase_node(node)


def _replace(node: fx.Node, default: Any, found: fx.Node) -> Any:
    """Return `default` for `node`, and any other node as it is."""
    return default if found is node else found


def _not_traceable(model: nn.Module, error: BaseException) -> InvalidInput:
    """Return the refusal of a model whose trace ended in `error`."""
    if isinstance(error, InvalidInput):
        return error
    where = line_of(error)
    # Whoever prints it would fail where code that torch.fx has made tells no lines (torch 2.6 on Python 3.11).
    error.__traceback__ = None
    return NotTraceable(
        f"{type(model).__name__} cannot be traced{where}: {describe_error(error)}; rewrite that line, or pass segments "
        "by hand (splitfed.Segment)"
    )


def _check_replaced(model: nn.Module) -> None:
    """Refuse a buffer that `forward` replaces by another tensor, which a trace cannot follow."""
    for path, module in model.named_modules():
        for name, value in module._buffers.items():
            if isinstance(value, fx.Proxy):
                raise NotTraceable(
                    f"forward of {type(model).__name__} puts another tensor in the place of buffer "
                    f"{(f'{path}.{name}' if path else name)!r}: change it in place (copy_, add_, mul_)"
                )


def _check_weights(model: nn.Module, graph: fx.Graph) -> None:
    """Refuse an operation in place on a weight that learns: it stands in a no_grad, which no trace shows."""
    for node in graph.nodes:
        written = find_overwritten_node(model, node)
        while written is not None and written.op != "get_attr" and written.args:
            detached = written.target == "detach" or "data" in written.args[1:]
            written = None if detached or not isinstance(written.args[0], fx.Node) else written.args[0]
        if written is not None and written.op == "get_attr":
            weight = dict(model.named_parameters(remove_duplicate=False)).get(str(written.target))
            if weight is not None and node.target == "requires_grad_":
                raise NotTraceable(
                    f"forward of {type(model).__name__} calls requires_grad_() of the weight {written.target!r}, of "
                    "which a trace keeps nothing: freeze it outside of forward"
                )
            if weight is not None and weight.requires_grad:
                raise NotTraceable(
                    f"forward of {type(model).__name__} changes the weight {written.target!r} in place, by "
                    f"{str(node.target)!r}, which takes a torch.no_grad() that a trace does not show: change it in an "
                    "operation on its data or detach()"
                )


def _assign(model: nn.Module, graph: fx.Graph, cuts: Sequence[Cut]) -> dict[fx.Node, int]:
    """Give every node the number of the piece it belongs to."""
    nodes = list(graph.nodes)
    ends = [cut.select(type(model).__name__, *_span(model, nodes, cut.target)) for cut in cuts]
    check_places(cuts, ends)
    part = {n: sum(index > end for end in ends) for index, n in enumerate(nodes)}
    working = {part[n] for n in nodes if n.op.startswith("call_")}
    for index in range(len(cuts) + 1):
        if index not in working:
            place = f"after {cuts[-1].name!r}" if index == len(cuts) else f"before {cuts[index].name!r}"
            raise InvalidInput(f"cut {cuts[min(index, len(cuts) - 1)].name!r} leaves an empty segment {place}")
    for node in nodes:
        if node.op == "get_attr" and node.users:
            # A parameter read directly belongs where it is used, not where the trace happened to fetch it.
            part[node] = min(part[user] for user in node.users)
    return part


def _span(model: nn.Module, nodes: list[fx.Node], name: str) -> tuple[list[int], list[int]]:
    """Return the number of the node before the first call of a submodule, and that of the last node of its calls."""
    inside = [
        index
        for index, node in enumerate(nodes)
        if name in [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        or (node.op == "call_module" and node.target == name)
    ]
    if not inside:
        return [], []
    last = inside[-1]
    if isinstance(model.get_submodule(name), (nn.RNNBase, nn.MultiheadAttention)):
        # They return a tuple, which cannot cross; the tensors taken out of it can.
        while nodes[last + 1].target is operator.getitem and isinstance(nodes[last + 1].args[1], int):
            last += 1
    return [inside[0] - 1], [last]


def _assign_unread_state(model: nn.Module, graph: fx.Graph, part: dict[fx.Node, int]) -> None:
    """Let weights and buffers that no operation reads be part of the piece that holds what stands before them.

    So are further names of a weight that is read under one of them.
    """
    piece_of: dict[int, int] = {}
    read: set[str] = set()
    saved = model.state_dict()
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    state = {name: tensor for name, tensor in named if name in saved}
    for node, index in part.items():
        if node.op == "call_module":
            target = f"{node.target}."
            module_tensors = {name: t for name, t in state.items() if name.startswith(target)}
            piece_of.update({id(t): index for t in module_tensors.values()})
            read.update(module_tensors)
        elif node.op == "get_attr" and node.users and (tensor := state.get(str(node.target))) is not None:
            piece_of[id(tensor)] = index
            read.add(str(node.target))
    index, output = 0, next(n for n in graph.nodes if n.op == "output")
    for name, tensor in state.items():
        index = piece_of.get(id(tensor), index)
        if name in read:
            continue
        # As a whole submodule, so that it can still be drawn anew, where nothing of it is read.
        owner = name.rpartition(".")[0]
        owner_tensors = {other for other in state if owner and other.startswith(f"{owner}.")}
        whole = bool(owner_tensors) and not owner_tensors & read
        with graph.inserting_before(output):
            part[graph.get_attr(owner if whole else name)] = index
        read |= owner_tensors if whole else {name}


def _build(
    model: nn.Module,
    graph: fx.Graph,
    part: dict[fx.Node, int],
    count: int,
    outputs: Sequence[fx.Node],
    chain: Sequence[str],
) -> tuple[CutPiece, ...]:
    pieces: list[fx.Graph] = [fx.Graph() for _ in range(count)]
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
    reads: list[list[str]] = [[] for _ in range(count)]
    crossing: dict[fx.Node, None] = {}
    handed_on: list[dict[str, fx.Node]] = [{} for _ in range(count)]

    def fetch(index: int, node: fx.Node) -> fx.Node:
        if node not in copies[index]:
            if node.op == "get_attr":
                copies[index][node] = pieces[index].node_copy(node)
            else:
                name = node.name
                for relay in () if node.op == "placeholder" else relays(chain, part[node], index):
                    received = fetch(relay, node)
                    name = f"{node.name}_{chain[relay]}"
                    handed_on[relay][name] = received
                copies[index][node] = pieces[index].placeholder(name)
                reads[index].append(name)
                crossing[node] = None
        return copies[index][node]

    for index in range(count):
        for node in graph.nodes:
            if node.op == "output" or part[node] != index:
                continue
            if node.op != "placeholder":
                copies[index][node] = pieces[index].node_copy(node, partial(fetch, index))
            elif node.users:
                home = min(part[user] for user in node.users)
                copies[home][node] = pieces[home].placeholder(node.name)
                reads[home].append(node.name)
    built, saved = [], set(model.state_dict())
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for index in range(count):
        made = [n for n in graph.nodes if part[n] == index and n.op != "placeholder"]
        returned = [n for n in made if n in crossing or n in outputs]
        copied = (*(copies[index][n] for n in returned), *handed_on[index].values())
        pieces[index].output(copied[0] if len(copied) == 1 else copied)
        pieces[index].lint()
        # A name that is no name in Python, say, has no place in the code that is written.
        with others_code(partial(_not_traceable, model)):
            module = PieceModule(model, pieces[index], class_name=f"{type(model).__name__}Part{index}")
        module.trace_constants = tuple(name for name, _ in module.named_buffers() if name not in buffers)
        leave_out_unread(module)
        # Without fx's own call, which prints the code of a module whose `forward` fails, and costs two calls a step.
        type(module).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        for prefix, inner in module.named_modules():
            # Constants of the code, and buffers that the model does not save, are no state of the model.
            inner._non_persistent_buffers_set |= {n for n in inner._buffers if f"{prefix}.{n}".lstrip(".") not in saved}
        built.append((module, tuple(reads[index]), (*(n.name for n in returned), *handed_on[index])))
    _check_foreign(model, [module for module, _, _ in built])
    return tuple(built)


def _check_foreign(model: nn.Module, pieces: Sequence[nn.Module]) -> None:
    """Refuse a piece that leads to what another piece holds, by a hook or an attribute that its code names."""
    for piece in pieces:
        own = dict(state_of(piece))
        others = (named for other in pieces for named in state_of(other) if named[0] not in own)
        if found := find_foreign(piece, others):
            raise NotTraceable(
                f"{type(model).__name__} cannot be traced: {found.label} leads to {found.name!r}, which another party "
                "holds; do in forward what it does, or pass segments by hand (splitfed.Segment)"
            )


def _outputs(graph: fx.Graph, output: str | None) -> tuple[fx.Node, ...]:
    value = next(n for n in graph.nodes if n.op == "output").args[0]
    if output is not None and isinstance(value, (Mapping, tuple, list)):
        named = value if isinstance(value, Mapping) else {str(place): one for place, one in enumerate(value)}
        check_names("output of the model", named, output)
        value = named[output]
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(v, fx.Node) for v in values):
        raise NotTraceable("the model must return a tensor or a tuple of tensors to be cut")
    return tuple(v for v in values if isinstance(v, fx.Node))
