"""Branches behind the last cut: their party goes by its own numbers, as the uncut model does, on ways never planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Topology
from splitfed.topologies import u_shaped, vanilla
from tests.core.idioms import DECAY, train
from tests.examples import engine_of
from tests.thinning import thin

LARGE = 0.5
"""Activations of half of the rows are larger, of the others all are smaller."""


class Branching(nn.Module):
    """Goes one way for large activations and another for small ones, which `small` says."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.skip = nn.Linear(8, 8)
        self.factor, self.table = 1.5, [2.0]
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        r = torch.relu(self.a(x))
        h = self.b(r)
        if h.max() > LARGE:
            return self.c(h)
        return self.small(x, r, h)

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(h * 2)


class OfOtherWeights(Branching):
    """Reads a weight that was registered before the others, and plain attributes, in one case alone."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.d(torch.tanh(h) * self.factor) * self.table[0]


class WithABuffer(Branching):
    """Counts in one case alone."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        self.calls += 1
        return self.c(h / self.calls)


class AMaskOfTheSender(Branching):
    """Reads in one case alone what an earlier party has made, without a gradient."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(h * (r > 0.1))


class Skipping(Branching):
    """Reads in one case alone what an earlier party has made, of weights that learn in every case."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(h + r)


class OtherWayRound(Branching):
    """Reads it in the other case alone."""

    def forward(self, x: Tensor) -> Any:
        r = torch.relu(self.a(x))
        h = self.b(r)
        return self.c(h + r) if h.max() > LARGE else self.c(h)


class Counted(Branching):
    """Goes another way after a dozen steps."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        self.calls += 1
        if self.calls > 12:
            h = torch.tanh(h) * self.factor
        return {"logits": self.c(h)}


class AsOftenAsLarge(Branching):
    """Repeats an operation as often as a number says."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        for _ in range(int(h.abs().max().item() * 4)):
            h = torch.tanh(h) * self.factor
        return self.c(h)


class Experts(Branching):
    """Sends rows to experts, of which some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        chosen, out = self.gate(h * 5).argmax(-1), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(h[rows]))
        return self.c(out)


class ExpertsByMasks(Experts):
    """Asks for each expert whether there are rows."""

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        chosen, out = self.gate(h * 5).argmax(-1), torch.zeros_like(h)
        for number in range(3):
            if (rows := chosen == number).any():
                out[rows] = self.experts[number](h[rows])
        return self.c(out)


EXACT = [
    Branching,
    OfOtherWeights,
    WithABuffer,
    AMaskOfTheSender,
    Skipping,
    OtherWayRound,
    Counted,
    AsOftenAsLarge,
    Experts,
    ExpertsByMasks,
]


def rows() -> Tensor:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    return torch.cat([x[:12] * 3, x[12:] * 0.01])


def made(kind: type[Branching]) -> Branching:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind()


def cut(kind: type[Branching], ends: str, example: Tensor) -> Topology:
    model = made(kind)
    found = u_shaped(model, ("a", "b"), example=example) if ends == "both" else vanilla(model, "a", example=example)
    assert all(isinstance(segment.module, ReplayedSegment) for segment in found.segments)
    return found


STEPS = [chosen for _ in range(6) for chosen in torch.arange(24).split(8)]


@pytest.mark.parametrize(("ends", "first"), thin([("one", 0), ("both", 0), ("one", 16), ("both", 16)], 3))
@pytest.mark.parametrize("kind", thin(EXACT, 4))
def test_a_branch_behind_the_last_cut_trains_as_uncut(kind: type[Branching], ends: str, first: int) -> None:
    x, y, whole = rows(), torch.arange(24) % 4, made(kind)
    topology = cut(kind, ends, x[first : first + 8])
    engine = engine_of(topology, x, y, optim=DECAY)
    engine.train(0, 0, STEPS)
    train(whole, x, y, STEPS)
    state = topology.state_dict(engine.modules(0))
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name


class OfAWeightOfItsOwn(Branching):
    """Reads in one case alone what comes of a weight that nothing else reads."""

    def forward(self, x: Tensor) -> Any:
        s, h = self.skip(x), self.b(torch.relu(self.a(x)))
        return self.c(h) if h.max() > LARGE else self.c(h + s)


class OfNothing(Branching):
    """Gives up where activations are small."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return torch.zeros(len(x), 4)


class OfWeightsOfTheSender(Branching):
    """Reads a weight of the sender in one case alone."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(h @ self.a.weight)


class OfTheInput(Branching):
    """Reads the input in one case alone."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(h + x)


@pytest.mark.parametrize(
    ("kind", "ends", "text"),
    [
        (OfAWeightOfItsOwn, "both", r"reads 'skip' behind the last cut in some batches only.*'__bool__'"),
        (OfWeightsOfTheSender, "one", r"'a\.weight' would be shared by roles"),
        (OfTheInput, "one", "reads 'x', raw data of role 'client'"),
    ],
)
def test_what_one_case_needs_of_others_is_refused_before_training(kind: type[Branching], ends: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        pass_example(cut(kind, ends, rows()[:8]), {"x": rows()[:8]})


class OfAList(AsOftenAsLarge):
    """Reads a list for some numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        # Whoever holds something of a module keeps of it what its code names.
        del self.calls

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.relu(self.a(x)))
        return self.c(h * self.table[0]) if int(h.max().item() / LARGE) < 1 else self.c(h)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OfNothing, "behind the last cut than with its example, and does not read there 'a'"),
        (OfAList, "needs there what its party does not hold .*'table'"),
    ],
)
def test_what_shows_in_training_alone_is_one_error_that_names_it(kind: type[Branching], text: str) -> None:
    x, y = rows(), torch.arange(24) % 4
    engine = engine_of(cut(kind, "one", x[:8]), x, y, optim=DECAY)
    with pytest.raises(InvalidInput, match=rf"{text}.*cut with an example whose rows take that way"):
        engine.train(0, 0, STEPS)


class Dropping(Branching):
    """Draws in one case alone."""

    def small(self, x: Tensor, r: Tensor, h: Tensor) -> Any:
        return self.c(functional.dropout(h, 0.5, self.training))


def test_a_party_that_draws_in_one_case_alone_draws_from_its_own_stream() -> None:
    x = rows()
    assert pass_example(cut(Dropping, "one", x[:8]), {"x": x[:8]}).stochastic == {"top"}
