"""Estimated seconds of a batch of an encrypted run on this machine: operation counts times measured unit costs.

Unit costs are CPU time of one thread, the minimum of a few repetitions with temporary keys; they are measured once a
process for each set of parameters, in a fraction of a second, and hold only for the machine on which they were
measured. Arithmetic on plain numbers, and Python's overhead, are left out.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.backend import from_bytes, import_seal, import_tenseal, to_bytes
from splitfed.encryption.ciphertext_counts import (
    CIPHERTEXT_PRODUCT,
    DECRYPTION,
    ENCRYPTION,
    LOADING,
    NUMBER_PRODUCT,
    PACKED_PRODUCT,
    PACKED_WEIGHTS,
    RESCALING,
    ROTATION,
    SAVING,
    CiphertextOperation,
)
from splitfed.encryption.flows import EncryptedSteps
from splitfed.encryption.keys import KeyHolder, make_keys
from splitfed.encryption.parameters import CkksParameters
from splitfed.encryption.settings import settings_of

_REPEATS = 3


def estimate_batch(topology: Topology, facts: TopologyFacts, rows: int) -> dict[str, Any]:
    """Return the cost of a batch of `rows` rows of a client with this topology and its `facts`.

    "bytes" of its messages, of ciphertexts within 1 %; "messages": one entry each, with bytes of ciphertexts and of
    plain numbers; "operations": kind -> count; "seconds": the estimate, None without the package tenseal; "machine":
    the machine on which unit costs were measured.
    """
    settings, steps = settings_of(topology.computation), EncryptedSteps(topology, facts)
    step = steps.step(rows)
    operations: Counter[str] = Counter()
    for operation, times in step.operations.items():
        operations[operation.kind] += times
    return {
        "protocol": settings.protocol,
        "parameters": settings.parameters,
        "layout": settings.layout,
        "keys": settings.keys,
        "key_holder": ", ".join(settings.holders),
        "rows": rows,
        "bytes": sum(message.bytes for message in step.messages),
        "messages": [
            {
                "kind": message.kind,
                "sender": message.sender,
                "receiver": message.receiver,
                "ciphertext_bytes": message.ciphertext_bytes,
                "plain_bytes": message.plain_bytes,
            }
            for message in step.messages
        ],
        "operations": dict(operations),
        "seconds": estimate_seconds(steps.parameters, step.operations),
        "machine": f"one thread of {platform.processor() or platform.machine()}, {platform.system()}",
    }


def estimate_seconds(parameters: CkksParameters, operations: Mapping[CiphertextOperation, int]) -> float | None:
    """Return the CPU time of `operations` on this machine, in seconds; None where TenSEAL is not installed."""
    try:
        import_tenseal()
    except InvalidInput:
        return None
    costs = unit_seconds(parameters, frozenset(operations))
    return sum(costs[operation] * times for operation, times in operations.items())


@lru_cache(maxsize=64)
def unit_seconds(
    parameters: CkksParameters, operations: frozenset[CiphertextOperation]
) -> Mapping[CiphertextOperation, float]:
    """Return the CPU time of each of `operations` on this machine, in seconds; needs TenSEAL."""
    rotations = any(operation.kind == ROTATION for operation in operations)
    workload = _Workload(make_keys(parameters, rotations=rotations))
    return {operation: _least(workload.of(operation)) for operation in sorted(operations)}


def _least(work: Callable[[], object]) -> float:
    """Return the minimum CPU time of `work` in seconds, which has been done once before."""
    work()
    found = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


class _Workload:
    """One operation of each kind on ciphertexts under temporary keys, as `splitfed.encryption` computes it."""

    def __init__(self, keys: KeyHolder) -> None:
        self._keys, self._context = keys, keys.public
        self._seal = import_seal()
        self._scale = 2.0**keys.parameters.scale_bits
        self._numbers = [0.5] * keys.parameters.slots

    def of(self, operation: CiphertextOperation) -> Callable[[], object]:
        """Return a function that does `operation` once."""
        evaluator, seal = self._context.evaluator, self._seal
        if operation.kind == ENCRYPTION:
            return self._encrypt
        ciphertext, result = self._ciphertext(operation.level), seal.Ciphertext()
        level = self._context.levels[operation.level]
        prime = float(level.last_prime)
        product = seal.Ciphertext()
        if operation.kind == DECRYPTION:
            return lambda: self._decrypt(ciphertext)
        if operation.kind == SAVING:
            return lambda: to_bytes(ciphertext)
        if operation.kind == LOADING:
            content = to_bytes(ciphertext)
            return lambda: from_bytes(seal.Ciphertext(), self._context.seal_context, content)
        if operation.kind == PACKED_WEIGHTS:
            return lambda: self._encode(self._numbers, level.parms_id, prime)
        if operation.kind == NUMBER_PRODUCT:
            return lambda: self._multiply(ciphertext, self._encode(0.5, level.parms_id, prime), result, product)
        packed = self._encode(self._numbers, level.parms_id, prime)
        if operation.kind == PACKED_PRODUCT:
            return lambda: self._multiply(ciphertext, packed, result, product)
        if operation.kind == RESCALING:
            evaluator.multiply_plain(ciphertext, packed, product)
            return lambda: evaluator.rescale_to_next(product, result)
        if operation.kind == ROTATION:
            return lambda: evaluator.rotate_vector(ciphertext, 1, self._context.rotation_keys, result)
        assert operation.kind == CIPHERTEXT_PRODUCT
        return lambda: self._square(ciphertext, result)

    def _ciphertext(self, level: int) -> Any:
        found = self._encrypt()
        for _ in range(self._keys.parameters.depth - level):
            self._context.evaluator.mod_switch_to_next_inplace(found)
        return found

    def _encrypt(self) -> Any:
        plaintext, ciphertext = self._seal.Plaintext(), self._seal.Ciphertext()
        self._context.encoder.encode(self._numbers, self._scale, plaintext)
        self._context.make_encryptor().encrypt(plaintext, ciphertext)
        return ciphertext

    def _decrypt(self, ciphertext: Any) -> Iterable[float]:
        plaintext = self._seal.Plaintext()
        self._keys.decryptor.decrypt(ciphertext, plaintext)
        numbers: Iterable[float] = self._context.encoder.decode_double(plaintext)
        return numbers

    def _encode(self, numbers: Any, parms_id: Any, scale: float) -> Any:
        plaintext = self._seal.Plaintext()
        self._context.encoder.encode(numbers, parms_id, scale, plaintext)
        return plaintext

    def _multiply(self, ciphertext: Any, plaintext: Any, result: Any, total: Any) -> None:
        """Multiply, and add the product to a sum."""
        self._context.evaluator.multiply_plain(ciphertext, plaintext, result)
        self._context.evaluator.add(result, result, total)

    def _square(self, ciphertext: Any, result: Any) -> None:
        self._context.evaluator.square(ciphertext, result)
        self._context.evaluator.relinearize_inplace(result, self._context.relinearization_keys)
        self._context.evaluator.rescale_to_next_inplace(result)
