"""A message is its numbers: not the storage that they were cut from, nor what hangs on a tensor."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import LocalLink, Message, Recorder, Recording, Stamp, View
from splitfed.core.optimizers import Optim
from splitfed.core.tasks import classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.traffic import Traffic
from splitfed.engines.local import LocalEngine
from splitfed.engines.wire_format import ByteLink
from splitfed.topologies import vanilla
from tests.core.test_isolation import FiniteCheck, assert_own, shared
from tests.core.training_beside import built
from tests.examples import assert_same, placed, toy_data
from tests.object_graph import holdings, reachable


class Numbers(Tensor):
    """A tensor of another type, which keeps what it was made of."""


class Bottom(nn.Module):
    """A client's segment on rows (6, 5): a layer, and then `cut`, a way to leave with more than is meant to be sent."""

    def __init__(self, cut: str) -> None:
        super().__init__()
        self.cut = cut
        self.layer = nn.Linear(5, 4)
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.token = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(400.0).view(100, 4))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return one value or two; some are a view of `x`, which has no weight before it."""
        h = self.layer(x)
        match self.cut:
            case "columns of the input":
                return x.flatten(1)[:, :3]
            case "the input":
                return x
            case "the input, flattened":
                return x.flatten(1)
            case "a token":
                return h[:, 0]
            case "the last of a sequence":
                return self.lstm(x)[0][:, -1]
            case "the last step":
                return h.transpose(0, 1).contiguous()[-1]
            case "channels":
                return h[..., 1:3]
            case "a window":
                return h.flatten(1).unfold(1, 8, 4)
            case "expanded":
                return h.mean((1, 2))[:, None].expand(-1, 7)
            case "transposed":
                return h.transpose(1, 2)
            case "imaginary":
                return torch.complex(h, 2 * h).conj().imag
            case "a row of a table":
                return self.table[: len(x)] + 0.0 * h.mean((1, 2))[:, None] if self.training else self.table[: len(x)]
            case "a parameter":
                return self.token.expand(len(x), 4)
            case "another type":
                return h.as_subclass(Numbers)
            case "an attribute":
                h.rows = x  # type: ignore[attr-defined]
                return h
            case "one storage, twice":
                return h, h.flatten(1)
            case "halves of one storage":
                return h.flatten(1).chunk(2, 1)
        raise AssertionError(self.cut)


CUTS = (
    *("columns of the input", "the input", "the input, flattened", "a token", "the last of a sequence"),
    *("the last step", "channels", "a window", "expanded", "transposed", "imaginary", "a row of a table"),
    *("a parameter", "another type", "an attribute", "one storage, twice", "halves of one storage"),
)


class Top(nn.Module):
    """Puts what it is given side by side, then a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, *parts: Tensor) -> Tensor:
        return self.layer(torch.cat([p.flatten(1) for p in parts], 1) if len(parts) > 1 else parts[0].flatten(1))


def rows(count: int = 64) -> Tensor:
    return torch.randn(count, 6, 5, generator=torch.Generator().manual_seed(3))


def split_at(cut: str) -> Topology:
    with sf.core.random.stream(5):
        bottom = Bottom(cut)
        made = bottom(rows(2))
        top = Top(sum(p[0].numel() for p in (made if isinstance(made, tuple) else (made,))))
    values = ("z", "w") if isinstance(made, tuple) else ("z",)
    segments = (Segment("bottom", "client", bottom, ("x",), values), Segment("top", "server", top, values, ("out",)))
    heads = (Head("out", "server", "client", task=classification(3)),)
    return Topology("views", segments, {"x": "client"}, heads, sent_inputs=("x",))


STEPS = [torch.arange(33), torch.arange(33, 64), torch.arange(0, 64, 2)]


def stepped(cut: str) -> LocalEngine:
    """Three steps and a pass in evaluation mode; both parties recorded, and whoever listens written down."""
    topology = split_at(cut)
    facts, optims = pass_example(topology, {"x": rows(4)}), dict.fromkeys(topology.roles, Optim("SGD", {"lr": 0.1}))
    engine = LocalEngine(topology, facts, 1, optims=optims, recording=Recording(("server", "client0")))
    engine.own(0, "train", {"x": rows()}, {"out": torch.arange(64) % 3})
    return engine


@pytest.mark.parametrize("cut", CUTS)
def test_a_message_holds_what_was_sent_and_nothing_else(cut: str) -> None:
    engine = stepped(cut)
    watch = engine.link = FiniteCheck(engine)  # type: ignore[assignment]
    heard: list[Message] = []
    for party in ("server", "client0"):
        watch.inner.listeners[party] = heard.append
        watch.inner.taps[party] = lambda message: (heard.append(message), message)[1]
        watch.inner.readers[party] = lambda message: (heard.append(message), message)[1]
    engine.train(0, 0, STEPS)
    engine.predict(0, "train", "evaluate")
    seen = [m for p in ("server", "client0") for m in watch.inner.recorders[p].view().messages]
    assert {m.kind for m in seen} >= {"activation", "label"}
    assert len(heard) == 3 * len(watch.kinds)
    for message in (*seen, *heard):
        assert_own(message)
    recorded = [t.untyped_storage().data_ptr() for m in seen for t in m.tensors.values()]
    assert len(set(recorded)) == len(recorded)
    held = {address for party in engine.parties.values() for kind, address in holdings(party) if kind == "memory"}
    assert not held.intersection(recorded), "what is recorded is nobody's memory"


@pytest.mark.parametrize("cut", CUTS)
def test_a_copied_message_trains_to_the_bits_of_the_uncut_model(cut: str) -> None:
    """Matrix products round by how rows lie in memory, so a receiver must lay a copy out as the sender had it."""
    engine, topology = stepped(cut), split_at(cut)
    bottom, top = (copy.deepcopy(s.module) for s in topology.segments)
    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.1)
    engine.train(0, 0, STEPS)
    x, y = rows(), torch.arange(64) % 3
    for batch in STEPS:
        made = bottom(x[batch])
        loss = nn.functional.cross_entropy(top(*made) if isinstance(made, tuple) else top(made), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, module in (("bottom", bottom), ("top", top)):
        assert_same(engine.modules(0)[name].state_dict(), module.state_dict(), name)


@pytest.mark.parametrize("link", [LocalLink, ByteLink])
def test_a_receiver_lays_a_copy_out_as_the_sender_had_it(link: type[LocalLink]) -> None:
    """Rows of 5 numbers out of 35, the first of them 20 bytes behind an address that is aligned."""
    lay: dict[str, list[tuple[tuple[int, ...], int]]] = {"sent": [], "used": []}

    class Token(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            token = super().forward(x)[:, 1]
            lay["sent"].append((token.stride(), token.data_ptr() % 64))
            return token

    class LayerUse(nn.Linear):
        def forward(self, z: Tensor) -> Tensor:
            lay["used"].append((z.stride(), z.data_ptr() % 64))
            return super().forward(z)

    segments = (
        Segment("bottom", "client", Token(5, 5), ("x",), ("z",)),
        Segment("top", "server", LayerUse(5, 3), ("z",), ("out",)),
    )
    topology = Topology("token", segments, {"x": "client"}, (Head("out", "server", "client", task=classification(3)),))
    engine = LocalEngine(topology, pass_example(topology, {"x": torch.ones(4, 7, 5)}), 1, link=link)
    engine.own(0, "train", {"x": torch.ones(8, 7, 5)}, {"out": torch.zeros(8, dtype=torch.int64)})
    lay["sent"].clear()
    lay["used"].clear()
    engine.train(0, 0, [torch.arange(8)])
    engine.predict(0, "train", "evaluate")
    assert lay["sent"] == lay["used"] == [((35, 1), 20)] * 2


class ClassToken(nn.Module):
    """Series (rows, 2, 16) as tokens behind one of their own: what comes back for them is a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.own, self.out = nn.Linear(2, 8), nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x.transpose(1, 2))
        return self.out(self.layer(torch.cat([self.own.expand(len(h), -1, -1), h], 1)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("link", [LocalLink, ByteLink])
def test_a_gradient_is_laid_out_as_it_lay_where_it_was_computed(link: type[LocalLink]) -> None:
    """The sum over rows that lie apart, the gradient of a bias, rounds otherwise than that over rows that do not."""
    model = built(ClassToken)
    x, y = torch.randn(24, 2, 16, generator=torch.Generator().manual_seed(2)), torch.arange(24) % 4
    topology = vanilla(copy.deepcopy(model), "tokens", example=x[:8]).with_task(classification(4))
    engine = placed(topology, {"x": x}, {topology.heads[0].value: y}, optim=Optim("SGD", {"lr": 0.1}), link=link)
    steps = torch.arange(24).split(8)
    engine.train(0, 0, list(steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step]), y[step]).backward()
        optimizer.step()
    assert_same(topology.state_dict(engine.modules(0)), model.state_dict())


def test_what_passes_through_is_not_the_senders_memory() -> None:
    """Raw rows that leave as they are, and what leaves for two parties, are copied; what a layer made is not."""
    pointers: dict[str, int] = {}

    class Keep(LocalLink):
        def carry(self, message: Message) -> Message:
            party = engine.parties[message.sender]
            if message.kind == "activation":
                inputs = {t.data_ptr() for t in party.inputs(message.stamp.replica).values()}
                made = party._step_states[message.stamp.replica].values  # the sender's own value
                pointers[message.edge] = message.tensors["z"].data_ptr()
                assert message.tensors["z"].data_ptr() not in inputs
                pointers["made"] = made["z"].data_ptr()
            return message

    for cut, same in (("the input, flattened", False), ("the input", False), ("an attribute", True)):
        topology = split_at(cut)
        engine = LocalEngine(topology, pass_example(topology, {"x": rows(4)}), 1, link=Keep)
        engine.own(0, "train", {"x": rows()}, {"out": torch.arange(64) % 3})
        engine.train(0, 0, STEPS[:1])
        assert (pointers["bottom->top"] == pointers["made"]) is same, cut


def test_a_gradient_that_passes_through_is_copied() -> None:
    """Two parties must not hold one gradient: the second might add to it in place."""
    parts = {"one": nn.Linear(5, 4), "two": nn.Identity(), "three": nn.Linear(4, 3)}
    values = ("x", "a", "b", "out")
    segments = tuple(
        Segment(n, r, m, (values[i],), (values[i + 1],))
        for i, (r, (n, m)) in enumerate(zip(("client", "hop", "server"), parts.items(), strict=True))
    )
    topology = Topology("hops", segments, {"x": "client"}, (Head("out", "server", "client", task=classification(3)),))
    kept: list[Tensor] = []

    class Keep(LocalLink):
        def carry(self, message: Message) -> Message:
            kept.extend(t for t in message.tensors.values() if message.kind != "label")
            return message

    engine = LocalEngine(topology, pass_example(topology, {"x": rows(4)[:, 0]}), 1, link=Keep)
    engine.own(0, "train", {"x": rows()[:, 0]}, {"out": torch.arange(64) % 3})
    engine.train(0, 0, STEPS[:1])
    assert len(kept) == 4
    assert torch.equal(kept[0], kept[1])  # forward, through the hop
    assert torch.equal(kept[2], kept[3])  # and back
    assert len({t.untyped_storage().data_ptr() for t in kept}) == 4


@dataclass(frozen=True)
class Thief(Attack):
    """Reads whatever the storages of the releases hold, and takes it for the victims' rows if there is enough of it."""

    requires: ClassVar[frozenset[Needs]] = frozenset({Needs.RELEASES})

    def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
        (message,) = view.select(kind="activation").messages
        (release,) = message.tensors.values()
        everything = torch.empty(0).set_(release.untyped_storage())
        size = len(release) * torch.Size(knowledge.shape).numel()
        return (everything if everything.numel() == size else torch.zeros(size)).view(-1, *knowledge.shape)


class Columns(nn.Module):
    """A client that means to send three numbers a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :3]


@pytest.mark.parametrize("link", ["memory", "bytes"])
def test_an_attack_finds_no_row_in_the_storage_of_a_release(link: str) -> None:
    segments = (
        Segment("bottom", "client", Columns(), ("x",), ("z",)),
        Segment("top", "server", nn.Linear(3, 10), ("z",), ("out",)),
    )
    heads = (Head("out", "server", "client"),)
    topology = Topology("columns", segments, {"x": "client"}, heads, sent_inputs=("x",))
    data = toy_data(60).clients(1, auxiliary=10, victims=8)
    run = sf.train(topology, data, rounds=1, logging=sf.Logging(link=link))
    (found,) = run.attack(Thief())
    assert not found.prediction.any()
    assert found.scores["attack"]["mse"].mean == pytest.approx(float((found.truth**2).mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized"])
def test_what_is_not_dense_is_refused(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    dense = torch.eye(4)
    tensor = {
        "sparse": dense.to_sparse,
        "nested": lambda: torch.nested.nested_tensor([dense[0], dense[1]], layout=torch.strided),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
    }[kind]
    message = Message("client0", "server", "activation", "bottom->top", {"z": tensor()}, Stamp("train", 0, 0, 0))
    with pytest.raises(InvalidInput, match=f"'z' on 'bottom->top' from 'client0' is a {kind} tensor; a message carrie"):
        message.in_own_memory()
    recwarn.clear()


def test_what_fills_its_storage_is_handed_over_as_it_is() -> None:
    given = {"a": torch.ones(3, 4), "b": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    message = Message("client0", "server", "activation", "bottom->top", given, Stamp("train", 0, 0, 0))
    assert message.in_own_memory() is message


def test_a_party_holds_no_storage_of_a_larger_model() -> None:
    """Weights that are slices of one vector, and a buffer cut from data, come without the rest."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    secret = torch.randn(50, 4)
    model[1].running_mean = secret[7]
    model[1].rows = secret[:2]  # type: ignore[assignment]
    engine = LocalEngine(topology := _whole(model), pass_example(topology, {"x": secret}), 1)
    for party in engine.parties.values():
        for thing in reachable(party.state.modules):
            if isinstance(thing, Tensor):
                assert thing.untyped_storage().nbytes() == thing.nbytes
    assert torch.equal(engine.parties["client0"].state.modules["bottom"][1].running_mean, secret[7])


def test_rows_cut_from_one_tensor_do_not_bring_those_of_others() -> None:
    topology = _whole(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    engine = LocalEngine(topology, pass_example(topology, {"x": x}), 2)
    for replica in range(2):
        rows = slice(20 * replica, 20 * replica + 20)
        engine.own(replica, "train", {"x": x[rows]}, {"out": y[rows]})
    assert shared(engine) == []


def test_a_matching_client_sends_its_codes_alone() -> None:
    recorder = Recorder("matcher")
    link = LocalLink(Traffic(), {"matcher": recorder})
    codes = torch.randn(6, 9)[:, :2]
    stamp = Stamp("match", 0, 0, 0)
    arrived = link.deliver(Message("client", "matcher", "activation", "encoder->matcher", {"a": codes}, stamp))
    assert_own(arrived)
    assert_own(*recorder.messages())
    assert torch.equal(arrived.tensors["a"], codes)


def _whole(model: nn.Sequential) -> Topology:
    segments = (
        Segment("bottom", "client", model[:2], ("x",), ("z",)),
        Segment("top", "server", model[2], ("z",), ("out",)),
    )
    return Topology("whole", segments, {"x": "client"}, (Head("out", "server", "client", task=classification(3)),))


def test_a_recorded_message_is_not_changed_by_who_received_it() -> None:
    recorder, tensors = Recorder("server"), {"z": torch.ones(2, 3)}
    recorder.receive(Message("client0", "server", "activation", "bottom->top", tensors, Stamp("train", 0, 0, 0)))
    tensors["z"].zero_()
    assert recorder.view().tensors()["z"].tolist() == [[1.0] * 3] * 2


class Polite(nn.Module):
    """Overwrites what it is given in evaluation mode alone, or where no version counter sees it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 3)

    def forward(self, z: Tensor) -> Tensor:
        if self.way == "evaluation" and not self.training:
            z.mul_(0.0)
        if self.way == "data":
            z.data.mul_(0.0)
        return self.layer(z)


@pytest.mark.parametrize("way", ["evaluation", "data"])
def test_a_receiver_that_overwrites_gets_a_copy_however_it_does(way: str) -> None:
    facts = pass_example(
        topology := _whole(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Polite(way))), {"x": torch.randn(4, 4)}
    )
    assert facts.overwritten["top"] == {"z"}
    engine = LocalEngine(topology, facts, 1)
    engine.own(0, "train", {"x": torch.ones(4, 4)}, {"out": torch.zeros(4, dtype=torch.int64)})
    made = engine.predict(0, "train", "evaluate", also=("z",)).further_values["z"]
    assert torch.equal(made, torch.relu(engine.modules(0)["bottom"][0](torch.ones(4, 4))))
