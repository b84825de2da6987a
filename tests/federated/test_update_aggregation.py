"""Every averaging method with every setting of its aggregation: it works as planned, or is refused by name."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.aggregation import FedAdagrad, FedAdam, FedAvgM, FedYogi, Krum, ServerStep, UpdateAggregation
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.defenses import Quantization, TopK
from splitfed.engines.base import FED
from splitfed.federated import (
    FML,
    Apfl,
    Ditto,
    FedAKT,
    FedAvg,
    FedNova,
    FedPer,
    FedProx,
    FedSgd,
    Ifca,
    LgFedAvg,
    Method,
    PerFedAvg,
    PFedMe,
    Scaffold,
)
from splitfed.poisoning import ByzantineNoise, Scaling
from splitfed.registry import TABLES, load
from splitfed.schedules import Independent
from splitfed.study.config.build import method as build_method
from splitfed.topologies import local, vanilla
from tests.federated.examples import (
    check_planned,
    check_resumed,
    common,
    constants,
    go,
    hand,
    model,
    own,
    pictures,
    weights,
)
from tests.rounding import single
from tests.study.examples import checked, small

METHODS: dict[str, Callable[..., Method]] = {
    "fedavg": FedAvg,
    "fedsgd": FedSgd,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "fedper": FedPer,
    "lg_fedavg": LgFedAvg,
    "ditto": Ditto,
    "apfl": Apfl,
    "pfedme": lambda **options: PFedMe(weight=1.0, **options),
    "per_fedavg": PerFedAvg,
    "ifca": Ifca,
    "fml": FML,
    "fedakt": FedAKT,
}
RULES: dict[str, Any] = {
    "median": "median",
    "trimmed_mean": {"name": "trimmed_mean", "fraction": 0.2},
    "krum": Krum(f=1),
    "geometric_median": {"rule": "geometric_median"},
}
STEPS: dict[str, Any] = {name: {"server_step": name} for name in ("fedadagrad", "fedadam", "fedyogi")}
STEPS["fedavgm"] = {"server_step": {"name": "fedavgm", "rate": 0.5}}
SETTINGS: dict[str, Any] = {**RULES, "secure": {"secure": True}, "quorum": {"quorum": 4}, **STEPS}
REFUSED: dict[str, dict[str, str]] = {
    "scaffold": dict.fromkeys(RULES, "its server's variate must stay the mean of the clients' variates"),
    "fednova": {
        **dict.fromkeys(RULES, "its server step tau_eff is defined for the mean of the normalised changes only"),
        "secure": "divides each client's change by its own a_i, and a secure sum hides the single changes",
    },
    "ifca": {
        **dict.fromkeys(RULES, "the number of clients in a cluster depends on their losses"),
        "secure": "the sum of a cluster with one client is that client's upload",
    },
}
HELD: dict[type, str] = {FML: "meme", FedAKT: "adapter"}
TABLE = [(name, setting) for name in METHODS for setting in SETTINGS]
WORKING = [(name, setting) for name, setting in TABLE if setting not in REFUSED.get(name, {})]
FIVE: dict[str, Any] = {"data": pictures(5), "batch_size": 12}


def uploaded(run: Any) -> dict[str, Tensor]:
    """What the aggregation server holds, the counts of batches left out."""
    state = run.method_state
    held = state["clusters"][0] if "clusters" in state else state[HELD.get(type(run.method), "weights")]
    return {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}


def distance(one: Any, other: Any) -> float:
    """The greatest difference of two runs' averages."""
    first, second = uploaded(one), uploaded(other)
    return max(float((first[n].double() - second[n].double()).abs().max()) for n in first)


PLAIN: dict[str, Any] = {}


def plain(name: str) -> Any:
    """One round of a method with its plain mean, run once."""
    if name not in PLAIN:
        PLAIN[name] = go(METHODS[name](), 1, **FIVE)
    return PLAIN[name]


def test_every_method_with_an_aggregation_is_here_and_on_the_page() -> None:
    # fedgen trains a generator beside the averages and has a file of its own.
    found = {n for n in TABLES["methods"] if "aggregation" in signature(load("methods", n)).parameters} - {"fedgen"}
    assert sorted(found) == sorted(METHODS), "METHODS of this file names every method with the parameter aggregation"
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text("utf-8")
    said = re.search(r"Every method that averages weights \(([^)]*)\) has the parameter `aggregation`", page)
    assert said is not None
    told = "docs/methods.md, How uploads are aggregated, names every method with the parameter aggregation"
    assert sorted(re.findall(r"`(\w+)`", said[1])) == sorted(METHODS), told


@pytest.mark.parametrize(("name", "setting"), [one for one in TABLE if one not in WORKING])
def test_what_breaks_a_methods_formula_is_refused_by_name(name: str, setting: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{name} aggregation \w+=.* is not allowed: .*{REFUSED[name][setting]}"):
        METHODS[name](aggregation=SETTINGS[setting])


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        # Every method and every setting is here many times; `make test` tries a fifth of the pairs.
        pytest.param(*one, marks=() if i % 5 == 0 else pytest.mark.exhaustive)
        for i, one in enumerate(WORKING)
    ],
)
def test_every_method_with_every_setting_is_planned_and_used(name: str, setting: str) -> None:
    method = METHODS[name](aggregation=SETTINGS[setting])
    run = go(method, 1, **FIVE)
    check_planned(run, method, **FIVE)
    moved = distance(run, plain(name))
    if setting == "quorum":
        assert moved == 0
    elif setting == "secure":
        # Half a unit of 2^-24, and the rounding of a single.
        assert 0 < moved < 1e-6
        kinds = {flow.kind for flow in run.engine.traffic.flows if flow.receiver == FED}
        assert kinds == {"shares", "masked", "unmasking"}
    else:
        assert moved > 1e-6
    if setting in RULES or setting == "quorum":
        assert run.engine.traffic.bytes() == plain(name).engine.traffic.bytes()


@pytest.mark.parametrize("name", METHODS)
def test_a_plain_mean_is_the_same_to_the_bit_however_it_is_written(name: str) -> None:
    for written in ("mean", {"name": "mean"}, {"quorum": 1}, UpdateAggregation()):
        assert METHODS[name](aggregation=written) == METHODS[name]()


TOGETHER: dict[str, Any] = {
    "robust": {"rule": "median", "quorum": 3, "server_step": "fedadam"},
    "private": {"secure": {"bits": 20}, "quorum": 3, "server_step": {"name": "fedavgm", "rate": 0.5}},
    "stepped": {"quorum": 3, "server_step": "fedyogi"},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("fedavg", "scaffold", "fml") else pytest.mark.exhaustive) for n in METHODS],
)
def test_settings_go_together_and_a_resumed_run_is_the_same(name: str, tmp_path: Path) -> None:
    """Some clients drop out, and in some round too few are left."""
    allowed = ("stepped",) if name in ("fednova", "ifca") else ("private",) if name == "scaffold" else tuple(TOGETHER)
    schedule = Independent(clients_per_round=4, drop_out=0.3)
    for number, setting in enumerate(allowed[:2]):
        method = METHODS[name](aggregation=TOGETHER[setting])
        run = go(method, 4, schedule=schedule, **FIVE)
        check_planned(run, method, schedule=schedule, **FIVE)
        check_resumed(run, method, tmp_path / str(number), schedule=schedule, **FIVE)


def test_where_the_quorum_is_missed_nothing_is_sent_and_the_average_stays() -> None:
    schedule = Independent(drop_out=0.3)
    run = go(FedAvg(aggregation={"quorum": 4}), 6, schedule=schedule, **FIVE)
    averaged = [entry["averaged"] for entry in run.history]
    assert averaged == [5 - len(entry["dropped"]) >= 4 for entry in run.history]
    assert True in averaged
    assert False in averaged
    sent = sum(count for flow, (count, _) in run.engine.traffic.flows.items() if flow.receiver == FED)
    assert sent == sum(5 - len(entry["dropped"]) for entry in run.history if entry["averaged"])


ROBUST = [name for name in METHODS if name not in (*REFUSED, "fedsgd")]


def bent() -> Any:
    """A model without batch norm, of which garbage would make negative variances."""
    with stream(0):
        layers = OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(64, 32), relu=nn.ReLU(), fc2=nn.Linear(32, 10))
        return local(nn.Sequential(layers), ("relu",))


@pytest.mark.parametrize(
    ("name", "setting"), [(n, "median") for n in ROBUST] + [("fedavg", s) for s in RULES if s != "median"]
)
def test_garbage_of_one_client_moves_the_mean_and_no_robust_rule(name: str, setting: str) -> None:
    changes: dict[str, Any] = {**FIVE, "topology": bent()}
    honest, noise = go(METHODS[name](), 1, **changes), ByzantineNoise(clients=(1,), scale=100.0)
    robust = METHODS[name](aggregation=RULES[setting])
    assert distance(go(METHODS[name](), 1, **changes, adversaries=splitfed.Adversaries(poisoning=noise)), honest) > 10
    assert distance(go(robust, 1, **changes, adversaries=splitfed.Adversaries(poisoning=noise)), honest) < 1


def right(method: Method, *poisoning: Any) -> float:
    """Accuracy after five rounds of five clients on digits."""
    data = splitfed.data.digits().clients(5, auxiliary=10, victims=10, validation=0.0)
    changes: dict[str, Any] = {"data": data, "topology": bent(), "batch_size": 16}
    changes["adversaries"] = splitfed.Adversaries(poisoning=poisoning)
    return float(go(method, 5, optimizer=Optim("Adam", {"lr": 0.01}), **changes).utility)


@cache
def fallen() -> tuple[float, float]:
    """The accuracy of the mean with garbage from one client, and without."""
    return right(FedAvg(), GARBAGE), right(FedAvg())


GARBAGE = ByzantineNoise(clients=(1,), scale=10.0)


@pytest.mark.parametrize("setting", RULES)
def test_accuracy_stays_where_that_of_the_mean_collapses(setting: str) -> None:
    with_garbage, honest = fallen()
    assert honest > 0.8
    assert with_garbage < honest - 0.3
    assert right(FedAvg(aggregation=RULES[setting]), GARBAGE) > honest - 0.1


def test_fedsgd_takes_the_median_of_gradients() -> None:
    """Gradients at 2: 2 (2 - 1) = 2, 2 (2 - 1.5) = 1, and one of a label that is garbage."""
    run = hand(FedSgd(aggregation="median"), clients=[(1, 1.0), (1, 1.5), (1, 1e6)])
    assert common(run) == single(2 - 0.1 * 1)


def test_the_sum_is_all_that_the_fed_server_reads() -> None:
    run = go(FedAvg(aggregation={"secure": True}), 1, **FIVE, logging=splitfed.Logging(record=Recording((FED,))))
    held = weights(run, 0)
    for message in run.observe(FED).messages:
        assert message.kind != "weights" or message.sender == FED
        if message.kind == "masked":
            assert message.tensors["masked"].shape == (sum(t.numel() for t in held.values()) + 1,)
    with pytest.raises(InvalidInput, match="the aggregation server learns the sum of all clients' uploads"):
        run.attack(Dlg(iterations=1, restarts=1), adversary=FED)


def test_a_poisoned_upload_needs_an_upload() -> None:
    with pytest.raises(InvalidInput, match="changes a client's upload; no client uploads weights"):
        go(FedAvg(aggregation={"secure": True}), 1, adversaries=splitfed.Adversaries(poisoning=Scaling()))


@pytest.mark.parametrize("name", METHODS)
def test_uploads_cross_in_a_shorter_form(name: str) -> None:
    at = ("weight gradient->fed_server",) if name == "fedsgd" else ("weights->fed_server",)
    for codec in (Quantization(bits=8, on=at), TopK(k=4, on=at)):
        run = go(METHODS[name](), 1, **FIVE, defenses=codec)
        whole, short = (one.engine.traffic.flows.items() for one in (plain(name), run))
        sent = [sum(n for flow, (_, n) in flows if flow.receiver == FED) for flows in (whole, short)]
        assert sent[1] < 0.75 * sent[0]
        check_planned(run, METHODS[name](), **FIVE, defenses=codec)
        if isinstance(codec, Quantization):
            assert 0 < distance(run, plain(name)) < 0.1


def test_a_codec_and_a_secure_sum_do_not_go_together() -> None:
    with pytest.raises(InvalidInput, match="unknown message for Quantization: 'weights->fed_server'"):
        go(FedAvg(aggregation={"secure": True}), 1, defenses=Quantization(on=("weights->fed_server",)))


@pytest.mark.parametrize("method", [FML(aggregation="median"), FedAKT(aggregation={"secure": True})])
def test_where_a_schedule_averages_a_method_has_no_say(method: Method) -> None:
    with pytest.raises(InvalidInput, match=r"aggregation \w+=.* is not allowed: \w+ aggregates no weights here"):
        go(method, 1, topology=vanilla(model(), "relu"), schedule="splitfed_v1")


def moves(step: ServerStep, *changes: float) -> list[float]:
    memory: dict[str, Tensor] = {}
    return [float(step.move(torch.tensor(one, dtype=torch.float64), memory)) for one in changes]


def test_server_steps_by_hand() -> None:
    """Two rounds with changes of .5 and -.2, in one number."""
    assert moves(FedAvgM(rate=0.1, momentum=0.9), 0.5, -0.2) == pytest.approx([0.05, 0.1 * (0.9 * 0.5 - 0.2)])
    t2 = 1e-6
    v = [t2 + 0.25, t2 + 0.25 + 0.04]
    assert moves(FedAdagrad(rate=0.1), 0.5, -0.2) == pytest.approx(
        [0.1 * d / (w**0.5 + 1e-3) for d, w in zip((0.5, -0.2), v, strict=True)]
    )
    m = [0.1 * 0.5, 0.9 * 0.05 - 0.1 * 0.2]
    v = [0.99 * t2 + 0.01 * 0.25, 0.99 * (0.99 * t2 + 0.01 * 0.25) + 0.01 * 0.04]
    wanted = [0.1 * a / (w**0.5 + 1e-3) for a, w in zip(m, v, strict=True)]
    assert moves(FedAdam(rate=0.1), 0.5, -0.2) == pytest.approx(wanted)
    # v below the square: it rises by a share of it.
    v = [t2 + 0.01 * 0.25, t2 + 0.01 * 0.25 + 0.01 * 0.04]
    wanted = [0.1 * a / (w**0.5 + 1e-3) for a, w in zip(m, v, strict=True)]
    assert moves(FedYogi(rate=0.1), 0.5, -0.2) == pytest.approx(wanted)


def test_a_round_with_a_server_step_by_hand() -> None:
    """The plain mean is 1.384 (see test_averaging), from 2: a change of -.616."""
    run = hand(FedAvg(aggregation={"server_step": {"name": "fedavgm", "rate": 0.5}}))
    assert common(run) == single(2 - 0.5 * 0.616)
    assert own(run, 0) == single(1.512)
    adam = hand(FedAvg(aggregation=UpdateAggregation(server_step=FedAdam(rate=0.1))))
    d, tau = -0.616, 1e-3
    assert common(adam) == pytest.approx(2 + 0.1 * (0.1 * d) / ((0.99 * tau**2 + 0.01 * d * d) ** 0.5 + tau), rel=1e-6)


def test_a_server_step_that_does_nothing_is_fedavg_and_buffers_take_none() -> None:
    still = go(FedAvg(aggregation={"server_step": {"name": "fedavgm", "momentum": 0.0}}), 2, **FIVE)
    assert distance(still, go(FedAvg(), 2, **FIVE)) == 0
    adam = uploaded(go(FedAvg(aggregation={"server_step": "fedadam"}), 1, **FIVE))
    mean = uploaded(plain("fedavg"))
    assert all(torch.equal(adam[n], mean[n]) == ("running" in n) for n in mean)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FedAvg(aggregation="medium"), "unknown .* 'medium'; did you mean 'median'"),
        (lambda: FedAvg(aggregation=3), "aggregation=3 is not allowed; expected the name of a rule"),
        (lambda: FedAvg(aggregation={"ruel": "mean"}), "unknown parameter of aggregation 'ruel'; did you mean 'rule'"),
        (lambda: FedAvg(aggregation={"server_step": "fedadm"}), "unknown server_step 'fedadm'; did you mean 'fedadam'"),
        (lambda: FedAvg(aggregation={"server_step": 1}), "server_step=1 is not allowed"),
        (lambda: FedAvg(aggregation={"rule": "median", "secure": True}), "secure shows the server their sum only"),
        (lambda: UpdateAggregation(quorum=0), "quorum=0"),
        (lambda: FedAvgM(momentum=1.0), "fedavgm momentum=1"),
        (lambda: FedAdam(tau=0.0), "server_step tau=0"),
        (lambda: FedYogi(beta2=1.0), "server_step beta2=1"),
        (lambda: FedAdagrad(rate=0.0), "server_step rate=0"),
        (lambda: Scaffold(server_rate=2.0, aggregation=STEPS["fedadam"]), "server_rate=2 is a server step as well"),
        (lambda: PFedMe(beta=0.5, aggregation=STEPS["fedadam"]), "beta=0.5 is a server step as well"),
        (lambda: go(FedAvg(aggregation="krum")), "krum f=1 needs 5 clients or more"),
        (lambda: go(FedAvg(aggregation={"quorum": 4})), "quorum=4 is not allowed; 3 clients take part in a round"),
        (
            lambda: hand(FedAvg(aggregation="median"), clients=[(1, 1.0)] * 4, schedule=Independent(drop_out=0.1)),
            "the median needs three clients or more, and a round may end with 1",
        ),
    ],
)
def test_settings_that_cannot_be_are_one_line(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_study_has_aggregations_as_an_axis() -> None:
    study = small(
        data={"name": "digits", "victims": 8, "auxiliary": 32, "clients": 5},
        training={"rounds": 1, "batch_size": 64, "schedule": "independent"},
        topology=[{"name": "local"}],
        method=[{"name": "fedavg", "aggregation": ["mean", "median", {"secure": True, "server_step": "fedadam"}]}],
        defense=[{"name": "none"}],
        attack=None,
    )
    cells = checked(study).cells
    made = dict.fromkeys(build_method(cell, constants()) for cell in cells)  # type: ignore[arg-type]
    wanted = ["mean", "median", {"secure": True, "server_step": "fedadam"}]
    assert list(made) == [FedAvg(aggregation=one) for one in wanted]


def test_momentum_of_clients_goes_on_beside_a_server_step() -> None:
    momentum = Optim("SGD", {"lr": 0.1, "momentum": 0.9})
    run = go(FedAvg(aggregation={"server_step": "fedavgm"}), 2, optimizer=momentum)
    assert set(run.method_state["server_step"]) == {n for n in uploaded(run) if "running" not in n}
