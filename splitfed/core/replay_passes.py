"""One pass through a user's `forward`, seen operation by operation: what replay plans from and what it runs with.

An operation is a call of a function of torch, or of a submodule that no cut lies within: whatever happens inside such
a submodule counts as one. Operations are numbered from 0 in the order they run; a party and the plan agree on what is
meant by the number alone, so that a pass whose numbers differ from the plan's is refused.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from splitfed.core.attribute_reads import noting
from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import group_pairs
from splitfed.core.held_arrays import OTHERS
from splitfed.core.model_snapshot import drawn_packages, generator_states
from splitfed.core.nested_tensors import is_number, replace_tensors, tensors_of
from splitfed.core.payload import not_dense, storage_of
from splitfed.core.plain_values import same_tensors

_ACTIVE = threading.local()
_SIZES = "__len__ size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous"
ABOUT = frozenset((*_SIZES.split(), "__get__"))
"""What asks a tensor for its shape or type, which everybody knows, and for no number."""
_COMPARED = 2**17
"""Numbers of a weight or buffer up to which a pass that is recorded looks for changes by value."""
VIEWS = {getattr(Tensor, name).__get__: name for name in ("T", "mT", "H", "mH", "real", "imag", "data")}
"""Attributes that are tensors, computed when they are read."""
_COMPILED = (BuiltinFunctionType, MethodDescriptorType)
_CALLING = frozenset(("apply_", "map_", "map2_"))
"""Functions of torch that call one that they are given."""


class Stop(BaseException):
    """A party has run its last operation; no `except Exception` of the user's catches it."""


class WholeModule:
    """Stands as `forward` of a submodule that no cut lies within, and makes a call of it one operation."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path = module, path
        self._inner = vars(module).get("forward")
        self._foreign = OTHERS in vars(module)

    def standing_for(self, substitute: nn.Module) -> WholeModule:
        """Return the same for what a defense puts in the place of the submodule."""
        return WholeModule(substitute, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the submodule, as an operation of the pass at work where there is one."""
        active: list[Pass] = getattr(_ACTIVE, "passes", [])
        if not active or active[-1].inside:
            return self.run(*args, **kwargs)
        return active[-1].submodule(self, args, kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the user wrote."""
        if self._foreign:
            raise InvalidInput(
                f"submodule {self.path!r} is called by a party that does not hold it, outside of forward: "
                "a checkpoint around a cut, say, calls it again"
            )
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeModule:
        """Return one for the copy of the submodule."""
        made = memo[id(self)] = object.__new__(WholeModule)
        made.module, made._inner = copy.deepcopy(self.module, memo), copy.deepcopy(self._inner, memo)
        made.path, made._foreign = self.path, self._foreign
        return made


class AllMembers:
    """Stands as `_named_members` of a module of a party: in `forward`, what others hold is listed as well, as shapes.

    So `next(self.parameters()).device` is what the user wrote it for. Everybody else gets the party's own alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = {table: tuple(vars(module)[table]) for table in ("_parameters", "_buffers")}

    def __deepcopy__(self, memo: dict[int, Any]) -> AllMembers:
        """Return one for the copy of the module, which has the same names."""
        made = memo[id(self)] = object.__new__(AllMembers)
        made.module, made.names = copy.deepcopy(self.module, memo), self.names
        return made

    def __call__(
        self, get_members: Callable[[Any], Any], prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor, as `nn.Module._named_members` does."""
        if not getattr(_ACTIVE, "passes", []):
            yield from type(self.module)._named_members(
                self.module, get_members, prefix=prefix, recurse=recurse, remove_duplicate=remove_duplicate
            )
            return
        inner = self.module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        met: set[int] = set()
        for path, module in inner if recurse else [(prefix, self.module)]:
            names = vars(module)["_named_members"].names
            tables = {table: {name: getattr(module, name) for name in listed} for table, listed in names.items()}
            for name, tensor in get_members(SimpleNamespace(**tables)):
                if tensor is not None and not (remove_duplicate and id(tensor) in met):
                    met.add(id(tensor))
                    yield f"{path}.{name}" if path else name, tensor


def mark_whole_modules(model: nn.Module, cuts: Sequence[str]) -> None:
    """Let every call of a submodule of `model` that none of `cuts` lies within be a single operation.

    A call within such a call is a part of it.
    """
    for path, module in model.named_modules():
        if path and not any(cut.startswith(f"{path}.") for cut in cuts):
            vars(module)["forward"] = WholeModule(module, path)


class Pass(TorchFunctionMode):
    """Numbers the operations of one call of a model; a subclass says what becomes of each."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.inside = 0

    def __enter__(self) -> Any:
        """Begin."""
        if not hasattr(_ACTIVE, "passes"):
            _ACTIVE.passes = []
        _ACTIVE.passes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """End."""
        _ACTIVE.passes.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take one call of a function of torch."""
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.inside:
            return self.within(name, func, args, given)
        if name not in ABOUT:
            return self.operation(name, func, args, given, None)
        view = VIEWS.get(func) if name == "__get__" else None
        return self.read(func, args, given) if view is None else self.operation(view, func, args, given, None)

    def within(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Take a call within an operation."""
        return func(*args, **kwargs)

    def is_elsewhere(self) -> bool:
        """Return whether it goes through code of another segment than its party's."""
        return False

    def read(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Take the reading of an attribute, or of a shape."""
        return func(*args, **kwargs)

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Take the operation of number `self.number`, and count it; `module`: the submodule, if it is one."""
        raise NotImplementedError

    def submodule(self, called: WholeModule, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Take the call of a submodule as one operation; what is looked up on the way is none."""
        self.inside += 1
        try:
            return self.operation(called.path, called.run, args, kwargs, called.module)
        finally:
            self.inside -= 1

    def whole(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what `func` does as a part of the operation at work."""
        self.inside += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.inside -= 1


def in_others_code() -> bool:
    """Return whether a pass is at work that goes through code of another segment than its party's."""
    passes: list[Pass] = getattr(_ACTIVE, "passes", [])
    return bool(passes) and passes[-1].is_elsewhere()


class ArgumentTensor(NamedTuple):
    """Stands for a tensor in the arguments of an operation: its index, or its names as a weight or buffer."""

    tensor: Any


@dataclass(eq=False)
class Operation:
    """What one operation read, returned and overwrote: indices of tensors, and weights and buffers by name.

    `results`: of all tensors in what it returned, None for a weight or buffer. `deep`: whether it is a call of a
    submodule that may read a value more than once. `draws`: the packages that it drew random numbers from.
    `answer`: what it returned where that is a plain number, else nothing. `form`: what it was called with, for
    `replay_branches.same_course`.
    `alone`: whether all that it does is to change one weight or buffer by constants, as whoever holds that one can do.
    `whole`: whether it is a call of a submodule; then `given` are the tensors that it was given, and `returned` is what
    it returned.
    """

    name: str
    whole: bool = False
    deep: bool = False
    draws: frozenset[str] = frozenset()
    answer: tuple[Any, ...] = ()
    form: tuple[Any, list[Any]] = (None, [])
    reads: list[int] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    state: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    alone: bool = False
    given: list[Tensor] = field(default_factory=list)
    returned: Any = None


def _may_read_twice(module: nn.Module) -> bool:
    """Return whether `module` has submodules, or a `forward` that is not torch's."""
    return any(True for _ in module.children()) or not type(module).forward.__module__.startswith("torch.nn.")


def _is_torchs(func: Any) -> bool:
    """Return whether `func` is code of torch alone, which runs no function of the user's."""
    if isinstance(func, FunctionType):
        return func.__module__ == "torch.nn.functional"
    return isinstance(func, _COMPILED) and func.__name__ not in _CALLING


class RecordingPass(Pass):
    """A plain pass that notes every operation.

    `answers`: operation -> the number that it is taken to return, of a pass that tries what another answer leads to.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        targets: Sequence[str],
        answers: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__()
        self._answers = answers or {}
        self.operations: list[Operation] = []
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        # Kept, for one that `forward` replaces would leave its identity to another tensor.
        self._kept = [tensor for _, tensor in named]
        self._state = group_pairs((id(tensor), name) for name, tensor in named)
        self._before = [(tensor, self._contents_of(tensor)) for tensor in self._kept]
        self._memory: dict[int, tuple[list[str], Any]] = {}
        for _, tensor in named:
            self._note_memory(tensor, self._state[id(tensor)])
        self.inputs = [self._index_of(x) for x in inputs]
        self.hooks: list[RemovableHandle] = []
        """Those that it has registered in the model."""
        self.starts: dict[str, list[int]] = {target: [] for target in targets}
        """Submodule -> number of operations at the beginning of each call of it."""
        self.ends: dict[str, list[int]] = {target: [] for target in targets}
        """Submodule -> number of operations at each of its returns."""
        for target in self.ends:
            module = model.get_submodule(target)
            # Before the user's own hooks, which may compute what the submodule reads.
            begin = module.register_forward_pre_hook(
                lambda *_, target=target: self.starts[target].append(self.number), prepend=True
            )
            end = module.register_forward_hook(lambda *_, target=target: self.ends[target].append(self.number))
            self.hooks += [begin, end]

    def operation(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None) -> Any:
        """Run it, and note it."""
        noted = Operation(name, module is not None, module is not None and _may_read_twice(module))
        self.operations.append(noted)
        self.number += 1
        # What is looked up to note it is no part of the operation.
        with torch._C.DisableTorchFunction(), noting():
            given = self._note_arguments(noted, args, kwargs, module)
            before = [self._contents_of(tensor) for tensor in given]
        own = module is None and _is_torchs(func)
        states = generator_states(torch_alone=own)
        asked = self.number - 1
        returned = self._answers[asked] if asked in self._answers else self.whole(func, args, kwargs)
        noted.answer = (returned,) if is_number(returned) else ()
        noted.draws = frozenset(drawn_packages(states, generator_states(torch_alone=own)))
        with torch._C.DisableTorchFunction(), noting():
            self._note_changes(noted, given, before)
        if module is not None and noted.draws - {"torch"}:
            # Another draw may leave out what it does: what it hands through is its own, for all that follows.
            through = {id(tensor) for tensor in given} - {id(self.tensors[index]) for index in noted.writes}
            found = {i: tensor for i, tensor in enumerate(tensors_of(returned)) if id(tensor) in through}
            own_views = {i: self.whole(tensor.view_as, (tensor,), {}) for i, tensor in found.items()}
            returned = replace_tensors(returned, own_views)
        for tensor in tensors_of(returned):
            noted.results.append(None if id(tensor) in self._state else self._index_of(tensor))
        if name == "data" and module is None and id(given[0]) in self._state:
            # Another name of a weight or buffer: nothing is read yet.
            self._state[id(returned)] = self._state[id(given[0])]
            self._kept.append(returned)
            noted.state, noted.results, noted.alone = set(), [None], True
            return returned
        made = [result for result in noted.results if result is not None]
        single = noted.changed == noted.state and len({id(tensor) for tensor in given}) == 1
        noted.alone = single and module is None and not (noted.reads or made or noted.draws)
        noted.returned = returned if module is not None else None
        return returned

    def _note_arguments(
        self, noted: Operation, args: Any, kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> list[Tensor]:
        """Note what an operation is given, and return the tensors of it, with those of a submodule."""
        given = tensors_of((args, kwargs))
        for tensor in given:
            if names := self._names_of(tensor):
                noted.state |= set(names)
            else:
                noted.reads.append(self._index_of(tensor))
        leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
        noted.form = spec, [self._mark(leaf) for leaf in leaves]
        if module is None:
            return given
        own = [*module.parameters(), *module.buffers()]
        noted.state |= {found for tensor in own for found in self._state.get(id(tensor), ())}
        noted.given = list(given)
        return [*given, *own]

    def _note_changes(self, noted: Operation, given: Sequence[Tensor], before: Sequence[tuple[Any, ...]]) -> None:
        """Note which of `given` an operation has changed, by their contents before."""
        for tensor, contents in zip(given, before, strict=True):
            if _same_contents(contents, self._contents_of(tensor)):
                continue
            if id(tensor) not in self._state:
                noted.writes.append(self._index_of(tensor))
            # Of what an operation made of a weight or buffer (`n.detach()`), it is that one that changes.
            if names := self._state.get(id(tensor)) or self._names_by_memory(tensor):
                noted.changed |= set(names)
                noted.state |= set(names)
                # It may lie elsewhere now (`set_`).
                self._note_memory(tensor, names)

    def place(self) -> tuple[int, bool]:
        """Return the number of the operation at work and True, or how many have run and False."""
        return (self.number - 1, True) if self.inside else (self.number, False)

    def within(self, name: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Note what state it reads, and changes under another name (`n.data`)."""
        given = tensors_of((args, kwargs)) if self.operations else []
        versions = [version_of(tensor) for tensor in given]
        returned = func(*args, **kwargs)
        for tensor, version in zip(given, versions, strict=True):
            names = set(self._names_of(tensor))
            self.operations[-1].state |= names
            if version_of(tensor) != version:
                self.operations[-1].changed |= names
        return returned

    def changed_unseen(self) -> str | None:
        """Return the name of a weight or buffer that changed by no operation; None where there is none."""
        seen = set().union(*(operation.changed for operation in self.operations))
        changed = (t for t, contents in self._before if not _same_contents(contents, self._contents_of(t)))
        return next((name for tensor in changed for name in self._state[id(tensor)] if name not in seen), None)

    def index(self, tensor: Tensor) -> int | None:
        """Return the index of a tensor that was met, None for any other."""
        return self._index.get(id(tensor))

    def _mark(self, leaf: Any) -> Any:
        """Return `leaf`, or where it is a tensor its index, or its names as a weight or buffer."""
        if not isinstance(leaf, Tensor):
            return leaf
        return ArgumentTensor(self._names_of(leaf) or self._index_of(leaf))

    def _names_of(self, tensor: Tensor) -> Sequence[str]:
        """Return the names of a weight or buffer, of one that is met as `n.data` too; none for another tensor."""
        if id(tensor) not in self._state and id(tensor) not in self._index and (names := self._names_by_memory(tensor)):
            self._state[id(tensor)] = list(names)
            self._kept.append(tensor)
        return self._state.get(id(tensor), ())

    def _names_by_memory(self, tensor: Tensor) -> Sequence[str]:
        """Return the names of the weights and buffers that lie where `tensor` does."""
        return self._memory[key][0] if (key := storage_of(tensor)) in self._memory else ()

    def _note_memory(self, tensor: Tensor, names: Sequence[str]) -> None:
        """Note that the weight or buffer `names` lies where `tensor` does; its memory is kept."""
        if key := storage_of(tensor):
            known, _ = self._memory.setdefault(key, ([], tensor.untyped_storage()))
            known += [name for name in names if name not in known]

    def _contents_of(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return what tells whether `tensor` is overwritten: its version, and of weights and buffers more.

        `n.data`, and NumPy, are written without a new version of `n`; what is too large to be compared here shows in
        the comparison with the uncut model.
        """
        if id(tensor) not in self._state or not_dense(tensor) or tensor.is_meta:
            return (version_of(tensor),)
        kept = tensor.detach().clone() if tensor.numel() <= _COMPARED else None
        return version_of(tensor), tensor.data_ptr(), kept

    def _index_of(self, tensor: Tensor) -> int:
        """Return the index of `tensor`, which is kept, so that no other gets its identity."""
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._index[id(tensor)]


def _same_contents(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether `RecordingPass` has found a tensor as it was."""
    if before[:2] != after[:2] or len(before) < 3 or before[2] is None:
        return before[:2] == after[:2]
    return same_tensors(before[2], after[2])


def version_of(tensor: Tensor) -> int:
    """Return how often `tensor` was overwritten; 0 for one of inference mode, which is not counted."""
    return 0 if tensor.is_inference() else tensor._version
