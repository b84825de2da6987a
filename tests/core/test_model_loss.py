"""Losses that a model computes itself, taken out of its `forward` by replay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.core.model_loss import model_task
from splitfed.core.optimizers import Optim
from splitfed.topologies import u_shaped, vanilla
from tests.examples import placed

WORDS, LENGTH, WIDTH, ROWS = 11, 5, 8, 24
OPTIM = Optim("SGD", {"lr": 0.1, "momentum": 0.9})


class Language(nn.Module):
    """Predicts the next word; the first two words are no targets; labels are smoothed and weighted."""

    def __init__(self, loss: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("classes", torch.linspace(0.5, 1.5, WORDS))
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.words(words)
        h = h + self.block(h).relu()
        logits = self.head(h)
        if labels is None:
            return {"logits": logits}
        if self.loss is not None:
            return {"loss": self.loss(self, h, logits, labels), "logits": logits}
        ahead, targets = logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1)
        targets = targets.masked_fill(targets < 2, -100)
        loss = functional.cross_entropy(ahead, targets, weight=self.classes, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


def words(rows: int) -> Tensor:
    return torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def language(loss: Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None = None) -> Language:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Language(loss)


EXAMPLE = {"words": words(8), "labels": words(8)}


@pytest.mark.parametrize("build", [vanilla, u_shaped])
def test_parties_with_the_models_own_loss_train_as_the_uncut_model(build: Any) -> None:
    model = language()
    topology = build(model, "words" if build is vanilla else ("words", "block"), model_task(model, EXAMPLE), words(8))
    uncut, x = copy.deepcopy(model), words(ROWS)
    steps = [chosen for _ in range(3) for chosen in torch.arange(ROWS).split(8)]
    engine = placed(topology, {"words": x}, {h.value: x for h in topology.heads}, optim=OPTIM)
    losses = engine.train(0, 0, steps)
    optimizer, _ = OPTIM.build(list(uncut.parameters()))
    uncut_losses = []
    for chosen in steps:
        optimizer.zero_grad()
        loss = uncut(x[chosen], x[chosen])["loss"]
        loss.backward()
        optimizer.step()
        uncut_losses.append(float(loss.detach()))
    assert losses == uncut_losses
    for name, value in topology.state_dict(engine.modules(0)).items():
        assert torch.equal(value, uncut.state_dict()[name]), name


def test_the_task_computes_the_models_loss_for_any_number_of_rows_and_leaves_the_model_alone() -> None:
    model = language()
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    task = model_task(model, EXAMPLE)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    for rows in (1, 3, 24):
        result = model(words(rows), words(rows))
        assert torch.equal(task.loss(result["logits"], words(rows)), result["loss"])
    assert task.metric(result["logits"], words(24)) == float(result["loss"].detach())
    assert (task.metric_name, task.higher_is_better) == ("loss", False)


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor, Tensor], Tensor], str]] = {
    "another value": (
        lambda m, h, z, y: functional.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.1 * h.square().mean(),
        "the loss of Language reads '.*' besides outputs and labels",
    ),
    "weights": (
        lambda m, h, z, y: functional.cross_entropy(z.flatten(0, 1), y.flatten()) + m.head.weight.square().sum(),
        r"the loss of Language uses weight 'head\.weight'",
    ),
    "random numbers": (
        lambda m, h, z, y: functional.cross_entropy(functional.dropout(z, 0.5).flatten(0, 1), y.flatten()),
        "the loss of Language draws random numbers",
    ),
    "no labels": (lambda m, h, z, y: z.square().mean(), "the loss of Language does not read both outputs and labels"),
    "no scalar": (lambda m, h, z, y: z.mean((1, 2)) + y[:, 0], r"has shape \(8,\); expected \(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_of_more_than_outputs_and_labels_is_refused_in_one_line(case: str) -> None:
    loss, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=text) as caught:
        model_task(language(loss), EXAMPLE)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidInput, match="labels='targets' is not allowed; expected an argument"):
        model_task(language(), EXAMPLE, labels="targets")
    with pytest.raises(InvalidInput, match="unknown output of the model 'logit'; did you mean 'logits'"):
        model_task(language(), EXAMPLE, output="logit")
