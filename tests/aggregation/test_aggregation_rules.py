"""Fusions: numbers worked out by hand, what they refuse, and what they hold against clients that misbehave."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import splitfed
from splitfed.aggregation import GeometricMedian, Krum, Median, TrimmedMean, WeightedMean
from splitfed.aggregation.base import AggregationRule, VectorAccumulator
from splitfed.aggregation.running_mean import RunningMean
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.encryption import EncryptedSum
from splitfed.engines.base import FED
from splitfed.engines.local import LocalEngine
from splitfed.models.mlp import mlp
from splitfed.poisoning import Backdoor, ByzantineNoise, LabelFlip, Poisoning, Scaling, SignFlip, success_rate
from splitfed.schedules import Blind, LocalLoss, Sglr, SplitFedV1, SplitFedV2, SplitFedV3
from splitfed.schedules.base import Schedule, Training
from splitfed.schedules.sampling_and_dropout import Averaged
from splitfed.secure_sum import SecureSum
from splitfed.study.config.build import schedule
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.core.test_vanilla_by_hand import two_clients, weight
from tests.examples import assert_same
from tests.rounding import single
from tests.study.examples import SMALL, checked, small
from tests.thinning import thin


def averaged(fusion: AggregationRule, values: list[list[float]], shares: list[float] | None = None) -> list[float]:
    rows = torch.tensor(values, dtype=torch.float64)
    given = torch.tensor(shares or [1 / len(values)] * len(values), dtype=torch.float64)
    fusion.check(len(values))
    found: list[float] = fusion.fuse(rows, given).tolist()
    return found


BY_HAND: dict[str, tuple[AggregationRule, list[list[float]], list[float]]] = {
    "median of three": (Median(), [[1, 9], [100, 7], [2, 8]], [2, 8]),
    "median of four": (Median(), [[1], [2], [4], [100]], [3]),
    "trimmed, one of four": (TrimmedMean(fraction=0.25), [[0, 5], [2, -90], [4, 6], [100, 7]], [3, 5.5]),
    "trimmed, rounded up": (TrimmedMean(fraction=0.1), [[0], [2], [100]], [2]),
    # Two nearest: 0 has 1 + 4, 1 has 1 + 1, 2 has 1 + 1, 3 has 1 + 4, 100 has 97^2 + 98^2.
    "krum takes the first of the best": (Krum(f=1), [[3], [100], [0], [2], [1]], [2]),
    "multi-krum leaves out the far one": (Krum(f=1, keep=4), [[3], [100], [0], [2], [1]], [1.5]),
    "geometric median on a line": (GeometricMedian(), [[0], [1], [10]], [1]),
    "the Fermat point": (GeometricMedian(), [[0, 0], [1, 0], [0, 1]], [(3 - math.sqrt(3)) / 6] * 2),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    fusion, rows, expected = BY_HAND[case]
    assert averaged(fusion, rows) == pytest.approx(expected, abs=1e-4)


def test_the_geometric_median_is_weighted() -> None:
    """On a line it is the weighted median: where half of the weight lies on either side."""
    assert averaged(GeometricMedian(), [[0], [1], [10]], [0.6, 0.2, 0.2]) == pytest.approx([0.0], abs=1e-4)


def test_krum_scores_by_hand() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [100.0]], dtype=torch.float64)
    assert Krum(f=1).scores(rows).tolist() == pytest.approx([5, 2, 2, 5, 97**2 + 98**2])


@pytest.mark.parametrize("fusion", [Median(), TrimmedMean(), Krum(f=1, keep=2), GeometricMedian()])
def test_a_far_part_moves_the_mean_and_no_robust_fusion(fusion: AggregationRule) -> None:
    honest = [[0.9, 2.0], [1.0, 2.1], [1.1, 1.9], [1.0, 2.0]]
    far = [*honest, [1e6, -1e6]]
    assert averaged(fusion, far) == pytest.approx([1.0, 2.0], abs=0.15)
    assert abs(sum(row[0] for row in far) / 5 - 1.0) > 1e5


def test_shapes_types_and_whole_numbers_are_kept() -> None:
    gathered = VectorAccumulator(Median())
    for value, count in ((1.0, 4), (5.0, 6), (2.0, 5)):
        w = torch.tensor([[value, -value]])
        gathered.add({"w": w, "n": torch.tensor(count), "b": torch.tensor(value).half()}, 1 / 3)
        w.zero_()
    found = gathered.value()
    assert {name: t.dtype for name, t in found.items()} == {"w": torch.float32, "n": torch.int64, "b": torch.float16}
    assert found["w"].tolist() == [[2.0, -2.0]]
    assert (int(found["n"]), float(found["b"])) == (6, 2.0)


def test_parts_must_be_alike() -> None:
    gathered = VectorAccumulator(Median())
    gathered.add({"w": torch.ones(1)}, 0.5)
    with pytest.raises(InvalidInput, match=r"^'v' is missing from the upload of at least one client$"):
        gathered.add({"w": torch.ones(1), "v": torch.ones(1)}, 0.5)


def test_the_mean_is_the_running_sum() -> None:
    """What kept no part before keeps none now: memory does not grow with the clients."""
    assert isinstance(WeightedMean().start(), RunningMean)


AVERAGING = [SplitFedV1, SplitFedV2, LocalLoss]


def after_a_round(plan: Schedule, replicas: int) -> LocalEngine:
    """One round of `replicas` clients, each with a row of its own; nobody has the weight of another."""
    topology = two_clients().topology
    plan.check(topology, replicas)
    engine = two_clients(placement=plan.placement(topology), replicas=replicas)
    plan.round(engine, Training(1), 0, plan.start(replicas))
    return engine


@pytest.mark.parametrize("kind", [SplitFedV1, SplitFedV2])
def test_the_fed_server_fuses_the_clients(kind: type[Averaged]) -> None:
    engine = after_a_round(kind(aggregation="median"), 3)
    sent = sorted(weight(engine, f"client{i}") for i in range(3))
    assert len(set(sent)) == 3
    assert weight(engine, FED) == sent[1]
    plain = after_a_round(kind(), 3)
    assert weight(plain, FED) == single(sum(sent) / 3)
    assert weight(plain, FED) != sent[1], "the fusion changes what is averaged"


@pytest.mark.parametrize("kind", [SplitFedV1, SplitFedV3])
def test_the_main_server_fuses_its_copies(kind: type[Averaged]) -> None:
    engine = after_a_round(kind(aggregation={"name": "trimmed_mean", "fraction": 0.3}), 3)
    copies = sorted(float(c.state.modules["top"].state_dict()["weight"]) for c in engine.run_parties.copies["server"])
    assert len(set(copies)) == 3
    assert weight(engine, "server") == copies[1]


def test_blind_fuses_what_it_averages() -> None:
    engine = after_a_round(Blind(average=True, aggregation="median"), 3)
    assert weight(engine, FED) == sorted(weight(engine, f"client{i}") for i in range(3))[1]


def test_the_default_is_the_mean_to_the_bit() -> None:
    named, plain = (after_a_round(plan, 3) for plan in (SplitFedV1(aggregation="mean"), SplitFedV1()))
    assert_same(named.state()["parties"], plain.state()["parties"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SplitFedV1(aggregation="medan"), r"^unknown aggregation rule 'medan'; did you mean 'median'"),
        (
            lambda: SplitFedV1(aggregation={"f": 1}),
            r"^aggregation={'f': 1} is not allowed; expected a name, a table with a name",
        ),
        (
            lambda: SplitFedV1(aggregation={"name": "krum", "g": 1}),
            r"^unknown parameter of aggregation rule 'krum' 'g'",
        ),
        (lambda: Krum(f=0), r"^krum f=0 is not allowed; expected a whole number of at least 1$"),
        (lambda: Krum(f=2).check(6), r"^krum f=2 needs 7 clients or more \(2 f \+ 3\); there are 6$"),
        (
            lambda: Krum(f=1, keep=5).check(5),
            r"^krum keep=5 is not allowed; expected at most 4, as f=1 of 5 clients may be bad$",
        ),
        (lambda: TrimmedMean(fraction=0.5), r"^trimmed_mean fraction=0.5 is not allowed; expected a number in \(0, 0"),
        (lambda: TrimmedMean(fraction=0.4).check(4), r"^trimmed_mean fraction=0.4 of 4 clients leaves out 2 on either"),
        (lambda: Median().check(2), r"^the median needs three clients or more, and a round may end with 2: let"),
        (lambda: GeometricMedian(smoothing=0.0), r"^geometric_median smoothing=0.0 is not allowed"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (SplitFedV1(aggregation="krum"), r"^krum f=1 needs 5 clients or more \(2 f \+ 3\); there are 4$"),
        (
            SplitFedV1(aggregation="median", clients_per_round=2),
            r"a round may end with 2: let more take part \(clients_per",
        ),
        # All may finish, but so few may that nothing could be fused.
        (SplitFedV1(aggregation="median", drop_out=0.1), r"a round may end with 1: .* drop out raise the quorum"),
        (Blind(aggregation="median"), r"^aggregation=Median\(\) has nothing to act on: no weights are averaged here$"),
        (Sglr(aggregation="median"), r"^aggregation=Median\(\) has nothing to act on"),
    ],
)
def test_a_schedule_refuses_what_it_cannot_fuse(plan: Schedule, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan.check(two_clients().topology, 4)


def test_a_quorum_makes_drop_outs_safe() -> None:
    SplitFedV1(aggregation="median", drop_out=0.1, quorum=3).check(two_clients().topology, 4)


BAD = (1, 4)
ROBUST: dict[str, str | dict[str, Any]] = {
    "median": "median",
    "trimmed_mean": {"name": "trimmed_mean", "fraction": 2 / 7},
    "krum": {"name": "krum", "f": 2},
    "multi_krum": {"name": "krum", "f": 2, "keep": 5},
    "geometric_median": "geometric_median",
}
HARM: dict[str, tuple[Poisoning, ...]] = {
    "sign_flip": (SignFlip(clients=BAD, factor=5.0),),
    "byzantine_noise": (ByzantineNoise(clients=BAD, scale=10.0),),
    "label_flip, scaled": (LabelFlip(clients=BAD), Scaling(clients=BAD, factor=10.0)),
}
DOOR = Backdoor(clients=BAD, target=7, share=0.5)
RUNS: dict[str, Run] = {}


def trained(fusion: str | dict[str, Any], *poisonings: Poisoning) -> Run:
    """Seven clients of SplitFed v1 on digits, six rounds; trained once however often it is asked for."""
    key = repr((fusion, poisonings))
    if key not in RUNS:
        with stream(0):
            model = mlp((1, 8, 8), 10, (32,), seed=None)
        RUNS[key] = splitfed.train(
            vanilla(model, "relu1"),
            splitfed.data.digits().clients(7, auxiliary=10, victims=10, validation=0.0),
            rounds=6,
            batch_size=16,
            schedule=SplitFedV1(aggregation=fusion),
            optimizer=Optim("Adam", {"lr": 0.01}),
            adversaries=splitfed.Adversaries(poisoning=poisonings),
            evaluation=splitfed.Evaluation(every=6),
        )
    return RUNS[key]


@pytest.mark.slow
@pytest.mark.parametrize("harm", thin(HARM, 3))
def test_robust_fusion_holds_where_the_mean_collapses(harm: str) -> None:
    """Two of seven are bad; the honest mean is right on more than nine digits of ten."""
    honest = trained("mean").accuracy
    assert honest > 0.9
    assert trained("mean", *HARM[harm]).accuracy < honest - 0.25
    for name in ROBUST if harm == "sign_flip" else ("median", "krum"):
        assert trained(ROBUST[name], *HARM[harm]).accuracy > honest - 0.05, name


@pytest.mark.exhaustive
@pytest.mark.slow
def test_without_harm_robust_fusion_costs_little() -> None:
    for name, fusion in ROBUST.items():
        assert trained(fusion).accuracy > trained("mean").accuracy - 0.03, name


@pytest.mark.slow
def test_robust_fusion_keeps_a_back_door_shut() -> None:
    """Scaled so that the two of seven outweigh the others, as in the paper."""
    harm = (DOOR, Scaling(clients=BAD, factor=4.0))
    assert success_rate(trained("mean", *harm), DOOR) > 0.3
    for name in ("median", "krum"):
        assert success_rate(trained(ROBUST[name], *harm), DOOR) < 0.1, name


def test_a_study_names_a_fusion_with_or_without_parameters() -> None:
    krum = {"name": "krum", "f": 1, "keep": 3}
    plans = [{"name": "splitfed_v1", "aggregation": ["median", krum]}, {"name": "splitfed_v2", "secure": {"bits": 20}}]
    plans.append({"name": "splitfed_v2", "secure": ["masks", "ckks", {"name": "ckks", "limit": 8.0}]})
    data = {**SMALL["data"], "clients": 5}
    grid = checked(small(training={"rounds": 1, "schedule": plans}, data=data, defense=None, attack=None))
    made = [schedule(cell) for cell in grid.cells]
    assert made == [
        SplitFedV1(aggregation=Median()),
        SplitFedV1(aggregation=Krum(f=1, keep=3)),
        SplitFedV2(secure=SecureSum(bits=20)),
        SplitFedV2(secure=SecureSum()),
        SplitFedV2(secure=EncryptedSum()),
        SplitFedV2(secure=EncryptedSum(limit=8.0)),
    ]


def test_a_study_refuses_a_fusion_that_is_misspelt() -> None:
    plan = {"name": "splitfed_v1", "aggregation": "medan"}
    with pytest.raises(
        InvalidInput, match=r"training.schedule.aggregation: unknown aggregation rule 'medan'; did you mean 'median'"
    ):
        checked(small(training={"rounds": 1, "schedule": plan}, defense=None, attack=None))
