"""How tensors lie in memory, copies of tensors and modules that bring nothing else along, and rows that are finite.

What a message may carry is in `splitfed.core.messages`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.grouping import group_pairs, overlapping
from splitfed.core.module_copies import copy_computed, deep_copy

_LINE = 64
"""Bytes to which an allocation is aligned, at least; kernels round differently at another place within them."""


class Layout(NamedTuple):
    """How a tensor lay in its storage: the strides, and how many numbers after an aligned address it began.

    Matrix products round differently for rows that lie apart. A receiver that lays a copy out alike computes what the
    sender would have, to the last bit.
    """

    strides: tuple[int, ...]
    lead: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return how a dense `tensor` lies in its storage."""
        return cls(tuple(tensor.stride()), tensor.data_ptr() % _LINE // tensor.element_size())

    def reach(self, shape: Sequence[int]) -> int:
        """Return how many elements of memory a tensor of `shape` spans in this layout, gaps and `lead` included."""
        return self.lead + 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))

    def lay_out(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor`, of its shape, whose memory has these strides and zeros in the gaps; detached.

        Numbers that lay in one place (`expand`) lie in one place again; if they are no longer equal, as after somebody
        has tampered with them, `tensor` itself is returned.
        """
        memory = tensor.new_zeros(self.reach(tensor.shape))
        placed = memory.as_strided(tensor.shape, self.strides, self.lead)
        if extent(tensor.shape, self.strides):
            return placed.copy_(tensor).detach()
        # Without the repetitions of `expand`, numbers seldom share a place.
        once = tensor[tuple(slice(None) if stride else slice(1) for stride in self.strides)]
        if extent(once.shape, self.strides):
            memory.as_strided(once.shape, self.strides, self.lead).copy_(once)
        else:
            places = torch.arange(len(memory), device=memory.device).as_strided(once.shape, self.strides, self.lead)
            memory[places.flatten()] = once.flatten()
        return placed.detach() if torch.equal(placed, tensor) else tensor


def layout_of(tensor: Tensor) -> Layout | None:
    """Return how a dense `tensor` lies in its storage; None where a copy lies alike."""
    if not tensor.numel():
        return None
    found = Layout.of(tensor)
    return None if found.lead == 0 and extent(tensor.shape, tensor.stride()) == tensor.numel() else found


def copy_nested(value: Any) -> Any:
    """Return `value` with copies of the tensors and modules in it, in mappings, lists and tuples as well."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, nn.Module):
        return copy_modules({"": value})[""]
    if isinstance(value, Mapping):
        return {name: copy_nested(inner) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copy_nested(inner) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(copy_nested(inner) for inner in value)
    return value


def copy_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return deep copies; what shares weights goes on sharing them, and no tensor brings a larger storage along."""
    memo: dict[int, Any] = {}
    for module in modules.values():
        memo |= copy_computed(module)
    copies = deep_copy(dict(modules), modules.values(), memo)
    # A parameter's copy is as small as it is; a buffer's, or another tensor's, is a copy of its whole storage.
    holders = {id(m): m for module in copies.values() for m in module.modules()}.values()
    tensors_of_storage = group_pairs(
        (tensor.untyped_storage().data_ptr(), tensor)
        for tensor in {id(t): t for m in holders for t in _tensors(m)}.values()
        if not_dense(tensor) is None and tensor.numel() and tensor.data_ptr()
    )
    for sharing in tensors_of_storage.values():
        nbytes = sum(t.nbytes for t in sharing)
        # Two that share a number are one on purpose.
        if nbytes != sharing[0].untyped_storage().nbytes() and not overlapping(_spans(sharing)):
            for tensor in sharing:
                tensor.data = tensor.detach().clone()
    return copies


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    for group in (module._parameters, module._buffers, vars(module)):
        yield from (t for t in group.values() if isinstance(t, Tensor))


def _spans(tensors: Iterable[Tensor]) -> Iterable[tuple[int, int, int]]:
    return [(*span, number) for number, one in enumerate(tensors) if (span := memory_span(one)) is not None]


def memory_span(tensor: Tensor) -> tuple[int, int] | None:
    """Return between which addresses the numbers of a dense `tensor` lie; None for another, and for one without any."""
    if not storage_of(tensor) or not tensor.numel():
        return None
    start = tensor.data_ptr()
    return start, start + Layout(tensor.stride(), 0).reach(tensor.shape) * tensor.element_size()


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory lie between the first and the last number of `shape`, both included.

    `strides`: in elements, one for each dimension. 0 where two numbers may share one element."""
    reach = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return 0
        reach += (size - 1) * stride
    return reach


def not_dense(tensor: Tensor) -> str | None:
    """Return what kind of tensor it is where its numbers do not lie in one storage; None for a dense one."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    return None if tensor.layout is torch.strided else "sparse" if "sparse" in str(tensor.layout) else "packed"


def storage_of(tensor: Tensor) -> int:
    """Return where the storage of `tensor` lies; 0 for one that has none of its own."""
    try:
        return 0 if not_dense(tensor) or tensor.is_meta else tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        # Of a transform of torch.func.
        return 0


def finite_rows(z: Tensor) -> Tensor:
    """Return which rows of `z` (rows, ...) hold nothing but finite numbers: (rows,) of bool."""
    return torch.isfinite(z).reshape(len(z), -1).all(1)


def infinite_rows(z: Tensor) -> int:
    """Return how many rows of `z` (rows, ...) hold a number that is not finite; none where there are no numbers."""
    return 0 if z.is_meta else len(z) - int(finite_rows(z).sum())


def without_infinite_rows(z: Tensor) -> Tensor:
    """Return `z` (rows, ...) with zeros in place of every row that holds a number that is not finite.

    Such a row would pass any clipping and tell itself apart from all others.
    """
    fine = finite_rows(z)
    if bool(fine.all()):
        return z
    return torch.where(fine.view(-1, *[1] * (z.dim() - 1)), z, torch.zeros_like(z))
