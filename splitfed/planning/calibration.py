"""Calibration of method and defenses for the length of the run, before it starts."""

from __future__ import annotations

from dataclasses import replace

from splitfed.core.defense import Calibrated, Terms
from splitfed.core.errors import about
from splitfed.planning.optimizer_steps import check_schedulers
from splitfed.planning.simulation import count_rounds
from splitfed.planning.validation import Prepared
from splitfed.privacy.accountants import calibrate


def calibrate_defenses(
    prepared: Prepared, rounds: int, obstacle: str | None = None, doubt: str | None = None
) -> Prepared:
    """Return `prepared` with its method and its defenses calibrated for `rounds` rounds.

    See `Calibrated` and `Method.for_rounds`. `obstacle` and `doubt`: what the caller knows against a privacy guarantee;
    see `Terms`.
    """
    if prepared.method is not None:
        prepared = replace(prepared, method=prepared.method.for_rounds(rounds))
    with about("optimizer"):
        check_schedulers(prepared, rounds)
    if not any(isinstance(defense, Calibrated) for defense in prepared.defenses):
        return prepared
    counting = count_rounds(prepared, rounds)
    steps, epochs = zip(*(counting.step_counts(replica) for replica in range(counting.replicas)), strict=True)
    training = prepared.training
    terms = Terms(
        prepared.topologies,
        prepared.facts,
        (),
        tuple(counting.rows(replica, "train") for replica in range(counting.replicas)),
        training.batch_size,
        training.sampling == "poisson",
        steps,
        epochs,
        calibrate,
        obstacle or _obstacle(prepared),
        doubt,
        training.batch_sizes,
    )
    defenses = prepared.defenses
    settled_defenses = (
        d.calibrate(replace(terms, others=(*defenses[:i], *defenses[i + 1 :]))) if isinstance(d, Calibrated) else d
        for i, d in enumerate(defenses)
    )
    return replace(prepared, defenses=tuple(settled_defenses))


def _obstacle(prepared: Prepared) -> str | None:
    if not prepared.schedule.independent:
        return f"schedule {type(prepared.schedule).__name__}: its steps take the rows of several clients at once"
    if prepared.method is not None and not prepared.method.traits(prepared.topology).post_processing:
        return f"method {type(prepared.method).__name__}, which also trains outside of the parties' steps"
    return None
