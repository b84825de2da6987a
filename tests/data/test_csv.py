"""Tables written here: columns, categories, targets and what is wrong with a file."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.data import csv
from tests.examples import refusal

TABLE = """id,age,color,member,site,label
a,10,red,True,north,yes
b,20,blue,False,south,no
c,30,red,True,north,yes
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "people.csv"
    found.write_text(TABLE)
    return found


def text(path: Path, target: str = "label", **options: Any) -> str:
    return refusal(csv, path, target, **options)


def test_columns(path: Path) -> None:
    data = csv(path, "label", drop=["id"], domain="site")
    # age, color=blue, color=red, member
    assert data.x.tolist() == [[10, 0, 1, 1], [20, 1, 0, 0], [30, 0, 1, 1]]
    assert data.y.tolist() == [1, 0, 1]
    assert data.domains is not None
    assert data.domains.tolist() == [0, 1, 0]
    assert (data.name, data.task.name, data.task.outputs) == ("people", "classification", 2)
    assert data.rows([0]).categories == {"color": ("blue", "red")}
    with pytest.raises(InvalidInput, match="people: column 'color' has 1 categories and 2 columns"):
        replace(data, categories={"color": ["red"]})


def test_standardize_numbers_only(path: Path) -> None:
    data = csv(path, "label", drop=["id", "member", "site"], standardize=True)
    # 10, 20, 30 have mean 20 and variance 200/3.
    z = 10 / (200 / 3) ** 0.5
    assert data.x[:, 0].tolist() == pytest.approx([-z, 0.0, z])
    assert data.x[:, 1:].tolist() == [[0, 1], [1, 0], [0, 1]]


def test_a_constant_column_stays_finite(tmp_path: Path) -> None:
    path = tmp_path / "constant.csv"
    path.write_text("a;y\n5;0.5\n5;1.5\n")
    data = csv(path, "y", standardize=True, separator=";")
    assert data.x.tolist() == [[0.0], [0.0]]
    assert (data.task.name, data.y.tolist()) == ("regression", [0.5, 1.5])


def test_task_by_name(path: Path) -> None:
    assert csv(path, "label", task="binary").task.name == "binary"
    assert csv(path, "age", task="regression").y.tolist() == [10.0, 20.0, 30.0]


def test_columns_refused(path: Path) -> None:
    allowed = "(allowed: age, color, id, label, member, site)"
    assert text(path, "labels") == f"unknown column in people.csv: 'labels'; did you mean 'label'? {allowed}"
    assert text(path, drop=["Id"]) == f"unknown column in people.csv: 'Id'; did you mean 'id'? {allowed}"
    assert text(path, domain="zzz") == f"unknown column in people.csv: 'zzz' {allowed}"
    assert text(path, drop=["label"]) == "target='label' is also in drop; expected it in the table"
    assert text(path, drop=["site"], domain="site") == "domain='site' is also in drop; expected it in the table"
    assert text(path, domain="label") == "domain='label' is the target as well; expected another column"
    everything = ["id", "age", "color", "member", "site"]
    assert text(path, drop=everything) == f"{path} has no column but 'label'; expected at least one to learn from"


FILES = [
    ("", "cannot be read as CSV: No columns to parse from file"),
    ("a,label\n", "has no rows under its header"),
    ("a,label,label\n1,0,0\n2,1,1\n", "has two columns 'label'; expected each name once"),
    (
        "a,label\n16777217,0\n1,1\n",
        ": column 'a' holds 16777217 in row 0, counted from 0, which float32 cannot represent",
    ),
    ("a;label\n1;0\n2;1\n", "has one column, 'a;label'; if ';' is the separator, give separator=';'"),
    ("a,label\n1,0\n1,2,3,4\n", "cannot be read as CSV: Error tokenizing data. C error: Expected 2 fields"),
    ("a,label\n1,2,0\n1,2,1\n", "has more fields in its rows than in its header"),
    (
        "a,b,label\n1,1,0\n2,,0\n,,0\n",
        ": column 'b' has no value in row 2 (3 missing in all); fill them in or drop the column",
    ),
    (
        "a,label\n" + "".join(f"name{i},0\n" for i in range(101)),
        ": column 'a' is text with 101 different values, more than 100; drop it or turn it into numbers",
    ),
]


@pytest.mark.parametrize(("content", "expected"), FILES)
def test_files_refused(path: Path, content: str, expected: str) -> None:
    path.write_text(content)
    separator = "" if expected.startswith(":") else " "
    assert text(path).startswith(f"{path}{separator}{expected}")


def test_more_refused(path: Path) -> None:
    path.write_bytes(b"a,label\n\xff\xfe,0\n")
    assert text(path).startswith(f"{path} cannot be read as CSV: 'utf-8' codec can't decode")
    path.write_text("a,label\n1,0\ninf,1\n")
    assert text(path) == "people: x is not finite in row 1, counted from 0"
    path.unlink()
    assert text(path) == f"{path} is missing; expected a file"


AGES = [str(20 + number) for number in range(30)]
MISTAKES = {
    "a typo": ([*AGES[:3], "3O", *AGES[4:]], r"is numbers but for 1 \('3O' in row 4\); correct or drop it"),
    "decimal commas": ([f"{age},5" for age in AGES], r"has decimal commas \('20,5' in row 1\); write points"),
    "an id": (
        [f"p{age}" for age in AGES],
        "is text with a different value in every row, like an identifier; drop it",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_text_that_is_no_category_is_refused(mistake: str, tmp_path: Path) -> None:
    values, text = MISTAKES[mistake]
    lines = [f'"{value}",{number % 2}' for number, value in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(["age,sick", *lines]) + "\n", "utf-8")
    with pytest.raises(InvalidInput, match=rf"column 'age' {text}"):
        csv(tmp_path / "t.csv", target="sick")


def test_labels_that_are_one_number_are_told(tmp_path: Path) -> None:
    """Codes 1 and 01 became one class without a word."""
    path = tmp_path / "codes.csv"
    path.write_text("a, code\n1, 01\n2, 1\n3,0\n4,\t0\n")
    with pytest.warns(
        UserWarning, match=r"column 'code' holds '01' and '1', which are the same number and become one label"
    ) as told:
        assert csv(path, "code").y.tolist() == [1, 1, 0, 0]
    assert len(told) == 1
    path.write_text("a,code\n1,c01\n2,c1\n3,01\n4,1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert csv(path, "code").task.outputs == 4
        path.write_text("a,code\n1,00\n2,01\n3,00\n")
        assert csv(path, "code").y.tolist() == [0, 1, 0]


def test_few_or_repeated_texts_are_categories(tmp_path: Path) -> None:
    for values, columns in ((["1", "2", "3", "none"] * 6, 4), ([f"ward {n % 15}" for n in range(30)], 15)):
        lines = [f"{value},{number % 2}" for number, value in enumerate(values)]
        (tmp_path / "t.csv").write_text("\n".join(["kind,sick", *lines]) + "\n", "utf-8")
        assert csv(tmp_path / "t.csv", target="sick").x.shape[1:] == (columns,)
