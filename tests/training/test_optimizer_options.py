"""Gradient clipping and schedulers that follow steps: each party's own, as torch's, resumed and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.defenses import DpSgd
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from tests.examples import assert_same, toy_data
from tests.federated.examples import check_planned, check_resumed, go, hand, model, own
from tests.thinning import thin

LIMIT = 0.05
CLIPPED = sf.Optim("SGD", {"lr": 0.1, "momentum": 0.9}, clip_norm=LIMIT)
STEPPED = sf.Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 2, "gamma": 0.5}, "step")


def net() -> nn.Sequential:
    with stream(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def beside(optimizer: sf.Optim, groups: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights of a split run of two epochs, those of a plain loop over the same batches, the norms before clipping.

    `groups`: whether the loop clips the two "parts" of the model apart, or the "whole".
    """
    data = toy_data(60).clients(1, auxiliary=4, victims=4, seed=0)
    run = sf.train(vanilla(net(), "2"), data, rounds=2, batch_size=8, optimizer=optimizer, seed=3)
    plain, rows, norms = net(), data.clients[0].train, []
    parts = [list(plain[:3].parameters()), list(plain[3:].parameters())]
    bare = sf.Optim(optimizer.name, optimizer.options)
    steps = [bare.build(part)[0] for part in parts]
    schedulers = [
        None if optimizer.scheduler is None else torch.optim.lr_scheduler.StepLR(one, **optimizer.scheduler_options)
        for one in steps
    ]
    for epoch in range(2):
        for batch in Training(8, seed=3).batches(len(rows), epoch, 0):
            plain.zero_grad()
            nn.functional.cross_entropy(plain(rows.x[batch]), rows.y[batch]).backward()
            if optimizer.clip_norm is not None:
                together = parts if groups == "parts" else [list(plain.parameters())]
                norms += [float(nn.utils.clip_grad_norm_(part, optimizer.clip_norm)) for part in together]
            for one, scheduler in zip(steps, schedulers, strict=True):
                one.step()
                if scheduler is not None and optimizer.scheduler_every == "step":
                    scheduler.step()
        for scheduler in schedulers:
            if scheduler is not None and optimizer.scheduler_every == "round":
                scheduler.step()
    found = [t for module in run.engine.modules(0).values() for t in module.parameters()]
    return dict(enumerate(found)), dict(enumerate(plain.parameters())), norms  # type: ignore[arg-type]


def test_each_party_clips_by_its_own_gradient_as_torch_does() -> None:
    """To the bit those of a loop that clips either half of the model by itself, and not those of the whole model's."""
    found, expected, norms = beside(CLIPPED, "parts")
    assert_same(found, expected)
    assert max(norms) > LIMIT
    _, whole, _ = beside(CLIPPED, "whole")
    assert not all(torch.equal(found[i], whole[i]) for i in found)


def test_a_limit_that_is_never_reached_changes_no_bit() -> None:
    wide, _, norms = beside(sf.Optim("SGD", {"lr": 0.1, "momentum": 0.9}, clip_norm=1e6), "parts")
    assert max(norms) < 1e6
    assert_same(wide, beside(sf.Optim("SGD", {"lr": 0.1, "momentum": 0.9}), "parts")[0])


def test_a_clipped_step_by_hand() -> None:
    """The gradient at w = 2 and label -3 is 2 x 5 = 10; clipped to 4, at rate .1, w becomes 1.6."""
    clipped = sf.Optim("SGD", {"lr": 0.1}, clip_norm=4.0)
    run = hand(None, 1, clients=((1, -3.0),), optimizer=clipped)
    # clip_grad_norm_ divides by the norm plus 1e-6.
    assert own(run, 0) == pytest.approx(1.6, abs=1e-6)
    assert own(hand(None, 1, clients=((1, -3.0),)), 0) == pytest.approx(1.0)


def test_what_a_method_adds_is_clipped_with_the_rest() -> None:
    """Two steps of fedprox: the second gradient, 2 x 4.6 and the pull back to 2, is over the limit of 4 as well."""
    run = hand("fedprox", 1, clients=((2, -3.0),), optimizer=sf.Optim("SGD", {"lr": 0.1}, clip_norm=4.0))
    assert own(run, 0) == pytest.approx(1.2, abs=1e-5)


@pytest.mark.parametrize("every", ["step", "round"])
def test_a_scheduler_follows_steps_or_rounds_as_torch_does(every: str) -> None:
    optimizer = sf.Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 2, "gamma": 0.5}, every)
    found, expected, _ = beside(optimizer, "parts")
    assert_same(found, expected)


def test_rates_by_hand() -> None:
    """Halved after every second step of a party's own: three steps of one client, one of the other, in each round."""
    run = hand("fedavg", 2, optimizer=STEPPED)
    rates = [run.engine.party(client, "client").state.rate for client in range(2)]
    assert rates == [0.1 / 8, 0.1 / 2]
    run = hand("fedavg", 2, optimizer=sf.Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 2, "gamma": 0.5}))
    assert [run.engine.party(client, "client").state.rate for client in range(2)] == [0.05, 0.05]


@pytest.mark.parametrize(
    ("split", "optimizer"),
    thin([(False, CLIPPED), (False, STEPPED), (True, CLIPPED), (True, STEPPED)], 3),
    ids=["fedavg-clip", "fedavg-scheduler", "splitfed_v1-clip", "splitfed_v1-scheduler"],
)
def test_a_resumed_run_ends_in_the_same_bits(optimizer: sf.Optim, split: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": optimizer}
    if split:
        changes |= {"topology": vanilla(model(), "relu"), "schedule": "splitfed_v1"}
    method = None if split else "fedavg"
    whole = go(method, 4, **changes)
    check_planned(whole, method, **changes)
    check_resumed(whole, method, tmp_path / "run", **changes)
    with pytest.raises(InvalidInput, match=r"holds another run: its optimizers.*(clip_norm=|scheduler_every=)"):
        go(method, 4, logging=sf.Logging(folder=tmp_path / "run", resume=True), **{**changes, "optimizer": None})


@pytest.mark.parametrize("every", ["step", "round"])
def test_a_scheduler_that_ends_before_the_run_is_refused_before_it(every: str, tmp_path: Path) -> None:
    ends = sf.Optim("SGD", {"lr": 0.1}, "OneCycleLR", {"max_lr": 0.1, "total_steps": 2}, every)
    text = f"it ends after 2, and is stepped 3 times, once a {every}; give it total_steps=3"
    with pytest.raises(InvalidInput, match=text):
        hand(None, 3, clients=((1, 1.0),), optimizer=ends, logging=sf.Logging(folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    run = hand(None, 2, clients=((1, 1.0),), optimizer=ends)
    with pytest.raises(InvalidInput, match=text):
        run.continue_training(1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"clip_norm": 0.0}, "clip_norm=0.0 is not allowed; expected a number in (0, inf)"),
    "infinite": ({"clip_norm": float("inf")}, "clip_norm=inf is not allowed"),
    "switch": ({"clip_norm": True}, "clip_norm=True is not allowed"),
    "every": ({"scheduler": "StepLR", "scheduler_options": {"step_size": 1}, "scheduler_every": "steps"}, "'steps'"),
    "no scheduler": ({"scheduler_every": "step"}, "scheduler_every='step' is not allowed without a scheduler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_refused_in_one_line(case: str) -> None:
    arguments, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        sf.Optim(**arguments)
    assert "\n" not in str(caught.value)


def test_the_text_of_an_optimizer_is_that_of_the_first_release_where_nothing_new_is_asked() -> None:
    text = "Optim(name='SGD', options={'lr': 0.05, 'momentum': 0.9}, scheduler=None, scheduler_options={})"
    assert repr(sf.Optim()) == text
    assert repr(CLIPPED).endswith("scheduler_options={}, clip_norm=0.05)")
    assert repr(STEPPED).endswith("scheduler_every='step')")


@pytest.mark.parametrize("optimizer", [CLIPPED, STEPPED], ids=["clip_norm=0.05", "scheduler_every='step'"])
@pytest.mark.parametrize("method", ["scaffold", "fednova"])
def test_methods_that_read_gradients_off_weights_refuse_both(
    method: str, optimizer: sf.Optim, request: pytest.FixtureRequest
) -> None:
    text = "clip_norm=0.05" if optimizer is CLIPPED else "scheduler_every='step' is not allowed"
    with pytest.raises(InvalidInput, match=text):
        hand(method, optimizer=optimizer)


def test_fedsgd_refuses_to_clip_what_takes_no_step() -> None:
    with pytest.raises(InvalidInput, match=re.escape("clip_norm=0.05 of 'client' is not allowed with fedsgd")):
        hand("fedsgd", optimizer=CLIPPED)


def test_beside_per_row_clipping_of_the_same_role_alone() -> None:
    data, topology = toy_data(40).clients(1, auxiliary=4, victims=4), vanilla(net(), "2")
    private = DpSgd(noise_multiplier=1.0, roles=("client",))
    with pytest.raises(InvalidInput, match=re.escape("clip_norm=0.05 of 'client' is not allowed beside DpSgd")):
        sf.train(topology, data, defenses=private, rounds=1, batch_size=8, optimizer=CLIPPED)
    run = sf.train(topology, data, defenses=private, rounds=1, batch_size=8, optimizer={"server": CLIPPED})
    assert len(run.history) == 1


def test_an_attack_that_takes_an_update_for_a_gradient_refuses_a_clipped_one() -> None:
    from splitfed.attacks.gradients.local_training import check_one_step

    for clip_norm in (None, 4.0):
        optimizer = sf.Optim("SGD", {"lr": 0.1}, clip_norm=clip_norm)
        run = hand("fedavg", 1, clients=((1, 1.0), (1, -3.0)), optimizer=optimizer)
        local_training = run.evaluator.grants.local("fed_server", 0)
        assert local_training is not None
        if clip_norm is None:
            check_one_step(local_training)
        else:
            with pytest.raises(InvalidInput, match=re.escape("clip_norm=4.0 of SGD is not allowed here")):
                check_one_step(local_training)
