"""The contract of a phase of attacks: what an attack in it is given, and how what it predicts is scored.

There are three: victims' rows that are released, at inference or in a training step (`ReleasedRows`), updates of
weights that were recorded in training (`RecordedUpdates`), and what clients sent for a method (`MethodUploads`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from splitfed.attacks.base import Knowledge, Outcome
from splitfed.attacks.scoring.reconstruction_metrics import Scores
from splitfed.core.messages import View
from splitfed.data.dataset import Dataset
from splitfed.threats.attack_requests import AttackRequest
from splitfed.threats.knowledge import KnowledgeGrants
from splitfed.threats.repeated_releases import RepeatedReleases


@dataclass(frozen=True, eq=False)
class Case:
    """An attack about to begin: the `view` and the `knowledge` that it gets, and what only the scorer knows.

    `victims`: the rows it is about; `members`: (victims,) bool, who was trained on, for an attack on that. `hints`:
    class -> positions of victims whose label the attack is told. `received`: all that has arrived, of which the view is
    a part. `repeated`: how often of a row, if several times. `absent`: why nothing has been recorded that the attack
    could read, else empty. `draws`: what the attack's random numbers depend on beside seed and name.
    """

    view: View
    knowledge: Knowledge
    victims: Dataset
    members: Tensor | None = None
    hints: Mapping[int, Tensor] = field(default_factory=dict)
    received: View | None = None
    repeated: RepeatedReleases | None = None
    absent: str = ""
    draws: tuple[int, ...] = ()


class Scored(NamedTuple):
    """The truth, (victims, ...), and the scores; `stolen` and `under_trained` as in `AttackResult`."""

    truth: Tensor
    scores: Scores
    stolen: Scores | None = None
    under_trained: tuple[str, ...] = ()


class AttackPhase:
    """Base of the phases: attacks on the parties of a run, each of which may know what `grants` says."""

    def __init__(self, grants: KnowledgeGrants) -> None:
        self.grants, self.engine, self.data = grants, grants.engine, grants.data

    def check(self, request: AttackRequest) -> None:
        """Refuse what can be told before training, when nothing has been recorded yet."""

    def case(self, request: AttackRequest) -> Case:
        """Return what the attack gets, or refuse in one line what could not be scored or is known already."""
        raise NotImplementedError

    def score(self, request: AttackRequest, case: Case, outcome: Outcome) -> Scored:
        """Score what the attack has predicted, beside baselines and floors."""
        raise NotImplementedError
