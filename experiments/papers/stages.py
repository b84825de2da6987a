"""A run that is looked at while it trains, and that goes on where it was cut short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from splitfed.training import checkpoint
from splitfed.training.run import Run

Look = Callable[[Run], dict[str, float]]


def stages(start: Callable[[], Run], rounds: int, every: int, look: Look, folder: Path) -> tuple[Run, list[Any]]:
    """Train to `rounds` and return the run with what `look` saw after round 1 and after every `every` rounds.

    `start` makes the run and trains its first round. State is kept in `folder`: what was seen is not seen again.
    """
    run = start()
    found = checkpoint.load(folder)
    if found is None:
        done, seen = 1, [{"round": 1, **look(run)}]
    else:
        states = dict(found[1])
        seen = states.pop("seen")["stages"]
        run.load_state(states)
        done = found[0]
    for number in range(done, rounds):
        run.trainer.train(number)
        if (number + 1) % every == 0 or number + 1 == rounds:
            seen.append({"round": number + 1, **look(run)})
            checkpoint.save(folder, number + 1, {**run.state(), "seen": {"stages": seen}})
    return run, seen
