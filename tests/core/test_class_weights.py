"""Weights of classes in the loss: worked out by hand, the same split or not, beside private steps, refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.data.dataset import Dataset
from splitfed.defenses import DpSgd
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from tests.examples import assert_same, toy_data

WEIGHTS = [1.0, 4.0]


def test_the_loss_by_hand() -> None:
    """Scores of nought: every row's cross-entropy is log 2, and rows of class 1 count four times: (1 + 1 + 4) / 3."""
    output, y = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([0, 0, 1])
    assert float(classification(2, WEIGHTS).loss(output, y)) == pytest.approx(2 * math.log(2))
    assert classification(2).loss is functional.cross_entropy


def test_it_is_torchs_times_the_mean_weight_of_the_batch() -> None:
    output, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3
    weights = [0.5, 1.0, 3.0]
    mean = sum(weights) / 3
    theirs = functional.cross_entropy(output, y, torch.tensor(weights, dtype=torch.float64))
    assert float(classification(3, weights).loss(output, y)) == pytest.approx(float(theirs) * mean)


def test_a_row_does_not_depend_on_the_labels_of_others() -> None:
    """Which torch's, divided by the weights in the batch, does."""
    slopes = []
    for labels in ([0, 0, 1], [0, 1, 1]):
        output = torch.zeros(3, 2, requires_grad=True)
        classification(2, WEIGHTS).loss(output, torch.tensor(labels)).backward()
        assert output.grad is not None
        slopes.append(output.grad[0])
    assert torch.equal(*slopes)


def test_class_probabilities_as_targets() -> None:
    """As an attack guesses labels: -sum of w p log q over the classes."""
    output, p = torch.randn(4, 2), torch.rand(4, 2).softmax(1)
    by_hand = -(torch.tensor(WEIGHTS) * p * output.log_softmax(1)).sum(1).mean()
    assert torch.allclose(classification(2, WEIGHTS).loss(output, p), by_hand)


def net() -> nn.Sequential:
    with stream(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def weighted() -> Dataset:
    return replace(toy_data(60), task=classification(10, [1.0 + label for label in range(10)]))


def test_a_split_run_is_the_plain_loop_to_the_bit() -> None:
    data = weighted().clients(1, auxiliary=4, victims=4, seed=0)
    run = sf.train(vanilla(net(), "2"), data, rounds=1, batch_size=8, seed=3, optimizer=sf.Optim("SGD", {"lr": 0.1}))
    plain, rows = net(), data.clients[0].train
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in Training(8, seed=3).batches(len(rows), 0, 0):
        optimizer.zero_grad()
        data.task.loss(plain(rows.x[batch]), rows.y[batch]).backward()
        optimizer.step()
    found = [t for module in run.engine.modules(0).values() for t in module.parameters()]
    assert_same(dict(enumerate(found)), dict(enumerate(plain.parameters())))  # type: ignore[arg-type]


def test_private_steps_take_it_for_the_mean_over_rows_that_it_is() -> None:
    """And refuse torch's, in which a row's gradient depends on the other labels of its batch."""
    private = DpSgd(noise_multiplier=1.0)
    run = sf.train(
        vanilla(net(), "2"),
        weighted().clients(1, auxiliary=4, victims=4),
        defenses=private,
        rounds=1,
        local=sf.LocalUpdate(sampling="poisson"),
    )
    (line,) = run.ledger.lines
    assert 0 < line.epsilon < float("inf")
    torchs = replace(weighted().task, loss=nn.CrossEntropyLoss(torch.arange(1.0, 11.0)))
    data = replace(toy_data(60), task=torchs).clients(1, auxiliary=4, victims=4)
    with pytest.raises(InvalidInput, match="needs a loss that is the mean over the rows"):
        sf.train(vanilla(net(), "2"), data, defenses=private, rounds=1)


def test_a_run_is_resumed_with_its_own_weights_alone(tmp_path: Path) -> None:
    def go(folder: str, data: Dataset, rounds: int = 3, **logging: Any) -> sf.Run:
        return sf.train(
            *(vanilla(net(), "2"), data.clients(1, auxiliary=4, victims=4, seed=0)),
            rounds=rounds,
            batch_size=8,
            logging=sf.Logging(tmp_path / folder, **logging),
        )

    def stop(done: int, rounds: int, metrics: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = go("a", weighted())
    with pytest.raises(KeyboardInterrupt):
        go("b", weighted(), progress=stop)
    again = go("b", weighted(), resume=True)
    for name, module in whole.engine.modules(0).items():
        assert_same(module.state_dict(), again.engine.modules(0)[name].state_dict())
    other = replace(weighted(), task=classification(10, [2.0] * 10))
    for data in (other, toy_data(60)):
        with pytest.raises(InvalidInput, match="holds another run: the task of head '_3' changed since it began"):
            go("b", data, resume=True)


REFUSED: dict[str, tuple[Any, str]] = {
    "balanced": ("balanced", "class_weights='balanced' is not allowed; expected 2 numbers: weights that follow"),
    "number": (2.0, "class_weights=2.0 is not allowed; expected 2 numbers"),
    "too few": ([1.0], "class_weights has 1 numbers; expected one for each of 2 classes"),
    "zero": ([1.0, 0.0], "class_weights[1]=0.0 is not allowed; expected a number in (0, inf)"),
    "not finite": ([1.0, float("nan")], "class_weights[1]=nan is not allowed"),
    "text": ([1.0, "2"], "class_weights[1]='2' is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str) -> None:
    given, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        classification(2, given)
    assert "\n" not in str(caught.value)
