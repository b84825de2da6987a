"""What a run of many clients keeps in memory: each client's own segment and optimizer state, and no data twice."""

from __future__ import annotations

import pytest
from torch import Tensor

from splitfed.core.optimizers import Optim
from splitfed.costs.bytes import weight_bytes
from splitfed.models.lenet import lenet
from splitfed.schedules.base import Schedule
from splitfed.schedules.blind import Blind
from splitfed.schedules.sequential import Sequential
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.schedules.splitfed_v2 import SplitFedV2
from splitfed.topologies import vanilla
from splitfed.training.entry_point import train
from tests.examples import toy_data
from tests.object_graph import reachable

# A network without buffers: what a role keeps is its weights and, with momentum, as much again.
KEPT = {
    # schedule: how many times a client's weights, and the server's, are there for n clients (weights, momentum)
    Sequential(): (lambda n: 2 * n, lambda n: 2),
    SplitFedV2(): (lambda n: 2 * n + 1, lambda n: 2),
    Blind(): (lambda n: 2 * n, lambda n: 2),
    SplitFedV1(): (lambda n: 2 * n + 1, lambda n: 2 * n + 1),
}


def tensor_bytes(thing: object) -> int:
    """The bytes of all memory behind tensors that can be reached from `thing`, each counted once."""
    found = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(thing) if isinstance(t, Tensor)
    }
    return sum(found.values())


@pytest.mark.parametrize("plan", KEPT, ids=lambda plan: type(plan).__name__)
def test_memory_is_data_once_and_what_each_client_keeps(plan: Schedule) -> None:
    clients = 30
    data = toy_data(300).clients(clients, auxiliary=0, victims=1, validation=0, test=0)
    # Every client's rows are numbers (int64) of rows of the one tensor that they share.
    rows = tensor_bytes(data.victims.source) - 8 * len(data.victims)
    rows += sum(8 * len(client.train) + tensor_bytes(client.train.y) for client in data.clients)
    optim = Optim("SGD", {"lr": 0.01, "momentum": 0.9})
    topology = vanilla(lenet((1, 8, 8), 10), "pool1")
    run = train(topology, data, schedule=plan, rounds=1, batch_size=10, optimizer=optim)
    client_times, server_times = KEPT[plan]
    kept = client_times(clients) * weight_bytes(topology, "client")
    kept += server_times(clients) * weight_bytes(topology, "server")
    parties = run.engine.run_parties.members()
    assert tensor_bytes(list(parties.values())) == rows + kept
