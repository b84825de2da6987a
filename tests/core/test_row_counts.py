"""A `forward` that goes by the number of rows is exact, or refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.replay import ReplayedSegment
from splitfed.planning.batch_counts import check_ways
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from tests.thinning import thin


class ByRows(nn.Module):
    """Behind the cut at `b`, what `odd` says of the number of rows decides what is done."""

    def __init__(self, odd: Callable[[int, bool], bool]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.odd = nn.LayerNorm(8), odd

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(self.other(h) if self.odd(len(h), self.training) else self.norm(h))

    def other(self, h: Tensor) -> Tensor:
        return h


class BeforeTheCut(ByRows):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(torch.relu(self.b(self.other(h) if self.odd(len(h), self.training) else self.norm(h))))


class OtherTensor(ByRows):
    """The same operations in both cases; in the odd one of them reads what the other party holds."""

    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.a(x))
        late = torch.relu(self.b(early))
        return self.c((early if self.odd(len(x), self.training) else late) * 2)


class OtherNumber(ByRows):
    """The same operations on the same tensors, with another number."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(h * (2.0 if self.odd(len(h), self.training) else 3.0))


class ByNumbersToo(ByRows):
    """Numbers in a tensor lead to two ways, and the odd number of rows to another in the one not taken at first."""

    def forward(self, x: Tensor) -> Tensor:
        early = torch.relu(self.a(x))
        large = bool(early.sum() > 1e6)
        h = torch.relu(self.b(early))
        if large:
            return self.c(self.other(h) if self.odd(len(h), self.training) else self.norm(h))
        return self.c(h)


class BehindAQuestion(ByRows):
    """Behind the cut a number is taken out of a tensor first, which shapes do not tell."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        h = h * h.max().item()
        return self.c(self.other(h) if self.odd(len(h), self.training) else self.norm(h))


class Inner(ByRows):
    """All of it in a submodule of its own."""

    def __init__(self, odd: Callable[[int, bool], bool]) -> None:
        super().__init__(odd)
        self.inner = _Scaled(odd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(torch.relu(self.b(torch.relu(self.a(x))))))


class _Scaled(nn.Module):
    def __init__(self, odd: Callable[[int, bool], bool]) -> None:
        super().__init__()
        self.norm, self.odd = nn.LayerNorm(8), odd

    def forward(self, h: Tensor) -> Tensor:
        return h.abs() + 1 if self.odd(len(h), self.training) else self.norm(h)


class InnerReplayed(Inner):
    """As that, with a branch that no trace can follow."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.b(torch.relu(self.a(x))))
        if len(x) > 0:
            h = self.inner(h)
        return self.c(h)


def drawn(rows: int) -> Tensor:
    """Return rows, the same each time."""
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def model_of(kind: type[ByRows], odd: Callable[[int, bool], bool]) -> ByRows:
    """Return a model, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(odd)


def cut(model: nn.Module) -> sf.Topology:
    """Cut it with eight rows."""
    return vanilla(model, "b", example=drawn(8))


def data(train: int = 19, test: int = 8) -> sf.Federation:
    """Return one client's rows."""
    x = drawn(train + test)
    rows = sf.data.from_arrays(x, torch.arange(len(x)) % 4, task=sf.classification(4))
    return rows.clients(1, auxiliary=0, victims=0, validation=0.0, test=test / (train + test), seed=0)


def train(topology: sf.Topology, rows: sf.Federation, **more: Any) -> sf.Run:
    """Train in batches of eight rows, the last of three."""
    return sf.train(topology, rows, **{"rounds": 1, "batch_size": 8, "seed": 0, "optimizer": "SGD", **more})


def check_trained(kind: type[ByRows], odd: Callable[[int, bool], bool]) -> None:
    """Train it cut and uncut, and compare the weights."""
    rows = data()
    run = train(cut(model_of(kind, odd)), rows, optimizer=sf.Optim("SGD", {"lr": 0.05}))
    plain = model_of(kind, odd)
    steps = torch.optim.SGD(plain.parameters(), lr=0.05)
    x, y = rows.clients[0].train.x, rows.clients[0].train.y
    for batch in Training.of(sf.LocalUpdate(), 8, 0).batches(len(x), 0, 0):
        steps.zero_grad()
        nn.functional.cross_entropy(plain(x[batch]), y[batch]).backward()
        steps.step()
    for name, value in run.export(model_of(kind, odd)).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def few(rows: int, training: bool) -> bool:
    """Tell of the last batch."""
    return rows == 3


def never(rows: int, training: bool) -> bool:
    """Tell of no batch."""
    return False


@pytest.mark.parametrize("kind", thin([ByRows, BeforeTheCut, OtherTensor, ByNumbersToo, BehindAQuestion], 2))
def test_another_way_for_the_last_batch_is_refused_before_anything_is_trained_or_written(
    kind: type[ByRows], tmp_path: Path
) -> None:
    topology = cut(model_of(kind, few))
    assert all(isinstance(s.module, ReplayedSegment) for s in topology.segments)
    calls: list[int] = []
    for segment in topology.segments:
        segment.module.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(InvalidInput) as caught:
        train(topology, data(), logging=sf.Logging(folder=tmp_path / "run"))
    told = str(caught.value)
    assert f"forward of {kind.__name__} takes another way with 3 rows (the last batch of client0 in training)" in told
    assert "not with 8" in told
    assert "drop_last" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", thin([ByRows, BeforeTheCut, OtherTensor, ByNumbersToo, BehindAQuestion], 5))
def test_without_that_batch_it_trains_as_if_there_were_no_branch(kind: type[ByRows]) -> None:
    update = sf.LocalUpdate(drop_last=True)
    states = []
    for odd in (few, never):
        run = train(cut(model_of(kind, odd)), data(), local=update)
        states.append(run.export(model_of(kind, odd)).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.parametrize("kind", [OtherNumber, Inner, InnerReplayed])
def test_where_all_of_it_is_with_one_party_the_last_batch_is_exact(kind: type[ByRows]) -> None:
    check_trained(kind, few)


def test_a_full_batch_larger_than_the_example_is_tried() -> None:
    topology = cut(model_of(ByRows, lambda rows, _: rows > 12))
    with pytest.raises(InvalidInput, match=r"with 16 rows \(a batch of client0 in training\), and not with 8"):
        train(topology, data(), batch_size=16)
    train(topology, data(), batch_size=8)


@pytest.mark.parametrize(("count", "rows"), [(256 + 12, 256), (256 + 12, 12), (40, 40)])
def test_the_batches_of_evaluation_are_tried(count: int, rows: int) -> None:
    topology = cut(model_of(ByRows, lambda found, training: found == rows and not training))
    with pytest.raises(InvalidInput, match=rf"with {rows} rows \(test rows of client0, scored by 256 at a time\)"):
        train(topology, data(16, count))
    train(topology, data(16, 24))


def test_of_batches_by_chance_the_largest_is_tried() -> None:
    topology = cut(model_of(ByRows, lambda rows, training: training and rows == 19))
    with pytest.raises(InvalidInput, match=r"with 19 rows \(a batch drawn by chance of client0 in training\)"):
        train(topology, data(), local=sf.LocalUpdate(sampling="poisson"))


def test_a_failure_that_comes_with_the_number_of_rows_is_told_before_training() -> None:
    class Pairs(ByRows):
        def other(self, h: Tensor) -> Tensor:
            return h[7:8].reshape(8)

    with pytest.raises(InvalidInput, match=r"forward of Pairs (takes another way|fails .*) with 3 rows"):
        train(cut(model_of(Pairs, few)), data())


def test_what_was_tried_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitfed.core import replay_rows

    topology = cut(model_of(OtherNumber, few))
    train(topology, data())
    monkeypatch.setattr(replay_rows, "_fault", lambda *_: pytest.fail("tried again"))
    train(topology, data())


def test_nothing_is_left_of_a_trial() -> None:
    topology = cut(model_of(OtherNumber, few))
    before = {name: value.clone() for name, value in topology.segments[1].module.state_dict().items()}
    state = torch.get_rng_state()
    from splitfed.core.replay_rows import check_row_counts

    for segment in topology.segments:
        assert isinstance(segment.module, ReplayedSegment)
        known = set(segment.module.replay_plan.memory)
        check_row_counts(segment.module, {3: "few"}, {5: "some"})
        assert set(segment.module.replay_plan.memory) == known
    assert torch.equal(state, torch.get_rng_state())
    after = topology.segments[1].module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def small(rows: int, training: bool) -> bool:
    """Tell of batches of few rows in training."""
    return rows < 5 and training


class NumberOfASubmodule(ByRows):
    """The client's submodule returns a plain number that goes by the rows, which the server multiplies by."""

    def __init__(self, odd: Callable[[int, bool], bool]) -> None:
        super().__init__(odd)
        self.a = _WithNumber(odd)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h, scale = self.a(x)
        return self.c(torch.relu(self.b(torch.relu(h))) * scale)


class _WithNumber(_Scaled):
    def forward(self, h: Tensor) -> tuple[Tensor, float]:  # type: ignore[override]
        return self.norm(h), 2.0 if self.odd(len(h), self.training) else 1.0


class RowsOfASubmodule(NumberOfASubmodule):
    """The client's submodule returns as many rows as there are, but in odd batches, and the server asks how many."""

    def __init__(self, odd: Callable[[int, bool], bool]) -> None:
        super().__init__(odd)
        self.a = _WithPart(odd)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h, part = self.a(x)
        return self.c(torch.relu(self.b(torch.relu(h))) * len(part))


class _WithPart(_Scaled):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.norm(h), h[: 1 if self.odd(len(h), self.training) else len(h)]


KINDS = [ByRows, BeforeTheCut, OtherNumber, NumberOfASubmodule, RowsOfASubmodule]


@pytest.mark.parametrize("kind", thin(KINDS, 3))
def test_what_is_done_with_few_rows_is_planned_beside_what_is_done_with_many(kind: type[ByRows]) -> None:
    check_trained(kind, small)


@pytest.mark.parametrize("kind", thin([NumberOfASubmodule, RowsOfASubmodule], 2))
def test_what_a_submodule_of_another_returns_for_other_rows_is_tried(kind: type[ByRows]) -> None:
    topology = cut(model_of(kind, lambda rows, _: rows > 12))
    with pytest.raises(InvalidInput, match=r"with 16 rows .* or cut with 16 rows or more as example"):
        train(topology, data(), batch_size=16)
    larger = vanilla(model_of(kind, lambda rows, _: rows > 12), "b", example=drawn(16))
    train(larger, data(), batch_size=16)


@pytest.mark.parametrize("rows", [9, 15])
def test_of_batches_by_chance_numbers_near_the_expected_one_and_near_powers_of_two_are_tried(rows: int) -> None:
    topology = cut(model_of(ByRows, lambda found, training: training and found == rows))
    with pytest.raises(InvalidInput, match=rf"with {rows} rows \(a batch drawn by chance of client0 in training\)"):
        train(topology, data(), local=sf.LocalUpdate(sampling="poisson"))


def test_rows_that_a_method_passes_by_itself_are_tried() -> None:
    topology = cut(model_of(ByRows, lambda rows, training: rows == 16 and not training))
    training = Training.of(sf.LocalUpdate(), 8, 0)
    check_ways([topology], data(), training)
    with pytest.raises(InvalidInput, match=r"with 16 rows \(rows that FedMD may pass\)"):
        check_ways([topology], data(), training, sf.federated.FedMD())


def test_clients_are_tried_with_the_test_rows_of_others() -> None:
    x = drawn(120)
    rows = sf.data.from_arrays(x, torch.arange(120) % 4, task=sf.classification(4))
    clients = rows.clients(2, auxiliary=0, victims=0, validation=0.0, test=0.3, seed=0, dirichlet=0.5)
    first, second = (len(client.test) for client in clients.clients)
    assert first != second > 8
    odd = cut(model_of(ByRows, lambda found, training: found == second and not training))
    training = Training.of(sf.LocalUpdate(), 8, 0)
    with pytest.raises(InvalidInput, match=rf"with {second} rows \(test rows of client1, scored by 256 at a time\)"):
        check_ways([odd, cut(model_of(ByRows, never))], clients, training)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 19, 64, 1000])
def test_a_spread_begins_with_one_row_and_ends_with_all(most: int) -> None:
    from splitfed.schedules.base import spread_counts

    found = spread_counts(most)
    assert found[0] == 1
    assert found[-1] == most
    assert found == sorted(set(found))
    assert set(range(1, min(most, 8) + 1)) <= set(found)
    assert len(found) <= 8 + 3 * 10
