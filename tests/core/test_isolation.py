"""Nothing but messages crosses: no party reaches another one's tensors, modules or data.

And a message is its numbers: not the storage that they were cut from, nor the graph, the base or the attributes that
hang on a tensor; whatever the segment before the cut returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Message, Recording
from splitfed.core.optimizers import Optim
from splitfed.core.party import Party
from splitfed.core.rows import RowSource, read_rows
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.engines.local import LocalEngine
from splitfed.planning.example_passes import facts_with
from splitfed.planning.validation import labels_of, rows_of as rows_of_inputs
from splitfed.topologies import u_shaped, vanilla
from tests.examples import SmallUNet, toy_data
from tests.object_graph import holdings, leaves, reachable
from tests.test_every_combination import CLIENTS, TOPOLOGIES as EVERY, digits

BUILDERS = {
    "vanilla": lambda: vanilla(SmallUNet(), "down2"),
    "u_shaped": lambda: u_shaped(SmallUNet(), ("pool1", "up2")),
}


def trained(topology: Topology, recorded: tuple[str, ...] = ("server", "client0")) -> LocalEngine:
    """Three clients with data of their own, two steps each, a hand-over and an evaluation."""
    ready = topology.with_task(classification(10))
    data = [toy_data(16, seed=i) for i in range(3)]
    optims = dict.fromkeys(ready.roles, Optim("Adam", {"lr": 1e-3}))
    facts = pass_example(ready, {"x": data[0].x[:4]})
    engine = LocalEngine(ready, facts, 3, optims=optims, recording=Recording(recorded))
    for replica, mine in enumerate(data):
        engine.own(replica, "train", {"x": mine.x}, {h.value: mine.y for h in ready.heads})
    for replica in range(3):
        engine.train(replica, 0, [torch.arange(8), torch.arange(8, 16)])
        engine.predict(replica, "train", "evaluate", borrow=0)
    engine.hand_over(0, 1, "client", 1)
    engine.hand_over(1, 2, "client", 1, via="server" if "server" in engine.parties else None)
    return engine


def trained_on_digits(topology: Topology) -> LocalEngine:
    """Every client's replica takes two steps on rows of its own, and an evaluation."""
    data = digits(CLIENTS)
    ready = topology.with_tasks(data.tasks)
    facts = facts_with(ready, data.clients[0].train)
    optims = dict.fromkeys(ready.roles, Optim("Adam", {"lr": 1e-3}))
    engine = LocalEngine(ready, facts, CLIENTS, optims=optims, recording=Recording(()))
    for replica, client in enumerate(data.clients):
        few = client.train.rows(range(16))
        engine.own(replica, "train", rows_of_inputs(ready, few), labels_of(ready, few))
    for replica in range(CLIENTS):
        engine.train(replica, 0, [torch.arange(8), torch.arange(8, 16)])
        engine.predict(replica, "train", "evaluate", borrow=0)
    return engine


def tensor_of(x: Tensor | RowSource) -> Tensor:
    return read_rows("x", x)


def rows_of(tensors: Iterable[Tensor]) -> set[bytes]:
    """Return the numbers of every row of tensors, where a row has eight or more and many differ."""
    return {
        row.tobytes()
        for tensor in tensors
        if tensor.dim() > 1 and tensor.is_floating_point() and not tensor.is_meta
        for row in tensor.detach().double().flatten(1).numpy()
        if len(row) >= 8 and len(set(row.tolist())) > 4
    }


def rows_reached(party: Party) -> set[bytes]:
    """Return the rows of numbers that a party reaches, in tensors, arrays and lists."""
    found: list[Tensor] = []
    for thing in reachable(party):
        if isinstance(thing, Tensor):
            found.append(thing)
        elif isinstance(thing, np.ndarray) and thing.dtype.kind == "f":
            found.append(torch.as_tensor(thing))
        elif isinstance(thing, (list, tuple)) and thing and all(isinstance(one, float) for one in thing):
            found.append(torch.tensor([thing], dtype=torch.float64))
    return rows_of(found)


def shared(engine: LocalEngine) -> list[str]:
    """Name everything that two parties can both reach."""
    held = {name: holdings(party) for name, party in engine.parties.items()}
    return [
        f"{one} and {two}: {kind}"
        for (one, mine), (two, others) in combinations(held.items(), 2)
        for kind, _ in mine & others
    ]


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    engine = trained(BUILDERS[shape]())
    assert set(engine.parties) == {"client0", "client1", "client2", "server"}
    assert shared(engine) == []
    for party in engine.parties.values():
        kinds = [kind for kind, _ in holdings(party)]
        assert kinds.count("memory") > 4, "the walk must find a party's own weights"
        assert kinds.count("module") > 2


@pytest.mark.parametrize("shape", EVERY)
def test_in_every_topology_no_party_reaches_what_another_holds(shape: str) -> None:
    engine = trained_on_digits(EVERY[shape]())
    assert len(engine.parties) >= CLIENTS
    assert shared(engine) == []
    numbers = {name: rows_reached(party) for name, party in engine.parties.items()}
    for one, other in permutations(engine.parties, 2):
        mine, owner = engine.parties[one].state, engine.parties[other].state
        # Clients' replicas of a segment begin with the same weights.
        own = rows_of(p for m in owner.modules.values() for p in m.parameters()) if mine.role != owner.role else set()
        data = rows_of(x for inputs, _ in owner.data.values() for x in map(tensor_of, inputs.values()))
        assert not numbers[one] & (own | data), f"{one} holds numbers of {other}"
    assert all(numbers.values()), "the walk must find a party's own rows"


LEAKS = (
    "module",
    "weight",
    "view of data",
    "data set",
    "closure",
    "gradient",
    "array",
    "object array",
    "weak",
    "bound",
)


@pytest.mark.parametrize("leak", LEAKS)
def test_the_walk_finds_a_planted_leak(leak: str) -> None:
    engine = trained(BUILDERS["u_shaped"]())
    client, server = engine.parties["client0"], engine.parties["server"]
    weight = next(client.state.modules["bottom"].parameters())
    data = toy_data(16)
    if leak == "module":
        server.friends = {"x": [client.state.modules["bottom"]]}  # type: ignore[attr-defined]
    elif leak == "weight":
        server.state.modules["middle"].register_buffer("spy", weight.detach())
    elif leak == "view of data":
        server.rows_seen = client.state.data["train"][0]["x"][3:5]  # type: ignore[attr-defined]
    elif leak == "data set":
        server.data, client.data = data, (data,)  # type: ignore[attr-defined]
    elif leak == "closure":
        server.peek = lambda: weight  # type: ignore[attr-defined]
    elif leak == "array":
        server.known = {"x": [weight.detach().numpy()[1:]]}  # type: ignore[attr-defined]
    elif leak == "object array":
        server.known = np.empty(2, dtype=object)  # type: ignore[attr-defined]
        server.known[1] = weight  # type: ignore[attr-defined]
    elif leak == "weak":
        server.weak = partial(print, weakref.ref(weight))  # type: ignore[attr-defined]
    elif leak == "bound":
        server.pop = [weight].pop  # type: ignore[attr-defined]
    else:
        server.graph = (weight * 2.0).grad_fn  # type: ignore[attr-defined]
    assert any(line.startswith("client0 and server") for line in shared(engine))


class FiniteCheck:
    """A link that looks at every message and at the graphs of both ends while a step is under way."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.inner = engine.link
        self.kinds: list[str] = []

    def deliver(self, message: Message) -> Message:
        for name, tensor in message.tensors.items():
            assert tensor.grad_fn is None, (message.edge, name)
            assert not tensor.requires_grad, (message.edge, name)
            assert not isinstance(tensor, nn.Parameter), (message.edge, name)
        sender, receiver = (self.engine.parties[n] for n in (message.sender, message.receiver))
        assert_no_common_graph(sender, receiver)
        self.kinds.append(message.kind)
        delivered = self.inner.deliver(message)
        assert_own(delivered)
        return delivered


def assert_own(message: Message) -> None:
    """Every tensor is plain, and its storage, which no other one of the message has, holds its numbers alone."""
    storages = []
    for name, tensor in message.tensors.items():
        where = (message.kind, message.edge, name)
        storages.append(tensor.untyped_storage().data_ptr())
        assert type(tensor) is Tensor, where
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == tensor.numel() * tensor.element_size(), where
        assert tensor.is_contiguous() or len({*_places(tensor)}) == tensor.numel(), where
        assert not any((tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)), where
        assert (tensor._base, tensor.grad_fn, tensor.grad, tensor._backward_hooks, vars(tensor)) == (*[None] * 4, {})
        assert {id(t) for t in reachable(tensor) if isinstance(t, Tensor)} == {id(tensor)}, where
    assert len(set(storages)) == len(storages), (message.kind, message.edge)


def _places(tensor: Tensor) -> list[int]:
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        places += (torch.arange(size) * stride).view(-1, *[1] * (tensor.dim() - dim - 1))
    return places.flatten().tolist()


def assert_no_common_graph(one: Party, two: Party) -> None:
    """No tensor that one party holds, or that its graph would write a gradient to, belongs to the other."""
    assert not leaves(one) & leaves(two)


@pytest.mark.parametrize("shape", BUILDERS)
def test_in_mid_step_no_graph_reaches_across(shape: str) -> None:
    engine = trained(BUILDERS[shape]())
    watch = engine.link = FiniteCheck(engine)  # type: ignore[assignment]
    engine.train(0, 1, [torch.arange(8)])
    engine.hand_over(0, 1, "client", 1, via="server")
    there_and_back = {
        "vanilla": ["activation", "gradient", "label"],
        "u_shaped": ["activation"] * 2 + ["gradient"] * 2,
    }
    assert sorted(watch.kinds) == [*there_and_back[shape], "weights", "weights"]


def test_the_watch_finds_an_attached_message() -> None:
    engine = trained(BUILDERS["vanilla"]())
    attached = torch.ones(2, requires_grad=True) * 2.0
    stamp = engine.view("server").messages[0].stamp
    with pytest.raises(AssertionError):
        FiniteCheck(engine).deliver(Message("client0", "server", "activation", "bottom->top", {"z": attached}, stamp))


def test_the_watch_finds_a_common_graph() -> None:
    engine = trained(BUILDERS["vanilla"]())
    client, server = engine.parties["client0"], engine.parties["server"]
    weight = next(client.state.modules["bottom"].parameters())
    server.leak = (weight * 2.0).sum()  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        assert_no_common_graph(client, server)


def test_a_party_takes_a_copy_of_its_modules() -> None:
    topology = BUILDERS["vanilla"]()
    engine = trained(topology)
    given = {id(p) for s in topology.segments for p in s.module.parameters()}
    assert not given & {
        id(p) for party in engine.parties.values() for m in party.state.modules.values() for p in m.parameters()
    }
