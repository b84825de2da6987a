"""FedGen: the losses by hand, a step of a head on generated rows, limit cases, what crosses, resume, refusals."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.topology import Segment
from splitfed.federated import FedAvg, FedGen
from splitfed.federated.fedgen import GeneratorObjective
from splitfed.federated.generator import ClientHead, Generator, diversity, ensemble_loss
from splitfed.schedules import Sequential
from splitfed.topologies import local, multi_hop
from tests.examples import assert_same
from tests.federated.examples import traits
from tests.federated.methods import (
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    go,
    net,
    plan_of,
    weights,
)
from tests.rounding import single

SMALL: dict[str, Any] = {"noise": 4, "hidden": 8, "steps": 5, "rows": 8, "batch": 8}


def scaled(factor: float) -> ClientHead:
    """A head whose scores are its input times a factor."""
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = factor * torch.eye(2)
    linear.requires_grad_(False)
    return ClientHead([Segment("head", "client", linear, ("z",), ("out",))], {"head": linear}, "z", "out")


def test_diversity_by_hand() -> None:
    # Noise distances 1 on two of four pairs (mean over 2 numbers: 1/2), what is made 4 (mean 2): mean of products 1/2.
    noise, made = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    assert float(diversity(noise, made)) == single(exp(-(2 * 0.5 * 2.0) / 4))
    assert float(diversity(noise, torch.ones(2, 3, 2))) == 1.0


def test_heads_count_by_who_holds_the_label() -> None:
    z, y = torch.tensor([[log(3.0), 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    counts = torch.tensor([[3, 0], [1, 5]])
    # Row 0: -log 3/4 under the first head with weight 3/4, -log 9/10 under the second with 1/4; row 1 the second alone.
    wanted = (-0.75 * log(3 / 4) - 0.25 * log(9 / 10) + log(2)) / 2
    assert float(ensemble_loss([scaled(1.0), scaled(2.0)], z, y, counts)) == single(wanted)


def test_a_head_learns_from_generated_rows_by_hand() -> None:
    """Its gradient afterwards: that of the step, plus the weighted one of the rows that were drawn."""
    torch.manual_seed(0)
    head, made = nn.Linear(3, 4), Generator(2, 4, 5, (3,))
    segment = Segment("head", "client", head, ("z",), ("out",))
    objective = GeneratorObjective(0.5, 6, [segment], "z", "out", made, seed=7, stochastic=False)
    modules = {"head": head}
    head.weight.grad, head.bias.grad = torch.ones(4, 3), torch.zeros(4)
    objective.correct(modules)
    assert torch.equal(head.weight.grad, torch.ones(4, 3))
    objective.load_generator({**made.state_dict(), "labels": torch.tensor([False, True, False, True])})
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    made.register_forward_hook(lambda module, given, z: seen.append((given[1], z)))
    objective.correct(modules)
    ((y, z),) = seen
    assert set(y.tolist()) <= {1, 3}
    error = functional.softmax(z @ head.weight.detach().T + head.bias.detach(), 1) - functional.one_hot(y, 4)
    torch.testing.assert_close(head.weight.grad, 1 + 0.5 * error.T @ z / 6)
    torch.testing.assert_close(head.bias.grad, 0.5 * error.mean(0))


def test_weight_zero_is_the_average_alone_and_says_so() -> None:
    off = FedGen(weight=0.0)
    assert traits(off).turned_off == "fedgen with weight=0 does not use the generator"
    assert traits(FedGen()).turned_off is None
    one, other = go("local", FedAvg(), 3), go("local", off, 3)
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert one.bytes == other.bytes


def test_the_first_round_is_the_average_and_later_ones_are_not() -> None:
    first = [go("local", method, 1) for method in (FedAvg(), FedGen(**SMALL))]
    assert_same(weights(first[0], 0), weights(first[1], 0))
    second = [weights(go("local", method, 2), 0) for method in (FedAvg(), FedGen(**SMALL))]
    assert not torch.equal(second[0]["head/fc3.weight"], second[1]["head/fc3.weight"])


FORMS = {
    "local": ("independent", "head"),
    "vanilla": ("splitfed_v3", "top"),
    "u_shaped": (Sequential(hand_over="none"), "head"),
}
"""Topology -> a schedule, and the segment that is the head."""


@pytest.mark.parametrize("shape", FORMS)
def test_the_generator_learns_what_the_heads_know(shape: str) -> None:
    schedule, head = FORMS[shape]
    rows = sf.data.digits().rows(range(500)).clients(2, auxiliary=0, victims=0)
    method = FedGen(noise=8, hidden=32, steps=80, rate=1e-2)
    run = go(shape, method, 5, data=rows, schedule=schedule)
    made = Generator(8, 10, 32, run.method_state["shape"])
    made.load_state_dict(run.method_state["generator"])
    y = torch.arange(10).repeat(5)
    z = made.eval()(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), y)
    prediction = run.engine.modules(0, run.newest(0))[head].eval()(z).argmax(1)
    assert float((prediction == y).double().mean()) > 0.8, "chance is .1"
    assert run.accuracy > 0.5


def test_a_server_that_holds_the_head_is_sent_nothing_for_the_generator() -> None:
    """Weights of the clients' segments alone; with the head alone shared, what the schedule moves."""
    run = assert_plan_is_counted("vanilla", FedGen(**SMALL), schedule="splitfed_v3")
    assert_nothing_held_twice(run)
    assert set(run.method_state["weights"]) == {"bottom/fc1.weight", "bottom/fc1.bias"}
    assert run.engine.traffic.by_kind() == go("vanilla", FedAvg(), 3, schedule="splitfed_v3").engine.traffic.by_kind()
    heads = assert_plan_is_counted("vanilla", FedGen(share="head", **SMALL))
    assert heads.engine.traffic.by_kind() == go("vanilla", None, 3).engine.traffic.by_kind()
    assert heads.history[-1]["loss"] != go("vanilla", None, 3).history[-1]["loss"]


def test_the_second_term_by_hand() -> None:
    """The divergence of what the head makes of a row from what it makes of a generated row of the same label."""
    torch.manual_seed(0)
    head, made = nn.Linear(3, 4), Generator(2, 4, 5, (3,)).eval()
    segment = Segment("head", "client", head, ("z",), ("out",))
    scores = ClientHead([segment], {"head": head}, "z", "out")
    objective = GeneratorObjective(0.0, 6, [segment], "z", "out", made, 7, False, 0.5, scores)
    found, y = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 3, 3, 0])
    stamp = Stamp("train", 1, 2, 3)
    assert objective.terms({"out": found}, {"out": y}, stamp) == {}
    objective.load_generator({**made.state_dict(), "labels": torch.tensor([True, True, False, True])})
    seen: list[torch.Tensor] = []
    made.register_forward_hook(lambda module, given, z: seen.append(z))
    (term,) = objective.terms({"out": found}, {"out": y}, stamp).values()
    q = head(seen[0]).softmax(1).detach()
    (slope,) = torch.autograd.grad(term, found)
    torch.testing.assert_close(term, 0.5 * (q * (q.log() - found.log_softmax(1))).sum() / 5)
    torch.testing.assert_close(slope, 0.5 * (found.softmax(1) - q) / 5)
    assert objective.counts.tolist() == [4, 2, 0, 4]


def test_planned_bytes_are_counted_bytes() -> None:
    plan = plan_of("local", clients_per_round=2, drop_out=0.3)
    run = assert_plan_is_counted("local", FedGen(**SMALL), 4, schedule=plan)
    assert set(run.engine.traffic.by_kind()) == {"weights", "label counts", "generator"}


def test_heads_alone_are_shared_between_clients_of_any_make() -> None:
    one, other = (local(Pieces(wide), ("body",)) for wide in (10, 20))
    run = go("local", FedGen(share="head", **SMALL), 2, topology=[one, other, one])
    assert {name.split("/")[0] for name in run.method_state["weights"]} == {"head"}
    with pytest.raises(InvalidInput, match="fedgen averages every client's shared part; that of client 1 has"):
        go("local", FedGen(**SMALL), topology=[one, other, one])


def test_weights_are_aggregated_as_the_settings_say() -> None:
    """One round: the median of the clients' weights, not their mean; a server step from what they were sent."""
    run = go("local", FedGen(**SMALL, aggregation="median"), 1)
    name = next(iter(run.method_state["weights"]))
    clients = torch.stack([weights(run, replica)[name] for replica in range(3)])
    torch.testing.assert_close(run.method_state["weights"][name], clients.median(0).values)
    stepped = go("local", FedGen(**SMALL, aggregation={"server_step": "fedadam"}), 1).method_state["weights"][name]
    assert not torch.equal(stepped, go("local", FedGen(**SMALL), 1).method_state["weights"][name])
    with pytest.raises(InvalidInput, match=r"fedgen aggregation secure=.* is not allowed: its server trains on"):
        FedGen(aggregation={"secure": True})


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    assert_resumes("local", FedGen(**SMALL), tmp_path, schedule=plan_of("local", clients_per_round=2))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"share": "base"}, "unknown fedgen share 'base'"),
        ({"weight": -1.0}, "fedgen weight=-1"),
        ({"diversity": -0.5}, "fedgen diversity=-0.5"),
        ({"rate": 0.0}, "fedgen rate=0"),
        ({"rows": 0}, "fedgen rows=0"),
        ({"batch": 1}, "fedgen batch=1"),
        ({"steps": -1}, "fedgen steps=-1"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedGen(**arguments)


class Pieces(nn.Module):
    """A body of any width and a head, by name."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, wide), nn.ReLU(), nn.Linear(wide, 6), nn.ReLU())
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x))
        return found


class Skipping(nn.Module):
    """The head reads the input once more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(72, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        found: torch.Tensor = self.head(torch.cat([self.body(flat), flat], 1))
        return found


def test_what_does_not_fit_is_refused() -> None:
    hops = multi_hop(net(), ("relu1", "relu2"))
    with pytest.raises(InvalidInput, match="segment 'hop1' behind it is at role 'hop1' and the loss at 'server': name"):
        go("vanilla", FedGen(embedding="relu1"), topology=hops, schedule="splitfed_v3")
    assert len(go("vanilla", FedGen(**SMALL), 1, topology=hops, schedule="splitfed_v3").history) == 1
    with pytest.raises(InvalidInput, match="topology 'local' has no embedding for fedgen"):
        go("local", FedGen(), topology=local(net()))
    with pytest.raises(InvalidInput, match="fedgen generates 'body'; segment 'head' reads 'flatten' as well"):
        go("local", FedGen(embedding="body"), topology=local(Skipping(), ("body",)))
    with pytest.raises(InvalidInput, match="fedgen averages weights itself, and the schedule hands client segments on"):
        go("local", FedGen(), schedule="sequential")
