"""`python -m tests.golden.compare BASE`: golden runs of a commit, by its own code, beside those of the working tree.

Prints a line a case with what moved in it, wording apart from numbers, and the cases of one side alone. Exit code 0:
nothing moved; 1: something did; 2: there was nothing to compare with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.golden.hashes import TEXT
from tests.golden.renames import RENAMES

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "golden"
PARTED = ("attack", "grade", f"{TEXT} attack")
Found = Mapping[str, Mapping[str, str]]


def renamed(found: Found, renames: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return `found` with its cases and parts under the new names."""
    attacks = {
        old.partition("=")[2]: new.partition("=")[2] for old, new in renames.items() if old.startswith("attack=")
    }
    inside = {f"intruder={old}": f"intruder={new}" for old, new in attacks.items()}

    def part(name: str) -> str:
        head, _, last = name.rpartition(" ")
        return f"{head} {attacks[last]}" if head in PARTED and last in attacks else name

    def case(name: str) -> str:
        return " ".join({**renames, **inside}.get(one, one) for one in name.split(" "))

    return {case(name): {part(p): value for p, value in parts.items()} for name, parts in found.items()}


def differences(base: Found, now: Found, renames: Mapping[str, str] = RENAMES) -> list[str]:
    """Return a line for every case in which something moved, numbers before wording, and for every case of one side."""
    base = renamed(base, renames)
    numbers, wording, alone = [], [], []
    for name in sorted({*base, *now}):
        if name not in base or name not in now:
            alone.append(f"only {'now' if name in now else 'in the base'}: {name}")
            continue
        one, other = base[name], now[name]
        moved = [_said(p, one.get(p), other.get(p)) for p in sorted({*one, *other}) if one.get(p) != other.get(p)]
        for lines, kind, some in (
            (numbers, "moved", [m for m in moved if not m.startswith(TEXT)]),
            (wording, "wording", [m for m in moved if m.startswith(TEXT)]),
        ):
            if some:
                lines.append(f"{kind}: {name}: {', '.join(some)}")
    return [*numbers, *alone, *wording]


def _said(part: str, one: str | None, other: str | None) -> str:
    if one is None or other is None:
        return f"{part} (only {'now' if one is None else 'in the base'})"
    told = [value for value in (one, other) if not value.isalnum() or not any(map(str.isdigit, value))]
    return f"{part} ({one} -> {other})" if told else part


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check `commit` out in a temporary folder, and remove it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "base"
        _git("worktree", "add", "--quiet", "--detach", str(place), commit)
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def run(root: Path, out: Path, only: str) -> Found:
    """Write the golden runs of the code in `root` to `out` with this interpreter, and return them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.golden", "--out", str(unfinished), "--only", only]
    subprocess.run(command, cwd=root, env=environment, check=True)
    unfinished.replace(out)
    return json.loads(out.read_text("utf-8"))  # type: ignore[no-any-return]


def of_commit(name: str, only: str) -> Found:
    """Return the golden runs of a commit, made once; raises `LookupError` for a commit that has none."""
    try:
        commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        raise LookupError(f"no commit is called {name!r}") from None
    some = f"-{hashlib.sha256(only.encode()).hexdigest()[:8]}" if only else ""
    kept = CACHE / f"{commit}{some}.json"
    if not kept.is_file():
        with worktree(commit) as place:
            if not (place / "tests/golden/__main__.py").is_file():
                raise LookupError(f"commit {name} has no golden runs: it is older than they are")
            print(f"golden runs of {name}", file=sys.stderr)
            return run(place, kept, only)
    return json.loads(kept.read_text("utf-8"))  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.compare", description=__doc__)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--only", default="", help="only pairs whose name contains this, say method=fedavg")
    options = parser.parse_args()
    try:
        base = of_commit(options.base, options.only)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    print("golden runs of the working tree", file=sys.stderr)
    now = run(ROOT, CACHE / "now.json", options.only)
    lines = differences(base, now)
    for line in lines:
        print(line)
    print(f"{len(now)} cases, {len(lines)} lines of differences", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
