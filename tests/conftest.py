"""What all tests share: one thread, no display, and random state that no other test can move.

Deterministic algorithms are not switched on: a library that needed them would pass here and fail where it is
used. One thread is enough for equal results on the CPU.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

# Read when the libraries are first imported, and by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.blank_figures import PICTURES

torch.set_num_threads(1)
# Without this, torch seeds itself from the system and two runs of the tests start differently.
torch.manual_seed(0)

# A busy machine is no reason to fail; where nobody watches, the same examples are tried every time.
settings.register_profile("splitfed", deadline=None, derandomize="CI" in os.environ, database=None)
settings.load_profile("splitfed")

# The legacy numpy generator is the global one, which is what must not leak from test to test.
STATES = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


TOGETHER = {
    "transformers": ("test_transformers", "test_everyday_transformers", "test_fresh_models", "test_docs"),
    "sources": ("test_broad_excepts", "test_contracts", "test_layering", "test_import_paths"),
}
"""What takes seconds, one import of a package or all sources read -> how the files begin whose tests share it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all tests of a file, which share what they prepare, and those of files that stand together.

    The package groups by marks, which it hands on in an attribute that pytest reads no more from 9.2 on.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            name = file.rpartition("/")[2]
            return next((group for group, begin in TOGETHER.items() if name.startswith(begin)), file)

    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the figures of reports where a test looks at them, and everywhere where the exhaustive tests run as well."""
    everything = "not exhaustive" not in item.config.getoption("markexpr")
    PICTURES.drawn = everything or item.get_closest_marker("drawn") is not None


def pytest_collection_finish() -> None:
    """Keep what was imported and collected, more than a million objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests sign with a user's key away from the key of the person who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting() -> Iterator[None]:
    """Wait for no disk, which matters where the power fails alone, and draw no figures that nobody looks at."""
    with pytest.MonkeyPatch.context() as patch:
        # What is no open file is still refused.
        patch.setattr(os, "fsync", os.fstat)
        PICTURES.install(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _migrations() -> Iterator[None]:
    """Read the migrations of Optuna's storage, thirty modules that every new queue asks for, once for all tests."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    read: dict[str | None, ScriptDirectory] = {}
    from_config = ScriptDirectory.from_config

    def once(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in read:
            read[place] = from_config(config)
        return read[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", once)
        yield


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """Start every test from the same global random state and thread count, whichever ran before it."""
    python, numpy, torch_state = STATES
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch_state)
    torch.set_num_threads(1)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
