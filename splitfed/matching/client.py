"""A client of ExpertMatcher: it receives encoders and sends codes of its rows, never the rows.

Paper: Sharma et al., "ExpertMatcher: Automating ML Model Selection for Clients using Hidden Representations", 2019
(arXiv 1910.03731): matching without sharing the client's raw data.

Codes are not private: with the decoder of an encoder, which the matching server holds, they can be decoded to rows
close to the client's own. With the reconstruction measure the client sends errors first, one number for each row and
expert, and codes for the chosen expert only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfed.core.argument_kinds import guard_constructor
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.messages import Message, Stamp
from splitfed.matching.autoencoder import encode, from_state, row_errors


@guard_constructor
class Client:
    """Holds the rows `x` (n, ...), float, of one client and the received weights; returns messages only."""

    def __init__(self, name: str, x: Tensor) -> None:
        """Store the rows as float32; raise `InvalidInput` unless they are finite floats. `name`: of the party."""
        if x.dim() < 2 or x.numel() == 0 or not x.is_floating_point():
            raise InvalidInput(f"{name}: x is {x.dtype} of shape {tuple(x.shape)}; expected floats (rows, ...)")
        if not bool(torch.isfinite(x).all()):
            raise InvalidInput(f"{name}: x holds a value that is not finite; expected finite numbers")
        self.name = name
        self._x = x.detach().to("cpu", torch.float32)
        self._networks: dict[str, dict[str, nn.Module]] = {"encoder": {}, "decoder": {}}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row, which is sent to the server."""
        return tuple(self._x.shape[1:])

    def receive(self, message: Message) -> None:
        """Store an encoder, with its decoder if there is one (`expert/encoder.0.weight` -> tensor)."""
        expert = next(iter(message.tensors)).partition("/")[0]
        for part, home in self._networks.items():
            prefix = f"{expert}/{part}."
            state = {n.removeprefix(prefix): t for n, t in message.tensors.items() if n.startswith(prefix)}
            if state:
                home[expert] = from_state(state)

    @torch.no_grad()
    def codes(self, expert: str, receiver: str, stamp: Stamp) -> Message:
        """Return the codes (n, d) of all rows under `expert`'s encoder, as a message to `receiver`."""
        codes = encode(self._network("encoder", expert), self._x)
        return Message(self.name, receiver, "activation", "encoder->matcher", {expert: codes}, stamp)

    @torch.no_grad()
    def errors(self, expert: str, receiver: str, stamp: Stamp) -> Message:
        """Return each row's mean squared reconstruction error (n,) under `expert`, as a message to `receiver`."""
        errors = row_errors(self._network("encoder", expert), self._network("decoder", expert), self._x)
        return Message(self.name, receiver, "activation", "decoder->matcher", {expert: errors}, stamp)

    def _network(self, part: str, expert: str) -> nn.Module:
        check_names(f"expert whose weights {self.name} holds:", self._networks[part], expert)
        return self._networks[part][expert]
