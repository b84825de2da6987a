"""Hooks of state dicts: what gives other numbers back is refused by name, what only renames is not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.state_round_trip import check_round_trip
from splitfed.core.topology import Head, Segment, Topology
from splitfed.topologies import vanilla
from tests.examples import refusal


class Net(nn.Module):
    def __init__(self, hook: Callable[[nn.Linear], object] | None = None, layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.a, self.b = layer(4, 4), nn.Linear(4, 2)
        if hook is not None:
            hook(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


class Rounded(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].half().float()


def clamp(module: nn.Module, _: object) -> None:
    module.weight.data.clamp_(-0.6, 0.6)  # type: ignore[operator, union-attr]


def rounded(module: nn.Module, state: OrderedDict[str, Tensor], prefix: str, _: object) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].half().float()


def halved(state: dict[str, Tensor], prefix: str, *_: object) -> None:
    state[f"{prefix}bias"] = state[f"{prefix}bias"] * 0.5


def shifted(module: nn.Module, *_: object) -> None:
    module.bias.data.add_(1.0)  # type: ignore[operator, union-attr]


def rename(layer: nn.Linear) -> None:
    layer._register_state_dict_hook(lambda m, state, p, _: state.update({f"{p}W": state.pop(f"{p}weight")}))
    layer._register_load_state_dict_pre_hook(lambda state, p, *_: state.update({f"{p}weight": state.pop(f"{p}W")}))


CHANGING: dict[str, tuple[Net, str]] = {
    # Numbers of its own it leaves as they are.
    "load_state_dict post-hook": (Net(lambda a: a.register_load_state_dict_post_hook(clamp)), "a.weight"),
    "state_dict hook": (Net(lambda a: a._register_state_dict_hook(rounded)), "a.weight"),
    "load_state_dict pre-hook": (Net(lambda a: a._register_load_state_dict_pre_hook(halved)), "a.bias"),
    "state_dict pre-hook": (Net(lambda a: a.register_state_dict_pre_hook(shifted)), "a.bias"),
    "_save_to_state_dict of its own": (Net(layer=Rounded), "a.weight"),
}
HARMLESS: dict[str, Callable[[nn.Linear], object]] = {
    "renamed": rename,
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "looks": lambda a: a.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("example", [None, torch.randn(8, 4)], ids=["trace", "replay"])
def test_what_comes_back_as_another_tensor_is_refused_by_name(kind: str, example: Tensor | None) -> None:
    model, tensor = CHANGING[kind]
    said = refusal(vanilla, model, "a", example=example)
    assert f"submodule 'a' of Net has a {kind}, with which {tensor!r} comes back" in said
    assert "\n" not in said


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_hooks_are_accepted(kind: str) -> None:
    pass_example(vanilla(Net(HARMLESS[kind]), "a", example=torch.randn(8, 4)), {"x": torch.randn(4, 4)})


def test_modules_without_hooks_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("splitfed.core.state_round_trip.deep_copy")
    check_round_trip(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2)), "a model")


def test_segments_written_by_hand_are_tried_before_training() -> None:
    layer = nn.Linear(4, 2)
    layer.register_load_state_dict_post_hook(clamp)
    segments = (
        Segment("bottom", "client", nn.Linear(4, 4), ("x",), ("h",), "bottom."),
        Segment("top", "server", layer, ("h",), ("out",), "top."),
    )
    topology = Topology("pair", segments, {"x": "client"}, (Head("out", "server", "client"),))
    with pytest.raises(InvalidInput, match="segment 'top' has a load_state_dict post-hook"):
        pass_example(topology, {"x": torch.randn(4, 4)})
