"""The cost of a run before it is trained: bytes, messages, operations, memory and simulated time, by schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from splitfed.core.errors import InvalidInput
from splitfed.core.grouping import total_pairs
from splitfed.core.topology import member
from splitfed.core.traffic import Flow
from splitfed.costs.bytes import weight_bytes
from splitfed.costs.measure import role_flops
from splitfed.costs.memory import RoleMemory, optim_copies, role_memory
from splitfed.costs.speeds import Speeds
from splitfed.engines.base import FED
from splitfed.planning.counting import CountingTrainer
from splitfed.planning.simulation import clock_of, count_rounds
from splitfed.planning.validation import Prepared
from splitfed.registry import TABLES


@dataclass(frozen=True)
class Cost:
    """The cost of a whole run.

    `flows`: messages and bytes of every flow, exactly as training will count them. `flops`: party -> operations,
    `memory`: role -> bytes of one party while it trains (an estimate), `copies`: shared role -> number of copies of its
    segments' weights at its party. `seconds`: simulated, None without speeds. `clients`: names of the clients' parties
    by replica. `at_most`: why all of this is an upper bound, for a method whose messages depend on training; None if it
    is exact.
    """

    flows: Mapping[Flow, tuple[int, int]]
    flops: Mapping[str, float]
    memory: Mapping[str, RoleMemory]
    copies: Mapping[str, int]
    seconds: float | None
    clients: tuple[tuple[str, ...], ...]
    at_most: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all messages."""
        return sum(nbytes for _, nbytes in self.flows.values())

    @property
    def messages(self) -> int:
        """Number of all messages."""
        return sum(count for count, _ in self.flows.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind of message."""
        return dict(sorted(total_pairs((flow.kind, nbytes) for flow, (_, nbytes) in self.flows.items()).items()))

    def client_bytes(self, replica: int) -> int:
        """Return the bytes that the parties of one client send or receive; messages among them count once."""
        own = self.clients[replica]
        return sum(n for flow, (_, n) in self.flows.items() if flow.sender in own or flow.receiver in own)


def cost(prepared: Prepared, rounds: int, speeds: Speeds | None = None) -> Cost:
    """Return the cost of `rounds` rounds of the schedule of `prepared`, without training."""
    clock, own = None if speeds is None else clock_of(prepared, speeds), prepared.topology.data_roles
    counting = count_rounds(prepared, rounds, clock)
    return Cost(
        counting.traffic.flows,
        _flops(prepared, counting),
        _memory(prepared),
        dict.fromkeys(prepared.placement.copied, counting.replicas),
        None if clock is None else clock.now,
        tuple(tuple(member(role, replica) for role in own) for replica in range(counting.replicas)),
        None if prepared.method is None else prepared.method.traits(prepared.topology).at_most,
    )


def compare(
    prepare_with: Callable[[str], Prepared], rounds: int, speeds: Speeds | None = None
) -> dict[str, Cost | InvalidInput]:
    """Return schedule -> cost, or its refusal; `prepare_with(name)` prepares the run with that schedule."""
    found: dict[str, Cost | InvalidInput] = {}
    for name in TABLES["schedules"]:
        try:
            found[name] = cost(prepare_with(name), rounds, speeds)
        except InvalidInput as error:
            found[name] = error
    return found


def federated_bytes(prepared: Prepared, rounds: int) -> int:
    """Return the bytes of federated averaging of the uncut model: down and up, for each client and round."""
    whole = sum(weight_bytes(prepared.topology, role) for role in prepared.topology.roles)
    return 2 * whole * len(prepared.topologies) * rounds


def _flops(prepared: Prepared, counting: CountingTrainer) -> dict[str, float]:
    known = {id(t): (t, facts) for t, facts in zip(prepared.topologies, prepared.facts, strict=True)}
    rates = {key: role_flops(*one) for key, one in known.items()}
    return total_pairs(
        (member(role, replica) if role in topology.data_roles else role, rate * sum(counting.steps[replica]))
        for replica, topology in enumerate(prepared.topologies)
        for role, rate in rates[id(topology)].items()
    )


def _memory(prepared: Prepared) -> dict[str, RoleMemory]:
    copies = {role: float(optim_copies(optim)) for role, optim in prepared.optims.items()}
    found: dict[str, RoleMemory] = {}
    # The largest need over clients of different architecture or batch size, computed once for each kind.
    kinds = {
        (id(t), size): (t, facts, size)
        for replica, (t, facts) in enumerate(zip(prepared.topologies, prepared.facts, strict=True))
        for size in (prepared.training.of_client(replica).batch_size,)
    }
    for topology, facts, size in kinds.values():
        for role, needed in role_memory(topology, facts, size, copies).items():
            found[role] = max(found.get(role, needed), needed, key=lambda one: one.total)
    for role in prepared.placement.copied:
        own, replicas = found[role], len(prepared.topologies)
        # One copy for each replica, with its optimizer, and the merged one; activations of one replica at a time.
        found[role] = RoleMemory(
            own.weights * (replicas + 1), own.gradients * replicas, own.optimizer * replicas, own.activations
        )
    if averaged := prepared.placement.averaged:
        found[FED] = RoleMemory(sum(weight_bytes(prepared.topology, role) for role in averaged), 0, 0, 0)
    return found
