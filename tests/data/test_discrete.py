"""Rows of whole numbers stay whole on every way into a data set and out of it, and are refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitfed.core.tasks import classification
from splitfed.data import Dataset, Table, align, csv, from_arrays, from_torch, leaf, npz
from splitfed.data.candidates import candidates
from splitfed.training.identity import digest
from tests.examples import refusal

# As float32 the two are one number.
GREAT = 2**24
IDS = torch.tensor([[GREAT, 1, 2], [GREAT + 1, 1, 2], [3, 4, 5], [6, 7, 8]])
Y = torch.tensor([0, 1, 0, 1])


def tokens(**changes: Any) -> Dataset:
    return Dataset(**{"name": "toy", "x": IDS, "y": Y, "task": classification(2), **changes})


def test_rows_stay_whole_wherever_they_go() -> None:
    data = tokens()
    assert data.discrete
    assert not tokens(x=IDS.float()).discrete
    for same in (data.rows([1, 0]), data.join([data]).rows([5, 0]), data.vertical(3).rows([1, 0])):
        assert (same.x.dtype, same.x[:, 0].tolist()) == (torch.int64, [GREAT + 1, GREAT])
    part = data.vertical({"a": [0, 2], "b": [1]}).features["a"].select(IDS)
    assert (part.dtype, part[1].tolist()) == (torch.int64, [GREAT + 1, 2])
    many = tokens(x=torch.arange(400).reshape(100, 4) + GREAT, y=torch.arange(100) % 2)
    clients = many.clients(2, dirichlet=1.0, victims=10, seed=0)
    parts = [*(rows for c in clients.clients for rows in (c.train, c.validation, c.test)), clients.victims]
    seen = torch.cat([rows.x for rows in (*parts, clients.auxiliary)])
    assert sorted(seen.flatten().tolist()) == many.x.flatten().tolist()
    both, inside = candidates(clients, clients.victims, torch.Generator())
    assert (both.x.dtype, len(both)) == (torch.int64, 2 * int(inside.sum()))
    # The description of a run tells rows apart that differ by one in a great id.
    assert digest({"x": data.x[:1]}) != digest({"x": data.x[1:2]})


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.uint64, ">i4", bool])
def test_other_whole_types_are_widened(kind: Any) -> None:
    values = np.array([[0, 1], [1, 0]], dtype=kind)
    for given in (values, torch.from_numpy(values.astype(np.dtype(kind).newbyteorder("=")))):
        data = from_arrays(given, np.array([0, 1]), dtype="int64")
        assert (data.x.dtype, data.x.tolist()) == (torch.int64, [[0, 1], [1, 0]])
        # Not asked for, they are numbers like others.
        assert from_arrays(given, np.array([0, 1])).x.dtype == torch.float32


def test_real_numbers_that_are_whole_are_taken() -> None:
    assert from_arrays(IDS.double(), Y, dtype="int64").x.tolist() == IDS.tolist()
    pairs = [(row.numpy(), int(label)) for row, label in zip(IDS, Y, strict=True)]
    assert from_torch(pairs, dtype="int64").x.tolist() == IDS.tolist()


REFUSED = [
    ({"x": IDS / 2}, "toy: x holds 0.5 in row 0, counted from 0; dtype='int64' expects whole numbers"),
    (
        {"x": torch.tensor([[1.0], [float("nan")]])},
        "toy: x holds nan in row 1, counted from 0; dtype='int64' expects whole numbers",
    ),
    # A float32 of that size may have been another number.
    (
        {"x": torch.tensor([[2.0], [GREAT + 2.0]])},
        "toy: x holds 1.67772e+07 in row 1, counted from 0; dtype='int64' expects whole",
    ),
    (
        {"x": np.array([[2**63]], dtype=np.uint64)},
        "toy: x holds 9223372036854775808; expected whole numbers below 2**63",
    ),
    ({"x": torch.tensor([[2**63]], dtype=torch.uint64)}, "toy: x holds 9223372036854775808; expected whole numbers"),
    ({"dtype": "int32"}, "unknown dtype of rows 'int32'; did you mean 'int64' or 'float32'? (allowed: float32, int64)"),
    ({"value_range": (0.0, 1.0)}, "toy: value_range=(0.0, 1.0) is not allowed for int64 rows; it bounds real numbers"),
    ({"x": {}}, "toy: x has no part; expected name -> (n, ...), at least one"),
    ({"x": {"a": IDS, "b": IDS[:3]}}, "toy: 'a' has 4, 'b' has 3 rows; expected as many in every part"),
    (
        {"x": {"input_ids": IDS, "age": IDS.float()}},
        "toy: 'age' holds real numbers and 'input_ids' whole ones; all parts of a row have one type, as float32 cannot "
        "distinguish whole numbers above 16777216: convert one of them",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_refused(changes: dict[str, Any], text: str) -> None:
    found = refusal(from_arrays, **{"x": IDS, "y": Y, "dtype": "int64", "name": "toy", **changes})
    assert found.startswith(text)


def test_what_has_no_meaning_is_refused() -> None:
    images = tokens(x=torch.ones(4, 1, 2, 2, dtype=torch.int64))
    assert refusal(images.rotated) == (
        "toy has rows of whole numbers, which cannot be interpolated; only images can be rotated"
    )
    assert refusal(tokens, x=IDS.int()) == (
        "toy: x has shape (4, 3) and type int32; expected (rows, ...) with at least one row, and float32 or int64"
    )
    assert refusal(tokens().join, [tokens(x=IDS.float())]) == (
        "toy has rows of int64 and toy of float32; expected parts of the same source"
    )


def test_parts_of_one_shape_are_stacked() -> None:
    mask = torch.ones_like(IDS)
    data = from_arrays({"input_ids": IDS, "attention_mask": mask.numpy()}, Y, dtype="int64")
    assert (data.shape, list(data.features)) == ((2, 3), ["input_ids", "attention_mask"])
    assert torch.equal(data.features["input_ids"].select(data.x), IDS)
    assert torch.equal(data.features["attention_mask"].select(data.x), mask)
    pairs = [({"input_ids": row, "attention_mask": mask[0]}, label) for row, label in zip(IDS, Y, strict=True)]
    assert torch.equal(from_torch(pairs, dtype="int64").x, data.x)
    assert refusal(from_torch, [({"a": row}, 0) if i else (row, 0) for i, row in enumerate(IDS)]) == (
        "torch: x of item 1 has parts ['a']; expected None as in item 0"
    )


def test_parts_of_other_shapes_stand_side_by_side() -> None:
    data = from_arrays({"a": IDS % 100, "b": Y}, Y)
    assert (data.shape, data.x.dtype) == ((4,), torch.float32)
    assert data.features["b"].select(data.x).tolist() == [[0], [1], [0], [1]]
    assert torch.equal(data.features["a"].select(data.x), (IDS % 100).float())


def test_files_keep_whole_numbers_if_they_are_asked_to(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    pixels = np.full((4, 2, 2), 255, dtype=np.uint8)
    np.savez(path, ids=IDS.numpy(), mask=np.ones((4, 3), dtype=bool), pixels=pixels, y=Y.numpy())
    assert "which float32 cannot represent" in refusal(npz, path, "ids")
    assert npz(path, "ids", dtype="int64").x.tolist() == IDS.tolist()
    # Bytes are no image then.
    assert npz(path, "pixels", dtype="int64").x.unique().tolist() == [255]
    both = npz(path, ["ids", "mask"], dtype="int64")
    assert (both.shape, list(both.features), both.x[:, 0].tolist()) == ((2, 3), ["ids", "mask"], IDS.tolist())
    assert refusal(npz, path, ["ids", "ids"]) == (
        "x=['ids', 'ids'] is not allowed; expected the name of an array, or several, each once"
    )

    table = tmp_path / "codes.csv"
    table.write_text(f"code,kind,label\n{GREAT},a,0\n{GREAT + 1},b,1\n")
    assert f"column 'code' holds {GREAT + 1} in row 1, counted from 0, which float32 cannot represent" in refusal(
        csv, table, "label"
    )
    assert csv(table, "label", dtype="int64").x.tolist() == [[GREAT, 1, 0], [GREAT + 1, 0, 1]]
    assert refusal(csv, table, "label", standardize=True, dtype="int64") == (
        "standardize=True makes real numbers of the columns, and dtype='int64' keeps whole ones"
    )
    table.write_text("code,label\n1,0\n2.5,1\n")
    assert refusal(csv, table, "label", dtype="int64") == (
        f"{table}: column 'code' holds 2.5 in row 1, counted from 0; dtype='int64' expects whole numbers"
    )

    users = tmp_path / "users.json"
    ann = {"x": [[GREAT, 1], [GREAT + 1, 2]], "y": [0, 1]}
    users.write_text(json.dumps({"users": ["ann"], "num_samples": [2], "user_data": {"ann": ann}}))
    assert "x of user 'ann' holds 16777217 in row 1, counted from 0, which float32 cannot represent" in refusal(
        leaf, users
    )
    assert leaf(users, dtype="int64").x.tolist() == ann["x"]


def test_aligned_tables_keep_whole_numbers() -> None:
    tables = {"bank": Table(x=IDS), "shop": Table(x=IDS[:, :1], y=Y)}
    found = align(tables, "shop", dtype="int64").dataset
    assert found.x.tolist() == [[*row, row[0]] for row in IDS.tolist()]
    assert "which float32 cannot represent" in refusal(align, tables, "shop")
    assert refusal(align, {**tables, "bank": Table(x=IDS / 2)}, "shop", dtype="int64").startswith(
        "party 'bank': x holds 0.5 in row 0"
    )
