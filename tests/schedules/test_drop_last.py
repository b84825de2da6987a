"""The last incomplete batch of an epoch left out: which rows train, what is counted, promised, timed and resumed."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.local_update import LocalUpdate
from splitfed.defenses import DpSgd, GaussianRelease
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.example_passes import facts_with
from splitfed.planning.plan import cost
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import check_batches, prepare
from splitfed.schedules import Independent
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from tests.federated.examples import check_planned, check_resumed, constants, go, hand, model, own

DROP = LocalUpdate(drop_last=True)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(10, [4, 4]), (8, [4, 4]), (5, [4]), (4, [4]), (3, [3]), (1, [1])], ids=str
)
def test_the_rows_behind_the_last_whole_batch_are_left_out(rows: int, sizes: list[int]) -> None:
    """A client with fewer rows than a batch keeps its only one."""
    training = Training(4, seed=3, drop_last=True)
    found = training.batches(rows, 0, 1)
    assert [len(batch) for batch in found] == sizes
    assert training.steps(rows) == len(sizes)
    assert training.smallest_batch(rows) == min(sizes)
    everything = replace(training, drop_last=False)
    assert [b.tolist() for b in found] == [b.tolist() for b in everything.batches(rows, 0, 1)][: len(sizes)]
    assert everything.steps(rows) == -(-rows // 4)
    assert everything.smallest_batch(rows) == min(map(len, everything.batches(rows, 0, 1)))


def test_other_rows_are_left_out_in_every_epoch() -> None:
    training = Training(4, drop_last=True)
    left = {epoch: set(range(6)) - set(torch.cat(training.batches(6, epoch, 0)).tolist()) for epoch in range(8)}
    assert all(len(rows) == 2 for rows in left.values())
    assert set().union(*left.values()) == set(range(6))


def test_a_step_fewer_by_hand() -> None:
    """One weight at 2, labels 1: batches of 2 of 3 rows; each step takes w to w - .1 x 2 (w - 1) = .8 w + .2."""
    run = hand(None, 1, clients=((3, 1.0),), batch_size=2, local=DROP)
    assert [entry["steps"] for entry in run.history] == [1]
    assert own(run, 0) == pytest.approx(1.8)
    assert own(hand(None, 1, clients=((3, 1.0),), batch_size=2), 0) == pytest.approx(1.64)


def test_a_round_of_steps_goes_on_behind_whole_batches() -> None:
    training = Training(4, seed=3, drop_last=True)
    expected = [batch for epoch in range(5) for batch in training.batches(10, epoch, 7)]
    found = [batch for number in range(3) for batch in Independent(steps=3)._batches(training, 10, number, 7)]
    assert [b.tolist() for b in found] == [b.tolist() for b in expected[:9]]


@pytest.mark.parametrize("case", ["fedavg", "splitfed_v1", "sequential", "sglr", "blind"])
def test_planned_bytes_and_steps_are_those_counted(case: str) -> None:
    changes = {} if case == "fedavg" else {"topology": vanilla(model(), "relu"), "schedule": case}
    method = "fedavg" if case == "fedavg" else None
    run, whole = (go(method, 2, local=one, **changes) for one in (DROP, LocalUpdate()))
    check_planned(run, method, local=DROP, **changes)
    rows = [len(client.train) for client in run.data.clients]
    assert any(count % 7 for count in rows), "batches of 7 are all whole here"
    if case in ("fedavg", "sequential", "splitfed_v1"):
        assert run.history[0]["steps"] == sum(count // 7 for count in rows)
        assert whole.history[0]["steps"] == sum(-(-count // 7) for count in rows)
    if case != "fedavg":
        assert run.bytes < whole.bytes


def test_clock_and_operations_are_those_of_the_plan() -> None:
    topology, data = vanilla(model(), "relu"), sf.data.digits().clients(2, auxiliary=10, victims=8, seed=0)
    speeds = sf.Speeds(sf.Machine(1e9, 1e6, 1e6, 0.01))
    times, rows = {}, {}
    for local_update in (DROP, LocalUpdate()):
        run = sf.train(
            *(topology, data), rounds=1, batch_size=100, local=local_update, evaluation=sf.Evaluation(speeds=speeds)
        )
        ready = prepare(
            *(topology, data),
            schedule="sequential",
            defenses=(),
            optimizer=None,
            training=Training.of(local_update, 100),
        )
        planned = cost(ready, 1, speeds)
        assert run.history[0]["simulated_seconds"] == pytest.approx(planned.seconds, rel=1e-12)
        times[local_update.drop_last] = planned.seconds
        rows[local_update.drop_last] = planned.flops["server"]
    assert times[True] < times[False]
    trained = [len(client.train) for client in data.clients]
    assert rows[True] / rows[False] == pytest.approx(sum(n - n % 100 for n in trained) / sum(trained))


def test_the_ledger_counts_the_rows_that_take_part() -> None:
    """24 rows in batches of 7: a row is in at most as many releases and steps as epochs, and some in fewer."""
    data = sf.data.digits().rows(range(40)).clients(1, auxiliary=5, victims=5, test=0.1, validation=0.1, seed=0)
    topology = vanilla(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.Linear(4, 10)), "1")
    rows = len(data.clients[0].train)
    assert rows == 24
    for defense in (GaussianRelease(noise_multiplier=2.0), DpSgd(noise_multiplier=2.0)):
        run = sf.train(topology, data, defenses=[defense], rounds=3, batch_size=7, local=DROP)
        ready = prepare(
            *(topology, data),
            schedule="sequential",
            defenses=[defense],
            optimizer=None,
            training=Training.of(DROP, 7),
        )
        planned = planned_ledger(calibrate_defenses(ready, 3), 3)
        assert run.ledger.lines == planned.lines
        # Releases of 3 x 3 batches of 7, and of 6 validation and test rows 3 times; one step an epoch.
        assert [line.uses for line in planned.lines] == [7 * 9 + 6 * 3 if isinstance(defense, GaussianRelease) else 3]
        counts = run.engine.run_parties.participation[0]
        assert counts.steps == 9
        assert int(counts.state()["rows"].sum()) == 7 * 9
        assert counts.most <= 3
    uses = torch.bincount(
        torch.cat([b for e in range(3) for b in Training.of(DROP, 7).batches(rows, e, 0)]), minlength=rows
    )
    assert counts.state()["rows"].tolist() == uses.tolist()


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    check_resumed(go("fedavg", 4, local=DROP), "fedavg", tmp_path / "run", local=DROP)
    with pytest.raises(InvalidInput, match=r"holds another run: its training\.drop_last is True, not False"):
        go("fedavg", 4, logging=sf.Logging(folder=tmp_path / "run", resume=True))


def test_an_attackers_copy_leaves_out_what_the_run_leaves_out() -> None:
    seen: list[list[int]] = []
    for local_update in (DROP, LocalUpdate()):
        run = go(None, 1, local=local_update)
        rows = run.data.clients[0].train.rows(range(10))
        copy = run.evaluator.grants.imitate(0)(rows.x, rows.y, 1, 4, 5)
        seen.append([copy._engine.run_parties.participation[0].steps])
    assert seen == [[2], [3]]


def test_most_dirichlet_splits_no_longer_stop_batch_norm() -> None:
    """Batches of 32 of digits over ten clients: one left-over row somewhere is common, and is left out."""
    digits, topology = sf.data.digits(), local(model())
    refused = {False: 0, True: 0}
    for seed in range(20):
        data = digits.clients(10, dirichlet=0.5, auxiliary=10, victims=8, seed=seed)
        facts = [facts_with(topology, data.clients[0].train)] * 10
        for drop in refused:
            with suppress(InvalidInput):
                check_batches(facts, (), data, Training(32, drop_last=drop))
                continue
            refused[drop] += 1
    assert refused[False] >= 3
    assert refused[True] == 0


def test_drop_last_is_named_where_it_helps_alone() -> None:
    """Batches of one row, and clients of one row, stay too small for batch norm."""
    facts = [facts_with(local(model()), sf.data.digits().rows(range(4)))]
    for rows, size, helps in ((9, 8, True), (9, 1, False), (1, 8, False)):
        data = constants(((rows, 1.0),))
        with pytest.raises(InvalidInput) as caught:
            check_batches(facts, (), data, Training(size))
        assert str(caught.value).endswith("with drop_last=True" if helps else "choose another size")
    with pytest.raises(InvalidInput, match=re.escape("so batch_size=1 leaves a batch of one")):
        check_batches(facts, (), constants(((9, 1.0),)), Training(1, drop_last=True))


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(InvalidInput, match="drop_last=1 is not allowed; expected True or False"):
        LocalUpdate(drop_last=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="drop_last=True is not allowed with sampling='poisson'"):
        LocalUpdate(sampling="poisson", drop_last=True)
