"""Gradient inversion at the aggregation server: the gradient worked out is the client's, and rows come back from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import splitfed
from splitfed.attacks.base import Attack, Phase
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.gradient_matching import ClientGradient, class_counts, class_logits, newest_step
from splitfed.attacks.gradients.idlg import Idlg
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients, cosine, variation
from splitfed.attacks.scoring.reconstruction_metrics import assignment
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.topology import Topology
from splitfed.threats.recorded_training import recorded_view
from splitfed.topologies import vanilla
from splitfed.training.run import Run
from tests.attacks.examples import fed_run as trained, network, perceptron as WHOLE, sgd, whole
from tests.rounding import single

FAST: dict[str, Attack] = {
    "dlg": Dlg(iterations=120, restarts=2),
    "idlg": Idlg(iterations=120, restarts=2),
    "inverting_gradients": InvertingGradients(iterations=200, lr=0.1),
}


def bottom() -> Topology:
    return vanilla(network(), "2")


CONVOLUTIONS: Callable[[], Topology] = lambda: whole(network(convolutional=True))  # noqa: E731


def psnr(run: Run, attack: Attack, client: int = 0, **options: Any) -> tuple[float, float]:
    """Of the prediction and of the mean image."""
    (result,) = run.attack(attack, adversary="fed_server", client=client, **options)
    assert tuple(result.prediction.shape) == tuple(result.truth.shape)
    return result.scores["attack"]["psnr"].mean, result.scores["mean_image"]["psnr"].mean


@pytest.mark.parametrize("name", FAST)
def test_one_row_comes_back_from_convolutions(name: str) -> None:
    prediction, baseline = psnr(trained(CONVOLUTIONS), FAST[name])
    assert prediction > 30 > baseline + 10


@pytest.mark.parametrize("name", ["dlg", "inverting_gradients"])
def test_a_batch_comes_back_in_some_order(name: str) -> None:
    thorough = {"dlg": Dlg(iterations=200, restarts=3)}
    prediction, baseline = psnr(trained(WHOLE, batch=4), thorough.get(name, FAST[name]))
    assert prediction > 30 > baseline + 10


@pytest.mark.parametrize("name", ["dlg", "inverting_gradients"])
def test_the_bottom_of_a_split_model_gives_its_row_away(name: str) -> None:
    """The gradient of a linear layer is an outer product with the row, whatever comes back at the cut."""
    thorough = {"dlg": Dlg(iterations=200, restarts=3)}
    prediction, baseline = psnr(trained(bottom), thorough.get(name, FAST[name]))
    assert prediction > 30 > baseline + 10


def test_a_local_loss_gives_rows_away_like_a_whole_model() -> None:
    prediction, baseline = psnr(trained(bottom, schedule="local_loss"), FAST["dlg"])
    assert prediction > 30 > baseline + 10


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.1}], ids=str)
def test_the_gradient_is_the_clients_own(options: dict[str, float]) -> None:
    """After three rounds: recomputed from the rows of the client and the weights it was sent."""
    run = trained(WHOLE, batch=2, rounds=3, optimizer=sgd(**options))
    view = recorded_view(run.engine, "fed_server", 1)
    local = run.evaluator.grants.local("fed_server", 1)
    assert local is not None
    step = newest_step(view, local)
    model = network()
    model.load_state_dict({n.partition("/")[2]: t for n, t in step.before.items()})
    rows = run.data.clients[1].train
    nn.functional.cross_entropy(model(rows.x), rows.y).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(step.gradient[f"model/{name}"].float(), weight.grad, atol=2e-5), name


def normalized() -> nn.Module:
    """One batch norm in training, one frozen."""
    with stream(0):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 10)
        )
    model[4].eval()
    return model


def test_batch_norm_is_in_the_mode_the_client_had_it_in() -> None:
    """The gradient of the client's own rows and labels is the target, after evaluation has been on the same modules."""
    run = trained(lambda: whole(normalized()), batch=4, rounds=2)
    local = run.evaluator.grants.local("fed_server", 0)
    assert local is not None
    view = recorded_view(run.engine, "fed_server", 0)
    client = ClientGradient(view.segments, local, newest_step(view, local), "cpu")
    rows = run.data.clients[0].train
    found = client.gradient(rows.x.double(), {"out": class_logits(rows.y, 10)}, {})
    for one, other in zip(found, client.target, strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def test_the_fed_server_is_the_default_adversary() -> None:
    (result,) = trained(WHOLE).attack(Idlg(iterations=1, restarts=1))
    assert result.adversary == "fed_server"


def test_every_round_and_client_is_its_own_victim() -> None:
    run = trained(WHOLE, rounds=2)
    for client in range(3):
        truth = run.data.clients[client].train.x
        for number in range(2):
            (result,) = run.attack(FAST["idlg"], adversary="fed_server", client=client, round=number)
            assert torch.equal(result.truth, truth)
            assert torch.allclose(result.prediction, truth, atol=0.05)


def test_an_attack_is_the_same_twice_and_changes_nothing() -> None:
    run, attack = trained(WHOLE), FAST["idlg"]
    before = {n: t.clone() for n, t in run.engine.parties["fed_server"].state.contents().items()}
    one, two = (run.attack(attack, adversary="fed_server")[0].prediction for _ in range(2))
    assert torch.equal(one, two)
    after = run.engine.parties["fed_server"].state.contents()
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_a_fed_server_remembers_what_it_sent() -> None:
    view = trained(WHOLE, rounds=2).engine.view("fed_server")
    rounds = [(m.sender, m.receiver, m.stamp.epoch) for m in view.messages if m.stamp.replica == 2]
    up, down = ("client2", "fed_server"), ("fed_server", "client2")
    assert rounds == [(*down, 0), (*up, 0), (*down, 1), (*up, 1)]


def test_class_counts_by_hand() -> None:
    """p = (.5, .3, .2), four rows of classes 0, 0, 1, 2: the bias has p - y on average (0, .05, -.05)."""
    said = torch.tensor([0.5, 0.3, 0.2])
    assert class_counts(torch.tensor([0.0, 0.05, -0.05]), said, 4).tolist() == [0, 0, 1, 2]
    assert class_counts(torch.tensor([0.5, -0.7, 0.2]), said, 4).tolist() == [1, 1, 1, 1]


def test_assignment_by_hand() -> None:
    truth = torch.tensor([[0.0], [5.0], [9.0]])
    assert assignment(truth, torch.tensor([[8.0], [1.0], [4.0]])).tolist() == [2, 0, 1]
    with pytest.raises(InvalidInput, match=re.escape("truth has shape (3, 1) and prediction (2, 1); expected equal")):
        assignment(truth, truth[:2])


def test_cosine_and_variation_by_hand() -> None:
    """(3, 0, 4) and (3, 0, 0): 9 / (5 * 3). Rows 0 1 / 0 3: across (1, 3) has mean 2, down (0, 2) mean 1."""
    one, other = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.tensor([3.0, 0.0]), torch.tensor([0.0])]
    assert float(cosine(one, other)) == single(0.6)
    assert float(variation(torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]]))) == 3.0
    assert float(variation(torch.rand(2, 5))) == 0.0


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Attack, str]] = {
    "several steps": ({"batch": 4, "batch_size": 2}, {}, Dlg(), "the client takes 2 steps a round"),
    "several epochs": ({"local": splitfed.LocalUpdate(local_epochs=3)}, {}, Dlg(), "the client takes 3 steps a round"),
    "optimizer": ({"optimizer": Optim("Adam", {})}, {}, Dlg(), "optimizer 'Adam' is not allowed here"),
    "nesterov": ({"optimizer": sgd(momentum=0.9, nesterov=True)}, {}, Dlg(), "nesterov=True of SGD is not allowed"),
    "scheduler": (
        {"optimizer": Optim("SGD", {"lr": 0.1}, "StepLR", {"step_size": 1})},
        {},
        Dlg(),
        "the learning rate changes between rounds",
    ),
    "batch of two": (
        {"batch": 2},
        {},
        Idlg(),
        "Idlg derives one class from a gradient; expected a batch of 1 row, the client's has 2",
    ),
    "no loss": ({"make": bottom}, {}, Idlg(), "this client has none: use Dlg"),
    "not recorded": (
        {"logging": splitfed.Logging(record=None)},
        {},
        Dlg(),
        "'fed_server' was not recorded in training",
    ),
    "no such round": (
        {},
        {"round": 7},
        Dlg(),
        "round=7 is not allowed; expected a whole number of at least 0 and at most 0",
    ),
    "no such client": ({}, {"client": 3}, Dlg(), "client=3 is not allowed; expected 0 to 2"),
    "victims": (
        {},
        {"victims": splitfed.data.digits()},
        Dlg(),
        "Dlg targets the client's training rows: leave victims out",
    ),
    "no updates": (
        {"make": bottom, "logging": splitfed.Logging(record=Recording(("client0",)))},
        {"adversary": "client0"},
        Dlg(),
        "Dlg needs weights before and after local training; this run does not grant that",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    training, call, attack, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        trained(**training).attack(attack, **{"adversary": "fed_server", **call})


def test_budgets() -> None:
    assert Dlg.with_budget("full").iterations == 1200
    assert InvertingGradients.with_budget("full") == InvertingGradients(iterations=24_000, lr=0.1, tv=0.2)
    assert Dlg.phase is Phase.TRAINING
