"""MAFML: divergence and projection by hand, whole rounds beside a bare loop, what crosses, exact resume, refusals."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
import splitfed.federated.mafml
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream
from splitfed.core.topology import Topology
from splitfed.federated.mafml import MAFML, distribution, project, weighted_divergence
from splitfed.federated.public_rows import draw_row_numbers
from splitfed.models.mlp import mlp
from splitfed.schedules import Independent, Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local
from tests.federated.methods import (
    BUILDERS,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    go,
    net,
    weights,
)
from tests.rounding import single

STEP = Independent(steps=1)
TURNS = Sequential(hand_over="none")
RATE = 0.1


@cache
def data(clients: int = 3, **options: Any) -> Any:
    return sf.data.digits().rows(range(120)).clients(clients, auxiliary=4, victims=4, public=0.2, **options)


def plan(shape: str) -> Any:
    return STEP if shape == "local" else TURNS


def test_divergence_by_hand() -> None:
    # One teacher is sure of class 0 and weighs 1, one knows nothing of three classes and weighs a half.
    student = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, -1.0]])
    teachers = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    p, q = student.softmax(1)
    first = -torch.log(p[0])
    second = sum(1 / 3 * torch.log(1 / 3 / q[c]) for c in range(3))
    found = weighted_divergence(student, teachers, torch.tensor([1.0, 0.5]))
    assert float(found) == single(float(first + 0.5 * second) / 2)
    # Against torch: teachers that say the same as the student are no distance away.
    assert float(weighted_divergence(student, student.softmax(1), torch.ones(2))) == single(0)


def test_what_a_defense_left_of_soft_labels_is_a_distribution_again() -> None:
    told = torch.tensor([[0.6, -0.2, 0.2], [-1.0, -1.0, 0.0], [0.25, 0.25, 0.5]])
    found = distribution(told)
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.0, 0.0], [0.25, 0.25, 0.5]]))
    # A row that says nothing teaches nothing.
    assert weighted_divergence(torch.randn(1, 3), found[1:2], torch.ones(1)) == 0


def test_projection_by_hand() -> None:
    # g_pub = (-3, 1, 2), g_loc = (2, 0, 0) + (0, 1, ...): along = -6 + 1 = -5, |g_loc|^2 = 5, so g_loc is added once.
    gradient = {"a": torch.tensor([-3.0, 1.0]), "b": torch.tensor([2.0]), "new": torch.tensor([7.0])}
    local = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([0.0])}
    project(gradient, local)
    assert {name: g.tolist() for name, g in gradient.items()} == {"a": [-1.0, 2.0], "b": [2.0], "new": [7.0]}
    assert float(torch.dot(gradient["a"], local["a"])) == 0.0


def test_gradients_that_agree_are_left_alone() -> None:
    gradient = {"a": torch.tensor([3.0, -1.0])}
    project(gradient, {"a": torch.tensor([1.0, 2.0])})
    assert gradient["a"].tolist() == [3.0, -1.0]


class Bare:
    """A client, or a server, of plain PyTorch: modules, SGD, the gradient of the newest local step by client."""

    def __init__(self, modules: Mapping[str, nn.Module], rate: float | None) -> None:
        self.modules = copy.deepcopy(dict(modules))
        self.weights = [p for m in self.modules.values() for p in m.parameters()]
        self.optimizer = torch.optim.SGD(self.weights, lr=RATE, momentum=0.5)
        self.mutual = self.optimizer if rate is None else torch.optim.SGD(self.weights, lr=rate, momentum=0.5)
        self.local: dict[int, Tensor] = {}

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.weights if p.grad is not None])

    def step(self, replica: int, mutual: bool, projected: bool) -> int:
        """Take a step; return 1 if the gradient was projected."""
        g = self.gradient()
        turned = 0
        if mutual and projected and torch.dot(g, self.local[replica]) < 0:
            g = g - torch.dot(self.local[replica], g) / self.local[replica].square().sum() * self.local[replica]
            turned = 1
        if not mutual:
            self.local[replica] = g
        at = 0
        for p in self.weights:
            p.grad = g[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        (self.mutual if mutual else self.optimizer).step()
        return turned


def by_hand(
    topology: Topology, rows: Any, rounds: int, epochs: bool, method: MAFML, copied: bool = False
) -> tuple[list[Any], int]:
    """Train as the head of the method's file says; return the parties by client, and how often a gradient was turned.

    `epochs`: a round of local training is an epoch, client after client, else one step. `copied`: every client has a
    server of its own, and their mean takes the place of each after local training and after the mutual steps.
    """
    replicas, (x_name,) = len(rows.clients), topology.inputs
    own = {r: {s.name: s.module for s in topology.segments_of(r)} for r in topology.roles}
    shared = {r: Bare(own[r], method.mutual_rate) for r in own if r not in topology.data_roles}
    crew = [{r: Bare(own[r], method.mutual_rate) for r in topology.data_roles} | shared for _ in range(replicas)]
    if copied:
        crew = [one | {r: Bare(own[r], method.mutual_rate) for r in shared} for one in crew]
    training, turned = Training(16), 0

    def scores(replica: int, x: Tensor) -> Tensor:
        made = {x_name: x}
        for s in topology.segments:
            made[s.outputs[0]] = crew[replica][s.role].modules[s.name](*(made[v] for v in s.inputs))
        return made[topology.heads[0].value]

    def merge() -> None:
        for role in shared if copied else ():
            for copies in zip(*(one[role].weights for one in crew), strict=True):
                mean = torch.stack([p.detach() for p in copies]).mean(0)
                for p in copies:
                    p.data.copy_(mean)

    def step(replica: int, loss: Tensor, mutual: bool) -> int:
        for party in crew[replica].values():
            party.optimizer.zero_grad()
        loss.backward()
        return sum(party.step(replica, mutual, method.projected) for party in crew[replica].values())

    for number in range(rounds):
        for replica, client in enumerate(rows.clients):
            if epochs:
                batches = training.batches(len(client.train), number, replica)
            else:
                batches = STEP._batches(training, len(client.train), number, replica)
            for batch in batches:
                step(
                    replica,
                    functional.cross_entropy(scores(replica, client.train.x[batch]), client.train.y[batch]),
                    False,
                )
        merge()
        told = []
        for replica, client in enumerate(rows.clients):
            seed = derive(0, "mafml", replica)
            chosen = draw_row_numbers(seed, len(client.public), number * method.batch, method.batch)
            x, y = client.public.x[chosen], client.public.y[chosen]
            p = scores(replica, x).softmax(1).detach()
            told.append((x, y, p, float((p.argmax(1) == y).float().mean()) if method.weighted else 1.0))
        for replica in range(replicas):
            loss = torch.zeros(())
            for x, y, p, accuracy in (told[j] for j in range(replicas) if j != replica):
                z = scores(replica, x)
                kl = functional.kl_div(z.log_softmax(1), p, reduction="batchmean")
                loss = loss + (accuracy * kl + functional.cross_entropy(z, y)) / (replicas - 1)
                if method.mutual_steps == "each":
                    turned += step(replica, loss, True)
                    loss = torch.zeros(())
            if method.mutual_steps == "all":
                turned += step(replica, loss, True)
        merge()
    return crew, turned


@pytest.mark.parametrize("shape", BUILDERS)
@pytest.mark.parametrize(
    "method",
    [
        MAFML(batch=12),
        MAFML(batch=8, weighted=False, projected=False),
        MAFML(batch=12, mutual_steps="each"),
        MAFML(batch=12, mutual_steps="each", mutual_rate=0.03),
        MAFML(batch=12, mutual_rate=0.03),
    ],
    ids=str,
)
def test_rounds_beside_a_bare_loop(shape: str, method: MAFML) -> None:
    rows, topology = data(), BUILDERS[shape](net())
    optimizer = Optim("SGD", {"lr": RATE, "momentum": 0.5})
    rounds = 6 if shape == "local" else 3
    run = go(shape, method, rounds, data=rows, topology=topology, schedule=plan(shape), optimizer=optimizer)
    crew, turned = by_hand(topology, rows, rounds, shape != "local", method)
    for replica, parties in enumerate(crew):
        expected = {
            f"{s}/{k}": v for p in parties.values() for s, m in p.modules.items() for k, v in m.state_dict().items()
        }
        for name, tensor in weights(run, replica).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert (turned > 0) == method.projected, "the comparison must have seen projections"


def test_server_copies_take_mutual_steps_and_are_averaged(tmp_path: Path) -> None:
    """Under SplitFed v3 there is a server a client, in local training and in the mutual steps."""
    rows, topology, method = data(), BUILDERS["vanilla"](net()), MAFML(batch=12)
    given: dict[str, Any] = {"data": rows, "schedule": "splitfed_v3"}
    optimizer = Optim("SGD", {"lr": RATE, "momentum": 0.5})
    run = go("vanilla", method, 3, topology=topology, optimizer=optimizer, **given)
    crew, turned = by_hand(topology, rows, 3, True, method, copied=True)
    for replica, parties in enumerate(crew):
        expected = {
            f"{s}/{k}": v for p in parties.values() for s, m in p.modules.items() for k, v in m.state_dict().items()
        }
        for name, tensor in weights(run, replica).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    assert turned > 0
    assert_plan_is_counted("vanilla", method, **given)
    assert_resumes("vanilla", method, tmp_path / "run", **given)


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    run = assert_plan_is_counted(shape, MAFML(batch=10), data=data(), schedule=plan(shape))
    # 40 rows but 4 and 4 left out of 120: 112 rows, 37 or 38 a client, of which a fifth, 7 or 8, are shown.
    counts = [len(c.public) for c in data().clients]
    row = 64 * 4 + 8
    assert run.engine.traffic.bytes(kind="data") == sum(counts) * row * 3, "up once, and down to two others"
    up, down = 10 * 10 * 4, 10 * 10 * 4 + 4
    assert run.engine.traffic.bytes(kind="soft labels") == 3 * (3 * up + 3 * 2 * down)


def test_sampled_clients_and_drop_outs_are_planned() -> None:
    schedule = Independent(steps=1, clients_per_round=2, drop_out=0.4)
    run = assert_plan_is_counted("local", MAFML(), 6, data=data(4), schedule=schedule)
    assert any(entry["dropped"] for entry in run.history)
    assert all(len(told) == 3 for told in run.method_state["told"].values())


@pytest.mark.parametrize("shape", ["local", "vanilla"])
@pytest.mark.parametrize("method", [MAFML(batch=6), MAFML(batch=6, mutual_steps="each", mutual_rate=0.05)], ids=str)
def test_resumed_run_ends_in_the_same_bits(shape: str, method: MAFML, tmp_path: Path) -> None:
    optimizer = Optim("SGD", {"lr": RATE, "momentum": 0.5})
    assert_resumes(shape, method, tmp_path / "run", data=data(), schedule=plan(shape), optimizer=optimizer)


def test_steps_for_each_teacher_are_planned() -> None:
    assert_plan_is_counted("vanilla", MAFML(batch=10, mutual_steps="each"), data=data(), schedule=TURNS)


def test_a_rate_of_its_own_takes_no_schedule_by_steps() -> None:
    optimizer = Optim(
        "SGD", {"lr": RATE}, scheduler="StepLR", scheduler_options={"step_size": 2}, scheduler_every="step"
    )
    with pytest.raises(InvalidInput, match=r"mafml mutual_rate=0\.1 is a rate of its own; scheduler_every='step'"):
        go("local", MAFML(mutual_rate=0.1), data=data(), schedule=STEP, optimizer=optimizer)


def test_resumed_run_of_sampled_clients(tmp_path: Path) -> None:
    schedule = Independent(steps=2, clients_per_round=2)
    assert_resumes("local", MAFML(batch=6), tmp_path / "run", data=data(4), schedule=schedule)


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    assert_nothing_held_twice(go(shape, MAFML(batch=4), data=data(2), schedule=plan(shape)))


def test_models_of_any_make() -> None:
    topologies = [local(net(i, widths)) for i, widths in enumerate([(10,), (6, 5), (12,)])]
    run = assert_plan_is_counted("local", MAFML(batch=5), 2, data=data(), topology=topologies, schedule=STEP)
    assert len(run.history[-1]["test"]["clients"]) == 3


def test_clients_learn_what_others_know() -> None:
    """Digits upright and upside down: alone a client knows nothing of the other's, with MAFML it does."""
    rows = sf.data.digits().rows(range(400)).rotated([0, 180])
    split = rows.clients(2, by_domain=True, auxiliary=0, victims=0, public=0.15)
    found = {}
    for method in (None, MAFML()):
        with stream(0):
            topology = local(mlp((1, 8, 8), 10, (32,), seed=None))
        run = sf.train(
            topology,
            split,
            schedule=Independent(steps=4),
            method=method,
            optimizer=Optim("Adam", {"lr": 0.005}),
            rounds=40,
            batch_size=32,
            evaluation=sf.Evaluation(every=40, across_clients=True),
        )
        found[method] = run.history[-1]["test"]["across"]
    alone, mutual = found.values()
    assert min(mutual["others"]) > max(alone["others"]) + 0.2
    assert min(mutual["own"]) > 0.8
    assert min(mutual["union"]) > max(alone["union"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": sf.data.digits().clients(2)}, "mafml needs public rows of every client, and client0 has none"),
        ({"data": data(1)}, "mafml learns from others' public rows; one client has no others"),
        (
            {"schedule": "splitfed_v1"},
            "method MAFML also trains clients outside of the schedule's round, and SplitFedV1 replaces",
        ),
        (
            {"schedule": Sequential()},
            "method MAFML also trains clients outside of the schedule's round, and Sequential replaces",
        ),
        ({"schedule": "blind", "shape": "vanilla"}, "method MAFML"),
        ({"local": sf.LocalUpdate(sampling="poisson")}, "sampling='poisson' draws every step's rows, and method MAFML"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    shape, given = changes.get("shape", "local"), {k: v for k, v in changes.items() if k != "shape"}
    with pytest.raises(InvalidInput, match=text):
        go(shape, MAFML(), **{"data": data(), "schedule": STEP, **given})


def test_refuses_what_has_no_classes_and_a_batch_without_rows() -> None:
    rows = sf.data.from_arrays(torch.rand(60, 4), torch.rand(60), name="real").clients(
        2, auxiliary=0, victims=0, public=0.2
    )
    with pytest.raises(InvalidInput, match="mafml compares class probabilities; the task here is 'regression'"):
        go("local", MAFML(), data=rows, topology=local(nn.Linear(4, 1)), schedule=STEP)
    with pytest.raises(InvalidInput, match="mafml batch=0"):
        MAFML(batch=0)


def test_the_head_tells_where_it_deviates_from_the_papers_algorithm() -> None:
    """Each deviation by what it is about; what the code does is tested above and below."""
    told = (splitfed.federated.mafml.__doc__ or "").split("Deviations from Algorithm 1:")
    assert len(told) == 2
    items = [line[2:].partition(":")[0] for line in told[1].splitlines() if line.startswith("- ")]
    assert [item.partition(" are told")[0].partition(",")[0] for item in items] == [
        "Local steps",
        "Mutual steps",
        "One optimizer",
        "Accuracies",
        "Public rows",
        "N",
        "Probabilities",
        "Split nodes",
    ]


def test_local_and_mutual_steps_change_one_optimizer_and_who_left_does_not_count() -> None:
    """Adam counts both kinds of steps; of three clients asked alone, none takes a mutual one."""

    def steps(schedule: Independent) -> list[int]:
        run = go("local", MAFML(batch=4), 1, data=data(), schedule=schedule, optimizer=Optim("Adam", {"lr": 1e-3}))
        found = []
        for replica in range(3):
            optimizer = run.engine.party(replica, "client").state.optimizer
            assert optimizer is not None
            found.append(int(max((s["step"] for s in optimizer.state.values()), default=torch.tensor(0))))
        return found

    assert steps(Independent(steps=2)) == [3, 3, 3]
    assert sorted(steps(Independent(steps=2, clients_per_round=1))) == [0, 0, 2]
