"""A study of one's own data, loss, metric and optimizer: run, resumed, attacked, reported, loaded; and refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import splitfed as sf
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.study import trust
from splitfed.study.config import build
from splitfed.study.config.toml import dumps
from tests.examples import assert_same
from tests.study.examples import SMALL, checked, small, write

PIECES = '''
import torch
from torch.nn import functional
import splitfed as sf
from tests.attacks.token_examples import Encoder


def texts(rows: int = 160):
    """Token ids of unequal length, 4 to 8."""
    tokens = sf.data.markov_tokens(rows, length=8, shortest=4)
    parts = {name: part.select(tokens.x) for name, part in tokens.features.items()}
    lengths = parts["attention_mask"].sum(1).tolist()
    ragged = [row[:length] for row, length in zip(parts["input_ids"], lengths)]
    return sf.data.from_sequences(ragged, tokens.y, name="texts")


def encoder(shape, outputs):
    """Return a model of two arguments."""
    return Encoder(17, outputs)


def focal(output, y):
    """Cross-entropy that weighs rows which are already right less."""
    each = functional.cross_entropy(output, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def error_rate(output, y):
    return (output.argmax(1) != y).double().mean()


def wide(output, y):
    return functional.cross_entropy(output, y, reduction="none")


def detached(output, y):
    return functional.cross_entropy(output.detach(), y)


def words(output, y):
    return "many"


class Slow(torch.optim.SGD):
    """SGD at a tenth of the rate."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] / 10
        found = super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 10
        return found


def plain(params, rate: float = 0.1):
    return torch.optim.SGD(params, lr=rate)
'''
DATA = {"name": "own_pieces:texts", "loss": "own_pieces:focal", "victims": 16, "auxiliary": 64}
METRIC = {"name": "own_pieces:error_rate", "label": "errors", "higher_is_better": False, "low": 0, "high": 1}
OPTIMIZER = {
    "name": "own_pieces:Slow",
    "lr": 0.5,
    "momentum": 0.9,
    "groups": [{"match": ["*.bias"], "lr": 0.1}, {"max_dims": 1, "match": ["*"], "momentum": 0.0}],
}
STUDY: dict[str, Any] = small(
    study={"name": "own", "seeds": [0]},
    data={**DATA, "metric": METRIC},
    model={"name": "own_pieces:encoder"},
    training={"rounds": 2, "batch_size": 16, "accumulate": 2, "optimizer": OPTIMIZER},
    topology=[{"name": "vanilla", "cut": "embedding"}],
    defense=None,
    attack=[{"name": "token_decoder", "epochs": 5, "queries": 1, "width": 16}],
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A study's folder with pieces of one's own; nothing of them is left in this process afterwards."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    finders = list(sys.meta_path)
    (tmp_path / "own_pieces.py").write_text(PIECES)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("own_pieces", None)


@pytest.mark.exhaustive
def test_a_whole_study_of_ones_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ragged rows of two inputs, trained in steps of two batches; stopped behind the first round and resumed."""
    study, out = str(write(home, STUDY)), home / "out"
    run = out / "runs" / "vanilla-embedding--none--seed0"
    assert main(["run", study, "--folder", str(out), "--json"]) == 0
    result = json.loads((run / "result.json").read_text())
    assert (result["utility"]["metric"], result["utility"]["higher_is_better"]) == ("errors", False)
    assert 0 <= result["utility"]["test"] <= 1
    assert result["utility"]["bounds"] == [0, 1]
    assert len(result["attacks"]) == 1
    loaded = sf.load(run, trust=True)
    assert loaded.history[-1]["test"]["union"] == result["utility"]["test"]
    assert type(loaded.engine.party(0, "client").state.optimizer).__name__ == "Slow"
    assert len(loaded.engine.party(0, "server").state.optimizer.param_groups) == 3
    newest = sorted((run / "checkpoints").iterdir())[-1]
    whole = loaded.state()
    # As a crash behind the first round leaves it.
    shutil.rmtree(newest)
    (run / "result.json").unlink()
    for line in (run / "metrics.jsonl",):
        line.write_text("\n".join(line.read_text().splitlines()[:1]) + "\n")
    capsys.readouterr()
    assert main(["run", study, "--folder", str(out), "--json", "--resume"]) == 0
    again = sf.load(run, trust=True)
    for name in (name for name in whole if name.startswith("party-")):
        assert_same(again.state()[name], whole[name], name)
    assert main(["report", str(out)]) == 0
    assert "errors" in (out / "report.html").read_text("utf-8")


def test_every_key_reaches_the_run_and_is_written_again(home: Path) -> None:
    (cell,) = checked(STUDY, home).cells
    optimizer = cell.training.optimizer
    assert isinstance(optimizer, Optim)
    assert optimizer.label == "own_pieces:Slow"
    assert [dict(group.options) for group in optimizer.groups] == [{"lr": 0.1}, {"momentum": 0.0}]
    assert optimizer.groups[1].max_dims == 1
    assert cell.training.local.accumulate == cell.training.training(0).accumulate == 2
    data = build.dataset(cell.data)
    output, y = torch.randn(6, 4), torch.arange(6) % 4
    each = functional.cross_entropy(output, y, reduction="none")
    assert torch.equal(data.task.loss(output, y), ((1 - (-each).exp()) ** 2 * each).mean())
    assert (data.task.metric_name, data.task.higher_is_better, data.task.bounds) == ("errors", False, (0.0, 1.0))
    again = checked(tomllib.loads(dumps(cell.config)), home).cells[0]
    assert again.config == cell.config
    assert repr(again.training.optimizer) == repr(optimizer)


def changed(table: str, **keys: Any) -> dict[str, Any]:
    base = STUDY if table == "data" else SMALL
    return small(**{**({} if table == "training" else STUDY), table: {**base[table], **keys}})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accumulate": (changed("training", accumulate=0), "training.accumulate: accumulate=0 is not allowed; expected"),
    "poisson": (changed("training", accumulate=2, sampling="poisson"), "training.accumulate: accumulate=2 is not"),
    "optimizer": (
        changed("training", optimizer={"name": "own_pieces:Slower"}),
        "training.optimizer.name: optimizer 'own_pieces:Slower': 'own_pieces' has no 'Slower'",
    ),
    "no optimizer": (
        changed("training", optimizer={"name": "collections:OrderedDict"}),
        "optimizer 'collections:OrderedDict' is part of Python itself, which has no optimizers; expected a subclass of "
        "torch.optim.Optimizer, or a function in a Python file",
    ),
    "role": (
        changed("training", optimizer={"client": {"name": "own_pieces:plain", "rat": 0.1}}),
        "training.optimizer.client: unknown option of optimizer own_pieces:plain 'rat'; did you mean 'rate'",
    ),
    "groups": (changed("training", optimizer={"groups": 3}), "training.optimizer: groups=3 is not allowed; expected"),
    "group": (
        changed("training", optimizer={"groups": [{"match": "*.bias", "decay": 0.0}]}),
        "training.optimizer: unknown option of optimizer SGD 'decay'",
    ),
    "pattern": (
        changed("training", optimizer={"groups": [{"match": "*.bais", "lr": 0.1}]}),
        "unknown name of weights in a parameter group '*.bais'",
    ),
    "cycle": (
        changed(
            "training",
            optimizer={"lr": 0.1, "scheduler": {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 1}},
        ),
        "it ends after 1, and is stepped 2 times, once a round; give it total_steps=2",
    ),
    "loss": (changed("data", loss="focal"), "data.loss: 'focal' is not allowed; expected an import path"),
    "no loss": (changed("data", loss="own_pieces:focus"), "data.loss: loss 'own_pieces:focus': 'own_pieces' has no"),
    "class": (changed("data", loss="own_pieces:Slow"), "loss 'own_pieces:Slow' is a class; expected a function in a"),
    "loss of another package": (
        changed("data", loss="torch.nn.functional:cross_entropy"),
        "loss 'torch.nn.functional:cross_entropy' is",
    ),
    "weights": (changed("data", class_weights=[1, 1, 1, 1]), "data.class_weights: is not allowed beside loss"),
    "metric": (
        changed("data", metric={"label": "errors"}),
        "data.metric.name: is missing; expected text",
    ),
    "metric key": (
        changed("data", metric={**METRIC, "hihger_is_better": True}),
        "data.metric.hihger_is_better: unknown key 'hihger_is_better'; did you mean 'higher_is_better'",
    ),
    "metric bounds": (changed("data", metric={**METRIC, "low": 2}), "data.metric: bounds=(2.0, 1.0) is not allowed"),
    "metric switch": (
        changed("data", metric={**METRIC, "higher_is_better": "no"}),
        "data.metric.higher_is_better: 'no' is not allowed",
    ),
    "wide loss": (changed("data", loss="own_pieces:wide"), "loss wide of classification returned a tensor of shape ("),
    "detached loss": (changed("data", loss="own_pieces:detached"), "does not depend on the outputs"),
    "words": (changed("data", metric="own_pieces:words"), "metric words of classification returned a str; expected a"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_lines_before_training(home: Path, case: str) -> None:
    study, text = REFUSED[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        checked(study, home)


def test_paths_of_optimizers_losses_and_metrics_need_trust() -> None:
    """Wherever they stand, a table a role among them, whatever the role is called."""
    config = {
        "data": {"name": "digits", "loss": "a:loss", "metric": {"name": "a:metric"}},
        "training": {"optimizer": {"client": {"name": "a:one"}, "model": {"name": ["a:two", "SGD"]}}},
    }
    assert sorted(trust.import_paths(config)) == ["a:loss", "a:metric", "a:one", "a:two"]
    assert list(trust.import_paths({"data": {"metric": "a:plain"}})) == ["a:plain"]
    assert list(trust.import_paths({"training": {"optimizer": {"name": "a:three"}}})) == ["a:three"]


def test_what_a_loss_of_ones_own_cannot_give_is_refused_by_name() -> None:
    """Label DP in mode "gradient" and gradient matching give probabilities of classes in place of labels."""
    from splitfed.attacks.gradients.gradient_matching import classes_of
    from splitfed.core.task_checks import check_class_probabilities
    from splitfed.core.topology import Head

    def hinge(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.multi_margin_loss(output, y)

    task = sf.classification(4).with_loss(hinge)
    with pytest.raises(InvalidInput, match="in place of labels, which loss hinge of classification cannot take"):
        check_class_probabilities(task, "label_dp")
    check_class_probabilities(sf.classification(4, [1, 1, 2, 1]), "label_dp")
    check_class_probabilities(sf.classification(4).with_loss(lambda o, y: functional.cross_entropy(o, y)), "label_dp")
    indexed = sf.classification(4).with_loss(lambda o, y: {}["loss"])
    with pytest.raises(InvalidInput, match=r"which loss <lambda> of classification cannot take: KeyError: 'loss'$"):
        check_class_probabilities(indexed, "label_dp")
    with pytest.raises(InvalidInput, match="the gradient of cross-entropy; 'out' has the loss hinge"):
        classes_of(Head("out", "client", "client", task))


def test_sequences_are_padded_with_a_mask() -> None:
    data = sf.data.from_sequences([[3, 4], [5], [6, 7, 8]], [0, 1, 0])
    ids, mask = (data.features[name].select(data.x) for name in ("input_ids", "attention_mask"))
    assert ids.tolist() == [[3, 4, 0], [5, 0, 0], [6, 7, 8]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    real = sf.data.from_sequences([torch.ones(2, 3), torch.ones(1, 3)], [0.5, 1.5], longest=4, pad=-1, dtype="float32")
    assert [tuple(part.select(real.x).shape) for part in real.features.values()] == [(2, 4, 3), (2, 4)]
    assert real.task.name == "regression"
    assert set(real.features["input_ids"].select(real.x)[1, 1:].flatten().tolist()) == {-1.0}


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        ([], {}, "there are no sequences"),
        ([[1], []], {}, "sequence 1 is empty"),
        ([[1], [1, 2]], {"longest": 1}, "sequence 1 has 2 numbers, more than longest=1"),
        ([torch.ones(2, 2), torch.ones(2, 3)], {"dtype": "float32"}, "sequence 1 has width (3,); expected (2,)"),
        ([[1.5], [2.0]], {}, "holds 1.5 in row 0, counted from 0; dtype='int64' expects whole numbers"),
        ([[1], [2]], {"names": ("x", "x")}, "names=('x', 'x') is not allowed"),
        ([[1], [2]], {"names": "ab"}, "names='ab' is not allowed"),
    ],
    ids=["none", "empty", "longer", "width", "real", "names", "text"],
)
def test_sequences_refused(rows: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        sf.data.from_sequences(rows, [0, 1], **options)
