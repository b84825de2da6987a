"""What one attack achieved: its prediction, the truth, and its scores beside baselines and floors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from splitfed.attacks.base import Clone
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.attacks.selection import Selection
from splitfed.attacks.threat_model import BLACK_BOX
from splitfed.threats.repeated_releases import RepeatedReleases
from splitfed.threats.result_tables import describe_result, result_html, result_rows

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class AttackResult:
    """What one attack achieved: its `prediction` beside the `truth`, (victims, ...), and the scores with baselines.

    Where the adversary holds some of a row itself, a reconstruction is scored on the rest alone.
    `clone`: the upstream function that it stole, if it stole one, and `stolen` how good that is; see `score_clone`.
    `quick`: whether the attack had the parameters of the budget "fast", a quick look: with more work it may find more.
    `error_bound`: the largest error of a number of each row, (victims,), where the attack states it, else infinity;
    None for attacks that never do. `selection`: how an attack that chooses among several has chosen.
    `under_trained`: the floors that the attack's own trained decoder is measurably
    worse than, though its adversary could have computed them; see `floors_above`.
    `unadapted`: the defenses of the run, by name, that the attack does not adapt to, so that it says less than another
    might; see `splitfed.threats.adaptation`. `repeated`: how often each victim's row was released, where that was more
    than once. `threat_model`: "white_box" where the attack was shown weights that the client had trained, else
    "black_box".
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
        """How often every victim's row was released to the adversary, which attacked the mean."""
        return 1 if self.repeated is None else self.repeated.count

    @property
    def victims(self) -> int:
        """How many victims were scored; those whose label the attack was told are not."""
        counts = [found.n for found in self.scores.get("attack", {}).values()]
        return min(len(self.truth), max(counts, default=len(self.truth)))

    @property
    def reversed(self) -> bool:
        """Whether the prediction is measurably the wrong way round: an AUC below .5 leaks as much as 1 - AUC does."""
        found = self.scores.get("attack", {}).get("auc")
        return found is not None and (found.high if found.known else found.mean) < 0.5

    def rows(self) -> list[dict[str, Any]]:
        """Return the scores as flat rows, one a metric and predictor: the attack, its baselines, what it stole."""
        return result_rows(self)

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a pandas table."""
        # pandas takes half a second to import.
        import pandas as pd

        return pd.DataFrame(self.rows())

    def __repr__(self) -> str:
        """Tell in a line who attacked what, and the attack's own scores."""
        return describe_result(self)

    def _repr_html_(self) -> str:
        """Return a table of the scores for a notebook."""
        return result_html(self)
