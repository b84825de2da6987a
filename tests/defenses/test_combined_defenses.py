"""Several defenses in one run: on one edge in the order given, on different edges, their bytes and their promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense import (
    Defense,
    GradientDefense,
    PenaltyDefense,
    PenaltyGradient,
    ReleaseDefense,
    packed_bytes,
)
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.own_values import compute_own_value
from splitfed.core.random import generator, stream
from splitfed.core.tasks import binary
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.defenses import (
    Adversarial,
    DistanceCorrelation,
    DpSgd,
    GaussianRelease,
    GradientRounding,
    LabelDp,
    LaplaceRelease,
    Marvell,
    MaxNorm,
    Noise,
    Quantization,
    TopK,
)
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.privacy.accountants import compose
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.schedules.base import Training
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.examples import SmallUNet, engine_of, images, toy_data


@dataclass(frozen=True)
class Times(ReleaseDefense, GradientDefense):
    """Release and gradient times `factor`; keeps every gradient that it is given."""

    factor: float = 2.0
    seen: list[Tensor] = field(default_factory=list, compare=False)

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z * self.factor

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        self.seen.append(g)
        return g * self.factor


@dataclass(frozen=True)
class Plus(ReleaseDefense, GradientDefense):
    """Release and gradient plus one."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + 1

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        return g + 1


@cache
def federation() -> Federation:
    return toy_data(80).clients(1, auxiliary=10, victims=10)


def net() -> nn.Module:
    return mlp((1, 8, 8), 10, (16, 12))


def cut() -> Topology:
    with stream(0):
        return vanilla(net(), "fc2")


def trained(*defenses: Defense, topology: Topology | None = None, data: Federation | None = None, **more: Any) -> Run:
    given = {
        "rounds": 1,
        "batch_size": 16,
        "defenses": defenses,
        "logging": sf.Logging(record=sf.Recording(("server", "client0"))),
        **more,
    }
    return sf.train(topology or cut(), data or federation(), **given)


def sent(run: Run) -> dict[str, Tensor]:
    """What the server gets when the first client predicts its training rows, by value."""
    with run.engine.record_party("server") as recorder:
        run.engine.predict(0, "train", "evaluate", 0)
    return recorder.view().select(kind="activation").tensors()


def made(run: Run, value: str) -> Tensor:
    return compute_own_value(run.engine.party(0, "client"), value, "train")


def test_releases_are_changed_in_the_order_given() -> None:
    """2 z + 1, and 2 (z + 1)."""
    for guards, plus in (((Times(), Plus()), 1.0), ((Plus(), Times()), 2.0)):
        run = trained(*guards)
        assert torch.equal(sent(run)["fc2"], 2 * made(run, "fc2") + plus)


def test_gradients_are_changed_in_the_order_given() -> None:
    """What client 0 receives first is 2 g + 1, and 2 (g + 1), of the g that the first defense was given."""
    for first, last, plus in ((Times(), Plus(), 1.0), (Plus(), Times(), 2.0)):
        run = trained(first, last)
        got = run.engine.view("client0").select(kind="gradient").messages[0].tensors["fc2"]
        if isinstance(first, Times):
            assert torch.allclose(got, 2 * first.seen[0] + plus)
        else:
            assert isinstance(last, Times)
            assert torch.allclose(got, 2 * last.seen[0])
            assert float(last.seen[0].mean()) > 0.9, "one was added before, and gradients are small"


def test_noise_then_quantization_and_the_other_way_round() -> None:
    """Two bits are four levels; noise that comes after leaves none of them."""
    levels = sent(trained(Noise(scale=0.5), Quantization(bits=2)))["fc2"]
    assert len(levels.unique()) == 4
    noisy = sent(trained(Quantization(bits=2), Noise(scale=0.5)))["fc2"]
    assert len(noisy.unique()) == noisy.numel()


def test_noise_draws_anew_at_every_position() -> None:
    """Two of the same kind on one edge: deviations add in squares, 3² + 4² = 5²."""
    run = trained(Noise(scale=3.0), Noise(scale=4.0), rounds=1)
    gap = sent(run)["fc2"] - made(run, "fc2")
    assert float(gap.std()) == pytest.approx(5.0, rel=4 / (2 * gap.numel()) ** 0.5)


# 10 rows of 96 numbers: as they are, 3 bits each and a range of two floats, 8 floats and places of 7 bits each.
PLAIN, SHORT, SPARSE = None, 10 * 96 * 3 // 8 + 8, 10 * 8 * 4 + 10 * 8 * 7 // 8
BYTES: list[tuple[tuple[Defense, ...], int | None]] = [
    ((), PLAIN),
    ((Noise(),), PLAIN),
    ((Quantization(bits=3),), SHORT),
    ((Noise(), Quantization(bits=3)), SHORT),
    ((Quantization(bits=3), Noise()), PLAIN),
    ((Quantization(bits=3), TopK(k=8)), SPARSE),
    ((TopK(k=8), Quantization(bits=3)), SHORT),
    ((Quantization(bits=3), DistanceCorrelation()), SHORT),
    ((Quantization(bits=3), GradientRounding(bins=4)), SHORT),
]


@pytest.mark.parametrize(("guards", "size"), BYTES)
def test_what_is_sent_short_is_what_acts_last(guards: tuple[Defense, ...], size: int | None) -> None:
    assert packed_bytes(guards, "activation", 10, (96,), torch.float32) == size


@pytest.mark.parametrize(
    "guards", [(Noise(), Quantization(bits=3)), (Quantization(bits=3), Noise()), (TopK(k=4), Quantization(bits=3))]
)
def test_planned_bytes_are_counted_bytes(guards: tuple[Defense, ...]) -> None:
    run = trained(*guards)
    ready = prepare(cut(), federation(), schedule="sequential", defenses=guards, optimizer=None, training=Training(16))
    assert cost(ready, 1).flows == {f: n for f, n in run.engine.traffic.flows.items() if f.phase == "train"}


def test_each_edge_has_its_own() -> None:
    """Noise on the left, four levels on the right."""
    bottoms = {side: nn.Sequential(nn.Flatten(), nn.Linear(32, 6)) for side in ("left", "right")}
    with stream(0):
        topology = vertical(bottoms, nn.Linear(12, 10), labels="right")
    data = toy_data(80).halves().clients(1, auxiliary=10, victims=10)
    guards = (Noise(scale=2.0, on=("bottom_left->fusion",)), Quantization(bits=2, on=("bottom_right->fusion",)))
    run = trained(*guards, topology=topology, data=data, logging=sf.Logging(record=sf.Recording()))
    found = {value: t for value, t in sent(run).items() if t.dim() == 2}
    (left,), (right,) = ([t for v, t in found.items() if side in v] for side in ("left", "right"))
    own = {side: run.engine.party(0, side) for side in ("left", "right")}
    (name,) = (v for v in found if "left" in v)
    assert float((left - compute_own_value(own["left"], name, "train")).std()) == pytest.approx(2.0, rel=0.2)
    assert len(right.unique()) == 4


def test_a_penalty_changes_what_is_learnt_and_no_promise() -> None:
    """The ledger of a private release beside distance correlation is that of the release alone."""
    private = GaussianRelease(clip=5.0, noise_multiplier=0.5)
    alone, both = trained(private, rounds=2), trained(private, DistanceCorrelation(alpha=0.5), rounds=2)
    assert both.ledger == alone.ledger
    first, second = (run.engine.party(0, "client").state.contents() for run in (alone, both))
    assert max(float((first[n] - second[n]).abs().max()) for n in first) > 1e-4


@dataclass(frozen=True)
class Energy(PenaltyDefense):
    """The sum of squares of what leaves, with its gradient left to autograd or written out."""

    written: bool = False

    def penalty(self, z: Tensor, context: Context) -> Tensor | PenaltyGradient:
        return PenaltyGradient(0.02 * z.detach()) if self.written else 0.01 * z.square().sum()


def test_a_penalty_with_its_slope_written_out_trains_alike() -> None:
    """Behind a defense that changes what leaves, on edges of several values, each with its share of the penalty."""

    def weights(*guards: Defense) -> dict[str, Tensor]:
        torch.manual_seed(0)
        topology, (x, y) = u_shaped(SmallUNet().double(), ("pool1", "up2")), images(16)
        engine = engine_of(topology, x.double(), y, optim=sf.Optim("SGD", {"lr": 0.1}), defenses=guards)
        engine.train(0, 0, list(torch.arange(16).split(8)))
        return topology.state_dict(engine.modules(0))

    asked, told, plain = (weights(Times(factor=0.5), *more) for more in ([Energy()], [Energy(written=True)], []))
    for name, value in asked.items():
        torch.testing.assert_close(told[name], value, rtol=0, atol=1e-13)
    assert max(float((plain[name] - value).abs().max()) for name, value in asked.items()) > 1e-3


@dataclass(frozen=True)
class Halves(ReleaseDefense):
    """Halves what leaves, in place; which no defense may."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z.mul_(0.5)


def test_what_a_penalty_has_seen_may_not_be_changed_in_place() -> None:
    with pytest.raises(InvalidInput, match="client0: a defense changed in place what leaves 'bottom'; not allowed"):
        trained(DistanceCorrelation(), Halves())


def test_a_penalty_sees_what_defenses_before_it_made() -> None:
    """Behind noise a thousand times as strong as the release the dependence is that of noise: the penalty differs."""
    penalty, noise = DistanceCorrelation(alpha=1.0), Noise(scale=1e3)
    ends = [
        trained(*guards).engine.party(0, "client").state.contents() for guards in ((penalty, noise), (noise, penalty))
    ]
    start = {s.name: s.module for s in cut().segments}["bottom"].state_dict()
    moved = [sum(float((c[f"bottom/{n}"] - t).abs().sum()) for n, t in start.items()) for c in ends]
    assert moved[1] < 0.1 * moved[0], "what drowns in noise has hardly a gradient"


@dataclass(frozen=True)
class Watched(Marvell):
    """Marvell that keeps the labels it was shown."""

    seen: list[Tensor] = field(default_factory=list, compare=False)

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        self.seen.extend(context.labels.values())
        return super().gradient(name, g, context)


def test_marvell_hides_the_labels_that_label_dp_made() -> None:
    """It groups by the noisy labels, the only ones that anybody trains on; the ledger has the labels' line alone."""
    drawn = generator(0, "combined")
    x = torch.randn(90, 8, generator=drawn)
    data = sf.data.from_arrays(x, (x[:, 0] > 0).long(), task=binary(), name="toy").clients(1, auxiliary=9, victims=9)
    with stream(0):
        topology = u_shaped(mlp((8,), 1, (12, 6), seed=None), ("relu1", "relu2"))
    marvell = Watched()
    run = trained(
        LabelDp(epsilon=0.5),
        marvell,
        topology=topology,
        data=data,
        logging=sf.Logging(record=sf.Recording()),
        local=sf.LocalUpdate(sampling="shuffle"),
    )
    true = data.clients[0].train.y
    (noisy,) = run.engine.party(0, "client").state.labels("train").values()
    assert not torch.equal(noisy, true)
    shown = torch.cat(marvell.seen)
    assert int(shown.sum()) == int(noisy.sum())
    assert len(shown) == len(true)
    (line,) = run.ledger.lines
    assert (line.protects, line.uses) == ("labels", 1)


def test_two_label_defenses_act_on_a_gradient_in_order() -> None:
    """Behind rounding to 4 bins noise is noise; before it, what leaves has no more than 4 different numbers a step."""
    with stream(0):
        topology = u_shaped(net(), ("relu1", "relu2"))
    for guards, few in (((MaxNorm(), GradientRounding(bins=4)), True), ((GradientRounding(bins=4), MaxNorm()), False)):
        run = trained(*guards, topology=topology)
        step = next(m for m in run.engine.view("server").messages if m.kind == "gradient")
        (g,) = step.tensors.values()
        assert (len(g.unique()) <= 5) == few


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (Quantization(bits=4), "Quantization: its release mixes the rows of a batch on"),
        (MaxNorm(), "MaxNorm: its gradient may mix the rows of a batch"),
        (Adversarial(bottleneck=0), "Adversarial: its penalty may mix the rows of a batch"),
    ],
)
def test_dp_sgd_refuses_what_mixes_rows(other: Defense, word: str) -> None:
    with stream(0):
        topology = u_shaped(net(), ("relu1", "relu2"))
    on = ("middle->head",) if isinstance(other, MaxNorm) else ("bottom->middle",)
    named = type(other)(**{**{n: getattr(other, n) for n in other.__dataclass_fields__}, "on": on})
    for order in ((DpSgd(noise_multiplier=1.0), named), (named, DpSgd(noise_multiplier=1.0))):
        with pytest.raises(InvalidInput, match=f"dp_sgd cannot stand beside {word}"):
            trained(*order, topology=topology)


def test_two_private_releases_on_one_edge_compose() -> None:
    """Frozen before the cut, a row costs its two releases (one round in training, none scored twice) by both.

    Two Gaussian mechanisms of multiplier 4 used n times each are one of 4 / √(2 n).
    """
    both = (GaussianRelease(noise_multiplier=4.0, freeze=True), GaussianRelease(clip=2.0, noise_multiplier=4.0))
    run = trained(*both, rounds=3)
    assert run.ledger.totals[0].epsilon == pytest.approx(gaussian_epsilon(4.0 / (2 * 3) ** 0.5, run.ledger.delta))
    other = LaplaceRelease(epsilon=0.5)
    run = trained(both[0], other, rounds=3)
    assert [line.uses for line in run.ledger.lines] == [3, 3]
    event = other.event()
    assert event is not None
    first = both[0].event()
    assert run.ledger.totals[0].epsilon == pytest.approx(compose([(first, 3), (event, 3)], run.ledger.delta).epsilon)
