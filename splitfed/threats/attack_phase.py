"""The contract of an attack phase: which view and knowledge an attack gets, and how its prediction is scored.

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
    """Inputs of one attack (`view`, `knowledge`) and the ground truth that only the scorer reads.

    `victims`: the attacked rows. `members`: (victims,) bool, True for rows that were trained on; None unless the attack
    predicts membership. `hints`: class -> positions of the victims whose label the attack is given. `received`: all
    messages that arrived, of which `view` is a part. `repeated`: how often each row was released, if more than once.
    `absent`: why no message was recorded that the attack could read, else empty. `draws`: further keys of the attack's
    random stream, beside seed and name.
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
    """Ground truth, (victims, ...), and scores; `stolen` and `under_trained` as in `AttackResult`."""

    truth: Tensor
    scores: Scores
    stolen: Scores | None = None
    under_trained: tuple[str, ...] = ()


class AttackPhase:
    """Base of the attack phases; `grants` decides what each party of the run may know."""

    def __init__(self, grants: KnowledgeGrants) -> None:
        self.grants, self.engine, self.data = grants, grants.engine, grants.data

    def check(self, request: AttackRequest) -> None:
        """Raise `InvalidInput` for a request that can be refused before training, when no message has been recorded."""

    def case(self, request: AttackRequest) -> Case:
        """Return the inputs and ground truth of the attack.

        Raises `InvalidInput` if it cannot be scored or predicts known data.
        """
        raise NotImplementedError

    def score(self, request: AttackRequest, case: Case, outcome: Outcome) -> Scored:
        """Return the scores of the attack's prediction, beside those of baselines and floors."""
        raise NotImplementedError
