"""FML: the divergence and the steps of both models by hand, limit cases, what crosses, exact resume, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.defenses import Noise, Quantization
from splitfed.federated import FML
from splitfed.federated.distillation import divergence
from splitfed.schedules import LocalLoss, Sequential, SplitFedV3
from splitfed.topologies import local, vanilla, vertical
from tests.examples import assert_refuses, assert_same
from tests.federated.examples import traits
from tests.federated.methods import (
    BUILDERS,
    ByHand,
    assert_mean_of_clients,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    data,
    go,
    net,
    plan_of,
    weights,
)
from tests.rounding import single


def test_divergence_by_hand() -> None:
    # Student: (1/4, 3/4) and (1/2, 1/2); teacher: (1/2, 1/2) and (3/4, 1/4).
    student = torch.tensor([[0.0, log(3.0)], [0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[2.0, 2.0], [log(3.0), 0.0]], requires_grad=True)
    first = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    second = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    found = divergence(student, teacher)
    assert float(found.detach()) == single((first + second) / 2)
    found.backward()
    assert teacher.grad is None
    # The slope of KL in the student's scores is its probabilities less the teacher's.
    assert student.grad is not None
    torch.testing.assert_close(student.grad, torch.tensor([[-0.25, 0.25], [-0.25, 0.25]]) / 2)


@pytest.mark.parametrize("shape", BUILDERS)
def test_three_steps_by_hand(shape: str) -> None:
    # Two clients with the same rows, whose average is what each of them has.
    method, rows = FML(alpha=0.7, beta=0.4), data(1, rows=120)
    rows = replace(rows, clients=rows.clients * 2)
    run = go(shape, method, 3, data=rows, batch_size=512)
    bare, train = ByHand(run.engine.topology), rows.clients[0].train
    own, other = (h.value for h in run.engine.topology.heads)
    weight = (0.7, 0.4) if shape == "local" else (0.4, 0.7)
    for _ in range(3):
        made = bare(train.x)
        loss = torch.zeros(())
        for student, teacher, a in ((own, other, weight[0]), (other, own, weight[1])):
            goal = functional.softmax(made[teacher].detach(), 1)
            kl = (goal * (goal.log() - functional.log_softmax(made[student], 1))).sum(1).mean()
            loss = loss + a * functional.cross_entropy(made[student], train.y) + (1 - a) * kl
        bare.step(loss)
    bare.assert_as(run)


def test_nobody_teaches_at_one() -> None:
    off, text = FML(alpha=1.0, beta=1.0), "fml with alpha=1 and beta=1 lets no model learn from another"
    assert traits(off).turned_off == f"{text}; memes are only averaged"
    assert traits(FML()).turned_off is None
    assert traits(FML(alpha=1.0)).turned_off is None
    alone, run = go("local", None), go("local", off)
    for replica in range(3):
        assert_same(
            weights(alone, replica), {n: t for n, t in weights(run, replica).items() if not n.startswith("meme")}
        )
    # Between split nodes the meme is then what the schedule alone would train, and no scores cross.
    alone, run = go("vanilla", None), go("vanilla", off)
    for replica in range(3):
        assert_same(
            weights(alone, replica), {n: t for n, t in weights(run, replica).items() if not n.startswith("private")}
        )
    assert alone.bytes == run.bytes


def test_memes_are_averaged_by_examples_and_private_models_are_not() -> None:
    rows = data()
    run = go("local", FML(), 1, data=rows)
    assert_mean_of_clients(run, run.method_state["meme"], rows)
    meme = sum(t.nbytes for t in run.method_state["meme"].values())
    assert run.engine.traffic.by_kind() == {"weights": 2 * 3 * meme}
    assert not torch.equal(weights(run, 0)["body/fc1.weight"], weights(run, 1)["body/fc1.weight"])


def test_private_models_stay_at_their_split_clients() -> None:
    run = go("vanilla", FML(), logging=sf.Logging(record=Recording(("fed_server",), every=1)))
    assert {n.split("/")[0] for m in run.engine.view("fed_server").messages for n in m.tensors} == {"bottom"}
    one, other = run.learners[0].contents(["private_top"]), run.learners[1].contents(["private_top"])
    assert not torch.equal(one["private_top/fc3.weight"], other["private_top/fc3.weight"])


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    assert_plan_is_counted(shape, FML(), schedule=plan_of(shape, clients_per_round=2, drop_out=0.3))


def test_scores_cross_in_training_alone_and_both_ways() -> None:
    run = go("vanilla", FML(), 1, logging=sf.Logging(record=Recording(("server", "client0"), every=1)))
    assert sorted(run.engine.topology.forward_only) == ["private_top->told_private_fc3", "top->told_fc3"]
    for party, edge in (("server", "private_top->told_private_fc3"), ("client0", "top->told_fc3")):
        seen = [m for m in run.engine.view(party).messages if m.edge == edge]
        assert seen
        assert {(m.kind, m.stamp.phase) for m in seen} == {("activation", "train")}
    one_way = go("vanilla", FML(alpha=1.0), 1).engine.topology
    assert sorted(one_way.forward_only) == ["private_top->told_private_fc3"]
    assert go("u_shaped", FML(), 1).engine.topology.forward_only == frozenset()


def test_defenses_stand_on_the_way_of_scores() -> None:
    edge = ("private_top->told_private_fc3",)
    plain, noisy = go("vanilla", FML()), go("vanilla", FML(), defenses=Noise(scale=2.0, on=edge))
    assert not torch.equal(weights(plain, 0)["bottom/fc1.weight"], weights(noisy, 0)["bottom/fc1.weight"])
    run = assert_plan_is_counted("vanilla", FML(), defenses=Quantization(bits=8, on=edge))
    assert run.bytes < go("vanilla", FML(), 3).bytes


@pytest.mark.exhaustive
def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    for shape in ("local", "vanilla"):
        assert_resumes(shape, FML(), tmp_path / shape)


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    assert_nothing_held_twice(go(shape, FML()))


def test_private_models_of_any_make_share_a_given_meme() -> None:
    small, wide = local(net(1, (8,)), ("relu1",)), local(net(2, (20, 12)), ("relu2",))
    run = go("local", FML(meme=net(3)), 4, topology=[small, wide, small])
    assert set(run.history[-1]["test"]["method"]) == {"meme"}
    assert weights(run, 0)["body/fc1.weight"].shape != weights(run, 1)["body/fc1.weight"].shape
    with pytest.raises(
        InvalidInput, match="fml averages every client's meme; that of client 1 has another architecture"
    ):
        go("local", FML(), topology=[small, wide, small])
    given = go("vanilla", FML(private=net(4, (8,))), 1)
    assert "private" in given.engine.modules(0)


def test_both_models_learn() -> None:
    rows = sf.data.digits().clients(2, auxiliary=0, victims=0)
    whole, split = (go(shape, FML(), 5, data=rows) for shape in ("local", "vanilla"))
    assert min(*whole.history[-1]["test"]["method"]["meme"], whole.accuracy) > 0.5, "chance is .1"
    assert min(*split.history[-1]["test"]["method"]["private"], split.accuracy) > 0.5


@pytest.mark.parametrize("plan", [SplitFedV3(), Sequential(), "blind", "splitfed_v2"])
def test_any_schedule_shares_the_meme_of_split_nodes(plan: Any) -> None:
    assert go("vanilla", FML(), 1, schedule=plan).history


@pytest.mark.parametrize("arguments", [{"alpha": 0.0}, {"beta": 1.5}, {"alpha": float("nan")}])
def test_weights_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"fml {next(iter(arguments))}="):
        FML(**arguments)


MISFITS: dict[str, tuple[Callable[[], object], str]] = {
    "schedule": (
        lambda: go("local", FML(), schedule="splitfed_v1"),
        "fml averages the memes itself, and the schedule averages client segments",
    ),
    "one way": (
        lambda: go("vanilla", FML(), schedule=LocalLoss()),
        "fml needs gradients through the whole meme",
    ),
    "private": (lambda: go("local", FML(private=net())), "fml takes no private= on whole models"),
    "meme": (lambda: go("vanilla", FML(meme=net())), "fml takes no meme= on split models"),
    "alone": (
        lambda: go("local", FML(), data=sf.data.digits().clients(1, auxiliary=0, victims=1)),
        "needs two or more; here is one",
    ),
    "task": (
        lambda: go("vanilla", FML(), topology=vanilla(net(), "relu1", sf.regression(10))),
        "fml compares class probabilities; the task here is 'regression'",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case: str) -> None:
    assert_refuses(*MISFITS[case])


def test_parties_without_labels_and_weights_that_nobody_can_draw_are_refused() -> None:
    halves = {f"party{i}": nn.Sequential(nn.Flatten(), nn.Linear(32, 4)) for i in range(2)}
    rows = sf.data.digits().strips(2).clients(1, auxiliary=0, victims=1)
    with pytest.raises(InvalidInput, match="fml exchanges a meme between clients and needs two or more; here is one"):
        go("vanilla", FML(), topology=vertical(halves, nn.Linear(8, 10), labels="top"), data=rows, schedule="joint")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.scale

    with pytest.raises(InvalidInput, match="fml cannot draw the weights of Own in segment 'model' anew"):
        go("local", FML(), topology=local(Own()))
