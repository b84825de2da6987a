"""FedAKT: steps of extractor, adapter and head by hand, the ablations, what crosses and what stays, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Recording
from splitfed.federated import FedAKT
from splitfed.schedules import LocalLoss
from splitfed.topologies import local
from tests.examples import assert_same
from tests.federated.examples import traits
from tests.federated.methods import (
    BUILDERS,
    ByHand,
    assert_nothing_held_twice,
    assert_plan_is_counted,
    assert_resumes,
    data,
    go,
    net,
    plan_of,
    weights,
)


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("shape", BUILDERS)
def test_three_steps_by_hand(shape: str, dual: bool) -> None:
    rows = data(1, rows=120)
    run = go(shape, FedAKT(weight=0.5, dual_use=dual), 3, data=rows, batch_size=512)
    graph, train = run.engine.topology, rows.clients[0].train
    prefix = "adapter" if shape == "local" else "extractor"
    bare = ByHand(graph)
    assert len(graph.heads) == 1 + dual
    for _ in range(3):
        made = bare(train.x)
        # Of one sum: the head follows both losses, each extractor its own loss and the difference.
        loss = 0.5 * ((made["relu1"] - made[f"{prefix}_relu1"]) ** 2).mean()
        bare.step(sum((functional.cross_entropy(made[h.value], train.y) for h in graph.heads), loss))
    bare.assert_as(run)


def test_extractor_and_head_answer() -> None:
    whole, split = go("local", FedAKT(), 1), go("vanilla", FedAKT(), 1)
    x = data().clients[0].test.x[:5]
    for run, body, head in ((whole, "body", "head"), (split, "extractor_bottom", "top")):
        modules = {name: module.eval() for name, module in run.engine.modules(0).items()}
        torch.testing.assert_close(run.predict(x, 0), modules[head](modules[body](x)))
    assert set(whole.history[-1]["test"]["method"]) == {"adapter"}


def test_one_head_serves_both() -> None:
    for shape, head in (("local", "head"), ("vanilla", "top")):
        run = go(shape, FedAKT())
        one, again = (run.engine.modules(0)[name] for name in (head, f"again_{head}"))
        assert all(a is b for a, b in zip(one.parameters(), again.parameters(), strict=True))


def test_without_adapters_clients_train_alone() -> None:
    off = FedAKT(use_adapter=False)
    assert traits(off).turned_off == "fedakt without an adapter exchanges nothing between clients"
    assert traits(FedAKT()).turned_off is None
    alone, run = go("local", None), go("local", off)
    assert run.bytes == 0
    for replica in range(3):
        assert_same(weights(alone, replica), weights(run, replica))
    # Between split nodes the client segment then stays where it is.
    split = go("vanilla", off)
    assert not torch.equal(weights(split, 0)["bottom/fc1.weight"], weights(split, 1)["bottom/fc1.weight"])


def test_weight_zero_leaves_the_extractor_to_its_own_loss() -> None:
    """Then the adapter reaches it through the head alone, and without dual use not at all."""
    alone, far, near = go("local", None, 1), go("local", FedAKT(weight=0.0), 1), go("local", FedAKT(weight=1.0), 1)
    name = "body/fc1.weight"
    assert not torch.equal(weights(far, 0)[name], weights(near, 0)[name])
    assert not torch.equal(weights(far, 0)[name], weights(alone, 0)[name])


def test_adapters_alone_are_averaged() -> None:
    rows = data()
    run = go("local", FedAKT(), 1, data=rows)
    sizes = [len(c.train) for c in rows.clients]
    assert {name.split("/")[0] for name in run.method_state["adapter"]} == {"adapter_body"}
    for name, mean in run.method_state["adapter"].items():
        parts = [n * weights(run, replica)[name].double() for replica, n in enumerate(sizes)]
        torch.testing.assert_close(mean, (torch.stack(parts).sum(0) / sum(sizes)).to(mean.dtype))
    for shape, adapter in (("local", "adapter_body"), ("vanilla", "bottom"), ("u_shaped", "bottom")):
        view = go(shape, FedAKT(), logging=sf.Logging(record=Recording(("fed_server",), every=1))).engine.view(
            "fed_server"
        )
        assert {n.split("/")[0] for m in view.messages for n in m.tensors} == {adapter}


@pytest.mark.parametrize("shape", BUILDERS)
def test_planned_bytes_are_counted_bytes(shape: str) -> None:
    assert_plan_is_counted(shape, FedAKT(), schedule=plan_of(shape, clients_per_round=2, drop_out=0.3))
    assert_plan_is_counted(shape, FedAKT(dual_use=False), 1)


def test_features_of_both_cross_between_split_nodes() -> None:
    flows = {e.name for e in go("vanilla", FedAKT(), 1).engine.topology.crossings}
    assert flows == {"bottom->top", "extractor_bottom->again_top"}
    assert {e.name for e in go("vanilla", FedAKT(dual_use=False), 1).engine.topology.crossings} == {
        "extractor_bottom->top"
    }


def test_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    for shape in ("local", "u_shaped"):
        assert_resumes(shape, FedAKT(), tmp_path / shape)


@pytest.mark.parametrize("shape", BUILDERS)
def test_no_party_reaches_what_another_holds(shape: str) -> None:
    assert_nothing_held_twice(go(shape, FedAKT()))


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU())


def test_extractors_of_any_make_share_a_given_adapter() -> None:
    one, deep = local(net(1), ("relu1",)), local(net(2, (20, 10)), ("relu2",))
    run = go("local", FedAKT(adapter=small()), 3, topology=[one, deep, one])
    assert {name.split("/")[0] for name in run.method_state["adapter"]} == {"adapter"}
    with pytest.raises(
        InvalidInput, match="fedakt averages every client's adapter; that of client 1 has another architecture"
    ):
        go("local", FedAKT(), topology=[one, deep, one])
    given = go("vanilla", FedAKT(extractor=small()), 1)
    assert "extractor" in given.engine.modules(0)


def test_all_of_it_learns() -> None:
    rows = sf.data.digits().clients(2, auxiliary=0, victims=0)
    whole, split = (go(shape, FedAKT(weight=0.5), 5, data=rows) for shape in ("local", "vanilla"))
    assert min(*whole.history[-1]["test"]["method"]["adapter"], whole.accuracy, split.accuracy) > 0.5, "chance is .1"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"weight": -0.1}, "fedakt weight=-0.1"),
        ({"weight": 0.0, "dual_use": False}, "fedakt with dual_use=False and weight=0 does not train the adapter"),
    ],
)
def test_parameters_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        FedAKT(**arguments)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fedakt averages the adapters itself, and the schedule averages client"):
        go("local", FedAKT(), schedule="splitfed_v1")
    with pytest.raises(InvalidInput, match="fedakt needs gradients through the whole model"):
        go("vanilla", FedAKT(), schedule=LocalLoss())
    with pytest.raises(InvalidInput, match="fedakt takes no extractor= on whole models"):
        go("local", FedAKT(extractor=small()))
    with pytest.raises(InvalidInput, match="fedakt takes no adapter= on split models"):
        go("vanilla", FedAKT(adapter=small()))
    with pytest.raises(InvalidInput, match="topology 'local' has no embedding for fedakt"):
        go("local", FedAKT(), topology=local(net()))
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
    with pytest.raises(InvalidInput, match=r"fedakt: client 0 has features of shape \(10,\), its second model \(9,\)"):
        go("local", FedAKT(adapter=narrow, dual_use=False))
    with pytest.raises(InvalidInput, match="segment 'again_head' cannot take what arrives"):
        go("local", FedAKT(adapter=narrow))
