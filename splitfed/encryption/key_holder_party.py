"""The party that has the secret key: it encrypts what it sends to a server and decrypts what the server returns.

Apart from that it is an ordinary party: its segments, losses, optimizer and defenses work on plain numbers.

Gradients are multiplied by the number of rows of the batch before encryption, as gradients of a mean loss are small
compared with the errors of encryption.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp
from splitfed.core.party import Party
from splitfed.core.party_state import PartyState
from splitfed.encryption.ciphertexts import ROWS, decrypt, encrypt, load_ciphertexts
from splitfed.encryption.keys import KeyHolder
from splitfed.encryption.settings import CONSTANT_MASK, PLAIN_GRADIENT, PUBLIC_CONTEXT, Encryption

TRANSPOSED, WEIGHT, BIAS, CONTEXT = "transposed", "weight", "bias", "context"


class KeyHolderParty(Party):
    """Party that encrypts its messages to the parties `servers` and decrypts theirs, with `keys`.

    `shapes`, `dtypes`: value -> shape and type of one row. `widths`: edge -> width of a packed row, for layout "rows".
    """

    def __init__(
        self,
        state: PartyState,
        settings: Encryption,
        keys: KeyHolder,
        servers: Collection[str],
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        widths: Mapping[str, int],
    ) -> None:
        super().__init__(state)
        self._settings, self._keys, self._servers = settings, keys, frozenset(servers)
        self._shapes, self._dtypes, self._widths = dict(shapes), dict(dtypes), dict(widths)
        # Plain releases in the current step of each replica, for the protocol whose clients send weight gradients.
        self._released: dict[int, dict[str, Tensor]] = {}

    def forward(
        self,
        segment: str,
        received: Sequence[Message],
        stamp: Stamp,
        peers: Mapping[str, str],
        edges: Collection[str] | None = None,
    ) -> list[Message]:
        """Decrypt the messages `received`, run `segment`, and return its outputs, encrypted for the servers."""
        messages = super().forward(segment, [self._decrypted(m) for m in received], stamp, peers, edges)
        return [self._encrypted(message) if message.receiver in self._servers else message for message in messages]

    def backpropagate(
        self, segment: str, received: Sequence[Message], stamp: Stamp, peers: Mapping[str, str]
    ) -> list[Message]:
        """Decrypt the gradients `received`, backpropagate them, and return gradients, encrypted for the servers."""
        messages = super().backpropagate(segment, [self._decrypted(m) for m in received], stamp, peers)
        return [self._guarded(message) if message.receiver in self._servers else message for message in messages]

    def forget(self, replica: int) -> None:
        """Delete the state of the current step of `replica`."""
        super().forget(replica)
        self._released.pop(replica, None)

    def public_context(self, receiver: str, edge: str, stamp: Stamp) -> Message:
        """Return the public context as a message to `receiver`."""
        return Message(self.name, receiver, PUBLIC_CONTEXT, edge, {CONTEXT: self._keys.public.to_tensor()}, stamp)

    def answer(self, message: Message) -> Message:
        """Return a message to the sender with the decrypted weights of `message`, for the protocol "constant_mask"."""
        weight = decrypt(load_ciphertexts(message.tensors[WEIGHT], self._keys.public), self._keys)
        plain = {WEIGHT: weight.T.float().contiguous()}
        return message._replace(sender=self.name, receiver=message.sender, tensors=plain)

    def _encrypted(self, message: Message, factor: float = 1.0) -> Message:
        tensors = {}
        for name, value in message.tensors.items():
            rows = value.detach().flatten(1)
            tensors[name] = self._encrypt(message, name, rows * factor)
            if message.kind == "activation":
                self._released.setdefault(message.stamp.replica, {})[name] = rows
                if self._settings.protocol == CONSTANT_MASK and message.stamp.phase in ("train", "rehearse"):
                    tensors[f"{name} {TRANSPOSED}"] = self._encrypt(message, name, rows.T)
        return message._replace(tensors=tensors, layouts=None)

    def _guarded(self, message: Message) -> Message:
        """Return a gradient message in the form that the protocol sends: encrypted, or in the clear."""
        if not self._settings.leaks:
            return self._encrypted(message, factor=_rows(message))
        if self._settings.protocol == CONSTANT_MASK:
            return message
        assert self._settings.protocol == PLAIN_GRADIENT
        (gradient,), (released,) = message.tensors.values(), self._released[message.stamp.replica].values()
        slope = gradient.flatten(1)
        return message._replace(tensors={**message.tensors, WEIGHT: slope.T @ released, BIAS: slope.sum(0)})

    def _encrypt(self, message: Message, name: str, rows: Tensor) -> Tensor:
        settings = self._settings
        width = self._widths.get(message.edge) if settings.layout == ROWS else None
        try:
            sealed = encrypt(rows, self._keys.public, bound=settings.bound, layout=settings.layout, width=width)
        except InvalidInput as error:
            raise InvalidInput(f"{message.kind} {name!r} of {self.name!r} on edge {message.edge!r}: {error}") from None
        return sealed.to_tensor()

    def _decrypted(self, message: Message) -> Message:
        """Return `message` with decrypted numbers; messages from other parties than servers are already plain."""
        if message.sender not in self._servers or (message.kind == "gradient" and self._settings.leaks):
            return message
        tensors = {}
        for name, content in message.tensors.items():
            found = load_ciphertexts(content, self._keys.public)
            numbers = decrypt(found, self._keys)
            if message.kind == "gradient":
                numbers = numbers / found.shape[0]
            tensors[name] = numbers.view(-1, *self._shapes[name]).to(self._dtypes[name])
        return message._replace(tensors=tensors)


def _rows(message: Message) -> int:
    return len(next(iter(message.tensors.values())))
