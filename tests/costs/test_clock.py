"""The simulated clock: timelines worked out by hand, and the published formulas where they must agree."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.topology import Head, Segment, Topology
from splitfed.costs.clock import Clock, party_names
from splitfed.costs.han import HanSetting, federated_latency, local_loss_latency, splitfed_latency
from splitfed.costs.measure import SegmentCost, segment_flops
from splitfed.costs.speeds import Machine, Speeds
from splitfed.costs.steps import StepShape, step_shape
from splitfed.models.lenet import lenet
from splitfed.topologies import u_shaped, vanilla
from tests.examples import SmallUNet
from tests.predicted_bytes import step_bytes

CLIENT = Machine(compute=2, up=8, down=8)
SERVER = Machine(compute=4)
SPEEDS = Speeds(CLIENT, {"server": SERVER})
FLOPS = {"bottom": SegmentCost(4, 8), "top": SegmentCost(2, 6)}


class Joined(nn.Module):
    """A linear layer on two values side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(torch.cat([a, b], 1))


def linear(name: str, role: str, source: str, target: str, reads: int = 2, makes: int = 2) -> Segment:
    return Segment(name, role, nn.Linear(reads, makes), (source,), (target,))


def pair(**head: object) -> Topology:
    """A row of the cut is two floats, 8 bytes."""
    segments = (linear("bottom", "client", "x", "z"), linear("top", "server", "z", "out"))
    return Topology("pair", segments, {"x": "client"}, (Head("out", "server", "client", **head),))  # type: ignore[arg-type]


def local_loss() -> Topology:
    """The client learns from an auxiliary head; no gradient comes back from the server."""
    segments = (
        linear("bottom", "client", "x", "z"),
        linear("aux", "client", "z", "attack"),
        linear("top", "server", "z", "out"),
    )
    heads = (Head("attack", "client", "client"), Head("out", "server", "client"))
    return Topology("local", segments, {"x": "client"}, heads, frozenset({"bottom->top"}))


def vertical() -> Topology:
    segments = (
        linear("left", "a", "xa", "za"),
        linear("right", "b", "xb", "zb"),
        Segment("top", "server", Joined(), ("za", "zb"), ("out",)),
    )
    return Topology("vertical", segments, {"xa": "a", "xb": "b"}, (Head("out", "server", "a"),))


def shape_of(topology: Topology, flops: dict[str, SegmentCost], label_bytes: float = 0) -> StepShape:
    facts = pass_example(topology, {v: torch.zeros(2, 2) for v in topology.inputs})
    return step_shape(topology, facts, flops, label_bytes)


def bytes_of(shape: StepShape) -> float:
    """Return the bytes sent in a step, per row."""
    return sum(t.size for t in shape.tasks if t.receiver is not None)


def work_of(shape: StepShape) -> float:
    """Return the operations of a step per row, of all roles together."""
    return sum(t.size for t in shape.tasks if t.receiver is None)


def clock_of(
    speeds: Speeds = SPEEDS,
    replicas: int = 1,
    topology: Callable[[], Topology] = pair,
    flops: dict[str, SegmentCost] = FLOPS,
    label_bytes: float = 0,
    others: tuple[str, ...] = (),
) -> Clock:
    made = topology()
    return Clock(shape_of(made, flops, label_bytes), speeds, party_names(made, replicas), others)


def slowed(**changes: float) -> Speeds:
    return Speeds(CLIENT, {"server": Machine(**{"compute": 4, **changes})})


def test_one_step_is_the_sum_of_its_tasks() -> None:
    """Forward 4/2, up 8/8, server 2/4 and 6/4, down 8/8, backward 8/2: 2 + 1 + .5 + 1.5 + 1 + 4 = 10."""
    clock = clock_of()
    clock.train({0: [1]})
    assert clock.now == 10
    assert clock.busy == {"client0": 6, "server": 2}


def test_steps_add_up_and_scale_with_their_rows() -> None:
    clock = clock_of()
    clock.train({0: [1, 2, 1]})
    assert clock.now == 10 + 20 + 10


def test_latency_is_paid_once_a_message() -> None:
    clock = clock_of(Speeds(Machine(2, 8, 8, latency=0.5), {"server": Machine(4, latency=0.25)}))
    clock.train({0: [1]})
    assert clock.now == 11


def test_late_labels_hold_up_the_way_back_alone() -> None:
    """56 bytes of labels take the uplink first, until 7; the activation until 8; then the server's 2, 1 and 4."""
    clock = clock_of(label_bytes=56)
    clock.train({0: [1]})
    assert clock.now == 8 + 2 + 1 + 4


def test_a_task_waits_for_the_latest_of_all_it_needs() -> None:
    """The activation is there at 1 and served until 1.5; 56 bytes of labels behind it only at 8; 1.5 back."""
    speeds = Speeds(named={"server": Machine(compute=4, down=8)})
    clock = clock_of(speeds, label_bytes=56)
    clock.train({0: [1]})
    assert clock.now == 8 + 1.5


def test_labels_go_hop_by_hop() -> None:
    """The client sends 8 bytes in 1 s, the hop in 2 s: the labels leave the hop behind the activation."""
    segments = (
        linear("bottom", "client", "x", "z"),
        linear("relay", "hop", "z", "h"),
        linear("top", "server", "h", "out"),
    )
    head = Head("out", "server", "client", via=("hop",))
    topology = Topology("hops", segments, {"x": "client"}, (head,))
    free = dict.fromkeys(("bottom", "relay", "top"), SegmentCost(0, 0))
    shape = shape_of(topology, free, label_bytes=8)
    assert [(t.role, t.receiver) for t in shape.tasks if t.name == "label out"] == [
        ("client", "hop"),
        ("hop", "server"),
    ]
    clock = Clock(shape, Speeds(named={"client": Machine(up=8), "hop": Machine(up=4)}), party_names(topology, 1))
    clock.train({0: [1]})
    # Client's uplink: activation 0-1, label 1-2. Hop's: activation 1-3, label 3-5, gradient 5-7.
    assert clock.now == 7


def test_two_lanes_overlap_at_one_server() -> None:
    """Both arrive at 3; the server works 3-3.5, 3.5-4, 4-5.5, 5.5-7; then 1 down and 4 at the client."""
    clock = clock_of(replicas=2)
    clock.train({0: [1], 1: [1]})
    assert clock.now == 7 + 1 + 4
    assert clock.busy == {"client0": 6, "client1": 6, "server": 4}


def test_a_straggler_delays_its_own_lane_alone() -> None:
    """Replica 0 is through at 10; replica 1 computes 6 + 12 instead of 2 + 4: 6 + 1 + 2 + 1 + 12 = 22."""
    clock = clock_of(Speeds(CLIENT, {"server": SERVER}, stragglers={"client1": 3}), replicas=2)
    clock.train({0: [1, 1], 1: [1]})
    assert clock.now == 22
    assert clock.busy["client1"] == 18


def test_first_ready_is_first_served_whatever_its_replica() -> None:
    """Replica 1 is ready first, so 0 waits for it: server 3-5 for 1; 0 arrives at 4 and is served 5-7."""
    speeds = Speeds(CLIENT, {"server": Machine(compute=4), "client0": Machine(compute=4 / 3, up=8, down=8)})
    clock = clock_of(speeds, replicas=2, flops={"bottom": SegmentCost(4, 8), "top": SegmentCost(8, 0)})
    clock.train({0: [1], 1: [1]})
    assert clock.now == 7 + 1 + 6


def test_clients_share_the_servers_downlink() -> None:
    """Client links are free, the server's downlink takes 1 s a message: arrivals at 3 and 4."""
    speeds = Speeds(Machine(compute=2), {"server": Machine(compute=4, down=8)})
    clock = clock_of(speeds, replicas=2)
    clock.train({0: [1], 1: [1]})
    # Server: 3-3.5 forward 0, 3.5-5 backward 0, 5-5.5 forward 1 (there since 4), 5.5-7 backward 1; client 4 more.
    assert clock.now == 7 + 4


def test_clients_share_the_servers_uplink() -> None:
    """The server computes at once, so both gradients are ready at 3: down at 4 and at 5, and 4 at the client."""
    clock = clock_of(slowed(compute=math.inf, up=8), replicas=2)
    clock.train({0: [1], 1: [1]})
    assert clock.now == 5 + 4


def test_a_message_streams_through_links_of_different_speed() -> None:
    """1 s on the uplink, half on the downlink: one message takes 1 s, not 1.5; a second, at once, .5 more."""
    clock = clock_of(slowed(down=16), replicas=2)
    assert clock.transfer("client0", "server", 8) == 1
    assert clock.transfer("client1", "server", 8) == 1.5
    assert clock_of(slowed(down=4)).transfer("client0", "server", 8) == 2


def test_what_two_segments_read_crosses_once_and_goes_back_once() -> None:
    """The gradient waits for both readers: 2 + 1, then forward 1 + 1, backward 2 + 2 at the server, 1 and 4 back."""
    segments = (
        linear("bottom", "client", "x", "z"),
        linear("first", "server", "z", "one"),
        linear("second", "server", "z", "two"),
    )
    heads = (Head("one", "server", "client"), Head("two", "server", "client"))
    topology = Topology("twice", segments, {"x": "client"}, heads)
    flops = {"bottom": SegmentCost(4, 8), "first": SegmentCost(4, 8), "second": SegmentCost(4, 8)}
    assert bytes_of(shape_of(topology, flops)) == 16
    clock = clock_of(topology=lambda: topology, flops=flops)
    clock.train({0: [1]})
    assert clock.now == 3 + 2 + 4 + 1 + 4


@pytest.mark.parametrize("label_bytes", [0, 8])
@pytest.mark.parametrize(
    "topology",
    [
        vanilla(SmallUNet(), "down2"),
        u_shaped(SmallUNet(), ("pool1", "up2")),
        u_shaped(lenet((1, 8, 8), 10), ("conv2", "fc2")),
        local_loss(),
        vertical(),
    ],
    ids=lambda t: t.name if isinstance(t, Topology) else str(t),
)
def test_a_step_sends_the_bytes_that_are_predicted(topology: Topology, label_bytes: int) -> None:
    """And does all work of all segments; nothing waits for what comes later."""
    shape = (2, 2) if topology.name in ("local", "vertical") else (2, 1, 8, 8)
    facts = pass_example(topology, {v: torch.rand(shape) for v in topology.inputs})
    flops = segment_flops(topology, facts)
    found = step_shape(topology, facts, flops, label_bytes)
    assert bytes_of(found) == step_bytes(topology, facts, 1, label_bytes)
    assert work_of(found) == sum(sum(cost) for cost in flops.values())
    assert all(before < index for index, task in enumerate(found.tasks) for before in task.after)
    clock = Clock(found, SPEEDS, party_names(topology, 3))
    clock.train({replica: [4, 2] for replica in range(3)})
    work = sum(seconds * (4 if party == "server" else 2) for party, seconds in clock.busy.items())
    assert work == pytest.approx(work_of(found) * 6 * 3)


def test_replicated_steps_pipeline() -> None:
    """Many replicas: the server is never idle once the first has arrived, and the last replica ends the round."""
    clock = clock_of(replicas=5)
    clock.train({replica: [1] for replica in range(5)})
    assert clock.now == 3 + 5 * 2 + 1 + 4


def test_branches_of_a_vertical_topology_run_side_by_side() -> None:
    """2 + 1 and 6 + 1 beside each other; the server joins at 7, works 2, sends both back (1), the slower needs 12."""
    flops = {"left": SegmentCost(4, 8), "right": SegmentCost(12, 24), "top": SegmentCost(2, 6)}
    clock = clock_of(topology=vertical, flops=flops)
    clock.train({0: [1]})
    assert clock.now == 7 + 2 + 1 + 12
    assert clock.busy == {"a0": 6, "b0": 18, "server": 2}


def test_no_gradient_comes_back_where_none_is_wanted() -> None:
    """The client is through at 2 + 1 + 1 + 4 = 8 (auxiliary head 2/2 + 2/2), the server at 2 + 1 + 2 = 5."""
    flops = {**FLOPS, "aux": SegmentCost(2, 2)}
    shape = shape_of(local_loss(), flops)
    assert [t.name for t in shape.tasks if t.receiver] == ["activation bottom->top", "label out"]
    clock = clock_of(topology=local_loss, flops=flops)
    clock.train({0: [1]})
    assert clock.now == 8


def test_a_client_without_gradients_runs_ahead_of_a_slow_server() -> None:
    """Client: 8 a step. Server: 40 a step, busy from 3 on without a gap: 3 + 3 * 40; waiting would give 3 * 43."""
    speeds = Speeds(CLIENT, {"server": Machine(compute=0.2)})
    clock = clock_of(speeds, topology=local_loss, flops={**FLOPS, "aux": SegmentCost(2, 2)})
    clock.train({0: [1, 1, 1]})
    assert clock.now == 3 + 3 * 40


def test_a_joint_step_waits_for_the_last_forward() -> None:
    """The straggler's forward is over at 7.5: server back 7.5-9 and 9-10.5, then 1 down and 12 at the straggler."""
    speeds = Speeds(CLIENT, {"server": SERVER}, stragglers={"client1": 3})
    clock = clock_of(speeds, replicas=2)
    clock.together({0: 1, 1: 1})
    assert clock.now == 10.5 + 1 + 12
    alone = clock_of()
    alone.together({0: 1})
    assert alone.now == 10


def test_a_hand_over_holds_up_its_receiver() -> None:
    clock = clock_of(replicas=2)
    clock.train({0: [1]})
    assert clock.transfer("client0", "client1", 16) == 12
    clock.train({1: [1]})
    assert clock.now == 22


def test_weights_are_averaged_through_one_server() -> None:
    """Three uploads of 2 s each through one downlink; it sends once it has all three: 8, 10, 12."""
    clock = clock_of(Speeds(Machine(), {"fed": Machine(up=8, down=8)}), replicas=3, others=("fed",))
    assert [clock.transfer(f"client{i}", "fed", 16) for i in range(3)] == [2, 4, 6]
    assert [clock.transfer("fed", f"client{i}", 16) for i in range(3)] == [8, 10, 12]
    assert clock.transfer("fed", "fed", 16) == 6
    clock.barrier()
    assert clock.transfer("client0", "fed", 16) == 14


def test_endless_speeds_cost_nothing() -> None:
    clock = clock_of(Speeds(), replicas=3)
    clock.train({replica: [5] * 4 for replica in range(3)})
    clock.transfer("client0", "client1", 1e9)
    assert clock.now == 0


def test_the_clock_goes_back_to_a_state() -> None:
    clock, other = clock_of(replicas=2), clock_of(replicas=2)
    clock.train({0: [1]})
    clock.transfer("client0", "client1", 16)
    other.load_state(json.loads(json.dumps(clock.state())))
    for each in (clock, other):
        each.transfer("client0", "client1", 16)
        each.train({0: [1, 2], 1: [3]})
    assert other.now == clock.now
    assert other.state() == clock.state()
    assert other.busy == clock.busy


def test_many_clients_are_quick_and_deterministic() -> None:
    """A thousand clients: the server alone bounds the end from below, and all work done one by one from above."""
    speeds = Speeds(CLIENT, {"server": SERVER}, spread=0.5, seed=3)
    ends = []
    for _ in range(2):
        clock = clock_of(speeds, replicas=1000)
        clock.train({replica: [1] * 5 for replica in range(1000)})
        ends.append((clock.now, clock.busy))
    assert ends[0] == ends[1]
    now, busy = ends[0]
    assert busy["server"] == pytest.approx(1000 * 5 * 2)
    assert busy["server"] < now < sum(busy.values()) + 1000 * 5 * 2


def test_spread_is_lognormal_by_client() -> None:
    speeds = Speeds(CLIENT, {"server": SERVER}, spread=0.5, seed=1)
    logs = torch.tensor([math.log(2 / speeds.of(f"client{i}", "client").compute) for i in range(2000)])
    assert float(logs.std()) == pytest.approx(0.5, abs=0.03)
    assert float(logs.mean()) == pytest.approx(0, abs=0.04)
    assert speeds.of("server", "server") == SERVER
    assert speeds.of("client3", "client") == Speeds(CLIENT, spread=0.5, seed=1).of("client3", "client")
    assert speeds.of("client3", "client") != Speeds(CLIENT, spread=0.5, seed=2).of("client3", "client")


# Han et al. count one operation a parameter and a row; the server's links are the shared channel of rate R.


def han_clock(s: HanSetting, topology: Callable[[], Topology], free_links: bool) -> Clock:
    low = s.client_share * s.parameters
    bottom = SegmentCost(s.forward_share * low, (1 - s.forward_share) * low)
    top = (1 - s.client_share) * s.parameters
    flops = {
        "bottom": bottom,
        "aux": SegmentCost(0, 0),
        "top": SegmentCost(s.forward_share * top, (1 - s.forward_share) * top),
    }
    # A row of the cut is 8 bytes here and q floats there.
    rate = math.inf if free_links else s.rate * 8 / s.cut_width
    named = {"server": Machine(s.server_power, rate, rate), "fed": Machine(math.inf, s.rate, s.rate)}
    return clock_of(Speeds(Machine(s.client_power), named), s.clients, topology, flops, others=("fed",))


def averaged(clock: Clock, s: HanSetting, size: float) -> None:
    clock.barrier()
    for i in range(s.clients):
        clock.transfer(f"client{i}", "fed", size)
    for i in range(s.clients):
        clock.transfer("fed", f"client{i}", size)


def settings(clients: int | None = None) -> list[HanSetting]:
    draw = random.Random(0)
    return [
        HanSetting(
            parameters=draw.uniform(10, 1000),
            client_share=draw.uniform(0.05, 0.95),
            cut_width=draw.uniform(1, 20),
            examples=draw.randint(1, 50),
            clients=clients or draw.randint(2, 6),
            client_power=draw.uniform(0.5, 2),
            server_power=draw.uniform(1, 100),
            rate=draw.uniform(1, 50),
            forward_share=draw.uniform(0.1, 0.5),
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("s", settings())
def test_federated_learning_agrees_with_han(s: HanSetting) -> None:
    """A client with the whole model, one batch, weights up and down: for any number of clients."""
    whole = Topology(
        "whole", (linear("bottom", "client", "x", "z"),), {"x": "client"}, (Head("z", "client", "client"),)
    )
    flops = {"bottom": SegmentCost(s.forward_share * s.parameters, (1 - s.forward_share) * s.parameters)}
    named = {"fed": Machine(math.inf, s.rate, s.rate)}
    clock = clock_of(Speeds(Machine(s.client_power), named), s.clients, lambda: whole, flops, others=("fed",))
    clock.train({replica: [s.examples] for replica in range(s.clients)})
    averaged(clock, s, s.parameters)
    assert clock.now == pytest.approx(federated_latency(s), rel=1e-12)


@pytest.mark.parametrize("s", settings(clients=1))
def test_one_client_of_splitfed_agrees_with_han(s: HanSetting) -> None:
    clock = han_clock(s, pair, free_links=False)
    clock.train({0: [s.examples]})
    averaged(clock, s, s.client_share * s.parameters)
    assert clock.now == pytest.approx(splitfed_latency(s), rel=1e-12)


@pytest.mark.parametrize("s", settings())
def test_with_free_links_the_clock_agrees_with_han(s: HanSetting) -> None:
    """Without time for links nothing overlaps that the formulas add up; the cut is as good as free in them."""
    free = replace(s, rate=1e30)
    for topology, formula in ((pair, splitfed_latency), (local_loss, local_loss_latency)):
        clock = han_clock(s, topology, free_links=True)
        clock.train({replica: [s.examples] for replica in range(s.clients)})
        assert clock.now == pytest.approx(formula(free), rel=1e-12)


@pytest.mark.parametrize("s", settings())
def test_han_bounds_the_clock_from_above(s: HanSetting) -> None:
    """The formula adds up what truly overlaps, such as one client's sending and another's computing."""
    clock = han_clock(s, pair, free_links=False)
    clock.train({replica: [s.examples] for replica in range(s.clients)})
    assert max(clock.busy.values()) < clock.now
    averaged(clock, s, s.client_share * s.parameters)
    assert clock.now < splitfed_latency(s)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Machine(compute=0), "compute=0 is not allowed; expected a number in (0, inf)"),
        (lambda: Machine(up=math.nan), "up=nan is not allowed"),
        (lambda: Machine(down=-1), "down=-1 is not allowed"),
        (lambda: Machine(latency=math.inf), "latency=inf is not allowed"),
        (lambda: Speeds(stragglers={"client0": 0}), "stragglers['client0']=0 is not allowed"),
        (lambda: Speeds(spread=-0.1), "spread=-0.1 is not allowed; expected a number in [0, 10]"),
        (lambda: Speeds(named={"server": 3}), "named['server']=3 is not allowed; expected a Machine"),  # type: ignore[dict-item]
        (
            lambda: clock_of(Speeds(named={"servr": SERVER})),
            "unknown party or role with a speed 'servr'; did you mean 'server'",
        ),
        (lambda: clock_of(Speeds(stragglers={"client": 2})), "unknown straggler 'client'; did you mean 'client0'"),
        (lambda: clock_of().train({1: [1]}), "replica=1 is not allowed; this clock knows replicas 0 to 0"),
        (lambda: clock_of().train({0: [0]}), "rows of a batch of replica 0=0 is not allowed"),
        (lambda: clock_of().transfer("client0", "server", -1), "nbytes=-1 is not allowed"),
        (lambda: clock_of(label_bytes=-1), "label_bytes=-1 is not allowed"),
        (
            lambda: clock_of(flops={**FLOPS, "top": SegmentCost(-1, 0)}),
            "forward flops of segment 'top'=-1 is not allowed",
        ),
    ],
)
def test_bad_input_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        make()
    assert "\n" not in str(caught.value)
