"""What all methods that exchange weights have in common: bytes, resume, isolation, who takes part, who is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.gradients.dlg import Dlg
from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.defenses import DpSgd
from splitfed.engines.base import FED
from splitfed.federated import (
    Apfl,
    Ditto,
    FedAvg,
    FedNova,
    FedPer,
    FedProx,
    FedSgd,
    Ifca,
    Learner,
    LgFedAvg,
    Method,
    PerFedAvg,
    PFedMe,
    Scaffold,
    Standalone,
)
from splitfed.federated.averaging import Averaging
from splitfed.poisoning import SignFlip
from splitfed.registry import TABLES, load
from splitfed.schedules import Blind, Independent, Sequential, SplitFedV1, SplitFedV3
from splitfed.topologies import local, u_shaped, vanilla
from splitfed.training.settings import Adversaries, Logging
from tests.examples import assert_same
from tests.federated.examples import (
    check_planned,
    check_resumed,
    common,
    go,
    hand,
    model,
    own,
    pictures,
    traits,
    weights,
)
from tests.federated.methods import assert_nothing_held_twice
from tests.rounding import single
from tests.thinning import thin

METHODS = ("fedavg", "fedsgd", "fedprox", "scaffold", "fednova", "ditto", "apfl", "pfedme", "per_fedavg", "ifca")
METHODS += ("fedper", "lg_fedavg")
WHOLE = ("per_fedavg",)
SOME = Independent(clients_per_round=2, drop_out=0.4)
# The tests' rate of .1 times pFedMe's own weight of 15 would overshoot.
MADE: dict[str, Callable[[], Method]] = {"pfedme": lambda: PFedMe(weight=1.0)}


def made(name: str) -> Method:
    """The method called `name`, with parameters that suit the tests' learning rate."""
    return MADE.get(name, load("methods", name))()  # type: ignore[no-any-return]


SPLIT: dict[str, Callable[[], Topology]] = {
    "vanilla": lambda: vanilla(model(), "relu"),
    "u_shaped": lambda: u_shaped(model(), ("norm", "relu")),
}


def flat() -> Topology:
    """One linear layer."""
    return local(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_every_method_that_inherits_averaging_is_here() -> None:
    # fedgen trains a generator beside the averages and has a file of its own.
    found = {name for name in TABLES["methods"] if issubclass(load("methods", name), Averaging)} - {"fedgen"}
    assert sorted(found) == sorted(METHODS), "METHODS of this file names every method that inherits Averaging"


@pytest.mark.parametrize("name", thin(METHODS, 2))
def test_sampled_clients_leave_bytes_are_planned_and_a_resumed_run_is_the_same(name: str, tmp_path: Path) -> None:
    method = made(name)
    run = go(method, 3, schedule=SOME, local=LocalUpdate(local_epochs=2))
    assert any(entry["dropped"] for entry in run.history)
    assert run.bytes > 0
    check_planned(run, method, schedule=SOME, local=LocalUpdate(local_epochs=2))
    check_resumed(run, method, tmp_path / "run", schedule=SOME, local=LocalUpdate(local_epochs=2))


@pytest.mark.parametrize("name", METHODS)
def test_no_party_reaches_what_another_holds(name: str) -> None:
    run = go(made(name), 1)
    assert FED in run.engine.parties
    assert_nothing_held_twice(run)


def test_a_round_of_fedavg_by_hand() -> None:
    run = hand("fedavg")
    # A step takes w to w - .1 * 2 (w - label): three of them towards 1, one towards -3.
    assert [own(run, 0), own(run, 1)] == single([1 + 0.8**3, -3 + 0.8 * 5])
    assert common(run) == single(0.75 * 1.512 + 0.25 * 1.0)
    # Everybody predicts with the mean: the error of client 1's row is 4.384.
    assert float(run.predict(torch.ones(1, 1), client=1)) == single(1.384)
    assert common(hand(FedAvg(weighted=False))) == single((1.512 + 1.0) / 2)


def test_fedavg_is_splitfed_v1_on_whole_models_to_the_bit() -> None:
    momentum = Optim("SGD", {"lr": 0.1, "momentum": 0.9})
    for buffers in (True, False):
        one = go(FedAvg(buffers=buffers), 3, optimizer=momentum)
        other = go(None, 3, schedule=SplitFedV1(buffers=buffers), optimizer=momentum)
        for replica in range(3):
            assert_same(weights(one, replica), weights(other, replica))
        averaged = {
            f"{n}/{k}": t for n, m in other.engine.parties[FED].state.modules.items() for k, t in m.state_dict().items()
        }
        sent = one.method_state["weights"]
        assert ("body/norm.running_mean" in sent) == buffers
        assert_same(sent, {name: averaged[name] for name in sent})
        assert [e["test"]["clients"] for e in one.history] == [e["test"]["clients"] for e in other.history]
        assert one.bytes == other.bytes
        assert one.engine.traffic.messages() == other.engine.traffic.messages()
    x = pictures().victims.x
    assert torch.equal(one.predict(x, client=1), other.predict(x, client=1))


def test_kept_statistics_stay_each_clients_own() -> None:
    run = go(FedAvg(buffers=False), 2)
    means = [weights(run, replica)["body/norm.running_mean"] for replica in range(3)]
    assert not torch.equal(means[0], means[1])
    served = run.engine.modules(0, run.newest(0))["body"].state_dict()
    assert torch.equal(served["norm.running_mean"], means[0])
    assert torch.equal(served["fc1.weight"], run.method_state["weights"]["body/fc1.weight"])


def test_equal_parts_when_not_weighted_and_optimizers_start_anew_when_asked() -> None:
    momentum = Optim("SGD", {"lr": 0.1, "momentum": 0.9})
    run = go(FedAvg(weighted=False), 1)
    mean = torch.stack([weights(run, replica)["head/fc2.bias"] for replica in range(3)]).mean(0)
    assert torch.allclose(run.method_state["weights"]["head/fc2.bias"], mean, atol=1e-7)
    kept, anew = (go(FedAvg(restart=restart), 2, optimizer=momentum) for restart in (False, True))
    assert not torch.equal(weights(kept, 0)["head/fc2.bias"], weights(anew, 0)["head/fc2.bias"])
    plain = [go(FedAvg(restart=restart), 2) for restart in (False, True)]
    assert_same(weights(plain[0], 0), weights(plain[1], 0))


ONE = {
    "fedavg": FedAvg(),
    "scaffold": Scaffold(),
    "fednova": FedNova(),
    "fedper": FedPer(),
    "lg_fedavg": LgFedAvg(),
    "ditto": Ditto(weight=0.0),
    "ifca": Ifca(clusters=1),
}


@pytest.mark.parametrize("name", ONE)
def test_one_client_learns_as_if_alone(name: str) -> None:
    alone, run = go("standalone", 2, data=pictures(1)), go(ONE[name], 2, data=pictures(1))
    served = run.engine.modules(0, run.newest(0))
    for key, tensor in weights(alone, 0).items():
        segment, _, rest = key.partition("/")
        found = served[segment].state_dict()[rest]
        exact = name not in ("scaffold", "fednova")
        assert torch.equal(tensor, found) if exact else torch.allclose(tensor, found, atol=1e-5), key


def test_standalone_is_the_schedule_without_a_method() -> None:
    one, other = go("standalone"), go(None)
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert one.bytes == 0
    assert traits(Standalone()).turned_off == "standalone adds nothing: every client trains alone"


@pytest.mark.parametrize("shape", SPLIT)
@pytest.mark.parametrize("name", thin([name for name in METHODS if name not in WHOLE], 2))
def test_client_segments_of_a_split_lane_are_averaged(name: str, shape: str, tmp_path: Path) -> None:
    schedule, method = SplitFedV3(by_examples=True), made(name)
    changes: dict[str, Any] = {"topology": SPLIT[shape](), "schedule": schedule}
    if shape == "vanilla" and name in ("fedper", "lg_fedavg"):
        with pytest.raises(InvalidInput, match="needs a cut between base and head within the client's segments"):
            go(method, **changes)
        return
    run = go(method, 3, **changes)
    assert {"weights", "activation", "gradient"} <= set(run.engine.traffic.by_kind())
    check_planned(run, method, **changes)
    check_resumed(run, method, tmp_path / "run", **changes)
    if name == "fedavg":
        other = go(None, 3, topology=SPLIT[shape](), schedule="splitfed_v1")
        assert [e["test"]["union"] for e in run.history] == [e["test"]["union"] for e in other.history]
        for replica in range(3):
            assert_same(weights(run, replica), weights(other, replica))


@pytest.mark.parametrize("name", METHODS)
def test_schedules_and_topologies_that_do_not_fit_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="SplitFedV1 averages weights, and so does method"):
        go(name, schedule="splitfed_v1")
    with pytest.raises(InvalidInput, match=f"{name} averages weights itself, and the schedule hands client segments"):
        go(name, schedule=Sequential())
    if name in WHOLE:
        with pytest.raises(InvalidInput, match=f"{name} .* between the parties of topology 'vanilla' once more"):
            go(name, topology=SPLIT["vanilla"](), schedule="splitfed_v3")
    different = [local(model(replica, 8 + replica), ("relu",)) for replica in range(3)]
    if name != "lg_fedavg":
        what = "base" if name == "fedper" else "model"
        with pytest.raises(InvalidInput, match=f"{name} averages every client's {what}; that of client 1"):
            go(name, topology=different)


def test_standalone_refuses_company() -> None:
    with pytest.raises(InvalidInput, match="standalone trains whole models"):
        go("standalone", topology=SPLIT["vanilla"](), schedule="splitfed_v3")
    with pytest.raises(InvalidInput, match="standalone clients train alone, and the schedule averages"):
        go("standalone", schedule="splitfed_v1")


@dataclass(frozen=True, kw_only=True)
class Leads(Method):
    """Trains clients in a way of its own."""

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        return learner.train(epoch, batches, first)


@pytest.mark.parametrize("method", ["pfedme", "per_fedavg", Leads()])
def test_who_leads_training_may_not_meet_rows_drawn_by_chance(method: str | Method) -> None:
    with pytest.raises(InvalidInput, match="sampling='poisson' draws every step's rows, and method"):
        go(method, local=LocalUpdate(sampling="poisson"), topology=flat())


def test_who_weighs_steps_by_their_rows_may_not_meet_rows_drawn_by_chance() -> None:
    # Under dp_sgd the size of a drawn batch would tell of a row, with no noise on it.
    with pytest.raises(InvalidInput, match="sampling='poisson' makes the rows of a step random in number, and method"):
        go("fedsgd", local=LocalUpdate(sampling="poisson"), topology=flat())


def test_who_leads_training_needs_steps_of_one_client() -> None:
    with pytest.raises(
        InvalidInput, match="method Leads controls each client's training, and schedule Blind takes steps"
    ):
        go(Leads(), schedule=Blind(), topology=SPLIT["vanilla"]())


def test_the_fed_server_reads_what_clients_send() -> None:
    """A gradient inverted from FedAvg's messages is that from SplitFed's, also where the head is kept back."""
    given: dict[str, Any] = {"batch_size": 1000, "logging": Logging(record=Recording((FED,)))}
    whole = {**given, "topology": flat()}
    predictions = [
        run.attack(Dlg(iterations=2, restarts=1), adversary=FED)[0].prediction
        for run in (go("fedavg", 1, **whole), go(None, 1, **{**whole, "schedule": "splitfed_v1"}))
    ]
    assert torch.equal(*predictions)
    assert go("ditto", 1, **whole).attack(Dlg(iterations=2, restarts=1), adversary=FED)
    assert go("fedper", 1, **given).attack(Dlg(iterations=2, restarts=1), adversary=FED)


def test_uploads_can_be_bent_as_under_a_schedule() -> None:
    flip = SignFlip(clients=(1,))
    bent, wanted = (
        go("fedavg", 2, adversaries=Adversaries(poisoning=flip)),
        go(None, 2, adversaries=Adversaries(poisoning=flip), schedule="splitfed_v1"),
    )
    assert_same(weights(bent, 0), weights(wanted, 0))
    assert not torch.equal(weights(bent, 0)["head/fc2.bias"], weights(go("fedavg", 2), 0)["head/fc2.bias"])
    for name, what in (("fml", "meme"), ("fedakt", "adapter")):
        shared = [go(name, 2, adversaries=Adversaries(poisoning=given)).method_state[what] for given in (flip, ())]
        assert any(not torch.equal(one, other) for one, other in zip(*(s.values() for s in shared), strict=True))
    for name in ("ifca", "fedsgd", "standalone"):
        with pytest.raises(InvalidInput, match="SignFlip changes a client's upload; no client uploads weights"):
            go(name, adversaries=Adversaries(poisoning=flip))


PRIVATE = DpSgd(max_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fednova", "fedsgd", "ditto"])
def test_a_promise_for_the_steps_holds_for_what_is_sent(name: str) -> None:
    run = go(name, 1, topology=flat(), defenses=PRIVATE)
    assert run.ledger.totals == go(None, 1, topology=flat(), defenses=PRIVATE, schedule="splitfed_v1").ledger.totals
    assert run.ledger.open == {}
    assert list(go(name, 1, topology=flat()).ledger.open) == ["weights of client"]


@pytest.mark.parametrize("name", ["apfl", "pfedme", "per_fedavg", "ifca"])
def test_who_reads_rows_in_other_ways_has_no_promise(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"dp_sgd cannot (be accounted for with method|train layer 'own\.1')"):
        go(made(name), 1, topology=flat(), defenses=PRIVATE)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FedProx(mu=-1.0), "fedprox mu=-1"),
        (lambda: Scaffold(server_rate=0.0), "scaffold server_rate=0"),
        (lambda: Scaffold(variates="both"), "unknown scaffold variates 'both'"),
        (lambda: FedSgd(rate=0.0), "fedsgd rate=0"),
        (lambda: Ditto(weight=-1.0), "ditto weight=-1"),
        (lambda: Apfl(alpha=2.0), "apfl alpha=2"),
        (lambda: Apfl(learns="often"), "unknown apfl learns 'often'"),
        (lambda: Apfl(rate=-1.0), "apfl rate=-1"),
        (lambda: PFedMe(weight=0.0), "pfedme weight=0"),
        (lambda: PFedMe(steps=0), "pfedme steps=0"),
        (lambda: PFedMe(beta=-1.0), "pfedme beta=-1"),
        (lambda: PFedMe(rate=0.0), "pfedme rate=0"),
        (lambda: PerFedAvg(rate=-1.0), "per_fedavg rate=-1"),
        (lambda: Ifca(clusters=0), "ifca clusters=0"),
        (lambda: go(FedPer(head="neck")), "unknown fedper head 'neck'"),
        (lambda: go(LgFedAvg(head="body")), "unknown lg_fedavg head 'body'"),
        (lambda: go("fednova", optimizer="Adam"), "fednova needs SGD; optimizer Adam"),
        (lambda: go("scaffold", optimizer="Adam"), "take variates='gradient'"),
    ],
)
def test_bad_parameters_are_one_line(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_method_that_its_parameters_turn_off_says_so() -> None:
    off = {
        FedProx(mu=0.0): "fedprox with mu=0 is fedavg",
        Ditto(weight=0.0): "ditto with weight=0 trains every client's own model alone",
        Apfl(alpha=1.0, learns="never"): "apfl with alpha=1 that never learns trains every client's own model alone",
        PFedMe(beta=0.0, weight=1.0): "pfedme with beta=0 never moves what is shared",
        PerFedAvg(rate=0.0): "per_fedavg with rate=0 is fedavg on every second batch",
        Ifca(clusters=1): "ifca with clusters=1 is fedavg",
    }
    assert {method: traits(method).turned_off for method in off} == off
    assert all(traits(made(name)).turned_off is None for name in METHODS)
