"""Label attacks: what they are given, the figures worked out by hand, and what is refused.

Two-party runs without the labels at the adversary: rare positives (about one in ten) with a trained top for the binary
attacks, real digits whose logits are summed for `direct_label` and `batch_label_inference`, and U-shaped digits for
`unsplit_labels`. Victims were never trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack, Knowledge, Phase, hints_of
from splitfed.attacks.labels.batch_label_inference import BatchLabelInference
from splitfed.attacks.labels.direct_label import DirectLabel
from splitfed.attacks.labels.direction import Direction
from splitfed.attacks.labels.label_attack import example_gradients
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.labels.unsplit_labels import UnsplitLabels
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator, stream
from splitfed.core.tasks import regression
from splitfed.data.dataset import Dataset
from splitfed.models.mlp import mlp
from splitfed.stats.intervals import Interval
from splitfed.threats.fresh_segments import head_after
from splitfed.topologies import multi_hop, vanilla, vertical
from splitfed.training.run import Run
from tests.attacks.examples import rare, summed, two_party, u_digits
from tests.examples import refusal
from tests.object_graph import reachable
from tests.rounding import single

BINARY: dict[str, Attack] = {
    "norm": Norm(),
    "direction": Direction(),
    "direction of three": Direction(hints=3),
    "spectral": Spectral(),
}
CLASSES: dict[str, tuple[Attack, str]] = {
    "direct_label": (DirectLabel(), "left0"),
    "batch_label_inference": (BatchLabelInference(iterations=300, batch_size=8), "left0"),
    "unsplit_labels": (UnsplitLabels(iterations=100), "server"),
}


def run_for(name: str) -> Run:
    return u_digits() if name == "unsplit_labels" else summed()


def score_reconstruction(
    run: Run, attack: Attack, adversary: str, metric: str, **options: Any
) -> tuple[Interval, Interval]:
    """The guess's score and the majority's."""
    (result,) = run.attack(attack, adversary=adversary, **options)
    return result.scores["attack"][metric], result.scores["majority"][metric]


def seen(name: str) -> tuple[Attack, View, Knowledge]:
    """An attack with its view and knowledge, as the inquiry gives them."""
    kept: list[tuple[View, Knowledge]] = []
    attack, party = CLASSES[name] if name in CLASSES else (BINARY[name], "left0")
    run = run_for(name) if name in CLASSES else two_party()

    @dataclass(frozen=True)
    class Spy(type(attack)):  # type: ignore[misc]
        def run(self, view: View, knowledge: Knowledge, *rest: Any) -> Tensor:
            kept.append((view, knowledge))
            found: Tensor = super().run(view, knowledge, *rest)
            return found

    run.attack(Spy(**vars(attack)), adversary=party)
    return attack, *kept[0]


@pytest.mark.parametrize("name", [*BINARY, *CLASSES])
def test_no_label_can_be_reached(name: str) -> None:
    """Nor any tensor that is as long as they are and as telling, beside the hints that were asked for."""
    attack, view, knowledge = seen(name)
    run = run_for(name) if name in CLASSES else two_party()
    truth = run.data.victims.y
    assert {m.kind for m in view.messages} <= {"activation", "gradient"}
    assert set(knowledge.hints) == set(hints_of(attack, knowledge.classes))
    for thing in reachable([view, knowledge]):
        if isinstance(thing, Tensor) and thing.shape == truth.shape:
            assert not torch.equal(thing.long(), truth)


def made(gradients: Tensor, sizes: tuple[int, ...] = (), name: str = "z") -> View:
    """A view of a party that received these rows in batches of `sizes`."""
    parts = gradients.split(list(sizes or (len(gradients),)))
    stamps = [Stamp("rehearse", 0, 0, step) for step in range(len(parts))]
    return View(
        "left",
        tuple(Message("s", "left", "gradient", "e", {name: g}, s) for g, s in zip(parts, stamps, strict=True)),
    )


def predict(attack: Attack, view: View, classes: int | None = 2, **known: Any) -> list[Any]:
    found: list[Any] = attack(view, Knowledge((4,), classes=classes, **known), generator(0)).prediction.tolist()
    return found


def test_norm_by_hand() -> None:
    """Lengths 5, 13, 0: the groups {0, 5} and {13} have means 2.5 and 13."""
    rows = torch.tensor([[3.0, 4.0], [5.0, 12.0], [0.0, 0.0]]) / 3
    assert predict(Norm(), made(rows)) == pytest.approx([5 - 7.75, 13 - 7.75, -7.75], abs=1e-5)


def test_batches_of_different_size_are_comparable() -> None:
    """The same four losses, averaged over 3 rows and over 1."""
    rows = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0], [3.0, 4.0]])
    shares = rows / torch.tensor([[3.0], [3.0], [3.0], [1.0]])
    view = made(shares, (3, 1))
    assert torch.allclose(example_gradients(view)["z"], rows)
    lengths = predict(Norm(), view)
    assert lengths[0] == single(lengths[3], size=16.0)


def test_direction_by_hand() -> None:
    """Hints at rows 0 and 3: along them 1, against them -1, at 45 degrees .7071, a zero row 0."""
    rows = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [5.0, 5.0], [0.5, 0.0], [0.0, 0.0]])
    found = predict(Direction(hints=2), made(rows), hints={1: torch.tensor([0, 3])})
    assert found == pytest.approx([1.0, -1.0, 0.5**0.5, 1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("flip", [1.0, -1.0])
def test_spectral_calls_the_smaller_group_positive_whichever_way_it_lies(flip: float) -> None:
    rows = flip * torch.tensor([[4.0, 0.1], [0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [4.0, 0.0]]) / 5
    found = predict(Spectral(), made(rows))
    assert [score > 0 for score in found] == [True, False, False, False, True]
    # The groups lie four apart, the boundary midway.
    assert found[0] - found[1] == pytest.approx(4.0, abs=0.05)


def test_spectral_is_wrong_where_negatives_are_the_rarer_class() -> None:
    """Nothing in the gradients says so, and the truth does not turn the sign."""
    victims = two_party().data.victims
    other = Dataset("rare", victims.x, 1 - victims.y, victims.task).with_features(victims.features)
    assert score_reconstruction(two_party(), Spectral(), "left0", "auc", victims=other)[0].mean < 0.2


def test_direct_label_by_hand() -> None:
    """p - onehot: negative at the label alone; for one logit negative for positives."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [5.0, 0.0, 0.0]])
    rows = logits.softmax(1) - torch.eye(3)[[2, 0]]
    scores = torch.tensor(predict(DirectLabel(), made(rows), classes=3))
    assert scores.argmax(1).tolist() == [2, 0]
    assert (scores > 0).sum(1).tolist() == [1, 1]
    assert predict(DirectLabel(), made(torch.tensor([[-0.1], [0.4]]))) == pytest.approx([0.2, -0.8])


def test_direct_label_reads_a_mean_of_logits_as_well() -> None:
    assert score_reconstruction(summed(fusion="mean"), DirectLabel(), "right0", "accuracy")[0].mean == 1.0


def test_batch_label_inference_uses_the_weight_gradient_alone() -> None:
    """Gradients of examples may differ: if those of the weights agree, so do the guesses.

    Two rows with equal inputs: only the sum of their gradients reaches the weights.
    """
    with stream(0):
        module = nn.Linear(4, 3)
    x = torch.rand(1, 4, generator=generator(5)).repeat(2, 1)
    one = torch.tensor([[-0.5, 0.3, 0.2], [0.1, -0.3, 0.2]])
    views = [replace(made(rows), segments={"bottom": module}) for rows in (one, one.flip(0), one + 0.1 * one.flip(1))]
    attack = BatchLabelInference(iterations=50)
    first, swapped, other = (torch.tensor(predict(attack, v, 3, own={"left": x})) for v in views)
    assert torch.allclose(first, swapped, atol=1e-5)
    assert not torch.allclose(first, other, atol=1e-3)


def test_batch_label_inference_finds_the_difference_that_is_unique() -> None:
    """Three independent inputs, one layer: onehot(y) - p comes out, so all labels do."""
    with stream(0):
        module = nn.Linear(4, 3)
    x = torch.eye(4)[:3] * 3
    labels = torch.tensor([2, 0, 1])
    p = torch.randn(3, 3, generator=generator(1)).softmax(1)
    wanted = torch.eye(3)[labels] - p
    view = replace(made(-wanted / 3), segments={"bottom": module})
    found = torch.tensor(predict(BatchLabelInference(iterations=2000), view, 3, own={"left": x}))
    assert torch.allclose(found, wanted, atol=0.02)


def test_unsplit_clone_knows_no_trained_weight() -> None:
    run = u_digits()
    make = head_after(run.engine.topology, "server", 1)
    assert make is not None
    one, two = make(), make()
    held = run.engine.parties["client0"].state.modules["head"].state_dict().values()
    first = run.engine.topology.segment("head").module.state_dict().values()
    secret = [t for t in (*held, *first) if t.numel() > 1]
    for mine, other in zip(one.parameters(), two.parameters(), strict=True):
        assert not torch.equal(mine, other)
    for thing in reachable(make):
        if isinstance(thing, Tensor):
            assert not any(thing.shape == t.shape and torch.equal(thing, t) for t in secret)
    assert make()(torch.rand(5, 16)).shape == (5, 10)


def test_hints_are_left_out_of_the_score() -> None:
    (result,) = two_party().attack(Direction(hints=3), adversary="left0")
    assert result.prediction.shape == result.truth.shape == (128,)
    assert result.scores["attack"]["auc"].n == 125
    assert result.scores["majority"]["accuracy"].n == 125
    (plain,) = two_party().attack(Norm(), adversary="left0")
    assert plain.scores["attack"]["auc"].n == 128


def test_same_generator_same_guess() -> None:
    one, two, other = (
        summed().attack(CLASSES["batch_label_inference"][0], adversary="left0", seed=s)[0].prediction for s in (5, 5, 6)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def hop_run() -> Run:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16, 16), seed=None)
    return splitfed.train(multi_hop(model, ("relu1", "relu2")), splitfed.data.digits().clients(1, victims=20), rounds=1)


def real() -> Run:
    drawn = rare(200)
    data = Dataset("real", drawn.x, drawn.x[:, 0], regression()).with_features(drawn.features)
    with stream(0):
        bottoms = {role: nn.Linear(4, 2) for role in ("left", "right")}
    return splitfed.train(vertical(bottoms, nn.Linear(4, 1), labels="server"), data.clients(1, victims=20), rounds=1)


def labelled_server() -> Run:
    with stream(0):
        model = mlp((1, 8, 8), 10, (16,), seed=None)
    return splitfed.train(vanilla(model, "relu1"), splitfed.data.digits().clients(1, victims=20), rounds=1)


RUNS: dict[str, tuple[Callable[[], Run], Attack, str, str]] = {
    "norm of ten classes": (summed, Norm(), "left0", "norm predicts labels of two classes; this run has 10 classes"),
    "direction of ten classes": (summed, Direction(), "left0", "direction predicts labels of two classes"),
    "spectral of ten classes": (summed, Spectral(), "left0", "spectral predicts labels of two classes"),
    "more hints than positives": (two_party, Direction(hints=100), "left0", "hints=100 is not allowed; there are"),
    "spectral without releases": (
        two_party,
        Spectral(rows="releases"),
        "left0",
        "spectral rows='releases' needs releases; left0 receives none",
    ),
    "direct_label behind a trained top": (
        two_party,
        DirectLabel(),
        "left0",
        "direct_label needs logits of 2 classes at the cut, summed without weights; the released value has shape (8,)",
    ),
    "batch_label_inference behind a trained top": (
        two_party,
        BatchLabelInference(),
        "left0",
        "batch_label_inference needs logits of 2 classes at the cut",
    ),
    "unsplit_labels where no head follows": (
        summed,
        UnsplitLabels(),
        "left0",
        "UnsplitLabels needs architecture of the head; this run does not grant that",
    ),
    "real labels": (
        real,
        DirectLabel(),
        "left0",
        "direct_label needs labels with classes; those of this run have none",
    ),
    "two classes of real labels": (
        real,
        Norm(),
        "left0",
        "norm predicts labels of two classes; this run has no classes",
    ),
    "labels at the server": (labelled_server, DirectLabel(), "server", "party 'server' is given the labels"),
    "labels at the client": (labelled_server, DirectLabel(), "client0", "party 'client0' is given the labels"),
}


@pytest.mark.parametrize("case", RUNS)
def test_refused(case: str) -> None:
    run, attack, party, text = RUNS[case]
    assert text in refusal(run().attack, attack, adversary=party)


def test_no_gradients_in_the_view() -> None:
    """Two values' gradients cannot be told apart as logits, and at inference there are none."""
    view = two_party().observe("left0", phase=Phase.INFERENCE)
    with pytest.raises(InvalidInput, match="Norm needs gradients at the cut; this run does not grant that"):
        Norm()(view, Knowledge((8,), classes=2), generator(0))
    both = View("left", (*made(torch.ones(2, 2), name="a").messages, *made(torch.ones(2, 2), name="b").messages))
    with pytest.raises(InvalidInput, match=re.escape("reads the gradient of one value; left receives those of ['a',")):
        DirectLabel()(both, Knowledge((4,), classes=2), generator(0))


def test_budgets() -> None:
    assert BatchLabelInference.with_budget("full") == BatchLabelInference(iterations=10_000, lr=0.05)
    assert UnsplitLabels.with_budget("full").lr == 0.001
    assert Direction.with_budget("full", hints=5).hints == 5
    assert Norm.with_budget("quick") == Norm()


def test_spectral_reads_releases_where_some_arrive() -> None:
    """Rows that differ only in what was released; the gradients are equal."""
    z = torch.tensor([[9.0, 0.0], [0.0, 0.0], [0.1, 0.0], [9.0, 0.0], [0.0, 0.1]])
    view = made(torch.ones(5, 2))
    message = Message("c", "left", "activation", "f", {"h": z}, Stamp("rehearse", 0, 0, 0))
    found = predict(Spectral(rows="releases"), View("left", (message, *view.messages)))
    assert [score > 0 for score in found] == [True, False, False, True, False]


def test_gradients_of_several_servers_are_told_apart_from_one_for_every_row() -> None:
    """A client of `multi_task` gets a gradient from each server, two for every row."""
    with stream(0):
        bottoms = {"client": mlp((1, 8, 8), 8, (), seed=None)}
        tops = {name: mlp((8,), 10, (), seed=None) for name in ("one", "two")}
    topology = splitfed.topologies.multi_task(bottoms, tops, targets=dict.fromkeys(tops))
    run = splitfed.train(topology, splitfed.data.digits().clients(1, victims=20), rounds=1)
    with pytest.raises(InvalidInput, match="needs one gradient for every row; client0 receives 40 for 20 rows"):
        run.attack(BatchLabelInference(iterations=1), adversary="client0")
