"""The tables of FedAKT in Markdown: scores, paired differences, and what becomes of the paper's claims of order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.papers.table import ANY, PERCENT, Measured, markdown, mean, signed, verdict

ALONE, WHOLE = "standalone", "FedAKT"
OTHERS = ("FedProto", "FML", "FedKD", "LG-FedAvg", "FedDistill")
PARTS = ("no dual use", "no mutual distillation")
PLACES = {
    "adapter": "the averaged adapter under the client's head",
    "meme": "FML's meme",
    "mentee": "FedKD's mentee",
    "nearest_own_prototype": "FedProto's nearest prototype of an own class",
}
Seeds = Mapping[int, Mapping[str, Any]]
# The paper's margins in points of accuracy on CIFAR-10, CIFAR-100 and Tiny-ImageNet (its group of CNNs, 20 clients): of
# what, over what. Those over training alone are told for the first two and the pathological partition.
BEST = "the best of the others"
PUBLISHED: dict[str, dict[tuple[str, str], tuple[float, ...]]] = {
    "Fashion-MNIST, 2 classes a client": {
        (WHOLE, ALONE): (1.24, 5.04),
        (PARTS[0], ALONE): (0.80, 3.28),
        (PARTS[1], ALONE): (0.28, 0.51),
        (WHOLE, BEST): (0.84, 1.47, 0.85),
    },
    "Fashion-MNIST, Dirichlet .1": {(WHOLE, BEST): (0.64, 1.32, 2.00)},
}


def keyed(name: str, weight: float | None, setting: str, seed: int) -> str:
    """Return the key of a cell; `weight` None: the method has none, or it is fixed."""
    return f"{called(name, weight)} | {setting} | seed {seed}"


def called(name: str, weight: float | None) -> str:
    """Return what a method is called with its weight."""
    return name if weight is None else f"{name}, lambda {weight:g}"


def chosen(done: Measured, setting: str, weights: Sequence[float], seed: int) -> tuple[float, dict[float, float]]:
    """Return the weight with the best validation accuracy at `seed` (ties and none: the first), and what each had."""
    keys = {weight: keyed(WHOLE, weight, setting, seed) for weight in weights}
    had = {weight: float(done[key]["validation"]) for weight, key in keys.items() if key in done}
    return max(weights, key=lambda weight: had.get(weight, -1.0)), had


def minus(one: Seeds, other: Seeds, what: str = "accuracy") -> list[float]:
    """Return the differences at the seeds that both have."""
    return [float(one[seed][what]) - float(other[seed][what]) for seed in one if seed in other]


def show_setting(
    done: Measured, setting: str, seeds: Sequence[int], weights: Sequence[float], choosing: int
) -> list[str]:
    """Return the parts of one partition: its table, the claims, and what else the methods answer with."""
    best, had = chosen(done, setting, weights, choosing)

    def found(name: str, weight: float | None) -> Seeds:
        return {s: done[key] for s in seeds if (key := keyed(name, weight, setting, s)) in done}

    rows = {called(name, None): found(name, None) for name in (ALONE, *OTHERS)}
    for weight in (best, *(w for w in weights if w != best)):
        rows |= {called(name, weight): found(name, weight) for name in (WHOLE, PARTS[0])}
    rows[PARTS[1]] = found(PARTS[1], None)
    rows = {name: one for name, one in rows.items() if one}
    if not rows:
        return []
    first = called(WHOLE, best)
    lines = [_line(name, one, rows.get(ALONE, {}), rows.get(first, {}), name == first) for name, one in rows.items()]
    head = [setting, "test accuracy, %", "deviation over clients", "worst client", "minus standalone"]
    parts = [markdown([*head, f"{first} minus it", "seeds", "sent, MiB"], lines)]
    told = ", ".join(f"lambda {weight:g}: {score:.1f} %" for weight, score in had.items())
    parts.append(
        f"Validation accuracy at seed {choosing}: {told or 'not measured yet'}; so lambda {best:g} is compared."
    )
    if first in rows:
        parts.append(_claims(rows, first, called(PARTS[0], best)))
        named = {WHOLE: first, PARTS[0]: called(PARTS[0], best), PARTS[1]: PARTS[1], ALONE: ALONE}
        parts += _margins(rows, PUBLISHED.get(setting, {}), named)
    return [*parts, *_elsewhere(rows)]


def _line(name: str, one: Seeds, alone: Seeds, whole: Seeds, first: bool) -> list[object]:
    gain = [] if name == ALONE else minus(one, alone)
    lead = [] if first else minus(whole, one)
    columns = [mean([entry[what] for entry in one.values()], PERCENT, 1) for what in ("accuracy", "deviation", "worst")]
    sent = sum(float(entry["MiB"]) for entry in one.values()) / len(one)
    return [_shown(name), *columns, *(mean(d, ANY, 1) if d else "" for d in (gain, lead)), len(one), f"{sent:.1f}"]


def _shown(name: str) -> str:
    return f"{name} (= no adapter)" if name == ALONE else name


def _claims(rows: Mapping[str, Seeds], first: str, without: str) -> str:
    """Say of every claim of the paper's order what the paired differences of `first` say."""
    told = []
    for kind, names in (("FedAKT above", (ALONE, *OTHERS)), ("FedAKT above itself with", (without, PARTS[1]))):
        by: dict[str, list[str]] = {}
        for name in names:
            if name in rows and (pairs := minus(rows[first], rows[name])):
                by.setdefault(verdict(pairs), []).append(name)
        told += [f"{kind} {', '.join(who)}: **{word}**" for word, who in by.items()]
    return f"The paper's order: {'; '.join(told)}." if told else ""


def _margins(
    rows: Mapping[str, Seeds], published: Mapping[tuple[str, str], tuple[float, ...]], named: Mapping[str, str]
) -> list[str]:
    """Return the paper's margins with ours beside them; of the others the best is the one with the best mean here."""
    others = [name for name in (ALONE, *OTHERS) if name in rows]
    best = max(others, key=lambda name: fmean(float(e["accuracy"]) for e in rows[name].values()), default=None)
    lines = []
    for (what, over), theirs in published.items():
        one, other = rows.get(named[what], {}), rows.get(best if over == BEST else named[over], {}) if best else {}
        if pairs := minus(one, other):
            told = f"{over} ({best})" if over == BEST else over
            paper = " / ".join(f"{value:+.2f}" for value in theirs)
            missed = " / ".join(f"{fmean(pairs) - value:+.1f}" for value in theirs)
            lines.append([f"{named[what]} over {told}", signed(pairs, 1), paper, missed])
    head = ["margin, points", "here", "paper: CIFAR-10 / CIFAR-100 / Tiny-ImageNet", "here minus the paper's"]
    return [markdown(head, lines)] if lines else []


def _elsewhere(rows: Mapping[str, Seeds]) -> list[str]:
    """Return the accuracies of what a method shares, in the same round."""
    told = []
    for name, one in rows.items():
        for place, what in PLACES.items():
            if scores := [float(e["elsewhere"][place]) for e in one.values() if place in e["elsewhere"]]:
                told.append(f"{what} ({name}) {mean(scores, PERCENT, 1)}")
    return [f"In the same rounds, in percent: {'; '.join(told)}."] if told else []
