"""Random numbers are passed in: one root seed, and a generator for every purpose derived from it.

A derived seed depends only on the root and on the words of its purpose (say `"order", epoch, client`), never
on what was drawn before, so a run can be resumed and its clients can run in any order.
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from splitfed.core.errors import InvalidInput, check_count, short

_WORDS = 624
_AT = 24


def derive(root: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for `purpose` under `root`; equal arguments give equal seeds on every machine.

    Raises `InvalidInput` for a root that is no whole number of at least 0.
    """
    text = "\x1f".join([f"{type(word).__name__}:{word}" for word in (read_seed(root), *purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def read_seed(seed: Any, name: str = "seed") -> int:
    """Return `seed` as Python's int, so that 0 and `numpy.int64(0)` draw alike; refuse what is none of at least 0."""
    if type(seed) is int and seed >= 0:
        return seed
    with suppress(TypeError):
        if not isinstance(seed, bool) and hasattr(seed, "__index__") and (found := operator.index(seed)) >= 0:
            return found
    raise InvalidInput(f"{name}={short(seed)} is not allowed; expected a whole number of at least 0")


def generator(root: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a fresh torch generator on `device`, seeded with `derive(root, *purpose)`."""
    return torch.Generator(device=device).manual_seed(derive(root, *purpose))


def wide_generator(root: int, *purpose: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for private noise: as `generator`, with its whole state drawn from `root` and `purpose`.

    torch seeds its generator of the CPU with 32 bits. Of a few ten thousand releases two would likely get the same
    noise, and whoever knows one might try out all seeds. (That of CUDA takes all 64 bits.) It is still no secret to
    somebody who knows `root`.
    """
    wide = generator(root, *purpose, device=device)
    if wide.device.type != "cpu":
        return wide
    text = "\x1f".join([f"{type(word).__name__}:{word}" for word in (read_seed(root), "wide", *purpose)])
    state_words = torch.frombuffer(bytearray(hashlib.shake_256(text.encode()).digest(4 * _WORDS)), dtype=torch.int32)
    state = wide.get_state()
    # The state's 624 words of 32 bits stand behind three numbers, in 64 bits each.
    state[_AT : _AT + 8 * _WORDS] = (state_words.long() & 0xFFFFFFFF).view(torch.uint8)
    return wide.set_state(state)


@contextmanager
def stream(seed: int, device: torch.device | str = "cpu", everywhere: bool = False) -> Iterator[None]:
    """Let whatever draws from torch's default generators of the CPU and `device` draw from `seed` inside the block.

    Modules (dropout, initialisation) take no generator; the default ones are put back as they were afterwards.
    `everywhere`: so do those that draw from NumPy's and Python's default generators; NumPy takes 32 bits of the seed.
    """
    if everywhere:
        plain, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            with stream(seed, device):
                yield
        finally:
            random.setstate(plain)
            np.random.set_state(numbers)  # noqa: NPY002
        return
    place = torch.device(device)
    cuda = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            index = torch.cuda.current_device() if place.index is None else place.index
            torch.cuda.default_generators[index].manual_seed(seed)
        yield


@contextmanager
def initialization(seed: int | None) -> Iterator[None]:
    """Let modules made inside the block draw their first weights from `seed`; torch's generators stay as they were.

    None: they draw from torch's own generators, as modules do anywhere. Raises `InvalidInput` for a seed that is no
    whole number of at least 0.
    """
    if seed is None:
        yield
        return
    check_count("seed", seed, high=math.inf)
    with stream(derive(int(seed), "initialization"), torch.get_default_device()):
        yield
