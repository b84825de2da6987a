"""Optimizers and schedulers by name: built as torch builds them, refused before anything runs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.party import take_step
from tests.examples import read_back

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "Adm"}, "unknown optimizer 'Adm'; did you mean 'Adam'"),
    "case": ({"name": "sgd"}, "unknown optimizer 'sgd'"),
    "base class": ({"name": "Optimizer"}, "unknown optimizer 'Optimizer'"),
    "needs a closure": ({"name": "LBFGS"}, "unknown optimizer 'LBFGS'"),
    "option": (
        {"options": {"lr": 0.1, "momentun": 0.9}},
        "unknown option of optimizer SGD 'momentun'; did you mean 'momentum'",
    ),
    "parameters": ({"options": {"params": []}}, "unknown option of optimizer SGD 'params'"),
    "value": ({"options": {"lr": -1.0}}, "optimizer SGD(lr=-1.0) is refused by torch: Invalid learning rate: -1.0"),
    "scheduler": ({"scheduler": "StepL"}, "unknown learning-rate scheduler 'StepL'; did you mean 'StepLR'"),
    "scheduler option": (
        {"scheduler": "StepLR", "scheduler_options": {"step": 2}},
        "unknown option of scheduler StepLR 'step'; did you mean 'step_size'",
    ),
    "scheduler misses one": ({"scheduler": "StepLR"}, "scheduler StepLR() is refused by torch"),
    "needs a metric": ({"scheduler": "ReduceLROnPlateau"}, "ReduceLROnPlateau"),
    "text for a truth value": (
        {"options": {"lr": 0.1, "maximize": "false"}},
        "maximize='false' of optimizer SGD is not allowed; expected True or False",
    ),
    "truth value for a number": (
        {"options": {"lr": True}},
        "lr=True of optimizer SGD is not allowed; expected",
    ),
    "text for a number": ({"options": {"lr": 0.1, "dampening": "x"}}, "dampening='x' of optimizer SGD is not allowed"),
    "betas": ({"name": "Adam", "options": {"betas": [0.9]}}, "betas=[0.9] of optimizer Adam is not allowed; expected"),
    "foreach": ({"name": "Adam", "options": {"foreach": "yes"}}, "foreach='yes' of optimizer Adam is not allowed"),
    "both": ({"name": "Adam", "options": {"foreach": True, "fused": True}}, "foreach=True of optimizer Adam is not"),
    "capturable": ({"name": "Adam", "options": {"capturable": True}}, "capturable=True of optimizer Adam is not"),
    **{
        f"{name} {given}": ({"scheduler": name, "scheduler_options": given}, f"of scheduler {name} is not allowed")
        for name, given in (
            ("StepLR", {"step_size": 0}),
            ("StepLR", {"step_size": -1}),
            ("StepLR", {"step_size": 1.5}),
            ("StepLR", {"step_size": "1"}),
            ("StepLR", {"step_size": 2, "gamma": -1.0}),
            ("StepLR", {"step_size": 2, "last_epoch": 5}),
            ("MultiStepLR", {"milestones": ["2"]}),
            ("CosineAnnealingLR", {"T_max": 0}),
            ("ExponentialLR", {"gamma": "0.5"}),
            ("LinearLR", {"total_iters": "4"}),
        )
    },
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_in_one_line(case: str) -> None:
    arguments, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        Optim(**arguments)
    assert "\n" not in str(caught.value)


def test_a_function_of_the_users_is_not_called_before_training() -> None:
    def count(epoch: int) -> float:
        raise AssertionError("called")

    assert Optim(scheduler="LambdaLR", scheduler_options={"lr_lambda": count}).scheduler == "LambdaLR"


def test_a_scheduler_that_ends_before_its_first_steps_is_no_mistake_yet() -> None:
    Optim(scheduler="OneCycleLR", scheduler_options={"max_lr": 0.1, "total_steps": 2})
    with pytest.raises(InvalidInput, match=r"scheduler OneCycleLR\(.*\) is refused by torch: .*total_steps"):
        Optim(scheduler="OneCycleLR", scheduler_options={"max_lr": 0.1})


def test_the_default_is_sgd_with_momentum() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer, scheduler = Optim().build([weight])
    assert isinstance(optimizer, torch.optim.SGD)
    assert scheduler is None
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.step()
    # -.05, then -.05 x (1 + .9): -.145 in all.
    assert torch.allclose(weight, torch.full((2,), -0.145))


SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 1, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 2]},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "LinearLR": {"total_iters": 3},
    "PolynomialLR": {"total_iters": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_a_scheduler_survives_a_checkpoint(name: str) -> None:
    """Loaded without unpickling code, as a checkpoint is."""
    optim = Optim("SGD", {"lr": 0.1}, name, SCHEDULERS[name])
    rates = []
    for stop in (False, True):
        optimizer, scheduler = optim.build([nn.Parameter(torch.zeros(1))])
        assert scheduler is not None
        for step in range(3):
            optimizer.step()
            scheduler.step()
            if stop and step == 1:
                state = read_back({"o": optimizer.state_dict(), "s": scheduler.state_dict()})
                optimizer, scheduler = optim.build([nn.Parameter(torch.zeros(1))])
                assert scheduler is not None
                optimizer.load_state_dict(state["o"])
                scheduler.load_state_dict(state["s"])
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]


def test_halving_every_round() -> None:
    optimizer, scheduler = Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 1, "gamma": 0.5}).build(
        [nn.Parameter(torch.zeros(1))]
    )
    assert scheduler is not None
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


# LBFGS asks for a closure, Muon for matrices alone.
NAMES = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS", "Muon")
)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_torch_to_the_bit(name: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} if name == "SGD" else {"lr": 0.1}
    start, slope = torch.randn(4, 3), torch.randn(4, 3)
    mine, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, _ = Optim(name, options).build([mine])
    theirs = getattr(torch.optim, name)([other], **options)
    for step in range(3):
        for weight in (mine, other):
            weight.grad = slope.to_sparse() if name == "SparseAdam" else slope * (step + 1)
        take_step(ours)
        theirs.step()
        assert torch.equal(mine, other)
    assert not torch.equal(mine, start)


def test_a_scheduler_sees_the_steps(recwarn: pytest.WarningsRecorder) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scheduler = Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 1, "gamma": 0.5}).build([weight])
    assert scheduler is not None
    weight.grad = torch.ones(3)
    take_step(optimizer)
    scheduler.step()
    # Without a step before it, the scheduler would have warned.
    assert not recwarn.list
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_step_replaced_on_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, called = nn.Parameter(torch.ones(3)), []
    optimizer, _ = Optim("SGD", {"lr": 0.1}).build([weight])
    former = torch.optim.SGD.step

    @functools.wraps(former)
    def counting(self: torch.optim.SGD) -> None:
        called.append(True)
        former(self)

    monkeypatch.setattr(torch.optim.SGD, "step", counting)
    weight.grad = torch.ones(3)
    take_step(optimizer)
    assert called == [True]
    assert torch.equal(weight, torch.full((3,), 0.9))


@pytest.mark.parametrize("where", ["own pre", "own post", "global pre", "global post"])
def test_hooks_on_steps_are_called(where: str) -> None:
    weight, called = nn.Parameter(torch.ones(3)), []
    optimizer, _ = Optim("SGD", {"lr": 0.1}).build([weight])
    register = {
        "own pre": optimizer.register_step_pre_hook,
        "own post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }[where]
    weight.grad = torch.ones(3)
    handle = register(lambda *_: called.append(where))
    take_step(optimizer)
    handle.remove()
    take_step(optimizer)
    assert called == [where]
