"""What is promised, planned, scored and attacked beside federated methods: where a figure could say too little."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.gradient_matching import newest_step
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp, Noise
from splitfed.engines.base import FED
from splitfed.federated import FedDistill, FedGen, FedKD, FedProto, Learner, PerFedAvg
from splitfed.federated.fedproto import nearest
from splitfed.federated.low_rank import add_update
from splitfed.planning.plan import cost
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import Prepared, prepare
from splitfed.schedules import Blind, Independent, SplitFedV1
from splitfed.schedules.base import Training
from splitfed.threats.recorded_training import recorded_view
from splitfed.topologies import local, vanilla
from splitfed.training.run import Run
from tests.federated.examples import EXAMPLE_PASSES, pictures, shared_probes, traits


def model() -> nn.Module:
    with stream(0):
        layers = {"flatten": nn.Flatten(), "fc1": nn.Linear(64, 8), "relu": nn.ReLU(), "fc2": nn.Linear(8, 10)}
    return nn.Sequential(OrderedDict(layers))


@cache
def whole() -> Topology:
    return local(model(), ("relu",))


@cache
def split() -> Topology:
    return vanilla(model(), "relu")


def arguments(topology: Topology | None = None, **changes: Any) -> dict[str, Any]:
    given = {"topology": topology or whole(), "data": pictures(), "schedule": "independent"}
    return {**given, "defenses": (), "optimizer": Optim("SGD", {"lr": 0.1}), **changes}


def go(method: Any, topology: Topology | None = None, rounds: int = 2, **changes: Any) -> Run:
    given = arguments(topology, **changes)
    with shared_probes():
        return splitfed.train(
            given.pop("topology"), given.pop("data"), method=method, rounds=rounds, **{"batch_size": 7, **given}
        )


def planned(method: Any, topology: Topology | None = None, **changes: Any) -> Prepared:
    return prepare(**arguments(topology, **changes), training=Training(7), method=method, example_passes=EXAMPLE_PASSES)


def at(kind: str) -> GaussianRelease:
    return GaussianRelease(clip=1.0, noise_multiplier=1.0, on=(f"{kind}->fed_server",))


def test_who_counts_labels_sends_more_than_steps_made() -> None:
    for method, advice in ((FedGen(steps=1), "take a method that averages"), (FedProto(), "give the method private=")):
        name = type(method).__name__
        with pytest.raises(
            InvalidInput, match=f"dp_sgd cannot be accounted for with method {name}, whose .*: {advice}"
        ):
            go(method, defenses=DpSgd(noise_multiplier=1.0))
    assert go(FedGen(steps=1), rounds=1).ledger.open["label counts that FedGen sends"] == "labels"
    assert traits(FedGen(weight=0.0)).post_processing


def test_what_leaves_is_named_for_one_client_and_not_where_nothing_does() -> None:
    one: Federation = pictures(1)
    assert go("fedavg", data=one, rounds=1).ledger.open == {"weights of client": "features and labels"}
    assert go("standalone", rounds=1).ledger.open == {}


def test_nothing_is_promised_for_messages_whose_shape_tells() -> None:
    with pytest.raises(InvalidInput, match="cannot promise anything for 'update->fed_server': how many numbers"):
        go(FedKD(), defenses=at("update"))
    run = go(FedKD(rank=1), defenses=at("update"))
    assert run.ledger.as_dict() == planned_ledger(planned(FedKD(rank=1), defenses=at("update")), 2).as_dict()
    assert go(FedKD(), rounds=1, defenses=Noise(scale=0.1, on=("update->fed_server",))).ledger.totals == ()


@pytest.mark.parametrize("kind", ["label counts"])
def test_a_defense_that_would_do_nothing_is_refused(kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"has nothing to act on at '{kind}->fed_server': whole and single numbers"):
        go(FedGen(steps=1), defenses=at(kind))


def test_classes_that_changed_labels_name_are_planned() -> None:
    """Randomised labels bring classes to a client that it does not hold: so many more prototypes are sent."""
    given: dict[str, Any] = {"schedule": "splitfed_v3", "defenses": LabelDp(epsilon=1.0)}
    run = go(FedProto(), split(), **given)
    counted = {flow: found for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"}
    assert cost(planned(FedProto(), split(), **given), 2).flows == counted
    assert run.engine.traffic.bytes() > go(FedProto(), split(), schedule="splitfed_v3").engine.traffic.bytes()


@pytest.mark.parametrize("method", [FedProto(), FedDistill()])
def test_who_reads_labels_refuses_noisy_numbers_in_their_place(method: Any) -> None:
    noisy = LabelDp(epsilon=1.0, mode="gradient")
    with pytest.raises(InvalidInput, match="reads the labels of every step, which LabelDp replaces by noisy"):
        go(method, defenses=noisy)
    assert go(method, rounds=1, defenses=LabelDp(epsilon=1.0)).history[0]["epsilon"] <= 1.0


def test_steps_that_only_look_are_no_uses_of_labels() -> None:
    """Two rounds of two steps a row: what personal weights are found with is not told to anybody."""
    noisy: Defense = LabelDp(epsilon=1.0, mode="gradient")
    run = go(PerFedAvg(), defenses=noisy)
    assert run.ledger.lines == planned_ledger(planned(PerFedAvg(), defenses=noisy), 2).lines
    assert run.ledger.lines[0].uses <= 4


def test_without_further_training_fedproto_leads_nobody() -> None:
    assert len(go(FedProto(), split(), schedule=Blind()).history) == 2
    assert len(go(FedProto(), local=splitfed.LocalUpdate(sampling="poisson")).history) == 2
    with pytest.raises(InvalidInput, match="method FedProto controls each client's training, and schedule Blind"):
        go(FedProto(further=1), split(), schedule=Blind())


def test_the_loss_that_a_client_sends_is_that_of_its_whole_round() -> None:
    run = go(FedProto(further=1), rounds=1, local=splitfed.LocalUpdate(local_epochs=2))
    sent = run.method_state["losses"]
    sizes = [-(-run.engine.rows(replica, "train") // 7) * 2 for replica in range(3)]
    mean = sum(sent[str(replica)] * size for replica, size in enumerate(sizes)) / sum(sizes)
    assert mean == pytest.approx(run.history[0]["loss"], rel=1e-5)


def test_methods_score_the_segments_that_the_run_would_use() -> None:
    """Between split nodes whose client segments are averaged it is the average that prototypes are compared with."""
    run = go(FedProto(), split(), schedule=SplitFedV1())
    rows, known = pictures().clients[0].test, run.method_state["prototypes"]
    averaged, own = run.engine.modules(0, FED)["bottom"], run.engine.modules(0)["bottom"]
    assert not torch.equal(averaged.state_dict()["fc1.weight"], own.state_dict()["fc1.weight"])
    with torch.no_grad():
        right = nearest(averaged.eval()(rows.x), known) == rows.y
    told = run.history[-1]["test"]["method"]["nearest_prototype"][0]
    assert told == pytest.approx(float(right.double().mean()))


def test_the_fed_server_knows_the_steps_that_the_schedule_counts() -> None:
    """One step a round of a client with several batches is a gradient; two steps with one batch are not."""
    given: dict[str, Any] = {"logging": splitfed.Logging(record=Recording((FED,))), "rounds": 2}
    attack = Dlg(iterations=1, restarts=1)
    found = go("fedavg", local(model()), schedule=Independent(steps=1), **given).attack(attack, adversary=FED)[0]
    assert len(found.truth) == 7
    with pytest.raises(InvalidInput, match="the client takes 2 steps a round"):
        go("fedavg", local(model()), schedule=Independent(steps=2), batch_size=1000, **given).attack(
            attack, adversary=FED
        )
    with pytest.raises(InvalidInput, match="clients of PerFedAvg take steps of the method's own"):
        go("per_fedavg", local(model()), batch_size=1000, **given).attack(attack, adversary=FED)


def test_what_a_method_adds_to_a_gradient_is_not_taken_for_the_gradient() -> None:
    """SCAFFOLD's step is corrected; FedProx pulls towards the weights that the first step begins from."""
    given: dict[str, Any] = {
        "logging": splitfed.Logging(record=Recording((FED,))),
        "rounds": 2,
        "schedule": Independent(steps=1),
    }
    attack = Dlg(iterations=1, restarts=1)
    assert len(go("fedprox", local(model()), **given).attack(attack, adversary=FED)[0].truth) == 7
    for name in ("scaffold", "fedgen"):
        with pytest.raises(InvalidInput, match="may add to a client's gradient is in its update too"):
            go(name, whole(), **given).attack(attack, adversary=FED)
    for name in ("ifca", "feddistill", "fedproto", "standalone"):
        with pytest.raises(InvalidInput, match="send no weights to be held against"):
            go(name, whole(), **given).attack(attack, adversary=FED)


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_a_model_that_never_leaves_its_client_does_not_show(name: str) -> None:
    """The averaged model is trained by itself; its gradient alone is matched, and no labels of the other's."""
    run = go(name, local(model()), logging=splitfed.Logging(record=Recording((FED,))), batch_size=1000)
    known = run.evaluator.grants.local(FED, 0)
    assert known is not None
    assert [head.value for head in known.heads] == ["shared_out"]
    assert {segment.name for segment in known.segments} == {"shared_model"}
    attack = InvertingGradients(iterations=1, restarts=1)
    assert len(run.attack(attack, adversary=FED)[0].truth) == len(run.data.clients[0].train)


@pytest.mark.parametrize(
    ("method", "optimizer", "batch"),
    [
        pytest.param(
            *("fedsgd", Optim("Adam", {"lr": 0.01}), 4),
            marks=pytest.mark.filterwarnings("ignore:fedsgd's clients take no step"),
        ),
        ("fednova", Optim("SGD", {"lr": 0.1, "momentum": 0.9}), 1000),
        ("fedavg", Optim("SGD", {"lr": 0.1, "momentum": 0.9}), 1000),
    ],
)
def test_the_gradient_that_a_fed_server_works_out_is_the_clients(method: str, optimizer: Optim, batch: int) -> None:
    """FedSGD sends that of all rows, whatever the optimizer; FedNova's momentum begins anew, FedAvg's goes on."""
    run = go(
        method,
        local(model()),
        3,
        optimizer=optimizer,
        batch_size=batch,
        logging=splitfed.Logging(record=Recording((FED,))),
    )
    rows = run.data.clients[0].train
    assert len(run.attack(Dlg(iterations=1, restarts=1), adversary=FED)[0].truth) == len(rows) > 4
    known = run.evaluator.grants.local(FED, 0)
    assert known is not None
    step = newest_step(recorded_view(run.engine, FED, 0), known)
    assert step.rows == len(rows)
    first, again = local(model()).segments, copy.deepcopy(local(model()).segments)
    modules = {one.name: two.module for one, two in zip(first, again, strict=True)}
    out = rows.x
    for name, module in modules.items():
        module.load_state_dict({n: step.before[f"{name}/{n}"] for n in module.state_dict()})
        out = module(out)
    functional.cross_entropy(out, rows.y).backward()
    for name, module in modules.items():
        for weight, tensor in module.named_parameters():
            assert torch.allclose(step.gradient[f"{name}/{weight}"].float(), tensor.grad, atol=1e-5)


def test_rows_that_a_gradient_counts_twice_are_searched_once() -> None:
    """Several epochs of FedSGD are at the same weights; steps that end within an epoch count some rows more."""
    given: dict[str, Any] = {"logging": splitfed.Logging(record=Recording((FED,))), "batch_size": 4}
    attack = Dlg(iterations=1, restarts=1)
    run = go("fedsgd", local(model()), local=splitfed.LocalUpdate(local_epochs=2), **given)
    found = run.attack(attack, adversary=FED)[0]
    assert len(found.prediction) == len(found.truth) == len(run.data.clients[0].train)
    rows = len(run.data.clients[0].train)
    with pytest.raises(InvalidInput, match="count more often than others"):
        go("fedsgd", local(model()), schedule=Independent(steps=rows // 4 + 2), **given).attack(attack, adversary=FED)


def test_the_mean_gradient_of_several_normed_batches_is_that_of_none() -> None:
    """Batch norm scores each batch by itself."""
    bottom = OrderedDict(flat=nn.Flatten(), fc=nn.Linear(64, 10), norm=nn.BatchNorm1d(10))
    run = go(
        "fedsgd",
        local(nn.Sequential(bottom)),
        batch_size=4,
        logging=splitfed.Logging(record=Recording((FED,))),
        rounds=1,
    )
    with pytest.raises(InvalidInput, match="has batch norm, and the client sends the mean gradient"):
        run.attack(Dlg(iterations=1, restarts=1), adversary=FED)


def test_steps_besides_the_schedule_count_as_the_epoch_the_client_has_come_to() -> None:
    """A method numbers its own steps by rounds, of which there are fewer than epochs."""

    class Besides(FedProto):
        def query(self, learners: Any, number: int, state: Any) -> None:
            learner: Learner
            for learner in learners:
                x, y = learner.inputs(), learner.labels("out")
                learner.hold("besides", x, {"out": y})
                learner.train(number, [torch.arange(4)], part="besides")

    run = go(Besides(), rounds=3, local=splitfed.LocalUpdate(local_epochs=2))
    assert [taken.newest for taken in run.engine.run_parties.participation] == [5, 5, 5]
    assert run.engine.run_parties.participation[0].most == 6


def test_what_all_start_from_goes_to_where_the_update_is() -> None:
    base, update = {"a": torch.ones(2)}, {"a": torch.ones(2)}
    assert add_update(base, update)["a"].tolist() == [2.0, 2.0]
    assert add_update(base, {"a": torch.ones(2, device="meta")})["a"] is base["a"]
