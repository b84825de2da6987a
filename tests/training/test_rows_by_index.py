"""A run whose rows are read by index is, bit for bit, the run on the same rows in memory; transforms are resumed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.random import generator
from splitfed.core.rows import Draw, RowSource, TensorRows
from splitfed.data import Dataset, npy
from splitfed.defenses import DpSgd, LabelDp, Noise
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data
from tests.object_graph import holdings
from tests.training.test_resume import Stop, stop_after

ROUNDS = 3
NORMS = ("validation", "test")


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 10))


def go(data: Dataset, folder: Path | None = None, stop: int | None = None, resume: bool = False, **more: Any) -> Run:
    parts = data.clients(2, auxiliary=20, victims=10, validation=0.1, test=0.2, seed=1)
    logging = sf.Logging(folder, resume, Recording(("server",)), progress=stop_after(stop))
    return sf.train(vanilla(model(), "2"), parts, rounds=ROUNDS, batch_size=9, logging=logging, **more)


def outcome(run: Run) -> dict[str, Any]:
    state, history = run.state(), [{k: v for k, v in one.items() if k != "seconds"} for one in run.history]
    state["run"].pop("recorders")
    views = [(m.edge, dict(m.tensors), tuple(m.stamp)) for m in run.engine.view("server").messages]
    return {"state": state, "history": history, "views": views}


@pytest.fixture(scope="module")
def memory() -> Dataset:
    torch.set_num_threads(1)
    return toy_data(100)


@pytest.fixture(scope="module")
def mapped(memory: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("arrays")
    for name, tensor in (("x", memory.x), ("y", memory.y)):
        np.save(folder / f"{name}.npy", tensor.numpy())
    found = npy(folder / "x.npy", folder / "y.npy")
    assert not found.source.resident
    return Dataset(memory.name, found.source, found.y, memory.task, memory.value_range)


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"defenses": [Noise(scale=0.1)], "schedule": "splitfed_v1"},
    "dp_sgd": lambda: {
        "defenses": [DpSgd(noise_multiplier=1.0, roles=("client",))],
        "local": sf.LocalUpdate(sampling="poisson"),
    },
    "scaffold": lambda: {"schedule": "splitfed_v3", "method": "fedprox"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_memory_map_trains_to_the_bits_of_memory(memory: Dataset, mapped: Dataset, setting: str) -> None:
    one, other = (go(data, **SETTINGS[setting]()) for data in (memory, mapped))
    assert_same(outcome(one), outcome(other))
    if setting == "plain":
        for attack in (InverseNetwork(epochs=1, queries=1), "membership_threshold"):
            (first,), (second,) = (run.attack(attack) for run in (one, other))
            assert torch.equal(first.prediction, second.prediction)
            assert torch.equal(first.truth, second.truth)
            assert first.scores == second.scores


def test_a_memory_map_is_resumed(memory: Dataset, mapped: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        go(mapped, tmp_path / "run", stop=1)
    assert_same(outcome(go(mapped, tmp_path / "run", resume=True)), outcome(go(memory)))
    # The rows of another file are not those of the run: a sample of them says so.
    numbers = mapped.source.take(torch.arange(100))
    numbers[::2] *= 0.5
    other = Dataset(mapped.name, ReadByIndex(numbers), mapped.y, mapped.task, mapped.value_range)
    with pytest.raises(InvalidInput, match="holds another run: its data"):
        go(other, tmp_path / "run", resume=True)


class ReadByIndex(TensorRows):
    """Rows in memory that say they are not."""

    resident = False

    def select(self, rows: Tensor) -> Any:
        return RowSource.select(self, rows)


def jitter(row: Tensor, drawn: torch.Generator) -> Tensor:
    return (row + 0.1 * torch.rand(row.shape, generator=drawn)).clamp(0, 1)


@pytest.mark.parametrize("coupled", [False, True], ids=["transform", "mixup"])
def test_what_training_sees_is_drawn_by_row_and_epoch(
    memory: Dataset, mapped: Dataset, tmp_path: Path, coupled: bool
) -> None:
    one, other = (d.with_mixup(0.4) if coupled else d.with_transform(jitter) for d in (memory, mapped))
    whole = outcome(go(one))
    with pytest.raises(Stop):
        go(other, tmp_path / "run", stop=2)
    assert_same(outcome(go(other, tmp_path / "run", resume=True)), whole)
    with pytest.raises(AssertionError):
        assert_same(outcome(go(memory)), whole)
    # What is scored stays as it is: with no step of training, all is as without a transform.
    still = {"optimizer": sf.Optim("SGD", {"lr": 0.0}), "schedule": "splitfed_v1"}
    plain, moved = go(memory, **still), go(one, **still)
    for client, part in ((0, "test"), (1, "validation"), (1, "train")):
        before, after = (run.engine.predict(client, part, "evaluate").outputs for run in (plain, moved))
        assert_same(before, after)
    if not coupled:
        with pytest.raises(InvalidInput, match="the transform of the rows changed since it began"):
            go(mapped.with_transform(lambda row: row), tmp_path / "run", resume=True)
    else:
        with pytest.raises(InvalidInput, match="the mixup of the rows changed since it began"):
            go(mapped.with_mixup(0.5), tmp_path / "run", resume=True)


def test_a_run_draws_for_its_training_rows_and_epochs_and_for_nothing_else(memory: Dataset) -> None:
    seen: list[float] = []

    def note(row: Tensor, drawn: torch.Generator) -> Tensor:
        seen.append(float(torch.rand(1, generator=drawn)))
        return row

    parts = memory.with_transform(note).clients(2, auxiliary=10, victims=5, seed=3)
    seen.clear()
    run = sf.train(
        vanilla(model(), "2"),
        parts,
        rounds=2,
        batch_size=7,
        schedule="splitfed_v1",
        seed=4,
        local=sf.LocalUpdate(local_epochs=2),
    )
    run.evaluate("test")
    run.observe()
    rows = torch.cat([parts.sources[f"client{i}/train"] for i in range(2)]).tolist()
    expected = [generator(4, "transform", epoch, row) for epoch in range(4) for row in rows]
    assert sorted(seen) == sorted(float(torch.rand(1, generator=one)) for one in expected)


def test_clipped_gradients_of_transformed_rows_are_those_of_single_rows(memory: Dataset) -> None:
    """DP-SGD without noise over one batch: the mean of each row's clipped gradient, the row transformed by itself."""
    parts = memory.with_transform(jitter).clients(1, auxiliary=0, victims=1, validation=0, test=0)
    rows, clip = parts.clients[0].train, 0.05
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 10))
    before = [p.detach().clone() for p in net[1].parameters()]
    run = sf.train(
        vanilla(net, "1"),
        parts,
        rounds=1,
        batch_size=len(rows),
        defenses=[DpSgd(max_norm=clip, noise_multiplier=0.0, roles=("client",))],
        optimizer=sf.Optim("SGD", {"lr": 1.0}),
        seed=2,
    )
    x = rows.source.take(torch.arange(len(rows)), Draw(2, 0))
    total = [torch.zeros_like(p) for p in before]
    for row in range(len(rows)):
        loss = nn.functional.cross_entropy(net(x[row : row + 1]), rows.y[row : row + 1])
        slopes = torch.autograd.grad(loss, list(net[1].parameters()))
        norm = float(torch.cat([g.flatten() for g in slopes]).norm())
        for one, slope in zip(total, slopes, strict=True):
            one += slope * min(1.0, clip / norm) / len(rows)
    after = next(
        m for m in run.engine.modules(0).values() if sum(p.numel() for p in m.parameters()) == 260
    ).parameters()
    for was, slope, now in zip(before, total, after, strict=True):
        # 99 terms of at most .05 / 99 each: rounding of sums in another order stays below 1e-7.
        assert torch.allclose(was - slope, now, atol=1e-6)
        assert not torch.allclose(was, now, atol=1e-4)


def test_what_would_break_a_promise_is_refused(memory: Dataset) -> None:
    mixed = memory.with_mixup(0.2)
    private = DpSgd(noise_multiplier=1.0, roles=("client",))
    with pytest.raises(
        InvalidInput, match="mixup makes a row part of other examples, and the guarantee of DpSgd is by row"
    ):
        go(mixed, defenses=[private])
    # A label stays that of its own row, and is counted as such.
    go(mixed, defenses=[LabelDp(epsilon=1.0)])
    run = go(mixed, schedule="splitfed_v1")
    with pytest.raises(InvalidInput, match=r"were mixed with one another \(mixup\)"):
        run.attack("dlg")
    bottoms = {
        "left": nn.Sequential(nn.Flatten(), nn.Linear(32, 6)),
        "right": nn.Sequential(nn.Flatten(), nn.Linear(32, 6)),
    }
    topology = vertical(bottoms, nn.Linear(12, 10), labels="left", fusion="concat")
    halves = memory.with_transform(jitter).halves().clients(1, auxiliary=0, victims=2)
    with pytest.raises(InvalidInput, match="would mix one party's numbers into another's part"):
        sf.train(topology, halves, schedule="joint", rounds=1)
    # Mixing columns of the same two rows carries none.
    sf.train(topology, memory.with_mixup(0.2).halves().clients(1, auxiliary=0, victims=2), schedule="joint", rounds=1)


def test_parties_that_share_a_tensor_hold_rows_of_their_own(memory: Dataset, mapped: Dataset) -> None:
    for data in (memory, mapped):
        run = sf.train(u_shaped(model(), ("2", "3")), data.clients(3, auxiliary=10, victims=5), rounds=1)
        held = {name: holdings(party) for name, party in run.engine.parties.items()}
        for (one, mine), (two, others) in combinations(held.items(), 2):
            assert not mine & others, (one, two)
        counts = [sum(kind == "row" for kind, _ in held[f"client{i}"]) for i in range(3)]
        expected = [sum(len(getattr(c, part)) for part in ("train", *NORMS)) for c in run.data.clients]
        assert counts == expected
        assert not any(kind == "row" for kind, _ in held["server"])
