"""What is encrypted in a run, under whose key and by which protocol: plain data that a topology carries.

`splitfed.encryption` does what is asked for here; without it nothing here needs any package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from splitfed.core.errors import InvalidInput, check_fields, require_name, require_number

WEIGHT_SHARES, PLAIN_GRADIENT, CONSTANT_MASK = "weight_shares", "plain_gradient", "constant_mask"

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        WEIGHT_SHARES: "the server reads sizes and times alone",
        PLAIN_GRADIENT: "leaks labels and activations: the server reads the gradient of the logits and of its weights",
        CONSTANT_MASK: "leaks labels and activations: the server reads the gradient of the logits and, behind a mask "
        "that it knows, its weights after every step",
    }
)
"""Protocol -> what it gives away to the server."""

LEAKING = (PLAIN_GRADIENT, CONSTANT_MASK)
"""The protocols that give labels and activations away."""

KEYS, LAYOUTS, AUTO = ("own", "shared"), ("batch", "rows"), "auto"


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """How a server computes on ciphertexts of CKKS that it cannot read.

    `protocol`: one of `PROTOCOLS`; those that leak need `accept_leak=True`. `key_holder`: the role whose parties hold
    the secret key; all segments of other roles are evaluated on ciphertexts. `parameters`: a preset of
    `splitfed.encryption.PRESETS`, or "auto" for the cheapest that fits. `precision`: largest error of a decrypted
    number that is accepted, > 0. `bound`: the largest magnitude that any number to be encrypted can have, > 0; the
    server learns it. `layout`: "batch", one ciphertext a feature, or "rows", many rows a
    ciphertext, for one linear layer. `keys`: whether every client has a key pair of its "own", or all have a "shared"
    one, with which each of them reads what any of them encrypts. `key_folder`: where the keys are kept (mode 600) for
    a run that is to be resumed or opened again; None: they last as long as the process. Raises `InvalidInput`.
    """

    protocol: str = field(default=WEIGHT_SHARES, metadata=require_name("encryption protocol", PROTOCOLS))
    key_holder: str = "client"
    parameters: str = AUTO
    precision: float = field(default=1e-4, metadata=require_number("precision", low=0.0, open_low=True))
    bound: float = field(default=64.0, metadata=require_number("bound", low=0.0, open_low=True))
    layout: str = field(default="batch", metadata=require_name("encryption layout", LAYOUTS))
    keys: str = field(default="own", metadata=require_name("kind of keys", KEYS))
    key_folder: str | os.PathLike[str] | None = None
    accept_leak: bool = False

    def __post_init__(self) -> None:
        """Refuse values of other kinds, and a protocol that leaks unless that is accepted."""
        check_fields(self)
        for name in ("key_holder", "parameters"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"{name}={getattr(self, name)!r} is not allowed; expected a name")
        if self.key_folder is not None and not isinstance(self.key_folder, (str, os.PathLike)):
            raise InvalidInput(f"key_folder={self.key_folder!r} is not allowed; expected the path of a folder")
        if not isinstance(self.accept_leak, bool):
            raise InvalidInput(f"accept_leak={self.accept_leak!r} is not allowed; expected True or False")
        if self.leaks and not self.accept_leak:
            raise InvalidInput(
                f"encryption protocol {self.protocol!r} {PROTOCOLS[self.protocol]}; take {WEIGHT_SHARES!r}, or "
                "accept_leak=True to study the leak"
            )

    @property
    def leaks(self) -> bool:
        """True if the server reads labels and activations all the same."""
        return self.protocol in LEAKING
