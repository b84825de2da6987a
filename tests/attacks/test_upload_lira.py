"""Copies of a client's local training, and the likelihood ratio under them, by hand and against runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.attacks.base import Knowledge
from splitfed.attacks.gradients.local_training import LocalTraining
from splitfed.attacks.membership.confidence import membership_score
from splitfed.attacks.uploads import upload_lira
from splitfed.attacks.uploads.client_copies import ClientCopies, draw_passes
from splitfed.attacks.uploads.exchanged_model import GRADIENT_STEP, ExchangedModel, ExchangedRound
from splitfed.attacks.uploads.upload_lira import UploadLira, complementary_halves
from splitfed.attacks.uploads.upload_membership import UploadMembership
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Stamp, View
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.core.topology import Head, Segment
from splitfed.defenses import DpSgd
from splitfed.engines.base import FED
from splitfed.federated import FedAvg, FedMD, LgFedAvg
from splitfed.models.mlp import mlp
from splitfed.threats.attack_result import AttackResult
from splitfed.topologies import local as whole
from splitfed.training.run import Run
from tests.attacks.upload_examples import exchanged
from tests.attacks.upload_worlds import memorised
from tests.examples import asked as request_for

SEEDS = (0, 1, 2)
SGD = {"lr": 0.5, "momentum": 0.0}
BEFORE = {"m/weight": torch.tensor([[0.5, -0.5], [0.25, 0.0]]), "m/bias": torch.tensor([0.1, -0.1])}


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return points of two classes, drawn at random."""
    drawn = generator(seed, "points")
    return torch.randn(count, 2, generator=drawn), torch.arange(count) % 2


def world(
    *layers: nn.Module, scores: bool = True, rounds: int = 1, **known: Any
) -> tuple[ExchangedModel, LocalTraining]:
    """Return a model of two inputs that was not changed in its rounds, and how its client trains."""
    with stream(0):
        module = nn.Sequential(*layers) if layers else nn.Linear(2, 2)
    segment = Segment("m", "client", module, ("x",), ("out",))
    before = BEFORE if not layers else {f"m/{n}": t.clone() for n, t in module.state_dict().items()}
    model = ExchangedModel(
        (segment,), lambda x: {"x": x}, "out", scores, tuple(ExchangedRound(i, before, before) for i in range(rounds))
    )
    heads = (Head("out", "client", "client", classification(2)),) if scores else ()
    given = {"optimizer": "SGD", "options": SGD, "batches": (4,), "rows": 4, **known}
    return model, LocalTraining((segment,), lambda x: {"x": x}, heads, (), **given)


def copied(count: int = 4, seed: int = 0, **known: Any) -> dict[str, Tensor]:
    """Return what a copy with `count` rows would send back."""
    model, local = world(**known)
    return ClientCopies("who", model, local, 2).train(BEFORE, *rows(count), generator(seed, "copy"))


def stepped(times: int = 1, clip: float | None = None, rate: float = 0.5) -> dict[str, Tensor]:
    """Return what steps of gradient descent on all of four rows make of the weights, worked out apart."""
    x, y = rows(4)
    weight, bias = (BEFORE[f"m/{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    for _ in range(times):
        loss = functional.cross_entropy(x @ weight.T + bias, y)
        found = torch.autograd.grad(loss, (weight, bias))
        length = torch.cat([g.flatten() for g in found]).norm()
        factor = 1.0 if clip is None else min(1.0, clip / float(length))
        weight, bias = (
            (w - rate * factor * g).detach().requires_grad_() for w, g in zip((weight, bias), found, strict=True)
        )
    return {"m/weight": weight.detach(), "m/bias": bias.detach()}


def check_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.allclose(one[name], tensor, atol=1e-6), name


def test_a_copy_steps_as_the_protocol_says() -> None:
    check_close(copied(), stepped())
    check_close(copied(batches=(4, 4)), stepped(2))
    check_close(copied(options={**SGD, "clip_norm": 0.01}), stepped(clip=0.01))
    check_close(copied(options={**SGD, "lr": 0.1, "foreach": False, "groups": 0}), stepped(rate=0.1))
    # Two batches of half the rows, and one step on the mean of their losses.
    check_close(copied(batches=(2, 2), accumulate=2), stepped())
    # Without that they are two steps, which depend on the order.
    assert not torch.allclose(copied(batches=(2, 2))["m/weight"], stepped()["m/weight"], atol=1e-4)
    momentum = copied(batches=(4, 4), options={**SGD, "momentum": 0.9})
    assert not torch.allclose(momentum["m/weight"], stepped(2)["m/weight"], atol=1e-4)
    # The loss of the protocol, with its weight: half of it is half the step.
    model, local = world()
    local = replace(local, heads=(replace(local.heads[0], weight=0.5),))
    check_close(ClientCopies("who", model, local, 2).train(BEFORE, *rows(4), generator(0, "copy")), stepped(rate=0.25))


def test_copies_begin_at_what_was_sent_and_leave_nothing_behind() -> None:
    model, local = world()
    copies = ClientCopies("who", model, local, 2)
    first = copies.train(BEFORE, *rows(4), generator(0, "copy"))
    start = {name: t.clone() for name, t in model.segments[0].module.state_dict().items()}
    check_close(copies.train(BEFORE, *rows(4), generator(1, "copy")), first)
    assert all(torch.equal(t, start[name]) for name, t in model.segments[0].module.state_dict().items())
    assert torch.equal(BEFORE["m/weight"], torch.tensor([[0.5, -0.5], [0.25, 0.0]]))


def test_a_copy_that_sends_a_gradient_is_moved_along_it_as_the_client_was() -> None:
    found, plain = copied(batches=(3, 1), sends_gradients=True), stepped(rate=1.0)
    gradient = {name: BEFORE[name] - plain[name] for name in BEFORE}
    length = {n: torch.cat([t.flatten() for t in part.values()]).norm() for n, part in (("w", BEFORE), ("g", gradient))}
    rate = GRADIENT_STEP * length["w"] / length["g"]
    check_close(found, {name: BEFORE[name] - rate * g for name, g in gradient.items()})


def test_buffers_that_are_exchanged_move_with_a_copy_and_frozen_ones_stay() -> None:
    x, y = rows(4)
    model, local = world(nn.BatchNorm1d(2), nn.Linear(2, 2))
    before = model.rounds[0].before
    after = ClientCopies("who", model, local, 2).train(before, x, y, generator(0, "copy"))
    assert torch.allclose(after["m/0.running_mean"], 0.1 * x.mean(0), atol=1e-6)
    assert int(after["m/0.num_batches_tracked"]) == 1
    local.segments[0].module[0].eval()  # type: ignore[operator,index]
    frozen = ClientCopies("who", model, local, 2).train(before, x, y, generator(0, "copy"))
    assert torch.equal(frozen["m/0.running_mean"], before["m/0.running_mean"])


def test_features_are_learnt_behind_a_head_that_learns_and_is_not_sent() -> None:
    x, y = rows(4)
    model, local = world(nn.Linear(2, 3), nn.Tanh(), scores=False, batches=(4,) * 5)
    before = model.rounds[0].before
    one, same, other = (
        ClientCopies("who", model, local, 2).train(before, x, y, generator(seed, "copy")) for seed in (0, 0, 1)
    )
    assert one.keys() == before.keys()
    assert torch.equal(one["m/0.weight"], same["m/0.weight"])
    assert not torch.equal(one["m/0.weight"], before["m/0.weight"])
    # The head is drawn anew for every copy: the batches, all of the rows, are the same.
    assert not torch.allclose(one["m/0.weight"], other["m/0.weight"], atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "known", "count", "expected"),
    [
        ((4, 4, 2), 10, 10, [4, 4, 2]),
        ((4, 4, 2, 4, 4, 2), 10, 10, [4, 4, 2, 4, 4, 2]),
        # As many passes over half of the rows; what is left over is smaller than any batch of the client's.
        ((4, 4, 2, 4, 4, 2), 10, 5, [4, 4, 2]),
        ((4, 4, 4), 12, 7, [4]),
        # A batch is no larger than all rows, and each is in it once.
        ((10, 10), 10, 6, [6, 6]),
        # More rows than a round of the client has: more steps.
        ((4,), 4, 8, [4, 4]),
        ((4, 4), None, 5, [4, 4]),
    ],
)
def test_batches_are_as_many_passes_as_the_clients(
    sizes: tuple[int, ...], known: int | None, count: int, expected: list[int]
) -> None:
    local = replace(world()[1], batches=sizes, rows=known)
    drawn = list(draw_passes(local, count, generator(0, "passes")))
    assert [len(batch) for batch in drawn] == expected
    passes = [one for one in torch.cat(drawn).split(count) if len(one) == count]
    assert all(one.sort().values.tolist() == list(range(count)) for one in passes)


@pytest.mark.parametrize("candidates", [6, 7])
def test_every_candidate_is_in_exactly_half_of_the_copies(candidates: int) -> None:
    held = complementary_halves(8, candidates, generator(0, "halves"))
    assert held.sum(0).tolist() == [4] * candidates
    assert {int(count) for count in held.sum(1)} <= {candidates // 2, -(-candidates // 2)}
    assert not torch.equal(held[0], held[2])


@pytest.mark.parametrize(
    ("online", "spare", "client", "expected"),
    [
        # Half of eight candidates, and auxiliary rows up to as many as the client has, or there are.
        (True, 10, 6, 2),
        (True, 10, 4, 0),
        (True, 10, 3, 0),
        (True, 1, 9, 1),
        (True, 10, None, 5),
        # No candidates; half of the auxiliary rows at most.
        (False, 10, 3, 3),
        (False, 10, 9, 5),
        (False, 10, None, 5),
    ],
)
def test_copies_have_as_many_rows_as_the_client(
    monkeypatch: pytest.MonkeyPatch, online: bool, spare: int, client: int | None, expected: int
) -> None:
    given: list[Tensor] = []

    def train(self: ClientCopies, before: Any, x: Tensor, y: Tensor, random: torch.Generator) -> Any:
        given.append(x)
        return before

    monkeypatch.setattr(ClientCopies, "train", train)
    x, y = rows(8)
    # Behind the spare rows stand rows of a class that no candidate has.
    auxiliary, labels = rows(spare + 5, seed=1)[0], torch.tensor([0] * spare + [9] * 5)
    # Copies that agree on everything: nothing is told apart, and nothing divided by nothing.
    found = asked(UploadLira(copies=4, online=online), 2, x, y, rows=client, known=(auxiliary, labels))
    assert found.tolist() == [0.0] * 8
    places = {row.numpy().tobytes(): i for i, row in enumerate(torch.cat([x, auxiliary]))}
    for copy in given:
        numbers = [places[row.numpy().tobytes()] for row in copy]
        assert len(set(numbers)) == len(numbers)
        assert sum(number < 8 for number in numbers) == (4 if online else 0)
        assert sum(8 <= number < 8 + spare for number in numbers) == expected
        assert max(numbers) < 8 + spare


def asked(
    attack: UploadLira,
    rounds: int,
    x: Tensor,
    y: Tensor,
    rows: int | None = 4,
    known: tuple[Tensor, Tensor] | None = None,
    classes: int | None = 2,
    progress: Any = None,
    **protocol: Any,
) -> Tensor:
    """Return the scores of candidates x with labels y in a world by hand."""
    model, local = world(rounds=rounds, **protocol)
    view = View(FED, (Message("client0", FED, "weights", "w", BEFORE, Stamp("train", 0, 0, 0)),), {})
    auxiliary, labels = (None, None) if known is None else known
    knowledge = Knowledge(
        *((2,), None, auxiliary),
        classes=classes,
        auxiliary_labels=labels,
        candidates=x,
        candidate_labels=y,
        exchanged=model,
        local=replace(local, rows=rows),
    )
    return attack(view, knowledge, generator(0, "attack"), progress).prediction


def test_the_score_is_the_likelihood_ratio_of_what_came_back() -> None:
    confidence = torch.tensor([[3.0, 1.0], [5.0, -1.0], [0.0, 4.0], [-2.0, 6.0]], dtype=torch.float64)
    held = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    seen = torch.tensor([4.0, 0.0], dtype=torch.float64)
    # In: means 4 and 5; out: -1 and 0; all variances 2.
    found = membership_score(seen, confidence, held, online=True, pooled=True)
    assert found.tolist() == pytest.approx([5**2 / 4, -(5**2) / 4])
    offline = membership_score(seen, confidence, torch.zeros_like(held), online=False, pooled=True)
    # Means 1.5 and 2.5, variances 29 / 3 each.
    assert offline.tolist() == pytest.approx([2.5 / (29 / 3) ** 0.5, -2.5 / (29 / 3) ** 0.5])
    # One variance for both rows, or each its own.
    confidence[1, 0] = 9.0
    pooled, own = (membership_score(seen, confidence, held, True, flag)[0].item() for flag in (True, False))
    assert own == pytest.approx(-(2**2) / (2 * 18) + 5**2 / 4 - 0.5 * torch.tensor(9.0).log().item())
    assert pooled == pytest.approx(-(2**2) / (2 * 10) + 5**2 / 4 - 0.5 * torch.tensor(5.0).log().item())


def test_a_copy_that_diverges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_lira, "margins", lambda scores, y: torch.full((len(y),), torch.nan))
    with pytest.raises(InvalidInput, match="upload_lira: a copy of the client diverged"):
        asked(UploadLira(copies=4), 3, *rows(8))


def test_rounds_are_added_up_and_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    x, y = rows(8)
    asked(UploadLira(copies=4, rounds=2), 3, x, y, progress=lambda *done: told.append(done))
    assert told == [(done, 8) for done in range(9)]
    numbers = iter(range(1, 10))
    monkeypatch.setattr(upload_lira, "membership_score", lambda seen, *_: torch.full_like(seen, float(next(numbers))))
    assert asked(UploadLira(copies=4, rounds=5), 3, x, y).tolist() == [6.0] * 8


def test_what_cannot_be_is_refused_in_a_line() -> None:
    x, y = rows(8)
    with pytest.raises(InvalidInput, match="upload_lira copies=5 is not allowed; expected an even number"):
        UploadLira(copies=5)
    with pytest.raises(InvalidInput, match="upload_lira copies"):
        UploadLira(copies=2)
    with pytest.raises(InvalidInput, match=r"online=False trains copies on halves of the auxiliary rows .* found 0"):
        asked(UploadLira(online=False), 1, x, y)
    with pytest.raises(InvalidInput, match=r"classes: 4 or more with labels; found 3"):
        asked(UploadLira(online=False), 1, x, y, known=(rows(6)[0], torch.tensor([0, 1, 1, 7, 7, 7])))
    with pytest.raises(InvalidInput, match="upload_lira needs labels with classes"):
        asked(UploadLira(), 1, x, y, classes=None)
    for options, line in (
        ({"initial_lr": 0.1}, r"learning rate changes between rounds \(a scheduler\)"),
        ({"groups": 2}, "groups=2 of its optimizer is not allowed"),
    ):
        with pytest.raises(InvalidInput, match=f"upload_lira trains copies of the client: .*{line}"):
            asked(UploadLira(), 1, x, y, options={**SGD, **options})
    with pytest.raises(InvalidInput, match=r"optimizer mine:Step is not allowed; expected one of torch\.optim"):
        asked(UploadLira(), 1, x, y, optimizer="mine:Step")


@pytest.fixture(scope="module")
def drowned() -> Run:
    """Clients of FedAvg whose gradients of rows are clipped, with noise."""
    return exchanged(FedAvg(), rounds=1, defenses=(DpSgd(noise_multiplier=1.0),))


def test_defenses_that_copies_lack_are_named(drowned: Run) -> None:
    (result,) = drowned.attack(UploadLira(copies=4, rounds=1), adversary=FED)
    assert result.unadapted == ("dp_sgd",)


def test_what_is_no_model_from_raw_rows_is_refused() -> None:
    fast = UploadLira(copies=4, rounds=1)
    with pytest.raises(InvalidInput, match="UploadLira reads weights, update, weight gradient; clients of FedMD send"):
        exchanged(FedMD(), rounds=1, public=0.1).attack(fast, adversary=FED)
    with pytest.raises(InvalidInput, match="UploadLira needs a model from raw rows that the client exchanges"):
        exchanged(LgFedAvg(), rounds=1).attack(fast, adversary=FED)


def attacked(run: Run, attack: Any, client: int, seed: int = 0) -> AttackResult:
    """Return what `attack` makes of what `client` sent."""
    return run.evaluator.attack(request_for(run.evaluator, attack, FED, "attack", client=client, seed=seed))


def auc(run: Run, attack: Any, client: int) -> float:
    """Return the area under the curve of `attack` on what `client` sent."""
    return float(attacked(run, attack, client).scores["attack"]["auc"].mean)


@pytest.mark.exhaustive
def test_it_beats_calibration_by_what_was_sent() -> None:
    found: dict[str, list[float]] = {"lira": [], "calibrated": []}
    for seed in SEEDS:
        run = memorised("fedavg", seed)
        for client in (0, 1):
            found["lira"].append(auc(run, UploadLira(rounds=2, copies=8), client))
            found["calibrated"].append(auc(run, UploadMembership(), client))
    lira, calibrated = (sum(values) / len(values) for values in found.values())
    # Measured: .999 beside .903. A blind AUC of 40 members and as many others has a deviation of .065.
    assert lira > calibrated + 0.06
    assert lira > 0.9


def test_a_seed_decides_everything() -> None:
    run, attack = memorised("fedavg", 0), UploadLira(rounds=1, copies=4)
    one, same, other = (attacked(run, attack, 0, seed).prediction for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_server_knows_the_protocol_and_how_many_rows_a_round_has() -> None:
    with stream(0):
        topology = whole(mlp((1, 8, 8), 10, (8,), seed=None))
    run = sf.train(
        topology,
        sf.data.digits().rows(range(200)).clients(2, auxiliary=40, victims=40, validation=0.0),
        schedule="independent",
        method=FedAvg(),
        rounds=1,
        local=sf.LocalUpdate(local_epochs=3, accumulate=2, restart_optimizers=True),
        batch_size=16,
        logging=sf.Logging(record=sf.Recording((FED,))),
    )
    count = len(run.data.clients[0].train)
    case = run.evaluator.case(request_for(run.evaluator, UploadLira(), FED, seed=0))
    known = case.knowledge
    assert known.local is not None
    assert (known.local.rows, sum(known.local.batches), known.local.accumulate) == (count, 3 * count, 2)
    # It starts every round anew, and is there in all steps but the first.
    assert known.local.options["momentum"] == 0.9
    # Others are not shown it, and nobody the client's rows: candidates are drawn with as many that it has not.
    assert known.only(UploadMembership.requires).local is None
    assert known.candidates is not None
    assert case.members is not None
    assert len(known.candidates) == 2 * int(case.members.sum())
