"""Error texts: one line with name, value and bound."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pytest

from splitfed.core.errors import (
    LONGEST,
    InvalidInput,
    SplitfedError,
    check_count,
    check_fields,
    check_names,
    check_number,
    check_path,
    describe_error,
    require_count,
    require_counts,
    require_name,
    require_number,
    unknown,
)


def test_unknown_names_the_nearest_first_and_then_all() -> None:
    error = unknown("defense", "nois", ["noise", "distance_correlation"])
    text = "unknown defense 'nois'; did you mean 'noise'? (allowed: distance_correlation, noise)"
    assert str(error) == text
    assert isinstance(error, InvalidInput)


def test_unknown_without_a_near_name() -> None:
    assert str(unknown("role", "zzz", ["client"])) == "unknown role 'zzz' (allowed: client)"
    assert str(unknown("role", "zzz", [])) == "unknown role 'zzz' (allowed: none)"


def test_what_others_say_at_length_is_cut_between_words() -> None:
    text = " ".join(f"word{number}" for number in range(100))
    said = describe_error(RuntimeError(text))
    kept, end = said.removesuffix(" ..."), said[-4:]
    assert end == " ..."
    assert len(said) <= 300
    assert f"RuntimeError: {text} ".startswith(f"{kept} ")
    assert describe_error(RuntimeError("short")) == "RuntimeError: short"


def test_invalid_input_is_a_value_error_and_ours() -> None:
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(InvalidInput, SplitfedError)


@pytest.mark.parametrize("value", [0, 0.5, 1, 1.0])
def test_numbers_inside(value: float) -> None:
    check_number("alpha", value, low=0, high=1)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, True, "1", None])
def test_numbers_outside(value: float) -> None:
    text = f"alpha={value!r} is not allowed; expected a number in [0, 1]"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        check_number("alpha", value, low=0, high=1)


def test_open_bounds_are_said() -> None:
    with pytest.raises(InvalidInput, match=re.escape("lr=0 is not allowed; expected a number in (0, inf)")):
        check_number("lr", 0, low=0, open_low=True)
    with pytest.raises(InvalidInput, match=re.escape("expected a number in [0, 1)")):
        check_number("share", 1.0, low=0, high=1, open_high=True)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_counts(value: int) -> None:
    text = f"rounds={value!r} is not allowed; expected a whole number of at least 1"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        check_count("rounds", value, low=1)
    check_count("rounds", 1, low=1)


@dataclass(frozen=True)
class Checked:
    rate: float = field(default=0.5, metadata=require_number("rate", low=0, high=1))
    rounds: int | None = field(default=None, metadata=require_count("rounds", low=1))
    kind: str = field(default="a", metadata=require_name("kind", ("a", "b")))
    sizes: tuple[int, ...] = field(default=(2,), metadata=require_counts("sizes", low=1, expected="one size or more"))
    free: float = -1.0

    def __post_init__(self) -> None:
        check_fields(self)


def test_fields_are_what_their_metadata_require() -> None:
    assert Checked(1.0, 3, "b") == Checked(rate=1.0, rounds=3, kind="b")
    for given, text in (
        ({"rate": 2.0}, "rate=2.0 is not allowed; expected a number in [0, 1]"),
        ({"rate": None}, "rate=None is not allowed"),
        ({"rounds": 0}, "rounds=0 is not allowed; expected a whole number of at least 1"),
        ({"kind": "c"}, "unknown kind 'c'"),
        ({"sizes": ()}, "sizes=() is not allowed; expected one size or more"),
        ({"sizes": 3}, "sizes=3 is not allowed; expected one size or more"),
        ({"sizes": (3, 0)}, "sizes=0 is not allowed; expected a whole number of at least 1"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(text)):
            Checked(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [10**30, 2**63, 10**5000], ids=["30 digits", "64 bits", "5000 digits"])
def test_counts_have_an_upper_bound(value: int) -> None:
    with pytest.raises(InvalidInput, match=rf"rounds=.* expected a whole number of at least 1 and at most {2**63 - 1}"):
        check_count("rounds", value, low=1)
    with pytest.raises(InvalidInput, match=r"lr=.* expected a number in \(-inf, inf\)"):
        check_number("lr", 10**5000)
    check_count("rounds", 2**63 - 1)


def test_a_text_is_one_short_line_whatever_value_is_in_it() -> None:
    text = str(InvalidInput(f"cut={'é' * 5000!r} is\n  not allowed;\r\nexpected a name"))
    assert text.startswith("cut='ééé")
    assert text.endswith("ééé' is not allowed; expected a name")
    assert (len(text), len(text.splitlines())) == (LONGEST, 1)
    assert str(unknown("name", "x", ["a\nb"])) == "unknown name 'x' (allowed: a b)"


def test_a_name_whose_hash_cannot_be_taken_is_unknown() -> None:
    with pytest.raises(InvalidInput, match=r"unknown link \(\[\],\) \(allowed: memory\)"):
        check_names("link", {"memory": 1}, ([],))


@pytest.mark.parametrize("value", ["a\0b", "x" * 256, "a/" + "é" * 128, None, b"x"])
def test_paths_that_no_file_has(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"folder=.* is not allowed; expected a path of names of at most 255 bytes"):
        check_path("folder", value)
    check_path("folder", f"/{'x' * 255}/{'é' * 127}")
