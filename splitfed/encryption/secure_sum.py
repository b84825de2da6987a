"""A secure sum by encryption under CKKS: the server adds ciphertexts, and one client decrypts their sum.

All messages are sent once it is known which clients have finished, so that a client that drops out earlier cannot
interrupt the sum. The first of the clients that finished is the key holder: it makes a key pair for this sum only, and
sends the public context to the server, which forwards it to the others. The secret key never leaves the key holder, and
is deleted after the sum: a resumed run makes new keys, and there is no key file. Then:

1. Every client encrypts its weight, the server adds, the key holder decrypts the total weight and sends it to the
   server, which sends it to the others.
2. Every client encrypts its tensors times its share of that weight, rounded to multiples of 2^-bits; the server adds
   and sends the sum to the key holder, which decrypts the mean, rounds it to such multiples and sends it to the server.

Shares add up to one, so that the mean of numbers up to `limit` in magnitude never exceeds it, and the scale is as large
as `limit` allows. As every client rounds before it encrypts, the key holder's rounding removes the whole error of
decryption, and the mean is the same in every run, whatever the keys. It differs from the mean before rounding by at
most n 2^-(bits + 1) for n clients, and then by the rounding of its own type.

Who sees what, beside sizes and who has finished:

| party | sees |
|---|---|
| aggregation server | ciphertexts, the public context, the total weight, and the mean, which schedules let it hold |
| key holder | the mean and the total weight, which the server sends to all clients anyway |
| other clients | the public context and the total weight |

A client that receives the mean can compute from it and its own upload the weighted sum of the others': of two clients,
the upload of the other. A key holder that colludes with the server reads every upload. Other clients that collude learn
no more than the sum over the remaining ones, as with masks. The server is honest but curious: a malicious one could
distribute keys of its own, or have a single upload decrypted as if it were the sum.

Each number takes one slot, 2048 in a ciphertext. Degree and moduli are those of the preset `sums`; the scale is as
large as the largest magnitude of a sum allows: 2^46 for 64.

Vectors are encrypted as multiples of a step that exceeds twice the stated error of their sum, so that the key holder
rounds the decrypted sum to the correct multiple. The result is then the sum of the encrypted numbers, without the error
of decryption, from which anyone with the ciphertexts could compute the key (Li, Micciancio, "On the security of
homomorphic encryption on approximate numbers", EUROCRYPT 2021). One number in seven billion has an error beyond the
stated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, require_count
from splitfed.encryption.arithmetic import add
from splitfed.encryption.backend import import_tenseal, make_context
from splitfed.encryption.ciphertexts import SLOTS, EncryptedTensor, decrypt, encrypt, load_ciphertexts, message_bytes
from splitfed.encryption.keys import KeyHolder, PublicContext, from_uint8, load_public_context, to_uint8
from splitfed.encryption.noise import TAIL
from splitfed.encryption.parameters import PRESETS, CkksParameters, padded_bytes
from splitfed.secure_sum.base import Carrier, Flow, SecureSumPlan, restore

TOTAL_WEIGHT = 2.0**31
"""Largest allowed sum of the weights of all clients."""

WHOLE = 2.0**-14
"""Whole numbers, such as counts of batches, are encrypted in this unit; they may reach 2^14 times the limit."""


_HEADER_BYTES = 512
"""Room for the header of a public context, and for TenSEAL's frame of the key in it: 320 bytes."""


@dataclass(frozen=True, kw_only=True)
class EncryptedSum(SecureSumPlan):
    """Parameters of a secure sum under CKKS; see `SecureSumPlan`.

    More bits and a larger limit allow fewer clients; values with which the error of decryption could reach half a digit
    are refused.
    """

    sums: ClassVar[frozenset[str]] = frozenset(("encrypted", "mean"))
    overhead: ClassVar[frozenset[str]] = frozenset(("encrypted weight", "total weight"))

    bits: int = field(default=26, metadata=require_count("secure bits", low=1))

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for parameters without room for a sum or for its noise."""
        super().__post_init__()
        self._check_noise(2)

    @property
    def parameters(self) -> CkksParameters:
        """The CKKS parameters of the sum, at the largest scale that `limit` allows."""
        return sum_parameters(self.limit)

    def precision(self, members: int) -> float:
        """Return the largest error of a mean over `members` clients, before rounding to its own type."""
        return members * 2.0 ** -(self.bits + 1)

    def check(self, asked: int) -> None:
        """Raise `InvalidInput` for too few clients, and for more than the scale allows."""
        super().check(asked)
        self._check_noise(asked)

    def check_weights(self, weights: Iterable[float]) -> None:
        """Raise `InvalidInput` for weights in the mean that are not whole numbers, or add up to more than 2^31."""
        weight_list = list(weights)
        super().check_weights(weight_list)
        if sum(weight_list) > TOTAL_WEIGHT:
            raise InvalidInput(
                f"weights of {int(sum(weight_list))} in all are not allowed in a secure sum; expected 2^31 at most"
            )

    def start(
        self, names: Mapping[int, str], seed: int, purpose: Sequence[str | int], carrier: Carrier
    ) -> EncryptedSummation:
        """Return one sum with new keys, which no seed reproduces; raise `InvalidInput` if TenSEAL is not installed."""
        import_tenseal()
        return EncryptedSummation(self, names, carrier)

    def setup_flows(self, members: Sequence[int], name: Callable[[int], str], server: str) -> Iterator[Flow]:
        """Return no flow: this sum sends nothing before it is known which clients have finished."""
        return iter(())

    def upload_flows(
        self, members: Sequence[int], survivors: Sequence[int], numbers: int, name: Callable[[int], str], server: str
    ) -> Iterator[Flow]:
        """Yield the messages with the public context, weights, ciphertexts, their sums and the mean."""
        holder, others = name(survivors[0]), [name(number) for number in survivors[1:]]
        public = public_context_bytes(self.parameters)
        yield "public context", holder, server, public
        for other in others:
            yield "public context", server, other, public
        for kind, count in (("encrypted weight", 1), ("encrypted", numbers)):
            size = message_bytes(self.parameters, SLOTS, (1, count))
            for sender in (holder, *others):
                yield kind, sender, server, size
            yield kind, server, holder, size
            yield "total weight" if kind == "encrypted weight" else "mean", holder, server, 8 * count
            for other in others if kind == "encrypted weight" else ():
                yield "total weight", server, other, 8

    def encode(self, tensors: Mapping[str, Tensor], sender: str) -> Tensor:
        """Return `tensors`, flattened and joined, in double precision: (numbers,).

        Raises `InvalidInput`, naming the `sender`, for numbers beyond the limit.
        """
        parts = []
        for name, tensor in tensors.items():
            flat, real = tensor.detach().cpu().flatten(), tensor.is_floating_point()
            numbers = flat.double() if real else flat.double() * WHOLE
            size = float(numbers.abs().max()) if len(flat) else 0.0
            if not size <= self.limit:
                unit = 1.0 if real else WHOLE
                raise InvalidInput(
                    f"{sender}'s {name!r} reaches {size / unit:g}, beyond the declared {self.limit / unit:g}; secure "
                    f"limit={self.limit:g} must be larger"
                )
            parts.append(numbers)
        found = torch.cat(parts) if parts else torch.zeros(0)
        if not len(found):
            raise InvalidInput(f"{sender} has nothing to encrypt: a secure sum needs one number or more")
        return found

    def share(self, numbers: Tensor, part: float) -> Tensor:
        """Return `numbers` times a client's `part` of the weight, rounded to multiples of the encrypted step."""
        return torch.round(numbers * (part * 2.0**self.bits)) * 2.0**-self.bits

    def decode(self, steps: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean encoded in `steps`, (numbers,) multiples of 2^-bits, with names, shapes, types of `like`."""
        return restore(steps.double() * 2.0**-self.bits, like, 1.0, WHOLE)

    def _check_noise(self, members: int) -> None:
        """Raise `InvalidInput` for so many clients that the error of decryption could reach half a digit."""
        error = TAIL * self.parameters.noise * math.sqrt(members)
        if error >= 2.0 ** -(self.bits + 1):
            raise InvalidInput(
                f"secure bits={self.bits} and limit={self.limit:g} are too fine for {members} clients under CKKS: "
                f"a sum has errors up to {error:.1e}, not below 2^-{self.bits + 1}; take fewer bits or a smaller limit"
            )


class EncryptedSummation:
    """One sum over the members in `names`, number -> party."""

    def __init__(self, plan: EncryptedSum, names: Mapping[int, str], carrier: Carrier) -> None:
        self._plan, self._names, self._carrier = plan, dict(names), carrier

    def open(self) -> None:
        """Do nothing: keys are made once it is known which clients have finished."""

    def close(self, uploads: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
        """Return the weighted mean of `uploads`, member -> tensors of those that finished.

        The server sees no single upload.
        """
        plan, carrier = self._plan, self._carrier
        needed = plan.required_members(len(self._names))
        if len(uploads) < needed:
            raise InvalidInput(
                f"{len(uploads)} clients remain in a secure sum that needs {needed}: the sum cannot be recovered"
            )
        plan.check_weights(weights.values())
        # All uploads are checked before the first is sent.
        numbers = {member: plan.encode(tensors, self._names[member]) for member, tensors in uploads.items()}
        holder, *others = uploads
        keys = make_sum_keys(plan.parameters)
        public = public_context_message(keys.public)
        server = read_public_context(carrier.to_server("public context", holder, public))
        contexts, passed_on = {holder: keys.public}, public_context_message(server)
        for member in others:
            arrived = carrier.from_server("public context", member, passed_on)
            # Parsed once: equal bytes give the same public context, and parsing takes longer than an encryption.
            contexts[member] = server if torch.equal(arrived, passed_on) else read_public_context(arrived)

        def add_up(kind: str, vectors: Mapping[int, Tensor], step: float) -> Tensor:
            """Return the decrypted sum of the clients' vectors in multiples of `step`."""
            arrived = (
                load_ciphertexts(carrier.to_server(kind, member, encrypt_vector(vector, contexts[member])), server)
                for member, vector in vectors.items()
            )
            total = carrier.from_server(kind, holder, add_vectors(arrived).to_tensor())
            return decrypt_steps(load_ciphertexts(total, keys.public), keys, step)

        unit = plan.parameters.largest / TOTAL_WEIGHT
        total = add_up("encrypted weight", {m: torch.tensor([weights[m] * unit]).double() for m in uploads}, unit)
        told = carrier.to_server("total weight", holder, total)
        totals = {holder: total} | {member: carrier.from_server("total weight", member, told) for member in others}
        shares = {m: plan.share(found, weights[m] / float(totals[m])) for m, found in numbers.items()}
        mean = carrier.to_server("mean", holder, add_up("encrypted", shares, 2.0**-plan.bits))
        return plan.decode(mean, next(iter(uploads.values())))


def sum_parameters(limit: float) -> CkksParameters:
    """Return the parameters to add up numbers to a magnitude of `limit` > 0: those of `sums`, at the largest scale.

    Raises `InvalidInput` for a limit that leaves no scale.
    """
    base = PRESETS["sums"]
    most = base.moduli[0] - 2
    scale_bits = most - max(0, math.ceil(math.log2(limit)))
    if scale_bits < 1:
        raise InvalidInput(f"limit={limit:g} is beyond the scale; expected at most {2.0 ** (most - 1):g}")
    return CkksParameters(degree=base.degree, moduli=base.moduli, scale_bits=scale_bits)


def make_sum_keys(parameters: CkksParameters) -> KeyHolder:
    """Return a new key pair without relinearisation keys, which sums do not need; takes about 20 ms."""
    context = make_context(parameters.degree, parameters.moduli, parameters.scale_bits)
    return KeyHolder(parameters, import_tenseal().context_from(context.serialize(True, True, False, False), 1))


def public_context_message(context: PublicContext) -> Tensor:
    """Return a public context of `make_sum_keys` as bytes, `public_context_bytes` of them: (bytes,) of uint8."""
    content = from_uint8(context.to_tensor())
    room = public_context_bytes(context.parameters)
    if len(content) + 4 > room:
        raise InvalidInput(f"a public context of {len(content)} bytes does not fit into {room}: it has other keys")
    return to_uint8((len(content).to_bytes(4, "little") + content).ljust(room, b"\0"))


def read_public_context(message: Tensor) -> PublicContext:
    """Return the public context in `message`, (bytes,); raise `InvalidInput` for any other bytes."""
    content = from_uint8(message)
    size = int.from_bytes(content[:4], "little")
    return load_public_context(to_uint8(content[4 : 4 + size] or b"\0"))


def public_context_bytes(parameters: CkksParameters) -> int:
    """Return the bytes of `public_context_message`."""
    return 4 + _HEADER_BYTES + padded_bytes(parameters.public_key_bytes)


def encrypt_vector(numbers: Tensor, context: PublicContext) -> Tensor:
    """Return `numbers` (numbers,) encrypted, as bytes for a message: (bytes,) of uint8.

    Raises `InvalidInput` for numbers that the scale does not hold.
    """
    return encrypt(numbers.view(1, -1), context, bound=context.parameters.largest, layout=SLOTS).to_tensor()


def add_vectors(vectors: Iterable[EncryptedTensor]) -> EncryptedTensor:
    """Return the sum of one or more encrypted `vectors` of the same length and key pair.

    The senders must keep the sum within the scale: they encrypt shares that add up to one at most. Raises
    `InvalidInput` for vectors of different lengths, layouts or key pairs.
    """
    parts = iter(vectors)
    total = next(parts)
    if total.layout != SLOTS:
        raise InvalidInput(f"a sum of vectors takes ciphertexts in the layout {SLOTS!r}, not {total.layout!r}")
    for part in parts:
        # The bound is that of the whole sum.
        total = add(total, replace(part, bound=0.0))
    return total


def decrypt_steps(total: EncryptedTensor, holder: KeyHolder, step: float) -> Tensor:
    """Return a sum of multiples of `step` > 0 as whole numbers of steps, exactly: (numbers,) int64.

    Raises `InvalidInput` if the stated error reaches half a step, and for ciphertexts of another key pair.
    """
    if not total.precision < step / 2:
        raise InvalidInput(
            f"a sum with errors up to {total.precision:.1e} cannot be rounded to multiples of {step:.1e}"
        )
    return torch.round(decrypt(total, holder).flatten() / step).long()
