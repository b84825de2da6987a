"""The messages of an encrypted run and its operations on ciphertexts, computed from shapes alone, for plans.

Messages are counted exactly. The size of a ciphertext is the average for its parameters and level: SEAL compresses what
it writes, and single ciphertexts deviate by less than 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from splitfed.core.topology import Edge, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import value_bytes
from splitfed.encryption.ciphertext_counts import CiphertextCounter, CiphertextOperation, CiphertextShape
from splitfed.encryption.ciphertexts import BATCH, ROWS
from splitfed.encryption.parameter_fit import parameters_of, programs_of
from splitfed.encryption.server_program import ForwardPass, packed_width, row_features
from splitfed.encryption.settings import CONSTANT_MASK, MASKED_WEIGHTS, PLAIN_GRADIENT, settings_of


class EncryptedMessage(NamedTuple):
    """Message of a step between two roles: its bytes of ciphertexts, and its bytes of plain numbers.

    `ahead`: whether a forward pass without a training step sends it too.
    """

    kind: str
    sender: str
    receiver: str
    ciphertext_bytes: int
    plain_bytes: int = 0
    ahead: bool = False

    @property
    def bytes(self) -> int:
        """Total bytes of the message."""
        return self.ciphertext_bytes + self.plain_bytes


class EncryptedStep(NamedTuple):
    """A training step: its messages, in an order that does not depend on the number of rows, and its operations."""

    messages: tuple[EncryptedMessage, ...]
    operations: Mapping[CiphertextOperation, int]


class EncryptedSteps:
    """The steps of a replica of `topology`, which validation has completed; `facts`: those of the topology."""

    def __init__(self, topology: Topology, facts: TopologyFacts) -> None:
        self._topology, self._facts = topology, facts
        self._settings = settings_of(topology.computation)
        self.parameters = parameters_of(topology)
        self._programs = programs_of(topology, facts)
        self._steps: dict[int, EncryptedStep] = {}

    def step(self, rows: int) -> EncryptedStep:
        """Return the messages and operations of a training step of `rows` >= 1 rows."""
        if rows not in self._steps:
            self._steps[rows] = self._count(rows)
        return self._steps[rows]

    def size(self, number: int, rows: int) -> int:
        """Return the bytes of message `number` of a step of `rows` rows."""
        return self.step(rows).messages[number].bytes

    def _count(self, rows: int) -> EncryptedStep:
        counter = CiphertextCounter(self.parameters)
        made = self._walk(counter, rows)
        messages = [m for edge in self._topology.crossings for m in self._messages(counter, edge, made, rows)]
        return EncryptedStep(tuple(messages), {one: times for one, times in counter.operations.items() if times})

    def _walk(self, counter: CiphertextCounter, rows: int) -> dict[tuple[str, str], CiphertextShape]:
        """Return the server's encrypted results, by (kind, value): activations, and gradients if encrypted."""
        made: dict[tuple[str, str], CiphertextShape] = {}
        passes: dict[str, ForwardPass[CiphertextShape]] = {}
        for name, program in self._programs.items():
            segment = self._topology.segment(name)
            shapes = [made.get(("activation", v)) or self._fresh(name, v, rows) for v in segment.inputs]
            done = passes[name] = program.forward(counter, *shapes)
            results = zip(segment.outputs, (done.result, done.inner), strict=False)
            made |= {("activation", value): shape for value, shape in results if shape is not None}
        for name in reversed(self._programs) if not self._settings.leaks else ():
            self._walk_back(counter, name, made, passes[name], rows)
        return made

    def _walk_back(
        self,
        counter: CiphertextCounter,
        name: str,
        made: dict[tuple[str, str], CiphertextShape],
        done: ForwardPass[CiphertextShape],
        rows: int,
    ) -> None:
        """Add the gradients of the inputs of the server's segment `name` to `made`."""
        segment, program = self._topology.segment(name), self._programs[name]
        leaving = [edge for edge in self._topology.crossings if edge.source == name]
        sent = {value for edge in leaving for value in self._facts.returned(self._topology, edge)}
        slopes: list[CiphertextShape] = []
        for value in segment.outputs:
            arrived = [self._fresh(name, value, rows)] if value in sent else []
            # Gradients of values that pass between the server's own segments are not sent.
            found = [*arrived, *([made["gradient", value]] if ("gradient", value) in made else [])]
            slopes += [found[0] if len(found) == 1 else counter.add(*found)] if found else []
        if not slopes:
            return
        gradients = zip(segment.inputs, program.send_back(counter, done, *slopes), strict=False)
        for value, shape in ((value, shape) for value, shape in gradients if shape is not None):
            known = made.get(("gradient", value))
            made["gradient", value] = shape if known is None else counter.add(known, shape)

    def _messages(
        self, counter: CiphertextCounter, edge: Edge, made: Mapping[tuple[str, str], CiphertextShape], rows: int
    ) -> Iterator[EncryptedMessage]:
        """Yield the messages on `edge` in a step."""
        source, target = self._topology.role_of(edge.source), self._topology.role_of(edge.target)
        ahead = not self._topology.serving.isdisjoint(self._topology.readers(edge))
        returned = self._facts.returned(self._topology, edge)
        plain = sum(value_bytes(self._facts, value) for value in returned) * rows if self._settings.leaks else 0
        masks = self._settings.protocol == CONSTANT_MASK
        if source in self._settings.holders:
            sealed = sum(counter.send_fresh(self._fresh(edge.target, value, rows)) for value in edge.values)
            if masks:
                sealed += sum(counter.send_fresh(self._transposed(value, rows)) for value in edge.values)
            yield EncryptedMessage("activation", source, target, sealed, ahead=ahead)
            back = 0 if plain else sum(counter.send_back(made["gradient", value]) for value in returned)
        else:
            sealed = sum(counter.send_back(made["activation", value]) for value in edge.values)
            yield EncryptedMessage("activation", source, target, sealed, ahead=ahead)
            back = 0 if plain else sum(counter.send_fresh(self._fresh(edge.source, v, rows)) for v in returned)
            plain += self._beside(edge.source) if returned and not masks and self._settings.leaks else 0
        if returned:
            yield EncryptedMessage("gradient", target, source, back, plain)
        if returned and masks and source not in self._settings.holders:
            yield from self._masked_weights(counter, edge.source, target, rows)

    def _masked_weights(
        self, counter: CiphertextCounter, segment: str, holder: str, rows: int
    ) -> Iterator[EncryptedMessage]:
        """Yield the message with the masked weights to the key holder, and the one with the decrypted weights back."""
        server, (given,) = self._topology.segment(segment).role, self._topology.segment(segment).inputs
        results = self._features(self._topology.segment(segment).outputs[0])
        # The gradients of the rows are unknown in a plan: none is taken to be zero.
        stepped = counter.linear(self._transposed(given, rows), torch.ones(results, rows))
        yield EncryptedMessage(MASKED_WEIGHTS, server, holder, counter.send_back(stepped))
        numbers = results * self._features(given)
        yield EncryptedMessage(MASKED_WEIGHTS, holder, server, 0, numbers * torch.float32.itemsize)

    def _beside(self, segment: str) -> int:
        """Return the bytes of the gradients of weight and bias that the key holder sends with that of the result."""
        assert self._settings.protocol == PLAIN_GRADIENT
        (given,), (result,) = self._topology.segment(segment).inputs, self._topology.segment(segment).outputs
        return self._features(result) * (self._features(given) + 1) * self._facts.dtypes[result].itemsize

    def _fresh(self, segment: str, value: str, rows: int) -> CiphertextShape:
        """Return the shape of `value` as the key holder encrypts it for the server's `segment`."""
        layout = self._settings.layout
        width = packed_width(self._topology.segment(segment), self._facts.shapes) if layout == ROWS else 0
        return CiphertextShape(layout, rows, self._features(value), self.parameters.depth, width)

    def _transposed(self, value: str, rows: int) -> CiphertextShape:
        return CiphertextShape(BATCH, self._features(value), rows, self.parameters.depth)

    def _features(self, value: str) -> int:
        return row_features(self._facts.shapes[value])
