"""When split is cheaper than federated: the data of the plot, and the plots of costs."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import weight_bytes
from splitfed.costs.singh import Crossover, Sizes, over_clients, sizes_of, split_total
from splitfed.study.report.figures.costs import plot_accuracy_over_time, plot_crossovers
from splitfed.topologies import vanilla
from tests.predicted_bytes import epoch_bytes, step_bytes

pytestmark = pytest.mark.drawn

SIZES = Sizes(clients=4, parameters=1000, client_share=0.25, examples=80, cut_width=5)


def two_layers() -> tuple[Topology, TopologyFacts]:
    topology = vanilla(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), "1")
    return topology, pass_example(topology, {v: torch.rand(2, 4) for v in topology.inputs})


def test_over_clients_by_hand() -> None:
    """2pq = 800 floats whatever the clients, 250 more handed over a client; federated 2000 a client; 4 bytes each."""
    found = over_clients(SIZES, [1, 2])
    assert found == Crossover((1, 2), (4200, 5200), (8000, 16000), pytest.approx(800 / 1750))
    assert over_clients(SIZES, [1, 2], hand_over=False).split == (3200, 3200)


@pytest.mark.parametrize("hand_over", [True, False])
def test_the_lines_cross_at_the_threshold(hand_over: bool) -> None:
    small = Sizes(clients=3, parameters=20, client_share=0.25, examples=80, cut_width=5)
    at = over_clients(small, [1], hand_over).threshold
    around = over_clients(small, [int(at), int(at) + 1], hand_over)
    assert around.split[0] >= around.federated[0]
    assert around.split[1] < around.federated[1]


def test_sizes_of_a_topology_give_the_bytes_that_cross_but_for_labels() -> None:
    """15 of 23 weights at the client, 3 floats a row; the formula is an epoch without labels, hand-overs included."""
    topology, facts = two_layers()
    sizes = sizes_of(topology, facts, clients=2, examples=10)
    assert sizes == Sizes(2, 23, 15 / 23, 10, 3)
    exact = epoch_bytes(topology, facts, [4, 4, 2], label_bytes=0) + 2 * weight_bytes(topology, "client")
    assert 4 * split_total(sizes) == pytest.approx(exact)


def test_what_the_formulas_cannot_say_is_refused() -> None:
    segments = (
        Segment("bottom", "client", nn.Linear(4, 3), ("x",), ("z",)),
        Segment("top", "server", nn.Linear(3, 5), ("z",), ("out",)),
    )
    heads = (Head("out", "server", "client"),)
    topology = Topology("one_way", segments, {"x": "client"}, heads, frozenset({"bottom->top"}))
    facts = pass_example(topology, {"x": torch.rand(2, 4)})
    with pytest.raises(InvalidInput, match="no gradient is sent back on bottom->top of topology 'one_way'"):
        sizes_of(topology, facts, 2, 10)
    with pytest.raises(InvalidInput, match=re.escape("clients=[] is not allowed")):
        over_clients(SIZES, [])
    # 3 floats up, none back, 8 bytes of label.
    assert step_bytes(topology, facts, 5) == 5 * (12 + 8)


def test_labels_are_counted_once_a_hop() -> None:
    segments = (
        Segment("bottom", "client", nn.Linear(4, 3), ("x",), ("z",)),
        Segment("relay", "hop", nn.Linear(3, 2), ("z",), ("h",)),
        Segment("top", "server", nn.Linear(2, 5), ("h",), ("out",)),
    )
    topology = Topology("hops", segments, {"x": "client"}, (Head("out", "server", "client", via=("hop",)),))
    facts = pass_example(topology, {"x": torch.rand(2, 4)})
    assert step_bytes(topology, facts, 1) == 2 * (12 + 8) + 2 * 8


@pytest.mark.exhaustive
def test_the_crossover_plot_marks_the_threshold() -> None:
    settings = plt.rcParams.copy()
    small = replace(SIZES, parameters=20)
    found = over_clients(SIZES, [1, 10, 100]), over_clients(small, [10, 100, 1000])
    text = plot_crossovers(found, "cost")
    ElementTree.fromstring(text)
    assert "split learning sends less throughout" in text
    assert "split learning sends less from 23 clients on" in text
    for word in ("federated learning", "number of clients", "kB an epoch", 'id="cost-'):
        assert word in text
    assert plot_crossovers(found, "cost") == text
    assert plt.get_fignums() == []
    assert plt.rcParams == settings
    far = over_clients(small, [1, 10])
    assert "federated learning sends less throughout" in plot_crossovers([far], "cost")


def test_accuracy_is_plotted_against_simulated_time() -> None:
    text = plot_accuracy_over_time([("v1", [0, 600], [0.1, 0.9]), ("v2", [300], [0.5])], "test accuracy", "time")
    ElementTree.fromstring(text)
    for word in ("v1", "v2", "simulated time in minutes", "test accuracy"):
        assert word in text


def test_nothing_to_plot_is_refused() -> None:
    with pytest.raises(InvalidInput, match="curve 'v1' has 2 times and 1 values; expected as many"):
        plot_accuracy_over_time([("v1", [0, 1], [0.1])], "accuracy", "time")
    with pytest.raises(InvalidInput, match="there is no curve to plot"):
        plot_accuracy_over_time([], "accuracy", "time")
    with pytest.raises(InvalidInput, match="there is no crossover to plot"):
        plot_crossovers([], "cost")
