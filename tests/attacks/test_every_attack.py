"""One table for all attacks: a planted case where each must succeed, and one where it cannot.

A row says by how much the prediction must beat its do-nothing baseline on victims that nobody trained on (or, for
attacks on training, on the rows of a client), and how near to the baseline it must fall where releases, gradients or
updates are noise, or nothing was learnt. The margins are those of the worlds in `tests.attacks.examples`, with room for
other machines. To add an attack: one row, named as in the registry (a second setting of it: the name, a space, more
words).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack, Phase, Target
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.idlg import Idlg
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.attacks.labels.batch_label_inference import BatchLabelInference
from splitfed.attacks.labels.co_training import CoTraining
from splitfed.attacks.labels.direct_label import DirectLabel
from splitfed.attacks.labels.direction import Direction
from splitfed.attacks.labels.exploit import Exploit
from splitfed.attacks.labels.gaussian_mixture import GaussianMixture
from splitfed.attacks.labels.model_completion import ModelCompletion
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.own_features import OwnFeatures
from splitfed.attacks.labels.similar import Similar
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.labels.strongest_labels import StrongestLabels
from splitfed.attacks.labels.unsplit_labels import UnsplitLabels
from splitfed.attacks.membership.lira import Lira
from splitfed.attacks.membership.membership_releases import MembershipReleases
from splitfed.attacks.membership.membership_shadow import MembershipShadow
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.membership.strongest_membership import StrongestMembership
from splitfed.attacks.properties.attribute import Attribute
from splitfed.attacks.reconstruction.dip import Dip
from splitfed.attacks.reconstruction.grn import Grn
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.ladder import Ladder
from splitfed.attacks.reconstruction.latent_search import LatentSearch
from splitfed.attacks.reconstruction.lbfgs_inversion import LbfgsInversion
from splitfed.attacks.reconstruction.linear_gradient_inversion import LinearGradientInversion
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.model_inversion import ModelInversion
from splitfed.attacks.reconstruction.nearest import Nearest
from splitfed.attacks.reconstruction.query_inversion import QueryInversion
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.shadow import Shadow
from splitfed.attacks.reconstruction.strongest import Strongest
from splitfed.attacks.reconstruction.token_decoder import TokenDecoder
from splitfed.attacks.reconstruction.unsplit import Unsplit
from splitfed.attacks.training_time.fsha import Fsha
from splitfed.attacks.training_time.insider_labels import InsiderLabels
from splitfed.attacks.training_time.pcat import Pcat
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.attacks.uploads.class_shares import ClassShares
from splitfed.attacks.uploads.prototype_inversion import PrototypeInversion
from splitfed.attacks.uploads.prototype_membership import PrototypeMembership
from splitfed.attacks.uploads.update_shares import UpdateShares
from splitfed.attacks.uploads.upload_inversion import UploadInversion
from splitfed.attacks.uploads.upload_lira import UploadLira
from splitfed.attacks.uploads.upload_membership import UploadMembership
from splitfed.data.dataset import Dataset
from splitfed.defenses import LabelDp, Noise
from splitfed.federated import FML, FedAKT, FedMD, FedProto
from splitfed.poisoning.byzantine_noise import ByzantineNoise
from splitfed.registry import TABLES
from splitfed.threats import recorded_training, released_rows, upload_attacks
from splitfed.training.run import AttackResult, Run
from splitfed.training.settings import Adversaries
from tests.attacks.examples import (
    MEMBER_BATCH,
    by_heart,
    classes_run,
    drowned,
    encrypted_digits,
    fed_run,
    lenet_run,
    noted_by_heart,
    odd_run,
    perceptron,
    proto_run,
    summed,
    three_classes,
    two_party,
    u_digits,
)
from tests.attacks.token_examples import embedded
from tests.attacks.training_time_examples import go
from tests.attacks.upload_examples import cells_run, exchanged, exchanged_by_heart
from tests.thinning import thin
from tests.topologies.vertical_examples import planted as correlated

DROWNED = Noise(scale=1e3)
SILENCED = Noise(scale=1e3, on=("prototype->fed_server",))
UNTAUGHT = Noise(scale=1e3, on=("soft labels->fed_server",))
BASELINES = {
    Target.INPUTS: "mean_image",
    Target.TOKENS: "frequent_token",
    Target.LABELS: "majority",
    Target.MEMBERS: "chance",
    Target.REPRESENTATIVES: "mean_image",
    Target.SHARES: "uniform",
    Target.RELEASES: "mean_release",
}
OF_VICTIMS = (Target.INPUTS, Target.TOKENS, Target.LABELS, Target.RELEASES)


@dataclass(frozen=True)
class Row:
    """An attack, the world where it must beat its baseline in `metric` by `margin`, and a `hopeless` one.

    There it may be better than the baseline by `tolerance` at most; an AUC may be no further from one half either way,
    as one below it leaks too. `quick`: the same attack with less work, where how much it finds does not matter.
    `seeds`: over how many seeds of the attack the hopeless score is averaged, where there are few victims. `noise`: how
    much of a prediction changes from call to call, where ciphertexts are random.
    """

    attack: Attack
    planted: Callable[[], Run]
    hopeless: Callable[[], Run]
    metric: str
    margin: float
    tolerance: float
    adversary: str | None = None
    quick: Attack | None = None
    seeds: int = 1
    noise: float = 0.0


def images(attack: Attack, margin: float, quick: Attack | None = None, rounds: int = 3) -> Row:
    """Reconstruction of digits behind a convolution: the mean image has about 11.4 dB."""
    run, noisy = partial(lenet_run, rounds=rounds), partial(lenet_run, DROWNED, rounds=rounds)
    return Row(attack, run, noisy, "psnr", margin, 0.5, quick=quick)


def in_training(attack: Attack, margin: float, rounds: int, rate: float = 1e-3) -> Row:
    """Reconstruction of ramps from within the training; R2 of the mean row is about 0."""
    hopeless = partial(go, attack, rounds=6, defenses=[DROWNED])
    return Row(attack, cache(partial(go, attack, rounds=rounds, rate=rate)), cache(hopeless), "r2", margin, 0.1)


def updates(attack: Attack) -> Row:
    """A row of digits from what an aggregation server gets; or from an update that is noise."""
    noisy = partial(
        fed_run, perceptron, adversaries=Adversaries(poisoning=ByzantineNoise(clients=(0, 1, 2), scale=0.1))
    )
    return Row(attack, partial(fed_run, perceptron), noisy, "psnr", 15.0, 0.5, "fed_server")


def positives(attack: Attack) -> Row:
    """128 victims, 14 positive: a blind AUC has a standard deviation of .082, the mean of twelve .024."""
    return Row(attack, two_party, partial(drowned, two_party), "auc", 0.45, 0.08, "left0", seeds=12)


def classes(attack: Attack, world: Callable[..., Run], party: str) -> Row:
    """Ten classes, 48 or 96 victims: chance has a standard deviation of .043 at most, the majority about .15."""
    return Row(attack, world, partial(drowned, world), "accuracy", 0.7, 0.1, party)


def members(attack: Attack, margin: float, quick: Attack | None = None) -> Row:
    """60 members and 60 others: a blind AUC has a standard deviation of .053."""
    return Row(attack, by_heart, partial(by_heart, DROWNED), "auc", margin, 0.16, quick=quick)


FEW = {"epochs": 4, "batch_size": MEMBER_BATCH}
ODD = Attribute(attribute="odd", queries=2)
TABLE: dict[str, Row] = {
    "inverse_network": images(
        InverseNetwork(epochs=15, batch_size=16, queries=3, width=16), 6.0, InverseNetwork(epochs=2, queries=1)
    ),
    # The most frequent token of a position has about .17.
    "token_decoder": Row(
        TokenDecoder(epochs=15, width=48, queries=2),
        embedded,
        partial(embedded, DROWNED),
        *("token_accuracy", 0.8, 0.05),
        quick=TokenDecoder(epochs=2, width=48, queries=1),
    ),
    "rmle": images(Rmle(iterations=200, tv=1e-3), 10.0, Rmle(iterations=30)),
    # As near as its prior of 16 numbers is to digits.
    "latent_search": images(
        LatentSearch.with_budget("quick", width=64),
        4.0,
        LatentSearch(width=16, epochs=2, draws=8, restarts=2, latent_iterations=5, iterations=5),
    ),
    "lbfgs_inversion": images(LbfgsInversion(iterations=60), 20.0, LbfgsInversion(iterations=3, queries=1)),
    "query_inversion": images(QueryInversion(row_queries=200, prior=0.0), 20.0, QueryInversion(row_queries=30)),
    "dip": images(Dip(iterations=150, width=8, lr=0.03), 6.0, Dip(iterations=5, width=4)),
    "ladder": images(
        Ladder(widths=(16,), epochs=(1, 15), batch_size=16, queries=1),
        5.0,
        Ladder(widths=(2,), epochs=(1, 3), batch_size=16, queries=1),
    ),
    "strongest": images(
        Strongest(widths=(4,), passes=9000, queries=1, prior=False, threat_model="white_box"),
        20.0,
        Strongest(widths=(2,), passes=2000, queries=1, prior=False, threat_model="white_box"),
    ),
    "linear_inverse": images(LinearInverse(), 10.0),
    "nearest": images(Nearest(), 4.0),
    "shadow": images(Shadow(), 0.3, Shadow(epochs=2, iterations=100), rounds=10),
    "unsplit": images(Unsplit(rounds=12), 1.0, Unsplit(rounds=4, restarts=1), rounds=10),
    # Where the rate is so small that a step is lost in the noise of CKKS, weights tell nothing of it.
    "linear_gradient_inversion": Row(
        LinearGradientInversion(step_rows=4),
        partial(encrypted_digits, "plain_gradient"),
        partial(encrypted_digits, "constant_mask", rate=1e-9),
        *("r2", 0.99, 0.1),
        noise=1e-2,
    ),
    "dlg": updates(Dlg(iterations=120, restarts=2)),
    "idlg": updates(Idlg(iterations=120, restarts=2)),
    "inverting_gradients": updates(InvertingGradients(iterations=200, lr=0.1)),
    "fsha": in_training(Fsha.with_budget("quick", width=32), 0.5, 50),
    "sdar": in_training(Sdar.with_budget("quick"), 0.5, 40, 3e-3),
    "pcat": in_training(Pcat.with_budget("quick", start=20), 0.3, 40, 3e-3),
    "insider_labels": Row(
        InsiderLabels(),
        cache(partial(go, Sdar.with_budget("quick"), "u_shaped", rounds=40, rate=3e-3)),
        cache(partial(go, Sdar.with_budget("quick"), "u_shaped", rounds=6, defenses=[DROWNED])),
        *("accuracy", 0.25, 0.15),  # 64 victims of two classes: a standard deviation of .0625
    ),
    "norm": positives(Norm()),
    "direction": positives(Direction()),
    "direction of three": positives(Direction(hints=3)),
    "spectral": positives(Spectral()),
    "direct_label": classes(DirectLabel(), summed, "left0"),
    "batch_label_inference": classes(BatchLabelInference(iterations=300, batch_size=8), summed, "left0"),
    "unsplit_labels": classes(UnsplitLabels(iterations=100), u_digits, "server"),
    # Classes without names, named by the truth: ten of them fit 96 victims by chance at .26, the majority at .1.
    "exploit": Row(
        Exploit(iterations=300, restarts=1),
        u_digits,
        partial(drowned, u_digits),
        *("assigned_accuracy", 0.7, 0.25, "server"),
        quick=Exploit(iterations=5, restarts=1),
    ),
    "similar": classes(Similar(), u_digits, "server"),
    "similar by k-means": classes(Similar(method="k-means"), summed, "left0"),
    "gaussian_mixture": positives(GaussianMixture(hints=3)),
    "own_features": Row(
        OwnFeatures(hints=0), three_classes, partial(three_classes, telling=False), *("accuracy", 0.4, 0.15, "left0")
    ),
    "co_training": Row(
        CoTraining(),
        three_classes,
        partial(drowned, partial(three_classes, telling=False)),
        *("accuracy", 0.4, 0.15, "left0"),
    ),
    "strongest_labels": classes(StrongestLabels(iterations=20, doublings=1), u_digits, "server"),
    # Columns of a peer that are correlated with the party's own; R2 of the mean of every column is about 0.
    "grn": Row(
        Grn(epochs=60, batch_size=32, lr=1e-3),
        correlated,
        partial(correlated, DROWNED),
        *("r2", 0.5, 0.1, "active0"),
        quick=Grn(epochs=2),
    ),
    # What leaks is in the party's own part, so the hopeless world is one where that says nothing. A hundred victims of
    # three classes: a standard deviation of .047.
    "model_completion": Row(
        ModelCompletion(iterations=200, decay=0.95),
        three_classes,
        partial(three_classes, telling=False),
        *("accuracy", 0.4, 0.15, "left0"),
        quick=ModelCompletion(iterations=5, decay=0.5),
    ),
    "membership_threshold": members(MembershipThreshold(), 0.3),
    "membership_shadow": members(MembershipShadow(copies=2), 0.25, MembershipShadow(copies=1, **FEW)),
    "membership_releases": members(MembershipReleases(), 0.16),
    "lira": members(Lira(copies=6), 0.3, Lira(copies=4, **FEW)),
    "lira offline": members(Lira(copies=4, online=False), 0.25, Lira(copies=4, online=False, **FEW)),
    "strongest_membership": members(
        StrongestMembership(copies=4, doublings=1, worlds=1), 0.25, StrongestMembership(4, 1, 1, **FEW)
    ),
    # A hundred victims: a standard deviation of .05.
    "attribute": Row(ODD, odd_run, partial(odd_run, DROWNED), "accuracy", 0.3, 0.15),
    # Ten answers by chance: five or more are right in .2 % of the cases.
    "model_inversion": Row(
        ModelInversion(iterations=200), classes_run, partial(classes_run, decay=10.0), "accuracy", 0.4, 0.45
    ),
    # Which two of ten classes a client holds; with labels drawn at random it seems to hold all of them.
    "class_shares": Row(
        ClassShares(),
        partial(proto_run, method=FedProto(weighted=False), classes=2),
        partial(proto_run, LabelDp(epsilon=1e-3), method=FedProto(weighted=False), classes=2),
        *("auc", 0.45, 0.01, "fed_server"),
    ),
    # The mean image is 15 dB from the mean of a class.
    "prototype_inversion": Row(
        PrototypeInversion(),
        proto_run,
        partial(proto_run, SILENCED),
        *("psnr", 6.0, 0.5, "fed_server"),
        quick=PrototypeInversion(iterations=5),
    ),
    # 70 members and as many others: a blind AUC has a standard deviation of .049.
    "prototype_membership": Row(
        PrototypeMembership(),
        noted_by_heart,
        partial(noted_by_heart, SILENCED),
        *("auc", 0.2, 0.15, "fed_server"),
    ),
    "upload_membership": Row(
        UploadMembership(),
        partial(exchanged_by_heart, FML()),
        partial(exchanged_by_heart, FML(), noise=1.0),
        *("auc", 0.12, 0.15, "fed_server"),
    ),
    # 39 private rows and as many others, some of whose classes are the client's by chance.
    "upload_membership of soft labels": Row(
        UploadMembership(),
        cells_run,
        partial(cells_run, UNTAUGHT),
        *("auc", 0.2, 0.2, "fed_server"),
        quick=UploadMembership(epochs=5),
    ),
    "upload_lira": Row(
        UploadLira(),
        partial(exchanged_by_heart, FML()),
        partial(exchanged_by_heart, FML(), noise=1.0),
        *("auc", 0.2, 0.15, "fed_server"),
        quick=UploadLira(copies=4, rounds=1),
    ),
    # The mean image is 15 dB from the mean of a class.
    "upload_inversion": Row(
        UploadInversion(),
        partial(exchanged, FML(), classes=5),
        partial(exchanged, FML(), noise=1.0),
        *("psnr", 4.0, 0.5, "fed_server"),
        quick=UploadInversion(iterations=5),
    ),
    "upload_inversion of soft labels": Row(
        UploadInversion(),
        partial(exchanged, FedMD(), classes=5, rounds=3, public=0.1),
        # Of what it is told a student makes nothing but noise: rows of any class, whose mean is the mean image at best.
        partial(exchanged, FedMD(), classes=5, rounds=3, public=0.1, defenses=(UNTAUGHT,)),
        *("psnr", 4.0, 0.5, "fed_server"),
        quick=UploadInversion(iterations=5, epochs=5),
    ),
    # Two of ten classes: a blind AUC has a standard deviation of .24, and there is one client.
    "update_shares": Row(
        UpdateShares(),
        partial(exchanged, FML()),
        partial(exchanged, FML(), noise=1.0),
        *("auc", 0.45, 0.45, "fed_server"),
    ),
    "update_shares of features": Row(
        UpdateShares(),
        partial(exchanged, FedAKT(weight=0.5), rounds=6),
        partial(exchanged, FedAKT(weight=0.5), noise=1.0),
        *("auc", 0.3, 0.45, "fed_server"),
    ),
}


def attacked(row: Row, run: Run, attack: Attack, seed: int | None = None, **options: Any) -> AttackResult:
    (result,) = run.attack(attack, adversary=row.adversary, seed=seed, floors=False, **options)
    return result


@cache
def achieved(name: str, attack: Attack) -> AttackResult:
    row = TABLE[name]
    return attacked(row, row.planted(), attack)


def honest(name: str, quick: bool) -> AttackResult:
    """What the attack achieves in its planted world, once."""
    row = TABLE[name]
    return achieved(name, (row.quick if quick else None) or row.attack)


def scores(row: Row, result: AttackResult) -> tuple[float, float]:
    """The guess's score and its baseline's; more is better in all metrics of the table."""
    baseline = result.scores[BASELINES[row.attack.target]]
    return result.scores["attack"][row.metric].mean, baseline[row.metric].mean


# Attacks on training, whose worlds are trained for each of them, and one whose hopeless world takes twelve seeds.
COSTLY = ("fsha", "sdar", "pcat", "insider_labels", "gaussian_mixture")


def some(names: Iterable[str], every: int) -> list[Any]:
    """Return the names for a parametrized test: each `every`-th that is not costly, and all others as exhaustive."""
    return thin([pytest.param(n, marks=[pytest.mark.exhaustive] if n in COSTLY else []) for n in names], every)


def test_every_registered_attack_has_a_row_and_every_row_is_registered() -> None:
    assert {name.split()[0] for name in TABLE} == set(TABLES["attacks"])


# Of these, tests of their own files say with every commit that they find in much the same worlds what they must.
ELSEWHERE = (
    *("fsha", "sdar", "pcat", "insider_labels", "shadow", "unsplit", "ladder", "strongest", "attribute"),
    *("lira", "strongest_membership"),
)
SUCCESSES = [pytest.param(n, marks=[pytest.mark.exhaustive] if n in ELSEWHERE else []) for n in TABLE]


@pytest.mark.parametrize("name", thin(SUCCESSES, 2))
def test_succeeds_where_it_must(name: str) -> None:
    row, result = TABLE[name], honest(name, quick=False)
    prediction, baseline = scores(row, result)
    assert prediction > baseline + row.margin
    if row.attack.phase is not Phase.TRAINING and row.attack.target in OF_VICTIMS:
        assert len(result.truth) == len(row.planted().data.victims)


@pytest.mark.parametrize("name", some(TABLE, 3))
def test_fails_where_it_must(name: str) -> None:
    row = TABLE[name]
    run, attack = row.hopeless(), row.quick or row.attack
    found = [scores(row, attacked(row, run, attack, seed)) for seed in (range(row.seeds) if row.seeds > 1 else [None])]
    prediction, baseline = (sum(one) / len(found) for one in zip(*found, strict=True))
    assert prediction < baseline + row.tolerance
    if row.metric == "auc":
        assert prediction > baseline - row.tolerance


def turned(rows: Dataset) -> Dataset:
    """Return the same rows in the same order, with the labels of others."""
    other = Dataset(rows.name, rows.x, rows.y.roll(1), rows.task, rows.value_range).with_features(rows.features)
    for name, target in rows.targets.items():
        other = other.with_target(name, target.y.roll(1), target.task)
    return other


@pytest.mark.parametrize("name", some(TABLE, 4))
def test_the_scorer_alone_knows_the_truth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth shuffled before the score: the same guess to the last bit, scored against another truth."""
    row, score_prediction = TABLE[name], released_rows.score_prediction
    before = honest(name, quick=True)
    run = row.planted()

    def misled(
        target: Target, prediction: Tensor, victims: Any, auxiliary: Any, drawn: Any, *_: Any, **options: Any
    ) -> Any:
        if options.get("members") is not None:
            options["members"] = options["members"].roll(1)
        if options.get("trained") is not None:
            options["trained"] = renamed(options["trained"]) if target is Target.SHARES else turned(options["trained"])
        if options.get("releases") is not None:
            options["releases"] = options["releases"]._replace(victims=options["releases"].victims.roll(1, 0))
        # A batch of one row has no other order: there another row takes its place.
        others = victims.rows(torch.arange(len(victims)).roll(1)) if len(victims) > 1 else run.data.victims.rows([0])
        return score_prediction(target, prediction, others, auxiliary, drawn, **options)

    for scorer in (released_rows, recorded_training, upload_attacks):
        monkeypatch.setattr(scorer, "score_prediction", misled)
    after = attacked(row, run, row.quick or row.attack)
    assert torch.allclose(after.prediction, before.prediction, rtol=0.0, atol=row.noise)
    assert not torch.allclose(after.truth, before.truth, rtol=0.0, atol=row.noise)


def renamed(rows: Dataset) -> Dataset:
    """Return the same rows with every class called the next one."""
    return Dataset(rows.name, rows.x, (rows.y + 1) % 10, rows.task, rows.value_range)


BLIND = [n for n, r in TABLE.items() if r.attack.phase is Phase.INFERENCE and r.attack.target in OF_VICTIMS]


@pytest.mark.parametrize("name", some(BLIND, 3))
def test_what_is_released_knows_no_label(name: str) -> None:
    """Victims with the labels of others release the same, so the prediction is the same."""
    row, run = TABLE[name], TABLE[name].planted()
    after = attacked(row, run, row.quick or row.attack, victims=turned(run.data.victims))
    assert torch.equal(after.prediction, honest(name, quick=True).prediction)
