"""Random numbers are passed in: one root seed, and a generator for every purpose derived from it.

A derived seed depends only on the root and on the words of its purpose (say `"order", epoch, client`), never
on what was drawn before, so a run can be resumed and its clients can run in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(root: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for `purpose` under `root`; equal arguments give equal seeds on every machine."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in (root, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh torch generator on `device`, seeded with `derive(root, *purpose)`."""
    return torch.Generator(device=device).manual_seed(derive(root, *purpose))


@contextmanager
def stream(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Let whatever draws from torch's default generators of the CPU and `device` draw from `seed` inside the block.

    Modules (dropout, initialisation) take no generator; the default ones are put back as they were afterwards.
    """
    place = torch.device(device)
    cuda = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            index = torch.cuda.current_device() if place.index is None else place.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
