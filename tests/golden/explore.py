"""Which golden cases are run: a set that covers every pair of choices, where the library takes the pair at all.

A covering set made beforehand would hide most pairs: one refused pair in a case takes the other pairs of the case with
it. So every pair of names is tried in one context after another, until a case with it trains (or, for an attack, until
somebody is let to attack); a pair for which nothing does is covered by its refusals. A context that is known to refuse
one of the pair is passed over. All contexts are tried in one fixed order, so that two processes find the same cases.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from splitfed.attacks.base import Needs
from splitfed.registry import TABLES, load
from tests.golden.cases import KINDS, NONE, Case

Choice = tuple[str, str]
"""A kind and a name."""
Pair = tuple[Choice, Choice]
Parts = dict[str, str]

TRAINED = ("topology", "schedule", "defense", "method")
ALONE = ("fusion", "manipulation", "detector")
CONTEXTS = (
    Case("digits", "u_shaped", "splitfed_v1"),
    Case("digits", "local", "independent"),
    Case("digits", "vanilla", "splitfed_v1"),
    Case("digits", "vertical", "joint"),
    Case("parity", "u_shaped", "splitfed_v1"),
    Case("parity", "vertical", "joint"),
    Case("digits", "u_shaped", "blind"),
    Case("parity", "multi_task", "sequential"),
)
"""Between them they take whatever the library takes somewhere."""
APART = (
    Case("single", "local", "splitfed_v1"),
    Case("summed", "vertical", "joint"),
    Case("active", "custom", "joint"),
)
"""What some attacks need: a round of one row, logits that are only added up, a party that knows a part of a row."""
UPLOADS = ("fedproto", "feddistill", "fml")
"""Methods whose messages attacks read."""
HOMES, TRIES = 3, 4


def names(kind: str) -> tuple[str, ...]:
    return tuple(TABLES[KINDS[kind]])


def training_pairs() -> list[Pair]:
    """Return every pair of names of two kinds that make up a training."""
    kinds = combinations(TRAINED, 2)
    return [((a, one), (b, other)) for a, b in kinds for one in names(a) for other in names(b)]


def attack_pairs() -> list[Pair]:
    """Return every attack with every name that makes up a training."""
    return [(("attack", a), (kind, name)) for a in names("attack") for kind in TRAINED for name in names(kind)]


def said(pair: Iterable[Choice]) -> str:
    return " ".join("=".join(one) for one in pair)


def placed(context: Case, *choices: Choice) -> Case:
    """Return `context` with `choices` in their places."""
    return replace(context, **{kind: name for kind, name in choices if kind != "attack"})


def choices_of(case: Case) -> list[Choice]:
    return [(kind, getattr(case, kind)) for kind in TRAINED if getattr(case, kind) != NONE]


def attempts(*choices: Choice) -> Iterator[Case]:
    """Yield the cases in which `choices` are tried, each once."""
    yield from dict.fromkeys(placed(context, *choices) for context in CONTEXTS)


def attack_contexts(attack: str) -> list[Case]:
    """Return where `attack` is tried by itself."""
    kind = load("attacks", attack)
    if Needs.TRAINING_ATTACK in kind.requires:
        inside = attack if hasattr(kind, "enter") else next(n for n in names("attack") if _watches(n))
        return [replace(context, intruder=inside) for context in CONTEXTS]
    if kind.reads:
        return [replace(context, method=method) for method in UPLOADS for context in CONTEXTS]
    return [*CONTEXTS, *APART]


def _watches(attack: str) -> bool:
    kind: Any = load("attacks", attack)
    return hasattr(kind, "enter") and not kind.active


class Golden:
    """Tries pairs and keeps what every case resulted in: case -> part -> hash.

    `train(case)` returns a run or None and the parts; `attack(run, name)` whether it was let to, and the parts.
    """

    def __init__(
        self, train: Callable[[Case], tuple[Any, Parts]], attack: Callable[[Any, str], tuple[bool, Parts]]
    ) -> None:
        self.train, self.attack = train, attack
        self.found: dict[str, Parts] = {}
        self.runs: dict[Case, Any] = {}
        self.covered: set[Pair] = set()
        self.refused: set[Pair] = set()
        self._attacked: dict[tuple[Case, str], bool] = {}

    def run(self, case: Case) -> Any:
        """Return the run of `case`, trained once, or None where it is refused."""
        if case not in self.runs:
            self.runs[case], self.found[case.name] = self.train(case)
            if self.runs[case] is not None:
                self.covered |= set(combinations(choices_of(case), 2))
        return self.runs[case]

    def hit(self, case: Case, attack: str) -> bool | None:
        """Return whether `attack` was let to attack `case`; None where there is nothing to attack."""
        run = self.run(case)
        if run is None:
            return None
        if (case, attack) not in self._attacked:
            let, parts = self.attack(run, attack)
            self.found[case.name] |= parts
            self._attacked[case, attack] = let
            if let:
                self.covered |= {(("attack", attack), one) for one in choices_of(case)}
        return self._attacked[case, attack]

    def hopeless(self, case: Case, target: Pair) -> bool:
        """Tell whether `case` holds a pair other than `target` that nothing takes."""
        return any(pair in self.refused and pair != target for pair in combinations(choices_of(case), 2))

    def cover(self, pair: Pair) -> None:
        """Try a pair of training choices until it trains."""
        if pair in self.covered:
            return
        tried = [case for case in attempts(*pair) if not self.hopeless(case, pair)]
        if not any(self.run(case) is not None for case in tried or list(attempts(*pair))[:1]):
            self.refused.add(pair)

    def homes(self, attack: str) -> list[Case]:
        """Return the first contexts, by themselves, where `attack` is let to."""
        found: list[Case] = []
        for case in attack_contexts(attack):
            if len(found) < HOMES and self.hit(case, attack):
                found.append(case)
        return found

    def cover_attack(self, pair: Pair, homes: list[Case]) -> None:
        """Try an attack with a training choice: in its homes first, then wherever that choice trains."""
        (_, attack), choice = pair
        if pair in self.covered:
            return
        like = homes[:1] or attack_contexts(attack)[:1]
        wider = [replace(case, method=like[0].method, intruder=like[0].intruder) for case in CONTEXTS]
        tried = 0
        for case in dict.fromkeys(placed(context, choice) for context in [*homes, *wider]):
            if self.hopeless(case, pair):
                continue
            hit = self.hit(case, attack)
            tried += hit is not None
            if hit or tried == TRIES:
                return

    def everything(self, only: str = "", progress: Callable[[str], None] | None = None) -> dict[str, Parts]:
        """Try every pair whose name contains `only`."""
        tell = progress or (lambda text: None)
        pairs = [pair for pair in training_pairs() if only in said(pair)]
        for pair in pairs:
            self.cover(pair)
            tell(said(pair))
        for kind in ALONE:
            for name in names(kind):
                if only in f"{kind}={name}":
                    any(self.run(replace(case, more=(kind, name))) is not None for case in CONTEXTS)
                    tell(f"{kind}={name}")
        asked = [pair for pair in attack_pairs() if only in said(pair)]
        homes = {attack: self.homes(attack) for attack in dict.fromkeys(pair[0][1] for pair in asked)}
        for pair in asked:
            self.cover_attack(pair, homes[pair[0][1]])
            tell(said(pair))
        return self.found


class Lines:
    """Writes a line every `every` pairs to standard error."""

    def __init__(self, every: int = 200) -> None:
        self.every, self.done, self.started = every, 0, time.perf_counter()

    def __call__(self, pair: str) -> None:
        self.done += 1
        if self.done % self.every == 0:
            print(f"{self.done} pairs, {time.perf_counter() - self.started:.0f} s: {pair}", file=sys.stderr, flush=True)
