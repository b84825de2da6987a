"""`python -m tests.golden --out FILE [--only SUBSTRING]`: write case -> part -> hash as JSON."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from splitfed.registry import TABLES, load
from splitfed.training.run import Run
from tests.golden import cases, hashes
from tests.golden.cases import Case
from tests.golden.explore import Golden, Lines, Parts


def train(case: Case) -> tuple[Run | None, Parts]:
    """Train `case`, or take down how that failed: a failure of ours is a result like any other."""
    try:
        run = cases.train(case)
    except Exception as error:  # noqa: BLE001
        return None, hashes.of_error(error)
    return run, hashes.of_run(run)


def attack(run: Run, name: str) -> tuple[bool, Parts]:
    """Let the default adversary attack, or else the first party of the first client that may."""
    errors: list[Exception] = []
    parties = sorted(p for p in run.engine.parties if not p[-1].isdigit() or p.endswith("0"))
    for party in (None, *parties):
        try:
            (found,) = run.attack(cases.attack(name), adversary=party)
        except Exception as error:  # noqa: BLE001
            errors.append(error)
        else:
            return True, hashes.of_attack(found)
    said = [(type(error).__name__, str(error)) for error in errors]
    return False, {
        f"attack {name}": "refused: " + ", ".join(sorted({kind for kind, _ in said})),
        f"{hashes.TEXT} attack {name}": hashes.of(said),
    }


def alone(only: str) -> dict[str, Parts]:
    """Return the cases of data sets that come with packages, and of the first weights of models."""
    found = {}
    for kind in ("data", "model"):
        for name in TABLES[cases.KINDS[kind]]:
            needs = [
                p for p in inspect.signature(load(cases.KINDS[kind], name)).parameters.values() if p.default is p.empty
            ]
            if only in f"{kind}={name}" and not (kind == "data" and needs):
                found[f"{kind}={name}"] = {"tensors": hashes.of(cases.tensors_of(kind, name))}
    return found


def golden(only: str = "", progress: Any = None) -> tuple[dict[str, Parts], Golden]:
    """Return all cases that `only` asks for, and who tried them."""
    absent = cases.without_case()
    if absent:
        raise SystemExit(f"no golden case can be made of {', '.join(absent)}: see tests/golden/cases.py")
    torch.set_num_threads(1)
    # What is warned of is no result, and is not told twice in one process.
    warnings.simplefilter("ignore")
    tried = Golden(train, attack)
    found = tried.everything(only, progress)
    return {**found, **alone(only)}, tried


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--only", default="", help="only pairs whose name contains this, say method=fedavg")
    options = parser.parse_args()
    started = time.perf_counter()
    found, tried = golden(options.only, Lines())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True), "utf-8")
    kinds = Counter(p["refused"] for p in found.values() if "refused" in p)
    said = [v for p in found.values() for k, v in p.items() if k.startswith("attack ")]
    denied = Counter(v for v in said if v.startswith("refused"))
    print(
        f"{len(found)} cases in {time.perf_counter() - started:.0f} s; not trained: {dict(kinds)}; "
        f"{len(said)} attacks, {dict(denied)}; {len(tried.refused)} pairs train nowhere",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
