"""Arguments of a wrong kind: told in a sentence that names them, by what the function says that it takes.

What a function checks itself it says best. `guarded` is for the rest: whatever else an argument of a wrong kind makes
of it, somewhere inside, is said of the argument. A switch is checked first, as anything passes for true or false, and
so are text in place of a list, which passes for a list of letters, and the whole numbers of a method, which may name a
purpose, or be left unread, far inside. An argument that the function does not have is answered with the nearest name.
"""

from __future__ import annotations

import collections.abc
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from itertools import islice
from numbers import Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from splitfed.core.errors import LARGEST, PATH, InvalidInput, SplitfedError, is_path, short, unknown

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type)

ABSENT = "absent"
"""Module of classes that stand for those of their names, which are imported for type checkers alone."""
MOST = 1000
"""Entries of a list or table that are looked at."""

WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    bytes: "bytes",
    None: "None",
    types.NoneType: "None",
    os.PathLike: "a path",
}
"""Type -> what it is called in a message."""


def guarded(function: F, module: str | None = None, first: Collection[Any] = (bool,)) -> F:
    """Return `function` with its arguments checked by what they are annotated with, where it does not do so itself.

    `module`: from where users import it, if not from where it stands. `first`: annotations of which arguments are
    checked before the call. Raises `InvalidInput` for one of these that does not fit, for an argument that the function
    does not have, and in place of any error that is not of this package where an argument is of a wrong kind.
    """

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        for name in given.keys() - (known := _keywords(function)).keys() if given else ():
            if inspect.Parameter.VAR_KEYWORD not in known.values():
                raise unknown(f"argument of {function.__qualname__.removesuffix('.__init__')}:", name, known)
        for name, value, annotation in _arguments(function, args, given):
            # A seed may be any whole number, however large.
            beyond = annotation is not bool and _is_beyond(value)
            early = annotation in first or (isinstance(value, (str, bytes)) and _takes_list(annotation))
            if early and not beyond and not fits(value, annotation):
                raise _refusal(name, value, annotation)
        try:
            return function(*args, **given)
        except SplitfedError:
            raise
        except Exception as error:
            if (refusal := _first_misfit(function, args, given)) is not None:
                raise refusal from error
            raise

    if module is not None:
        checked.__module__ = module
    return cast(F, checked)


def guard_constructor(kind: K) -> K:
    """Return the class with its constructor `guarded`."""
    return _guard(kind, "__init__")


def guard_class(kind: K) -> K:
    """Return the class with its constructor and its public methods `guarded`."""
    own = [name for name, found in vars(kind).items() if not name.startswith("_") and inspect.isfunction(found)]
    return _guard(kind, "__init__", *own)


def _guard(kind: K, *methods: str) -> K:
    for name in methods:
        setattr(kind, name, guarded(vars(kind)[name], first=(bool, int, int | None)))
    return kind


def check_overrides(kind: type, contract: type) -> None:
    """Raise `InvalidInput` for a method of the class `kind` that cannot be called as that of `contract` it overrides.

    A call by the names and the number of arguments of the method of `contract` must be possible.
    """
    for name, declared in vars(contract).items():
        own = vars(kind).get(name)
        if name.startswith("_") or not (inspect.isfunction(declared) and inspect.isfunction(own)):
            continue
        (_, *called), (_, *taken) = (list(inspect.signature(f).parameters.values()) for f in (declared, own))
        by_name = [one.name for one in called if one.kind is one.KEYWORD_ONLY]
        try:
            inspect.signature(own).bind(None, *[None] * (len(called) - len(by_name)), **dict.fromkeys(by_name))
        except TypeError:
            expected, given = (", ".join(one.name for one in part) for part in (called, taken))
            where = f"{kind.__name__}.{name}"
            raise InvalidInput(f"{where}({given}) cannot be called; expected {name}(self, {expected})") from None


def fits(value: Any, annotation: Any) -> bool:
    """Return whether `value` is what `annotation` says; True where that cannot be told."""
    if annotation is None or annotation is types.NoneType:
        return value is None
    if annotation is bool:
        return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if annotation is int:
        return _is_whole(value)
    if annotation is float:
        # Torch takes no whole number beyond for any number.
        return not _is_beyond(value) and isinstance(value, Real) and not isinstance(value, bool)
    if annotation is Any:
        return True
    if _takes_path(annotation) and isinstance(value, (str, os.PathLike)):
        return is_path(value)
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is collections.abc.Callable and isinstance(inner[0], list):
        return takes(value, len(inner[0]))
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) for one in inner)
    if isinstance(kind := origin or annotation, type):
        return _is_kind(value, kind) and _entries_fit(value, kind, inner)
    return True


def takes(value: Any, count: int) -> bool:
    """Return whether `value` can be called with `count` arguments, as far as its signature tells."""
    try:
        inspect.signature(value).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # it tells none
        return callable(value)
    return True


def _takes_path(annotation: Any) -> bool:
    return any(isinstance(one, type) and issubclass(one, os.PathLike) for one in (annotation, *get_args(annotation)))


def _takes_list(annotation: Any) -> bool:
    kinds = (get_origin(one) or one for one in (annotation, *get_args(annotation)))
    return any(kind in (tuple, list, collections.abc.Sequence, collections.abc.Iterable) for kind in kinds)


def _is_beyond(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


def _is_kind(value: Any, kind: Any) -> bool:
    if getattr(kind, "_is_protocol", False):
        return {name for name in vars(kind) if not name.startswith("_")} <= {*dir(value)}
    if kind.__module__ == ABSENT:
        return any(one.__name__ == kind.__name__ for one in type(value).__mro__)
    listed = kind.__module__ == "collections.abc" and issubclass(kind, collections.abc.Iterable)
    if listed and not issubclass(kind, Mapping):
        # Arrays and views of tables go as lists; text, tables and what has no order or no end do not.
        like = isinstance(value, kind) or hasattr(value, "__len__")
        return like and not isinstance(value, (str, bytes, Mapping, set, frozenset)) and _iterable(value)
    if kind in (tuple, list):
        return isinstance(value, (tuple, list))
    return isinstance(value, kind)


def _iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


def _entries_fit(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    """Return whether the entries of a list or table are of the kinds `inner`, as far as they are looked at."""
    if isinstance(value, Mapping) and len(inner) == 2:
        pairs = list(value.items())[:MOST]
        return all(fits(key, inner[0]) and fits(one, inner[1]) for key, one in pairs)
    if not inner or not hasattr(value, "__len__") or kind is collections.abc.Callable:
        return True
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(one, inner[0]) for one in islice(value, MOST))


def _is_whole(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not _is_beyond(value)


def describe(annotation: Any, words: Mapping[Any, str] = WORDS) -> str:
    """Return what `annotation` says in words: "a whole number or None".

    `words`: type -> what it is called; "" leaves it out of the text, and `object` stands for classes without a word.
    """
    if annotation is Any:
        return words.get(object, "anything")
    if annotation in words:
        return words[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is collections.abc.Callable:
        return "a function"
    if origin in (Union, types.UnionType):
        # Whole numbers are numbers, and paths are mostly written as text.
        return " or ".join(dict.fromkeys(said for one in inner if (said := describe(one, words))))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    kind: Any = origin or annotation
    if not isinstance(kind, type):
        return "another value"
    entries = [] if Any in inner[-1:] else [_plural(describe(one, words)) for one in inner if one is not ...]
    if issubclass(kind, collections.abc.Mapping):
        keys = f" with {entries[0]} as keys" if entries and inner[0] is not str else ""
        return f"a table of {entries[1]}{keys}" if entries[1:] and entries[1] else "a table"
    if issubclass(kind, (tuple, list, collections.abc.Iterable)) and kind.__module__ in ("builtins", "collections.abc"):
        return f"a list of {entries[0]}" if entries and entries[0] else "a list"
    if issubclass(kind, os.PathLike):
        return "a path"
    return words.get(object, f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}")


def _plural(said: str) -> str:
    """Return "whole numbers or text" for "a whole number or text"."""
    return " or ".join(re.sub(r"^an? (.*?)( of .*)?$", r"\1s\2", one) for one in said.split(" or "))


def _refusal(name: str, value: Any, annotation: Any) -> InvalidInput:
    path = _takes_path(annotation) and isinstance(value, (str, os.PathLike))
    most = " below 2**63" if _is_beyond(value) else ""
    return InvalidInput(
        f"{name}={short(value)} is not allowed; expected {PATH if path else describe(annotation)}{most}"
    )


def _first_misfit(function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> InvalidInput | None:
    """Return the refusal of the first argument that is not of the kind that `function` says, None where all are."""
    for name, value, annotation in _arguments(function, args, given):
        if not fits(value, annotation):
            return _refusal(name, value, annotation)
    return None


def _arguments(
    function: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and annotation of each argument given whose annotation is known; strangers are left out."""
    positional, kinds = signature_of(function)
    for name, value in (*zip(positional, args, strict=False), *given.items()):
        if name in kinds:
            yield name, value, kinds[name]


@cache
def _keywords(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return what may be given to `function` by name, each with its kind of parameter."""
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.items()
    return {name: one.kind for name, one in parameters if name != "self" and one.kind not in unnamed}


@cache
def signature_of(function: Callable[..., Any]) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the names of positional parameters, and the annotation of every parameter that has one we can read."""
    parameters = inspect.signature(function).parameters.values()
    inner = inspect.unwrap(function)
    kinds: dict[str, Any] = {}
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or one.annotation is one.empty:
            continue
        with suppress(AttributeError, TypeError, SyntaxError):
            kinds[one.name] = _read(one.annotation, inner.__globals__)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in by_place), kinds


def _read(annotation: Any, names: dict[str, Any]) -> Any:
    """Return what `annotation` says by the global `names` of its module; a class stands for each that is absent."""
    holder, absent = types.SimpleNamespace(__annotations__={"it": annotation}), dict[str, Any]()
    while True:
        try:
            return get_type_hints(holder, names, absent)["it"]
        except NameError as error:
            name = error.name or ""
            absent[name] = type(name, (), {"__module__": ABSENT})
