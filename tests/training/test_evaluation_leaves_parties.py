"""Scores, predictions and observations leave parties as they were, also of models that write into themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize

import splitfed as sf
from splitfed.attacks.base import Phase
from splitfed.core.evaluation_changes import StateWatch, left_as_they_were
from splitfed.core.example_pass import pass_example
from splitfed.data import from_arrays
from splitfed.topologies import vanilla
from tests.examples import assert_same

ROWS, CLASSES = 60, 3


class Bag(nn.Module):
    """Its lookups shorten the vectors that they read, in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f, self.c = nn.Embedding(30, 8, max_norm=1.0), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.f(self.e(x).mean(1))))  # type: ignore[no-any-return]


class Counter(nn.Module):
    """Counts its calls in a buffer that it replaces, and subtracts a mean that it moves in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean - 0.01 * self.calls


class Observed(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.a, self.e, self.b, self.c = nn.Linear(6, 8), inner(), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.e(self.a(x)))))  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "embedding": (Bag, "f"),
    "fake quantize": (lambda: Observed(FakeQuantize), "e"),
    "buffer and attribute": (lambda: Observed(Counter), "b"),
}


def rows(kind: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (ROWS,), generator=random)
    if kind == "embedding":
        return torch.randint(30, (ROWS, 5), generator=random), y
    return torch.randn(ROWS, 6, generator=random), y


def trained(kind: str, rounds: int, **options: Any) -> sf.Run:
    x, y = rows(kind)
    made = from_arrays(x, y, task=sf.classification(CLASSES), dtype="int64" if kind == "embedding" else "float32")
    make, cut = MODELS[kind]
    torch.manual_seed(0)
    topology = vanilla(make(), cut, example=x[:8])
    return sf.train(
        topology,
        made.clients(1, auxiliary=4, victims=8),
        rounds=rounds,
        batch_size=16,
        optimizer=sf.Optim("SGD", {"lr": 0.3}),
        seed=0,
        **options,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_that_is_asked_goes_on_as_one_that_is_not(kind: str) -> None:
    expected = trained(kind, 3, evaluation=sf.Evaluation(every=3))
    asked = trained(kind, 1)
    state, own = asked.state_dict(0), asked.engine.state()["parties"]
    answer = asked.predict(rows(kind)[0], number=0)
    asked.observe("server")
    asked.observe("server", phase=Phase.STEP)
    assert_same(asked.state_dict(0), state)
    assert_same(
        {name: one["segments"] for name, one in asked.engine.state()["parties"].items()},
        {name: one["segments"] for name, one in own.items()},
    )
    assert torch.equal(asked.predict(rows(kind)[0], number=0), answer)
    asked.continue_training(2)
    assert_same(asked.state_dict(0), expected.state_dict(0))


class Wide(Bag):
    """Has a class for every row, by which a row is known."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, ROWS)


def test_a_run_equals_a_loop_that_only_trains() -> None:
    order: list[Tensor] = []

    def loss(output: Tensor, n: Tensor) -> Tensor:
        if output.requires_grad:
            order.append(n.clone())
        return nn.functional.cross_entropy(output, n)

    x, _ = rows("embedding")
    task = sf.classification(ROWS).with_loss(loss)
    torch.manual_seed(0)
    topology = vanilla(Wide(), "f", example=x[:8], task=task)
    data = from_arrays(x, torch.arange(ROWS), task=task, dtype="int64").clients(1, auxiliary=0, victims=0)
    optimizer = sf.Optim("SGD", {"lr": 0.3})
    run = sf.train(topology, data, rounds=2, batch_size=16, optimizer=optimizer, seed=0)
    torch.manual_seed(0)
    model = Wide().train()
    uncut = torch.optim.SGD(model.parameters(), lr=0.3)
    # The first ones are tried out before training.
    for n in order[-sum(entry["steps"] for entry in run.history) :]:
        uncut.zero_grad()
        nn.functional.cross_entropy(model(x[n]), n).backward()
        uncut.step()
    assert_same(run.state_dict(0), dict(model.state_dict()))


def test_the_probe_names_the_segments_that_write_in_evaluation() -> None:
    for kind, (make, cut) in MODELS.items():
        x = rows(kind)[0][:4]
        topology = vanilla(make(), cut, example=rows(kind)[0][:8])
        assert pass_example(topology, {"x": x}).changed_in_evaluation == {"bottom"}
    plain = vanilla(Observed(lambda: nn.BatchNorm1d(8)), "e")
    assert not pass_example(plain, {"x": rows("")[0][:4]}).changed_in_evaluation


def test_what_is_written_without_a_new_version_is_seen_and_all_is_put_back() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen, self.steps = nn.Parameter(torch.ones(2)), [torch.zeros(1)], 0
            self.register_buffer("history", torch.zeros(1))

    for write in (
        lambda m: m.weight.data.add_(1.0),
        lambda m: m.history.resize_(3),
        lambda m: m.seen.append(torch.ones(1)),
        lambda m: m.seen[0].add_(1.0),
        lambda m: setattr(m, "steps", 1),
        lambda m: setattr(m, "history", torch.zeros(1)),
    ):
        module = Writes()
        watch = StateWatch(module, Writes())
        assert not watch.changed()
        with left_as_they_were([module]):
            write(module)
            assert watch.changed()
        assert module.weight.tolist() == [1.0, 1.0]
        assert module.history.tolist() == [0.0]
        assert module.steps == 0
        assert len(module.seen) == 1
        assert module.seen[0].tolist() == [0.0]
