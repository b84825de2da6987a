"""Estimated seconds of a batch of an encrypted run on this machine: operation counts times measured unit costs.

Unit costs are CPU time of one thread, the minimum of a few repetitions with temporary keys; they are measured once a
process for each set of parameters, in a fraction of a second, and hold only for the machine on which they were
measured. Arithmetic on plain numbers, and Python's overhead, are left out.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.encryption.arithmetic import finish_product
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
    keys = make_keys(parameters, rotations=any(operation.kind == ROTATION for operation in operations))
    return {operation: _least(_workload(keys, operation)) for operation in sorted(operations)}


def _least(work: Callable[[], object]) -> float:
    """Return the minimum CPU time of `work` in seconds, which has been done once before."""
    work()
    found = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def _workload(keys: KeyHolder, operation: CiphertextOperation) -> Callable[[], object]:
    """Return a function that does `operation` once under temporary `keys`, as `splitfed.encryption` computes it."""
    seal, context, parameters = import_seal(), keys.public, keys.parameters
    evaluator, level = context.evaluator, context.levels[operation.level]
    numbers = [0.5] * parameters.slots

    def encode(values: Any, *at: Any) -> Any:
        plaintext = seal.Plaintext()
        context.encoder.encode(values, *at, plaintext)
        return plaintext

    def encrypt() -> Any:
        ciphertext = seal.Ciphertext()
        context.make_encryptor().encrypt(encode(numbers, 2.0**parameters.scale_bits), ciphertext)
        return ciphertext

    ciphertext, result, total = encrypt(), seal.Ciphertext(), seal.Ciphertext()
    for _ in range(parameters.depth - operation.level):
        evaluator.mod_switch_to_next_inplace(ciphertext)
    at_level = level.parms_id, float(level.last_prime)
    # At level 0 nothing is multiplied: the scale is exhausted.
    packed = encode(numbers, *at_level) if operation.level else None
    content = to_bytes(ciphertext)
    if operation.kind == RESCALING:
        evaluator.multiply_plain(ciphertext, packed, total)

    def decrypt() -> None:
        plaintext = seal.Plaintext()
        keys.decryptor.decrypt(ciphertext, plaintext)
        context.encoder.decode_double(plaintext)

    def multiply(plaintext: Any) -> None:
        """Multiply, and add the product to a sum."""
        evaluator.multiply_plain(ciphertext, plaintext, result)
        evaluator.add(result, result, total)

    def square() -> None:
        evaluator.square(ciphertext, result)
        finish_product(context, result)

    works: dict[str, Callable[[], object]] = {
        ENCRYPTION: encrypt,
        DECRYPTION: decrypt,
        SAVING: lambda: to_bytes(ciphertext),
        LOADING: lambda: from_bytes(seal.Ciphertext(), context.seal_context, content),
        PACKED_WEIGHTS: lambda: encode(numbers, *at_level),
        NUMBER_PRODUCT: lambda: multiply(encode(0.5, *at_level)),
        PACKED_PRODUCT: lambda: multiply(packed),
        RESCALING: lambda: evaluator.rescale_to_next(total, result),
        ROTATION: lambda: evaluator.rotate_vector(ciphertext, 1, context.rotation_keys, result),
        CIPHERTEXT_PRODUCT: square,
    }
    return works[operation.kind]
