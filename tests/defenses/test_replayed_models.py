"""Every defense on segments that replay the model's `forward`: to the bit what it does on segments of a trace."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from splitfed.core import cutting
from splitfed.core.cut_names import Cut
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.replay import ReplayedSegment
from splitfed.core.tracing import NotTraceable
from splitfed.defenses import DpSgd
from splitfed.models.mlp import mlp
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.entry_point import train
from splitfed.training.run import Run
from tests.core.test_replay_values import Biased, Ends, SequenceFirst, build, tokens
from tests.defenses.test_every_defense import DEFENSES
from tests.examples import assert_same, engine_of, toy_data
from tests.thinning import thin


def refuse_to_trace(model: nn.Module, cuts: Sequence[Cut], *given: Any) -> Any:
    raise NotTraceable("not here")


def trained(defense: Defense) -> Run:
    """Train a small net on 60 digits for a round, with all draws of the parties."""
    data = toy_data(60).clients(1, auxiliary=8, victims=4, seed=0)
    model = mlp((8, 8), 10, (24, 20, 16), seed=0)
    label_side = type(defense).__name__ in ("MaxNorm", "Iso", "GradientCompression", "GradientRounding", "MidLabels")
    if label_side or type(defense).__name__ == "LabelDp":
        topology = u_shaped(model, ("relu1", "relu3"), example=data.victims.x)
    else:
        topology = vanilla(model, "relu1", example=data.victims.x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(topology, data, rounds=1, batch_size=16, defenses=[defense], seed=3)


@pytest.mark.parametrize("name", thin([name for name in DEFENSES if name != "marvell"], 3))
def test_a_defense_does_to_the_bit_the_same_on_both_kinds_of_segments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = trained(DEFENSES[name])
    monkeypatch.setattr(cutting, "cut_by_trace", refuse_to_trace)
    replayed = trained(DEFENSES[name])
    assert any(isinstance(m, ReplayedSegment) for m in replayed.engine.modules(0)["bottom"].modules())
    first, second = (run.engine.topology.state_dict(run.engine.modules(0)) for run in (traced, replayed))
    assert_same(first, second)
    assert traced.history[-1]["test"] == replayed.history[-1]["test"]
    assert traced.engine.traffic.bytes() == replayed.engine.traffic.bytes()


REFUSED: dict[str, tuple[type[nn.Module], str, Any]] = {
    "a value without rows": (Biased, r"layer 'places' \(Embedding\).*: its input has no row for each row", "blocks.0"),
    "rows in the second dimension": (SequenceFirst, r"layer 'recurrent' \(LSTM\).*row by row is unknown", "recurrent"),
    "a weight that is read as a value": (Ends, r"layer 'words' \(Embedding\).*row by row is unknown", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dp_sgd_refuses_what_has_no_gradient_row_by_row(case: str) -> None:
    kind, text, cut = REFUSED[case]
    x = tokens()
    y = x[:, 0] % 4
    model = build(kind)
    made = vanilla(model, cut, example=x[:8]) if cut else u_shaped(model, ("words", "blocks.2"), example=x[:8])
    with pytest.raises(InvalidInput, match=text):
        engine_of(made, x, y, defenses=[DpSgd(max_norm=1.0, noise_multiplier=1.0)])
