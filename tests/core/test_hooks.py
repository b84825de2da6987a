"""What a step asks of a defense: each method of its own at its turn, and nothing of one that has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.core.defense import Context, Defense, overrides
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.models.mlp import mlp
from splitfed.topologies import vanilla
from tests.examples import engine_of, images

BATCHES = list(torch.arange(12).split(6))


@dataclass(frozen=True)
class Told(Defense):
    """Keeps the names of its methods as they are called."""

    calls: list[str] = field(default_factory=list, compare=False)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        self.calls.append("release")
        return z

    def penalty(self, z: Tensor, context: Context) -> None:
        self.calls.append("penalty")

    def penalty_at_receiver(self, context: Context) -> None:
        self.calls.append("penalty_at_receiver")

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        self.calls.append("gradient")
        return g

    def learn(self, state: Any) -> None:
        self.calls.append("learn")

    def packed(self, kind: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.calls.append(f"packed {kind}")


class Heir(Told):
    """Has nothing of its own, but what `Told` has."""


@dataclass(frozen=True, kw_only=True)
class Given(Defense):
    """Is given its release, so that its class has that of the base."""

    release: Callable[..., Tensor]


class Silent(Defense):
    """Has nothing of its own."""


@dataclass(frozen=True)
class Pull(Defense):
    """Wants all weights small of the segment that reads what came."""

    def penalty_at_receiver(self, context: Context) -> Tensor:
        assert context.module is not None
        return torch.stack([weight.sum() for weight in context.module.parameters()]).sum()


class Teacher:
    """Wants the weights of its party's first segment small."""

    def __init__(self, party: Party) -> None:
        self.segment, self.module = next(iter(party.state.modules.items()))

    def terms(self, made: Any, labels: Any, stamp: Any) -> dict[str, Tensor]:
        return {self.segment: torch.stack([weight.sum() for weight in self.module.parameters()]).sum()}

    def correct(self, modules: Any) -> None:
        pass


def trained(*defenses: Defense, scale: float | None = None, taught: bool = False) -> dict[str, Tensor]:
    x, y = images(12)
    torch.manual_seed(0)
    topology = vanilla(mlp(tuple(x.shape[1:]), 10, (8,)), "relu1")
    engine = engine_of(topology, x, y, optim=Optim("SGD", {"lr": 0.1}), defenses=defenses)
    if taught:
        client = engine.crew.lanes[0].parties["client"]
        client.state.objective = Teacher(client)  # type: ignore[assignment]
    if scale is None:
        engine.train(0, 0, BATCHES)
    else:
        engine.train_together(0, 0, {0: BATCHES[0]}, {0: scale})
    return topology.state_dict(engine.modules(0))


@pytest.mark.parametrize("kind", [Told, Heir])
def test_a_step_calls_what_a_defense_has_or_inherits_from_one(kind: type[Told]) -> None:
    told = kind()
    trained(told)
    once = ("release", "penalty", "penalty_at_receiver", "gradient", "packed activation", "packed gradient")
    # Both ends may keep something that learns.
    assert Counter(told.calls) == dict.fromkeys(once, 2) | {"learn": 4}


def test_a_step_calls_what_a_defense_is_given() -> None:
    given = Given(release=lambda name, z, context: z * 0)
    assert overrides(given, "release")
    assert not overrides(given, "gradient")
    plain, emptied = trained(), trained(given)
    # Nothing comes out of the client, so nothing goes back to what is behind it.
    assert not torch.equal(plain["fc1.weight"], emptied["fc1.weight"])
    assert torch.equal(emptied["fc1.weight"], trained(scale=0.0)["fc1.weight"])


def test_a_step_calls_nothing_of_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained()
    hooks = ("release", "penalty", "penalty_at_receiver", "gradient", "learn", "packed")
    for hook in hooks:
        monkeypatch.setattr(Defense, hook, lambda *_: pytest.fail("called"))
    assert not overrides(Silent(), *hooks)
    assert all(torch.equal(plain[name], weight) for name, weight in trained(Silent()).items())


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_penalty_at_the_receiver_is_weighed_as_its_step_is(scale: float) -> None:
    plain, pulled = trained(scale=scale), trained(Pull(), scale=scale)
    for name in plain:
        moved = 0.0 if name.startswith("fc1") else 0.1 * scale
        torch.testing.assert_close(plain[name] - pulled[name], torch.full_like(plain[name], moved))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_tutors_term_is_weighed_as_its_step_is(scale: float) -> None:
    plain, taught = trained(scale=scale), trained(scale=scale, taught=True)
    for name in plain:
        moved = 0.1 * scale if name.startswith("fc1") else 0.0
        torch.testing.assert_close(plain[name] - taught[name], torch.full_like(plain[name], moved))
