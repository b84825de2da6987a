"""Replayed segments keep to themselves: no party reaches another's numbers, before, in or after a step."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core import replay
from splitfed.core.errors import InvalidInput
from splitfed.core.party import Party
from splitfed.core.replay import ReplayedSegment
from splitfed.data import from_arrays
from splitfed.engines.local import LocalEngine
from splitfed.topologies import vanilla
from tests.core.idioms import left_alone
from tests.core.replayed_nets import EXAMPLE, REPLAYED, ReplayedNet, replayed_net, replayed_topology
from tests.core.test_isolation import FiniteCheck, rows_of, rows_reached, shared, trained
from tests.object_graph import holdings, reachable
from tests.thinning import thin


def weights_of(party: Party) -> set[bytes]:
    return rows_of(p for module in party.state.modules.values() for p in module.parameters())


def data_of(party: Party) -> set[bytes]:
    return rows_of(x for inputs, _ in party.state.data.values() for x in inputs.values())


def foreign(engine: LocalEngine, initial: Mapping[str, set[bytes]]) -> list[str]:
    """Name every party that reaches a row of numbers of another one, or of the example.

    `initial`: role -> rows of its weights before training.
    """
    found = []
    for name, party in engine.parties.items():
        held = rows_reached(party)
        if held & rows_of([EXAMPLE]):
            found.append(f"{name} holds the example")
        for other, owner in engine.parties.items():
            if other != name and held & data_of(owner):
                found.append(f"{name} holds rows of {other}")
            if owner.state.role != party.state.role and held & (weights_of(owner) | initial[owner.state.role]):
                found.append(f"{name} holds weights of {other}")
    return found


def train(name: str, model: nn.Module | None = None) -> tuple[LocalEngine, dict[str, set[bytes]]]:
    """Return a trained engine of a replayed topology, and the rows of each role's first weights."""
    topology = replayed_topology(name, model)
    assert all(isinstance(segment.module, ReplayedSegment) for segment in topology.segments)
    initial: dict[str, set[bytes]] = {role: set() for role in topology.roles}
    for segment in topology.segments:
        initial[segment.role] |= rows_of(segment.module.parameters())
    return trained(topology, ("client0",)), initial


@pytest.mark.parametrize("name", REPLAYED)
def test_no_party_of_a_replayed_topology_reaches_what_another_holds(name: str) -> None:
    model = replayed_net()
    with left_alone(model):
        engine, initial = train(name, model)
    assert type(model) is ReplayedNet
    assert shared(engine) == []
    assert foreign(engine, initial) == []
    for party in engine.parties.values():
        kinds = [kind for kind, _ in holdings(party)]
        assert "frame" not in kinds
        assert kinds.count("module") > 2
        # What others hold is there as a shape: in `forward` it has a name.
        assert any(isinstance(thing, Tensor) and thing.is_meta for thing in reachable(party))
        assert weights_of(party)
        for module in party.state.modules.values():
            assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    # In mid-step no graph reaches across.
    watch = engine.link = FiniteCheck(engine)  # type: ignore[assignment]
    engine.train(0, 1, [torch.arange(8)])
    assert ("activation" in watch.kinds) is (name != "local")


@pytest.mark.parametrize("name", thin(["vanilla", "u_shaped", "relayed"], 2))
def test_hooks_over_the_whole_model_lead_no_party_to_what_another_holds(name: str) -> None:
    model: Any = replayed_net()
    model.seen = {"none": None}
    for path in ("body.layer", "second.layer", "head"):
        layer = model.get_submodule(path)
        layer.register_forward_hook(lambda m, i, o, path=path: model.seen.update({path: o.detach()}))
        layer.register_full_backward_hook(lambda m, gi, go, owner=model: owner.seen.update(last=go[0]))
    with left_alone(model):
        engine, initial = train(name, model)
    assert model.seen == {"none": None}
    assert shared(engine) == []
    assert foreign(engine, initial) == []
    kept = {
        key
        for party in engine.parties.values()
        for m in party.state.modules.values()
        for key in vars(m).get("seen", ())
    }
    assert kept == {"none", "body.layer", "second.layer", "head", "last"}


@pytest.mark.parametrize("leak", ["weight", "frame", "object", "row", "list", "array"])
def test_the_walk_finds_what_a_replayed_segment_would_leak(leak: str) -> None:
    engine, initial = train("vanilla")
    client, server = engine.parties["client0"], engine.parties["server"]
    (bottom,), (top,) = client.state.modules.values(), server.state.modules.values()
    assert isinstance(top, ReplayedSegment)
    weight = bottom.get_submodule("stem.1").get_parameter("weight")
    if leak == "weight":
        vars(top.get_submodule("stem.1"))["weight"] = weight.detach().clone()
        assert "server holds weights of client0" in foreign(engine, initial)
    elif leak == "frame":
        try:
            bottom.get_submodule("nothing")
        except AttributeError as error:
            vars(top)["last"] = error
        assert "frame" in [kind for kind, _ in holdings(server)]
    elif leak == "object":
        (remembered, *_) = top.replay_plan.memory.values()
        remembered[0] = types.SimpleNamespace(state=weight)
        assert "client0 and server: memory" in shared(engine)
    else:
        rows = client.state.data["train"][0]["x"][3:5].clone()
        kinds = {"row": rows, "list": [partial(print, rows.flatten(1).tolist())], "array": {"x": rows.numpy()}}
        vars(top)["last"] = kinds[leak]
        assert foreign(engine, initial) == ["server holds rows of client0"]


def test_a_weight_that_is_left_in_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cutter itself is broken: it leaves one weight of the client in everybody's copy."""
    kept = replay.leave_out

    def leaves_one(made: nn.Module, *given: Any) -> frozenset[str]:
        found = kept(made, *given)
        weight = made.get_submodule("stem.1").weight
        if weight.is_meta:
            vars(made.get_submodule("stem.1"))["weight"] = torch.as_tensor(stem)
        return found

    model = replayed_net()
    stem = model.get_parameter("stem.1.weight").detach().clone()
    monkeypatch.setattr(replay, "leave_out", leaves_one)
    with pytest.raises(
        InvalidInput, match=r"'top' at role 'server' leads to a copy of 'stem\.1\.weight' of role 'client'"
    ):
        replayed_topology("vanilla", model)


class Named(nn.Linear):
    """A layer that is written by its own attributes, as Conv1D of the transformers package is."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.nf = 8

    def __repr__(self) -> str:
        return "Named(nf={nf})".format(**self.__dict__)


class WithNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Named(), Named(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(nn.functional.dropout(self.a(x), 0.1, self.training)))


def test_modules_of_others_can_be_written_down(tmp_path: Path) -> None:
    """Their attributes were gone, and with a folder, which tells what the model is, a run of GPT-2 was a KeyError."""
    topology = vanilla(WithNames(), "a", example=torch.randn(8, 8))
    assert all(isinstance(segment.module, ReplayedSegment) for segment in topology.segments)
    assert all(repr(segment.module).count("Named(nf=8)") == 2 for segment in topology.segments)
    rows = from_arrays(torch.randn(60, 8), torch.arange(60) % 4).clients(1, auxiliary=4, victims=4)
    run = splitfed.train(topology, rows, rounds=1, logging=splitfed.Logging(tmp_path / "run"))
    assert len(run.history) == 1
