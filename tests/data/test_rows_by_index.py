"""Rows that are read by index: the contract, memory maps, items and Parquet, what is shared and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset as TorchDataset

from splitfed.core import rows as core_rows
from splitfed.core.errors import InvalidInput
from splitfed.core.rows import Draw, RowSource, TensorRows, blocks, join_rows, read_rows
from splitfed.data import Dataset, PadSequences, from_arrays, from_torch, npy, npz, parquet
from splitfed.data.sources import parquet as parquet_file

X = np.arange(60, dtype=np.float32).reshape(20, 3) / 60
Y = np.arange(20) % 4
PIXELS = (np.arange(20 * 12) % 256).astype(np.uint8).reshape(20, 3, 4)


class Items(TorchDataset):
    """The rows of X as items, each of which notes that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Any, int]:
        self.asked.append(i)
        return X[i], int(Y[i])


def saved(folder: Path, **arrays: np.ndarray) -> list[Path]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [folder / f"{name}.npy" for name in arrays]


def table(folder: Path, groups: int = 6, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=groups)
    return folder / "rows.parquet"


def sources(folder: Path) -> dict[str, Dataset]:
    """The same rows and labels in every form that is read by index."""
    x, y = saved(folder, x=X, y=Y)
    wide = {f"c{i}": X[:, i] for i in range(3)}
    return {
        "npy": npy(x, y),
        "memmap": from_arrays(np.load(x, mmap_mode="r"), Y),
        "items": from_torch(Items(), in_memory=False),
        "parquet": parquet(table(folder, **wide, label=Y), "label"),
    }


@pytest.mark.parametrize("kind", ["npy", "memmap", "items", "parquet"])
def test_every_source_holds_the_rows_that_memory_holds(tmp_path: Path, kind: str) -> None:
    data, expected = sources(tmp_path)[kind], from_arrays(X, Y)
    assert (len(data), data.shape, data.task.outputs, data.source.resident) == (20, (3,), 4, False)
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.y, expected.y)
    numbers = torch.tensor([19, 0, 7, 7])
    assert torch.equal(data.rows(numbers).x, expected.x[numbers])
    assert torch.equal(data.rows(numbers).rows([3, 0]).x, expected.x[[7, 19]])
    assert data.rows([]).x.shape == (0, 3)
    assert torch.equal(torch.cat(list(blocks(data.source, 7))), expected.x)
    mine, other = data.clients(2, victims=4, seed=1), expected.clients(2, victims=4, seed=1)
    for name, found in mine.sources.items():
        assert torch.equal(found, other.sources[name])
    assert torch.equal(mine.test_union().x, other.test_union().x)
    assert torch.equal(mine.clients[0].train.join([mine.victims]).x, other.clients[0].train.join([other.victims]).x)


def test_items_are_asked_for_when_they_are_needed() -> None:
    source = Items()
    data = from_torch(source, in_memory=False, labels=Y)
    assert source.asked == [0]
    parts = data.clients(2, victims=4)
    assert source.asked == [0]
    assert len(parts.victims.x) == 4
    assert source.asked[1:] == parts.sources["victims"].tolist()


class Pictures(TorchDataset):
    """Images (1, 2, 2) of the numbers of `x` (20, 4)."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x.reshape(20, 1, 2, 2)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.x[i], int(Y[i])


STEPS = np.arange(80, dtype=np.float32).reshape(20, 4)


@pytest.mark.parametrize(
    ("x", "value_range"),
    [
        (STEPS / 80, (0.0, 1.0)),
        (STEPS / 40 - 1, (-1.0, 1.0)),
        (STEPS, (0.0, 255.0)),
        (np.where(STEPS == 3, 2.5, STEPS).astype(np.float32), (0.0, 79.0)),
        (STEPS / 10 - 2.5, (-3.0, 6.0)),
        (STEPS.astype(np.uint8), (0.0, 255.0)),
    ],
)
def test_images_read_by_index_have_the_range_of_those_in_memory(
    x: np.ndarray, value_range: tuple[float, float]
) -> None:
    by_index = from_torch(Pictures(x), in_memory=False)
    assert not by_index.source.resident
    assert by_index.value_range == from_torch(Pictures(x)).value_range == value_range
    assert by_index.clients(2, victims=4).victims.value_range == value_range
    assert from_torch(Pictures(x), in_memory=False, value_range=(-9, 300)).value_range == (-9, 300)


def test_images_of_no_known_range_are_told_before_they_are_trained_on(tmp_path: Path) -> None:
    said = r"^mine holds images that are read by index and .*give value_range=\(0, 1\)"
    with pytest.warns(UserWarning, match=said):
        from_torch(Pictures(STEPS), in_memory=False, labels=Y, name="mine")
    (x,) = saved(tmp_path, x=STEPS.reshape(20, 1, 2, 2))
    with pytest.warns(UserWarning, match=said):
        from_arrays(np.load(x, mmap_mode="r"), Y, name="mine")
    from_arrays(np.load(x, mmap_mode="r"), Y, value_range=(0, 79))


def test_clients_read_the_memory_of_the_user() -> None:
    x = X.copy()
    parts = from_arrays(x, Y).clients(2, victims=4)
    every = [part for client in parts.clients for part in (client.train, client.validation, client.test)]
    for part in (parts.victims, parts.auxiliary, parts.test_union(), *every):
        assert isinstance(part.source, TensorRows)
        assert part.source.tensor.data_ptr() == torch.from_numpy(x).data_ptr()
    # What is read is a copy: no party that writes into it writes into anybody's data.
    read = parts.victims.x
    read.zero_()
    assert not torch.equal(parts.victims.x, read)
    assert np.array_equal(x, X)


def test_parts_of_several_sources_are_joined() -> None:
    one, other = from_arrays(X, Y).rows([3, 4]), from_torch(Items(), in_memory=False).rows([9])
    joined = join_rows([one.source, other.source])
    assert torch.equal(joined.take(torch.tensor([2, 0])), torch.tensor(X[[9, 3]]))
    zeros = TensorRows(torch.zeros(1, 3))
    assert torch.equal(join_rows([one.source, zeros]).take(torch.tensor([2])), torch.zeros(1, 3))


def test_pictures_are_read_as_from_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=PIXELS, y=Y)
    expected = npz(tmp_path / "all.npz")
    data = npy(*saved(tmp_path, x=PIXELS, y=Y))
    assert data.value_range == (0.0, 1.0)
    assert torch.equal(data.x, expected.x)
    last = PIXELS.reshape(20, 3, 2, 2).transpose(0, 2, 3, 1)
    assert torch.equal(
        npy(*saved(tmp_path, x=last, y=Y), channels_last=True).x, torch.tensor(PIXELS.reshape(20, 3, 2, 2)) / 255
    )
    assert npy(*saved(tmp_path, x=PIXELS, y=Y), dtype="int64").x.dtype == torch.int64
    with_domains = npy(*saved(tmp_path, x=np.asfortranarray(X), y=Y), domains=saved(tmp_path, d=Y)[0])
    assert torch.equal(with_domains.x, torch.tensor(X))
    assert with_domains.domains is not None


def test_lists_text_labels_and_few_groups_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One group of six rows takes 72 bytes: two are kept at most.
    monkeypatch.setattr(parquet_file, "KEPT", 160)
    words = [f"class {i}" for i in Y]
    data = parquet(table(tmp_path, x=list(X), label=words, site=Y), "label", domain="site")
    assert torch.equal(data.x, torch.tensor(X))
    assert data.y.tolist() == Y.tolist()
    source = data.source.source  # type: ignore[attr-defined]
    assert len(source._kept) <= 2
    assert parquet(table(tmp_path, a=Y, b=Y, label=Y), "label", drop=["b"], dtype="int64").shape == (1,)


def test_ragged_items_are_padded() -> None:
    ragged = [(np.arange(n + 1), n % 2) for n in range(5)]
    data = from_torch(ragged, dtype="int64", in_memory=False, collate=PadSequences(3, value=-1))
    assert data.x.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert torch.equal(from_torch(ragged, dtype="int64", collate=PadSequences(3, value=-1)).x, data.x)

    def mapped(xs: Any) -> dict[str, Tensor]:
        tokens = PadSequences(3)(xs)
        return {"tokens": tokens, "mask": (tokens > 0).long()}

    parts = from_torch(ragged, dtype="int64", in_memory=False, collate=mapped)
    assert (parts.shape, list(parts.features)) == ((2, 3), ["tokens", "mask"])
    assert parts.features["mask"].select(parts.x).sum() == 7
    longest = from_torch(ragged, in_memory=False, collate=lambda xs: torch.stack([torch.tensor(x[-1:]) for x in xs]))
    assert longest.x.flatten().tolist() == [0, 1, 2, 3, 4]


class Wrong(RowSource):
    """Rows of one's own that break one promise."""

    shape, dtype = (3,), torch.float32

    def __init__(self, made: Callable[[int], Tensor]) -> None:
        self.made = made

    def __len__(self) -> int:
        return 20

    def take(self, rows: Tensor, draw: Draw | None = None) -> Tensor:
        return self.made(len(rows))


BAD_ROWS: list[tuple[Callable[[int], Tensor], str]] = [
    (lambda n: torch.zeros(n, 4), "mine: 1 rows were read as (1, 4) of float32; expected (1, 3) of float32"),
    (lambda n: torch.zeros(n, 3).double(), "mine: 1 rows were read as (1, 3) of float64; expected (1, 3) of float32"),
    (lambda n: torch.full((n, 3), torch.nan), "mine: x is not finite in row 17, counted from 0"),
    (lambda n: torch.full((n, 3), 2.0), "mine: x leaves its value range [0, 1] in row 17, counted from 0"),
]


@pytest.mark.parametrize(("made", "text"), BAD_ROWS)
def test_rows_are_checked_when_they_are_read(made: Callable[[int], Tensor], text: str) -> None:
    data = from_arrays(X, Y)
    own = Dataset("mine", Wrong(made), data.y, data.task, value_range=(0.0, 1.0))
    for found in (own, replace(own, task=data.task)):
        with pytest.raises(InvalidInput) as caught:
            found.rows([17]).x  # noqa: B018
        assert str(caught.value) == text


def test_rows_that_do_not_fit_are_not_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = from_torch(Items(), in_memory=False)
    monkeypatch.setattr(core_rows, "AT_ONCE", 10 * 12)
    assert len(data.rows(range(10)).x) == 10
    with pytest.raises(InvalidInput, match=r"^torch: 11 rows that are read by index take 0\.0 GiB at once; at most"):
        data.rows(range(11)).x  # noqa: B018
    # What is in memory is read whatever it takes, with a transform too.
    assert len(from_arrays(X, Y).x) == len(from_arrays(X, Y).with_transform(lambda row: row).rows(range(20)).x) == 20
    assert len(read_rows("x", data.rows([1]).source)) == 1


def test_what_is_no_file_or_column_is_refused(tmp_path: Path) -> None:
    x, y, words = saved(tmp_path, x=X, y=Y, words=np.array(["a", "b"]))
    (tmp_path / "cut.npy").write_bytes(x.read_bytes()[:150])
    (tmp_path / "text.npy").write_text("no array")
    plain = {"a": X[:, 0], "label": Y}
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: npy(tmp_path / "no.npy", y), "no.npy is missing; expected a file"),
        (
            lambda: npy(tmp_path / "cut.npy", y),
            "it claims shape (20, 3) of float32, which takes 240 bytes; it",
        ),
        (lambda: npy(tmp_path / "text.npy", y), "text.npy is no .npy file that can be read"),
        (lambda: npy(x, tmp_path / "text.npy"), "text.npy is no .npy file that can be read"),
        (lambda: npy(words, y), "words.npy has type <U1; expected real numbers"),
        (
            lambda: npy(x, saved(tmp_path, few=Y[:3])[0]),
            "x: x has 20 rows and y has shape (3,); expected a label a row",
        ),
        (lambda: npy(x, y, channels_last=True), "channels_last=True needs 4 dimensions"),
        (lambda: npy(x, y, dtype="int64"), "dtype='int64' expects whole numbers"),
        (lambda: npy(saved(tmp_path, none=np.zeros((0, 3)))[0], y), "it is empty, of shape (0, 3)"),
        (lambda: parquet(y, "label"), "y.npy cannot be read as Parquet"),
        (lambda: parquet(table(tmp_path, **plain), "labl"), "unknown column in rows.parquet: 'labl'; did you mean"),
        (lambda: parquet(table(tmp_path, **plain), "label", drop=["a"]), "has no column but 'label'"),
        (lambda: parquet(table(tmp_path, **plain), "label", drop=["label"]), "target='label' is also in drop"),
        (lambda: parquet(table(tmp_path, **plain), "label", domain="label"), "domain='label' is the target as well"),
        (lambda: parquet(table(tmp_path, a=[], label=[]), "label"), "rows.parquet has no rows"),
        (lambda: parquet(table(tmp_path, a=["x"], label=[1]), "label"), "column 'a' holds string; expected numbers"),
        (lambda: parquet(table(tmp_path, a=[None, 1.0], label=[1, 0]), "label"), "column 'a' has a missing value"),
        (lambda: parquet(table(tmp_path, a=[1, 2], label=["x", None]), "label"), "column 'label' has a missing value"),
        (lambda: parquet(table(tmp_path, a=[[1], [1, 2]], label=[1, 0]), "label"), "several lengths"),
        (lambda: parquet(table(tmp_path, a=[[1], [2]], b=[1, 2], label=[1, 0]), "label"), "lists beside others"),
        (lambda: from_torch(Items(), labels=Y), "labels apply to items that are read by index"),
        (
            lambda: from_torch([(X[0], 0), (X[0, :2], 1)], in_memory=False).x,
            "x of item 1 has shape (2,); expected (3,)",
        ),
        (lambda: from_torch([(X[0], 0), 3], in_memory=False), "item 1 is a int; expected a pair (x, y)"),
        (lambda: from_torch([({"a": X[0]}, 0), ({"b": X[0]}, 1)], in_memory=False).x, "item 1 has other parts"),
        (lambda: PadSequences(0), "PadSequences length=0 is not allowed"),
        (lambda: PadSequences(2, 0.5)([[1]]), "a sequence is a list"),
        (lambda: PadSequences(2, 0.5)([np.array([1])]), "PadSequences value=0.5 is not allowed"),
        (lambda: PadSequences(2)([X[0], X[:2]]), "PadSequences got shapes"),
    ]
    for made, text in cases:
        with pytest.raises(InvalidInput) as caught:
            made()
        assert text in str(caught.value), (text, str(caught.value))
        assert "\n" not in str(caught.value)


def test_collate_gives_every_batch_one_shape() -> None:
    ragged = [(torch.ones(n), 0) for n in (1, 2, 1, 1)]
    data = from_torch(ragged, in_memory=False, collate=partial(pad_sequence, batch_first=True))
    assert data.rows([0, 2]).x.shape == (2, 1)
    with pytest.raises(InvalidInput, match=r"^torch: items 0 to 1 make \(2, 2\); expected \(2, 1\) as of item 0"):
        data.rows([0, 1]).x  # noqa: B018
