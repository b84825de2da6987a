"""CSV: a table with a header; numbers are kept, text becomes one column a category."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from csv import Error, reader
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from splitfed.core.errors import InvalidInput, check_count, first_line, short
from splitfed.data import arrays
from splitfed.data.conversion import as_rows
from splitfed.data.dataset import Dataset
from splitfed.data.from_python import RowType, TaskLike, labelled
from splitfed.data.sources.files import check_columns, existing_file

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = 100
FEW_CATEGORIES = 12
"""Largest number of different values for which text is always read as categories."""
COLUMNS = 2**14
"""Default of `most_columns`; the header is checked before the rows are read."""
SEPARATORS = (",", ";", "\t", "|")
"""Common column separators; a header of one column that contains another of these is refused."""
HEADER = 2**22
"""The most bytes of a header."""
LARGE = 2**26
"""Decompressed bytes from which on a table may be refused as a decompression bomb; they take at most a second."""

_NUMBER = r"[+-]?[0-9]+(\.[0-9]*)?"
_OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def csv(
    path: str | Path,
    target: str,
    task: TaskLike = None,
    drop: Sequence[str] = (),
    domain: str | None = None,
    standardize: bool = False,
    separator: str = ",",
    dtype: RowType = "float32",
    most_columns: int = COLUMNS,
) -> Dataset:
    """Return the table in `path`: column `target` is y, `domain` the domains, `drop` is left out, the rest is x.

    x: (rows, columns), which keep their names. A text column becomes a 0/1 column for each of its values, sorted, all
    under its name (`Dataset.categories`); values of a text target become classes 0, 1, ... in sorted order, and so do
    those of a text domain. `standardize` gives each numeric column mean 0 and standard deviation 1 over all rows of the
    file, those of test and victims included, which is a small leak; hence it is off by default. `dtype`: "int64" keeps
    whole numbers, for columns that are codes or token ids, and refuses others. `most_columns`: the largest number of
    columns. Raises `InvalidInput` that names the column, and the row of a missing value (the first row under the header
    is row 1).
    """
    source = existing_file(path)
    if standardize and dtype == "int64":
        raise InvalidInput("standardize=True makes real numbers of the columns, and dtype='int64' keeps whole ones")
    check_count("most_columns", most_columns, low=2)
    table = _read(source, separator, most_columns)
    columns = [str(column) for column in table.columns]
    check_columns(source, columns, target, drop, domain)
    table = table.drop(columns=list(drop))
    _check_complete(source, table)
    _check_whole_numbers(source, table)
    y = table.pop(target)
    if y.dtype.kind in "iu":
        _check_spellings(source, separator, target, y)
    domains = None if domain is None else _codes(table.pop(domain))
    if not len(table.columns):
        raise InvalidInput(f"{source} has no column but {target!r}; expected at least one to learn from")
    parts = {str(name): _encode(source, table[name], standardize, dtype) for name in table.columns}
    names = [name for name, part in parts.items() for _ in range(part.shape[1])]
    x = np.concatenate(list(parts.values()), axis=1)
    rows = as_rows(f"{source.stem}: x", x, dtype, share=True)
    found = labelled(source.stem, rows, _codes(y), task, domains=domains, columns=names)
    texts = {str(name): table[name].astype(str) for name in table.columns if not _is_number(table[name])}
    return replace(found, categories={name: tuple(sorted(set(text))) for name, text in texts.items()})


def _read(source: Path, separator: str, most_columns: int) -> pd.DataFrame:
    # pandas takes half a second to import.
    import pandas as pd

    try:
        with _open_text(source) as file:
            if len(first := file.readline(HEADER)) == HEADER:
                raise InvalidInput(f"{source} has a header of more than {HEADER} bytes; expected names of columns")
            file.seek(0)
            if len(separator) == 1:
                # pandas makes a series for each column, which takes 20 s for 300,000 of them.
                lines = io.StringIO(first.decode("utf-8-sig"), newline=None)
                names = next(reader(lines, delimiter=separator, skipinitialspace=True), [])
                if twice := next((name for name, count in Counter(names).items() if name and count > 1), None):
                    raise InvalidInput(f"{source} has two columns {twice!r}; expected each name once")
                columns = len(names)
            else:
                columns = len(pd.read_csv(io.BytesIO(first), sep=separator, nrows=0).columns)
            if not columns:
                raise pd.errors.EmptyDataError("No columns to parse from file")
            if columns > most_columns:
                raise InvalidInput(
                    f"{source} has {columns} columns; expected at most {most_columns} (argument most_columns)"
                )
            table = pd.read_csv(file, sep=separator, skipinitialspace=True)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, Error) as error:
        raise InvalidInput(f"{source} cannot be read as CSV: {first_line(error)}") from None
    except (EOFError, ValueError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, InvalidInput) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise InvalidInput(f"{source} cannot be read as CSV: {' '.join(str(error).split())}") from None
    if not isinstance(table.index, pd.RangeIndex):  # pandas took the first column for row names
        raise InvalidInput(f"{source} has more fields in its rows than in its header")
    (name, *more), others = list(table.columns), [sign for sign in SEPARATORS if sign != separator]
    if not more and (found := next((sign for sign in others if sign in str(name)), None)) is not None:
        raise InvalidInput(
            f"{source} has one column, {short(name)}; if {found!r} is the separator, give separator={found!r}"
        )
    if not len(table):
        raise InvalidInput(f"{source} has no rows under its header")
    return table


def _open_text(source: Path) -> IO[bytes]:
    """Return the text of a file, decompressed if its suffix says so, up to the memory of the machine."""
    if source.suffix in (".zip", ".zst", ".tar"):
        raise InvalidInput(f"{source} is packed as {source.suffix}; unpack it, or pack it as .gz, .bz2 or .xz")
    if source.suffix not in _OPENERS:
        return source.open("rb")
    most = max(LARGE, arrays.RATIO * source.stat().st_size)
    with _OPENERS[source.suffix](source) as file:
        file.seek(most)
        if file.read(1):
            raise InvalidInput(
                f"{source} unpacks to more than {most} bytes, {arrays.RATIO} times its size or more, which real "
                "tables do not; unpack it if that is intended"
            )
    return cast(IO[bytes], _OPENERS[source.suffix](source))


def _check_complete(source: Path, table: pd.DataFrame) -> None:
    missing = table.isna().to_numpy()
    if missing.any():
        row, column = (int(i) for i in np.argwhere(missing)[0])
        raise InvalidInput(
            f"{source}: column {table.columns[column]!r} has no value in row {row + 1} "
            f"({int(missing.sum())} missing in all); fill them in or drop the column"
        )


def _check_whole_numbers(source: Path, table: pd.DataFrame) -> None:
    """Raise `InvalidInput` for a numeric column with an integer of more than 64 bits, which pandas reads as text."""
    for name in table.columns:
        if _is_number(table[name]) or table[name].dtype.kind == "b":
            continue
        texts = table[name].astype(str)
        if texts.str.fullmatch(_NUMBER).all():
            digits = texts.str.len()
            raise InvalidInput(
                f"{source}: column {name!r} has a whole number of {digits.max()} digits in row "
                f"{int(digits.to_numpy().argmax()) + 1}, more than 64 bits hold; drop the column, or write it shorter"
            )


def _check_spellings(source: Path, separator: str, target: str, y: pd.Series) -> None:
    """Warn of integers that the target writes in two ways, such as 1 and 01, which become one class."""
    import pandas as pd

    with _open_text(source) as file:
        own = pd.read_csv(file, sep=separator, skipinitialspace=True, usecols=[target], dtype=str)[target].str.strip()
    pairs = pd.DataFrame({"text": own, "number": y}).drop_duplicates()
    if len(twice := pairs[pairs.duplicated("number", keep=False)]):
        one, other, *_ = sorted(twice["text"][twice["number"] == twice["number"].iloc[0]])
        warnings.warn(
            f"{source}: column {target!r} holds {one!r} and {other!r}, which are the same number and become one "
            "label; if they are different codes, write a letter before each",
            UserWarning,
            stacklevel=4,
        )


def _is_number(column: pd.Series) -> bool:
    return column.dtype.kind in "biuf"


def _codes(column: pd.Series) -> np.ndarray:
    """Return numbers unchanged, and other values as their index among the sorted values."""
    if _is_number(column):
        return np.asarray(column.to_numpy())
    return np.unique(column.astype(str).to_numpy(dtype=str), return_inverse=True)[1]


def _check_categories(source: Path, column: pd.Series, different: int) -> None:
    """Raise `InvalidInput` for text columns of mostly numbers, of decimal commas, or different in each row."""
    if different <= FEW_CATEGORIES:
        return
    import pandas as pd

    texts = column.astype(str).str.strip()
    numbers, commas = (pd.to_numeric(t, errors="coerce") for t in (texts, texts.str.replace(",", ".", regex=False)))
    wrong = numbers.isna().to_numpy().nonzero()[0]
    what = None
    if commas.notna().all():
        what = f"has decimal commas ({texts.iloc[wrong[0]]!r} in row {wrong[0] + 1}); write points"
    elif 2 * len(wrong) < len(texts):
        what = f"is numbers but for {len(wrong)} ({texts.iloc[wrong[0]]!r} in row {wrong[0] + 1}); correct or drop it"
    elif different == len(texts):
        what = "is text with a different value in every row, like an identifier; drop it"
    if what is not None:
        raise InvalidInput(f"{source}: column {column.name!r} {what}")


def _encode(source: Path, column: pd.Series, standardize: bool, dtype: RowType) -> np.ndarray:
    """Return a column of the table as one or more columns of x: (rows, k) float64, or int64 by `dtype`."""
    if not _is_number(column):
        codes = _codes(column)
        if codes.max() >= CATEGORIES:
            raise InvalidInput(
                f"{source}: column {column.name!r} is text with {codes.max() + 1} different values, "
                f"more than {CATEGORIES}; drop it or turn it into numbers"
            )
        _check_categories(source, column, int(codes.max()) + 1)
        return np.asarray(np.eye(codes.max() + 1)[codes]).astype(np.int64 if dtype == "int64" else np.float64)
    if dtype == "int64":
        # Column by column, so that an error names it; an intermediate double would round large integers.
        return as_rows(f"{source}: column {column.name!r}", column.to_numpy(), dtype).numpy()
    values = column.to_numpy(dtype=np.float64)[:, None]
    if not standardize:
        if column.dtype.kind == "i":
            as_rows(f"{source}: column {column.name!r}", column.to_numpy(), dtype)
        return values
    deviation = values.std()
    return np.asarray((values - values.mean()) / (deviation if deviation > 0 else 1.0))
