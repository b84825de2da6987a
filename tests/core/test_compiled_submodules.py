"""Submodules that `torch.compile` has wrapped run as they are written, by whoever holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.topologies import u_shaped, vanilla
from tests.core.training_beside import built, check_trains_beside
from tests.thinning import thin


class Compiled(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.a = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=backend)
        self.b = nn.Module()
        self.b.inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), backend=backend)
        self.c = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.c(torch.relu(self.b.inner(self.a(x))))}


def as_written(model: nn.Module, rows: Any) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return model(**rows)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", thin(["eager", "inductor"], 2))
@pytest.mark.parametrize(
    ("builder", "at"), [(vanilla, "a"), (vanilla, "b.inner._orig_mod.0"), (u_shaped, ("a", "b.inner"))]
)
def test_it_trains_as_what_was_compiled(builder: Any, at: Any, backend: str) -> None:
    model, x = built(Compiled, backend), torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    topology = builder(model, at, example=x[:8])
    # No compiler is called by a party; the weights keep their names.
    assert topology.state_dict().keys() == model.state_dict().keys()
    check_trains_beside(model, topology, {"x": x}, call=as_written)
    built(Compiled, backend).load_state_dict(topology.state_dict(), strict=True)
