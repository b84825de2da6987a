"""Questions leave no trace: neither in weights, gradients and buffers nor in what the run recorded; and who may ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks import MembershipThreshold, Rmle, UnsplitLabels
from splitfed.attacks.base import Phase
from splitfed.core.errors import InvalidInput, NonFinite
from splitfed.core.messages import Recording
from splitfed.core.rows import TensorRows
from splitfed.core.topology import Head, Segment, Topology
from splitfed.data.candidates import candidates
from splitfed.data.dataset import Federation
from splitfed.stats.intervals import Interval
from splitfed.training.run import Run
from tests.examples import assert_same, toy_data


class Averaging(nn.Module):
    """Keeps a running mean in a buffer that it replaces at every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean().reshape(1)
        return x


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 12), Averaging(), nn.BatchNorm1d(12), nn.ReLU()),
            *(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Linear(12, 10)),
        )


def federation() -> Federation:
    return toy_data(160).clients(2, auxiliary=40, victims=12)


def chain() -> Topology:
    """U-shaped by hand: a module that asks whether it is in training cannot be traced."""
    model = net()
    segments = (
        Segment("bottom", "client", model[:5], ("x",), ("a",)),
        Segment("middle", "server", model[5:7], ("a",), ("b",)),
        Segment("head", "client", model[7:], ("b",), ("out",)),
    )
    return Topology("chain", segments, {"x": "client"}, (Head("out", "client", "client"),))


def trained(record: Recording | None = None) -> Run:
    return splitfed.train(chain(), federation(), rounds=1, batch_size=16, logging=splitfed.Logging(record=record))


def parties(run: Run) -> dict[str, object]:
    return {name: party.state.state_dict() for name, party in run.engine.run_parties.members().items()}


def test_a_rehearsed_step_leaves_no_trace_in_borrowed_segments() -> None:
    """Client 0 uses client 1's segments, which trained last; client 1 then trains as if nobody had asked."""
    asked, other = trained(), trained()
    before = parties(asked)
    asked.attack(UnsplitLabels(iterations=2), client=0)
    assert_same(parties(asked), before)
    for run in (asked, other):
        run.engine.train(1, 9, [torch.arange(16)])
    assert_same(parties(asked), parties(other))


def test_a_rehearsal_that_fails_leaves_no_trace() -> None:
    run = trained()
    before = parties(run)
    victims, x = federation().victims, federation().victims.x
    object.__setattr__(victims, "source", TensorRows(x * float("nan")))
    with pytest.raises(NonFinite):
        run.observe(victims=victims, phase=Phase.STEP)
    assert_same(parties(run), before)
    assert all(p.grad is None for m in run.engine.modules(1).values() for p in m.parameters())


def test_attacks_are_not_recorded_in_the_views_of_the_run() -> None:
    run = trained(Recording(("server", "client0"), budget=2**20))
    seen = {name: len(run.engine.view(name).messages) for name in ("server", "client0")}
    run.attack([MembershipThreshold(queries=2), "inverse_network"], client=0)
    run.attack(UnsplitLabels(iterations=2), client=1)
    assert {name: len(run.engine.view(name).messages) for name in seen} == seen


def test_rows_somebody_trained_on_are_no_outsiders() -> None:
    run = trained()
    with pytest.raises(InvalidInput, match="outsiders contain a client's training row"):
        run.attack("membership_threshold", victims=federation().clients[0].train)


def test_victims_that_equal_a_training_row_are_no_candidates() -> None:
    data = federation()
    copied = data.clients[1].train.rows([0, 1]).join([data.victims.rows(range(2, len(data.victims)))])
    count, mixed = len(copied), replace(data, victims=copied)
    with pytest.warns(UserWarning, match=f"2 of {count} victims equal a training row in every value; they are no cand"):
        rows, members = candidates(mixed, mixed.victims, torch.Generator().manual_seed(0))
    assert (len(rows), int(members.sum())) == (2 * (count - 2), count - 2)
    outside = {row.numpy().tobytes() for row in rows.x[~members]}
    assert outside == {row.numpy().tobytes() for row in copied.x[2:]}
    with pytest.raises(InvalidInput, match="outsiders contain a client's training row"):
        candidates(mixed, copied.rows(range(count)), torch.Generator())
    alike = replace(data, victims=data.clients[0].train.rows([0, 1]))
    with pytest.raises(InvalidInput, match="2 of 2 victims equal a training row in every value: no row outside"):
        candidates(alike, alike.victims, torch.Generator())


@pytest.mark.parametrize("attack", ["rmle", "unsplit_labels", "membership_threshold", "model_inversion"])
def test_a_client_that_is_not_there_is_refused(attack: str) -> None:
    with pytest.raises(InvalidInput, match=r"client=7 is not allowed; expected 0 to 1"):
        trained().attack(attack, client=7)


def test_nobody_reconstructs_inputs_of_its_own() -> None:
    run = trained()
    with pytest.raises(InvalidInput, match="party 'client0' owns the inputs of client 0: there is nothing to"):
        run.attack(Rmle(), adversary="client0")


@pytest.mark.parametrize(
    ("found", "reversed_too"),
    [
        (Interval(0.2, 0.1, 0.3, 10), True),
        (Interval(0.45, 0.3, 0.6, 10), False),
        (Interval(0.2, float("nan"), float("nan"), 1), True),
        (Interval(0.8, 0.7, 0.9, 10), False),
    ],
)
def test_a_result_says_whether_its_guess_is_the_wrong_way_round(found: Interval, reversed_too: bool) -> None:
    pair = torch.zeros(2), torch.zeros(2)
    assert splitfed.AttackResult("norm", "server", *pair, {"attack": {"auc": found}}, 1.0).reversed == reversed_too
    assert not splitfed.AttackResult("rmle", "server", *pair, {"attack": {"mse": found}}, 1.0).reversed
