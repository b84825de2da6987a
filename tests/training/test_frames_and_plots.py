"""Frames, summaries, representations and figures hold what the run holds."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.models.mlp import mlp
from splitfed.stats.intervals import Interval
from splitfed.topologies import vanilla
from splitfed.training.frames import history_frame, round_row
from splitfed.training.run import Run
from tests.examples import toy_data
from tests.pages import ROOT


@pytest.fixture(scope="module")
def run() -> Run:
    data = toy_data(120).clients(3, auxiliary=16, victims=8)
    topology = vanilla(mlp((1, 8, 8), 10, hidden=[8], seed=0), "relu1")
    noise = sf.defenses.LabelDp(epsilon=4.0)
    evaluation = sf.Evaluation(every=2, speeds=sf.Speeds())
    return sf.train(topology, data, schedule="splitfed_v1", defenses=noise, rounds=3, evaluation=evaluation)


@pytest.fixture(scope="module")
def results(run: Run) -> list[sf.AttackResult]:
    return run.attack(["rmle", "inverse_network"], budget="quick")


def test_the_frame_has_a_row_a_round(run: Run) -> None:
    frame = run.to_frame()
    assert list(frame["round"]) == [0, 1, 2]
    assert list(frame["loss"]) == [entry["loss"] for entry in run.history]
    assert list(frame["test"].dropna()) == [run.history[n]["test"]["union"] for n in (1, 2)]
    assert frame["test"].iloc[-1] == run.utility == run.accuracy
    last = run.history[-1]["test"]
    assert frame["test_client_std"].iloc[-1] == last["spread"]["std"]
    assert frame["test_low"].iloc[-1] == last["interval"]["low"]
    assert frame[f"epsilon_{run.ledger.totals[0].protects}"].iloc[-1] == run.ledger.totals[0].epsilon
    assert not {column for column in frame if frame[column].map(lambda cell: isinstance(cell, (dict, list))).any()}


def test_the_page_says_what_an_entry_of_the_history_holds(run: Run) -> None:
    """Bytes add up from round to round, as a reader who took them for a round's own could not know."""
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "python-api.md").read_text("utf-8").partition("| key |")[2]))
    assert {key for entry in run.history for key in entry} <= told
    bytes_by_round = [entry["bytes"] for entry in run.history]
    assert bytes_by_round[-1] == run.bytes == 3 * bytes_by_round[0]
    assert bytes_by_round == sorted(set(bytes_by_round))


def test_the_frame_of_clients_has_a_row_a_scored_round_and_client(run: Run) -> None:
    frame = run.to_frame(clients=True)
    assert list(zip(frame["round"], frame["client"], strict=True)) == [(n, c) for n in (1, 2) for c in range(3)]
    assert list(frame["test"]) == [score for n in (1, 2) for score in run.history[n]["test"]["clients"]]


def test_an_entry_is_flattened_by_hand() -> None:
    entry: dict[str, Any] = {
        "round": 4,
        "loss": None,
        "dropped": [1, 2],
        "test": {
            "metric": "accuracy",
            "union": 0.5,
            "clients": [0.4, None],
            "heads": {"a": 0.5, "b": 0.25},
            "method": {"prototype": [0.2, None, 0.4]},
            "across": {"own": [None, None]},
        },
        "training_attack_scores": {"server": {"mse": {"attack": 0.1}}},
        "detectors": {"client0": {"flagged": True, "scores": [1, 2]}},
    }
    assert round_row(entry) == {
        "round": 4,
        "loss": None,
        "dropped": 2,
        "test": 0.5,
        "test_head_a": 0.5,
        "test_head_b": 0.25,
        "test_method_prototype": pytest.approx(0.3),
        "test_across_own": None,
        "training_attack_scores_server_mse_attack": 0.1,
        "detectors_client0_flagged": True,
    }
    assert history_frame([]).empty
    assert history_frame([{"round": 0}], clients=True).empty


def test_the_frame_of_an_attack_has_a_row_a_metric_and_predictor(results: list[sf.AttackResult]) -> None:
    frame = results[0].to_frame()
    own = frame[(frame["metric"] == "psnr") & (frame["of"] == "attack")].iloc[0]
    score = results[0].scores["attack"]["psnr"]
    assert (own["mean"], own["low"], own["high"], own["n"]) == (score.mean, score.low, score.high, 8)
    assert set(frame["of"]) == set(results[0].scores)
    assert len(frame) == sum(len(metrics) for metrics in results[0].scores.values())
    alone = sf.AttackResult(
        "a", "b", *[results[0].truth] * 2, {"attack": {"mse": Interval(1.0, *[float("nan")] * 2, 1)}}, 0
    )
    assert pd.isna(alone.to_frame()["low"][0])


def test_what_is_printed_says_what_it_is(run: Run, results: list[sf.AttackResult]) -> None:
    text = repr(results[0])
    assert text.startswith("AttackResult(rmle by server, 8 victims, white box, a quick look: psnr ")
    assert f"(mean_image {results[0].scores['mean_image']['psnr'].mean:.4g}, random_pairing" in text
    assert "tensor" not in text
    topology = run.engine.topology
    assert "\n  client: bottom: input_1 -> relu1, 520 weights," in repr(topology)
    assert "crosses: bottom->top (relu1))" in repr(topology)
    summary = str(run.summary())
    for said in (
        "splitfed_v1",
        "LabelDp(",
        "3 clients, ",
        f"{run.bytes:,} bytes",
        "epsilon 4 at delta",
        "constant answer",
    ):
        assert said in summary
    assert "nothing else crosses that depends on it" in summary, (
        "an epsilon is never said without what crosses beside it"
    )
    assert repr(run.summary()) == summary


def test_html_is_escaped_and_loads_nothing(run: Run, results: list[sf.AttackResult]) -> None:
    pages = [
        run._repr_html_(),
        run.summary()._repr_html_(),
        results[0]._repr_html_(),
        run.engine.topology._repr_html_(),
    ]
    for page in pages:
        assert set(re.findall(r"<(\w+)", page)) <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "pre"}
    evil = sf.AttackResult("<script>", "<b>", results[0].prediction, results[0].truth, results[0].scores, 0.0)
    assert "<script>" not in evil._repr_html_()
    assert "&lt;script&gt; by &lt;b&gt;" in evil._repr_html_()
    assert "bottom-&gt;top" in run.engine.topology._repr_html_()


@pytest.mark.exhaustive
class Dense(nn.Module):
    """What `stem` returns is read twice behind `body`, where `twice`, and by `body` itself."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        out: Tensor = self.head(self.body(h) + h * h.sin() if self.twice else self.body(h) + h)
        return out


@pytest.mark.parametrize("twice", [True, False])
def test_the_summary_says_where_a_cut_adds_gradients_in_another_order(twice: bool) -> None:
    data = sf.data.from_arrays(torch.randn(20, 4), torch.arange(20) % 3).clients(1, auxiliary=0, victims=0)
    run = sf.train(vanilla(Dense(twice), "body", example=torch.randn(8, 4)), data, rounds=1, batch_size=8)
    said = "equal to the uncut model up to rounding: gradients of 2 weights are added in another order"
    assert (said in str(run.summary())) == twice


def test_figures_show_the_numbers_of_the_run(run: Run, results: list[sf.AttackResult]) -> None:
    score, loss = run.plot.history().axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in score.lines}
    assert drawn["test"] == [run.history[n]["test"]["union"] for n in (1, 2)]
    assert run.constant is not None
    assert drawn["constant answer"] == [run.constant.score] * 2
    assert list(loss.lines[0].get_ydata()) == [entry["loss"] for entry in run.history]
    panels = {axis.get_title(loc="left"): axis for axis in run.plot.attacks(results).axes}
    assert set(panels) == {"psnr", "ssim", "mse"}
    bars = [patch.get_height() for patch in panels["psnr"].patches]
    assert bars == [result.scores["attack"]["psnr"].mean for result in results]
    assert [label.get_text() for label in panels["psnr"].get_xticklabels()] == ["rmle", "inverse_network"]
    (axis,) = run.plot.traffic().axes
    assert sum(patch.get_width() for patch in axis.patches) == run.bytes
    names = {label.get_text() for label in axis.get_yticklabels()}
    assert names >= {"client to server", "server to client", "client to aggregation server"}
    assert run.plot.attacks(results[0]).axes[0].patches[0].get_height() == bars[0]


def test_a_notebook_shows_a_figure_and_pyplot_knows_none(run: Run) -> None:
    import matplotlib.pyplot as plt

    figure: Any = run.plot.traffic()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert plt.get_fignums() == []


def test_what_cannot_be_drawn_is_refused(run: Run) -> None:
    with pytest.raises(InvalidInput, match="there is no scored attack to plot"):
        run.plot.attacks([])
    alone = sf.train(
        sf.topologies.local(mlp((1, 8, 8), 10, hidden=[8])),
        toy_data(60).clients(1, victims=4),
        schedule="independent",
        rounds=1,
    )
    with pytest.raises(InvalidInput, match="nothing crossed in training"):
        alone.plot.traffic()
    alone.history.clear()
    with pytest.raises(InvalidInput, match="there is no history to plot"):
        alone.plot.history()


def test_accuracy_is_accuracy_or_refused(run: Run) -> None:
    entry = run.history[-1]["test"]
    assert run.accuracy == entry["union"]
    named, entry["metric"] = entry["metric"], "f1"
    try:
        with pytest.raises(InvalidInput, match="the run has no accuracy: its task is scored by 'f1'"):
            _ = run.accuracy
    finally:
        entry["metric"] = named
