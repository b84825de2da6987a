"""Classification by the nearest class prototype, as a segment of its own beside the embedding.

The class scores of a row are the negative Euclidean distances of its embedding to the prototypes (Tan et al., FedProto,
AAAI 2022, section "Global prototype aggregation", the inference of a class by argmin). The prototypes are buffers of
the segment: they learn from no gradient, and a method replaces them as it learns of new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Head, Segment, Topology
from splitfed.federated.topology_values import making_segment

NAME = "nearest_prototype"
"""The segment that classifies, and the value that it returns."""


class NearestPrototype(nn.Module):
    """Class scores of embeddings (rows, ...), (rows, classes); with one output that of class 1 over class 0, (rows, 1).

    `classes`: how many there are, at least two; `width`: numbers of an embedding; `outputs`: classes, or 1 for two of
    them. A class without a prototype scores one less than the lowest of the others; without any all score zero.
    """

    def __init__(self, classes: int, width: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.prototypes: Tensor
        self.known: Tensor
        self.register_buffer("prototypes", torch.zeros(classes, width))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def forward(self, z: Tensor) -> Tensor:
        """Return the scores."""
        # Predictions teach nothing: what is learnt from prototypes is a term of the embedding's loss.
        scores = -(z.detach().flatten(1).unsqueeze(1) - self.prototypes.to(z.dtype)).square().sum(2).sqrt()
        lowest = torch.where(self.known, scores, scores.new_zeros(())).amin(1, keepdim=True) - 1
        scores = torch.where(self.known, scores, lowest * self.known.any())
        return scores[:, 1:] - scores[:, :1] if self.outputs == 1 else scores


def add_nearest_prototype(topology: Topology, value: str, head: Head, classes: int, width: int) -> Topology:
    """Return `topology` with predictions by the nearest prototype of the embedding `value` in place of `head`.

    What stands between the embedding and the output of `head` then serves training alone.
    """
    if any(segment.name == NAME for segment in topology.segments):
        raise InvalidInput(f"fedproto calls the segment of its predictions {NAME!r}; rename that of the topology")
    role = making_segment(topology, value).role
    assert head.task is not None
    module = NearestPrototype(classes, width, 1 if head.task.name == "binary" else classes)
    answer = replace(head, value=NAME, role=role, weight=1.0, via=(), task=head.task.with_loss(no_loss))
    kept = set(topology.makers((value,)))
    return replace(
        topology,
        segments=(*topology.segments, Segment(NAME, role, module, (value,), (NAME,))),
        heads=(answer, *topology.heads),
        training_only=topology.training_only | (set(topology.makers((head.value,))) - kept),
    )


def no_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return zero, a scalar, with a gradient of zeros: the loss of predictions that nothing learns from."""
    return outputs.sum() * 0.0


def prototype_buffers(topology: Topology, prototypes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers of the segment that classifies by `prototypes`, class -> (width,), as `adopt` takes them."""
    module = topology.segment(NAME).module
    assert isinstance(module, NearestPrototype)
    rows, known = torch.zeros_like(module.prototypes), torch.zeros_like(module.known)
    for name, row in prototypes.items():
        rows[int(name)], known[int(name)] = row.to(rows), True
    return {f"{NAME}/prototypes": rows, f"{NAME}/known": known}
