"""The published formulas: numbers by hand, thresholds where both costs are equal, the cut that is truly the best."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from splitfed.core.errors import InvalidInput
from splitfed.costs import han, singh, splitfed_paper

SIZES = singh.Sizes(clients=4, parameters=1000, client_share=0.25, examples=80, cut_width=5)
TIMES = splitfed_paper.Times(train=7, rate=10, average=3)
HAN = han.HanSetting(
    parameters=100, client_share=0.2, cut_width=3, examples=10, clients=5, client_power=2, server_power=40, rate=50
)


def test_singh_by_hand() -> None:
    """A client: 2 * 80 / 4 = 40 rows of 5 floats there and back in all, and 250 weights; federated: 2 * 1000."""
    assert singh.split_client(SIZES) == 200 + 250
    assert singh.split_client(SIZES, hand_over=False) == 200
    assert singh.split_total(SIZES) == 800 + 1000
    assert singh.split_total(SIZES, hand_over=False) == 800
    assert singh.federated_client(SIZES) == 2000
    assert singh.federated_total(SIZES) == 8000


def test_the_thresholds_by_hand() -> None:
    """2pq = 800: over 1.75, and over 2."""
    assert singh.crossover(SIZES) == pytest.approx(457.142857)
    assert singh.crossover(SIZES, hand_over=False) == 400


@pytest.mark.parametrize("hand_over", [True, False])
def test_at_the_threshold_both_send_as_much(hand_over: bool) -> None:
    at = replace(SIZES, parameters=singh.crossover(SIZES, hand_over) / SIZES.clients)
    assert singh.split_total(at, hand_over) == pytest.approx(singh.federated_total(at), rel=1e-12)
    above = replace(at, parameters=at.parameters * 1.01)
    below = replace(at, parameters=at.parameters * 0.99)
    assert singh.split_total(above, hand_over) < singh.federated_total(above)
    assert singh.split_total(below, hand_over) > singh.federated_total(below)


def test_splitfed_by_hand() -> None:
    """A client sends 200 floats at the cut and 2 * 250 weights."""
    clients = {m: splitfed_paper.communication_client(m, SIZES) for m in splitfed_paper.METHODS}
    assert clients == {"federated": 2000, "split": 700, "splitfed_v1": 700, "splitfed_v2": 700}
    totals = {m: splitfed_paper.communication_total(m, SIZES) for m in splitfed_paper.METHODS}
    assert totals == {"federated": 8000, "split": 2800, "splitfed_v1": 2800, "splitfed_v2": 2800}
    # 7 + 200 + 3; 7 + 800/10 + 2 * 250 * 4/10; 7 + 800/40 + 500/10 + 3; half the average.
    times = {m: splitfed_paper.epoch_time(m, SIZES, TIMES) for m in splitfed_paper.METHODS}
    assert times == {"federated": 210, "split": 287, "splitfed_v1": 80, "splitfed_v2": 78.5}


def test_sglr_by_hand() -> None:
    """400 floats up; down the others' share of 400, and one broadcast of 5."""
    assert singh.common_gradient_total(SIZES, 0) == 805
    assert singh.common_gradient_total(SIZES, 0.5) == 605
    assert singh.common_gradient_total(SIZES, 1) == 405


def test_han_by_hand() -> None:
    """aw = 20 weights; a client computes 10 * 20 = 200; the server 800 a client."""
    assert han.client_compute(HAN) == 200
    assert han.client_compute(HAN, whole=True) == 1000
    assert han.federated_communication(HAN) == 1000
    assert han.splitfed_communication(HAN) == (60 + 40) * 5
    assert han.local_loss_communication(HAN) == (30 + 40) * 5
    assert han.federated_latency(HAN) == 1000 / 50 + 1000 / 2
    assert han.splitfed_latency(HAN) == 500 / 50 + 200 / 2 + 4000 / 40
    # (30 + 20) * 5 / 50 + .2 * 200 / 2 + max{20 * 5 / 50 + .8 * 200 / 2, 4000 / 40}
    assert han.local_loss_latency(HAN) == 5 + 20 + max(2 + 80, 100)
    assert han.local_loss_latency(replace(HAN, server_power=400)) == 5 + 20 + 82
    # (60 + 20) / 50 + 200 / 2 + 800 / 40, five times over
    assert han.split_latency(HAN) == pytest.approx(5 * (1.6 + 100 + 20))


def test_the_optimal_cut_by_hand() -> None:
    """1/(RD) = .002; beta/(P_C K) = .02, (1-beta)/(P_C K) = .08: 40 <= 1/.022, and a = 1 / (40 * .082 + 1)."""
    assert han.inner_cut_pays(HAN)
    assert han.optimal_client_share(HAN) == pytest.approx(1 / 4.28)


def drawn() -> list[han.HanSetting]:
    draw = random.Random(1)
    return [
        han.HanSetting(
            parameters=draw.uniform(10, 1e4),
            client_share=0.5,
            cut_width=draw.uniform(1, 100),
            examples=draw.uniform(1, 500),
            clients=draw.randint(1, 50),
            client_power=draw.uniform(0.1, 10),
            server_power=draw.uniform(0.1, 300),
            rate=draw.uniform(0.1, 100),
            forward_share=draw.uniform(0, 1),
        )
        for _ in range(60)
    ]


def test_the_optimal_cut_minimises_the_latency_of_the_table() -> None:
    """On a grid of five hundred cuts, and where the condition fails the latency rises with a throughout."""
    grid = [i / 500 for i in range(501)]
    inner = 0
    for setting in drawn():
        latency = [han.local_loss_latency(replace(setting, client_share=a)) for a in grid]
        if han.inner_cut_pays(setting):
            inner += 1
            best = han.optimal_client_share(setting)
            assert han.local_loss_latency(replace(setting, client_share=best)) <= min(latency) * (1 + 1e-12)
            assert abs(grid[latency.index(min(latency))] - best) <= 2e-3 + 1e-9
        else:
            assert all(later > earlier for earlier, later in pairwise(latency))
    assert 10 < inner < 50


def test_at_the_papers_constants_the_smallest_client_is_the_fastest_for_few() -> None:
    """P_S = 100 exceeds 1 / (1/(R D) + .2/K): with K = 5 and many examples that is 25, with K = 30 it is 150."""
    few = han.HanSetting(parameters=1000, client_share=0.1, cut_width=10, examples=1e9, clients=5)
    assert not han.inner_cut_pays(few)
    assert han.inner_cut_pays(replace(few, clients=30))
    text = "server_power=100.0 is too large for an optimal cut inside the model"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        han.optimal_client_share(few)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: replace(SIZES, clients=0), "clients=0 is not allowed; expected a whole number of at least 1"),
        (lambda: replace(SIZES, client_share=1.5), "client_share=1.5 is not allowed; expected a number in [0, 1]"),
        (lambda: replace(SIZES, cut_width=0), "cut_width=0 is not allowed; expected a number in (0, inf)"),
        (lambda: replace(SIZES, examples=-1), "examples=-1 is not allowed"),
        (lambda: replace(TIMES, rate=0), "rate=0 is not allowed"),
        (lambda: replace(TIMES, train=-1), "train=-1 is not allowed"),
        (lambda: replace(HAN, forward_share=-0.1), "forward_share=-0.1 is not allowed; expected a number in [0, 1]"),
        (lambda: replace(HAN, server_power=float("inf")), "server_power=inf is not allowed"),
        (lambda: singh.common_gradient_total(SIZES, 2), "common_share=2 is not allowed"),
        (
            lambda: splitfed_paper.epoch_time("splitfed", SIZES, TIMES),
            "unknown method 'splitfed'; did you mean 'splitfed_v",
        ),
    ],
)
def test_bad_input_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        make()
    assert "\n" not in str(caught.value)
