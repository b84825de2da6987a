"""Private releases in a topology: they change what leaves, freeze what they say, and `latent` costs what it costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Stamp
from splitfed.core.privacy_events import Pure
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses import DpSgd, GaussianRelease, LaplaceRelease, Latent
from splitfed.defenses.binary_encoding import to_bits
from splitfed.defenses.clipping import clip_rows
from splitfed.defenses.latent import FORMS
from splitfed.engines.local import LocalEngine
from splitfed.privacy.charges import learns_from_rows
from splitfed.topologies import u_shaped, vanilla
from tests.examples import InPlaceAfterCut, SmallUNet, assert_refuses, engine_of, images
from tests.thinning import thin


def topology() -> Topology:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return vanilla(InPlaceAfterCut(), "pool").with_task(classification(10))


def fitted(defense: Defense) -> Topology:
    known = topology()
    return defense.fit(known, pass_example(known, {"x": images(4)[0]}), 0)


def engine(*defenses: Defense) -> LocalEngine:
    known = topology()
    for defense in defenses:
        known = defense.fit(known, pass_example(known, {"x": images(4)[0]}), 0)
    return engine_of(known, *images(32), defenses=defenses)


def released(made: LocalEngine) -> Tensor:
    with made.record_party("server") as recorder:
        made.train(0, 0, [torch.arange(32)])
    return next(iter(recorder.view().select(kind="activation").tensors().values()))


@pytest.mark.parametrize(
    "defense", [GaussianRelease(epsilon=1e3), LaplaceRelease(epsilon=1e3)], ids=lambda d: type(d).__name__
)
def test_removing_it_changes_the_release(defense: Defense) -> None:
    plain, guarded = released(engine()), released(engine(defense))
    assert plain.shape == guarded.shape
    order = 2 if isinstance(defense, GaussianRelease) else 1
    length = torch.linalg.vector_norm(plain.flatten(1), ord=order, dim=1).view(-1, 1, 1, 1)
    assert float(length.min()) > 1
    assert float((guarded - plain / length).abs().mean()) < 0.05, "clipped rows with little noise"
    assert float((guarded - plain / length).abs().mean()) > 1e-5


@pytest.mark.parametrize("make", [GaussianRelease, LaplaceRelease, Latent])
def test_frozen_segments_do_not_move(make: type) -> None:
    more = {"noise_multiplier": 1.0} if make is GaussianRelease else {}
    for freeze in (False, True):
        made = engine(make(freeze=freeze, **more))
        segment = made.topology.segments[0]
        assert learns_from_rows(segment.module) is not freeze
        before = {n: t.clone() for n, t in made.parties["client0"].state.modules[segment.name].state_dict().items()}
        made.train(0, 0, [torch.arange(16), torch.arange(16, 32)])
        after = made.parties["client0"].state.modules[segment.name].state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before) is freeze
    assert learns_from_rows(topology().segments[0].module), "the model that was given is left alone"


def test_a_frozen_batch_norm_ignores_its_batch() -> None:
    known = u_shaped(SmallUNet(), ("pool1", "up2")).with_task(classification(10))
    made = GaussianRelease(noise_multiplier=1.0, freeze=True).fit(known, pass_example(known, {"x": images(4)[0]}), 0)
    assert not learns_from_rows(made.segments[0].module)
    assert learns_from_rows(made.segments[1].module)
    x = images(8)[0]
    module = made.segments[0].module
    one, all_ = module(x[:1]), module(x)
    first = (one[0] if isinstance(one, tuple) else one)[0]
    torch.testing.assert_close(first, (all_[0] if isinstance(all_, tuple) else all_)[0])


def from_bits(bits: Tensor, whole: int, fraction: int) -> Tensor:
    """Return the numbers that `bits` (batch, r l) spell: (batch, r)."""
    rows = bits.unflatten(1, (-1, 1 + whole + fraction))
    powers = 2.0 ** torch.arange(whole - 1, -fraction - 1, -1, device=bits.device, dtype=bits.dtype)
    spelled: Tensor = (1 - 2 * rows[..., 0]) * (rows[..., 1:] * powers).sum(-1)
    return spelled


def test_numbers_as_bits_by_hand() -> None:
    """Sign, two whole and one fraction bits: 2.75 -> 0 10 1 (2.5), -1 -> 1 01 0, 9 is capped at 3.5."""
    bits = to_bits(torch.tensor([[2.75, -1.0, 9.0]]), 2, 1)
    assert bits.tolist() == [[0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1]]
    assert from_bits(bits, 2, 1).tolist() == [[2.5, -1.0, 3.5]]
    z = torch.linspace(-7, 7, 100).view(1, -1).requires_grad_()
    assert set(to_bits(z, 3, 6).unique().tolist()) == {0.0, 1.0}, "exactly"
    back = from_bits(to_bits(z, 3, 6), 3, 6)
    assert float((back - z).detach().abs().max()) <= 2**-6
    back.sum().backward()
    assert z.grad is not None
    assert float(z.grad.abs().min()) > 0, "a gradient passes"


def loss(defense: Latent, bits: int) -> float:
    """The largest log-ratio over all pairs of rows and all outcomes, by going through every one of them."""
    ones, zeros = defense.chances(bits)
    words = [torch.tensor(word, dtype=torch.float64) for word in itertools.product((0.0, 1.0), repeat=bits)]
    logs = torch.stack(
        [
            torch.stack([torch.where(o > 0.5, p, 1 - p).log().sum() for o in words])
            for p in (torch.where(word > 0.5, ones, zeros) for word in words)
        ]
    )
    assert torch.allclose(logs.exp().sum(1), torch.ones(len(words), dtype=torch.float64)), "a distribution each"
    return float((logs[:, None] - logs[None]).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("epsilon", [0.5, 6.0])
def test_the_true_epsilon_by_enumeration(form: str, epsilon: float) -> None:
    defense = Latent(epsilon=epsilon, form=form, coefficient=3.0)
    true = loss(defense, 4)
    assert defense.true_epsilon(4) == pytest.approx(true, rel=1e-9)
    if form == "symmetric":
        assert true == pytest.approx(epsilon)
    elif form == "unary":
        assert true == pytest.approx(4 * math.log((1 + math.exp(epsilon / 4)) / 2))
        assert true < epsilon
    elif form == "modified":
        assert true <= epsilon + 1e-9


@pytest.mark.parametrize(("coefficient", "published"), [(5.0, 23.3), (10.0, 34.1)])
def test_the_utility_enhancing_form_does_not_cost_what_it_claims(coefficient: float, published: float) -> None:
    """r l = 10: (r l / 2) log(a (a² - a + 1)), whatever is asked for."""
    a = coefficient
    for epsilon in (0.5, 1.0, 10.0):
        true = Latent(epsilon=epsilon, form="utility", coefficient=a).true_epsilon(10)
        assert true == pytest.approx(5 * math.log(a * (a * a - a + 1)))
        assert true == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_sent_with_the_stated_chances(form: str) -> None:
    defense = Latent(epsilon=20.0, form=form, coefficient=2.0)
    context = Context("client0", "a->b", Stamp("train", 0, 0, 0), 0, 0)
    z = torch.cat([torch.ones(20000, 6), torch.zeros(20000, 6)])
    sent = defense.release("z", z, context)
    assert set(sent.unique().tolist()) == {0.0, 1.0}
    for rows, chances in zip(sent.split(20000), defense.chances(6), strict=True):
        error = 4 * (chances * (1 - chances) / 20000).sqrt()
        assert bool(((rows.double().mean(0) - chances).abs() <= error + 1e-12).all())
    torch.testing.assert_close(defense.expected("z", z, context)[0].double(), defense.chances(6)[0])


def test_latent_sends_bits_and_counts_their_bytes() -> None:
    """6 x 4 x 4 numbers of 10 bits: 960 bits a row, 120 bytes on the wire."""
    made = engine(Latent(freeze=True))
    seen = released(made)
    assert tuple(seen.shape) == (32, 960)
    assert set(seen.unique().tolist()) <= {0.0, 1.0}
    activations = [n for flow, (_, n) in made.traffic.flows.items() if flow.kind == "activation"]
    assert activations == [32 * 120]
    server = fitted(Latent()).segments[1].module
    assert server.layers["0"][0].weight.shape == (96, 960)


def test_without_dense_the_segment_must_read_bits_itself() -> None:
    x, bare = images(4)[0], Latent(dense=False, whole=1, fraction=0)
    with pytest.raises(InvalidInput, match="cannot take what arrives on edge"):
        pass_example(bare.fit(topology(), pass_example(topology(), {"x": x}), 0), {"x": x})
    top = nn.Sequential(nn.Linear(64 * 2, 16), nn.Linear(16, 10))
    known = vanilla(nn.Sequential(nn.Flatten(), top), "0", sent_inputs=("input",)).with_task(classification(10))
    # 64 numbers of two bits: a flat model whose first layer is as wide as they are.
    value = known.segments[0].outputs[0]
    ready = bare.fit(known, TopologyFacts({value: (64,)}, {}, {}, frozenset(), frozenset()), 0)
    assert pass_example(ready, {next(iter(known.inputs)): x}).shapes[value] == (128,)


def test_before_the_run_is_known_latent_promises_nothing_small() -> None:
    mechanism = Latent().event().mechanism
    assert isinstance(mechanism, Pure)
    assert mechanism.epsilon > 1e300


REFUSED = {
    "both": (
        lambda: GaussianRelease(noise_multiplier=1.0, epsilon=1.0),
        "takes a noise_multiplier, or the epsilon of one",
    ),
    "neither": (lambda: GaussianRelease(), "takes a noise_multiplier, or the epsilon of one release; give one"),
    "clip": (lambda: GaussianRelease(clip=0.0, epsilon=1.0), "gaussian_release clip=0.0 is not allowed"),
    "norm": (
        lambda: LaplaceRelease(clip=1e308),
        "laplace_release clip=1e+308 is not allowed; expected a number in (0, 1e",
    ),
    "noise": (lambda: GaussianRelease(noise_multiplier=1e308), "gaussian_release noise_multiplier=1e+308 is not"),
    "weights": (lambda: DpSgd(max_norm=1e308, epsilon=1.0), "dp_sgd max_norm=1e+308 is not allowed; expected a number"),
    "epsilon": (lambda: LaplaceRelease(epsilon=-1.0), "laplace_release epsilon=-1.0 is not allowed"),
    "form": (lambda: Latent(form="unari"), "unknown latent form 'unari'; did you mean 'unary'"),
    "bits": (lambda: Latent(whole=20, fraction=9), "latent whole + fraction = 29 is not allowed; at most 24"),
    "coefficient": (lambda: Latent(coefficient=0.0), "latent coefficient=0.0 is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    assert_refuses(*REFUSED[case])


def test_a_value_that_its_own_sender_reads_on_cannot_become_bits() -> None:
    known = u_shaped(SmallUNet(), ("down1", "up2")).with_task(classification(10))
    with pytest.raises(InvalidInput, match=r"latent turns .* into bits, but segment"):
        Latent().fit(known, pass_example(known, {"x": images(4)[0]}), 0)


class Scaled(nn.Module):
    """Hands a factor over a cut after `a` that is computed before it: `factor` of what the first layer returns."""

    def __init__(self, factor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.factor = factor
        self.first, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = torch.relu(self.first(x))
        factor, h = self.factor(z), self.a(z)
        return {"y": self.b(h * (factor if factor.dim() == 0 else factor[:, None]))}


@pytest.mark.parametrize("kind", thin([GaussianRelease, LaplaceRelease], 2))
def test_a_value_without_rows_is_refused_by_name_and_one_number_a_row_is_clipped(kind: Any) -> None:
    defense = kind(clip=1.0, noise_multiplier=1.0) if kind is GaussianRelease else kind(clip=1.0, epsilon=1.0)
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    data = sf.data.from_arrays(x, torch.arange(40) % 4).clients(1, auxiliary=0, victims=0, validation=0.0, test=0.2)
    single = vanilla(Scaled(lambda z: z.mean()), "a", example=x[:8])
    with pytest.raises(InvalidInput, match=r"clips rows, and 'mean' on bottom->top has none: it is one tensor"):
        sf.train(single, data, rounds=1, defenses=[defense])
    a_row = vanilla(Scaled(lambda z: z.mean(1)), "a", example=x[:8])
    assert sf.train(a_row, data, rounds=1, defenses=[defense]).ledger is not None
    z = torch.tensor([0.5, -4.0, 0.0])
    assert torch.equal(clip_rows(z, 1.0, 2), torch.tensor([0.5, -1.0, 0.0]))
