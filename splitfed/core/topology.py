"""What a topology is: frozen data about segments, the roles that hold them, and the values between them.

Values are named tensors. A segment reads some and returns some; a role feeds the model's inputs; a head reads the
model's output, at the role that computes the loss. Edges follow from who reads what, so they cannot contradict
the segments: `Topology.edges` derives them. Wherever an edge joins two roles it becomes messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape

from torch import Tensor, fx, nn

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_names, check_number, unknown
from splitfed.core.held_arrays import find_foreign, state_of
from splitfed.core.model_checks import refuse_packed_state, refuse_weight_hooks
from splitfed.core.secure_computation import SecureComputation
from splitfed.core.tasks import Task

CutPiece = tuple[nn.Module, tuple[str, ...], tuple[str, ...]]
"""Module, names of the values that it reads, names of those that it returns."""


@dataclass(frozen=True, eq=False)
class Original:
    """The uncut model that segments were cut from, with which they are compared before training.

    `model` takes each value of `arguments` as the argument of that name and returns the values `outputs`, in that
    order. `pieces`: module, inputs and outputs of each, in the order they run. `cuts`: the submodules cut after.
    `reordered`: the weights whose gradients the pieces may round otherwise; None: found in the traces of the pieces.
    `output`: the one of several results of the model that is used, by key or place; None for all of them. `sizes`:
    numbers of rows in which the model does something else than in those of its example.
    """

    model: nn.Module
    arguments: Mapping[str, str]
    outputs: tuple[str, ...]
    pieces: tuple[CutPiece, ...]
    cuts: tuple[str, ...]
    reordered: frozenset[str] | None = None
    output: str | None = None
    sizes: tuple[int, ...] = ()


def keeps_names(module: nn.Module) -> bool:
    """Tell whether `module` was cut from a model, whose names of weights it keeps."""
    return isinstance(module, fx.GraphModule) or bool(getattr(type(module), "keeps_names", False))


@dataclass(frozen=True)
class Segment:
    """A piece of a model, held by `role`.

    `module` takes the values named in `inputs`, in that order, and returns those named in `outputs`: a tensor for
    one, a tuple for several. `prefix` goes before its parameter names in the state dict of the whole model: the
    segment's name and a dot, unless given; a piece made by `cut` keeps the model's own names and needs none.
    `original`: the model that it was cut from, None for a segment made by hand and in a run; there `reordered` names
    the weights of that model whose gradients may be rounded otherwise than in it.
    """

    name: str
    role: str
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    prefix: str | None = None
    original: Original | None = field(default=None, compare=False, repr=False)
    reordered: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def full(self, name: str) -> str:
        """Return the key in the whole model's state dict of `name`, a key of this segment's state dict."""
        own = "" if keeps_names(self.module) else f"{self.name}."
        return (own if self.prefix is None else self.prefix) + name


@dataclass(frozen=True)
class Edge:
    """The `values` that segment `source` hands to segment `target`."""

    source: str
    target: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """The edge as users write it: `source->target`."""
        return f"{self.source}->{self.target}"


@dataclass(frozen=True)
class Head:
    """A model output and its loss: `role` computes the loss, the role `labels` holds the labels.

    Where the two differ the labels cross as a message, through the roles `via` in turn if any are named. `target`
    names the label set of the data (None: its main one), `task` defaults to that label set's own; `weight`
    multiplies the loss when there are several heads.
    """

    value: str
    role: str
    labels: str
    task: Task | None = None
    weight: float = 1.0
    target: str | None = None
    via: tuple[str, ...] = ()

    @cached_property
    def path(self) -> tuple[str, ...]:
        """The roles the labels pass, from their holder to the loss; one role alone when they stay where they are."""
        return tuple(dict.fromkeys((self.labels, *self.via, self.role)))


@guard_constructor
@dataclass(frozen=True)
class Topology:
    """Segments in the order they run, `inputs` (value -> role that owns it) and heads. Checked when made.

    `forward_only`: names of crossings on which no gradient comes back; what stands before them learns from losses of
    its own alone. `training_only`: names of segments that serve training alone, such as a second model at a party that
    a local objective trains (see `splitfed.core.local_objective`): they are left out of predictions, unless a head on
    them is asked for by name, and their outputs need no reader. `cut_choice`: which cuts a rule has chosen and why, in
    a line, where they were left to it. `computation`: how some roles compute on what they cannot read, None where all
    is in plain. `sent_inputs`: the inputs that may cross as they are, or changed by constants
    alone, to roles that do not own them.
    """

    name: str
    segments: tuple[Segment, ...]
    inputs: Mapping[str, str]
    heads: tuple[Head, ...]
    forward_only: frozenset[str] = frozenset()
    training_only: frozenset[str] = frozenset()
    cut_choice: str = field(default="", compare=False)
    computation: SecureComputation | None = None
    sent_inputs: Collection[str] = ()

    def __post_init__(self) -> None:
        """Refuse a graph that could not run, with one line that names the segment, value or role."""
        if not self.segments:
            raise InvalidInput(f"topology {self.name!r} has no segment")
        if not self.heads:
            raise InvalidInput(f"topology {self.name!r} has no head: nothing would be learnt")
        _check_names(self)
        _check_heads(self)
        _check_values(self)
        _check_state(self)
        check_names("crossing in forward_only", [edge.name for edge in self.crossings], *self.forward_only)
        check_names(f"sent input of topology {self.name!r}:", self.inputs, *self.sent_inputs)
        for name in self.training_only:
            self.segment(name)
        if not self.answering:
            raise InvalidInput(f"topology {self.name!r} has no head that answers: all are on training_only segments")

    def __repr__(self) -> str:
        """Tell who holds what, a line a segment and head: what it reads, what it returns, how many weights it has."""
        lines = [f"Topology({self.name}: {', '.join(f'{value} of {role}' for value, role in self.inputs.items())}"]
        for s in self.segments:
            size = sum(p.numel() for p in s.module.parameters())
            reads, returns = ", ".join(s.inputs), ", ".join(s.outputs)
            lines.append(f"  {s.role}: {s.name}: {reads} -> {returns}, {size:,} weights, {type(s.module).__name__}")
        for h in self.heads:
            task = "" if h.task is None else f" {h.task.name}"
            others = [*self.inputs.values(), *(s.role for s in self.segments)]
            only = "" if h.labels in others else ", a party with labels only"
            lines.append(f"  {h.role}: loss{task} of {h.value}, labels of {h.labels}{only}")
        crossings = ", ".join(f"{edge.name} ({', '.join(edge.values)})" for edge in self.crossings)
        how = "" if self.computation is None else f", {self.computation.describe()}"
        return "\n".join([*lines, f"  crosses: {crossings or 'nothing'}{how})"])

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, ordered by the segment that reads it, then by the one that returns it.

        A value that several segments of another role read crosses once, to the first of them: its party keeps it.
        """
        maker = {value: s.name for s in self.segments for value in s.outputs}
        values_of_edge: dict[tuple[str, str], list[str]] = {}
        delivered: set[tuple[str, str]] = set()
        for target in self.segments:
            for value in target.inputs:
                if value not in maker or (value, target.role) in delivered:
                    continue
                values = values_of_edge.setdefault((maker[value], target.name), [])
                if value not in values:  # a segment may read a value twice
                    values.append(value)
                if self.role_of(maker[value]) != target.role:
                    delivered.add((value, target.role))
        order = {s.name: i for i, s in enumerate(self.segments)}
        keys = sorted(values_of_edge, key=lambda key: (order[key[1]], order[key[0]]))
        return tuple(Edge(source, target, tuple(values_of_edge[source, target])) for source, target in keys)

    @cached_property
    def crossings(self) -> tuple[Edge, ...]:
        """The edges that join two roles: each is a message forward and one back at every training step."""
        return tuple(e for e in self.edges if self.role_of(e.source) != self.role_of(e.target))

    @cached_property
    def scored(self) -> tuple[Head, ...]:
        """The first head of every label set among those that answer."""
        first: dict[str | None, Head] = {}
        for head in self.answering:
            first.setdefault(head.target, head)
        return tuple(first.values())

    @cached_property
    def answering(self) -> tuple[Head, ...]:
        """The heads that are predicted unless one is asked for by name: all but those on `training_only` segments."""
        taught = {value for name in self.training_only for value in self.segment(name).outputs}
        return tuple(head for head in self.heads if head.value not in taught)

    @cached_property
    def serving(self) -> frozenset[str]:
        """The names of the segments that the outputs of the answering heads come from."""
        return frozenset(self.makers([head.value for head in self.answering]))

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Every role: those that own data first, then the others as they appear."""
        named = [*self.data_roles, *(s.role for s in self.segments), *(h.role for h in self.heads)]
        return tuple(dict.fromkeys(named))

    @cached_property
    def data_roles(self) -> tuple[str, ...]:
        """The roles that own inputs or labels; each client is a party of its own in these."""
        return tuple(dict.fromkeys([*self.inputs.values(), *(h.labels for h in self.heads)]))

    def segment(self, name: str) -> Segment:
        """Return the segment called `name`."""
        for segment in self.segments:
            if segment.name == name:
                return segment
        raise unknown("segment", name, [s.name for s in self.segments])

    def role_of(self, segment: str) -> str:
        """Return the role that holds `segment`."""
        return self.segment(segment).role

    def segments_of(self, role: str) -> tuple[Segment, ...]:
        """Return the segments that `role` holds, in the order they run."""
        return tuple(s for s in self.segments if s.role == role)

    def edge(self, name: str) -> Edge:
        """Return the edge called `name` (`source->target`)."""
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise unknown("edge", name, [e.name for e in self.edges])

    def makers(self, values: Iterable[str], given: Collection[str] = ()) -> tuple[str, ...]:
        """Return the names of the segments that compute `values` from those `given`, in the order they run.

        Without any given they are all segments whose work is in one of `values`.
        """
        wanted, found = set(values).difference(given), []
        for segment in reversed(self.segments):
            if wanted.intersection(segment.outputs):
                wanted.update(set(segment.inputs).difference(given))
                found.append(segment.name)
        return tuple(reversed(found))

    def origins(self, value: str) -> tuple[str, ...]:
        """Return the inputs that `value` is computed from, in the order of `inputs`."""
        read = {v for name in self.makers([value]) for v in self.segment(name).inputs} | {value}
        return tuple(name for name in self.inputs if name in read)

    def readers(self, edge: Edge) -> tuple[str, ...]:
        """Return the names of all segments of the receiving role that read a value of `edge`, in the order they run.

        An edge names only the first of them as its target, because a value crosses to a role once.
        """
        there = self.segments_of(self.role_of(edge.target))
        return tuple(s.name for s in there if set(edge.values).intersection(s.inputs))

    def with_task(self, task: Task) -> Topology:
        """Return this topology with `task` at every head that has none of its own."""
        return self.with_tasks({None: task})

    def with_tasks(self, tasks: Mapping[str | None, Task]) -> Topology:
        """Return this topology with the task of its label set (None: the main one) at every head without a task."""
        for head in self.heads:
            if head.target not in tasks:
                known = [name or "None, the main one" for name in tasks]
                raise unknown(f"label set of the head on {head.value!r}:", head.target, known)
        return replace(self, heads=tuple(replace(h, task=h.task or tasks[h.target]) for h in self.heads))

    def upstream(self, role: str) -> tuple[Segment, ...]:
        """Return the segments whose work reaches `role` from outside in a prediction, in the order they run."""
        there = [edge for edge in self.crossings if self.role_of(edge.target) == role]
        names = self.makers(v for e in there if self.serving.intersection(self.readers(e)) for v in e.values)
        return tuple(self.segment(name) for name in names)

    def state_dict(self, modules: Mapping[str, nn.Module] | None = None) -> dict[str, Tensor]:
        """Return the whole model's state under its original names, from `modules` (segment name -> module)."""
        own = {s.name: s.module for s in self.segments} if modules is None else modules
        return {s.full(name): value for s in self.segments for name, value in own[s.name].state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor], modules: Mapping[str, nn.Module] | None = None) -> None:
        """Load `state`, under the whole model's names, into `modules` (default: the topology's own)."""
        expected = self.state_dict(modules)
        check_names("parameter", expected, *state)
        for name, value in expected.items():
            if name not in state:
                raise InvalidInput(f"the state has no {name!r} (shape {tuple(value.shape)})")
            if state[name].shape != value.shape:
                shape, expected_shape = tuple(state[name].shape), tuple(value.shape)
                raise InvalidInput(f"parameter {name!r} has shape {shape}; this topology needs {expected_shape}")
        for segment in self.segments:
            module = segment.module if modules is None else modules[segment.name]
            module.load_state_dict({name: state[segment.full(name)] for name in module.state_dict()})


def member(role: str, replica: int) -> str:
    """Return the name of the party that plays `role` for one client: `client3`, or `party1_3` for role `party1`."""
    return f"{role}{'_' if role[-1:].isdigit() else ''}{replica}"


def frozen_modules(topology: Topology, in_training: bool | None = None) -> dict[str, tuple[str, ...]]:
    """Return by segment the modules inside it that stay in evaluation mode in training, by their names.

    They are those that the user left in evaluation mode, "" being the segment as a whole. A model that is given in
    evaluation mode as a whole, all segments of it, is trained; `in_training` says whether it was
    given in training mode.
    """
    if in_training is None:
        in_training = any(segment.module.training for segment in topology.segments)
    return {
        s.name: tuple(name for name, m in s.module.named_modules() if in_training and not m.training)
        for s in topology.segments
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of `module` without its buffers."""
    kept = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict().items() if name in kept}


def name_weights(topology: Topology, role: str) -> list[tuple[str, nn.Parameter]]:
    """Return the trained weights of `role`, named as in the state dict of the whole model; of tied ones the first."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for segment in topology.segments_of(role):
        for name, weight in segment.module.named_parameters():
            if weight.requires_grad:
                found.setdefault(id(weight), (segment.full(name), weight))
    return list(found.values())


def _check_names(topology: Topology) -> None:
    _check_unique("segment", (s.name for s in topology.segments))
    for kind, name in [("segment", s.name) for s in topology.segments] + [("role", r) for r in topology.roles]:
        # They become names of files, edges and messages.
        plain = isinstance(name, str) and re.fullmatch(r"(?!\.)(?:(?!->)[^/\\\x00-\x1f])+", name)
        if not plain or name in ("labels", "weights"):
            raise InvalidInput(f"{kind} {name!r} is not allowed: no slash, no '->', not 'labels' and not 'weights'")
    _check_unique("value", [*topology.inputs, *(v for s in topology.segments for v in s.outputs)])
    for segment in topology.segments:
        if not segment.inputs or not segment.outputs:
            raise InvalidInput(f"segment {segment.name!r} must read and return at least one value")
        _check_module(segment.name, segment.module)


def _check_module(name: str, module: object) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidInput(f"segment {name!r} has a {type(module).__name__} as its module; expected an nn.Module")


def _check_unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidInput(f"{kind} {name!r} appears twice; every {kind} needs a name of its own")
        seen.add(name)


def _check_values(topology: Topology) -> None:
    makers = dict.fromkeys(topology.inputs, "")
    later_makers = {v: s.name for s in topology.segments for v in s.outputs}
    read_values: set[str] = set()
    training_values: set[str] = set()
    for segment in topology.segments:
        for value in segment.inputs:
            owner = topology.inputs.get(value)
            if value not in makers and value in later_makers:
                raise InvalidInput(
                    f"segment {segment.name!r} reads {value!r}, which {later_makers[value]!r} returns only later: "
                    "segments must stand in the order they run, without a cycle"
                )
            check_names(f"value read by segment {segment.name!r}:", makers, value)
            if owner is not None and owner != segment.role:
                read = f"segment {segment.name!r} at role {segment.role!r} reads"
                if _reads_shape_alone(segment, value):
                    raise InvalidInput(
                        f"{read} the shape of {value!r}, raw data of role {owner!r}, and nothing else of it: cut with "
                        "rows as example, from which every party knows shapes, or take the shape of what it is sent"
                    )
                raise InvalidInput(
                    f"{read} {value!r}, raw data of role {owner!r}: raw data never crosses; cut where {owner!r} alone "
                    f"reads it, or allow it where {segment.role!r} may see it: sent_inputs={(value,)!r}, with rows as "
                    "example"
                )
            read_values.add(value)
        makers.update(dict.fromkeys(segment.outputs, segment.name))
        if segment.name in topology.training_only:
            training_values.update(segment.outputs)
        elif training_values.intersection(segment.inputs):
            raise InvalidInput(
                f"segment {segment.name!r} reads {min(training_values.intersection(segment.inputs))!r}, which is there "
                "to train on: name it in training_only as well"
            )
    finals = {h.value for h in topology.heads}
    if unread := [v for v in makers if v not in read_values | finals | training_values]:
        raise InvalidInput(f"value {unread[0]!r} is read by no segment and no head")


def _check_heads(topology: Topology) -> None:
    maker = {value: s for s in topology.segments for value in s.outputs}
    holders: dict[str, str] = {}
    for head in topology.heads:
        if head.value in holders:
            raise InvalidInput(
                f"head on value {head.value!r} appears twice, with labels of {holders[head.value]!r} and of "
                f"{head.labels!r}; expected one head a value"
            )
        holders[head.value] = head.labels
        check_names("value at a head:", maker, head.value)
        if maker[head.value].role != head.role:
            raise InvalidInput(
                f"the head on {head.value!r} computes its loss at role {head.role!r}, but role "
                f"{maker[head.value].role!r} makes that value"
            )
        _check_via(topology, head)
        if head.task is not None and not isinstance(head.task, Task):
            raise InvalidInput(
                f"task={head.task!r} at {head.value!r} is not allowed; expected splitfed.classification(10)"
            )
        check_number(f"weight of the head on {head.value!r}", head.weight, low=0.0, open_low=True)


def _reads_shape_alone(segment: Segment, value: str) -> bool:
    """Return whether the graph of `segment`, if it is one, asks its input `value` for shapes and nothing else."""
    nodes = segment.module.graph.nodes if isinstance(segment.module, fx.GraphModule) else ()
    users = [user for node in nodes if node.op == "placeholder" and node.target == value for user in node.users]
    return bool(users) and all(n.target == "size" or n.args[1:] in (("shape",), ("dtype",)) for n in users)


def _check_via(topology: Topology, head: Head) -> None:
    holders = {s.role for s in topology.segments}
    check_names(f"role that passes the labels of {head.value!r} on:", holders, *head.via)
    if head.via and len(head.path) != len(head.via) + 2:
        way = " -> ".join((head.labels, *head.via, head.role))
        raise InvalidInput(f"the labels of {head.value!r} go {way}; expected every role once")


def _check_state(topology: Topology) -> None:
    """Refuse hooks on weights, tensors that two roles would share, and two tensors under one name."""
    holder: dict[int, tuple[str, str]] = {}
    named: dict[str, tuple[int, str]] = {}
    for segment in topology.segments:
        module = segment.module
        refuse_weight_hooks(module, f"segment {segment.name!r}")
        by_hand = not hasattr(type(module), "__deepcopy__")
        refuse_packed_state(module, f"segment {segment.name!r}", by_hand=by_hand)
        saved = set(module.state_dict())
        for name, tensor in state_of(module):
            full = segment.full(name)
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            role, first = holder.setdefault(id(tensor), (segment.role, full))
            if role != segment.role:
                raise InvalidInput(
                    f"{kind} {first!r} would be shared by roles {role!r} and {segment.role!r}: weights tied across a "
                    "cut cannot stay equal without crossing it; cut so that one of them holds all that read "
                    f"{first!r}, such as first and last layers by u_shaped, or tie them no longer"
                )
            if name not in saved and kind == "buffer":
                # A constant of the code, which is no state: several parties may hold copies.
                continue
            same, other = named.setdefault(full, (id(tensor), segment.name))
            if same != id(tensor):
                raise InvalidInput(
                    f"segments {other!r} and {segment.name!r} both have a {full!r}; give one of them a prefix"
                )
    for segment in topology.segments if len({s.role for s in topology.segments}) > 1 else ():
        there = (other for other in topology.segments if other.role != segment.role)
        others = ((f"{s.full(n)!r} of role {s.role!r}", tensor) for s in there for n, tensor in state_of(s.module))
        if found := find_foreign(segment.module, others):
            raise InvalidInput(
                f"segment {segment.name!r} at role {segment.role!r} leads to {found.described} by {found.label}: no "
                f"party may hold another's weights; {found.advice}"
            )
