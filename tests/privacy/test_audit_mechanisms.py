"""Broken mechanisms that the audit of a run finds out, each beside the line that does, and sound ones that pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.gradient_privatizer import GradientPrivatizer, PrivatizedParty
from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.random import stream
from splitfed.core.step_state import StepState
from splitfed.core.tasks import Task
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp
from splitfed.defenses.private_step import PrivateStep
from splitfed.federated import FedDistill, FedMD, FedProto
from splitfed.models.mlp import mlp
from splitfed.privacy.accountants import SUM
from splitfed.study.run.audit import audit, format_audit
from splitfed.study.run.audit_labels import SEQUENCES
from splitfed.topologies import local, u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import assert_same
from tests.thinning import thin

ONE, TEN = "one release", "ten releases in a row"


def run_of(*defenses: Defense, clients: int = 1, shape: str = "vanilla", public: float = 0.0, **options: Any) -> Run:
    data = sf.data.digits().rows(range(100)).clients(clients, auxiliary=10, victims=8, public=public, seed=0)
    with stream(0):
        if shape == "local":
            topology = local(mlp((1, 8, 8), 10, (8, 8), seed=None), ("relu1",))
            options = {"schedule": "independent", "method": FedProto(), **options}
        else:
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10))
            topology = vanilla(model, "1") if shape == "vanilla" else u_shaped(model, ("1", "2"))
    options = {"batch_size": 10, "rounds": 1, "optimizer": Optim("SGD", {"lr": 1e-4}), **options}
    return sf.train(topology, data, defenses=defenses, **options)


def audited(run: Run, trials: int = 20_000) -> dict[tuple[str, str], bool]:
    """Audit a run: (party, what was audited) -> whether all that was found of it is compatible with the claim."""
    found = audit(run, trials)
    text = format_audit(found)
    assert ("a claim is violated" in text) == (not found["held"]) == (": violated" in text)
    held: dict[tuple[str, str], bool] = {}
    for line in found["mechanisms"]:
        measured = line["sensitivity"] is None or line["sensitivity"]["held"]
        assert line["held"] == (not line["refuted"]) == (line["epsilon_held"] and measured)
        key = line["party"], line["audited"]
        held[key] = held.get(key, True) and line["held"]
    return held


@dataclass(frozen=True)
class Short(GaussianRelease):
    """Adds a share of the noise that it claims."""

    share: float = 0.75

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        clean = self.expected(name, z, context)
        return clean + self.share * (super().release(name, z, context) - clean)


@dataclass(frozen=True)
class Repeated(GaussianRelease):
    """Draws noise from less than the stamp says."""

    forgets: str = "all"

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        stamp, fixed = context.stamp, Stamp("train", 0, 0, 0)
        stamp = {
            "all": fixed,
            "steps": stamp._replace(step=0),
            "epochs": stamp._replace(epoch=0),
            "scoring": stamp._replace(phase="train", part="train"),
        }[self.forgets]
        return super().release(name, z, replace(context, stamp=stamp))


@dataclass(frozen=True)
class Common(GaussianRelease):
    """Draws one number for all numbers of a row, or one row for all rows of a batch."""

    dimension: int = 1

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        shape = [1 if i == self.dimension else n for i, n in enumerate(z.shape)]
        drawn = torch.randn(shape, generator=context.noise(name, z))
        return self.expected(name, z, context) + self.multiplier * self.sensitivity * drawn


@dataclass(frozen=True)
class Unclipped(GaussianRelease):
    """Forgot to clip."""

    def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z


@pytest.mark.parametrize(("epsilon", "share"), thin([(1.0, 0.75), (4.0, 0.75), (1.0, 0.5), (4.0, 0.5)], 3))
def test_less_noise_than_claimed(epsilon: float, share: float) -> None:
    """With 20 000 samples a side, by one release and by ten; the same audit lets the right noise pass."""
    right, wrong = GaussianRelease(epsilon=epsilon, freeze=True), Short(epsilon=epsilon, freeze=True, share=share)
    assert all(audited(run_of(right)).values())
    assert not any(audited(run_of(wrong)).values())


def test_mu_is_that_of_the_claim() -> None:
    """Two rows at distance 2 C under noise of 4 times that: mu is 1/4, and √10 / 4 for ten releases in a row."""
    found = audit(run_of(GaussianRelease(clip=3.0, noise_multiplier=4.0, freeze=True)), 20_000)
    _, worst, ten = found["mechanisms"]
    assert 0.7 < worst["found"]["mu"] / (1 / 4) <= 1
    assert 0.8 < ten["found"]["mu"] / (math.sqrt(10) / 4) <= 1


def test_what_there_is_no_game_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitfed.study.run.audit.release_games", lambda run, client: ())
    run = run_of(GaussianRelease(noise_multiplier=1.0, freeze=True), LabelDp(1.0), seed=1)
    found = audit(run, 200)
    assert found["unaudited"] == ["GaussianRelease"]
    assert "GaussianRelease: not audited, there is no game for it" in format_audit(found)
    with pytest.raises(InvalidInput, match="the run has no private mechanism to audit: there is no game for Gaussian"):
        audit(run_of(GaussianRelease(noise_multiplier=1.0, freeze=True)), 200)


@pytest.mark.parametrize("forgets", thin(["all", "steps", "epochs", "scoring"], 2))
def test_repeated_noise(forgets: str) -> None:
    """One release is what it claims; ten in a row are not."""
    held = audited(run_of(Repeated(noise_multiplier=0.7, freeze=True, forgets=forgets)))
    assert held == {("client0", ONE): True, ("client0", TEN): False}


def test_noise_in_common() -> None:
    assert not any(audited(run_of(Common(noise_multiplier=2.0, freeze=True, dimension=1)), 2000).values())
    assert not any(audited(run_of(Common(noise_multiplier=2.0, freeze=True, dimension=0)), 2000).values())


def test_a_release_without_its_clipping() -> None:
    found = audit(run_of(Unclipped(epsilon=1.0, delta=1e-3, freeze=True)), trials=2000)
    worst = found["mechanisms"][1]
    assert worst["found"]["epsilon"] > 4 > worst["claimed"]
    assert worst["sensitivity"]["measured"] > 100 * worst["sensitivity"]["claimed"]
    assert "claimed 2: violated" in format_audit(found)


def test_every_client_is_audited() -> None:
    """The third of three clients has half of its noise."""

    @dataclass(frozen=True)
    class AtOne(GaussianRelease):
        def release(self, name: str, z: Tensor, context: Context) -> Tensor:
            clean = self.expected(name, z, context)
            noisy = super().release(name, z, context)
            return (clean + noisy) / 2 if context.party == "client2" else noisy

    held = audited(run_of(AtOne(noise_multiplier=1.0, freeze=True), clients=3), 4000)
    assert held == {(f"client{i}", what): i < 2 for i in range(3) for what in (ONE, TEN)}


def test_messages_to_the_fed_server() -> None:
    """Prototypes: right; with three quarters of the noise; with the noise of the first message of each round."""
    at: dict[str, Any] = {"noise_multiplier": 1.0, "on": ("prototype->fed_server",)}
    right, short, repeated = (
        audited(run_of(guard, clients=2, shape="local"), 10_000)
        for guard in (GaussianRelease(**at), Short(**at), Repeated(**at, forgets="steps"))
    )
    keys = {(f"client{i}", what) for i in range(2) for what in (ONE, TEN)}
    assert right == dict.fromkeys(keys, True)
    assert short == dict.fromkeys(keys, False)
    assert repeated == {key: key[1] == ONE for key in keys}


def test_soft_labels_to_the_fed_server() -> None:
    """Mean scores by class and scores of public rows: right; with half of the noise; without clipping."""

    @dataclass(frozen=True)
    class Half(GaussianRelease):
        def release(self, name: str, z: Tensor, context: Context) -> Tensor:
            return (self.expected(name, z, context) + super().release(name, z, context)) / 2

    @dataclass(frozen=True)
    class Unclipped(GaussianRelease):
        def expected(self, name: str, z: Tensor, context: Context) -> Tensor:
            return z

    at: dict[str, Any] = {"noise_multiplier": 1.0, "on": ("soft labels->fed_server",)}
    for method, public in ((FedDistill(), 0.0), (FedMD(), 0.2)):
        for guard, held in ((GaussianRelease(**at), True), (Half(**at), False), (Unclipped(**at), False)):
            run = run_of(guard, clients=2, shape="local", method=method, public=public, rounds=2)
            assert set(audited(run, 4000).values()) == {held}, (method, guard)
            (total,) = run.ledger.totals
            assert (total.protects, total.unit) == ("what clients send to the fed server", "example")


class Broken(PrivateStep):
    """A private step with a fault."""

    fault = ""

    def begin(self, rows: int, divisor: float, stamp: Stamp, active: bool) -> None:
        super().begin(rows, divisor, stamp._replace(epoch=0, step=0) if self.fault == "repeated" else stamp, active)

    def _sum_clipped(self, step: Any) -> Any:
        if self.fault == "a layer unclipped":
            whole = self._measure(step).add_up(torch.ones(step.rows))
            return {w: whole[w] if w.shape == (8, 64) else t for w, t in super()._sum_clipped(step).items()}
        if self.fault != "clipped after the sum":
            return super()._sum_clipped(step)
        add_up = self._measure(step).add_up
        sums = add_up(torch.ones(step.rows))
        length = math.sqrt(sum(float(t.square().sum()) for t in sums.values()))
        return {weight: t * min(1.0, self._max_norm / length) for weight, t in sums.items()}


@dataclass(frozen=True)
class Faulty(DpSgd):
    """DP-SGD with a fault in its step."""

    fault: str = ""

    def privatizer(self, holder: PrivatizedParty) -> GradientPrivatizer:
        assert self.noise_multiplier is not None
        sigma = self.noise_multiplier
        if self.fault == "less noise":
            sigma *= 0.75
        if self.fault == "noise without the norm":
            sigma /= self._norm(holder.role)
        if self.fault == "no noise at the server" and holder.role == "server":
            sigma = 0.0
        made = Broken(holder, self._norm(holder.role), sigma)
        made.fault = self.fault
        return made


PRESENT, ROW = "one step that the row takes part in", "ten steps in a row that the row takes part in"
DRAWN = "one step with its rows drawn"
FAULTS = {
    "": ("poisson", set()),
    "less noise": ("poisson", {PRESENT, ROW, DRAWN}),
    "noise without the norm": ("poisson", {PRESENT, ROW, DRAWN}),
    "no noise at the server": ("shuffle", {PRESENT, ROW}),
    "repeated": ("shuffle", {ROW}),
    "clipped after the sum": ("poisson", {PRESENT, ROW}),
    "a layer unclipped": ("shuffle", {PRESENT, ROW}),
}


@pytest.mark.parametrize("fault", thin(FAULTS, 2))
def test_private_steps(fault: str) -> None:
    """Two parties with norm 2, of multiplier 3 each, and batches of 30 in less than 80 rows."""
    sampling, violated = FAULTS[fault]
    defense = Faulty(max_norm=2.0, noise_multiplier=3.0, fault=fault)
    run = run_of(defense, local=sf.LocalUpdate(sampling=sampling), batch_size=30)
    held = audited(run, {"less noise": 20_000, "a layer unclipped": 400}.get(fault, 4000))
    assert {what for (_, what), fine in held.items() if not fine} == violated
    assert len(held) == (3 if sampling == "poisson" else 2)
    assert {party for party, _ in held} == {"client0, server"}


def test_steps_whose_norm_is_joint() -> None:
    """Two parties that clip by their joint norm are one of the stated multiplier, and no more."""
    defense = DpSgd(noise_multiplier=1.2, clip="joint")
    found = audit(run_of(defense, local=sf.LocalUpdate(sampling="poisson")), 6000)
    present = found["mechanisms"][0]
    assert found["held"]
    assert present["found"]["mu"] > 0.8 / 1.2
    assert 0.95 < present["sensitivity"]["measured"] * 1.2 < 1.02
    ten = found["mechanisms"][1]
    assert 0.9 < ten["found"]["mu"] / (math.sqrt(10) / 1.2) <= 1


def test_more_rows_than_the_claim_says() -> None:
    """Steps take each row with chance .8 where .2 is claimed: only the sampled step can see it."""
    run = run_of(DpSgd(noise_multiplier=1.0), local=sf.LocalUpdate(sampling="poisson"))
    rows = len(run.data.clients[0].train)
    run.training = replace(run.training, batch_size=round(0.8 * rows))
    assert {what for (_, what), fine in audited(run, 5000).items() if not fine} == {DRAWN}


@dataclass(frozen=True)
class Truthful(LabelDp):
    """Keeps labels as for one and a half times its epsilon, or gives its targets two thirds of the noise."""

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return LabelDp(1.5 * self.epsilon, self.mode).relabel(y, task, generator)

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return LabelDp(1.5 * self.epsilon, self.mode).targets(y, task, generator)


@pytest.mark.parametrize(
    ("mode", "epsilon"),
    [
        *(("labels", 1.0), ("labels", 4.0), ("gradient", 1.0)),
        pytest.param("gradient", 4.0, marks=pytest.mark.exhaustive),
    ],
)
def test_labels(mode: str, epsilon: float) -> None:
    """The answers show more than .8 of epsilon; one and a half times of it is found out."""
    shape = "vanilla" if mode == "labels" else "u_shaped"
    right, wrong = (audit(run_of(make(epsilon, mode), shape=shape, seed=2), 20_000) for make in (LabelDp, Truthful))
    assert right["held"]
    assert not wrong["held"]
    first, broken = right["mechanisms"][0], wrong["mechanisms"][0]
    assert first["place"].startswith("labels of ")
    assert 0.8 * epsilon < first["found"]["epsilon"] <= first["claimed"] or mode == "gradient"
    assert broken["refuted"]
    assert first["delta"] == first["found"]["delta"] == (0 if first["method"] == SUM else right["delta"])
    assert first["method"] == SUM or epsilon < 4 or mode == "gradient"
    names = [line["audited"] for line in right["mechanisms"]]
    assert names == (["labels drawn once"] if mode == "labels" else list(SEQUENCES))


@pytest.mark.parametrize(("forgets", "found"), [("step", "two steps of an epoch"), ("epoch", "one step of two epochs")])
def test_label_noise_that_comes_again(monkeypatch: pytest.MonkeyPatch, forgets: str, found: str) -> None:
    """Each step is what it claims; the labels of two rows show in the difference of what they are drawn with."""
    replace_targets = Party._replace_targets

    def forgetful(self: Party, step_state: StepState, stamp: Stamp) -> None:
        replace_targets(self, step_state, stamp._replace(**{forgets: 0}))

    monkeypatch.setattr(Party, "_replace_targets", forgetful)
    held = audited(run_of(LabelDp(1.0, "gradient"), shape="u_shaped", seed=2), 400)
    assert [what for (_, what), fine in held.items() if not fine] == [f"labels of {found}"]


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_one_row_changes_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's weight stands over those of all rows of its batch: refused before training, and seen by an audit."""

    def weighted(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, y, weight=torch.logspace(0, 4, 10))

    monkeypatch.setattr("splitfed.defenses.dp_sgd.check_rowwise", lambda *given: None)
    run = run_of(DpSgd(noise_multiplier=3.0))
    assert all(audited(run, 400).values())
    (head,) = run.engine.topology.heads
    object.__setattr__(head.task, "loss", weighted)
    assert not any(audited(run, 400).values())


def test_parties_are_after_an_audit_what_they_were_before() -> None:
    """Weights, optimizers, counts, data and modes, in a run with guards of weights, of labels and of releases."""
    run = run_of(
        DpSgd(noise_multiplier=3.0), GaussianRelease(noise_multiplier=2.0), LabelDp(1.0, "gradient"), shape="u_shaped"
    )
    modes = {
        id(m): m.training for p in run.engine.parties.values() for s in p.state.modules.values() for m in s.modules()
    }
    before, held = run.state(), {name: set(party.state.data) for name, party in run.engine.parties.items()}
    audit(run, 40)
    assert_same(run.state(), before)
    assert {name: set(party.state.data) for name, party in run.engine.parties.items()} == held
    assert all(
        m.training == modes[id(m)]
        for p in run.engine.parties.values()
        for s in p.state.modules.values()
        for m in s.modules()
    )
