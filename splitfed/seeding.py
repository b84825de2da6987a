"""Random numbers are passed in: one root seed, and a generator for every purpose derived from it.

A derived seed depends only on the root and on the words of its purpose (say `"order", epoch, client`), never
on what was drawn before, so a run can be resumed and its clients can run in any order.
"""

from __future__ import annotations

import hashlib

import torch


def derive(root: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for `purpose` under `root`; equal arguments give equal seeds on every machine."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in (root, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh torch generator on `device`, seeded with `derive(root, *purpose)`."""
    return torch.Generator(device=device).manual_seed(derive(root, *purpose))
