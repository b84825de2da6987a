"""The privacy ledger: uses by row, what learns before a mechanism, what cannot be added, and planned = counted."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.optimizers import Optim
from splitfed.core.privacy_events import Event, Gaussian, Neighbours, Protects, Pure, Unit
from splitfed.core.private_values import BOTH, FEATURES, LABELS
from splitfed.core.topology import Topology
from splitfed.core.usage_counts import UsageCounts
from splitfed.data.dataset import Federation
from splitfed.defenses import DpSgd, GaussianRelease, LabelDp, LaplaceRelease, Noise
from splitfed.planning.calibration import calibrate_defenses
from splitfed.planning.private import planned_ledger
from splitfed.planning.validation import prepare
from splitfed.privacy.charges import learns_from_rows
from splitfed.privacy.gaussian_mechanism import gaussian_epsilon
from splitfed.privacy.ledger import UNCHARGED, Charge, Ledger, default_delta, make_ledger, related_exposure
from splitfed.schedules.base import Training
from splitfed.topologies import u_shaped, vanilla
from splitfed.training.run import Run
from tests.examples import InPlaceAfterCut

SLOW = Optim("SGD", {"lr": 1e-4})
RELEASE = Event(Gaussian(2.0), Protects.RELEASES)


class Squared(nn.Module):
    """Numbers above 1.8e19 have no square in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def clients(count: int = 2) -> Federation:
    rows = sf.data.digits()
    return rows.rows(range(150)).clients(count, auxiliary=0.1, victims=8, seed=0)


def model(make: type[nn.Module] = InPlaceAfterCut) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def cut() -> Topology:
    return vanilla(model(), "pool")


def trained(defense: Defense, topology: Topology | None = None, schedule: str = "splitfed_v3", **more: object) -> Run:
    options = {"rounds": 2, "batch_size": 20, "optimizer": SLOW, "data": clients(), **more}
    return sf.train(topology or cut(), schedule=schedule, defenses=defense, **options)  # type: ignore[arg-type]


def planned(
    defense: Defense, topology: Topology | None = None, schedule: str = "splitfed_v3", every: int = 1
) -> Ledger:
    ready = prepare(
        topology or cut(),
        clients(),
        schedule=schedule,
        defenses=defense,
        optimizer=SLOW,
        training=Training(20),
    )
    return planned_ledger(calibrate_defenses(ready, 2), 2, every)


def test_a_frozen_sender_costs_a_row_its_own_releases() -> None:
    """Two epochs release each training row twice, two rounds score each test row twice: two uses."""
    run = trained(GaussianRelease(noise_multiplier=4.0, freeze=True))
    (line,) = run.ledger.lines
    assert (line.uses, line.counted, line.clients) == (2, "per row", 2)
    (total,) = run.ledger.totals
    assert total.epsilon == pytest.approx(gaussian_epsilon(4.0 / 2**0.5, run.ledger.delta))
    assert run.history[-1]["epsilons"] == {total.protects: total.epsilon}
    first = run.history[0]["epsilons"][total.protects]
    assert first == pytest.approx(gaussian_epsilon(4.0, run.ledger.delta))
    assert total.note == ""
    assert run.ledger.open == {"labels of fc2 (client to server)": "labels"}


def test_an_epsilon_never_stands_without_what_crosses_beside_it() -> None:
    """Labels of the same rows cross bare: there is no epsilon of the run, and the ledger says both in one line."""
    run = trained(GaussianRelease(noise_multiplier=4.0, freeze=True))
    assert run.epsilon is None
    assert run.history[-1]["epsilon"] is None
    first, *rest = str(run.ledger).splitlines()
    assert first.startswith(f"epsilon {run.ledger.totals[0].epsilon:.4g} at delta")
    assert first.endswith("; without a promise: labels of fc2 (client to server)")
    assert rest == [f"not charged: {'; '.join(UNCHARGED)}"]
    whole = make_ledger([charge()], 1e-5)
    assert whole.epsilon == whole.totals[0].epsilon
    assert str(whole).splitlines()[0].endswith("; nothing else crosses that depends on it")
    assert make_ledger([charge()], 1e-5, {"gradients on a->b (server to client)": FEATURES}).epsilon is None


def test_of_a_label_only_labels_tell() -> None:
    """Features count as known: an epsilon of labels covers a run in which nothing else crosses that tells of labels."""
    label = charge(place="labels of y", event=Event(Pure(1.0), Protects.LABELS, Unit.LABEL), every=1, counts={})
    found = make_ledger([label], 1e-5, {"releases on a->b (client to server)": FEATURES})
    assert found.epsilon == pytest.approx(1.0)
    features = "of features without a promise: releases on a->b (client to server)"
    assert str(found).splitlines()[0].endswith(f"; nothing else crosses that depends on it; {features}")
    for told in (LABELS, BOTH):
        bare = make_ledger([label], 1e-5, {"counts that somebody sends": told})
        assert bare.epsilon is None
        assert str(bare).splitlines()[0].endswith("; without a promise: counts that somebody sends")
    # A report of before says places alone.
    assert related_exposure(asdict(found.totals[0]), ["releases on a->b"]) == ["releases on a->b"]


def test_rows_that_are_not_finite_are_released_as_zeros_and_counted() -> None:
    """Clipping lets an infinite row through, which then tells itself apart from all others with certainty."""
    rows = sf.data.digits().rows(range(60))
    x = rows.x.clone()
    x[3], x[7, 0, 0, 0] = 1e30, 3e38
    data = sf.data.from_arrays(x, rows.y).clients(1, test=0.0, validation=0.0, auxiliary=0, victims=0, seed=0)
    squared = nn.Sequential(Squared(), nn.Flatten(), nn.Linear(64, 10))
    for defense in (GaussianRelease(noise_multiplier=1.0, freeze=True), LaplaceRelease(epsilon=1.0, freeze=True)):
        shape = vanilla(squared, "0", sent_inputs=("input",))
        run = sf.train(
            shape,
            data,
            defenses=defense,
            rounds=1,
            batch_size=20,
            optimizer=SLOW,
            logging=sf.Logging(record=sf.Recording()),
        )
        sent = run.engine.view("server").select(kind="activation").tensors()
        assert all(bool(torch.isfinite(t).all()) for t in sent.values())
        (edge,) = shape.crossings
        assert run.ledger.replaced == (f"2 rows of {edge.name} were not finite, taken for zeros",)
        assert run.ledger.replaced[0] in str(run.ledger).splitlines()
    shape = u_shaped(
        nn.Sequential(Squared(), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)),
        ("1", "3"),
        sent_inputs=("input",),
    )
    run = sf.train(shape, data, defenses=DpSgd(noise_multiplier=1.0), rounds=1, batch_size=20, optimizer=SLOW)
    # Behind the hyperbolic tangent a row with a single infinite number is finite again.
    assert run.ledger.replaced == (
        "1 row of gradients at client0 was not finite, taken for zeros",
        "2 rows of gradients at server were not finite, taken for zeros",
    )
    for party in run.engine.run_parties.members().values():
        assert all(bool(torch.isfinite(p).all()) for m in party.state.modules.values() for p in m.parameters())


def test_a_sender_that_learns_costs_all_releases() -> None:
    """Every training, validation and test row of the client, twice."""
    run = trained(GaussianRelease(noise_multiplier=4.0))
    own = [len(c.train) + len(c.validation) + len(c.test) for c in run.data.clients]
    (line,) = run.ledger.lines
    assert (line.uses, line.counted) == (2 * max(own), "all releases")
    assert run.ledger.totals[0].epsilon == pytest.approx(
        gaussian_epsilon(4.0 / (2 * max(own)) ** 0.5, run.ledger.delta)
    )
    assert "learn from private rows" in run.ledger.totals[0].note


def test_weights_that_travel_cost_the_releases_of_all_clients() -> None:
    run = trained(GaussianRelease(noise_multiplier=4.0), schedule="splitfed_v1")
    own = [len(c.train) + len(c.validation) + len(c.test) for c in run.data.clients]
    assert run.ledger.lines[0].uses == 2 * sum(own)
    assert "weights of client" in run.ledger.open
    frozen = trained(GaussianRelease(noise_multiplier=4.0, freeze=True), schedule="splitfed_v1")
    assert frozen.ledger.lines[0].uses == 2, "frozen weights carry nothing from one client to another"


@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1", "splitfed_v2", "splitfed_v3", "alternate"])
def test_planned_is_counted(schedule: str) -> None:
    for defense in (GaussianRelease(noise_multiplier=4.0), LaplaceRelease(epsilon=9.0, freeze=True)):
        assert planned(defense, schedule=schedule) == trained(defense, schedule=schedule).ledger


def test_planned_is_counted_where_scoring_is_rare_and_for_labels() -> None:
    defense = GaussianRelease(noise_multiplier=4.0, freeze=True)
    assert planned(defense, every=2) == trained(defense, evaluation=sf.Evaluation(every=2)).ledger
    shape = u_shaped(model(), ("pool", "fc1"))
    for mode in ("labels", "gradient"):
        found = trained(LabelDp(2.0, mode=mode), shape).ledger
        assert planned(LabelDp(2.0, mode=mode), shape) == found
        (line,) = found.lines
        assert (line.protects, line.uses) == ("labels", 1 if mode == "labels" else 2)
        assert line.counted == "per row", "noise on labels needs no frozen segment"


def test_settings_by_client_that_cover_all_are_one_promise() -> None:
    """Each of them was of its clients alone, without a figure for the run."""
    both = sf.train(
        cut(), clients(), schedule="splitfed_v1", defenses=[LabelDp(1.0, clients=(0,)), LabelDp(2.0, clients=(1,))]
    )
    (total,), all_alike = both.ledger.totals, trained(LabelDp(2.0), schedule="splitfed_v1", rounds=1).ledger
    assert (total.only, total.client) == ((), 1)
    assert both.epsilon == total.epsilon == pytest.approx(all_alike.epsilon)
    (total,) = trained(LabelDp(1.0, clients=(0,)), schedule="splitfed_v1").ledger.totals
    assert total.only == (0,)
    # What client 1's mechanism of another kind releases shows the rows of client 0 too.
    kinds = [GaussianRelease(noise_multiplier=4.0, clients=(0,)), LaplaceRelease(epsilon=2.0, clients=(1,))]
    mixed = sf.train(cut(), clients(), schedule="splitfed_v1", defenses=kinds, rounds=1)
    assert [one.epsilon for one in mixed.ledger.totals] == [float("inf")]


def test_resumed_it_counts_the_same(tmp_path: Path) -> None:
    defense = GaussianRelease(noise_multiplier=4.0, freeze=True)
    whole = trained(defense).ledger
    folder = tmp_path / "run"

    class Stop(Exception):
        pass

    def stop(done: int, total: int, metrics: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        trained(defense, logging=sf.Logging(folder=folder, progress=stop))
    again = trained(defense, logging=sf.Logging(folder=folder, resume=True))
    assert again.ledger == whole
    assert again.history[-1]["epsilons"] == {"all releases at the cut": whole.totals[0].epsilon}


def test_attacks_do_not_change_what_training_cost() -> None:
    run = trained(GaussianRelease(noise_multiplier=4.0, freeze=True))
    before = run.ledger
    run.observe()
    assert run.ledger == before
    run.evaluate("test")
    assert run.ledger != before, "but scoring again does"


def test_scoring_again_draws_again() -> None:
    """Two releases of a row with the same noise by different weights would give their difference away."""
    run = trained(GaussianRelease(noise_multiplier=4.0, freeze=True))
    seen = []
    for number in (0, None, None):
        with run.engine.record_party("server") as recorder:
            run.evaluate("test", number)
        seen.append(recorder.view().select(kind="activation").messages[0].tensors["pool"])
    assert seen[0].shape == seen[1].shape == seen[2].shape
    assert not any(torch.equal(a, b) for a, b in ((seen[0], seen[1]), (seen[0], seen[2]), (seen[1], seen[2])))


def test_nothing_promised_is_said_so() -> None:
    run = trained(Noise(scale=0.1))
    assert run.epsilon is None
    assert str(run.ledger) == "no formal guarantee"
    assert "epsilon" not in run.history[-1]
    assert next(iter(run.ledger.open)).startswith("releases on ")


def charge(**more: object) -> Charge:
    counts = {"train": torch.tensor([2, 1], dtype=torch.int32)}
    return replace(Charge(0, "client0", "a->b", "GaussianRelease", RELEASE, counts), **more)


def test_the_worst_row_of_the_worst_client_counts() -> None:
    """Row 0 takes 2 + 1 uses, row 1 takes 1 + 3: four of one mechanism; of another client row 0 takes 2."""
    other = charge(place="c->d", counts={"train": torch.tensor([1, 3])})
    found = make_ledger([charge(), other, charge(client=1, party="client1")], 1e-5)
    assert found.epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-5))
    assert found.totals[0].client == 0
    assert [line.uses for line in found.lines] == [2, 3]


def test_the_same_defense_twice_is_a_line_of_both() -> None:
    charges = [Charge(0, "client0", "a->b", "GaussianRelease", RELEASE, {"train": torch.tensor([2, 1])}) for _ in "12"]
    (line,) = make_ledger(charges, 1e-5).lines
    assert (line.uses, line.clients) == (4, 1)
    assert line.epsilon == make_ledger(charges, 1e-5).totals[0].epsilon


def test_what_cannot_be_added_stands_side_by_side() -> None:
    label = charge(place="labels of y", event=Event(Pure(1.0), Protects.LABELS, Unit.LABEL), every=1, counts={})
    found = make_ledger([charge(), label], 1e-5)
    assert found.epsilon is None
    assert [total.protects for total in found.totals] == ["all releases at the cut", "labels"]
    assert found.totals[1].epsilon == pytest.approx(1.0)
    assert len(str(found).splitlines()) == 3


def test_guarded_weights_add_to_what_they_release() -> None:
    weights = charge(place="weights", event=Event(Gaussian(4.0), Protects.WEIGHTS), every=4, counts={})
    found = make_ledger([charge(guarded=True), weights], 1e-5)
    # 2 / 2² + 4 / 4² = 3 / 4
    assert found.totals[0].epsilon == pytest.approx(gaussian_epsilon(2 / 3**0.5, 1e-5))
    assert found.totals[0].note == "the cost of the guarded weights is in this figure"
    assert found.totals[1].epsilon == pytest.approx(gaussian_epsilon(2.0, 1e-5))
    sampled = replace(weights, event=Event(Gaussian(4.0), Protects.WEIGHTS, neighbours=Neighbours.ADD_REMOVE))
    apart = make_ledger([charge(guarded=True), sampled], 1e-5)
    assert apart.totals[0].note.startswith("this figure is for given weights")


@pytest.mark.parametrize(("rows", "delta"), [(5000, 2e-5), (4237, 2e-5), (100, 1e-3), (3, 0.03), (1, 0.1)])
def test_the_default_delta(rows: int, delta: float) -> None:
    assert default_delta(rows) == pytest.approx(delta)
    with pytest.raises(InvalidInput, match="there is no training row"):
        default_delta(0)


def test_a_delta_of_ones_own() -> None:
    run = trained(GaussianRelease(noise_multiplier=4.0, freeze=True), evaluation=sf.Evaluation(delta=1e-3))
    assert run.ledger.delta == 1e-3
    with pytest.raises(InvalidInput, match=r"delta=1.0 is not allowed; expected a number in \(0, 1\)"):
        trained(Noise(), evaluation=sf.Evaluation(delta=1.0))


def test_a_delta_that_publishing_a_row_keeps_is_said_so() -> None:
    def told(delta: float) -> str:
        release = GaussianRelease(noise_multiplier=4.0, freeze=True)
        return str(trained(release, evaluation=sf.Evaluation(delta=delta)).ledger)

    assert "delta 0.5 is not below 1 / " in told(0.5)
    assert "is not below" not in told(1e-4)


def test_what_learns() -> None:
    linear = nn.Linear(2, 2)
    assert learns_from_rows(linear)
    assert not learns_from_rows(linear.requires_grad_(False))
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(2, affine=False))
    assert learns_from_rows(norm), "its statistics come from the rows"
    norm[1].eval()
    assert not learns_from_rows(norm)
    assert learns_from_rows(norm.eval()), "given as a whole in evaluation mode it is trained"


def test_counts_by_row() -> None:
    uses = UsageCounts()
    key = ("a->b", 0, 0, "train")
    uses.add(key, torch.tensor([4, 1]))
    uses.add(key, torch.tensor([1]), times=2)
    uses.add(("a->b", 0, 0, "query"), torch.tensor([1]))
    assert uses.counts[key].tolist() == [0, 3, 0, 0, 1]
    assert len(uses.counts) == 1, "what is lent for a query is not counted"
    again = UsageCounts()
    again.load_state(uses.state())
    assert again.counts[key].tolist() == [0, 3, 0, 0, 1]
