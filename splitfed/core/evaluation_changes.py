"""What passes in evaluation mode change of a module, and how it is left as it was.

Nobody learns from a prediction or a score, so none may move what a party trains; but an embedding with `max_norm`
writes into its weights at every call, and an observer of quantization into its buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from splitfed.core.model_snapshot import ModelSnapshot
from splitfed.core.plain_values import same_tensors
from splitfed.core.reachable import put_back
from splitfed.core.state_round_trip import stored_tensors
from splitfed.core.unsaved_state import first_state, state_digests


class StateWatch:
    """Tells whether `module` holds what it held when this was made: a copy of `like`, which nobody has run since."""

    def __init__(self, module: nn.Module, like: nn.Module) -> None:
        self._module, self._like = module, like
        self._digests = first_state(like)
        self._versions = {name: (id(tensor), tensor._version) for name, tensor in stored_tensors(module)}

    def changed(self) -> bool:
        """Return whether a weight, a buffer, or anything else that hangs on the module was written."""
        now, first = dict(stored_tensors(self._module)), dict(stored_tensors(self._like))
        # `tensor.data` is written without a new version.
        return (
            {name: (id(tensor), tensor._version) for name, tensor in now.items()} != self._versions
            or not all(same_tensors(first[name], tensor) for name, tensor in now.items())
            or state_digests(self._module) != self._digests
        )


@contextmanager
def left_as_they_were(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back weights, buffers and all else that hangs on `modules`, however the block ends."""
    snapshots = [ModelSnapshot(module, code=False) for module in modules]
    try:
        yield
    finally:
        for snapshot in snapshots:
            put_back(snapshot.records)
            snapshot.restore_tensors()
