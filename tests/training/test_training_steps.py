"""Optimizers of one's own, parameter groups and steps over several batches: to the bit those of the uncut model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.defenses import Adversarial, DpSgd, GaussianRelease, Noise
from splitfed.detectors import SplitGuard
from splitfed.planning.private import planned_ledger
from splitfed.schedules.base import Training
from splitfed.threats.retraining import Rerun
from splitfed.topologies import local, vanilla
from tests.examples import assert_same
from tests.federated.examples import check_planned, check_resumed, go, hand, model, own
from tests.thinning import thin
from tests.training.training_steps import CUTS, Decay, make_decay, train_cut, train_uncut, weights_of

MOMENTUM = {"lr": 0.1, "momentum": 0.9}
GROUPS = (
    sf.ParameterGroup("*.weight", {"weight_decay": 0.1}, max_dims=1),
    sf.ParameterGroup("*.bias", {"weight_decay": 0.0, "lr": 0.03}),
)


def in_groups(module: nn.Module) -> torch.optim.Optimizer:
    """The same groups written out as torch has them."""
    named = list(module.named_parameters())
    vectors = [p for n, p in named if n.endswith(".weight") and p.dim() == 1]
    biases = [p for n, p in named if n.endswith(".bias")]
    rest = [p for n, p in named if n.endswith(".weight") and p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": rest},
        {"params": vectors, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0, "lr": 0.03},
    ]
    return torch.optim.SGD(groups, **MOMENTUM, weight_decay=0.01)


CASES: dict[str, tuple[sf.Optim, Any]] = {
    "own class": (sf.Optim(Decay, {"lr": 0.2}), lambda m: Decay(m.parameters(), 0.2)),
    "own function": (sf.Optim(make_decay, {"rate": 0.3}), lambda m: make_decay(m.parameters(), 0.3)),
    "groups": (sf.Optim("SGD", {**MOMENTUM, "weight_decay": 0.01}, groups=GROUPS), in_groups),
    "sgd": (sf.Optim("SGD", MOMENTUM), lambda m: torch.optim.SGD(m.parameters(), **MOMENTUM)),
    "adam": (sf.Optim("Adam", {"lr": 0.01}), lambda m: torch.optim.Adam(m.parameters(), lr=0.01)),
}


def compare(cut: str, case: str, update: LocalUpdate = LocalUpdate()) -> dict[str, Tensor]:
    """Hold a run against the loop, to the bit; return the weights."""
    optimizer, loop = CASES[case]
    run = train_cut(cut, optimizer, local=update)
    expected = train_uncut(cut, loop, run.data.clients[0].train, Training.of(update, 8, 3))
    found = weights_of(run)
    assert_same(found, expected)
    return found


@pytest.mark.parametrize(
    ("cut", "case"),
    thin([(c, case) for c in CUTS if c != "tied u_shaped" for case in ("own class", "own function", "groups")], 2),
)
def test_each_partys_own_optimizer_is_that_of_the_uncut_model(cut: str, case: str) -> None:
    compare(cut, case)


def groups_of(run: sf.Run) -> Mapping[str, list[dict[str, Any]]]:
    found = {}
    for name, party in run.engine.parties.items():
        if party.state.optimizer is not None:
            found[name] = party.state.optimizer.param_groups
    return found


@pytest.mark.parametrize(("cut", "last"), [("vertical", "top."), ("vanilla", "6.")], ids=["vertical", "vanilla"])
def test_names_are_those_of_the_whole_model_and_the_first_group_counts(cut: str, last: str) -> None:
    """The biases of the last layers fit both groups."""
    groups = [sf.ParameterGroup(f"{last}*", {"lr": 0.03}), sf.ParameterGroup("*", {"weight_decay": 0.2}, max_dims=1)]
    run = train_cut(cut, sf.Optim("SGD", MOMENTUM, groups=groups), rounds=1)

    def loop(module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        first = [p for n, p in named if n.startswith(last)]
        vectors = [p for n, p in named if not n.startswith(last) and p.dim() == 1]
        rest = [p for n, p in named if not n.startswith(last) and p.dim() > 1]
        divided: list[dict[str, Any]] = [
            {"params": rest},
            {"params": first, "lr": 0.03},
            {"params": vectors, "weight_decay": 0.2},
        ]
        return torch.optim.SGD(divided, **MOMENTUM)

    assert_same(weights_of(run), train_uncut(cut, loop, run.data.clients[0].train, Training(8, seed=3), 1))


def test_groups_without_a_weight_at_a_party_stay_where_they_are() -> None:
    """A scheduler may be given a number a group: the n-th group is the same one at every party."""
    group = sf.ParameterGroup("6.*", {"momentum": 0.5})
    options = {"max_lr": [0.1, 0.02], "total_steps": 10}
    optimizer = sf.Optim("SGD", MOMENTUM, "OneCycleLR", options, "step", groups=[group])
    run = train_cut("vanilla", optimizer, rounds=1)

    def loop(module: nn.Module) -> torch.optim.Optimizer:
        named = list(module.named_parameters())
        last = [p for n, p in named if n.startswith("6.")]
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in named if not n.startswith("6.")]},
            {"params": last, "momentum": 0.5},
        ]
        return torch.optim.SGD(groups, **MOMENTUM)

    def schedule(steps: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(steps, [0.1, 0.02], total_steps=10)

    rows = run.data.clients[0].train
    assert_same(weights_of(run), train_uncut("vanilla", loop, rows, Training(8, seed=3), 1, scheduler=schedule))
    assert [len(group["params"]) for group in groups_of(run)["client0"]] == [4, 0]


# A tied weight has two names, by either of which the loop's groups would have it.
PAIRS = [
    (cut, case) for cut in CUTS for case in ("sgd", "adam", "groups") if (cut, case) != ("tied u_shaped", "groups")
]


@pytest.mark.parametrize(("cut", "case"), thin(PAIRS, 2))
def test_a_step_over_several_batches_is_that_of_the_uncut_loop(cut: str, case: str) -> None:
    """Of 38 rows in batches of 8, the last of 6, in groups of 3: the last step of an epoch has 2 batches."""
    compare(cut, case, LocalUpdate(accumulate=3))


def test_several_batches_and_a_batch_left_out() -> None:
    dropped = compare("vanilla", "sgd", LocalUpdate(accumulate=3, drop_last=True))
    kept = compare("vanilla", "sgd", LocalUpdate(accumulate=3))
    single = compare("vanilla", "sgd", LocalUpdate(accumulate=1))
    assert not all(torch.equal(dropped[name], kept[name]) for name in kept)
    assert not all(torch.equal(single[name], kept[name]) for name in kept)


def test_steps_by_hand() -> None:
    """One weight at 2, labels 1, rate .1, batches of a row: 3 rows in groups of 2 take w to .8 w + .2, twice."""
    run = hand(None, 1, clients=((3, 1.0),), local=LocalUpdate(accumulate=2))
    assert own(run, 0) == pytest.approx(1.64)
    assert run.history[0]["steps"] == 3, "batches"
    assert own(hand(None, 1, clients=((3, 1.0),)), 0) == pytest.approx(1.512)
    # Labels 1 and 3 in one step: the mean of their gradients is 0.
    assert own(hand(None, 1, clients=((4, 1.0),), local=LocalUpdate(local_epochs=2, accumulate=4)), 0) == pytest.approx(
        1.64
    )


def test_a_scheduler_follows_the_steps_that_are_taken() -> None:
    """Six batches in groups of four are two steps: halved behind the second."""
    stepped = sf.Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 2, "gamma": 0.5}, "step")
    run = hand(None, 1, clients=((6, 1.0),), optimizer=stepped, local=LocalUpdate(accumulate=4))
    assert run.engine.party(0, "client").state.rate == 0.05


@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1", "sglr"])
def test_the_steps_of_every_party_are_known_beforehand(schedule: str) -> None:
    """A cycle of exactly as many steps as the party that takes most is enough; one fewer is refused by their number."""
    changes: dict[str, Any] = {"topology": vanilla(model(), "relu"), "schedule": schedule, "batch_size": 10}
    update = LocalUpdate(accumulate=2) if schedule != "sglr" else LocalUpdate()

    def cycle(steps: int) -> dict[str, sf.Optim]:
        optim = sf.Optim("SGD", {"lr": 0.1}, "OneCycleLR", {"max_lr": 0.1, "total_steps": steps}, "step")
        return {"server": optim}

    with pytest.raises(InvalidInput, match=r"and is stepped \d+ times") as caught:
        go(None, 2, optimizer=cycle(1), local=update, **changes)
    (taken,) = map(int, re.findall("total_steps=([0-9]+)", str(caught.value)))
    run = go(None, 2, optimizer=cycle(taken), local=update, **changes)
    last = max(
        int(party.state.state_dict()["scheduler"]["last_epoch"])
        for name, party in run.engine.run_parties.members().items()
        if name.startswith("server")
    )
    assert last == taken


@pytest.mark.parametrize(
    ("split", "case"),
    thin([(split, case) for split in (False, True) for case in ("own class", "groups", "accumulate")], 2),
)
def test_a_resumed_run_ends_in_the_same_bits(case: str, split: bool, tmp_path: Path) -> None:
    group = sf.ParameterGroup("*.bias", {"weight_decay": 0.1})
    changes: dict[str, Any] = {
        "own class": {"optimizer": sf.Optim(Decay)},
        "groups": {"optimizer": sf.Optim("SGD", MOMENTUM, groups=[group])},
        "accumulate": {"local": LocalUpdate(accumulate=2)},
    }[case]
    if split:
        changes |= {"topology": vanilla(model(), "relu"), "schedule": "splitfed_v1"}
    method = None if split else "fedavg"
    whole = go(method, 4, **changes)
    check_planned(whole, method, **changes)
    check_resumed(whole, method, tmp_path / "run", **changes)
    without = {name: value for name, value in changes.items() if name not in ("optimizer", "local")}
    with pytest.raises(InvalidInput, match=r"holds another run: its (optimizers|training)"):
        go(method, 4, logging=sf.Logging(folder=tmp_path / "run", resume=True), **without)


def test_a_folder_keeps_groups_and_asks_for_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    group = sf.ParameterGroup(["*.bias"], {"weight_decay": 0.1}, max_dims=1)
    update = LocalUpdate(accumulate=2)
    run = train_cut(
        "vanilla", sf.Optim("SGD", MOMENTUM, groups=[group]), local=update, logging=sf.Logging(tmp_path / "a")
    )
    topology, data = CUTS["vanilla"][1](CUTS["vanilla"][0]()), run.data
    again = sf.load(tmp_path / "a", topology=topology, data=data)
    assert_same(weights_of(again), weights_of(run))
    assert again.engine.optims["client"].groups == (group,)
    train_cut("vanilla", sf.Optim(Decay), logging=sf.Logging(tmp_path / "b"))
    with pytest.raises(InvalidInput, match="give optimizer="):
        sf.load(tmp_path / "b", topology=topology, data=data)
    assert len(sf.load(tmp_path / "b", topology=topology, data=data, optimizer=sf.Optim(Decay)).history) == 2
    with pytest.raises(InvalidInput, match="holds another run"):
        sf.load(tmp_path / "b", topology=topology, data=data, optimizer=sf.Optim(make_decay, {"rate": 0.1}))
    other = type("Decay", (Decay,), {"__module__": Decay.__module__, "step": lambda self, closure=None: None})
    with pytest.raises(InvalidInput, match=r"the (source of|optimizer of 'client')"):
        sf.load(tmp_path / "b", topology=topology, data=data, optimizer=sf.Optim(other))


def test_recorders_and_defenses_act_on_every_batch() -> None:
    update = LocalUpdate(accumulate=2)
    record = sf.Recording(("server",))
    defenses = [Noise(scale=0.1), GaussianRelease(noise_multiplier=2.0)]
    run = train_cut("vanilla", None, 1, local=update, defenses=defenses, logging=sf.Logging(record=record))
    seen = run.engine.link.recorders["server"].view().select(kind="activation", phase="train").messages
    assert len(seen) == run.history[0]["steps"] == 5
    assert run.plan is not None
    assert planned_ledger(run.plan.prepared, 1).epsilon == run.ledger.epsilon
    single = train_cut("vanilla", None, 1, defenses=defenses)
    assert single.ledger.epsilon == run.ledger.epsilon
    assert single.bytes == run.bytes
    # An attacker's copy of the training takes steps as the run does.
    assert Rerun(run.engine, 0, run.evaluator.grants.feed(0), 0)._engine.accumulate == 2


def refused_runs() -> dict[str, tuple[dict[str, Any], str]]:
    split = {"topology": vanilla(model(), "relu"), "schedule": "sequential", "method": None}
    unmixed = model()
    unmixed.norm = nn.Identity()
    return {
        "dp_sgd": (
            {**split, "topology": vanilla(unmixed, "relu"), "defenses": DpSgd(noise_multiplier=1.0)},
            "beside DpSgd, which adds its noise to every",
        ),
        "adversarial": ({**split, "defenses": Adversarial(bottleneck=0)}, "which learns from every batch"),
        "alternate": (
            {**split, "schedule": "alternate"},
            "with schedule Alternate, whose clients do not train several",
        ),
        "sglr": ({**split, "schedule": "sglr"}, "with schedule Sglr"),
        "blind": ({**split, "schedule": "blind"}, "with schedule Blind"),
        "fednova": ({"method": "fednova", "topology": local(model())}, "with method FedNova, which acts on every step"),
        "fedsgd": ({"method": "fedsgd", "topology": local(model())}, "with method FedSgd"),
        "attack": (
            {**split, "adversaries": sf.Adversaries(training_attacks={"server": "fsha"})},
            "beside training attack",
        ),
        "detector": (
            {**split, "adversaries": sf.Adversaries(detectors={"client": SplitGuard()})},
            "beside detector SplitGuard, which acts on every batch",
        ),
    }


@pytest.mark.parametrize("case", list(refused_runs()))
def test_what_counts_on_a_step_a_batch_is_refused_by_name(case: str) -> None:
    changes, text = refused_runs()[case]
    method = changes.pop("method")
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        go(method, 1, local=LocalUpdate(accumulate=2), **changes)
    assert "accumulate=2 is not allowed" in str(caught.value)
    assert "\n" not in str(caught.value)


def bad(**step: Any) -> type:
    return type("Bad", (torch.optim.Optimizer,), step)


REFUSED: dict[str, tuple[Any, str]] = {
    "count": (lambda: LocalUpdate(accumulate=0), "accumulate=0 is not allowed; expected a whole number of at least 1"),
    "poisson": (lambda: LocalUpdate(sampling="poisson", accumulate=2), "accumulate=2 is not allowed with sampling="),
    "no optimizer": (lambda: sf.Optim(nn.Linear), "optimizer Linear is not allowed; expected a name in torch.optim"),
    "number": (lambda: sf.Optim(3), "optimizer 3 is not allowed"),
    "path": (lambda: sf.Optim("os:system"), "unknown optimizer 'os:system'"),
    "closure": (lambda: sf.Optim(bad(step=lambda self, closure: None)), "its step needs a closure"),
    "own option": (lambda: sf.Optim(Decay, {"fal": 0.1}), "unknown option of optimizer"),
    "own infinite": (lambda: sf.Optim(Decay, {"fall": float("inf")}), "fall=inf of optimizer"),
    "range": (lambda: sf.Optim("Adam", {"betas": (1.0, 0.9)}), "refused by torch: Invalid beta parameter at index 0"),
    "range in a group": (
        lambda: sf.Optim(groups=[sf.ParameterGroup("*", {"momentum": -1.0})]),
        "is refused by torch: Invalid momentum value: -1.0",
    ),
    "nesterov": (lambda: sf.Optim("SGD", {"lr": 0.1, "nesterov": True}), "Nesterov momentum requires a momentum"),
    "cycle": (lambda: sf.Optim("SGD", {"lr": 0.1}, "OneCycleLR", {"max_lr": 0.1}), "scheduler OneCycleLR(max_lr=0.1)"),
    "group option": (lambda: sf.Optim(groups=[sf.ParameterGroup("*", {"lrr": 1.0})]), "optimizer SGD 'lrr'"),
    "no group": (lambda: sf.Optim(groups=[{"match": "*"}]), "groups={'match': '*'} is not allowed; expected"),
    "no pattern": (lambda: sf.ParameterGroup([], {"lr": 1.0}), "match=[] is not allowed"),
    "no options": (lambda: sf.ParameterGroup("*"), "a parameter group with options={} is not allowed"),
    "dimensions": (lambda: sf.ParameterGroup("*", {"lr": 1.0}, -1), "max_dims=-1 is not allowed"),
    "misspelt": (
        lambda: train_cut("vanilla", sf.Optim(groups=[sf.ParameterGroup("1.wieght", {"lr": 0.1})])),
        "unknown name of weights in a parameter group '1.wieght'; did you mean '1.weight'",
    ),
    "empty": (
        lambda: train_cut("vanilla", sf.Optim(groups=[sf.ParameterGroup("1.weight", {"lr": 0.1}, 1)])),
        "with max_dims=1 holds no weight",
    ),
    "no rate": (
        lambda: go("per_fedavg", 1, optimizer=sf.Optim(make_decay, {"rate": 0.1})),
        "has no learning rate lr, which is needed here",
    ),
    "fednova": (
        lambda: go("fednova", 1, optimizer=sf.Optim("SGD", MOMENTUM, groups=GROUPS)),
        "fednova takes one step of SGD for all weights; parameter groups with their own weight_decay, lr are not",
    ),
    "fedsgd": (
        lambda: go("fedsgd", 1, optimizer=sf.Optim(Decay)),
        "training_steps:Decay of 'client' is not allowed with fedsgd",
    ),
    "returns nothing": (lambda: train_cut("vanilla", sf.Optim(lambda params: None)), "returned a NoneType; expected a"),
    "raises": (
        lambda: train_cut("vanilla", sf.Optim(lambda params: {}["rate"])),
        "cannot be built: KeyError: 'rate'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    act, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_an_attack_that_takes_an_update_for_a_gradient_refuses_groups_and_ones_own() -> None:
    from splitfed.attacks.gradients.local_training import check_one_step

    group = sf.ParameterGroup("weight", {"lr": 0.2})
    for optimizer, text in (
        (sf.Optim("SGD", {"lr": 0.1}, groups=[group]), "groups=1 of SGD"),
        (sf.Optim(Decay), "Decay"),
    ):
        run = hand("fedavg", 1, clients=((1, 1.0), (1, -3.0)), optimizer=optimizer)
        local_training = run.evaluator.grants.local("fed_server", 0)
        assert local_training is not None
        with pytest.raises(InvalidInput, match=text):
            check_one_step(local_training)


@pytest.mark.exhaustive
def test_to_check_an_optimizer_loads_no_compiler() -> None:
    """Of torch's own it is most of the time that a study's errors would take."""
    import subprocess
    import sys

    code = (
        "import sys; from splitfed.core.optimizers import Optim; "
        "Optim('Adam', {'lr': 0.1}, 'OneCycleLR', {'max_lr': 0.1, 'total_steps': 5}); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
