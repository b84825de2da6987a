"""What a method may do with a client's public rows, and with rows that pass forward or train without a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.core.topology import Head
from splitfed.core.usage_counts import RowOrigins, UsageCounts
from splitfed.defenses import GaussianRelease
from splitfed.federated import MAFML, Aggregation, FedMD, Learner, Method
from splitfed.federated.base import State
from splitfed.planning.counting import CountingLearner, CountingTrainer
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import prepare
from splitfed.privacy.accountants import compose
from splitfed.schedules import Independent, Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import custom, local
from tests.examples import assert_same
from tests.federated.methods import BUILDERS, assert_plan_is_counted, go, net, weights

TURNS = Sequential(hand_over="none")


@cache
def data(clients: int = 2, **options: Any) -> Any:
    return sf.data.digits().rows(range(120)).clients(clients, auxiliary=4, victims=4, public=0.2, **options)


@pytest.mark.parametrize("shape", BUILDERS)
def test_engine_and_plan_know_the_public_part(shape: str) -> None:
    rows, topology = data(), BUILDERS[shape](net())
    ready = prepare(
        topology, rows, schedule=TURNS, defenses=(), optimizer=None, training=Training(16), method="fedproto"
    )
    run = go(shape, None, 1, data=rows, topology=topology, schedule=TURNS)
    dry = CountingTrainer(ready)
    for replica, client in enumerate(rows.clients):
        for learner in (run.learners[replica], CountingLearner(dry, replica)):
            assert learner.rows("public") == len(client.public) == 11
            (x,) = learner.inputs("public").values()
            assert torch.equal(x, client.public.x)
            assert torch.equal(learner.labels(topology.heads[0].value, "public"), client.public.y)
            value = topology.segments[0].outputs[0]
            assert learner.compute(value, "public").shape == (11, 10)
            assert learner.seed == 0
            assert (learner.objective("client"), learner.rows()) == (None, len(client.train))


@dataclass(frozen=True, kw_only=True)
class Asking(Method):
    """Asks for outputs of public rows before every round, and takes a step there that nobody has a loss for."""

    task: float = 0.0

    def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
        for learner in learners:
            head = learner.topology.heads[0]
            found = learner.consult(head.value, torch.tensor([1, 3, 1]), "public", number)
            learner.send("soft labels", {"scores": found}, number, head.role)
            learner.receive("soft labels", {"scores": found[:1]}, number, head.role)
            state.setdefault("found", []).append(found)
            if self.task >= 0:
                learner.train(number, [torch.tensor([0, 2])], part="public", task=self.task)


@pytest.mark.parametrize("shape", BUILDERS)
def test_rows_that_pass_forward_change_nothing_and_are_planned(shape: str) -> None:
    rows = data()
    alone = go(shape, None, data=rows, schedule=TURNS, optimizer=sf.core.optimizers.Optim("SGD", {"lr": 0.05}))
    run = go(shape, Asking(), data=rows, schedule=TURNS, optimizer=sf.core.optimizers.Optim("SGD", {"lr": 0.05}))
    for replica in range(2):
        assert_same(weights(alone, replica), weights(run, replica))
    assert_plan_is_counted(shape, Asking(), data=rows, schedule=TURNS)
    flows = run.engine.traffic.flows
    head = run.engine.topology.heads[0]
    sender = "server" if head.role == "server" else "client0"
    told = [found for flow, found in flows.items() if (flow.kind, flow.sender) == ("soft labels", sender)]
    assert told[0][1] == (2 if head.role == "server" else 1) * 2 * 3 * 10 * 4
    assert {flow.phase for flow in flows} == ({"train", "evaluate"} if shape != "local" else {"train"})


def test_outputs_are_those_of_the_weights_as_they_stand() -> None:
    rows, topology = data(), local(net())
    run = go("local", Asking(task=-1.0), 1, data=rows, topology=topology)
    for replica, client in enumerate(rows.clients):
        expected = topology.segments[0].module(client.public.x[[1, 3, 1]])
        torch.testing.assert_close(run.method_state["found"][replica], expected)


def test_the_weight_of_the_task_is_that_of_its_loss() -> None:
    rows = data()
    runs = [
        go("local", Asking(task=task), 1, data=rows, schedule=Independent(drop_out=1.0)) for task in (0.0, 0.5, 1.0)
    ]
    start = local(net()).segments[0].module.state_dict()
    moves = [torch.cat([(w - start[n.partition("/")[2]]).flatten() for n, w in weights(r, 0).items()]) for r in runs]
    # Everybody drops out, with some steps of its own behind it: take the same ones off.
    half, whole = moves[1] - moves[0], moves[2] - moves[0]
    assert float(half.norm()) > 0
    assert float(half.norm() / whole.norm()) == pytest.approx(0.5, rel=0.2)


def test_held_rows_are_not_scaled_as_if_drawn_by_chance() -> None:
    """A step of one shown row among Poisson batches is that of a shuffled run: no loss is divided by batch_size."""

    class Once(Method):
        def query(self, learners: Sequence[Learner], number: int, state: State) -> None:
            for learner in learners:
                learner.train(number, [torch.tensor([0])], part="public")
            state["after"] = [learner.contents(["model"]) for learner in learners]

    rows = data()
    one, other = (
        go("local", Once(), 1, data=rows, local=sf.LocalUpdate(sampling=sampling))
        for sampling in ("poisson", "shuffle")
    )
    for a, b in zip(one.method_state["after"], other.method_state["after"], strict=True):
        assert_same(a, b)


def test_private_releases_of_shown_rows_are_in_the_planned_ledger() -> None:
    rows, guard = data(), GaussianRelease(clip=1.0, noise_multiplier=3.0, freeze=True)
    run = go("vanilla", Asking(), data=rows, schedule=TURNS, defenses=guard)
    ready = prepare(
        BUILDERS["vanilla"](net()),
        rows,
        schedule=TURNS,
        defenses=guard,
        optimizer=None,
        training=Training(16),
        method=Asking(),
    )
    planned = planned_ledger(ready, 2)
    assert run.ledger.totals[0].epsilon == pytest.approx(planned.totals[0].epsilon)
    alone = go("vanilla", None, data=rows, schedule=TURNS, defenses=guard).ledger.totals[0].epsilon
    assert alone is not None
    assert planned.totals[0].epsilon > alone, "public rows are released once more a round, and one of them twice"
    with pytest.raises(InvalidInput, match="across=True puts everybody's rows through everybody's segments"):
        go("vanilla", None, data=rows, schedule=TURNS, defenses=guard, evaluation=sf.Evaluation(across_clients=True))


@pytest.mark.parametrize("method", [Aggregation(), FedMD(batch=9, rows=20), MAFML(batch=9)], ids=str)
def test_own_rows_are_counted_whatever_part_they_are_trained_in(method: Method) -> None:
    rows, guard = data(), GaussianRelease(clip=1.0, noise_multiplier=3.0, freeze=True)
    options: dict[str, Any] = {"schedule": TURNS, "defenses": guard, "data": rows}
    run = go("vanilla", method, 3, **options)
    training = {"optimizer": None, "training": Training(16), "method": method}
    ready = prepare(BUILDERS["vanilla"](net()), rows, schedule=TURNS, defenses=guard, **training)
    planned = planned_ledger(ready, 3)
    assert run.ledger.totals[0].epsilon == pytest.approx(planned.totals[0].epsilon)
    assert run.ledger.open[f"data that {type(method).__name__} sends"] == "features and labels"
    for replica, client in enumerate(rows.clients):
        ((_, counts),) = [
            (k, c) for k, c in run.engine.party(replica, "client").state.uses.counts.items() if k[3] == "train"
        ]
        own = 3 * len(client.train)
        if isinstance(method, Aggregation):
            assert int(counts.sum()) < own, "some of the rows were others'"
        elif isinstance(method, MAFML):
            assert int(counts.sum()) == own + 3 * 9, "and a public batch a round"
        else:
            # Once in transfer; then two rounds of 20 rows of 22, scored and digested.
            assert own + 11 + 2 * 2 * 9 <= int(counts.sum()) <= own + 11 + 2 * 2 * 11


@pytest.mark.parametrize("method", [Aggregation(), FedMD(batch=9, rows=20), MAFML(batch=9)], ids=str)
def test_every_release_is_in_the_ledger(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go through the mechanism of a bottom that learns, others' shown ones too, counted where it is called.

    What a method sends may show what a bottom has learnt, so the releases of all clients compose.
    """
    released: Counter[str] = Counter()
    release = GaussianRelease.release

    def counted(self: GaussianRelease, name: str, z: Tensor, context: Context) -> Tensor:
        if context.stamp.phase in ("train", "consult", "evaluate"):
            released[context.party] += len(z)
        return release(self, name, z, context)

    monkeypatch.setattr(GaussianRelease, "release", counted)
    rows, guard = data(), GaussianRelease(clip=1.0, noise_multiplier=3.0)
    run = go("vanilla", method, 2, schedule=TURNS, defenses=guard, data=rows)
    (line,), (total,) = run.ledger.lines, run.ledger.totals
    assert line.uses == sum(released.values())
    assert total.epsilon == compose([(guard.event(), line.uses)], run.ledger.delta).epsilon
    for replica in range(2):
        party = run.engine.party(replica, "client")
        assert sum(int(uses.sum()) for uses in party.state.uses.counts.values()) == released[party.name]
    training = {"optimizer": None, "training": Training(16), "method": method}
    ready = prepare(BUILDERS["vanilla"](net()), rows, schedule=TURNS, defenses=guard, **training)
    assert planned_ledger(ready, 2) == run.ledger


@pytest.mark.parametrize("method", [Aggregation(), FedMD(batch=9, rows=20)], ids=str)
def test_a_shown_row_costs_what_others_release_of_it_too(method: Method) -> None:
    """Through bottoms that do not learn a row costs its own releases, its client's and all others' together."""
    guard = GaussianRelease(clip=1.0, noise_multiplier=3.0, freeze=True)
    run = go("vanilla", method, 2, schedule=TURNS, defenses=guard, data=data())
    uses = []
    for client in range(2):
        counts = [run.engine.party(one, "client").state.uses.counts for one in (client, 1 - client)]
        own = max(int(rows.max()) for (*_, part), rows in counts[0].items() if not part.startswith("shown"))
        shown = [int(rows.max()) for (*_, part), rows in counts[1].items() if part == f"shown by client {client}"]
        assert shown[0] > 0
        uses.append(own + sum(shown))
    (line,), (total,) = run.ledger.lines, run.ledger.totals
    assert line.uses == max(uses)
    assert total.epsilon == compose([(guard.event(), max(uses))], run.ledger.delta).epsilon
    training = {"optimizer": None, "training": Training(16), "method": method}
    ready = prepare(BUILDERS["vanilla"](net()), data(), schedule=TURNS, defenses=guard, **training)
    assert planned_ledger(ready, 2) == run.ledger


class Centred(nn.Module):
    """Takes the mean of the batch from every row."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_what_mixes_rows_shows_shown_ones_in_the_releases_of_all_clients() -> None:
    """A batch of one client has rows that another one has shown, so that they may show in each of its releases."""
    guard = GaussianRelease(clip=1.0, noise_multiplier=3.0, freeze=True)
    with stream(0):
        bottom = nn.Sequential(nn.Flatten(), Centred(), nn.Linear(64, 6))
        segments = [
            sf.Segment("bottom", "client", bottom, ("x",), ("h",)),
            sf.Segment("top", "server", nn.Linear(6, 10), ("h",), ("out",)),
        ]
    mixing = custom(segments, {"x": "client"}, [Head("out", "server", "client")])
    run = go("vanilla", Aggregation(), 2, topology=mixing, schedule=TURNS, defenses=guard, data=data())
    released = [
        sum(int(rows.sum()) for rows in run.engine.party(replica, "client").state.uses.counts.values())
        for replica in range(2)
    ]
    (line,), (total,) = run.ledger.lines, run.ledger.totals
    assert min(released) > 0
    assert line.uses == sum(released)
    assert total.epsilon == compose([(guard.event(), sum(released))], run.ledger.delta).epsilon


def test_rows_are_counted_under_their_owner_whoever_joins_later() -> None:
    """A second client's rows keep their numbers when a first one's are put before them."""
    origins = RowOrigins.joined([RowOrigins.own(torch.tensor([4, 2])), RowOrigins.shown(3, 2)])
    later = RowOrigins.joined([RowOrigins.own(torch.tensor([4, 2])), RowOrigins.shown(1, 1), RowOrigins.shown(3, 2)])
    uses = UsageCounts()
    for known, rows in ((origins, [0, 2, 3, 3]), (later, [1, 2, 4])):
        for part, numbers in known.select(torch.tensor(rows)):
            uses.add(("a->b", 0, 0, part), numbers)
    assert {key[3]: counts.tolist() for key, counts in uses.counts.items()} == {
        "train": [0, 0, 1, 0, 1],
        "shown by client 3": [1, 3],
        "shown by client 1": [1],
    }


def test_across_scores_every_model_on_everybodys_rows() -> None:
    rows = data(3, dirichlet=0.5)
    topologies = [local(net(i, (5 + i,))) for i in range(3)]
    run = go("local", None, 3, data=rows, topology=topologies, evaluation=sf.Evaluation(across_clients=True))
    test = run.history[-1]["test"]
    assert test["across"]["own"] == test["clients"]
    for replica, learner in enumerate(run.learners):
        model = run.engine.modules(replica)["model"].eval()
        right = [(model(c.test.x).argmax(1) == c.test.y).double() for c in rows.clients]
        others = torch.cat([r for i, r in enumerate(right) if i != replica])
        assert test["across"]["others"][replica] == pytest.approx(float(others.mean()))
        assert test["across"]["union"][replica] == pytest.approx(float(torch.cat(right).mean()))
        with pytest.raises(KeyError):
            learner.rows("across")
    assert "across" not in go("local", None, 1, data=rows).history[-1]["test"]


def test_across_without_rows_has_no_scores() -> None:
    run = go("local", None, 1, data=data(validation=0.0), evaluation=sf.Evaluation(across_clients=True))
    assert run.history[-1]["validation"]["across"] == {"own": [None] * 2, "others": [None] * 2, "union": [None] * 2}
