"""`cut="auto"`: the rule by hand, what it does without an example, and that the builders take what it gives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.cut_places import CutPlace, CutValue
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.models.lenet import lenet
from splitfed.models.mlp import mlp
from splitfed.topologies import multi_hop, u_shaped, vanilla
from splitfed.topologies.auto_cuts import CLIENT_SHARE, rank_cuts, with_auto_cuts
from splitfed.training.entry_point import train
from splitfed.training.run import Run
from splitfed.training.settings import Logging
from tests.core.test_cut_places import seeded
from tests.examples import assert_refuses, images, toy_data

LENET = lenet((1, 8, 8), 10)
ROWS = images(8)[0]


class Blocks(nn.Module):
    """Four equal blocks in a list, behind an embedding that does little."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(h)
        return out


class Jumping(nn.Module):
    """What `first` returns is read again behind `second`, where 6 + 2 numbers cross; behind `third` 12 do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(8, 12)
        self.fourth, self.last = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.last(self.fourth(self.third(torch.cat([self.second(h), h], 1))))
        return out


def cuts_of(topology: Topology) -> tuple[str, ...]:
    """The submodules that the topology was cut after."""
    original = topology.segments[0].original
    assert original is not None
    return original.cuts


def test_vanilla_takes_the_narrowest_place_in_the_first_half_of_the_work() -> None:
    """8x8 pixels: behind `pool1` 96 floats a row and 14 % of the work; `fc2` is narrower, with nearly all of it."""
    topology = vanilla(LENET, "auto", example=ROWS)
    assert cuts_of(topology) == ("pool1",)
    assert topology.cut_choice == (
        "auto cut after 'pool1': of 11 possible places to depth 1 with a weight at every party and at most 50% of the "
        "multiply-adds at the client (14.4% here), the fewest bytes a row (768 both ways)"
    )
    assert vanilla(LENET, "pool1", example=ROWS).cut_choice == ""


def test_of_equals_the_latest_is_taken_and_lists_of_blocks_are_opened() -> None:
    """24 products before the blocks, 64 in each, 16 behind them: two blocks are 152 of 296, more than half."""
    assert cuts_of(vanilla(seeded(Blocks), "auto", example=torch.rand(8, 3))) == ("blocks.0",)
    # `0.embed` is as narrow; the list behind it lies deeper than is looked at else.
    inside = seeded(lambda: nn.Sequential(Blocks(), nn.Linear(2, 2)))
    assert cuts_of(vanilla(inside, "auto", example=torch.rand(8, 3))) == ("0.blocks.0",)


class Wrapped(nn.Module):
    """The blocks lie two submodules deep, within one that is called as a whole and does nearly all of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def test_a_submodule_that_does_most_of_the_work_is_opened() -> None:
    """24 products, 64 in each of four, 16: one block is 88 of 296, two are more than half."""
    assert cuts_of(vanilla(seeded(Wrapped), "auto", example=torch.rand(8, 3))) == ("body.1.0.0",)


@pytest.mark.exhaustive
def test_where_no_place_is_light_the_lightest_is_taken() -> None:
    """64 x 12 products of 888 are in the first layer."""
    topology = vanilla(mlp((1, 8, 8), 10, hidden=(12,)), "auto", example=ROWS)
    assert cuts_of(topology) == ("relu1",)
    assert "the fewest multiply-adds at the client (86.5%, none leaves it at most 50%)" in topology.cut_choice


@pytest.mark.exhaustive
def test_several_cuts_are_chosen_together() -> None:
    """67 thousand products: `conv2` has 38 thousand, so that no client can hold the half with it at either end."""
    two = u_shaped(LENET, "auto", example=ROWS)
    assert [s.role for s in two.segments] == ["client", "server", "client"]
    hops = multi_hop(LENET, "auto", ("client", "a", "b", "server"), example=ROWS)
    assert [s.role for s in hops.segments] == ["client", "a", "b", "server"]
    ends = multi_hop(LENET, "auto", labels="client", example=ROWS)
    assert [s.role for s in ends.segments] == ["client", "hop1", "server", "client"]
    assert (cuts_of(two), cuts_of(hops), cuts_of(ends)) == (
        ("pool1", "pool2"),
        ("pool1", "pool2", "fc2"),
        ("pool1", "pool2", "fc2"),
    )


def test_a_choice_that_the_builder_refuses_gives_way_to_the_next() -> None:
    model, x = seeded(Jumping), torch.rand(8, 6)
    refused: list[tuple[str, ...]] = []

    def build(names: tuple[str, ...]) -> Topology:
        if not refused:
            refused.append(names)
            raise InvalidInput("not these")
        return multi_hop(model, names, example=x)

    assert cuts_of(with_auto_cuts(model, x, 2, build)) == ("first", "third")
    assert refused == [("first", "second")]
    assert cuts_of(multi_hop(model, "auto", example=x)) == ("first", "second")


def test_a_run_goes_on_under_the_name_that_was_chosen_and_the_other_way_round(tmp_path: Path) -> None:
    data = toy_data(60).clients(1, auxiliary=4, victims=4)

    def go(cut: str, folder: str, rounds: int, **given: Any) -> Run:
        topology = vanilla(mlp((1, 8, 8), 10, hidden=(12,)), cut, example=ROWS)
        return train(topology, data, rounds=rounds, logging=Logging(tmp_path / folder, **given))

    def stop(done: int, rounds: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    for first, second in (("auto", "relu1"), ("relu1", "auto")):
        with pytest.raises(KeyboardInterrupt):
            go(first, first, 2, progress=stop)
        run = go(second, first, 2, resume=True)
        assert len(run.history) == 2
        assert bool(run.engine.topology.cut_choice) == (second == "auto")


def place(name: str, nbytes: int, weights: tuple[int, int], work: tuple[int, int]) -> CutPlace:
    values = (CutValue(name, (nbytes,), torch.int8, False),)
    return CutPlace(name, method="trace", values=values, parameters=weights, multiply_adds=work)


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("client_ends", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_choices_come_in_the_order_of_the_rule(count: int, client_ends: bool, limited: bool) -> None:
    """Against all combinations, sorted: ten places with few different sizes, so that many are equal."""
    draws = random.Random(count)
    work, weights = [sorted(draws.choices(range(6), k=10)) for _ in range(2)]
    places = [
        place(f"p{i}", draws.randrange(1, 4), (weights[i], 5 - weights[i]), (work[i], 5 - work[i])) for i in range(10)
    ]
    places.insert(4, CutPlace("refused", refusal="no"))

    def allowed(chosen: tuple[int, ...]) -> bool:
        held = [0, *(weights[i] for i in chosen), 5]
        return all(a < b for a, b in itertools.pairwise(held)) and (
            not limited or load(chosen) <= floor(5 * CLIENT_SHARE)
        )

    def load(chosen: tuple[int, ...]) -> int:
        return work[chosen[0]] + (5 - work[chosen[-1]]) * client_ends

    def key(chosen: tuple[int, ...]) -> Any:
        sent, mine = sum(places[i + (i >= 4)].bytes for i in chosen), load(chosen)
        return ((sent, -mine) if limited else (mine, sent), -chosen[0], chosen[1:])

    expected = sorted(filter(allowed, itertools.combinations(range(10), count)), key=key)
    found = [tuple(p.name for p in chosen) for chosen in rank_cuts(places, count, client_ends, limited=limited)]
    assert found == [tuple(f"p{i}" for i in chosen) for chosen in expected]
    assert limited or count > 2 or found


def named_auto() -> nn.Module:
    model = nn.Sequential()
    for name in ("first", "auto", "last"):
        model.add_module(name, nn.Linear(4, 4))
    return model


def test_a_submodule_of_that_name_goes_before() -> None:
    assert cuts_of(vanilla(seeded(named_auto), "auto")) == ("auto",)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "vanilla": (lambda: vanilla(LENET, "auto"), "cut='auto' tries the places of the model on rows of its input; pass"),
    "u_shaped": (lambda: u_shaped(LENET, "auto"), "cuts='auto' tries the places of the model on rows of its input"),
    "multi_hop": (lambda: multi_hop(LENET, "auto"), "cuts='auto' tries the places of the model on rows of its input"),
    "no place": (
        lambda: vanilla(mlp((1, 8, 8), 10, hidden=()), "auto", example=ROWS),
        "cut='auto' finds no place in Mlp with a weight at every party; name the cuts yourself",
    ),
    "roles": (
        lambda: multi_hop(LENET, "auto", ("client", "server"), example=ROWS),
        "roles=('client', 'server') is not allowed; expected at least 3 different roles",
    ),
    "word": (lambda: u_shaped(LENET, "automatic", example=ROWS), "cuts='automatic' is not allowed; expected an even"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_chosen_is_one_line(case: str) -> None:
    assert_refuses(*REFUSED[case])
