"""A party: its own copies, its gradients against the uncut model, labels, hand-over and random streams."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Message, Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.random import derive, stream
from splitfed.core.step_state import forward_seed
from splitfed.core.tasks import classification, regression
from splitfed.core.topology import Head, Segment, Topology
from splitfed.engines.local import LocalEngine
from splitfed.topologies import u_shaped, vanilla
from tests.examples import Dropped, InPlaceAfterCut, assert_same, engine_of, images
from tests.predicted_bytes import backward_bytes
from tests.rounding import UNIT, single

RATE = 0.1
SGD = Optim("SGD", {"lr": RATE})
MOVED = 4 * UNIT / RATE
"""A step rounds weights of up to 1, and their difference is divided by the rate."""


def gradients(before: dict[str, Tensor], after: dict[str, Tensor], rate: float = RATE) -> dict[str, Tensor]:
    return {name: (before[name] - after[name]) / rate for name in before}


def test_one_step_moves_every_weight_by_its_gradient() -> None:
    model = InPlaceAfterCut()
    topology, uncut = vanilla(model, "conv"), copy.deepcopy(model)
    x, y = images(12)
    engine = engine_of(topology, x, y, optim=SGD)
    engine.train(0, 0, [torch.arange(12)])
    functional.cross_entropy(uncut(x), y).backward()
    moved = gradients(model.state_dict(), topology.state_dict(engine.modules(0)))
    for name, parameter in uncut.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(moved[name], parameter.grad, atol=MOVED), name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_a_released_gradient_is_the_one_the_uncut_model_has_there() -> None:
    """One row a loss of its own: the mean over 12 rows divides each row's gradient by 12."""
    model = InPlaceAfterCut()
    x, y = images(12)
    engine = engine_of(vanilla(model, "conv"), x, y)
    with engine.record_party("client0") as recorder:
        engine.train(0, 0, [torch.arange(12)])
    (message,) = recorder.view().messages
    z = model.conv(x).detach().requires_grad_()
    out = model.fc2(torch.relu(model.fc1(model.pool(torch.relu(z)).flatten(1))))
    functional.cross_entropy(out, y, reduction="sum").backward()
    assert z.grad is not None
    assert torch.allclose(message.tensors["conv"] * 12, z.grad, atol=1e-6)


def heads_of(weights: tuple[float, float]) -> tuple[Topology, nn.Module, nn.Module, nn.Module]:
    """One bottom at the client and two heads at two servers."""
    bottom, one, two = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
    segments = (
        Segment("bottom", "client", bottom, ("x",), ("h",), "bottom."),
        Segment("one", "server", one, ("h",), ("class",), "one."),
        Segment("two", "other", two, ("h",), ("number",), "two."),
    )
    heads = (
        Head("class", "server", "client", classification(2), weights[0]),
        Head("number", "other", "client", regression(1), weights[1]),
    )
    return Topology("two heads", segments, {"x": "client"}, heads), bottom, one, two


def test_two_heads_weigh_as_they_say() -> None:
    topology, bottom, one, two = heads_of((0.5, 2.0))
    x, y = torch.rand(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    engine = LocalEngine(topology, pass_example(topology, {"x": x}), 1, optims=dict.fromkeys(topology.roles, SGD))
    engine.own(0, "train", {"x": x}, {"class": y, "number": y.float()})
    (reported,) = engine.train(0, 0, [torch.arange(6)])
    h = bottom(x)
    loss = 0.5 * functional.cross_entropy(one(h), y) + 2.0 * functional.mse_loss(two(h).flatten(), y.float())
    loss.backward()
    assert reported == single(float(loss.detach()))
    for name, module in (("bottom", bottom), ("one", one), ("two", two)):
        moved = gradients(module.state_dict(), engine.modules(0)[name].state_dict())
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(moved[key], parameter.grad, atol=MOVED), (name, key)
    assert engine.traffic.by_kind()["label"] == 6 * 8 + 6 * 4


def test_the_two_labels_go_to_the_two_servers() -> None:
    topology, *_ = heads_of((1.0, 1.0))
    x = torch.rand(6, 3)
    engine = LocalEngine(topology, pass_example(topology, {"x": x}), 1)
    engine.own(0, "train", {"x": x}, {"class": torch.zeros(6, dtype=torch.int64), "number": torch.ones(6)})
    with engine.record_party("server") as one, engine.record_party("other") as two:
        engine.train(0, 0, [torch.arange(6)])
    assert set(one.view().select(kind="label").tensors()) == {"class"}
    assert set(two.view().select(kind="label").tensors()) == {"number"}


def test_no_gradient_comes_back_for_a_value_that_nobody_needs_and_decay_leaves_its_weights_alone() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 10)

        def forward(self, h: Tensor, g: Tensor) -> Tensor:
            return self.fc(h)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    segments = (
        Segment("bottom", "client", Both(), ("x",), ("h", "g"), "bottom."),
        Segment("top", "server", Ignores(), ("h", "g"), ("out",), "top."),
    )
    topology = Topology("t", segments, {"x": "client"}, (Head("out", "server", "client"),))
    decay = Optim("SGD", {"lr": 0.1, "weight_decay": 0.1})
    engine = engine_of(topology, torch.rand(4, 3), torch.tensor([0, 1, 2, 3]), optim=decay)
    before = {name: p.clone() for name, p in engine.modules(0)["bottom"].named_parameters()}
    with engine.record_party("client0") as recorder:
        engine.train(0, 0, [torch.arange(4)])
    back = recorder.view().tensors()
    assert back.keys() == {"h"}
    assert bool(back["h"].abs().sum() > 0)
    moved = {n: not torch.equal(p, before[n]) for n, p in engine.modules(0)["bottom"].named_parameters()}
    assert moved == {"a.weight": True, "a.bias": True, "b.weight": False, "b.bias": False}
    counted = engine.traffic.bytes(kind="gradient")
    assert counted == backward_bytes(topology, pass_example(topology, {"x": torch.rand(4, 3)}), 4) == 4 * 3 * 4


class Tied(nn.Module):
    """The last layer is the first one, transposed in use: both belong to the client when U-shaped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


def test_weights_tied_within_a_party_stay_tied_and_train_as_uncut() -> None:
    model = Tied()
    topology, uncut = u_shaped(model, ("first", "middle")), copy.deepcopy(model)
    x, y = torch.rand(20, 10), torch.arange(20) % 10
    engine = engine_of(topology, x, y)
    optimizer, _ = Optim().build(uncut.parameters())
    for _ in range(5):
        engine.train(0, 0, [torch.arange(20)])
        optimizer.zero_grad()
        functional.cross_entropy(uncut(x), y).backward()
        optimizer.step()
    state = topology.state_dict(engine.modules(0))
    assert torch.equal(state["first.weight"], state["last.weight"])
    assert_same(state, dict(uncut.state_dict()))


def test_frozen_weights_stay() -> None:
    model = InPlaceAfterCut()
    model.conv.requires_grad_(False)
    engine = engine_of(vanilla(model, "conv"), *images(8))
    engine.train(0, 0, [torch.arange(8)])
    assert torch.equal(engine.modules(0)["bottom"].conv.weight, model.conv.weight)
    assert not torch.equal(engine.modules(0)["top"].fc2.weight, model.fc2.weight)


def test_dropout_draws_afresh_for_each_party_lane_epoch_and_step() -> None:
    drawn = set()
    for party in ("client0", "client1"):
        for stamp in (
            Stamp("train", 0, 0, 0),
            Stamp("train", 1, 0, 0),
            Stamp("train", 0, 1, 0),
            Stamp("train", 0, 0, 1),
        ):
            with stream(forward_seed(0, party, "bottom", stamp)):
                drawn.add(float(torch.rand(())))
    assert len(drawn) == 8


def test_the_global_random_state_is_untouched_by_training() -> None:
    engine = engine_of(vanilla(Dropped(), "relu1"), *images(16))
    before = torch.get_rng_state()
    engine.train(0, 0, [torch.arange(16)])
    engine.predict(0, "train", "evaluate")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_batch_of_a_stream_is_the_seeds() -> None:
    with stream(forward_seed(5, "server", "top", Stamp("train", 2, 3, 4))):
        found = torch.rand(4)
    seed = derive(5, "forward", "server", "top", "train", 2, 3, 4, "train")
    assert torch.equal(found, torch.rand(4, generator=torch.Generator().manual_seed(seed)))


def test_uploading_sends_copies_and_adopting_takes_them() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), replicas=2)
    sender, receiver = engine.parties["client0"], engine.parties["client1"]
    engine.train(0, 0, [torch.arange(4)])
    message = sender.state.upload("client1", Stamp("train", 0, 0, 0))
    kept = {name: t.clone() for name, t in message.tensors.items()}
    engine.train(0, 0, [torch.arange(4)])
    assert_same(dict(message.tensors), kept)
    receiver.state.adopt(message.tensors)
    assert_same({f"bottom/{n}": t for n, t in receiver.state.modules["bottom"].state_dict().items()}, kept)


def test_prediction_leaves_training_as_it_was() -> None:
    """Evaluation between two steps, borrowed or not, changes no bit of what follows."""
    states = []
    for between in (False, True):
        torch.manual_seed(0)
        engine = engine_of(vanilla(Dropped(), "relu1"), *images(32), replicas=2)
        engine.train(0, 0, [torch.arange(16)])
        if between:
            engine.predict(0, "train", "evaluate")
            engine.predict(1, "train", "evaluate", borrow=0)
        engine.train(0, 1, [torch.arange(16)])
        states.append(engine.state()["parties"])
    assert_same(states[0], states[1])


def test_messages_name_their_ends() -> None:
    engine = engine_of(vanilla(InPlaceAfterCut(), "conv"), *images(8), replicas=2)
    seen: list[Message] = []
    inner = engine.link.deliver
    engine.link.deliver = lambda m: seen.append(m) or inner(m)  # type: ignore[method-assign, func-returns-value]
    engine.train(1, 3, [torch.arange(4)])
    assert [(m.sender, m.receiver, m.kind, m.edge) for m in seen] == [
        ("client1", "server", "activation", "bottom->top"),
        ("client1", "server", "label", "labels->fc2"),
        ("server", "client1", "gradient", "bottom->top"),
    ]
    assert {tuple(m.stamp) for m in seen} == {("train", 1, 3, 0, "train")}


def test_a_segment_may_read_one_value_twice() -> None:
    """fc(p sigmoid(q)²) with p = q = the bottom's output: the gradient reaches the bottom by both ways."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 10)

        def forward(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(p * torch.sigmoid(q) ** 2)
            return out

    moved = []
    for role in ("client", "server"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            bottom, top = nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), Twice()
        segments = (
            Segment("bottom", "client", bottom, ("x",), ("a",)),
            Segment("top", role, top, ("a", "a"), ("out",)),
        )
        topology = Topology("twice", segments, {"x": "client"}, (Head("out", role, "client"),))
        x, y = images(16)
        engine = engine_of(topology, x, y, optim=Optim("SGD", {"lr": 0.5}))
        engine.train(0, 0, [torch.arange(16)])
        z = bottom(x)
        torch.nn.functional.cross_entropy(top(z, z), y).backward()
        with torch.no_grad():
            expected = bottom[1].weight - 0.5 * bottom[1].weight.grad
        moved.append(engine.modules(0)["bottom"][1].weight)  # type: ignore[index]
        torch.testing.assert_close(moved[-1].detach(), expected)
    assert torch.equal(moved[0], moved[1])
