"""Digests of the files that a folder keeps: a changed character is noticed when the file is read.

A JSON document carries the SHA-256 of its own content, a log one a line that covers all lines before it, a TOML file
one in a comment at its end; files of tensors are listed with theirs in a document that carries one. This guards
against accidents and edits, not against somebody who computes the digest anew: it proves nothing about the author.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from splitfed.core.errors import PATH, InvalidInput, SplitfedError, describe_error, others_code, short

F = TypeVar("F", bound=Callable[..., Any])
FIELD = "digest"
COMMENT = "# sha256 of all lines above: "
RETRAIN = "put back a copy of it, or delete the run's folder and train the run again"
AGAIN = "and run the study again with --resume: what was trained is kept"
REMEASURE = f"delete it {AGAIN}"
RUN_CONFIG = f"delete it and result.json beside it, {AGAIN}"
STUDY_CONFIG = "put back a copy of it, or run the study in another folder"


class Damaged(InvalidInput):
    """A file does not hold what was written into it; the text names the file and what to do."""

    def __init__(self, path: Path, advice: str, why: str = "its content does not match its digest") -> None:
        super().__init__(f"{path} is damaged: {why}; {advice}")
        self.path = path


def reads_folder(function: F) -> F:
    """Return `function`, which reads the folder that it is given first, or that its object has as `folder`.

    A document that is whole and of another form than is written here may make anything of whoever reads it, a missing
    key or text in place of a number: that is said of the folder, in one `InvalidInput`.
    """

    @wraps(function)
    def reading(*args: Any, **given: Any) -> Any:
        first = args[0] if args else given.get("folder", given.get("study"))
        folder = getattr(first, "folder", first)

        def refuse(error: BaseException) -> BaseException:
            malformed = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
            # An undefined name of the report's template is of a class of its own.
            if isinstance(error, SplitfedError) or not (isinstance(error, malformed) or "Undefined" in repr(error)):
                return error
            if not isinstance(folder, (str, Path)):
                return InvalidInput(f"folder={short(folder)} is not allowed; expected {PATH}")
            return InvalidInput(
                f"{str(folder)!r} holds a document of another form than splitfed writes ({describe_error(error)}): it "
                "was changed by hand, or another version wrote it"
            )

        with others_code(refuse):
            return function(*args, **given)

    return cast(F, reading)


def of(raw: bytes) -> str:
    """Return the SHA-256 of `raw`, in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


def of_file(path: Path) -> str | None:
    """Return the SHA-256 of the file at `path`, read piece by piece; None where there is no file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, digest: object, advice: str) -> None:
    """Refuse the file at `path` unless `digest` is its own."""
    found = of_file(path)
    if found is None:
        raise Damaged(path, advice, "it is missing")
    if found != digest:
        raise Damaged(path, advice)


def content(document: Mapping[str, Any]) -> str:
    """Return the digest of what a JSON document says, whatever its spaces and the order of its keys."""
    return of(json.dumps(json.loads(json.dumps(document)), sort_keys=True, separators=(",", ":")).encode())


def json_with_digest(document: Mapping[str, Any], indent: int | None = 1) -> bytes:
    """Return `document` as JSON, with the digest of its content in its last field; in one line if `indent` is None."""
    return json.dumps({**document, FIELD: content(document)}, indent=indent).encode()


def read(path: Path, advice: str) -> dict[str, Any]:
    """Return the JSON document at `path` without its digest; raises `Damaged`, with `advice`, unless it is whole."""
    if path.exists() and not path.is_file():
        raise Damaged(path, advice, "it is no file")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise Damaged(path, advice, "it is no JSON") from None
    if not isinstance(document, dict) or FIELD not in document:
        raise Damaged(path, advice, "it holds no digest of its content")
    if document.pop(FIELD) != content(document):
        raise Damaged(path, advice)
    return document


def chain(previous: str, entry: Mapping[str, Any]) -> str:
    """Return the digest of a log that ends in `entry`; `previous` is the digest of the log up to there ("": empty)."""
    return of(f"{previous} {content(entry)}".encode())


def link(previous: str, entry: Mapping[str, Any]) -> bytes:
    """Return the line of a log that holds `entry`, with the digest of everything up to it."""
    return json.dumps({**entry, FIELD: chain(previous, entry)}).encode() + b"\n"


def links(log: bytes, start: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the entries of a log with their digests, up to the first that does not follow from those before.

    `start`: what stands for the beginning. A line without its end, as a crash leaves it behind, is none.
    """
    for line in log.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(entry, dict) or entry.pop(FIELD, None) != chain(start, entry):
            return
        start = chain(start, entry)
        yield entry, start


def toml_with_digest(text: str) -> bytes:
    """Return the TOML `text` with its digest in a comment at the end."""
    body = text if text.endswith("\n") else f"{text}\n"
    return f"{body}{COMMENT}{of(body.encode())}\n".encode()


def read_toml(path: Path, written: bytes, advice: str | None) -> dict[str, Any]:
    """Return the TOML in `written`, the file at `path`, refusing one whose digest is not its own.

    `advice`: what to do about a file that must carry a digest; None where it need not, as somebody wrote it by hand.
    Raises what `tomllib` does, and `Damaged`.
    """
    body, separator, digest = written.rpartition(b"\n" + COMMENT.encode())
    if separator:
        if digest != of(body + b"\n").encode() + b"\n":
            raise Damaged(path, advice or "take out its last line if it was changed on purpose")
    elif advice is not None:
        raise Damaged(path, advice, "it holds no digest of its content")
    return tomllib.loads(written.decode("utf-8"))


def names(entries: Iterable[object]) -> str:
    """Return a few of `entries` for a message."""
    first, *more = [str(entry) for entry in entries]
    return f"{first} and {len(more)} more" if more else first
