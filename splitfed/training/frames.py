"""A run's history as flat rows, and as a pandas table: a row a round, or a row a round and client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("validation", "test")


def round_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return one entry of `Run.history` as a flat row: column -> number, text or None.

    "validation" and "test" are the scores on the union of all clients' rows; "test_std", "test_min", ... tell how far
    clients lie apart; "test_head_NAME", "test_method_NAME" and "test_across_NAME" are further scores, means over
    clients where there are several. Numbers of attacks and detectors in training stand under their party's name.
    """
    row: dict[str, Any] = {}
    for key, value in entry.items():
        if key in PARTS:
            row |= _scores(key, value)
        elif key == "epsilons":
            row |= {f"epsilon_{protects}": epsilon for protects, epsilon in value.items()}
        elif key == "dropped":
            row["dropped"] = len(value)
        else:
            row |= dict(_numbers(key, value))
    return row


def client_rows(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the scores of one entry of `Run.history` by client: a flat row a client; none where nothing was scored."""
    parts = [part for part in PARTS if part in entry]
    clients = range(len(entry[parts[0]]["clients"])) if parts else ()
    return [
        {"round": entry["round"], "client": client, **{part: entry[part]["clients"][client] for part in parts}}
        for client in clients
    ]


def history_frame(history: Sequence[Mapping[str, Any]], clients: bool = False) -> pd.DataFrame:
    """Return `history` as a table: a row a round; with `clients` a row a round that was scored and client.

    Columns as in `round_row` and `client_rows`; what a round does not have is missing (NaN).
    """
    # pandas takes half a second to import.
    import pandas as pd

    if clients:
        return pd.DataFrame([row for entry in history for row in client_rows(entry)])
    return pd.DataFrame([round_row(entry) for entry in history])


def _scores(part: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    row = {part: scores["union"]}
    interval, spread = scores.get("interval") or {}, scores.get("spread") or {}
    row |= {f"{part}_{bound}": interval[bound] for bound in ("low", "high") if bound in interval}
    row |= {f"{part}_client_{name}": value for name, value in spread.items()}
    row |= {f"{part}_head_{name}": value for name, value in (scores.get("heads") or {}).items()}
    for kind in ("method", "across"):
        for name, values in (scores.get(kind) or {}).items():
            known = [value for value in values if value is not None]
            row[f"{part}_{kind}_{name}"] = sum(known) / len(known) if known else None
    return row


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts in `value`, by their place; lists are left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}_{key}", inner)
    elif value is None or isinstance(value, (str, bool, Real)):
        yield name, value
