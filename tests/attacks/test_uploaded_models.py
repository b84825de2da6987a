"""What an aggregation server rebuilds of exchanged models and public scores, and the attacks on them, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.gradients.dlg import Dlg
from splitfed.attacks.gradients.inverting_gradients import InvertingGradients
from splitfed.attacks.membership.confidence import margins
from splitfed.attacks.uploads import upload_membership
from splitfed.attacks.uploads.exchanged_model import GRADIENT_STEP, ExchangedModel, ExchangedRound, PublicScores
from splitfed.attacks.uploads.update_shares import UpdateShares, resolve
from splitfed.attacks.uploads.upload_inversion import UploadInversion
from splitfed.attacks.uploads.upload_membership import UploadMembership, slope
from splitfed.attacks.uploads.uploaded_models import ModelPair, Predict, fit_head
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import WEIGHT_GRADIENT, Message, Stamp, View
from splitfed.core.random import stream
from splitfed.core.topology import Segment
from splitfed.data.candidates import candidates
from splitfed.engines.base import FED
from splitfed.federated import FML, MAFML, FedAKT, FedKD, FedMD, FedPer, FedSgd, Ifca
from splitfed.federated.low_rank import decompress_update
from splitfed.threats.exchanged_models import exchanged_rounds, public_scores
from splitfed.threats.recorded_training import recorded_view
from splitfed.training.local_learner import LocalLearner
from tests.attacks.upload_examples import CELLS, cells_run, exchanged, one_step, sigmoid_network
from tests.examples import asked
from tests.rounding import single

CPU = torch.device("cpu")


def message(kind: str, tensors: Mapping[str, Tensor], down: bool, number: int = 0, replica: int = 0) -> Message:
    ends = (FED, f"client{replica}") if down else (f"client{replica}", FED)
    return Message(*ends, kind, f"{kind}->{ends[1]}", tensors, Stamp("train", replica, number, 0))


def linear(weight: list[list[float]]) -> dict[str, Tensor]:
    return {"m/weight": torch.tensor(weight), "m/bias": torch.zeros(len(weight))}


def model_of(*rounds: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], **options: Any) -> ExchangedModel:
    """One linear layer from two numbers; `rounds`: what went down and what came back."""
    with stream(0):
        segment = Segment("m", "client", nn.Linear(2, len(next(iter(rounds[0][0].values())))), ("x",), ("out",))
    found = tuple(ExchangedRound(i, *one) for i, one in enumerate(rounds))
    return ExchangedModel((segment,), lambda x: {"x": x}, "out", options.pop("scores", True), found, **options)


def guessed(attack: Attack, classes: int, **known: Any) -> Tensor:
    view = View(FED, (message("weights", {"m/weight": torch.ones(1)}, False),), {})
    knowledge = Knowledge((2,), classes=classes, **known)
    return attack(view, knowledge, torch.Generator().manual_seed(0)).prediction


FLAT, STEEP = linear([[0.0, 0.0], [0.0, 0.0]]), linear([[0.0, 0.0], [3.0, 0.0]])
X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]])


def test_membership_is_the_gain_in_log_odds_over_what_was_sent() -> None:
    known = {"candidates": X, "candidate_labels": torch.tensor([1, 1, 0])}
    # Two classes: the log odds of class 1 are 3 x after the round and 0 before it.
    assert guessed(UploadMembership(), 2, exchanged=model_of((FLAT, STEEP)), **known).tolist() == single([3, 0, -6])
    # Two rounds, the first without a gain: their mean; the newest alone.
    two = model_of((STEEP, STEEP), (FLAT, STEEP))
    assert guessed(UploadMembership(), 2, exchanged=two, **known).tolist() == single([1.5, 0, -3])
    assert guessed(UploadMembership(rounds=1), 2, exchanged=two, **known).tolist() == single([3, 0, -6])
    alone = guessed(UploadMembership(calibrated=False), 2, exchanged=model_of((STEEP, STEEP)), **known)
    assert alone.tolist() == single([3, 0, -6])


def test_students_are_calibrated_by_as_much_as_the_one_tells_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    # Over 0, 2, 4: the products of what is away from the means are 2, 0 and 0; the squares 4, 0 and 4.
    assert slope(values, torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)).item() == pytest.approx(0.25)
    assert slope(values, values / 2).item() == 1.0
    assert slope(values, -values).item() == 0.0
    assert slope(values, torch.ones(3, dtype=torch.float64)).item() == 0.0
    known = {"candidates": X, "candidate_labels": torch.tensor([1, 1, 0])}

    def student(steepness: float) -> Predict:
        return lambda x: torch.stack([torch.zeros(len(x)), steepness * x[:, 0]], 1).double().log_softmax(1)

    def gained(before: float, after: float) -> list[float]:
        pair = ModelPair(student(before), student(after))
        monkeypatch.setattr(upload_membership, "uploaded_models", lambda *_, **settings: [pair])
        return [float(score) for score in guessed(UploadMembership(), 2, **known)]

    # Log odds 3, 0, -6 by the client's student; 6, 0, -12 by the others', which tell them by half.
    assert gained(6.0, 3.0) == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    # The other way round one is the most, and all is taken off.
    assert gained(3.0, 6.0) == pytest.approx([3.0, 0.0, -6.0])
    # A student that says the opposite tells nothing.
    assert gained(-3.0, 3.0) == pytest.approx([3.0, 0.0, -6.0])


def test_a_head_is_fitted_to_features_of_all_rows_whose_labels_are_known() -> None:
    with stream(1):
        z = torch.randn(60, 2)
    y = (z[:, 0] > 0).long()
    found = fit_head(z, y, 2)(z)
    assert float((found.argmax(1) == y).double().mean()) > 0.95
    assert torch.allclose(found.exp().sum(1), torch.ones(60, dtype=torch.float64))
    # Features that set the candidates' classes apart only after the round: every candidate gains.
    narrow = {"m/weight": torch.tensor([[0.0, 1.0]]), "m/bias": torch.zeros(1)}
    wide = {"m/weight": torch.tensor([[1.0, 0.0]]), "m/bias": torch.zeros(1)}
    gained = guessed(
        UploadMembership(), 2, exchanged=model_of((narrow, wide), scores=False), candidates=z, candidate_labels=y
    )
    assert float(gained.mean()) > 1.0
    assert bool((margins(fit_head(z[:, :1], y, 2)(z[:, :1]), y).mean() > 1.0).item())


def test_shares_are_the_coefficients_of_the_classes_gradients() -> None:
    basis = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
    found = resolve(3 * basis[0] + 1 * basis[1], basis)
    assert (found / found.sum()).tolist() == pytest.approx([0.75, 0.25, 0.0])
    # A class may not count less than nothing.
    assert float(resolve(-basis[0], basis[:2])[0]) == 0.0
    assert resolve(torch.zeros(3, dtype=torch.float64), basis).tolist() == [0.0, 0.0, 0.0]


def test_shares_of_a_step_of_gradient_descent_are_exact() -> None:
    with stream(2):
        x, start = torch.randn(300, 2), torch.randn(3, 2) * 0.1
    y = torch.arange(300) % 3
    x = x * 0.1 + torch.eye(3)[:, :2][y] * 2
    # Rows of the client: 60 % of class 0, 40 % of class 2; one small step on them.
    weight, bias = start.clone().requires_grad_(), torch.zeros(3, requires_grad=True)
    mine = torch.cat([torch.nonzero(y == 0)[:60, 0], torch.nonzero(y == 2)[:40, 0]])
    nn.functional.cross_entropy(x[mine] @ weight.T + bias, y[mine]).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    sent = {"m/weight": start, "m/bias": torch.zeros(3)}
    came = {"m/weight": start - 1e-3 * weight.grad, "m/bias": -1e-3 * bias.grad}
    found = guessed(UpdateShares(), 3, exchanged=model_of((sent, came)), auxiliary=x, auxiliary_labels=y)
    # The auxiliary rows of a class are not the client's: a few per cent.
    assert found.tolist() == pytest.approx([0.6, 0.0, 0.4], abs=0.05)


def test_shares_of_features_are_what_exceeds_the_others() -> None:
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    still = {"m/weight": torch.zeros(1, 2), "m/bias": torch.zeros(1)}
    own, other = ({**still, "m/weight": torch.tensor([w])} for w in ([3.0, 1.0], [1.0, 1.0]))
    options = {"scores": False, "others": ((ExchangedRound(0, still, other),),)}
    known = {"auxiliary": x, "auxiliary_labels": y}
    # The client moves class 0 by 3 of 4, the other by half: all of the excess is of class 0.
    assert guessed(UpdateShares(), 2, exchanged=model_of((still, own), **options), **known).tolist() == [1.0, 0.0]
    with pytest.raises(InvalidInput, match="compares a client's features with other clients', and none were recorded"):
        guessed(UpdateShares(), 2, exchanged=model_of((still, own), scores=False), **known)


def test_inversion_starts_at_the_rows_that_the_model_gives_a_class_most() -> None:
    known = torch.tensor([[1.0, 0.0], [0.8, 0.2], [-1.0, 0.0], [-0.6, 0.2]])
    still = UploadInversion(iterations=1, rate=1e-9, neighbours=2)
    found = guessed(still, 2, exchanged=model_of((FLAT, STEEP)), auxiliary=known)
    assert found.tolist() == [single([-0.8, 0.1]), single([0.9, 0.1])]
    # It goes where the class is likelier, as far as the pull lets it.
    free = guessed(UploadInversion(stay=0.01), 2, exchanged=model_of((FLAT, STEEP)), auxiliary=known)
    assert float(free[1, 0]) > 1.0 > -1.0 > float(free[0, 0])
    with pytest.raises(InvalidInput, match=r"upload_inversion needs scores of classes; .* 'out'; dlg needs none"):
        guessed(still, 2, exchanged=model_of((FLAT, STEEP), scores=False), auxiliary=known)


def test_what_shows_no_model_is_refused() -> None:
    known = {"candidates": X, "candidate_labels": torch.tensor([1, 1, 0])}
    with pytest.raises(InvalidInput, match="upload_membership needs a model in the client's uploads"):
        guessed(UploadMembership(), 2, **known)
    few = PublicScores(X[:1], torch.ones(1, 2) / 2, X, torch.ones(3, 2) / 2)
    with pytest.raises(InvalidInput, match="2 or more that the client has scored, and that others have; found 1 and 3"):
        guessed(UploadMembership(), 2, public_scores=few, fresh_model=lambda seed: nn.Linear(2, 2), **known)


def test_rounds_are_what_went_down_and_came_back() -> None:
    w, v = {"m/w": torch.tensor([3.0, 4.0])}, {"m/w": torch.tensor([1.0, 0.0])}
    plain = exchanged_rounds(
        [message("weights", w, True), message("weights", v, False), message("weights", w, True, 1)], CPU
    )
    assert [(one.number, one.before["m/w"].tolist(), one.after["m/w"].tolist()) for one in plain] == [
        (0, [3, 4], [1, 0])
    ]
    # A round whose download was not recorded is none.
    assert exchanged_rounds([message("weights", w, True), message("weights", v, False, 1)], CPU) == ()
    # Along a gradient: a hundredth of the weights' length, 5.
    (moved,) = exchanged_rounds([message("weights", w, True), message(WEIGHT_GRADIENT, v, False)], CPU)
    assert moved.after["m/w"].tolist() == single([3 - 5 * GRADIENT_STEP, 4])
    # Of several models that went down, the one that the client chose.
    both = {"0/m/w": w["m/w"], "1/m/w": torch.tensor([7.0, 7.0])}
    chosen = message("cluster", {"cluster": torch.tensor(1)}, False)
    (one,) = exchanged_rounds([message("weights", both, True), chosen, message("weights", v, False)], CPU)
    assert one.before["m/w"].tolist() == [7, 7]


def test_changes_are_added_to_what_the_client_had() -> None:
    run = exchanged(FedKD(rank=2), rounds=3)
    view = recorded_view(run.engine, FED, 1)
    rounds = exchanged_rounds(view.messages, CPU)
    assert [one.number for one in rounds] == [0, 1, 2]
    ups = [m for m in view.messages if m.kind == "update" and m.receiver == FED]
    for one, sent in zip(rounds, ups, strict=True):
        change = decompress_update(sent.tensors, one.before)
        assert all(torch.allclose(one.after[n] - one.before[n], change[n], atol=1e-5) for n in change)
    # The mentee that the server holds after the last round is the clients' mean, from what was sent down in it.
    assert not torch.equal(next(iter(rounds[0].before.values())), next(iter(rounds[2].before.values())))


@pytest.mark.parametrize(
    ("method", "out", "scores"),
    [(FML(), "meme_out", True), (FedAKT(), "adapter_relu2", False), (FedSgd(), "out", True), (Ifca(), "out", True)],
)
def test_the_model_is_what_the_client_computes_with_these_weights(method: Any, out: str, scores: bool) -> None:
    run = one_step(method) if method.__class__ is not FedAKT else exchanged(FedAKT(weight=0.5), rounds=6)
    known = run.evaluator.case(asked(run.evaluator, UploadInversion(), FED, seed=0)).knowledge.exchanged
    assert known is not None
    assert (known.scores, len(known.rounds) > 0) == (scores, True)
    x = run.data.clients[0].train.x
    after = known.rounds[-1].after
    with torch.no_grad():
        found = known.run(x, after)
    modules = {s.name: s.module for s in known.segments}
    made = x
    with torch.no_grad():
        for segment in known.segments:
            own = {n.removeprefix(f"{segment.name}/"): t for n, t in after.items() if n.startswith(f"{segment.name}/")}
            modules[segment.name].load_state_dict(own)
            made = modules[segment.name].eval()(made)
    assert torch.allclose(found, made)
    assert out.rpartition("_")[0] in known.out


def test_public_scores_are_of_the_rows_that_were_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: dict[bytes, Tensor] = {}
    consult = LocalLearner.consult

    def watched(self: LocalLearner, value: str, rows: Tensor, part: str, number: int) -> Tensor:
        found = consult(self, value, rows, part, number)
        if self.replica == 1:
            (x,) = self.inputs(part).values()
            scored.update((row.numpy().tobytes(), p) for row, p in zip(x[rows], found.detach().softmax(1), strict=True))
        return found

    monkeypatch.setattr(LocalLearner, "consult", watched)
    run = cells_run.__wrapped__(method=FedMD(transfer=0, rows=50))
    batch = run.method.traits(run.engine.topologies[0]).public_batch
    found = public_scores(batch, run.engine.view(FED).select(phase="train"), 1, run.engine.seed, CPU)
    assert found is not None
    # Of rows that were scored in several rounds, the newest scores.
    assert {row.numpy().tobytes() for row in found.x} == set(scored)
    for x, p in zip(found.x, found.own, strict=True):
        assert torch.allclose(p.float(), scored[x.numpy().tobytes()], atol=1e-6)
    assert torch.allclose(found.others.sum(1), torch.ones(len(found.others), dtype=torch.float64))


def test_each_client_of_mafml_scores_its_own_rows() -> None:
    run = cells_run(method=MAFML(batch=CELLS, projected=False))
    seen = run.engine.view(FED).select(phase="train")
    batch = run.method.traits(run.engine.topologies[0]).public_batch  # type: ignore[union-attr]
    assert batch is not None
    found = public_scores(batch, seen, 2, run.engine.seed, CPU)
    assert found is not None
    own = {row.numpy().tobytes() for row in run.data.clients[2].public.x}
    assert {row.numpy().tobytes() for row in found.x} == own
    assert not own & {row.numpy().tobytes() for row in found.others_x}


def test_rows_that_a_client_has_shown_are_no_candidates() -> None:
    run = cells_run()
    case = run.evaluator.case(asked(run.evaluator, UploadMembership(), FED, client=1, seed=0))
    shown = {row.numpy().tobytes() for row in run.data.clients[1].public.x}
    assert not shown & {row.numpy().tobytes() for row in case.victims.x}
    with pytest.raises(InvalidInput, match="all rows of client 0 are public"):
        candidates(run.data, run.data.victims, torch.Generator().manual_seed(0), 0, torch.arange(CELLS))


SEARCHES: list[tuple[Any, Attack]] = [
    (FML(beta=0.3), Dlg(iterations=120, restarts=2)),
    (FedAKT(), InvertingGradients(iterations=200, lr=0.1)),
    (FedPer(), InvertingGradients(iterations=200, lr=0.1)),
]


@pytest.mark.parametrize(("method", "attack"), SEARCHES)
def test_one_step_of_a_meme_and_of_features_is_inverted(method: Any, attack: Attack) -> None:
    (result,) = one_step(method).attack(attack, adversary=FED)
    assert result.scores["attack"]["psnr"].mean > result.scores["mean_image"]["psnr"].mean + 15


def test_hard_classes_are_read_off_no_update_with_soft_labels() -> None:
    run = one_step(FML(beta=0.3))
    for name in ("inverting_gradients", "idlg"):
        with pytest.raises(InvalidInput, match=r"derives hard classes from an update; .* use Dlg"):
            run.attack(name, adversary=FED)
    # A meme that learns from labels alone has none.
    sure = one_step(FML(beta=1.0))
    assert sure.evaluator.applicable(FED)["inverting_gradients"] is None
    with pytest.raises(InvalidInput, match="no weights to be held against those"):
        one_step(FedKD()).attack("dlg", adversary=FED)


def test_segments_that_a_schedule_averages_are_read_without_a_method() -> None:
    data = sf.data.digits().rows(range(160)).clients(3, auxiliary=40, victims=40, validation=0.0)
    run = sf.train(
        sf.topologies.vanilla(sigmoid_network(), "act"),
        data,
        schedule="splitfed_v1",
        rounds=1,
        batch_size=20,
        logging=sf.Logging(record=sf.Recording((FED,))),
    )
    found = run.evaluator.applicable(FED)
    assert found["upload_membership"] is found["update_shares"] is None
    assert "ends in the features 'act'; dlg needs none" in str(found["upload_inversion"])
    assert "clients of a federated method send; only" in str(found["class_shares"])
