"""Scores a prediction according to its target; the only place where an attack's result meets the truth.

Oracles are reconstructions computed from the truth, as upper references of a score: how near auxiliary rows, or a few
principal directions, come to a victim at best. An adversary that sees releases alone cannot compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from splitfed.attacks.base import Target, unwrap
from splitfed.attacks.labels.known_labels import rows_without_hints
from splitfed.attacks.networks.query_passes import nearest_positions
from splitfed.attacks.networks.tokens import unpadded_positions
from splitfed.attacks.scoring.class_metrics import LabelledRows, accuracies, score_representatives
from splitfed.attacks.scoring.label_metrics import score_labels
from splitfed.attacks.scoring.member_metrics import score_members
from splitfed.attacks.scoring.reconstruction_metrics import Scores, score_reconstruction
from splitfed.attacks.scoring.release_metrics import TrueReleases, score_releases
from splitfed.attacks.scoring.share_metrics import score_shares
from splitfed.attacks.scoring.token_metrics import score_tokens
from splitfed.stats.intervals import bootstrap_interval

COMPONENTS = 16
"""Number of principal directions, fitted on the victims; requires more than twice as many victims."""

PCA, NEAREST_ROW = f"oracle_pca_{COMPONENTS}", "oracle_nearest_row"
ORACLES = (PCA, NEAREST_ROW)


class RowPart(Protocol):
    """Interface of a named part of a row."""

    @property
    def positions(self) -> Tensor:
        """Positions of its numbers in the flattened row: (k,)."""
        ...


class ScoredRows(LabelledRows, Protocol):
    """Interface of a data set, as far as the scorer uses it."""

    @property
    def features(self) -> Mapping[str, RowPart]:
        """The named parts of a row."""
        ...

    def label(self, name: str | None = None) -> Tensor:
        """Return the labels of a label set; None is the main one."""


def score_prediction(
    target: Target,
    prediction: Tensor,
    victims: ScoredRows,
    auxiliary: ScoredRows,
    generator: torch.Generator,
    hints: Mapping[int, Tensor] | None = None,
    *,
    label_set: str | None = None,
    named: bool = True,
    members: Tensor | None = None,
    trained: ScoredRows | None = None,
    classifier: bool = False,
    part: Callable[[Tensor], Tensor] | None = None,
    releases: TrueReleases | None = None,
    floors: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Scores]:
    """Return the truth of a `prediction` of `target`, and its scores beside those of baselines.

    `hints`: class -> positions of victims whose label the attack knew; they are not scored. `label_set`: which labels
    are predicted; `named`: whether the attack identifies the classes. `members`: (victims,) bool, the membership to
    predict; `trained`: all training rows, for representatives and shares. `classifier`: whether reconstructions are
    also scored by a classifier of clean auxiliary rows. `part(x)`: the scored part of rows x, if the adversary holds
    the rest; the classifier still reads whole rows. `releases`: the truth of a prediction of releases. `floors`: name
    -> a further prediction, scored beside it together with oracles for reconstructions; None: neither.
    """
    match target:
        case Target.MEMBERS:
            return unwrap(members), score_members(unwrap(members), prediction, generator)
        case Target.REPRESENTATIVES:
            return score_representatives(prediction, unwrap(trained), auxiliary, generator)
        case Target.SHARES:
            return score_shares(unwrap(trained).y, prediction, auxiliary.y)
        case Target.LABELS:
            truth, left = victims.label(label_set), rows_without_hints(len(victims.y), hints or {})
            prior = auxiliary.label(label_set)
            return truth, score_labels(truth, prediction, prior, generator, left, named=named, floors=floors)
        case Target.RELEASES:
            return unwrap(releases).victims, score_releases(unwrap(releases), prediction, generator)
    part = part or (lambda x: x)
    seen, shown, blind = (part(t) for t in (victims.x, prediction, auxiliary.x))
    if target is Target.TOKENS:
        places = {name: feature.positions for name, feature in victims.features.items()}
        counted = (part(unpadded_positions(x, places).view_as(x)).flatten(1) for x in (victims.x, auxiliary.x))
        scores = score_tokens(seen, shown, blind, generator, *counted)
    else:
        beside = {} if floors is None else {name: part(rows) for name, rows in floors.items()}
        beside |= {} if floors is None else oracle_predictions(seen, blind)
        scores = score_reconstruction(seen, shown, victims.value_range, blind, generator, beside)
    if classifier:
        for name, found in accuracies(victims.x, prediction, victims.y, auxiliary, generator).items():
            scores.setdefault(name, {}).update(found)
    return victims.x, scores


def score_clone(outputs: Mapping[str, Tensor], truth: Tensor, generator: torch.Generator) -> Scores:
    """Score stolen segments by the whole model's predictions: predictor -> metric -> mean and interval over rows.

    `outputs`: "clone", "trained" (the segments it imitates) and "fresh" (same architecture, weights drawn at random)
    -> (n, classes), or (n, 1) logits of the second of two classes; truth: (n,) classes. Metrics: "accuracy", and
    "agreement", the share of rows with the same predicted class as under the trained segments.
    """
    predictions = {
        name: (z.reshape(-1) > 0).long() if z[0].numel() == 1 else z.argmax(1) for name, z in outputs.items()
    }
    return {
        name: {
            "accuracy": bootstrap_interval((found == truth).double(), generator),
            "agreement": bootstrap_interval((found == predictions["trained"]).double(), generator),
        }
        for name, found in predictions.items()
    }


def oracle_predictions(truth: Tensor, auxiliary: Tensor) -> dict[str, Tensor]:
    """Return the oracles' reconstructions of `truth` (n, ...): name -> (n, ...), float64.

    "oracle_pca_16": the truth projected on the 16 principal components of the victims, the least error of any linear
    code of 16 numbers; left out for at most 32 victims or at most 16 numbers a row. "oracle_nearest_row": the row of
    `auxiliary` (m, ...) nearest to the truth.
    """
    found = {}
    flat = truth.double().flatten(1)
    if len(flat) > 2 * COMPONENTS and flat.shape[1] > COMPONENTS:
        found[PCA] = principal_reconstruction(flat, COMPONENTS).view_as(truth)
    if len(auxiliary):
        nearest = nearest_positions(auxiliary.flatten(1).to(truth.device), flat, 1)[:, 0]
        found[NEAREST_ROW] = auxiliary.to(truth.device)[nearest].double()
    return found


def principal_reconstruction(x: Tensor, components: int) -> Tensor:
    """Return rows x (n, d) projected on the affine space of their `components` principal directions: (n, d)."""
    mean = x.mean(0)
    directions: Tensor = torch.linalg.svd(x - mean, full_matrices=False)[2][:components]
    return mean + (x - mean) @ directions.T @ directions
