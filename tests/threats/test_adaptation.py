"""What attacks state about defenses is what runs show: untouched where it is not needed, used where it is adapted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import FORWARD, IN_TRAINING, Attack, DefenseEffect, Knowledge, Needs, Phase, Progress
from splitfed.attacks.gradients.gradient_matching import ClientGradient, newest_step
from splitfed.attacks.gradients.idlg import Idlg
from splitfed.attacks.labels.norm import Norm
from splitfed.attacks.labels.spectral import Spectral
from splitfed.attacks.membership.membership_threshold import MembershipThreshold
from splitfed.attacks.reconstruction.linear_inverse import LinearInverse
from splitfed.attacks.reconstruction.token_decoder import TokenDecoder
from splitfed.attacks.training_time.sdar import Sdar
from splitfed.core.defense import _CAPABILITIES, Defense
from splitfed.core.messages import View
from splitfed.defenses import DpSgd, Dropout, Marvell, Mid, Noise, TopK
from splitfed.registry import TABLES
from splitfed.study.report.remarks import attack_remarks
from splitfed.study.results import AttackRecord
from splitfed.threats.adaptation import WITHOUT_EFFECT, Mark, effects, mark, path, unadapted
from splitfed.threats.knowledge import KnowledgeGrants
from splitfed.threats.recorded_training import recorded_view
from splitfed.topologies import vanilla
from tests.attacks.examples import by_heart, fed_run, network, perceptron, two_party
from tests.attacks.training_time_examples import go
from tests.defenses.test_every_defense import DEFENSES
from tests.golden.cases import attack as least
from tests.thinning import thin
from tests.threats.adaptation_examples import (
    PLANTED,
    Shifted,
    Tilted,
    given,
    is_adapted,
    is_touched,
    predict,
    trained,
)

AT_INFERENCE = ("linear_inverse", "rmle", "shadow", "unsplit", "membership_threshold", "membership_shadow")
AT_INFERENCE_TOO = (
    "inverse_network", "nearest", "ladder", "strongest", "grn", "attribute", "token_decoder", "fsha", "sdar", "pcat",
    "insider_labels", "membership_releases", "lira", "strongest_membership", "model_inversion", "model_completion",
    "dip", "latent_search", "lbfgs_inversion", "query_inversion", "own_features",
)  # fmt: skip
IN_A_STEP = (
    "norm", "direction", "spectral", "direct_label", "batch_label_inference", "unsplit_labels", "similar",
    "gaussian_mixture", "co_training",
)  # fmt: skip


def exhaustive(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


MORE = {"token_decoder": TokenDecoder(epochs=20, width=16, queries=1)}
"""Attacks that with the least of work predict the same whatever arrives."""


def contradictions(name: str, attack: Attack) -> dict[str, str]:
    """Return effect -> what runs show, where that is not what `attack` states."""
    found = {}
    for effect in PLANTED:
        said = mark(attack, {effect})
        if said is Mark.NOT_NEEDED:
            shown = Mark.NOT_YET if is_touched(name, attack, effect) else Mark.NOT_NEEDED
        else:
            shown = Mark.ADAPTED if is_adapted(name, attack, effect) else Mark.NOT_YET
        if shown is not said:
            found[effect.name] = f"stated {said}, shown {shown}"
    return found


@pytest.mark.filterwarnings("ignore:.*learns without what Shrunk adds")
@pytest.mark.parametrize("name", [*AT_INFERENCE, *exhaustive(AT_INFERENCE_TOO)])
def test_what_an_attack_states_is_what_runs_show(name: str) -> None:
    """Bit by bit: where an effect is said not to matter nothing changes; of the others it uses all that it says."""
    assert contradictions(name, MORE.get(name, least(name))) == {}


@pytest.mark.parametrize("name", thin(IN_A_STEP, 2))
def test_what_an_attack_on_labels_states_is_what_runs_show(name: str) -> None:
    """Behind a scaled loss scores keep their order; behind a release that was shifted by the sender's bias, all."""
    attack = least(name)
    apart = {"RELEASE", "TASK_WEIGHT"}
    assert {e: said for e, said in contradictions(name, attack).items() if e not in apart} == {}
    assert is_touched(name, attack, DefenseEffect.LABELS)
    if mark(attack, {DefenseEffect.TASK_WEIGHT}) is Mark.ADAPTED:
        world = "u_shaped" if name == "unsplit_labels" else "summed"
        whole, quarter = (
            predict(attack, given(trained(world, one), name, attack)) for one in (None, DefenseEffect.TASK_WEIGHT)
        )
        if name == "unsplit_labels":
            assert torch.allclose(whole, quarter, rtol=1e-3, atol=1e-4)
        else:
            scale = 1.0 if name in ("direction", "similar", "gaussian_mixture", "co_training") else 4.0
            assert torch.allclose(whole, scale * quarter, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))


@pytest.mark.parametrize("name", ["norm", "direct_label"])
def test_what_the_sender_does_to_its_release_is_before_the_label(name: str) -> None:
    """A release that a defense shifts by one, and one that the last bias shifts: the same gradients come back."""
    attack = least(name)
    moved = trained.__wrapped__("summed", None)
    for side in ("left0", "right0"):
        (module,) = moved.engine.parties[side].state.modules.values()
        module[-1].bias.data += 1
    shifted = predict(attack, given(trained("summed", DefenseEffect.RELEASE), name, attack))
    assert torch.allclose(shifted, predict(attack, given(moved, name, attack)), rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Bypass(LinearInverse):
    """Says that it adapts, and learns from releases that nothing defends."""

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        (query,) = (knowledge.query,)
        assert query is not None
        return super().run(view, replace(knowledge, query=_undefended), generator, progress)


def _undefended(x: Tensor) -> dict[str, Tensor]:
    (_, known) = given(trained("vanilla", None), "linear_inverse", LinearInverse())
    assert known.query is not None
    return dict(known.query(x))


def test_a_claim_of_an_attack_whose_queries_bypass_the_defense_is_found_out() -> None:
    assert is_adapted("linear_inverse", LinearInverse(), DefenseEffect.RELEASE)
    assert contradictions("linear_inverse", Bypass())["RELEASE"] == "stated adapted, shown not yet"


@dataclass(frozen=True)
class Silent(Attack):
    """A plug-in that says nothing."""

    requires = frozenset({Needs.RELEASES, Needs.QUERIES})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        return torch.zeros(len(next(iter(view.select(kind="activation").tensors().values()))), *knowledge.shape)


def test_an_attack_that_states_nothing_is_adapted_to_nothing() -> None:
    assert {mark(Silent(), effects(defense)) for defense in DEFENSES.values()} == {Mark.NOT_YET}
    assert Spectral(rows="releases").adapts_to is None


def test_every_attack_of_the_registry_states_what_it_adapts_to() -> None:
    named = {*AT_INFERENCE, *AT_INFERENCE_TOO, *IN_A_STEP}
    assert [name for name in TABLES["attacks"] if least(name).adapts_to is None] == []
    assert named <= set(TABLES["attacks"])
    rest = {name: least(name) for name in set(TABLES["attacks"]) - named}
    assert [name for name, one in rest.items() if one.adapts_to and one.phase is Phase.INFERENCE] == []


def test_every_capability_has_an_effect_or_is_said_to_have_none() -> None:
    shown = {one: set[DefenseEffect]() for one in set(_CAPABILITIES.values())}
    for defense in DEFENSES.values():
        for one in shown:
            if isinstance(defense, one):
                shown[one] |= effects(defense)
    silent = {one for one in shown if one in WITHOUT_EFFECT}
    assert silent == set(WITHOUT_EFFECT)
    for name, planted in PLANTED.items():
        assert effects(planted) == {name}
    kinds = {one for one in shown if any(isinstance(p, one) for p in PLANTED.values())}
    assert kinds | silent == set(shown)


def test_effects_by_hand() -> None:
    assert {name: effects(DEFENSES[name]) for name in ("noise", "mid", "distance_correlation", "marvell")} == {
        "noise": {DefenseEffect.RELEASE},
        "mid": {DefenseEffect.RELEASE, DefenseEffect.LAYER_PENALTY},
        "distance_correlation": {DefenseEffect.PENALTY, DefenseEffect.TASK_WEIGHT},
        "marvell": {DefenseEffect.GRADIENT},
    }
    assert effects(Noise(on=("prototype->fed_server",))) == {DefenseEffect.UPLOAD}
    assert effects(Noise(on=("prototype->fed_server", "a->b"))) == {DefenseEffect.UPLOAD, DefenseEffect.RELEASE}


def test_marks_by_hand() -> None:
    def said(name: str, defense: str) -> Mark:
        return mark(least(name), effects(DEFENSES[defense]))

    assert said("inverse_network", "noise") is said("rmle", "mid") is said("lira", "dp_sgd") is Mark.ADAPTED
    assert said("inverse_network", "marvell") is said("norm", "noise") is Mark.NOT_NEEDED
    assert said("norm", "marvell") is said("unsplit", "distance_correlation") is Mark.NOT_YET
    assert said("sdar", "mid") is said("membership_threshold", "dp_sgd") is Mark.NOT_YET
    assert mark(Sdar(layout="client"), effects(Mid())) is Mark.ADAPTED
    assert mark(MembershipThreshold(queries=1), {DefenseEffect.RELEASE}) is Mark.NOT_YET
    assert path(least("class_shares")) == IN_TRAINING | {DefenseEffect.UPLOAD}
    assert path(least("attribute")) == FORWARD


def bottom() -> sf.Topology:
    return vanilla(network(), "2")


def misfit_at_truth(defense: Defense, topology: Callable[[], sf.Topology] = bottom) -> float:
    """Return how much of a client's gradient is left by the best of those that its own rows make with any `back`.

    The gradient is linear in what came back at the cut, so that the best is a least squares solution.
    """
    run = fed_run(topology, batch=2, defenses=(defense,))
    local = run.evaluator.grants.local("fed_server", 0)
    assert local is not None
    view = recorded_view(run.engine, "fed_server", 0)
    client = ClientGradient(view.segments, local, newest_step(view, local), "cpu")
    x = run.data.clients[0].train.x.double()
    _, back = client.draw_unknowns(x.shape[1:], torch.Generator().manual_seed(0))
    (value, drawn), columns = next(iter(back.items())), []
    for place in range(drawn.numel()):
        unit = torch.zeros(drawn.numel(), dtype=torch.float64)
        unit[place] = 1
        columns.append(torch.cat([g.detach().flatten() for g in client.gradient(x, {}, {value: unit.view_as(drawn)})]))
    basis, target = torch.stack(columns, 1), torch.cat([g.flatten() for g in client.target])
    best = torch.linalg.lstsq(basis, target[:, None]).solution
    return float((basis @ best - target[:, None]).norm() / target.norm())


@pytest.mark.parametrize(
    "defense",
    [TopK(k=3), Dropout(rate=0.5), Noise(scale=1.0), Tilted(), DpSgd(noise_multiplier=0.0, max_norm=1e-3)],
    ids=lambda d: type(d).__name__,
)
def test_what_comes_back_at_a_cut_is_searched_with_all_that_defenses_make_of_it(defense: Defense) -> None:
    """The client's own rows explain its update, whatever was done to release, gradient or clipped; weights are single
    precision, and an update of a step of a tenth is known to some 1e-6 of the weights."""  # fmt: skip
    assert misfit_at_truth(defense) < 0.02


def test_the_noise_on_weights_is_not_explained() -> None:
    assert misfit_at_truth(DpSgd(noise_multiplier=1.0, max_norm=0.1)) > 0.5


CLIPPED = DpSgd(noise_multiplier=1e-4, max_norm=0.05)


def psnr(attack: Attack) -> float:
    (result,) = fed_run(perceptron, defenses=(CLIPPED,)).attack(attack, adversary="fed_server")
    return result.scores["attack"]["psnr"].mean


def test_idlg_under_dp_sgd_needs_the_clipping_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that was clipped is shorter than any that the class which was read off makes."""
    attack = Idlg(iterations=120, restarts=2)
    assert psnr(attack) > 40
    local = KnowledgeGrants.local
    monkeypatch.setattr(KnowledgeGrants, "local", lambda *given: replace(local(*given), clip=None))  # type: ignore[type-var]
    assert psnr(attack) < 15


def test_every_row_of_a_batch_is_clipped_by_itself() -> None:
    """The truth makes the update that was seen, with labels that are known, and only if it is clipped row by row."""
    run = fed_run(perceptron, batch=4, defenses=(DpSgd(noise_multiplier=0.0, max_norm=0.5),))
    local = run.evaluator.grants.local("fed_server", 0)
    assert local is not None
    assert local.clip == 0.5
    view, rows = recorded_view(run.engine, "fed_server", 0), run.data.clients[0].train
    labels = {"out": 40 * nn.functional.one_hot(rows.y, 10).double()}

    def misfit(clip: float | None) -> float:
        client = ClientGradient(view.segments, replace(local, clip=clip), newest_step(view, local), "cpu")
        found = client.gradient(rows.x.double(), labels, {})
        left = sum(float((g.detach() - seen).square().sum()) for g, seen in zip(found, client.target, strict=True))
        return left / sum(float(seen.square().sum()) for seen in client.target)

    assert misfit(0.5) < 1e-6
    assert misfit(None) > 0.1


def test_membership_by_loss_averages_masks_away() -> None:
    run = by_heart(Dropout(rate=0.7))
    once, averaged = (run.attack(MembershipThreshold(queries=n))[0].scores["attack"]["auc"].mean for n in (1, 10))
    assert averaged > once + 0.05


def test_a_model_without_a_draw_is_asked_twice() -> None:
    calls = 0

    def ask(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.zeros(len(x), 2)

    known = Knowledge(
        (2,), predict=ask, candidates=torch.zeros(3, 2), candidate_labels=torch.zeros(3).long(), classes=2
    )
    MembershipThreshold()(View("server", ()), known, torch.Generator())
    assert calls == 2


def test_results_name_the_defenses_that_an_attack_does_not_adapt_to() -> None:
    run = two_party(Marvell(s=1.0))
    (blind,) = run.attack(Norm(), adversary="left0")
    assert blind.unadapted == ("marvell",)
    assert {row["unadapted"] for row in blind.rows()} == {"marvell"}
    assert "128 victims, did not adapt to marvell: accuracy" in repr(blind)
    assert blind.to_frame()["unadapted"].unique().tolist() == ["marvell"]
    (adapted,) = run.attack(LinearInverse(), adversary="server0")
    assert adapted.unadapted == ()
    assert "adapt" not in repr(adapted)


def test_what_a_training_attack_had_to_leave_out_is_named() -> None:
    """A generic network cannot imitate what layers of the client's own determine; one in the client's layout can."""
    with pytest.warns(UserWarning, match="learns without what Mid adds"):
        (generic,) = go(Sdar(width=8), defenses=[Mid()]).attack(Sdar(width=8))
    assert generic.unadapted == ("mid",)
    same = Sdar(width=8, layout="client")
    assert go(same, defenses=[Mid()]).attack(same)[0].unadapted == ()


def test_defenses_of_other_clients_are_no_matter() -> None:
    assert unadapted(Norm(), [Marvell(), Noise(), Marvell(s=2.0), Shifted()]) == ("marvell",)
    assert unadapted(LinearInverse(), [Noise(), Mid()], ["Mid"]) == ("mid",)


def test_a_remark_names_them() -> None:
    told = AttackRecord("norm", "norm", "server", {}, unadapted=("marvell", "iso"))
    assert attack_remarks(told) == ["norm did not adapt to: marvell, iso"]
    assert attack_remarks(replace(told, unadapted=())) == []
