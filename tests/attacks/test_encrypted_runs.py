"""What an encrypted server reads: everything under the published protocols, and nothing under weights in shares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.attacks.base import Attack, Phase, StatesStepRows, Target
from splitfed.attacks.encrypted_layer import EncryptedLayer
from splitfed.attacks.labels.direct_label import DirectLabel
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.reconstruction.inverse_network import InverseNetwork
from splitfed.attacks.reconstruction.linear_gradient_inversion import LinearGradientInversion, solve
from splitfed.attacks.scoring.release_metrics import TrueReleases, score_releases
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import FED, Recording, View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator
from splitfed.encryption.ciphertexts import decrypt, load_ciphertexts
from splitfed.encryption.evaluating_party import MASK
from splitfed.encryption.key_holder_party import WEIGHT
from splitfed.encryption.party_maker import EncryptedPartyMaker
from splitfed.encryption.settings import MASKED_WEIGHTS
from splitfed.encryption.views import EncryptedViews
from splitfed.registry import TABLES, load
from splitfed.threats.computation_views import views_of
from splitfed.training.run import AttackResult, Run
from tests.attacks.examples import encrypted_digits, encrypted_u, u_digits

LEAKING, SHARES = ("plain_gradient", "constant_mask"), "weight_shares"
SMALL = LinearGradientInversion(step_rows=4)
FRESH = 16 * 4096 / 6 * 2.0**-29
"""The precision of a fresh ciphertext under the preset of these runs: 16 standard deviations of N/6 2^-scale."""


def one(run: Run, attack: str | Attack, **options: Any) -> AttackResult:
    (result,) = run.attack(attack, **options)
    return result


@cache
def small(protocol: str, hidden: int | None = None, momentum: float = 0.0) -> AttackResult:
    return one(encrypted_digits(protocol, hidden=hidden, momentum=momentum), SMALL)


def means(result: AttackResult, who: str = "attack") -> dict[str, float]:
    return {metric: interval.mean for metric, interval in result.scores[who].items()}


# What leaks.


@pytest.mark.parametrize("protocol", LEAKING)
def test_all_labels_are_read_off_the_gradient_of_the_logits(protocol: str) -> None:
    assert means(one(encrypted_digits(protocol), "direct_label")) == {"accuracy": 1.0}


def test_a_gradient_of_hidden_features_is_no_gradient_of_logits() -> None:
    with pytest.raises(InvalidInput, match=r"direct_label needs logits of 10 classes .* has shape \(12,\)"):
        encrypted_digits("constant_mask", hidden=12, momentum=0.9).attack("direct_label")


def test_activations_are_read_to_a_thousandth_in_steps_below_the_classes() -> None:
    result, run = small("plain_gradient"), encrypted_digits("plain_gradient")
    assert result.prediction.shape == result.truth.shape == (12, 6)
    assert float((result.prediction - result.truth).abs().max()) < 1e-3
    assert means(result)["max_error"] < 1e-3 < means(result, "mean_release")["max_error"]
    assert means(result)["determined"] == 1.0
    # The truth, which is decrypted, is what the client's segment makes of the victims.
    with torch.no_grad():
        released = run.engine.modules(0)["bottom"](run.data.victims.x)
    assert torch.allclose(result.truth, released, rtol=0.0, atol=FRESH)


@pytest.mark.parametrize(
    ("protocol", "hidden", "momentum"), [("plain_gradient", None, 0.0), ("constant_mask", 12, 0.9)]
)
def test_errors_are_within_the_bound_that_stands_beside_them(
    protocol: str, hidden: int | None, momentum: float
) -> None:
    """Also where the client has layers behind the server's, and where the server's optimizer has a momentum."""
    result = small(protocol, hidden, momentum)
    assert result.error_bound is not None
    errors = (result.prediction - result.truth).abs().max(1).values
    assert bool((errors <= result.error_bound + FRESH).all())
    assert means(result)["max_error"] <= means(result)["error_bound"]
    assert means(result)["max_error"] == pytest.approx(float(errors.double().mean()))
    assert means(result)["error_bound"] == pytest.approx(float(result.error_bound.mean()) + FRESH)


def steps_of(run: Run, view: View) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return of every step under a constant mask g, what CKKS and rounding add to the new weights, and the releases."""
    maker, rate = run.engine.run_parties.maker, run.engine.parties["server"].state.rate
    (layer,) = (m for s in view.segments.values() for m in s.modules() if isinstance(m, nn.Linear))
    assert isinstance(maker, EncryptedPartyMaker)
    assert rate is not None
    holder, found = maker.keys_of("client0"), []
    by_kind = [view.select(kind=kind).messages for kind in ("activation", "gradient", MASKED_WEIGHTS)]
    for sent, gradient, masked in zip(*by_kind, strict=True):
        name = next(n for n in sent.tensors if not n.endswith("transposed"))
        z = decrypt(load_ciphertexts(sent.tensors[name], holder.public), holder)
        g = next(iter(gradient.tensors.values())).double()
        exact = layer.weight.detach().double() - rate * g.T @ z
        found.append((g, masked.tensors[WEIGHT].double() - MASK - exact, z))
    return found


def test_errors_of_successive_weights_are_those_of_ckks_over_rate_and_smallest_singular_value() -> None:
    """Within what the errors of CKKS, measured with the keys, allow; what is stated without keys covers these."""
    run = encrypted_digits("constant_mask")
    view = run.evaluator.observe(run.evaluator.observation("server", seed=0), Phase.STEP, 4)
    layer = EncryptedViews().knowledge(run.engine, "server", 0)["encrypted_layer"]
    assert layer.fresh == pytest.approx(FRESH)
    outcome = SMALL(view, replace(run.evaluator.grants.knowledge("server", 0, 0), encrypted_layer=layer), generator(0))
    assert outcome.error_bound is not None
    steps = steps_of(run, view)
    assert [len(g) for g, _, _ in steps] == [4] * 3
    for (g, error, z), found, stated in zip(
        steps, outcome.prediction.split(4), outcome.error_bound.split(4), strict=True
    ):
        norm, smallest = float(torch.linalg.matrix_norm(error, 2)), float(torch.linalg.svdvals(g).min())
        # The truth has an error of its own, that of a fresh ciphertext.
        allowed = norm / (layer.rate * smallest)
        assert float((found - z).abs().max()) <= allowed + FRESH
        assert float(error.abs().max()) <= layer.weight_error(g) + FRESH
        # 16 standard deviations in place of the largest of 60 numbers, and each of a column at its worst.
        assert allowed / 3 <= float(stated[0]) <= 100 * allowed


def test_steps_as_large_as_the_run_had_are_read_in_part_and_nothing_is_stated_of_them() -> None:
    """Ten victims and two: gradients of ten classes have nine independent rows at most."""
    run, attack = encrypted_digits("plain_gradient"), LinearGradientInversion(step_rows=0)
    assert isinstance(attack, StatesStepRows)
    result = one(run, attack)
    assert result.error_bound is not None
    assert result.error_bound.isinf().tolist() == [True] * 10 + [False] * 2
    assert means(result)["determined"] == pytest.approx(2 / 12)
    assert float((result.prediction - result.truth)[10:].abs().max()) < 1e-3
    assert float((result.prediction - result.truth)[:10].abs().max()) > 0.1


def test_other_attacks_are_handed_gradients_of_logits_and_nothing_else() -> None:
    run = encrypted_digits("plain_gradient")
    view = run.evaluator.observe(run.evaluator.observation("server", seed=0), Phase.STEP)
    kinds = {m.kind for m in view.messages}
    assert kinds == {"activation", "gradient"}
    shown = EncryptedViews().select(view, DirectLabel(), run.engine.topology).messages
    assert [[*m.tensors] for m in shown] == [["middle"]]
    assert EncryptedViews().select(view, SMALL, run.engine.topology) is view
    plain = u_digits()
    seen = plain.evaluator.observe(plain.evaluator.observation("server", seed=0), Phase.STEP)
    assert views_of(plain.engine.topology).select(seen, DirectLabel(), plain.engine.topology) is seen


# What does not.


def test_every_attack_by_a_server_without_keys_is_refused_in_one_line_under_shares() -> None:
    refusals = encrypted_digits(SHARES).applicable("server")
    assert set(refusals) == set(TABLES["attacks"])
    for name, line in refusals.items():
        assert line is not None, name
        assert "\n" not in line
        if load("attacks", name).phase is not Phase.TRAINING and load("attacks", name).target is not Target.TOKENS:
            assert line == f"what 'server' receives is encrypted under 'weight_shares'; {name} has nothing to read"


@pytest.mark.parametrize("attack", [SMALL, DirectLabel(), InverseNetwork(), Norm(), MembershipThreshold()])
def test_attacks_are_refused_under_shares_before_anything_is_sent(attack: Attack) -> None:
    run = encrypted_digits(SHARES)
    before = run.engine.traffic.bytes()
    with pytest.raises(InvalidInput, match=r"what 'server' receives is encrypted under 'weight_shares'; .* nothing"):
        run.attack(attack, adversary="server")
    assert run.engine.traffic.bytes() == before


@pytest.mark.parametrize("protocol", LEAKING)
def test_under_the_published_protocols_attacks_that_read_gradients_alone_are_left(protocol: str) -> None:
    refusals = encrypted_digits(protocol).applicable("server")
    assert {name for name, line in refusals.items() if line is None} == {
        "direct_label", "linear_gradient_inversion", "similar"
    }  # fmt: skip
    assert refusals["spectral"] == "spectral predicts labels of two classes; this run has 10 classes"
    for name in ("rmle", "unsplit_labels", "batch_label_inference", "membership_threshold", "attribute"):
        line = f"what 'server' receives beside gradients is encrypted under {protocol!r}; {name} has nothing to read"
        assert refusals[name] == line


def test_a_server_that_is_not_encrypted_has_no_layer_that_is() -> None:
    line = u_digits().applicable("server")["linear_gradient_inversion"]
    assert line == (
        "LinearGradientInversion needs a layer of its own that computes on ciphertexts; this run does not grant that"
    )


def test_a_key_holder_is_told_that_its_view_is_encrypted_and_keeps_its_queries() -> None:
    run = encrypted_digits(SHARES)
    refusals = run.applicable("client0")
    for name in ("membership_releases", "direct_label"):
        line = f"what 'client0' receives is encrypted under 'weight_shares'; {name} has nothing to read"
        assert refusals[name] == line
    assert refusals["membership_threshold"] is None


def test_no_attack_is_tuned_or_placed_in_training_where_releases_are_encrypted() -> None:
    run = encrypted_digits(SHARES)
    with pytest.raises(
        InvalidInput, match=r"what 'server' receives is encrypted under 'weight_shares'; InverseNetwork"
    ):
        run.tune("inverse_network", trials=1)
    adversaries = splitfed.Adversaries(training_attacks={"server": Sdar()})
    with pytest.raises(InvalidInput, match=r"what 'server' receives is encrypted .*; Sdar has nothing to learn from"):
        splitfed.train(encrypted_u(SHARES), run.data, rounds=1, adversaries=adversaries)


def test_who_was_sent_is_not_found_again_among_ciphertexts() -> None:
    """Eight victims sent twice, each matched to the nearest bytes: all of them by values, one by chance."""
    run = encrypted_digits(SHARES)

    def sent(number: int) -> tuple[Tensor, Tensor]:
        rows = run.data.victims.rows([number])
        (message,) = run.observe("server", victims=rows).select(kind="activation").messages
        (content,) = message.tensors.values()
        with torch.no_grad():
            return content[:200_000].double(), run.engine.modules(0)["bottom"](rows.x)[0].double()

    once, again = ([sent(number) for number in range(8)] for _ in range(2))
    for place, least, most in ((0, 0, 6), (1, 8, 8)):
        width = min(len(pair[place]) for pair in (*once, *again))
        first, second = (torch.stack([pair[place][:width] for pair in some]) for some in (once, again))
        found = torch.cdist(first, second).argmin(1)
        # By chance seven or more are found three times in a million.
        assert least <= int((found == torch.arange(8)).sum()) <= most


# The algebra and its scores.


def test_a_step_with_independent_gradients_is_solved_to_the_error_of_its_weights() -> None:
    drawn = generator(0, "solve")
    z, g = torch.randn(5, 7, generator=drawn).double(), torch.randn(5, 9, generator=drawn).double()
    solution, stated = solve(g, g.T @ z, 0.0, 4.0)
    assert torch.allclose(solution, z, rtol=0.0, atol=1e-10)
    assert stated.tolist() == [0.0] * 5
    errors = 1e-4 * torch.sign(torch.randn(9, 7, generator=drawn)).double()
    solution, stated = solve(g, g.T @ z + errors, 1e-4, 4.0)
    smallest = float(torch.linalg.svdvals(g).min())
    assert stated.tolist() == pytest.approx([3 * 1e-4 / smallest] * 5)
    assert 1e-5 < float((solution - z).abs().max()) <= 3 * 1e-4 / smallest


def test_a_step_with_dependent_gradients_is_solved_in_its_space_alone() -> None:
    drawn = generator(1, "solve")
    z, g = torch.randn(6, 3, generator=drawn).double(), torch.randn(6, 4, generator=drawn).double()
    solution, stated = solve(g, g.T @ z, 1e-12, 4.0)
    assert bool(stated.isinf().all())
    assert torch.allclose(g.T @ solution, g.T @ z, rtol=0.0, atol=1e-8)
    assert float(solution.norm()) < float(z.norm())
    # A gradient below the errors, as of a row that the model is sure of, says nothing.
    faint = torch.cat([g[:2], 1e-9 * g[2:3]])
    solution, stated = solve(faint, faint.T @ z[:3] + 1e-6, 1e-6, 4.0)
    assert bool(stated.isinf().all())
    assert float(solution.abs().max()) < 10.0


def test_errors_of_a_weight_add_up_by_their_squares() -> None:
    """Half of a column of norm 2 times 3, twice 2 for four rows, and 12: the root of 9 + 16 + 144."""
    names: Any = {"segment": "middle", "value": "z", "result": "o", "weight": "weight", "masked": None}
    layer = EncryptedLayer(**names, mask=1.0, rate=0.5, bound=2.0, fresh=3.0, encoding=2.0, rounding=12.0)
    assert layer.weight_error(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.5], [1.0, 0.0]])) == pytest.approx(13.0)


def test_scores_of_releases() -> None:
    truth, drawn = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), generator(0)
    prediction = truth + torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    true = TrueReleases(truth, torch.zeros(3, 2), 0.25, torch.tensor([1.0, torch.inf]))
    scores = score_releases(true, prediction, drawn)
    found = {metric: interval.mean for metric, interval in scores["attack"].items()}
    assert found["relative_error"] == pytest.approx((1 / 5 + 0.5 / 2) / 2)
    assert found["max_error"] == pytest.approx(0.75)
    assert (found["determined"], found["error_bound"]) == (0.5, 1.25)
    assert scores["mean_release"]["relative_error"].mean == 1.0
    with pytest.raises(InvalidInput, match=r"releases were predicted in shape \(2, 3\); expected \(2, 2\)"):
        score_releases(true, torch.zeros(2, 3), drawn)


@pytest.mark.exhaustive
def test_an_aggregation_server_reads_of_shares_what_it_reads_in_plain() -> None:
    """Clients' weights are averaged in plain, their shares of the server's layer with them."""

    def go(protocol: str | None) -> Run:
        data = splitfed.data.digits().rows(range(80)).clients(2, auxiliary=40, victims=10, validation=0.0, test=0.2)
        logging = splitfed.Logging(record=Recording((FED,)))
        settings: Any = {"schedule": "splitfed_v1", "batch_size": 64, "optimizer": Optim("SGD", {"lr": 0.1})}
        return splitfed.train(encrypted_u(protocol), data, rounds=1, logging=logging, **settings)

    plain, encrypted = go(None), go(SHARES)
    assert encrypted.applicable(FED) == plain.applicable(FED)
    attack = load("attacks", "inverting_gradients")(iterations=20)
    found = [means(one(run, attack, adversary=FED))["mse"] for run in (plain, encrypted)]
    assert found[1] == pytest.approx(found[0], rel=0.1)
