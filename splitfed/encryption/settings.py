"""Settings of encryption that a topology carries: what is encrypted, under whose key and by which protocol.

Nothing here needs an optional package; those are imported where they are first used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, NoneType
from typing import ClassVar, Self

from splitfed.core.errors import InvalidInput, check_fields, check_kind, require_name, require_number
from splitfed.core.secure_computation import SecureComputation
from splitfed.encryption.backend import import_tenseal

WEIGHT_SHARES, PLAIN_GRADIENT, CONSTANT_MASK = "weight_shares", "plain_gradient", "constant_mask"

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        WEIGHT_SHARES: "the server reads only sizes and times",
        PLAIN_GRADIENT: "leaks labels and activations: the server reads the gradient of the logits and of its weights",
        CONSTANT_MASK: "leaks labels and activations: the server reads the gradient of the logits and, behind a mask "
        "that it knows, its weights after every step",
    }
)
"""Protocol -> what it reveals to the server."""

PAPERS: Mapping[str, str] = MappingProxyType(
    {
        WEIGHT_SHARES: "none; designed here against what the two others reveal",
        PLAIN_GRADIENT: 'Khan, Nguyen, Michalas, "Split ways: privacy-preserving training of encrypted data using '
        'split learning", 2023',
        CONSTANT_MASK: 'Khan, Nguyen, Michalas, "Split without a leak: reducing privacy leakage in split learning", '
        "2023",
    }
)
"""Protocol -> where it was published."""

MASKED_WEIGHTS, PUBLIC_CONTEXT = "masked weights", "public context"
"""Kinds of messages that only encrypted runs have: masked weights of a layer, and a public context."""

LEAKING = (PLAIN_GRADIENT, CONSTANT_MASK)
"""The protocols that reveal labels and activations."""

KEYS, LAYOUTS, AUTO = ("own", "shared"), ("batch", "rows"), "auto"


def describe_protocols() -> list[dict[str, str]]:
    """Return name, summary (what it reveals) and paper of every protocol, in the format of the registry."""
    return [{"name": name, "summary": text, "paper": PAPERS[name]} for name, text in PROTOCOLS.items()]


@dataclass(frozen=True, kw_only=True)
class Encryption(SecureComputation):
    """Settings by which a server computes on CKKS ciphertexts that it cannot decrypt.

    `protocol`: one of `PROTOCOLS`; those that leak need `accept_leak=True`. `key_holder`: the role whose parties hold
    the secret key, or several, which share one pair; segments of all other roles are evaluated on ciphertexts.
    `parameters`: a preset of `splitfed.encryption.PRESETS`, or "auto" for the cheapest that suffices. `precision`:
    largest accepted error of a decrypted number, > 0. `bound`: the largest magnitude of any number to be encrypted, >
    0; the server learns it. `layout`: "batch", one ciphertext a feature, or "rows", many rows a ciphertext, for one
    linear layer. `keys`: "own" for one key pair a client, or "shared" for one pair, with which each client can decrypt
    what any of them encrypts. `key_folder`: where keys are saved (mode 600) and loaded from, as a resumed or reopened
    run needs; None: keys are not saved. Raises `InvalidInput`.
    """

    name: ClassVar[str] = "encryption"
    parties: ClassVar[str] = "splitfed.encryption.party_maker:EncryptedPartyMaker"
    plan: ClassVar[str] = "splitfed.encryption.plan:EncryptedPlan"
    views: ClassVar[str] = "splitfed.encryption.views:EncryptedViews"
    refusals: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "accumulate": "beside encryption: shares of weights are updated behind every batch",
            "speeds": "an encrypted run spends its time on ciphertexts",
            "releases": "what arrives encrypted",
            "derivatives": "takes part in encrypted training: releases are ciphertexts",
        }
    )
    own_messages: ClassVar[Mapping[str, str]] = MappingProxyType(
        {PUBLIC_CONTEXT: "keys without the secret one", MASKED_WEIGHTS: "the server's layer after a step"}
    )

    protocol: str = field(default=WEIGHT_SHARES, metadata=require_name("encryption protocol", PROTOCOLS))
    key_holder: str | Sequence[str] = "client"
    parameters: str = AUTO
    precision: float = field(default=1e-4, metadata=require_number("precision", low=0.0, open_low=True))
    bound: float = field(default=64.0, metadata=require_number("bound", low=0.0, open_low=True))
    layout: str = field(default="batch", metadata=require_name("encryption layout", LAYOUTS))
    keys: str = field(default="own", metadata=require_name("kind of keys", KEYS))
    key_folder: str | os.PathLike[str] | None = None
    accept_leak: bool = False

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for values out of range, and for a protocol that leaks without `accept_leak=True`."""
        check_fields(self)
        check_kind("parameters", self.parameters, str, "a name")
        if not isinstance(self.key_holder, (str, tuple)):
            # A list, as a study has it.
            roles = tuple(self.key_holder) if isinstance(self.key_holder, Sequence) else (self.key_holder,)
            object.__setattr__(self, "key_holder", roles)
        if not self.holders or not all(isinstance(role, str) for role in self.holders):
            raise InvalidInput(f"key_holder={self.key_holder!r} is not allowed; expected a role, or several")
        if len(self.holders) > 1 and self.keys != "shared":
            raise InvalidInput(
                f"{len(self.holders)} roles hold keys, and what they encrypt is added up: they need one pair, "
                "keys='shared'"
            )
        check_kind("key_folder", self.key_folder, (str, os.PathLike, NoneType), "the path of a folder")
        if self.leaks and not self.accept_leak:
            raise InvalidInput(
                f"encryption protocol {self.protocol!r} {PROTOCOLS[self.protocol]}; take {WEIGHT_SHARES!r}, or "
                "accept_leak=True to study the leak"
            )

    @property
    def label(self) -> str:
        """The name of the protocol."""
        return self.protocol

    @property
    def holders(self) -> tuple[str, ...]:
        """The roles that hold the secret key."""
        return (self.key_holder,) if isinstance(self.key_holder, str) else tuple(self.key_holder)

    @property
    def leaks(self) -> bool:
        """True if the server can read labels and activations in spite of encryption."""
        return self.protocol in LEAKING

    @property
    def hidden(self) -> frozenset[str]:
        """The kinds of encrypted messages: activations, and gradients unless the protocol leaks."""
        return frozenset(("activation",) if self.leaks else ("activation", "gradient"))

    def describe(self) -> str:
        """Return a phrase that names the protocol by which values are encrypted."""
        return f"encrypted by {self.protocol}"

    def check_installed(self) -> None:
        """Raise `InvalidInput` if TenSEAL is not installed."""
        import_tenseal()

    def with_key_folder(self, folder: str | os.PathLike[str] | None) -> Self:
        """Return the same settings with `key_folder` set to `folder`; None: keys are not saved."""
        return replace(self, key_folder=folder)


def settings_of(computation: SecureComputation | None) -> Encryption:
    """Return `computation` as `Encryption`, for a topology that is known to be encrypted."""
    assert isinstance(computation, Encryption)
    return computation
