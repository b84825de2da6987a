"""Segments that are there to train on: what a topology allows of them, and that no prediction waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Segment, Topology
from splitfed.defenses import GaussianRelease
from splitfed.federated import FML, FedAKT
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import vanilla
from tests.examples import assert_same
from tests.federated.methods import data, go, net


def peeking(where: int, role: str) -> Topology:
    """Vanilla, with a segment for training that reads what crosses, as the segment number `where`."""
    plain = vanilla(net(), "relu1")
    segments = list(plain.segments)
    segments.insert(where, Segment("peek", role, nn.Identity(), ("relu1",), ("peeked",)))
    return replace(plain, segments=tuple(segments), training_only=frozenset({"peek"}))


def test_nobody_needs_to_read_what_a_segment_for_training_makes() -> None:
    found = peeking(1, "server")
    assert found.serving == {"bottom", "top"}
    assert [head.value for head in found.scored] == [head.value for head in found.answering] == ["fc3"]
    assert [s.name for s in found.upstream("server")] == ["bottom"]
    with pytest.raises(InvalidInput, match="value 'peeked' is read by no segment and no head"):
        replace(found, training_only=frozenset())


def test_what_a_segment_for_training_may_not_be() -> None:
    plain = vanilla(net(), "relu1")
    with pytest.raises(InvalidInput, match="unknown segment 'botom'; did you mean 'bottom'"):
        replace(plain, training_only=frozenset({"botom"}))
    with pytest.raises(
        InvalidInput, match="segment 'top' reads 'relu1', which is there to train on: name it in training_only"
    ):
        replace(plain, training_only=frozenset({"bottom"}))
    with pytest.raises(InvalidInput, match="topology 'vanilla' has no head that answers: all are on training_only"):
        replace(plain, training_only=frozenset({"bottom", "top"}))


@pytest.mark.parametrize("where", [1, 2])
def test_a_value_that_a_segment_for_training_reads_too_still_arrives(where: int) -> None:
    """It stands before or after the segment that answers; the value crosses once, for both of them."""
    plain = sf.train(vanilla(net(), "relu1"), data(), schedule="splitfed_v1", rounds=2)
    run = sf.train(peeking(where, "server"), data(), schedule="splitfed_v1", rounds=2)
    assert plain.history[-1]["test"] == run.history[-1]["test"]
    assert plain.bytes == run.bytes
    for name in ("bottom", "top"):
        assert_same(plain.engine.modules(0)[name].state_dict(), run.engine.modules(0)[name].state_dict())
    assert plain.engine.traffic.bytes("evaluate") == run.engine.traffic.bytes("evaluate")


def test_evaluations_carry_what_answers_needs_and_no_more() -> None:
    for method in (FML(), FedAKT()):
        one, other = go("vanilla", None), go("vanilla", method)
        assert one.engine.traffic.bytes("evaluate") == other.engine.traffic.bytes("evaluate")


def test_a_head_on_a_segment_for_training_answers_when_it_is_asked() -> None:
    run, x = go("vanilla", FedAKT()), data().clients[0].test.x[:4]
    modules = {name: module.eval() for name, module in run.engine.modules(0, "fed_server").items()}
    for head, body in ((run.engine.topology.heads[1].value, "bottom"), (None, "extractor_bottom")):
        torch.testing.assert_close(run.predict(x, 0, head=head), modules["top"](modules[body](x)))
    whole = go("local", FML())
    modules = {name: module.eval() for name, module in whole.engine.modules(0).items()}
    torch.testing.assert_close(whole.predict(x, 0, head="meme_out"), modules["meme_head"](modules["meme_body"](x)))


def test_the_ledger_counts_a_segment_for_training_in_training_alone() -> None:
    defense = GaussianRelease(noise_multiplier=4.0, freeze=True, on=("private_top->told_private_fc3",))
    ready = prepare(
        vanilla(net(), "relu1"),
        data(),
        schedule="splitfed_v1",
        defenses=defense,
        optimizer=None,
        training=Training(16),
        method=FML(),
    )
    run = go("vanilla", FML(), defenses=defense)
    assert planned_ledger(calibrate_defenses(ready, 2), 2) == run.ledger
    (line,) = run.ledger.lines
    assert line.uses == 2
