"""The defenses of labels, all of them in every place where labels can leak backwards, and refused in every other."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import GradientCompression, GradientRounding, Iso, LabelDp, Marvell, MaxNorm
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import multi_hop, multi_task, u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data
from tests.thinning import thin

DEFENSES: dict[str, Defense] = {
    "marvell": Marvell(s=1.0),
    "max_norm": MaxNorm(),
    "iso": Iso(ratio=0.5),
    "label_dp once": LabelDp(epsilon=2.0),
    "label_dp gradient": LabelDp(epsilon=2.0, mode="gradient"),
    "compression": GradientCompression(share=0.3),
    "rounding": GradientRounding(bins=12),
}
ROUNDS = 2
BACKWARDS = [name for name in DEFENSES if not name.startswith("label_dp")]
OF_COLUMNS = {2: ("left", "right"), 4: ("a", "b", "c", "d")}


def several(parties: int, **options: Any) -> Topology:
    roles = OF_COLUMNS[parties]
    bottoms = {role: nn.Sequential(nn.Linear(8 // parties, 6), nn.ReLU()) for role in roles}
    top = nn.Sequential(nn.Linear(6 * parties, 8), nn.ReLU(), nn.Linear(8, 1))
    return vertical(bottoms, top, **{"labels": "server", **options})


def chain() -> nn.Module:
    return mlp((8,), 1, (12, 8, 6))


CELLS: dict[str, tuple[Callable[[], Topology], tuple[str, ...]]] = {
    "vertical of two": (lambda: several(2), ("bottom_left->fusion", "bottom_right->fusion")),
    "vertical of four": (lambda: several(4), tuple(f"bottom_{r}->fusion" for r in OF_COLUMNS[4])),
    "vertical, one holds labels and head": (
        lambda: several(2, labels="left", head=nn.Linear(1, 1)),
        ("top->head",),
    ),
    "u_shaped": (lambda: u_shaped(chain(), ("relu1", "relu2")), ("middle->head",)),
    "multi_hop to the client": (
        lambda: multi_hop(chain(), ("relu1", "relu2", "relu3"), labels="client"),
        ("top->head",),
    ),
    "multi_hop, labels at the server": (
        lambda: multi_hop(chain(), ("relu1", "relu2"), labels="server"),
        ("hop1->top",),
    ),
}
OPEN: dict[str, Callable[[], Topology]] = {
    "vanilla": lambda: vanilla(chain(), "relu1"),
    "multi_hop, labels relayed": lambda: multi_hop(chain(), ("relu1", "relu2")),
}


@cache
def federation() -> Federation:
    """Rows of eight columns, one positive in four, for two and for four parties."""
    drawn = generator(3, "label defenses")
    x = torch.randn(240, 8, generator=drawn)
    y = (x @ torch.randn(8, generator=drawn) + torch.randn(240, generator=drawn) > 1.5).long()
    data = splitfed.data.from_arrays(x, y, task=binary(), name="rare")
    parts = {
        role: range(8 // n * i, 8 // n * (i + 1)) for n, roles in OF_COLUMNS.items() for i, role in enumerate(roles)
    }
    return data.vertical(parts, overlap=True).clients(1, auxiliary=40, victims=64)


def trained(cell: str, *defenses: Defense, **options: Any) -> Run:
    with stream(0):
        topology = {**{n: make for n, (make, _) in CELLS.items()}, **OPEN}[cell]()
    arguments = {"rounds": ROUNDS, "batch_size": 32, "defenses": defenses, **options}
    return splitfed.train(topology, federation(), **arguments)


@cache
def undefended(cell: str) -> Run:
    return trained(cell)


@pytest.mark.parametrize(("cell", "name"), thin([(cell, name) for cell in CELLS for name in DEFENSES], 3))
def test_trains_guards_and_counts_what_was_planned(cell: str, name: str) -> None:
    """Removing the defense changes what is learnt; bytes are those foreseen; a second run is the same run."""
    defense, (_, edges) = DEFENSES[name], CELLS[cell]
    run = trained(cell, defense)
    topology = run.engine.topology
    assert defense.edges(topology) == (edges if name in BACKWARDS else ())
    ready = prepare(
        topology, federation(), schedule=run.schedule, defenses=(defense,), optimizer=None, training=Training(32)
    )
    counted = {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(ready, ROUNDS).flows == counted
    bare = undefended(cell)
    weights, plain = (r.engine.topology.state_dict(held(r)) for r in (run, bare))
    assert max(float((weights[n] - plain[n]).abs().max()) for n in plain) > 1e-6, (
        "two runs without it end in the same bits"
    )
    if name in ("compression", "rounding"):
        assert run.bytes < bare.bytes
    else:
        assert run.bytes == bare.bytes
    assert_same(trained(cell, defense).engine.state()["parties"], run.engine.state()["parties"])


def held(run: Run) -> dict[str, nn.Module]:
    """Every segment's trained module."""
    return {n: m for party in run.engine.parties.values() for n, m in party.state.modules.items()}


class Stop(Exception):
    """Stands for a crash."""


def stop_first(done: int, rounds: int, metrics: Any) -> None:
    raise Stop


@pytest.mark.parametrize("name", DEFENSES)
def test_stopped_and_resumed(name: str, tmp_path: Path) -> None:
    whole = trained("u_shaped", DEFENSES[name])
    with pytest.raises(Stop):
        trained("u_shaped", DEFENSES[name], logging=splitfed.Logging(folder=tmp_path / "run", progress=stop_first))
    resumed = trained("u_shaped", DEFENSES[name], logging=splitfed.Logging(folder=tmp_path / "run", resume=True))
    assert_same(resumed.engine.state()["parties"], whole.engine.state()["parties"])


@pytest.mark.parametrize("cell", OPEN)
@pytest.mark.parametrize("name", BACKWARDS)
def test_labels_that_are_sent_forward_leave_nothing_to_guard(cell: str, name: str) -> None:
    """Everybody on the way knows them."""
    text = (
        r"has no gradient to guard: none goes from a party that knows labels to one that does not \(labels of 'fc4' are"
    )
    with pytest.raises(InvalidInput, match=text):
        trained(cell, DEFENSES[name])


def test_label_dp_hides_labels_that_are_sent_forward() -> None:
    run = trained(
        "vanilla", LabelDp(epsilon=0.5), logging=splitfed.Logging(record=splitfed.Recording(("server",))), rounds=1
    )
    sent = run.engine.view("server").select(kind="label").tensors()["fc4"]
    assert set(sent.tolist()) == {0, 1}
    share = float(sent.double().mean())
    true = float(federation().clients[0].train.y.double().mean())
    keep = 1 / (1 + 2.718281828**-0.5)
    expected = true * keep + (1 - true) * (1 - keep)
    assert share == pytest.approx(expected, abs=4 * 0.5 / len(sent) ** 0.5)
    assert abs(share - true) > 0.05
    with pytest.raises(InvalidInput, match="label_dp mode 'gradient' needs the loss of 'fc4' where its labels are"):
        trained("vanilla", LabelDp(mode="gradient"))


def test_a_server_that_is_sent_the_labels_hides_them_from_the_others() -> None:
    """Party left gives its labels to the server; what goes back to right is guarded, what goes back to left is not."""
    topology = several(2, labels="left")
    assert MaxNorm().edges(topology) == Iso().edges(topology) == ("bottom_right->fusion",)
    with pytest.raises(InvalidInput, match="marvell needs the labels where the gradient on 'bottom_right->fusion'"):
        splitfed.train(topology, federation(), defenses=Marvell())


@pytest.mark.parametrize("name", BACKWARDS)
def test_named_edges(name: str) -> None:
    topology = u_shaped(chain(), ("relu1", "relu2"))
    kind = type(DEFENSES[name])
    assert kind(on=("middle->head",)).edges(topology) == ("middle->head",)
    text = r"cannot guard edge 'bottom->middle': no gradient goes back on it .* \(allowed: middle->head\)"
    with pytest.raises(InvalidInput, match=text):
        kind(on=("bottom->middle",)).edges(topology)
    with pytest.raises(InvalidInput, match="unknown edge 'midle->head'; did you mean 'middle->head'"):
        kind(on=("midle->head",)).edges(topology)


def test_gradients_that_do_not_come_back_leave_nothing_to_guard() -> None:
    with pytest.raises(InvalidInput, match="has no gradient to guard"):
        splitfed.train(vanilla(chain(), "relu1"), federation(), schedule="local_loss", defenses=MaxNorm())


def test_several_heads_are_guarded_each_at_its_server() -> None:
    bottoms = {role: nn.Linear(4, 3) for role in ("left", "right")}
    tops = {"one": nn.Linear(6, 2), "two": nn.Linear(6, 2)}
    topology = multi_task(bottoms, tops, targets={"one": None, "two": "other"})
    crossings = {edge.name for edge in topology.crossings}
    assert set(Iso().edges(topology)) == {e for e in crossings if e.startswith("bottom_")}


def test_ten_classes() -> None:
    """Marvell is for two; all the others train."""
    topology = u_shaped(mlp((1, 8, 8), 10, (16, 12)), ("relu1", "relu2"))
    data = toy_data(60).clients(1, victims=4)
    with pytest.raises(InvalidInput, match=re.escape("marvell hides labels of two classes; this task has 10 classes")):
        splitfed.train(topology, data, defenses=Marvell())
    for name in DEFENSES:
        if name != "marvell":
            assert splitfed.train(topology, data, rounds=1, defenses=DEFENSES[name]).bytes > 0
