"""What each party of every builder receives, and nothing more: kinds, values, shapes, headers, bytes, isolation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

import splitfed as sf
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Message, Recording
from splitfed.core.random import stream
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.engines.local import LocalEngine
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules.base import Training
from splitfed.topologies import extended_vanilla, multi_hop, multi_task, u_shaped, vertical
from splitfed.training.run import Run
from tests.core.test_isolation import FiniteCheck
from tests.examples import block, columns, placed, toy_data
from tests.object_graph import holdings
from tests.predicted_bytes import epoch_bytes

ROWS, CLASSES = 8, 10
TWO = {"a": 3, "b": 5}


def net() -> nn.Module:
    names = ("l1", "l2", "l3", "l4", "l5")
    widths = (64, 12, 11, 9, 7, CLASSES)
    layers = {name: nn.Linear(*pair) for name, pair in zip(names, pairwise(widths), strict=True)}
    model = nn.Sequential(nn.Flatten())
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def bottoms() -> dict[str, nn.Module]:
    return {role: block(wide, 4) for role, wide in TWO.items()}


BUILDERS: dict[str, Callable[[], Topology]] = {
    "u_shaped": lambda: u_shaped(net(), ("l1", "l2", "l3", "l4")),
    "hops relayed": lambda: multi_hop(net(), ("l1", "l2", "l3")),
    "hops client": lambda: multi_hop(net(), ("l1", "l2", "l3", "l4"), labels="client"),
    "hops server": lambda: multi_hop(net(), ("l1", "l2", "l3"), labels="server"),
    "vertical": lambda: vertical(bottoms(), nn.Linear(8, CLASSES), labels="b"),
    "vertical registry": lambda: vertical(bottoms(), nn.Linear(8, CLASSES), labels="registry"),
    "vertical server": lambda: vertical(bottoms(), nn.Linear(8, CLASSES), labels="server"),
    "vertical head": lambda: vertical(bottoms(), nn.Linear(8, 6), labels="b", head=nn.Linear(6, CLASSES)),
    "extended": lambda: extended_vanilla(bottoms(), nn.Linear(8, 6), nn.Linear(6, CLASSES), labels="a"),
    "multi_task": lambda: multi_task(
        bottoms(),
        {"one": nn.Linear(8, CLASSES), "two": nn.Linear(8, CLASSES)},
        targets={"one": None, "two": None},
        labels={"one": "a", "two": "two"},
    ),
}


def data_of(topology: Topology, rows: int) -> dict[str, torch.Tensor]:
    if set(topology.inputs) == set(TWO):
        return columns(TWO, rows)[0]
    return {next(iter(topology.inputs)): toy_data(rows).x}


def trained(name: str, replicas: int = 1, epochs: int = 1) -> LocalEngine:
    """Every client takes a step of its eight rows an epoch and an evaluation; everybody is recorded."""
    ready = BUILDERS[name]().with_task(classification(CLASSES))
    inputs = data_of(ready, ROWS * replicas)
    y = torch.arange(ROWS * replicas) % CLASSES
    shared = [role for role in ready.roles if role not in ready.data_roles]
    names = [f"{role}{replica}" for role in ready.data_roles for replica in range(replicas)] + shared
    labels = {head.value: y for head in ready.heads}
    engine = placed(ready, inputs, labels, replicas, recording=Recording(tuple(names)))
    for epoch in range(epochs):
        for replica in range(replicas):
            engine.train(replica, epoch, [torch.arange(ROWS)])
            engine.predict(replica, "train", "evaluate", epoch)
    return engine


def told(message: Message) -> str:
    """A message as a person would note it: who, what, which values in which shape."""
    sizes = " ".join(f"{value}:{'x'.join(map(str, t.shape[1:])) or '-'}" for value, t in message.tensors.items())
    return f"{message.kind} {message.sender} {sizes}"


# What each party receives in one training step, in order. Eight rows each.
SEEN: dict[str, dict[str, list[str]]] = {
    "u_shaped": {
        "client0": [
            "activation server l2:11",
            "activation server l4:7",
            "gradient server l3:9",
            "gradient server l1:12",
        ],
        "server": [
            "activation client0 l1:12",
            "activation client0 l3:9",
            "gradient client0 l4:7",
            "gradient client0 l2:11",
        ],
    },
    "hops relayed": {
        "client0": ["gradient hop1 l1:12"],
        "hop1": ["activation client0 l1:12", "label client0 l5:-", "gradient hop2 l2:11"],
        "hop2": ["activation hop1 l2:11", "label hop1 l5:-", "gradient server l3:9"],
        "server": ["activation hop2 l3:9", "label hop2 l5:-"],
    },
    "hops client": {
        "client0": ["activation server l4:7", "gradient hop1 l1:12"],
        "hop1": ["activation client0 l1:12", "gradient hop2 l2:11"],
        "hop2": ["activation hop1 l2:11", "gradient server l3:9"],
        "server": ["activation hop2 l3:9", "gradient client0 l4:7"],
    },
    "hops server": {
        "client0": ["gradient hop1 l1:12"],
        "hop1": ["activation client0 l1:12", "gradient hop2 l2:11"],
        "hop2": ["activation hop1 l2:11", "gradient server0 l3:9"],
        "server0": ["activation hop2 l3:9"],
    },
    "vertical": {
        "a0": ["gradient server z_a:4"],
        "b0": ["gradient server z_b:4"],
        "server": ["activation a0 z_a:4", "activation b0 z_b:4", "label b0 top_out:-"],
    },
    "vertical registry": {
        "a0": ["gradient server z_a:4"],
        "b0": ["gradient server z_b:4"],
        "registry0": [],
        "server": ["activation a0 z_a:4", "activation b0 z_b:4", "label registry0 top_out:-"],
    },
    "vertical server": {
        "a0": ["gradient server0 z_a:4"],
        "b0": ["gradient server0 z_b:4"],
        "server0": ["activation a0 z_a:4", "activation b0 z_b:4"],
    },
    "vertical head": {
        "a0": ["gradient server z_a:4"],
        "b0": ["activation server top_out:6", "gradient server z_b:4"],
        "server": ["activation a0 z_a:4", "activation b0 z_b:4", "gradient b0 top_out:6"],
    },
    "extended": {
        "a0": ["gradient relay z_a:4"],
        "b0": ["gradient relay z_b:4"],
        "relay": ["activation a0 z_a:4", "activation b0 z_b:4", "gradient server middle_out:6"],
        "server": ["activation relay middle_out:6", "label a0 top_out:-"],
    },
    "multi_task": {
        "a0": ["gradient two0 z_a:4", "gradient one z_a:4"],
        "b0": ["gradient two0 z_b:4", "gradient one z_b:4"],
        "one": ["activation a0 z_a:4", "activation b0 z_b:4", "label a0 out_one:-"],
        "two0": ["activation a0 z_a:4", "activation b0 z_b:4"],
    },
}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_party_receives_this_and_no_more(name: str) -> None:
    engine = trained(name)
    assert set(engine.parties) == set(SEEN[name])
    for party, expected in SEEN[name].items():
        view = engine.view(party)
        assert [told(m) for m in view.messages if m.stamp.phase == "train"] == expected, party
        # An evaluation sends the activations again, and nothing else.
        forward = [line for line in expected if line.startswith("activation")]
        assert [told(m) for m in view.messages if m.stamp.phase == "evaluate"] == forward, party
        assert {len(t) for m in view.messages for t in m.tensors.values()} <= {ROWS}
        assert set(view.segments) == {s.name for s in engine.topology.segments_of(engine.parties[party].role)}


@pytest.mark.parametrize("name", BUILDERS)
def test_labels_reach_only_those_on_their_way(name: str) -> None:
    """Labels in any message, of whatever kind, or in any party's memory: looked for by their values."""
    engine = trained(name)
    y = torch.arange(ROWS)
    for party, played in engine.parties.items():
        on_path = any(played.role in head.path for head in engine.topology.heads)
        received = [t for m in engine.view(party).messages for t in m.tensors.values()]
        assert any(t.shape == y.shape and torch.equal(t, y) for t in received) == any(
            played.role in head.path[1:] for head in engine.topology.heads
        )
        if not on_path:
            assert all(t.is_floating_point() for t in received)
            assert not played.state.labels("train")


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_is_shared_between_parties(name: str) -> None:
    engine = trained(name, replicas=2)
    held = {party: holdings(played) for party, played in engine.parties.items()}
    for (one, mine), (other, theirs) in combinations(held.items(), 2):
        assert not mine & theirs, (one, other)
    for party, played in engine.parties.items():
        if engine.topology.segments_of(played.role):
            assert any(kind == "module" for kind, _ in held[party]), party


@pytest.mark.parametrize("name", BUILDERS)
def test_in_mid_step_no_graph_reaches_across(name: str) -> None:
    engine = trained(name)
    watch = engine.link = FiniteCheck(engine)  # type: ignore[assignment]
    engine.train(0, 1, [torch.arange(ROWS)])
    expected = [line.split()[0] for seen in SEEN[name].values() for line in seen]
    assert sorted(watch.kinds) == sorted(expected)


def federation(topology: Topology, clients: int) -> sf.data.Federation:
    data = toy_data(150)
    if set(topology.inputs) == set(TWO):
        wide = sf.Dataset("wide", data.x.flatten(1)[:, :8].clone(), data.y, data.task)
        data = wide.vertical({"a": range(3), "b": range(3, 8)})
    return data.clients(clients, auxiliary=0, victims=4, validation=0.0, test=0.1)


@pytest.mark.parametrize("name", BUILDERS)
def test_counted_bytes_are_the_predicted_ones(name: str) -> None:
    topology = BUILDERS[name]()
    data = federation(topology, 2)
    options = {"schedule": "alternate", "defenses": (), "optimizer": None, "training": Training(16)}
    prepared = prepare(topology, data, **options)  # type: ignore[arg-type]
    planned = cost(prepared, 2)
    run = sf.train(topology, data, schedule="alternate", rounds=2, batch_size=16)
    assert run.bytes == planned.bytes
    assert {flow: tuple(found) for flow, found in run.engine.traffic.flows.items() if flow.phase == "train"} == dict(
        planned.flows
    )
    # The same from the formula of one step, which knows no schedule; the rest is weights handed over.
    steps = sum(
        epoch_bytes(prepared.topology, facts, _batches(len(client.train)))
        for client, facts in zip(data.clients, prepared.facts, strict=True)
    )
    assert run.bytes - planned.by_kind.get("weights", 0) == 2 * steps


def _batches(rows: int) -> Iterator[int]:
    return (min(16, rows - start) for start in range(0, rows, 16))


CHAINS: dict[str, tuple[tuple[str, ...], Callable[[], Topology]]] = {
    "relayed": (("client", "hop1", "hop2", "server"), lambda: multi_hop(net(), ("l1", "l2", "l3"))),
    "client": (
        ("client", "hop1", "hop2", "server", "client"),
        lambda: multi_hop(net(), ("l1", "l2", "l3", "l4"), labels="client"),
    ),
    "server": (
        ("client", "hop1", "hop2", "hop3", "server"),
        lambda: multi_hop(net(), ("l1", "l2", "l3", "l4"), labels="server"),
    ),
}
CLIENTS = 5


class Everything:
    """A link that keeps every message of every party, and hands it on."""

    def __init__(self, engine: LocalEngine) -> None:
        self.inner, self.messages = engine.link, list[Message]()
        engine.link = self  # type: ignore[assignment]

    def deliver(self, message: Message) -> Message:
        self.messages.append(message)
        return self.inner.deliver(message)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def spoken(labels: str, seed: int = 0) -> tuple[LocalEngine, list[tuple[int, Message]]]:
    """All messages of a chain with five clients, in every phase, each with the client that it belongs to."""
    _, build = CHAINS[labels]
    ready = build().with_task(classification(CLASSES))
    inputs, y = data_of(ready, ROWS * CLIENTS), torch.arange(ROWS * CLIENTS) % CLASSES
    engine = placed(ready, inputs, {h.value: y for h in ready.heads}, CLIENTS, seed=seed)
    link, found = Everything(engine), []
    for replica in range(CLIENTS):
        engine.train(replica, 0, [torch.arange(ROWS)])
        for phase in ("evaluate", "predict", "query"):
            engine.predict(replica, "train", phase)
        found += [(replica, message) for message in link.messages]
        link.messages.clear()
    return engine, found


def client_of(party: str) -> str:
    """The role in a party's name, without the number of its client."""
    return party.rstrip("0123456789") if party.startswith(("client", "server")) else party


@pytest.mark.parametrize("labels", CHAINS)
def test_a_message_of_a_chain_names_neighbors_only(labels: str) -> None:
    chain, _ = CHAINS[labels]
    engine, found = spoken(labels)
    topology = engine.topology
    neighbors = {frozenset(pair) for pair in pairwise(chain)}
    assert {message.stamp.phase for _, message in found} == {"train", "evaluate", "predict", "query"}
    for _, message in found:
        ends = frozenset((client_of(message.sender), client_of(message.receiver)))
        assert ends in neighbors
        if message.kind == "label":
            # The output's name, which everybody who passes labels on must know.
            assert message.edge == "labels->l5"
            assert set(message.tensors) == {"l5"}
            continue
        edge = topology.edge(message.edge)
        assert {topology.role_of(edge.source), topology.role_of(edge.target)} == ends
        assert tuple(message.tensors) == edge.values
        makers = {s.role for s in topology.segments for value in edge.values if value in s.outputs}
        assert makers == {topology.role_of(edge.source)}


@pytest.mark.parametrize(
    ("labels", "blind"), [("relayed", ("hop2", "server")), ("client", ("hop2",)), ("server", ("hop2",))]
)
def test_beyond_the_first_hop_no_header_tells_the_client(labels: str, blind: tuple[str, ...]) -> None:
    """All but the circuit is the same for every client, and the circuit is not the client's number."""
    for party in blind:
        headers: dict[int, set[object]] = {}
        pseudonyms: dict[int, set[int]] = {}
        for client, message in spoken(labels)[1]:
            if party in (message.sender, message.receiver):
                plain = message._replace(tensors={n: t.shape for n, t in message.tensors.items()})  # type: ignore[misc]
                plain = plain._replace(stamp=message.stamp._replace(replica=0))
                headers.setdefault(client, set()).add(repr(plain))
                pseudonyms.setdefault(client, set()).add(message.stamp.replica)
        assert len(headers) == CLIENTS
        assert all(found == headers[0] for found in headers.values()), party
        # One number a client, in all phases alike, so that its gradients find their way back.
        assert all(len(found) == 1 for found in pseudonyms.values())
        numbers = [next(iter(pseudonyms[client])) for client in range(CLIENTS)]
        assert sorted(numbers) == list(range(CLIENTS))
        assert numbers != list(range(CLIENTS))


def test_any_client_may_have_any_number() -> None:
    """Over 80 runs every client bears every number; that one pair is missing has odds of (4/5)^80."""
    topology = CHAINS["relayed"][1]().with_task(classification(CLASSES))
    facts = pass_example(topology, data_of(topology, 4))
    seen = {
        (replica.index, replica.pseudonym)
        for seed in range(80)
        for replica in LocalEngine(topology, facts, CLIENTS, seed=seed).run_parties.replicas
    }
    assert len(seen) == CLIENTS**2


def test_where_the_server_holds_the_labels_the_last_hop_knows_whose_it_is() -> None:
    """Then every client has a server of its own, by whose name the last hop tells the clients apart."""
    receivers = {message.receiver for _, message in spoken("server")[1] if message.sender == "hop3"}
    assert receivers >= {f"server{replica}" for replica in range(CLIENTS)}


@pytest.mark.parametrize("schedule", ["sequential", "splitfed_v1"])
def test_weights_handed_on_pass_no_party_beyond_the_first_hop(schedule: str) -> None:
    chosen = sf.schedules.Sequential(hand_over="server") if schedule == "sequential" else schedule
    run = sf.train(CHAINS["relayed"][1](), federation(CHAINS["relayed"][1](), 3), schedule=chosen, rounds=2)
    receivers = {flow.receiver for flow in run.engine.traffic.flows if flow.kind == "weights"}
    middle = "hop1" if schedule == "sequential" else "fed_server"
    assert receivers == {"client0", "client1", "client2", middle}


ATTACKED: dict[str, tuple[Callable[[], Topology], tuple[str, ...]]] = {
    "multi_hop": (lambda: multi_hop(easy(), ("1", "2", "3")), ("hop1", "hop2", "server")),
    "vertical": (
        lambda: vertical({"left": half(), "right": half()}, nn.Linear(32, CLASSES), labels="right"),
        ("server",),
    ),
}


def easy() -> nn.Module:
    """Four layers that turn and shift, and so lose nothing: what an attack can undo best."""
    with stream(0):
        layers = [nn.Linear(64, 64) for _ in range(3)]
        for layer in layers:
            nn.init.orthogonal_(layer.weight)
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, CLASSES))


def half() -> nn.Module:
    with stream(1):
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 16))


@pytest.fixture(scope="module")
def attacked() -> dict[str, Run]:
    data = sf.data.digits().halves().clients(1, auxiliary=200, victims=8, validation=0.0, test=0.05)
    return {name: sf.train(build(), data, rounds=1) for name, (build, _) in ATTACKED.items()}


@pytest.mark.parametrize("name", ATTACKED)
def test_attacks_from_every_party_beat_the_mean_image(name: str, attacked: dict[str, Run]) -> None:
    for party in ATTACKED[name][1]:
        for result in attacked[name].attack(["inverse_network", "rmle"], adversary=party, budget="quick"):
            psnr = {who: found["psnr"].mean for who, found in result.scores.items()}
            assert result.adversary == party
            assert psnr["attack"] > psnr["mean_image"] + 1.0, (party, result.attack, psnr)
