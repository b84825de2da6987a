"""Label DP: the stated chances and noise, the gradient of the formula, and an epsilon that an audit cannot beat."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed
from splitfed.attacks.labels.norm import Norm
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.core.privacy_events import Event, Laplace, Protects, Pure, Unit
from splitfed.core.random import generator, stream
from splitfed.core.tasks import Task, binary, classification, regression
from splitfed.data.dataset import Dataset
from splitfed.defenses import LabelDp
from splitfed.defenses.label_dp import keep_probability
from splitfed.models.mlp import mlp
from splitfed.topologies import multi_task, u_shaped, vertical
from splitfed.training.run import Run
from tests.examples import toy_data

ROWS = 20000


def drawn(seed: int = 0) -> torch.Generator:
    return generator(seed, "label dp")


@pytest.mark.parametrize(("task", "classes"), [(binary(), 2), (classification(2), 2), (classification(10), 10)])
def test_randomised_response_has_the_stated_chances(task: Task, classes: int) -> None:
    """epsilon = ln 3: 3/4 of two classes stay, 3/12 of ten, and every other class is as likely."""
    keep = keep_probability(math.log(3), classes)
    assert keep == pytest.approx(3 / (3 + classes - 1))
    y = torch.full((ROWS,), 1)
    told = LabelDp(epsilon=math.log(3)).relabel(y, task, drawn())
    assert told.dtype == y.dtype
    shares = torch.bincount(told, minlength=classes).double() / ROWS
    expected = torch.full((classes,), (1 - keep) / (classes - 1), dtype=torch.float64)
    expected[1] = keep
    assert len(shares) == classes
    assert float((shares - expected).abs().max()) < 5 * math.sqrt(0.25 / ROWS)


@pytest.mark.parametrize("classes", [2, 10])
def test_no_answer_is_likelier_by_more_than_e_to_the_epsilon(classes: int) -> None:
    """The exact chances of an answer under two labels: their greatest ratio is e^epsilon."""
    for epsilon in (0.1, 1.0, 4.0):
        keep = keep_probability(epsilon, classes)
        assert keep / ((1 - keep) / (classes - 1)) == pytest.approx(math.exp(epsilon))


def test_audit_of_the_noisy_targets() -> None:
    """For every threshold on what tells two labels apart best, |log(TPR/FPR)| stays below epsilon, and comes near."""
    epsilon = 1.0
    for task in (binary(), classification(3)):
        told = [
            LabelDp(epsilon=epsilon, mode="gradient").targets(torch.full((200000,), label), task, drawn(label))
            for label in (0, 1)
        ]
        if task.name == "binary":
            scores = [t.double() for t in told]
        else:
            # The log-likelihood ratio of the two labels, up to a factor.
            scores = [(t[:, 0] - 1).abs() - t[:, 0].abs() + t[:, 1].abs() - (t[:, 1] - 1).abs() for t in told]
        ratios = []
        for cut in (-1.9, -1.0, 0.0, 0.5, 1.0, 1.9):
            rates = [float((s > cut).double().mean()) for s in scores]
            if min(rates) > 0.01:
                ratios.append(math.log(rates[1] / rates[0]))
        assert max(ratios) < epsilon + 0.05
        assert max(ratios) > 0.7 * epsilon


def test_the_noise_on_targets_is_laplace_of_the_stated_scale() -> None:
    from scipy import stats

    y = torch.arange(ROWS) % 3
    for task, labels, exact, scale in (
        (binary(), y % 2, (y % 2).double(), 1 / 0.5),
        (classification(3), y, functional.one_hot(y, 3).double(), 2 / 0.5),
    ):
        noise = LabelDp(epsilon=0.5, mode="gradient").targets(labels, task, drawn()).double() - exact
        assert noise.shape == exact.shape
        assert stats.kstest((noise / scale).flatten().numpy(), "laplace").pvalue > 0.001


@pytest.mark.parametrize("task", [binary(), classification(4)], ids=["one logit", "four classes"])
def test_the_gradient_is_that_of_the_formula(task: Task) -> None:
    """g + sum_c u_c grad_c with each grad_c from a loss of its own; with one logit g + u (grad_1 - grad_0)."""
    single = task.name == "binary"
    torch.manual_seed(0)
    weight = torch.randn(5, 1 if single else 4, requires_grad=True)
    x, y = torch.randn(7, 5), torch.randint(0, 2 if single else 4, (7,))
    defense = LabelDp(epsilon=1.0, mode="gradient")
    noisy = defense.targets(y, task, drawn())
    (found,) = torch.autograd.grad(task.loss(x @ weight, noisy), weight)

    def gradient(row: int, label: int) -> Tensor:
        (g,) = torch.autograd.grad(task.loss(x[row : row + 1] @ weight, torch.tensor([label])), weight)
        return g

    expected = torch.zeros_like(weight)
    for row in range(7):
        expected += gradient(row, int(y[row])) / 7
        if single:
            u = float(noisy[row] - y[row])
            expected += u * (gradient(row, 1) - gradient(row, 0)) / 7
        else:
            u = noisy[row] - functional.one_hot(y[row], 4)
            expected += sum(float(u[c]) * gradient(row, c) for c in range(4)) / 7
    torch.testing.assert_close(found, expected)


def rows(count: int = 600) -> Dataset:
    """Rows of eight columns, one positive in nine."""
    numbers = generator(3, "label dp rows")
    x = torch.randn(count, 8, generator=numbers)
    raw = x @ torch.randn(8, generator=numbers) - 4.0 + torch.randn(count, generator=numbers)
    return Dataset("rare", x, (raw > 0).long(), binary()).vertical({"left": range(4), "right": range(4, 8)})


def two_party(*defenses: LabelDp) -> Run:
    with stream(0):
        bottoms = {role: nn.Sequential(nn.Linear(4, 8), nn.ReLU()) for role in ("left", "right")}
        top = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    data = rows().clients(1, auxiliary=60, victims=128)
    return splitfed.train(vertical(bottoms, top, labels="server"), data, rounds=2, defenses=defenses)


def test_the_norm_attack_falls_and_truth_is_what_it_is_scored_by() -> None:
    """Undefended the lengths of gradients tell everything; at epsilon .5 next to nothing."""
    found = {}
    for name, defenses in {
        "none": (),
        "labels": (LabelDp(epsilon=0.5),),
        "gradient": (LabelDp(epsilon=0.5, mode="gradient"),),
    }.items():
        run = two_party(*defenses)
        results = [
            run.attack(Norm(), adversary="left0", seed=seed)[0] for seed in range(4 if name == "gradient" else 1)
        ]
        found[name] = sum(r.scores["attack"]["auc"].mean for r in results) / len(results)
        assert torch.equal(results[0].truth, run.data.victims.y)
    assert found["none"] > 0.95
    # A blind AUC has a standard deviation of .082; the answers of randomised response are the same at every look.
    assert found["labels"] < 0.8
    assert abs(found["gradient"] - 0.5) < 0.16


def test_labels_are_drawn_once_and_targets_at_every_step() -> None:
    model = mlp((1, 8, 8), 10, (16, 12))
    data = toy_data(100).clients(1, victims=4)
    record = Recording(("client0",))
    for mode in ("labels", "gradient"):
        run = splitfed.train(
            u_shaped(model, ("relu1", "relu2")),
            data,
            rounds=2,
            defenses=LabelDp(epsilon=1.0, mode=mode),
            logging=splitfed.Logging(record=record),
        )
        party = run.engine.parties["client0"]
        held, true = party.state.labels("train")["fc3"], data.clients[0].train.y
        if mode == "labels":
            assert 0 < int((held != true).sum()) < len(true)
        else:
            assert torch.equal(held, true)
        for part in ("validation", "test"):
            assert torch.equal(party.state.labels(part)["fc3"], getattr(data.clients[0], part).y), "scored by the truth"


def test_events_and_guarantees() -> None:
    once, steps = LabelDp(epsilon=2.0), LabelDp(epsilon=2.0, mode="gradient")
    assert once.event() == Event(Pure(2.0), Protects.LABELS, Unit.LABEL)
    assert steps.event() == Event(Laplace(0.5), Protects.LABELS, Unit.LABEL)
    assert once.guarantee == "epsilon 2 for each training label, drawn once"
    assert steps.guarantee == "epsilon 2 for each training label, at each step, composed over the steps of a row"


def two_heads(second: str | None) -> splitfed.Topology:
    bottoms = {role: nn.Linear(4, 3) for role in ("left", "right")}
    tops = {"one": nn.Linear(6, 1), "two": nn.Linear(6, 1)}
    return multi_task(bottoms, tops, targets={"one": None, "two": second})


def test_heads() -> None:
    """Each of several heads by name; two that learn from the same labels would tell them twice."""
    data = rows()
    data = data.with_target("other", data.y.flip(0), binary()).clients(1, auxiliary=0, victims=4)
    run = splitfed.train(two_heads("other"), data, rounds=1, defenses=LabelDp(epsilon=0.1, outputs=("out_two",)))
    train = data.clients[0].train
    one, two = (
        next(p for p in run.engine.parties.values() if p.role == r).state.labels("train") for r in ("one", "two")
    )
    assert torch.equal(one["out_one"], train.y)
    assert not torch.equal(two["out_two"], train.label("other"))
    assert LabelDp().heads(two_heads("other")) == ("out_one", "out_two")
    with pytest.raises(InvalidInput, match="heads 'out_one' and 'out_two' learn from the same labels"):
        splitfed.train(two_heads(None), data, defenses=LabelDp())
    with pytest.raises(InvalidInput, match="unknown head of label_dp: 'out_too'; did you mean 'out_two'"):
        splitfed.train(two_heads("other"), data, defenses=LabelDp(outputs=("out_too",)))


def test_refused() -> None:
    with pytest.raises(InvalidInput, match=r"label_dp epsilon=0 is not allowed; expected a number in \(0, inf\)"):
        LabelDp(epsilon=0)
    with pytest.raises(InvalidInput, match="unknown label_dp mode 'gradients'; did you mean 'gradient'"):
        LabelDp(mode="gradients")
    with pytest.raises(InvalidInput, match="it acts on labels, not on edges; give outputs"):
        LabelDp(on=("middle->head",))
    data = Dataset("real", torch.randn(40, 8), torch.randn(40), regression())
    with pytest.raises(InvalidInput, match="label_dp protects class labels; the task is 'regression'"):
        splitfed.train(
            u_shaped(mlp((8,), 1, (6, 5)), ("relu1", "relu2")), data.clients(1, victims=4), defenses=LabelDp()
        )
