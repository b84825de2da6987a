"""What a comparison of settings found, as a value, as text, as Markdown and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from splitfed.stats.paired import MOST_PAIRS, PairedDifference, least_pairs
from splitfed.study.report.data import group_by
from splitfed.study.report.units import count_noun

Json = dict[str, Any]
HEADS = ("metric", "first", "second", "difference", "d_z", "t", "sign flip", "Holm", "claim", "needed")


@dataclass(frozen=True)
class ComparedMetric:
    """One metric of one pair of sides, over one kind of unit: "seeds", "victims" or "test rows".

    `first`, `second`: means of the two sides over what was paired. `found`: what the differences say, second minus
    first. `tested`: whether there is a test: a cost that is counted and the same in every seed needs none.
    `corrected`: the sign-flip test's p value after Holm's correction among all that were tested over the same kind of
    unit; `claim`: whether that is at most the level. `needed`: the smallest number of seeds for a claim, None where
    more than 10 000 would be, where nothing differs, with a single seed, and over rows. `positive`: what a difference
    above 0 means.
    """

    pair: int
    metric: str
    over: str
    first: float
    second: float
    found: PairedDifference
    positive: str = ""
    tested: bool = True
    corrected: float | None = None
    claim: bool = False
    needed: int | None = None
    note: str = ""


@dataclass(frozen=True)
class ComparedPair:
    """Two sides that were paired: their names, what they share (`where`), what else differs, and the seeds of both."""

    first: str
    second: str
    where: str
    differs: tuple[str, ...]
    seeds: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """The names, and where."""
        return f"{self.first} -> {self.second}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Comparison:
    """All pairs of sides that were compared, with all their metrics; `level` and `power` are those of a claim."""

    pairs: tuple[ComparedPair, ...]
    metrics: tuple[ComparedMetric, ...]
    level: float
    power: float

    @property
    def claims(self) -> tuple[ComparedMetric, ...]:
        """Differences whose corrected p value is at most the level."""
        return tuple(one for one in self.metrics if one.claim)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def to_frame(self) -> Any:
        """Return a pandas frame, a row a metric."""
        # pandas takes half a second to import.
        import pandas as pd

        return pd.DataFrame(self.rows())

    def rows(self) -> list[Json]:
        """Return a flat row a metric; None stands for what is no number."""
        return [self._row(one) for one in self.metrics]

    def to_json(self) -> Json:
        """Return all of it as plain data that JSON can hold."""
        pairs = [
            {
                **{key: getattr(pair, key) for key in ("first", "second", "where")},
                **{key: list(getattr(pair, key)) for key in ("differs", "seeds", "notes")},
            }
            for pair in self.pairs
        ]
        told = {"pairs": pairs, "metrics": self.rows(), "remarks": self.remarks()}
        return {"level": self.level, "power": self.power, **told}

    def remarks(self) -> list[str]:
        """Return what a reader must know beside the numbers, one sentence each."""
        tests = sum(one.tested for one in self.metrics if one.over == "seeds")
        found = []
        for seeds in sorted({len(pair.seeds) for pair in self.pairs}):
            least = 2.0 ** (1 - seeds)
            if tests and least * tests > self.level:
                corrected = f", or {min(1.0, least * tests):.3g} corrected for {tests} tests" if tests > 1 else ""
                found.append(
                    f"{count_noun(seeds, 'seed')}: the permutation test cannot fall below {least:.3g}{corrected}; "
                    f"nothing can be claimed at {self.level:g} with fewer than {least_pairs(self.level / tests)} seeds"
                )
        if tests:
            found.append(
                "needed: seeds for a claim of the difference as observed, with a chance of "
                f"{self.power:g}; few seeds estimate it badly, and rather too large"
            )
        if any(one.over != "seeds" for one in self.metrics):
            found.append("over victims or test rows: speaks of other rows under these trained models, not of trainings")
        return found

    def to_text(self) -> str:
        """Return a table a pair, with its notes below, as text."""
        lines: list[str] = []
        for number, pair in enumerate(self.pairs):
            table = [HEADS, *self._cells(number)]
            widths = [max(len(row[i]) for row in table) for i in range(len(HEADS))]
            lines += [f"{pair.title}, {count_noun(len(pair.seeds), 'seed')}"]
            for row in table:
                first, *rest = (
                    cell.ljust(w) if i == 0 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                )
                lines.append("  ".join([first, *rest]).rstrip())
            lines += [*self._notes(number, pair), ""]
        return "\n".join([*lines, *self.remarks()])

    def to_markdown(self) -> str:
        """Return the same as Markdown."""
        lines: list[str] = []
        for number, pair in enumerate(self.pairs):
            lines += [f"**{_escape(pair.title)}**, {count_noun(len(pair.seeds), 'seed')}", ""]
            lines += [_markdown_row(HEADS), "|---|" + "---:|" * (len(HEADS) - 1)]
            lines += [*(_markdown_row(cells) for cells in self._cells(number)), ""]
            lines += [*(f"- {_escape(note)}" for note in self._notes(number, pair)), ""]
        return "\n".join([*lines, *(f"- {_escape(text)}" for text in self.remarks())])

    def _cells(self, number: int) -> Iterator[tuple[str, ...]]:
        for one in self.metrics:
            if one.pair != number:
                continue
            found = one.found
            name = one.metric if one.over == "seeds" else f"{one.metric}, {found.n} {one.over}"
            ends = "" if math.isnan(found.low) or not one.tested else f" [{found.low:+.3g}, {found.high:+.3g}]"
            numbers = (f"{one.first:.4g}", f"{one.second:.4g}", f"{found.mean:+.3g}{ends}")
            if not one.tested:
                yield (name, *numbers, *("" for _ in range(5)), "")
                continue
            tests = (found.t_p, found.flip.p, math.nan if one.corrected is None else one.corrected)
            effect = "-" if math.isnan(found.effect) else f"{found.effect:+.2f}"
            yield (name, *numbers, effect, *map(_format_p, tests), "yes" if one.claim else "no", _format_needed(one))

    def _notes(self, number: int, pair: ComparedPair) -> list[str]:
        said = [f"{one.metric}: {one.note}" for one in self.metrics if one.pair == number and one.note]
        directed = [one for one in self.metrics if one.pair == number and one.over == "seeds"]
        positive = group_by(directed, lambda one: one.positive)
        told = "; ".join(f"{what} ({', '.join(o.metric for o in some)})" for what, some in positive.items())
        meant = [f"above 0, {pair.second} {told}"] if told else []
        differs = [f"they differ in {', '.join(pair.differs)}"] if pair.differs else []
        return [*differs, *meant, *said, *pair.notes]

    def _row(self, one: ComparedMetric) -> Json:
        pair, found = self.pairs[one.pair], one.found
        row = {
            **{key: getattr(pair, key) for key in ("first", "second", "where")},
            "metric": one.metric,
            "over": one.over,
            "n": found.n,
            "first_mean": one.first,
            "second_mean": one.second,
            "difference": found.mean,
            "low": found.low,
            "high": found.high,
            "effect": found.effect,
            "t_p": found.t_p,
            "sign_flip_p": found.flip.p,
            "sign_flip_least_p": found.flip.least,
            "sign_flip_exact": found.flip.exact,
            "wilcoxon_p": found.rank_p,
            "tested": one.tested,
            "corrected_p": one.corrected,
            "claim": one.claim,
            "needed_seeds": one.needed,
            "positive": one.positive,
            "note": one.note,
        }
        if not one.tested:
            row |= dict.fromkeys(("low", "high", "effect", "t_p", "sign_flip_p", "wilcoxon_p"))
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _format_needed(one: ComparedMetric) -> str:
    if one.needed is not None:
        return str(one.needed)
    if one.over != "seeds" or math.isnan(one.found.effect):
        return "-"
    return f">{MOST_PAIRS}" if one.found.effect else "never"


def _format_p(p: float) -> str:
    return "-" if math.isnan(p) else "<1e-4" if p < 1e-4 else f"{p:.2g}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    """Return `text` so that Markdown shows it as it is: names come from files."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in text)
