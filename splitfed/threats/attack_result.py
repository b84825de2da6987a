"""Result of one attack: its prediction, the ground truth, and its scores beside baselines and floors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splitfed.attacks.base import Clone
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.attacks.selection import Selection
from splitfed.attacks.threat_model import BLACK_BOX, WHITE_BOX
from splitfed.drawing.html_table import html_table
from splitfed.engines.engine import Engine
from splitfed.planning.private import cost_of_releases
from splitfed.threats.repeated_releases import RepeatedReleases

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("metric", "of", "mean", "low", "high", "median", "worst_decile", "n")


@dataclass(frozen=True)
class AttackResult:
    """Result of one attack: `prediction` and `truth`, (victims, ...), and scores beside baselines and floors.

    If the adversary holds a part of every row, a reconstruction is scored on the remaining part only. `clone`: the
    upstream function that the attack stole, if any; `stolen`: the scores of that clone, see `score_clone`. `quick`:
    whether the attack ran with the budget "quick", so that more work may give a better prediction. `error_bound`:
    (victims,) largest absolute error of any number of a row as stated by the attack, infinity where unknown; None for
    attacks that state none. `selection`: how an attack that chooses among several has chosen. `under_trained`: the
    floors that score measurably better than the attack's own trained decoder, although its adversary could have
    computed them; see `floors_above`. `unadapted`: names of the run's defenses that the attack does not adapt to, so
    that its scores may understate the leak; see `splitfed.threats.adaptation`. `repeated`: how often each victim's row
    was released, if more than once. `threat_model`: "white_box" if the attack was given weights that the client had
    trained, else "black_box".
    """

    attack: str
    adversary: str
    prediction: Tensor
    truth: Tensor
    scores: Scores
    seconds: float
    clone: Clone | None = None
    stolen: Scores | None = None
    quick: bool = False
    error_bound: Tensor | None = None
    selection: Selection | None = None
    under_trained: tuple[str, ...] = ()
    unadapted: tuple[str, ...] = ()
    repeated: RepeatedReleases | None = None
    threat_model: str = BLACK_BOX

    @property
    def releases(self) -> int:
        """Number of releases of each victim's row; with more than one, the attack read their mean."""
        return 1 if self.repeated is None else self.repeated.count

    @property
    def victims(self) -> int:
        """Number of scored victims; victims whose label the attack was given do not count."""
        counts = [found.n for found in self.scores.get("attack", {}).values()]
        return min(len(self.truth), max(counts, default=len(self.truth)))

    @property
    def reversed(self) -> bool:
        """Whether the AUC is measurably below .5; an AUC of a < .5 leaks as much as one of 1 - a."""
        found = self.scores.get("attack", {}).get("auc")
        return found is not None and (found.high if found.known else found.mean) < 0.5

    def rows(self) -> list[dict[str, Any]]:
        """Return the scores as flat rows, one for each metric and predictor.

        "of": "attack", the name of a baseline, or "stolen clone", "stolen trained" and "stolen fresh" for a stolen
        model. "low", "high": the 95 % interval of the mean over "n" victims, None if there is none. "median",
        "worst_decile": for reconstructions, see `splitfed.stats.intervals.Interval`; None for other scores.
        """
        own = {**self.scores, **{f"stolen {who}": scores for who, scores in (self.stolen or {}).items()}}
        return [
            {
                "attack": self.attack,
                "adversary": self.adversary,
                "threat_model": self.threat_model,
                "metric": metric,
                "of": who,
                "mean": found.mean,
                "low": found.low if found.known else None,
                "high": found.high if found.known else None,
                "median": found.median,
                "worst_decile": found.worst_decile,
                "n": found.n,
                "seconds": self.seconds,
                "quick": self.quick,
                "under_trained": ", ".join(self.under_trained),
                "unadapted": ", ".join(self.unadapted),
                "releases": self.releases,
            }
            for metric in dict.fromkeys(metric for scores in own.values() for metric in scores)
            for who, scores in own.items()
            if (found := scores.get(metric)) is not None
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a pandas table."""
        # pandas takes half a second to import.
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        """Return one line with attack, adversary, number of victims, the attack's scores and those of the baselines."""
        said = []
        for metric, found in self.scores.get("attack", {}).items():
            others = [f"{who} {scores[metric].mean:.4g}" for who, scores in self.scores.items() if metric in scores]
            beside = ", ".join(other for other in others if not other.startswith("attack "))
            said.append(f"{metric} {found.mean:.4g}" + (f" ({beside})" if beside else ""))
        return f"AttackResult({self._caption()}: {'; '.join(said) or 'no score'})"

    def _repr_html_(self) -> str:
        """Return a table of the scores for a notebook."""
        return html_table(self._caption(), COLUMNS, [[row[name] for name in COLUMNS] for row in self.rows()])

    def _caption(self) -> str:
        """Return attack, adversary, number of victims, and the limitations of the scores, as one clause."""
        quick = (", white box" if self.threat_model == WHITE_BOX else "") + (", a quick look" if self.quick else "")
        low = f", under-trained (below {', '.join(self.under_trained)})" if self.under_trained else ""
        blind = f", did not adapt to {', '.join(self.unadapted)}" if self.unadapted else ""
        victims = f"{self.victims} victim{'' if self.victims == 1 else 's'}"
        victims += "" if self.repeated is None else f", {self.repeated}"
        return f"{self.attack} by {self.adversary}, {victims}{quick}{low}{blind}"


def with_cost(result: AttackResult, engine: Engine, client: int, delta: float) -> AttackResult:
    """Return `result` with the privacy cost of all releases of a row, if every crossing value has a guarantee."""
    repeated = result.repeated
    if repeated is None or repeated.equal or repeated.steps:
        return result
    together, each = (cost_of_releases(engine, client, n, delta) for n in (repeated.count, 1))
    if together is None:
        return result
    return replace(result, repeated=replace(repeated, epsilon=together, each=each, delta=delta))
