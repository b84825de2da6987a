"""Independent clients train as they would alone, whole epochs or some batches a round; and who guides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.federated import Learner, Method, MethodTraits
from splitfed.models.mlp import mlp
from splitfed.planning.plan import cost
from splitfed.planning.validation import prepare
from splitfed.schedules import Independent, Sequential
from splitfed.schedules.base import Training
from splitfed.topologies import local, vanilla
from tests.examples import assert_same


def go(schedule: sf.Schedule | str = "independent", rounds: int = 2, **changes: Any) -> sf.Run:
    with stream(0):
        topology = changes.pop("topology", None) or local(mlp((1, 8, 8), 10, (12,), seed=None))
    data = changes.pop("data", None) or sf.data.digits().clients(3, dirichlet=0.5, auxiliary=10, victims=8)
    return sf.train(topology, data, schedule=schedule, rounds=rounds, batch_size=32, **changes)


def weights(run: sf.Run, replica: int) -> dict[str, Tensor]:
    return {f"{n}/{k}": v for n, m in run.engine.modules(replica).items() for k, v in m.state_dict().items()}


def stop_after_two(done: int, rounds: int, metrics: Mapping[str, Any]) -> None:
    if done == 2:
        raise KeyboardInterrupt


def test_equals_clients_that_take_turns_and_hand_nothing_over() -> None:
    one, other = go(), go(Sequential(hand_over="none"))
    for replica in range(3):
        assert_same(weights(one, replica), weights(other, replica))
    assert one.bytes == 0


def test_batches_of_a_round_go_on_where_those_before_ended() -> None:
    training = Training(4, seed=3)
    epochs = [list(training.batches(10, epoch, 7)) for epoch in range(4)]
    expected = [batch for epoch in epochs for batch in epoch]
    plan = Independent(steps=2)
    found = [batch for number in range(5) for batch in plan._batches(training, 10, number, 7)]
    assert [b.tolist() for b in found] == [b.tolist() for b in expected[:10]]
    assert [len(plan._batches(training, 10, number, 7)) for number in range(5)] == [2] * 5
    long = Independent(steps=7)._batches(training, 10, 1, 7)
    assert [b.tolist() for b in long] == [b.tolist() for epoch in range(5) for b in training.batches(10, epoch, 7)][
        7:14
    ]


def test_steps_make_a_round_and_are_resumed_exactly(tmp_path: Path) -> None:
    whole = go(Independent(steps=3), rounds=4, logging=sf.Logging(folder=tmp_path / "a"))
    assert [entry["steps"] for entry in whole.history] == [9] * 4
    with pytest.raises(KeyboardInterrupt):
        go(Independent(steps=3), rounds=4, logging=sf.Logging(folder=tmp_path / "b", progress=stop_after_two))
    again = go(Independent(steps=3), rounds=4, logging=sf.Logging(folder=tmp_path / "b", resume=True))
    for replica in range(3):
        assert_same(weights(whole, replica), weights(again, replica))


def test_sampled_clients_and_drop_outs() -> None:
    run = go(Independent(clients_per_round=2, drop_out=0.5), rounds=6)
    assert {entry["clients"] for entry in run.history} == {2}
    assert any(entry["dropped"] for entry in run.history)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_refuses_impossible_steps(steps: Any) -> None:
    with pytest.raises(InvalidInput, match="steps"):
        Independent(steps=steps)


def test_refuses_a_shared_party() -> None:
    with pytest.raises(InvalidInput, match=r"'server': take .* split models 'splitfed_v3' or 'sequential' with hand"):
        sf.train(vanilla(mlp((1, 8, 8), 10, (12,)), "relu1"), sf.data.digits().clients(2), schedule="independent")


@dataclass(frozen=True, kw_only=True)
class Twice(Method):
    """Trains every batch twice, the second time on rows that it holds for the client."""

    def train(self, learner: Learner, epoch: int, batches: Sequence[Tensor], first: int) -> list[float]:
        (name,), (head,) = learner.topology.inputs, learner.topology.heads
        learner.hold("more", {name: torch.ones(4, 1, 8, 8)}, {head.value: torch.zeros(4, dtype=torch.int64)})
        assert learner.rows("more") == 4
        more = learner.train(epoch, [torch.arange(4)], first, part="more")
        return learner.train(epoch, batches, first) + more


@dataclass(frozen=True, kw_only=True)
class Fusing(Method):
    """Says that it averages weights."""

    def traits(self, topology: sf.Topology) -> MethodTraits:
        return replace(super().traits(topology), aggregates_weights=True)


def test_a_method_leads_the_training_of_its_clients() -> None:
    run = go(method=Twice())
    assert all(entry["steps"] == go().history[0]["steps"] + 3 for entry in run.history)
    assert run.learners[0].rate == pytest.approx(0.05)
    # A guided client on a split replica: the plan counts the further steps as well, to the byte.
    data = sf.data.digits().clients(2, auxiliary=10, victims=8)
    with stream(0):
        topology = vanilla(mlp((1, 8, 8), 10, (12,), seed=None), "relu1")
    ready = prepare(
        topology, data, schedule="splitfed_v3", defenses=(), optimizer=None, training=Training(64), method=Twice()
    )
    run = sf.train(topology, data, schedule="splitfed_v3", rounds=2, method=Twice())
    assert cost(ready, 2).flows == {flow: n for flow, n in run.engine.traffic.flows.items() if flow.phase == "train"}


def test_weights_are_not_averaged_twice() -> None:
    with pytest.raises(InvalidInput, match="SplitFedV1 averages weights, and so does method Fusing"):
        go("splitfed_v1", method=Fusing())


class Named(nn.Module):
    """Calls what is between its pieces as the ends of a local topology are called."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.out, self.last = nn.Flatten(), nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.out(self.flat(x)))
        return found


def test_ends_of_whole_models_are_called_alike_whatever_is_between() -> None:
    for topology in (local(Named(), ("out",)), local(mlp((1, 8, 8), 10, (12,)), ("relu1",)), local(Named())):
        assert list(topology.inputs) == ["x"]
        assert [head.value for head in topology.heads] == ["out"]
    assert local(Named(), ("out",)).segments[0].outputs == ("out_",)
    assert go(topology=local(Named(), ("out",))).history


def test_clients_of_any_make_train_apart_where_they_agree_in_the_ends() -> None:
    one, other = local(Named(), ("out",)), local(mlp((1, 8, 8), 10, (12,)))
    assert len(go(topology=[one, other, one]).history[-1]["test"]["clients"]) == 3
    model = sf.Segment("model", "client", Named(), ("x",), ("scores",))
    odd = sf.Topology("odd", (model,), {"x": "client"}, (sf.Head("scores", "client", "client"),))
    with pytest.raises(InvalidInput, match=r"client 1 has outputs \['scores'\]; the first client has \['out'\]"):
        go(topology=[one, odd, one])
