"""What a party sees: the recorder's stride, budget and files, and that labels stay where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Message, Recorder, Recording, Stamp, View
from splitfed.models.lenet import lenet
from splitfed.topologies import u_shaped, vanilla
from tests.examples import assert_same, engine_of, images


def message(step: int, phase: str = "train", rows: int = 2, **tensors: Tensor) -> Message:
    """A message of 8 bytes a row whose values are its step."""
    held = tensors or {"z": torch.full((rows, 2), float(step))}
    return Message("client0", "server", "activation", "bottom->top", held, Stamp(phase, 0, 0, step))


def fill(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.receive(message(step))


def plain(messages: tuple[Message, ...]) -> list[object]:
    return [[m.sender, m.receiver, m.kind, m.edge, dict(m.tensors), tuple(m.stamp)] for m in messages]


def test_bytes_of_a_message_are_its_elements() -> None:
    sent = message(0, a=torch.zeros(3, 2), b=torch.zeros(3, dtype=torch.int64))
    assert sent.nbytes == 3 * 2 * 4 + 3 * 8


def test_every_third_training_step_and_all_else_is_kept() -> None:
    recorder = Recorder("server", every=3)
    fill(recorder, range(7))
    recorder.receive(message(1, "query"))
    kept = [(m.stamp.phase, m.stamp.step) for m in recorder.messages()]
    assert kept == [("train", 0), ("train", 3), ("train", 6), ("query", 1)]


def test_past_the_budget_without_a_folder_is_refused() -> None:
    recorder = Recorder("server", budget=40)
    fill(recorder, range(2))
    with pytest.raises(InvalidInput, match="recording 'server' needs more than its budget of 40 bytes"):
        fill(recorder, range(2, 3))


def test_past_the_budget_messages_go_to_disk_and_come_back_in_order(tmp_path: Path) -> None:
    spilling, free = Recorder("server", budget=40, folder=tmp_path / "server"), Recorder("server")
    fill(spilling, range(7))
    fill(free, range(7))
    assert len(list((tmp_path / "server").iterdir())) == 3
    assert_same(plain(spilling.view().messages), plain(free.view().messages))
    assert spilling.view().tensors()["z"][:, 0].tolist() == [s for s in range(7) for _ in range(2)]


def test_what_shares_memory_can_be_spilled(tmp_path: Path) -> None:
    z = torch.arange(8.0).view(4, 2)
    recorder = Recorder("server", folder=tmp_path)
    recorder.receive(message(0, a=z, b=z[1:], c=z[:, :1], d=z.T))
    recorder.receive(message(1, a=z))
    recorder.flush()
    first, second = recorder.messages()
    assert_same(dict(first.tensors), {"a": z, "b": z[1:], "c": z[:, :1], "d": z.T})
    assert torch.equal(second.tensors["a"], z)


@pytest.mark.parametrize("on_disk", [False, True])
def test_going_back_to_a_state_forgets_what_came_later(tmp_path: Path, on_disk: bool) -> None:
    folder = tmp_path if on_disk else None
    recorder = Recorder("server", budget=200, folder=folder)
    fill(recorder, range(3))
    state, before = recorder.state(), plain(recorder.view().messages)
    fill(recorder, range(3, 7))
    if on_disk:
        recorder.flush()
    fresh = Recorder("server", budget=200, folder=folder)
    fresh.load_state(state)
    assert_same(plain(fresh.view().messages), before)
    if on_disk:
        assert sorted(p.name for p in tmp_path.iterdir()) == ["part-00000.safetensors"]
    fill(fresh, range(3, 5))
    assert [m.stamp.step for m in fresh.messages()] == [0, 1, 2, 3, 4]


def test_recording_refuses_an_unknown_party_and_bad_numbers() -> None:
    with pytest.raises(InvalidInput, match="unknown party to record 'sever'; did you mean 'server'"):
        Recording(("sever",)).recorders(("client0", "server"), None)
    with pytest.raises(InvalidInput, match="recording every=0 is not allowed"):
        Recording(every=0)
    with pytest.raises(InvalidInput, match="recording budget=0 is not allowed"):
        Recording(budget=0)


def test_selecting_by_kind_phase_and_edge() -> None:
    view = View("server", (message(0), message(1, "query"), message(2)))
    assert [m.stamp.step for m in view.select(kind="activation", phase="train").messages] == [0, 2]
    assert view.select(kind="label").messages == ()
    assert view.select(edge="a->b").messages == ()


@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
def test_only_vanilla_shows_the_server_labels(shape: str) -> None:
    model = lenet((1, 8, 8), 10)
    topology = vanilla(model, "pool1") if shape == "vanilla" else u_shaped(model, ("pool1", "fc2"))
    x, y = images(20)
    engine = engine_of(topology, x, y, recording=Recording(("server",)))
    engine.train(0, 0, [torch.arange(10), torch.arange(10, 20)])
    view = engine.view("server")
    same = [
        (m.stamp.step, m.kind)
        for m in view.messages
        for t in m.tensors.values()
        if t.numel() == 10 and torch.equal(t.flatten().double(), y[10 * m.stamp.step :][:10].double())
    ]
    if shape == "vanilla":
        assert same == [(0, "label"), (1, "label")]
        assert torch.equal(view.select(kind="label").tensors()["fc3"], y)
        assert {m.kind for m in view.messages} == {"activation", "label"}
    else:
        assert same == []
        assert {m.kind for m in view.messages} == {"activation", "gradient"}
    assert {m.receiver for m in view.messages} == {"server"}
    assert set(view.segments) == {s.name for s in topology.segments_of("server")}


def test_a_client_receives_gradients_only_in_vanilla() -> None:
    x, y = images(20)
    engine = engine_of(vanilla(lenet((1, 8, 8), 10), "pool1"), x, y, recording=Recording(("client0",)))
    engine.train(0, 0, [torch.arange(20)])
    (received,) = engine.view("client0").messages
    assert (received.kind, received.sender, received.edge) == ("gradient", "server", "bottom->top")
    assert received.tensors["pool1"].shape[0] == 20


def test_watching_leaves_the_runs_own_recorder_alone() -> None:
    engine = engine_of(vanilla(lenet((1, 8, 8), 10), "pool1"), *images(8), recording=Recording(("server",)))
    with engine.record_party("server") as recorder:
        engine.predict(0, "train", "predict")
    assert len(recorder.view().messages) == 1
    assert engine.view("server").messages == ()
    engine.predict(0, "train", "evaluate")
    assert len(engine.view("server").messages) == 1
