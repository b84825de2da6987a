"""What stands beside a private release: what mixes rows makes all releases count, what looks again is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense, Terms
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Stamp
from splitfed.core.row_independence import mixes_rows
from splitfed.core.step_plan import segment_plans
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses import DpSgd, GaussianRelease, LaplaceRelease, Latent, Mid, Noise, Shredder
from splitfed.defenses.row_gradients import check_rowwise
from splitfed.privacy.charges import PartyCounts, charges
from splitfed.privacy.exposures import find_exposures
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.privacy.ledger import make_ledger
from splitfed.privacy.row_mixing import release_mixes
from splitfed.topologies import vanilla

PRIVATE = GaussianRelease(noise_multiplier=4.0)


class Centred(nn.Module):
    """Subtracts the mean of the batch, without a weight or a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Running(nn.Module):
    """Keeps a mean of what it has seen, which no row of this batch is changed by."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return y


class Hidden(nn.Module):
    """Subtracts a row of its last batch, kept where `state_dict` does not look: see `place`."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.kept: list[Tensor] = []
        self.register_buffer("last", torch.zeros(6), persistent=place == "stored")
        outside: list[Tensor] = []
        self.outside = lambda: outside

    def forward(self, x: Tensor) -> Tensor:
        if self.place in ("stored", "buffer"):
            y = x - self.last
            self.last = x[0].detach().clone()
            return y
        held = self.outside() if self.place == "closure" else self.kept
        y = x - held[-1] if held else x
        held.append(x[0].detach().clone())
        return y


class Memory:
    """Answers with what it was asked last, and shows no attribute."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, row: Tensor) -> Tensor:
        before, self._last = self._last, row.detach().clone()
        return torch.zeros_like(row) if before is None else before


class Asks(nn.Module):
    """Keeps rows in an object that nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def forward(self, x: Tensor) -> Tensor:
        return x - self.memory(x[0])


class Diary(nn.Module):
    """Keeps what it has seen and does nothing with it."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().mean()
        return x.tanh()


class Gated(nn.Module):
    """Mixes rows where numbers are large, or where some are negative, alone."""

    def __init__(self, negative: bool) -> None:
        super().__init__()
        self.negative = negative

    def forward(self, x: Tensor) -> Tensor:
        mixes = bool((x < 0).any()) if self.negative else float(x[1:].max()) > 50
        return x - x.mean(0) if mixes else x


class Counter(nn.Module):
    """Counts its batches in an attribute: no row shows in that."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        self.mask = torch.ones_like(x) if self.mask is None else self.mask
        return x * self.mask


REMEMBER: dict[str, Callable[[], nn.Module]] = {
    "a stored buffer": lambda: Hidden("stored"),
    "a buffer that is not stored": lambda: Hidden("buffer"),
    "an attribute": lambda: Hidden("attribute"),
    "a closure": lambda: Hidden("closure"),
    "an object that shows nothing": Asks,
    "an attribute that nobody reads": Diary,
    "large numbers alone": lambda: Gated(False),
    "negative numbers alone": lambda: Gated(True),
}


@pytest.mark.parametrize("front", REMEMBER.values(), ids=list(REMEMBER))
def test_a_row_that_is_remembered_or_mixed_only_sometimes_is_found(front: Callable[[], nn.Module]) -> None:
    topology, facts, _ = made(front())
    assert mixes_rows(topology, facts, {topology.segments[0].name})
    with pytest.raises(InvalidInput, match="dp_sgd cannot train"):
        check_rowwise(topology, facts, topology.roles[1:])


def test_what_no_row_changes_may_be_kept() -> None:
    topology, facts, _ = made(Counter())
    assert not mixes_rows(topology, facts, {topology.segments[0].name})
    check_rowwise(topology, facts, topology.roles[1:])


def test_rows_in_a_hidden_buffer_cost_what_they_cost_in_a_stored_one() -> None:
    """Half the epsilon, or a twentieth, was charged where the buffer is not part of the state."""
    counts = PartyCounts("client0", "client", 0, {("0->1", 0, 0, "train"): torch.tensor([2, 1, 3])})
    found = []
    for place in ("stored", "buffer"):
        topology, facts, edge = made(Hidden(place))
        named = counts._replace(counts={(edge, 0, 0, "train"): next(iter(counts.counts.values()))})
        (charge,) = charges([topology], [facts], (PRIVATE,), [named], [], False)
        found.append(make_ledger([charge], 1e-5).totals[0].epsilon)
    assert found[0] == found[1] == pytest.approx(gaussian_epsilon(4.0 / 6**0.5, 1e-5))


def made(front: nn.Module) -> tuple[Topology, TopologyFacts, str]:
    topology = vanilla(nn.Sequential(nn.Tanh(), nn.Linear(6, 3)), "0", sent_inputs=("input",)).with_task(
        classification(3)
    )
    bottom, top = topology.segments
    topology = replace(topology, segments=(replace(bottom, module=front), top))
    (edge,) = topology.crossings
    return topology, pass_example(topology, {next(iter(topology.inputs)): torch.rand(4, 6)}), edge.name


@pytest.mark.parametrize(
    ("front", "mixes"),
    [
        (nn.Tanh(), False),
        (nn.Dropout(0.5), False),
        (nn.BatchNorm1d(6), True),
        (nn.Sequential(nn.BatchNorm1d(6).eval(), nn.Tanh()), False),
        (Centred(), True),
        (Running(), True),
    ],
    ids=["rowwise", "dropout", "batch norm", "frozen batch norm", "centred", "running"],
)
def test_segments_that_mix_are_found(front: nn.Module, mixes: bool) -> None:
    topology, facts, _ = made(front)
    assert mixes_rows(topology, facts, {topology.segments[0].name}) is mixes


def test_attention_across_the_batch_is_found() -> None:
    """Read as (length, batch, width) by mistake, rows attend to each other."""
    for first, mixes in ((True, False), (False, True)):
        front = nn.TransformerEncoderLayer(4, 1, 8, batch_first=first)
        top = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        topology = vanilla(nn.Sequential(front, top), "0", sent_inputs=("input",)).with_task(classification(3))
        facts = pass_example(topology, {next(iter(topology.inputs)): torch.rand(4, 3, 4)})
        assert mixes_rows(topology, facts, {topology.segments[0].name}) is mixes


@pytest.mark.parametrize(
    ("defense", "mixes"),
    [(Noise(0.1), False), (Noise(0.1, relative=True), True), (PRIVATE, False), (LaplaceRelease(), False)],
    ids=["noise", "relative noise", "gaussian", "laplace"],
)
def test_releases_that_mix_are_found(defense: Defense, mixes: bool) -> None:
    topology, facts, edge = made(nn.Tanh())
    assert release_mixes(defense, topology, facts, edge) is mixes


@pytest.mark.parametrize(
    ("front", "before", "learns"),
    [(nn.Tanh(), Noise(0.1), False), (nn.Tanh(), Noise(0.1, relative=True), True), (Centred(), Noise(0.1), True)],
    ids=["rowwise", "relative noise before it", "centred rows"],
)
def test_what_mixes_before_the_mechanism_costs_all_releases(front: nn.Module, before: Defense, learns: bool) -> None:
    topology, facts, edge = made(front)
    counts = PartyCounts("client0", "client", 0, {(edge, 1, 0, "train"): torch.tensor([2, 1])})
    (charge,) = charges([topology], [facts], (before, PRIVATE), [counts], [], False)
    assert (charge.learns, charge.travels) == (learns, False)
    first = counts._replace(counts={(edge, 0, 0, "train"): torch.tensor([2, 1])})
    (after,) = charges([topology], [facts], (PRIVATE, before), [first], [], False)
    assert after.learns is isinstance(front, Centred), "what comes after it only processes what was released"


@pytest.mark.parametrize("again", [Mid(), Shredder()], ids=["mid", "shredder"])
def test_nothing_that_looks_at_the_row_again_may_stand_behind_it(again: Defense) -> None:
    topology, facts, edge = made(nn.Tanh())
    text = f"{type(again).__name__} cannot stand behind GaussianRelease on edge {edge!r}"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        segment_plans(topology, facts, (PRIVATE, again))
    segment_plans(topology, facts, (again, PRIVATE))


def test_latent_is_charged_for_the_value_it_costs_most_at() -> None:
    """x = epsilon / bits: ten bits at x = 1 cost 10 log((1 + e)/2) = 6.20; a thousand at 1/100 cost 5.01."""
    topology, facts, edge = made(nn.Tanh())
    defense = Latent(epsilon=10.0, form="unary")
    (value,) = topology.edge(edge).values
    sizes = [replace(facts, shapes={**facts.shapes, value: (bits,)}) for bits in (1000, 10)]
    terms = Terms((topology,) * 2, tuple(sizes), (), (9, 9), 3, False, (3, 3), (1, 1), lambda *given: 1.0)
    mechanism = defense.calibrate(terms).event().mechanism
    assert getattr(mechanism, "epsilon", None) == pytest.approx(6.2011, abs=1e-4)


def test_latent_sends_bits_whatever_it_is_handed() -> None:
    z = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)) * 1.7
    sent = Latent(epsilon=3.0).release("z", z, Context("client0", "a->b", Stamp("train", 0, 0, 0), 0, 0))
    assert set(sent.unique().tolist()) == {0.0, 1.0}


def test_norms_and_weights_without_noise_are_open() -> None:
    topology, facts, _ = made(nn.Linear(6, 6))
    (client, server) = topology.roles
    terms = Terms((topology,), (facts,), (), (9,), 3, False, (3,), (1,), lambda *given: 1.0)
    noisy, bare = (DpSgd(noise_multiplier=m, clip="joint").calibrate(terms) for m in (1.0, 0.0))
    told = find_exposures(topology, (noisy,), (), True)
    assert f"norms of each row's gradient ({client} to {server})" in told
    assert f"weights of {client}" not in told
    assert f"weights of {client}" in find_exposures(topology, (bare,), (), True)
