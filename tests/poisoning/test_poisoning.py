"""Poisonings do what they say to data and uploads, and harm, or open a back door, as their papers promise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Recording, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.step_state import Batch
from splitfed.core.topology import Topology
from splitfed.data.dataset import Federation
from splitfed.models.mlp import mlp
from splitfed.poisoning import (
    Backdoor,
    ByzantineNoise,
    GradientReplacement,
    LabelFlip,
    Poisoning,
    Replay,
    Scaling,
    SignFlip,
    effect,
    success_rate,
)
from splitfed.topologies import vanilla, vertical
from splitfed.training.run import Run
from tests.examples import assert_refuses, assert_same

RUNS: dict[str, Run] = {}


def data() -> Federation:
    return splitfed.data.digits().clients(4, auxiliary=10, victims=10, validation=0.0)


def trained(*poisonings: Poisoning, rounds: int = 8, **options: Any) -> Run:
    """Four clients of SplitFed v1 on digits, trained once however often it is asked for."""
    key = repr((poisonings, rounds, options))
    if key not in RUNS or "folder" in options:
        with stream(0):
            model = mlp((1, 8, 8), 10, (32,), seed=None)
        settings = {"schedule": "splitfed_v1", "optimizer": Optim("Adam", {"lr": 0.01}), **options}
        RUNS[key] = splitfed.train(
            vanilla(model, "relu1"),
            data(),
            rounds=rounds,
            batch_size=16,
            adversaries=splitfed.Adversaries(poisoning=poisonings),
            **settings,
        )
    return RUNS[key]


EVERYBODY = (0, 1, 2, 3)
HARMFUL: dict[str, tuple[Poisoning, ...]] = {
    "label_flip": (LabelFlip(clients=EVERYBODY),),
    "sign_flip": (SignFlip(clients=(0, 1), factor=3.0),),
    "byzantine_noise": (ByzantineNoise(clients=(0,), scale=10.0),),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harm_is_done(name: str) -> None:
    """The honest run is right on more than nine digits of ten."""
    found = effect(trained(*HARMFUL[name]), trained())
    assert found.baseline_accuracy > 0.9
    assert found.accuracy < found.baseline_accuracy - 0.25
    assert (found.success, found.baseline_success) == (None, None)


def test_little_harm_is_little() -> None:
    found = effect(trained(ByzantineNoise(clients=(0,), scale=1e-3, add=True)), trained())
    assert abs(found.accuracy - found.baseline_accuracy) < 0.03


def test_a_backdoor_opens_and_the_honest_run_has_none() -> None:
    """With a factor of one over the client's share, as in the paper."""
    door = Backdoor(clients=(0,), target=7, share=0.5)
    found = effect(trained(door, Scaling(clients=(0,), factor=4.0)), trained(), door)
    assert found.success is not None
    assert found.baseline_success is not None
    assert found.success > 0.7
    assert found.baseline_success < 0.1
    assert found.accuracy > 0.85
    assert found.success > success_rate(trained(door), door) + 0.3, "one honest-sized update of four opens less"


def test_label_flip_by_hand() -> None:
    """Half of client 1's rows of class 3 become 5, no other row of anybody changes."""
    clean = data()
    flipped = LabelFlip(clients=(1,), source=3, target=5, share=0.5).poison(clean, 0)
    for number, (before, after) in enumerate(zip(clean.clients, flipped.clients, strict=True)):
        changed = (before.train.y != after.train.y).nonzero().flatten()
        expected = round(0.5 * int((before.train.y == 3).sum())) if number == 1 else 0
        assert len(changed) == expected
        assert before.train.y[changed].tolist() == [3] * expected
        assert after.train.y[changed].tolist() == [5] * expected
        assert torch.equal(before.train.x, after.train.x)
        assert torch.equal(before.test.y, after.test.y)


def test_random_flips_are_all_wrong_and_all_classes_occur() -> None:
    clean = data()
    flipped = LabelFlip(clients=(2,)).poison(clean, 0)
    before, after = clean.clients[2].train.y, flipped.clients[2].train.y
    assert not bool((before == after).any())
    assert set(after.tolist()) == set(range(10))
    other = LabelFlip(clients=(2,)).poison(clean, 1).clients[2].train.y
    assert not torch.equal(after, other)


BEFORE = {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
AFTER = {"w": torch.tensor([2.0, 0.0]), "count": torch.tensor(4)}
BENT: dict[str, tuple[Poisoning, list[float]]] = {
    "sign_flip": (SignFlip(), [0.0, 4.0]),
    "sign_flip twice": (SignFlip(factor=2.0), [-1.0, 6.0]),
    "scaling": (Scaling(factor=10.0), [11.0, -18.0]),
}


@pytest.mark.parametrize("case", BENT)
def test_uploads_by_hand(case: str) -> None:
    """The update is (1, -2) on weights (1, 2); a count of batches is no update."""
    poisoning, expected = BENT[case]
    found = poisoning.upload(BEFORE, AFTER, generator(0))
    assert found["w"].tolist() == expected
    assert int(found["count"]) == 4


@pytest.mark.parametrize(("add", "center"), [(False, 1.0), (True, 3.0)])
def test_noise_has_its_scale(add: bool, center: float) -> None:
    before, after = {"w": torch.full((20_000,), 1.0)}, {"w": torch.full((20_000,), 3.0)}
    found = ByzantineNoise(scale=0.5, add=add).upload(before, after, generator(0))["w"]
    assert float(found.mean()) == pytest.approx(center, abs=0.02)
    assert float(found.std()) == pytest.approx(0.5, rel=0.03)


def test_what_arrives_is_the_bent_upload_and_only_of_those_clients() -> None:
    """A sign flip of one round: w' bent is 2 w - w', with w' that of the honest run."""
    honest, bent = (
        trained(*m, rounds=1, logging=splitfed.Logging(record=Recording(("fed_server",))))
        for m in ((), (SignFlip(clients=(2,)),))
    )
    one, other = (
        {(m.sender, m.stamp.replica): m.tensors for m in r.engine.view("fed_server").messages} for r in (honest, bent)
    )
    for client in range(4):
        for name, sent in one["client" + str(client), client].items():
            start = one["fed_server", client][name]
            expected = 2 * start - sent if client == 2 else sent
            assert torch.allclose(other["client" + str(client), client][name], expected, atol=1e-6)
    assert bent.history[0]["training_attacks"] == {"client2": {"bent": 1}}


def test_trigger_by_hand() -> None:
    """Two by two pixels in the lower right corner; the last two columns of a table."""
    door = Backdoor(size=2, value=0.5)
    marked = door.trigger(torch.zeros(1, 1, 3, 3), data())
    assert marked[0, 0].tolist() == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]]
    assert door.trigger(torch.zeros(1, 3), data()).tolist() == [[0.0, 0.5, 0.5]]
    poisoned = Backdoor(clients=(1,), target=4, share=0.25).poison(data(), 0)
    before, after = data().clients[1].train, poisoned.clients[1].train
    moved = (before.x != after.x).flatten(1).any(1)
    assert int(moved.sum()) == round(0.25 * len(before))
    assert after.y[moved].unique().tolist() == [4]
    assert bool((after.x[moved][:, :, -2:, -2:] == 1.0).all())


class Says:
    """A model that sees one pixel: class 1 if it is lit, else class 0."""

    accuracy = 1.0

    def __init__(self, federation: Federation) -> None:
        self.data = federation

    def predict(self, x: Tensor, client: int = 0) -> Tensor:
        lit = x[:, 0, -1, -1] > 0.9
        return nn.functional.one_hot(lit.long(), 10).float()


def test_success_rate_by_hand() -> None:
    says = Says(data())
    assert success_rate(says, Backdoor(target=1)) == 1.0
    assert success_rate(says, Backdoor(target=2)) == 0.0
    assert success_rate(says, Backdoor(target=1, value=0.0)) == 0.0
    assert success_rate(says, Backdoor(target=0, value=0.0)) == 1.0


def sums(*poisonings: Poisoning) -> Run:
    """Two parties with the halves of an image; their logits are added up."""
    with stream(0):
        bottoms = {
            side: nn.Sequential(nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
            for side in ("left", "right")
        }
        topology = vertical(bottoms, nn.Identity(), labels="left", fusion="sum")
    return on_halves(topology, 8, poisonings)


def halves(*poisonings: Poisoning, rounds: int = 4) -> Run:
    """Two parties with the halves of an image; a trained layer joins what they release."""
    with stream(0):
        bottoms = {s: nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU()) for s in ("left", "right")}
        topology = vertical(bottoms, nn.Linear(32, 10), labels="left")
    return on_halves(topology, rounds, poisonings)


def on_halves(topology: Topology, rounds: int, poisonings: tuple[Poisoning, ...]) -> Run:
    rows = splitfed.data.digits().halves().clients(1, auxiliary=10, victims=10, validation=0.0)
    return splitfed.train(
        topology,
        rows,
        rounds=rounds,
        optimizer=Optim("Adam", {"lr": 0.01}),
        adversaries=splitfed.Adversaries(poisoning=poisonings),
    )


def test_replay_pulls_predictions_to_its_class() -> None:
    """Half an image replayed: honest rows of other classes are seldom called 0, replayed ones often."""
    run = halves()
    rows = run.data.clients[0].train
    replay = Replay(party="right", row=int((rows.y == 0).nonzero()[0]), target=0)
    replay.check(run.data)
    x = run.data.test_union().x
    changed = replay.trigger(x, run.data)
    assert torch.equal(changed[..., :4], x[..., :4])
    assert torch.equal(changed[..., 4:], rows.x[replay.row][..., 4:].expand_as(x[..., 4:]))

    class Nothing(Replay):
        def trigger(self, x: Tensor, data: Federation) -> Tensor:
            return x

    honest = success_rate(run, Nothing(party="right", row=replay.row, target=0))
    assert honest < 0.05
    assert success_rate(run, replay) > honest + 0.15


def replacement(**changes: Any) -> GradientReplacement:
    rows = splitfed.data.digits().halves().clients(1, auxiliary=10, victims=10, validation=0.0)
    row = int((rows.clients[0].train.y == 3).nonzero()[0])
    return GradientReplacement(**{"party": "right", "row": row, "target": 3, **changes})


def test_replaced_gradients_open_a_back_door() -> None:
    """No label is touched, and the party has none; marked rows are pulled to class 3."""
    plan = replacement(size=8)
    honest, run = sums(), sums(plan)
    found = effect(run, honest, plan)
    assert found.success is not None
    assert found.baseline_success is not None
    assert found.success > found.baseline_success + 0.5
    assert found.accuracy > found.baseline_accuracy - 0.1
    assert torch.equal(run.data.clients[0].train.y, honest.data.clients[0].train.y)


def test_replaced_gradients_by_hand() -> None:
    """Three rows: marked, known, plain. The first gets ten times the second's gradient, once that has been seen."""
    plan = replacement(size=1, gain=10.0)
    run = halves(plan, rounds=1)
    read = run.engine.link.readers["right0"]
    rows = run.data.clients[0].train.x
    marked = plan.trigger(rows[:1], run.data)
    plain = (rows[:, 0, -1, -1] != 1.0).nonzero()[0]
    x = torch.cat([marked, rows[plan.row : plan.row + 1], rows[plain]])
    party = run.engine.parties["right0"]
    party.state.own("hand", {"right": run.data.features["right"].select(x)}, {})
    stamp = Stamp("train", 0, 0, 0)
    party.begin(Batch("hand", torch.arange(3)), stamp)
    g = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    message = Message("server", "right0", "gradient", "right->fusion", {"v": g}, stamp)
    assert read(message).tensors["v"].tolist() == [[30.0, 40.0], [3.0, 4.0], [5.0, 6.0]]
    assert g.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "what arrived stays as it was"
    assert read(message._replace(stamp=Stamp("rehearse", 0, 0, 0))).tensors["v"] is g


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    bent = (ByzantineNoise(clients=(1,), scale=0.01, add=True), LabelFlip(clients=(0,)))
    straight = trained(*bent, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        trained(*bent, rounds=3, logging=splitfed.Logging(folder=tmp_path / "run", progress=_stop_after(2)))
    resumed = trained(*bent, rounds=3, logging=splitfed.Logging(folder=tmp_path / "run", resume=True))
    one, other = straight.state(), resumed.state()
    assert_same({k: v for k, v in other.items() if k != "run"}, {k: v for k, v in one.items() if k != "run"})
    with pytest.raises(InvalidInput):
        trained(SignFlip(), rounds=3, logging=splitfed.Logging(folder=tmp_path / "run", resume=True))


def _stop_after(last: int) -> Callable[..., None]:
    def stop(done: int, rounds: int, metrics: object) -> None:
        if done == last:
            raise KeyboardInterrupt

    return stop


SETTINGS: dict[str, tuple[Callable[[], Poisoning], str]] = {
    "nobody": (lambda: SignFlip(clients=()), "clients=() is not allowed; expected a tuple of different clients"),
    "twice": (lambda: SignFlip(clients=(1, 1)), "clients=(1, 1) is not allowed"),
    "negative": (lambda: SignFlip(clients=(-1,)), "client=-1 is not allowed"),
    "share": (lambda: LabelFlip(share=0.0), "label_flip share=0.0 is not allowed; expected a number in (0, 1]"),
    "same class": (lambda: LabelFlip(source=3, target=3), "label_flip source and target are both 3"),
    "factor": (lambda: Scaling(factor=0.0), "scaling factor=0.0 is not allowed"),
    "flip": (lambda: SignFlip(factor=-1.0), "sign_flip factor=-1.0 is not allowed"),
    "scale": (lambda: ByzantineNoise(scale=0.0), "byzantine_noise scale=0.0 is not allowed"),
    "size": (lambda: Backdoor(size=0), "backdoor size=0 is not allowed"),
    "marked": (lambda: Backdoor(share=2.0), "backdoor share=2.0 is not allowed"),
    "known row": (lambda: replacement(row=-1), "gradient_replacement row=-1 is not allowed"),
    "gain": (lambda: replacement(gain=0.0), "gradient_replacement gain=0.0 is not allowed"),
    "row": (lambda: Replay(party="left", row=-1, target=0), "replay row=-1 is not allowed"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str) -> None:
    assert_refuses(*SETTINGS[case])


MISFITS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "client": (SignFlip(clients=(4,)), {}, "SignFlip is for client 4; expected 0 to 3"),
    "target": (Backdoor(target=10), {}, "backdoor target=10 is not allowed; expected a class in [0, 9]"),
    "source": (LabelFlip(source=-1), {}, "label_flip source=-1 is not allowed; expected a class in [0, 9]"),
    "trigger": (Backdoor(size=9), {}, "backdoor size=9 is not allowed; rows of shape (1, 8, 8) have room for 8"),
    "value": (Backdoor(value=2.0), {}, "backdoor value=2.0 is not allowed; expected a number in [0, 1]"),
    "party": (Replay(party="left", row=0, target=0), {}, "unknown party of a replay: 'left'"),
    "no part": (replacement(), {}, "unknown party of a gradient replacement: 'right'"),
    "no upload": (
        SignFlip(),
        {"schedule": "sequential"},
        "SignFlip changes a client's upload; no client uploads weights under this schedule",
    ),
    "no poisoning": (("sign_flip",), {}, "poisoning='sign_flip' is not allowed"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits(case: str) -> None:
    poisoning, options, text = MISFITS[case]
    given = poisoning if isinstance(poisoning, tuple) else (poisoning,)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        trained(*given, **options)


def test_a_replayed_row_must_be_of_its_class() -> None:
    rows = splitfed.data.digits().halves().clients(1)
    label = int(rows.clients[0].train.y[0])
    with pytest.raises(
        InvalidInput, match=f"replay row 0 is of class {label}; expected one of class {(label + 1) % 10}"
    ):
        Replay(party="left", row=0, target=(label + 1) % 10).check(rows)


def test_a_party_that_gets_no_gradient_has_none_to_replace() -> None:
    with stream(0):
        topology = vanilla(mlp((1, 8, 8), 10, (8,), seed=None), "relu1")
    rows = splitfed.data.digits().with_features({"top": splitfed.data.Feature(torch.arange(8), (8,))}).clients(1)
    row = int((rows.clients[0].train.y == 3).nonzero()[0])
    with pytest.raises(InvalidInput, match="GradientReplacement changes returned gradients; 'top' receives none"):
        splitfed.train(
            topology,
            rows,
            rounds=1,
            adversaries=splitfed.Adversaries(poisoning=GradientReplacement(party="top", row=row, target=3)),
        )
