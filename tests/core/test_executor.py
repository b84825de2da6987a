"""A step that is no longer finite stops the run before any weight changes, and says where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.defense import GradientDefense, PenaltyDefense, PenaltyGradient, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.errors import NonFinite
from splitfed.core.optimizers import Optim
from splitfed.engines.local import LocalEngine
from splitfed.topologies import u_shaped, vanilla
from tests.examples import InPlaceAfterCut, SmallUNet, assert_same, engine_of, images

ALL = [torch.arange(8)]


@dataclass(frozen=True, kw_only=True)
class Spoils(ReleaseDefense, GradientDefense, PenaltyDefense):
    """Puts one value that is not finite where it is told to."""

    where: str = "release"
    value: float = float("nan")

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return self._spoil(z) if self.where == "release" else z

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        return self._spoil(g) if self.where == "gradient" else g

    def penalty(self, z: Tensor, context: Context) -> Tensor | PenaltyGradient | None:
        if self.where == "slope":
            return PenaltyGradient(torch.full_like(z, self.value))
        return (z * self.value).sum() if self.where == "penalty" else None

    def _spoil(self, t: Tensor) -> Tensor:
        spoilt = torch.zeros_like(t)
        spoilt[2] = self.value
        return t + spoilt


def weights(engine: LocalEngine) -> dict[str, dict[str, Tensor]]:
    return {n: {k: p.detach().clone() for k, p in m.named_parameters()} for n, m in engine.modules(0).items()}


def stops(engine: LocalEngine, text: str, epoch: int = 4) -> None:
    before = weights(engine)
    with pytest.raises(NonFinite, match=re.escape(text)) as caught:
        engine.train(0, epoch, ALL)
    assert "\n" not in str(caught.value)
    assert_same(weights(engine), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_release_names_parties_edge_and_step(value: float) -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), defenses=[Spoils(value=value)])
    stops(
        engine,
        "activation 'conv' from 'client0' to 'server' on edge 'bottom->top' is not finite at epoch 4, step 0, "
        "replica 0",
    )


def test_a_gradient_names_parties_edge_and_step() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), defenses=[Spoils(where="gradient")])
    stops(engine, "gradient 'conv' from 'server' to 'client0' on edge 'bottom->top' is not finite at epoch 4")


@pytest.mark.parametrize("where", ["penalty", "slope"])
def test_a_penalty_is_caught_before_it_reaches_the_weights(where: str) -> None:
    """It joins the client's loss and never crosses."""
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), defenses=[Spoils(where=where)])
    stops(engine, "client0")


def test_weights_that_are_no_number_are_found_at_the_first_message() -> None:
    engine = engine_of(u_shaped(SmallUNet(), ("pool1", "up2")), *images(8))
    with torch.no_grad():
        next(engine.modules(0)["middle"].parameters())[0] = float("nan")
    before = {n: t for n, t in weights(engine).items() if n != "middle"}
    with pytest.raises(NonFinite, match="activation 'up2' from 'server' to 'client0' on edge 'middle->head'"):
        engine.train(0, 0, ALL)
    assert_same({n: t for n, t in weights(engine).items() if n != "middle"}, before)


def test_the_loss_alone_is_named() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8))
    with torch.no_grad():
        engine.modules(0)["top"].fc2.bias.fill_(float("inf"))
    with pytest.raises(NonFinite, match=r"'fc2' .*at epoch 0, step 0, replica 0|on edge 'bottom->top'"):
        engine.train(0, 0, ALL)


def test_a_huge_rate_diverges_loudly() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), optim=Optim("SGD", {"lr": 1e30}))
    with pytest.raises(NonFinite, match=r"is (not finite|nan|inf) at epoch 0, step \d, replica 0"):
        engine.train(0, 0, ALL * 5)


def test_large_but_finite_values_go_on() -> None:
    """Their sum overflows a float; none of them does."""

    @dataclass(frozen=True, kw_only=True)
    class Shift(ReleaseDefense):
        def release(self, name: str, z: Tensor, context: Context) -> Tensor:
            return z + 1e38

    class Tame(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.squash, self.fc = nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Linear(6 * 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.squash(self.conv(x)).flatten(1))

    engine = engine_of(vanilla(Tame(), "conv"), *images(8), defenses=[Shift()])
    (loss,) = engine.train(0, 0, ALL)
    assert 0 < loss < 10


def test_what_arrives_is_what_the_link_returns() -> None:
    """A link that doubles activations doubles what the server computes on, and nothing else."""
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8))
    inner: Callable[..., object] = engine.link.deliver

    def deliver(message: object) -> object:
        doubled: Mapping[str, Tensor] = {n: 2.0 * t for n, t in message.tensors.items()}  # type: ignore[attr-defined]
        return inner(
            type(message)(message.sender, message.receiver, message.kind, message.edge, doubled, message.stamp)
        )  # type: ignore[call-arg, attr-defined]

    plain = engine.predict(0, "train", "evaluate").outputs["fc2"]
    engine.link.deliver = deliver  # type: ignore[method-assign, assignment]
    found = engine.predict(0, "train", "evaluate").outputs["fc2"]
    top = engine.modules(0)["top"].eval()
    with torch.no_grad():
        z = engine.modules(0)["bottom"](images(8)[0])
        assert torch.equal(found, top(2.0 * z))
    assert not torch.equal(found, plain)
