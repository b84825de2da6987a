"""What a step asks of a defense: each hook of a capability that it inherits at its turn, and nothing else.

A hook that nobody would call is refused where its class is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from splitfed.attacks.base import Attack
from splitfed.core import executor, party, party_state, step_plan
from splitfed.core.defense import (
    _CAPABILITIES,
    Codec,
    Defense,
    GradientDefense,
    LearnedDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
)
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.federated.base import Method
from splitfed.models.mlp import mlp
from splitfed.schedules.base import Schedule
from splitfed.topologies import vanilla
from splitfed.training.callbacks import Callback
from tests.examples import engine_of, images

BATCHES = tuple(torch.arange(12).split(6))


@dataclass(frozen=True)
class Told(ReleaseDefense, PenaltyDefense, ReceiverPenaltyDefense, GradientDefense, LearnedDefense, Codec):
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
class Given(ReleaseDefense):
    """Is given its release, so that its class has that of the capability."""

    release: Callable[..., Tensor]


class Silent(Defense):
    """Offers nothing."""


@dataclass(frozen=True)
class Pull(ReceiverPenaltyDefense):
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


def trained(*defenses: Defense, scale: float | None = None, taught: bool = False, epochs: int = 1) -> dict[str, Tensor]:
    x, y = images(12)
    torch.manual_seed(0)
    topology = vanilla(mlp(tuple(x.shape[1:]), 10, (8,)), "relu1")
    engine = engine_of(topology, x, y, optim=Optim("SGD", {"lr": 0.1}), defenses=defenses)
    if taught:
        client = engine.run_parties.replicas[0].parties["client"]
        client.state.objective = Teacher(client)  # type: ignore[assignment]
    if scale is None:
        for epoch in range(epochs):
            engine.train(0, epoch, BATCHES)
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
    plain, emptied = trained(), trained(given)
    # Nothing comes out of the client, so nothing goes back to what is behind it.
    assert not torch.equal(plain["fc1.weight"], emptied["fc1.weight"])
    assert torch.equal(emptied["fc1.weight"], trained(scale=0.0)["fc1.weight"])


def test_a_step_calls_nothing_of_a_defense_that_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained()
    for hook, capability in _CAPABILITIES.items():
        monkeypatch.setattr(capability, hook, lambda *_: pytest.fail("called"))
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


@pytest.mark.parametrize("hook", _CAPABILITIES)
def test_a_hook_without_its_capability_is_refused(hook: str) -> None:
    """Else a defense of one's own would be asked for nothing, without a word."""
    name = _CAPABILITIES[hook].__name__
    refusal = f"^Mine.{hook} would never be called: inherit {name}, whose hook it is, or give it another name$"
    with pytest.raises(InvalidInput, match=refusal):
        type("Mine", (Defense,), {hook: lambda self, *given: None})
    with pytest.raises(InvalidInput, match=refusal):
        type("Mine", (Defense,), {"__annotations__": {hook: "Callable[..., None]"}})
    with pytest.raises(InvalidInput, match=refusal):
        type("Mine", (type("Mixed", (), {hook: lambda self: None}), Defense), {})
    everything: dict[str, Any] = {h: lambda self, *given: None for h in _CAPABILITIES}
    others = tuple(dict.fromkeys(c for c in _CAPABILITIES.values() if c is not _CAPABILITIES[hook]))
    with pytest.raises(InvalidInput, match=refusal):
        type("Mine", others, {h: everything[h] for h, c in _CAPABILITIES.items() if c in others or h == hook})
    type("Mine", (*others, _CAPABILITIES[hook]), everything)


def test_a_capability_without_its_hook_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^Mine is a ReleaseDefense without 'release': define it$"):
        type("Mine", (ReleaseDefense,), {"relese": lambda self, name, z, context: z})
    assert type("Mine", (Told,), {})().calls == []


@pytest.mark.parametrize(("written", "meant"), [("relese", "release"), ("peek", "peeks"), ("strenght", "strength")])
def test_a_hook_that_is_nearly_called_so_is_refused(written: str, meant: str) -> None:
    refusal = f"^Mine.{written} would never be called: no hook is called so; did you mean '{meant}'"
    for member in (lambda self: None, property(lambda self: None)):
        with pytest.raises(InvalidInput, match=refusal):
            type("Mine", (Told,), {written: member})
    # Parameters, and helpers that begin with _, may be called as they like.
    assert type("Mine", (Told,), {written: 3, f"_{written}": lambda self: None})


@pytest.mark.parametrize(
    ("contract", "name", "arguments"),
    [
        (ReleaseDefense, "release", "name, z, context"),
        (Callback, "on_round_end", "run, metrics"),
        (Attack, "run", "view, knowledge, generator, progress"),
        (Method, "check", "topology, clients"),
        (Schedule, "round", "engine, training, number, state"),
    ],
)
def test_a_method_of_a_contract_that_takes_other_arguments_is_refused(
    contract: type, name: str, arguments: str
) -> None:
    """Else training ends in a `TypeError` in its first step or round."""
    refusal = f"^Mine.{name}\\(one\\) cannot be called; expected {name}\\(self, {arguments}\\)$"
    with pytest.raises(InvalidInput, match=refusal):
        type("Mine", (contract,), {name: lambda self, one: None})
    with pytest.raises(InvalidInput, match="cannot be called"):
        type("Mine", (contract,), {name: lambda self, *given, needed: None})
    type("Mine", (contract,), {name: lambda self, *given, further=None: None})


def test_what_a_defense_does_is_asked_once_and_not_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counting(thing: object, kinds: Any) -> bool:
        asked.extend({kinds}.intersection(_CAPABILITIES.values()))
        return isinstance(thing, kinds)

    for module in (executor, party, party_state, step_plan):
        monkeypatch.setattr(module, "isinstance", counting, raising=False)
    trained(Told(), Pull())
    once = len(asked)
    trained(Told(), Pull(), epochs=3)
    assert len(asked) == 2 * once > 0
