"""A run's federated method: what clients predict with is asked once, and anew after a round and from another state."""

from __future__ import annotations

import copy

import torch

from tests.federated.examples import go


def test_what_clients_predict_with_is_asked_anew_after_a_state_was_loaded() -> None:
    run = go("fedavg", 1)
    first = run.newest(0)
    assert isinstance(first, dict)
    assert run.newest(0) is first, "asked once of each client"
    states = copy.deepcopy(run.state())
    for tensor in states["run"]["method"]["weights"].values():
        tensor.zero_()
    run.load_state(states)
    served = run.newest(0)
    assert isinstance(served, dict)
    assert served.keys() == first.keys()
    assert all(not bool(torch.count_nonzero(tensor)) for tensor in served.values())


def test_without_a_method_the_schedule_says_what_clients_predict_with() -> None:
    run = go(None, 1)
    assert (run.method, run.method_state) == (None, {})
    assert run.newest(1) == run.schedule.newest(1, run.trainer.schedule_state)
