"""How plans and their checks treat the computation of a topology's segments: plain, or secured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from splitfed.core.defense import Defense, packed_bytes
from splitfed.core.optimizers import Optim
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.costs.bytes import value_bytes
from splitfed.engines.base import Placement
from splitfed.federated.base import Method
from splitfed.registry import resolve
from splitfed.schedules.base import Schedule, Training
from splitfed.secure_sum.base import Flow


class PlannedMessage(NamedTuple):
    """One message of a training step between two roles; `size(rows)`: its bytes in a batch of that many rows.

    `ahead`: whether a forward pass without a training step sends it too.
    """

    kind: str
    sender: str
    receiver: str
    size: Callable[[int], int]
    ahead: bool = False


class ComputationPlan:
    """The computation's part in a plan; the defaults are those of a plain computation."""

    def divide(self, topology: Topology, schedule: Schedule, method: Method | None, clients: int) -> Topology:
        """Return `topology` as it is trained; raise `InvalidInput` for what the computation does not support."""
        return topology

    def with_parameters(
        self,
        topology: Topology,
        facts: TopologyFacts,
        defenses: Sequence[Defense],
        optims: Mapping[str, Optim],
        training: Training,
        placement: Placement,
        clients: int,
    ) -> Topology:
        """Return a divided topology with all parameters of its computation; raise `InvalidInput` if none suffice."""
        return topology

    def fit_inference(self, topology: Topology, facts: TopologyFacts, rows: int) -> Topology:
        """Return `topology` for inference only on batches of `rows` rows; raise `InvalidInput` if it is impossible."""
        return topology

    def placement(self, topology: Topology, placement: Placement) -> Placement:
        """Return `placement` as the computation needs it."""
        return placement

    def crossing_messages(
        self, topology: Topology, facts: TopologyFacts, defenses: Sequence[Defense]
    ) -> list[PlannedMessage]:
        """Return the messages between parties of one training step with values, and with gradients of values."""
        guarded, messages = [defense.edges(topology) for defense in defenses], []
        for edge in topology.crossings:
            source, target = topology.role_of(edge.source), topology.role_of(edge.target)
            guards = [defense for defense, edges in zip(defenses, guarded, strict=True) if edge.name in edges]
            ahead = not topology.serving.isdisjoint(topology.readers(edge))
            size = partial(_size, facts, edge.values, "activation", guards)
            messages.append(PlannedMessage("activation", source, target, size, ahead))
            if returned := facts.returned(topology, edge):
                size = partial(_size, facts, returned, "gradient", guards)
                messages.append(PlannedMessage("gradient", target, source, size))
        return messages

    def setup_flows(self, topology: Topology, replicas: int) -> Iterable[Flow]:
        """Return the messages that a run of `replicas` clients sends before its first step."""
        return ()

    def estimate_batch(self, topology: Topology, facts: TopologyFacts, rows: int) -> dict[str, Any] | None:
        """Return the cost of a batch of `rows` rows beyond the counted operations, as plain values; None for none.

        "bytes" of its messages, "seconds": the estimate for the "machine", None without one.
        """
        return None

    def model_state(self, topology: Topology, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the state of the undivided model, by its own names, from `modules` (segment name -> module)."""
        return topology.state_dict(modules)


def plan_of(topology: Topology) -> ComputationPlan:
    """Return the planning counterpart of the computation of `topology`."""
    kind = ComputationPlan if topology.computation is None else resolve(topology.computation.plan)
    plan: ComputationPlan = kind()
    return plan


def _size(facts: TopologyFacts, values: Sequence[str], kind: str, guards: Sequence[Defense], rows: int) -> int:
    defended = facts.defended(values)
    packed = {
        value: packed_bytes(guards, kind, rows, facts.shapes[value], facts.dtypes[value]) if value in defended else None
        for value in values
    }
    return sum(value_bytes(facts, value) * rows if size is None else size for value, size in packed.items())
