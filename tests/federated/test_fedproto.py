"""FedProto: prototypes worked out by hand, their pull on a client's loss, what crosses, exact resume, refusals."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.random import stream
from splitfed.federated.fedproto import FedProto, Pull, nearest, prototypes
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules import Sequential, SplitFedV1
from splitfed.schedules.base import Schedule, Training
from splitfed.topologies import local, multi_hop, u_shaped, vanilla, vertical
from splitfed.training import local_learner
from splitfed.training.run import Run
from tests.examples import assert_same
from tests.federated.examples import shared_probes, traits
from tests.federated.methods import assert_nothing_held_twice, assert_resumes

ALONE = Sequential(hand_over="none")
STAMP = Stamp("train", 0, 0, 0)
BUILDERS = {
    "local": lambda m: local(m, ("relu1",)),
    "vanilla": lambda m: vanilla(m, "relu1"),
    "u_shaped": lambda m: u_shaped(m, ("relu1", "relu2")),
}


@cache
def data(clients: int = 3) -> Any:
    return splitfed.data.digits().clients(clients, dirichlet=0.5, auxiliary=10, victims=8)


@cache
def built(shape: str) -> splitfed.Topology:
    with stream(0):
        return BUILDERS[shape](mlp((1, 8, 8), 10, (16, 12), seed=None))


def go(shape: str = "local", rounds: int = 2, **changes: Any) -> Run:
    arguments: dict[str, Any] = {"schedule": ALONE, "method": FedProto(), "data": data(), **changes}
    with shared_probes():
        return splitfed.train(built(shape), arguments.pop("data"), rounds=rounds, **arguments)


def pull(weight: float, distance: str) -> Pull:
    found = Pull(FedProto(weight=weight, distance=distance), "body", "z", "out")
    found.prototypes = {"0": torch.tensor([1.0, 1.0]), "2": torch.tensor([0.0, 3.0])}
    return found


def test_prototypes_are_means_by_class() -> None:
    z = torch.tensor([[0.0, 2.0], [2.0, 4.0], [5.0, 5.0]])
    means, rows = prototypes(z, torch.tensor([1, 1, 3]))
    assert {name: mean.tolist() for name, mean in means.items()} == {"1": [1.0, 3.0], "3": [5.0, 5.0]}
    assert rows == {"1": 2, "3": 1}


@pytest.mark.parametrize(("distance", "expected"), [("mse", 0.5 * (25 + 4) / 6), ("l2", 0.5 * (5 + 2) / 3)])
def test_pull_is_the_weighted_distance_and_absent_classes_pull_nothing(distance: str, expected: float) -> None:
    # Rows of classes 0, 2 and 1; the last has no prototype. Squared distances: 9 + 16 = 25, 4 and none.
    z = torch.tensor([[4.0, 5.0], [0.0, 5.0], [9.0, 9.0]], requires_grad=True)
    term = pull(0.5, distance).terms({"z": z}, {"out": torch.tensor([0, 2, 1])}, STAMP)["body"]
    (slope,) = torch.autograd.grad(term, z)
    assert float(term.detach()) == pytest.approx(expected, rel=1e-5)
    assert slope[2].tolist() == [0.0, 0.0]
    assert slope[1][1] > 0


def test_fusion_weighs_by_examples_or_not_at_all() -> None:
    class One:
        """A client with embeddings of its own."""

        def __init__(self, replica: int, z: Tensor, y: Tensor) -> None:
            self.replica, self.z, self.y = replica, z, y
            self.topology = local(mlp((1, 8, 8), 10, (16, 12)), ("relu1",)).with_task(splitfed.classification(10))

        def compute(self, value: str, part: str = "train") -> Tensor:
            return self.z

        def labels(self, head: str, part: str = "train") -> Tensor:
            return self.y

        def send(self, kind: str, tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
            assert kind == "prototype"
            return tensors

    many = One(0, torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([5, 5, 5]))
    few = One(1, torch.tensor([[10.0], [7.0]]), torch.tensor([5, 6]))
    for weighted, wanted in ((True, (3 * 2.0 + 10.0) / 4), (False, (2.0 + 10.0) / 2)):
        state = {"prototypes": {"9": torch.tensor([1.0])}}
        FedProto(weighted=weighted).aggregate([many, few], {0: 0.6, 1: 0.4}, 0, state)  # type: ignore[list-item]
        assert list(state["prototypes"]) == ["5", "6", "9"]
        assert [float(row) for row in state["prototypes"].values()] == [wanted, 7.0, 1.0]


def test_nearest_prototype() -> None:
    known = {"3": torch.tensor([0.0, 0.0]), "7": torch.tensor([4.0, 0.0])}
    assert nearest(torch.tensor([[1.0, 1.0], [3.0, -1.0]]), known).tolist() == [3, 7]


@pytest.mark.parametrize("shape", BUILDERS)
def test_weight_zero_is_training_alone_and_says_so(shape: str) -> None:
    off = FedProto(weight=0.0)
    assert traits(off).turned_off == "fedproto with weight=0 adds nothing to a client's loss"
    assert traits(FedProto()).turned_off is None
    plain, run = go(shape, method=None), go(shape, method=off)
    for replica in range(3):
        for name, module in plain.engine.modules(replica).items():
            assert_same(module.state_dict(), run.engine.modules(replica)[name].state_dict())
    changed = go(shape)
    assert not torch.equal(
        next(iter(plain.engine.modules(0).values())).state_dict().popitem()[1],
        next(iter(changed.engine.modules(0).values())).state_dict().popitem()[1],
    )


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    run = go(shape, rounds=3)
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 12), seed=None)
    ready = prepare(
        BUILDERS[shape](model),
        data(),
        schedule=ALONE,
        defenses=(),
        optimizer=None,
        training=Training(64),
        method=FedProto(),
    )
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(ready, 3).flows == counted
    assert run.engine.traffic.bytes(kind="prototype") > 0


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole = go("vanilla", rounds=3)
    go("vanilla", rounds=3, logging=splitfed.Logging(folder=tmp_path / "run", progress=None))
    cut = tmp_path / "cut"

    class Stop(Exception):
        pass

    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        go("vanilla", rounds=3, logging=splitfed.Logging(folder=cut, progress=stop))
    again = go("vanilla", rounds=3, logging=splitfed.Logging(folder=cut, resume=True))
    for name, state in whole.state().items():
        if name.startswith("party-"):
            assert_same(state["segments"], again.state()[name]["segments"])
    assert_same(whole.method_state["prototypes"], again.method_state["prototypes"])
    with pytest.raises(InvalidInput, match="its method is"):
        go("vanilla", rounds=3, logging=splitfed.Logging(folder=cut, resume=True), method=FedProto(weight=2.0))


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    assert_nothing_held_twice(go(shape))


def test_prototypes_find_the_class_and_three_accuracies_are_told() -> None:
    run = go("vanilla", rounds=8, method=FedProto(weight=0.1))
    test = run.history[-1]["test"]
    assert set(test["method"]) == {"nearest_prototype", "nearest_own_prototype"}
    assert all(len(scores) == 3 for scores in test["method"].values())
    assert min(test["method"]["nearest_prototype"]) > 0.4, "chance is .1"
    assert "method" not in go("vanilla", rounds=1, method=None).history[-1]["test"]


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [("local", ALONE), ("vanilla", ALONE), ("u_shaped", ALONE), ("vanilla", SplitFedV1()), ("vanilla", Sequential())],
)
def test_embeddings_come_from_the_pass_that_scores_the_head(
    shape: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are scored go through the model once, and the scores are those of a pass of their own."""
    run, asked = go(shape, schedule=schedule), []
    again = []
    for replica, one in enumerate(run.learners):
        with run.engine.borrow_segments(replica, run.schedule.newest(replica, run.trainer.schedule_state)):
            again.append(FedProto().scores(one, "test", run.method_state))
    compute = local_learner.compute_own_value
    monkeypatch.setattr(local_learner, "compute_own_value", lambda *given: asked.append(given[1:]) or compute(*given))
    found = run.evaluate("test")["method"]
    assert asked == []
    assert found == {name: [one[name] for one in again] for name in again[0]}


def test_clients_of_lowest_loss_train_further() -> None:
    """The variant `mr`: one client of three takes every batch twice, from the second round on."""
    method = FedProto(further=1)
    plain, run = go(rounds=3), go(rounds=3, method=method)
    assert run.history[0]["steps"] == plain.history[0]["steps"]
    for number in (1, 2):
        more = [entry["steps"] for entry in (run.history[number], plain.history[number])]
        assert more[0] - more[1] in [-(-len(client.train) // 64) for client in run.data.clients]
    losses = run.method_state["losses"]
    assert set(losses) == {"0", "1", "2"}
    told = [objective.passes for one in run.learners for objective in one.objectives.values()]  # type: ignore[attr-defined]
    assert sorted(told) == [1, 1, 2]
    assert run.engine.traffic.bytes(kind="loss") == 3 * 3 * 4
    assert run.engine.traffic.bytes(kind="passes") == 3 * 3 * 8


def test_who_trains_further_is_who_had_the_lowest_loss() -> None:
    class One:
        """A client that is told how often to train."""

        def __init__(self, replica: int) -> None:
            self.replica, self.objectives = replica, dict[str, Any]()

        def receive(self, kind: str, tensors: dict[str, Tensor], number: int) -> dict[str, Tensor]:
            told[self.replica] = int(tensors["passes"])
            return tensors

    told: dict[int, int] = {}
    state: dict[str, Any] = {"prototypes": {}, "losses": {"0": 0.5, "1": 0.2, "10": 0.1, "3": 0.2}}
    FedProto(further=2, passes=3).query([One(replica) for replica in (0, 1, 3, 7, 10)], 1, state)  # type: ignore[misc]
    assert told == {0: 1, 1: 3, 3: 1, 7: 1, 10: 3}


def test_a_plan_of_further_training_is_an_upper_bound() -> None:
    method = FedProto(further=1)
    assert traits(FedProto(further=1, passes=1)).at_most is None
    for shape in ("local", "vanilla"):
        with stream(0):
            topology = BUILDERS[shape](mlp((1, 8, 8), 10, (16, 12), seed=None))
        training = Training(64)
        ready = prepare(topology, data(), schedule=ALONE, defenses=(), optimizer=None, training=training, method=method)
        found, run = cost(ready, 3), go(shape, rounds=3, method=method)
        counted = {flow: numbers for flow, numbers in run.engine.traffic.flows.items() if flow.phase == "train"}
        assert found.at_most == traits(method).at_most
        assert found.flows.keys() == counted.keys()
        assert all(found.flows[flow] >= counted[flow] for flow in counted)
        # On whole models nothing crosses in a step, and the plan is exact.
        assert (found.flows == counted) == (shape == "local")


def test_clients_of_different_make_share_prototypes() -> None:
    """The variant `mh`, on whole models and on split ones."""
    with stream(0):
        one, other = mlp((1, 8, 8), 10, (16, 12), seed=None), mlp((1, 8, 8), 10, (20, 16), seed=None)
        thin = mlp((1, 8, 8), 10, (8,), seed=None)
    whole = [local(one, ("relu1",)), local(other, ("relu2",)), local(one, ("relu1",))]
    run = splitfed.train(whole, data(), schedule="independent", method="fedproto", rounds=3)
    assert {tuple(z.shape) for z in run.method_state["prototypes"].values()} == {(16,)}
    assert set(run.history[-1]["test"]["method"]) == {"nearest_prototype", "nearest_own_prototype"}
    mixed = [whole[0], local(thin, ("relu1",)), whole[0]]
    with pytest.raises(InvalidInput, match="fedproto: client 1 has embeddings of 8 numbers, client 0 of 16"):
        splitfed.train(mixed, data(), schedule="independent", method="fedproto", rounds=1)
    first = vanilla(one, "relu1")
    deep = splitfed.Segment("bottom", "client", other_bottom(), first.segments[0].inputs, first.segments[0].outputs)
    second = splitfed.Topology("vanilla", (deep, first.segments[1]), first.inputs, first.heads)
    split = splitfed.train([first, second, first], data(), schedule="splitfed_v3", method="fedproto", rounds=2)
    assert split.engine.traffic.bytes(kind="prototype") > 0


def other_bottom() -> torch.nn.Module:
    with stream(1):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU(), torch.nn.Linear(20, 16), torch.nn.ReLU()
        )


def test_further_training_is_resumed_exactly(tmp_path: Path) -> None:
    assert_resumes("local", FedProto(further=1), tmp_path)


def test_averaged_segments_and_prototypes_go_together() -> None:
    run = go("vanilla", schedule=SplitFedV1())
    assert {"weights", "prototype"} <= set(run.engine.traffic.by_kind())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"weight": -1.0}, "fedproto weight=-1"),
        ({"further": -1}, "fedproto further=-1"),
        ({"passes": 0}, "fedproto passes=0"),
        ({"distance": "cosine"}, "unknown fedproto distance 'cosine'"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedProto(**arguments)


def test_topologies_without_embedding_or_labels_beside_it_are_refused() -> None:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 12), seed=None)
        halves = {f"party{i}": mlp((1, 8, 4), 8, (8,), seed=None) for i in range(2)}
        top = torch.nn.Linear(16, 10)
    with pytest.raises(InvalidInput, match="topology 'local' has no embedding for fedproto"):
        splitfed.train(local(model), data(), method="fedproto")
    with pytest.raises(InvalidInput, match="unknown value 'middle'"):
        splitfed.train(vanilla(model, "relu1"), data(), method=FedProto(embedding="middle"))
    rows = splitfed.data.digits().strips(2).clients(1, auxiliary=0, victims=1)
    with pytest.raises(InvalidInput, match="'party1' holds none: nor does another that makes a value for embedding"):
        splitfed.train(vertical(halves, top, labels="top"), rows, schedule="joint", method="fedproto")
    with pytest.raises(InvalidInput, match="'party1' holds none: name another by embedding=, such as 'z_party0'"):
        splitfed.train(vertical(halves, top, labels="party0"), rows, schedule="joint", method="fedproto")
    with pytest.raises(InvalidInput, match="unknown method 'fedprot'; did you mean 'fedproto'"):
        splitfed.train(multi_hop(model, ("relu1", "relu2")), data(), method="fedprot")
