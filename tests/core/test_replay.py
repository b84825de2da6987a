"""Cutting by replay: every party runs the user's `forward`, computes its own segment, and holds nothing of others."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.cli import main
from splitfed.core.cutting import cut
from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.replay import ReplayedSegment
from splitfed.costs.measure import segment_flops
from splitfed.defenses import Noise
from splitfed.schedules import SplitFedV1
from splitfed.topologies import multi_hop, vanilla
from splitfed.training.entry_point import train
from splitfed.training.run import Run
from splitfed.training.settings import Logging
from tests.core.cut_idioms import leak
from tests.examples import assert_same, toy_data
from tests.study.examples import small, write


class Encoder(nn.Module):
    """Everyday code that no trace follows: functional dropout, branches, positions, masks, defaults, a table."""

    def __init__(self, blocks: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(blocks))
        self.head, self.dropout = nn.Linear(8, 4), dropout

    def forward(self, words: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        length = words.shape[1]
        h = self.words(words) + self.places(torch.arange(length, device=words.device))
        h = functional.dropout(h * scale, self.dropout, training=self.training)
        if mask is None:
            mask = torch.ones_like(words, dtype=torch.bool).logical_not()
        for block in self.blocks:
            h = block(h, src_key_padding_mask=mask)
        with torch.no_grad():
            weights = torch.linspace(0.0, 1.0, length)
        return {"logits": self.head((h * weights[None, :, None]).sum(1))}


def words(rows: int) -> Tensor:
    return torch.randint(0, 20, (rows, 6), generator=torch.Generator().manual_seed(1))


def encoder(**given: Any) -> Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder(**given)


def chained(pieces: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all values that the pieces make of `inputs`, one after the other."""
    values = dict(inputs)
    for piece in pieces:
        made = piece.module(*(values[name] for name in piece.inputs))
        values.update(zip(piece.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return values


@pytest.mark.parametrize("at", [("blocks.0",), ("blocks.2",), ("words",), ("words", "blocks.0", "blocks.1")], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_the_pieces_in_a_row_are_the_model(at: tuple[str, ...], training: bool) -> None:
    model = encoder().train(training)
    pieces = cut(model, at, words(8))
    assert all(isinstance(piece.module, ReplayedSegment) for piece in pieces)
    for rows in (8, 3, 8):
        torch.manual_seed(5)
        whole = model(words(rows))["logits"]
        torch.manual_seed(5)
        values = chained(pieces, {"words": words(rows)})
        assert torch.equal(values["logits"], whole)
    whole.sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    chained(pieces, {"words": words(8)})["logits"].sum().backward()
    # The pieces share the model's own weights until parties copy them.
    for name, weight in model.named_parameters():
        assert (weight.grad is None) is (gradients[name] is None), name
        assert weight.grad is None or torch.equal(weight.grad, gradients[name]), name


def test_names_of_weights_are_the_models_and_each_is_in_one_piece() -> None:
    model = encoder()
    pieces = cut(model, ("blocks.0", "blocks.1"), words(4))
    names = [name for piece in pieces for name in piece.module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    assert [len(list(piece.module.parameters())) for piece in pieces] == [14, 12, 14]


def real_tensors(root: object) -> list[Tensor]:
    """Return every tensor with numbers that can be reached from `root` through what Python refers to."""
    found, seen, pending = [], {id(root)}, [root]
    skipped = (type, type(gc), type(real_tensors))
    while pending:
        for one in gc.get_referents(pending.pop()):
            if id(one) in seen or isinstance(one, skipped):
                continue
            seen.add(id(one))
            if isinstance(one, Tensor) and not one.is_meta:
                found.append(one)
            pending.append(one)
    return found


def test_nothing_of_another_party_can_be_reached_from_a_piece() -> None:
    pieces = [
        replace(piece, module=copy.deepcopy(piece.module), original=None)
        for piece in cut(encoder(), ("blocks.0", "blocks.1"), words(4))
    ]
    # What a pass leaves behind is looked at too.
    assert "logits" in chained(pieces, {"words": words(4)})
    copies = [piece.module for piece in pieces]
    for number, module in enumerate(copies):
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        others = [t for other in range(3) if other != number for t in copies[other].parameters()]
        for tensor in real_tensors(vars(module)):
            assert id(tensor) in held or tensor.numel() <= 1, tuple(tensor.shape)
            assert all(tensor.data_ptr() != other.data_ptr() for other in others)


def test_a_copy_computes_with_weights_of_its_own() -> None:
    piece = cut(encoder(), ("blocks.0",), words(4))[1]
    made, h = copy.deepcopy(piece.module), torch.randn(4, 6, 8)
    for module in (piece.module, made):
        module.eval()
    before = made(h)
    with torch.no_grad():
        for weight in piece.module.parameters():
            weight.add_(1)
    assert torch.equal(made(h), before)
    assert not torch.equal(piece.module(h), before)
    made.load_state_dict(piece.module.state_dict())
    assert torch.equal(made(h), piece.module(h))


def test_a_piece_is_not_pickled() -> None:
    piece = cut(encoder(), ("blocks.0",), words(4))[0]
    with pytest.raises(InvalidInput, match="a segment of Encoder cannot be pickled; save its state_dict"):
        pickle.dumps(piece.module)


class Shared(nn.Module):
    """One core without weights, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.c(self.act(self.b(self.act(self.a(x))))))


def test_a_cut_after_the_nth_call() -> None:
    model, x = Shared(), torch.randn(8, 8)
    pieces = cut(model, ("act#1", "act#2"), x)
    assert [list(piece.module.state_dict()) for piece in pieces] == [
        [f"{name}.weight", f"{name}.bias"] for name in ("a", "b", "c")
    ]
    assert torch.equal(chained(pieces, {"x": x})[pieces[-1].outputs[0]], model(x))
    with pytest.raises(InvalidInput, match="cut 'act#4': 'act' is called 3 times; expected #1 to #3"):
        cut(model, ("act#4",), x)
    with pytest.raises(InvalidInput, match="names a call of a submodule; give rows as example too"):
        cut(model, ("act#1",))


def test_a_forward_that_takes_another_way_is_refused_while_it_runs() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.long = nn.Linear(8, 8), nn.Linear(8, 4), False

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.a(x)
            return {"y": self.b(h.tanh() if self.long else h.relu())}

    pieces = cut(Branching(), ("a",), torch.randn(8, 8))
    pieces[1].module.long = True
    with pytest.raises(InvalidInput, match="takes another way than when it was cut, at operation 1 of 3"):
        pieces[1].module(torch.randn(8, 8))


def test_rows_of_another_shape_are_refused() -> None:
    piece = cut(encoder(), ("blocks.0",), words(4))[0]
    with pytest.raises(
        InvalidInput, match=r"input 'words' of Encoder has shape \(5,\) a row; the model was cut for \(6,\)"
    ):
        piece.module(words(4)[:, :5])


A_NUMBER = r"takes a number out of a tensor, .* at .*\.py:\d+\) \((RuntimeError|NotImplementedError): .*[Mm]eta"
REFUSED: dict[str, tuple[Any, str]] = {
    "a weight on two sides": (
        lambda m, x: {"y": m.c(m.b(m.a(x)) @ m.a.weight)},
        "parameter 'a.weight' would be shared by roles 'client' and 'server'",
    ),
    "no shape": (lambda m, x: {"y": m.c(m.b(torch.cat([(h := m.a(x))[(on := h[:, 0] > 0)], h[~on]])))}, A_NUMBER),
    "an output that is an input": (lambda m, x: {"y": m.c(m.b(m.a(x))), "x": x}, "returns one of its inputs"),
    "nothing": (lambda m, x: [m.c(m.b(m.a(x))), None][1], "returns a NoneType without tensors"),
    "its own failure": (lambda m, x: {"y": m.c(m.missing(x))}, r"fails by itself at .*: AttributeError: 'Made'"),
    "a failure of any kind": (lambda m, x: {"y": m.c(x)}["z"], r"fails by itself at .*: KeyError: 'z'$"),
}


def test_what_is_returned_twice_is_one_output() -> None:
    class Twice(Shared):
        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.a(x)
            y = self.c(self.b(h))
            return {"y": y, "states": (h, y)}

    model, x = Twice(), torch.randn(8, 8)
    pieces = cut(model, ("b",), x)
    assert [piece.outputs for piece in pieces] == [("b", "states_0"), ("y",)]
    made = chained(pieces, {"x": x})
    assert all(torch.equal(made[name], one) for name, one in zip(("states_0", "y"), model(x)["states"], strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused_in_one_line(case: str) -> None:
    class Made(Shared):
        def forward(self, x: Tensor) -> Any:
            return REFUSED[case][0](self, x)

    with pytest.raises(InvalidInput, match=REFUSED[case][1]) as caught:
        vanilla(Made(), "b", example=torch.randn(8, 8))
    assert "\n" not in str(caught.value)


def test_operations_of_others_are_not_counted_as_a_partys_work() -> None:
    model = encoder(dropout=0.0)
    topology = vanilla(model, "blocks.1", example=words(4))
    facts = pass_example(topology, {"words": words(2)})
    costs = segment_flops(topology, facts)
    whole = sum(cost.forward for cost in costs.values())
    # Two of three equal blocks are the client's, and the head is small.
    assert costs["bottom"].forward == pytest.approx(2 * (whole - 2 * 8 * 4) / 3)


def test_raw_rows_are_not_sent_to_a_later_segment() -> None:
    class Skipping(Shared):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.c(self.b(self.a(x)) + x)}

    with pytest.raises(InvalidInput, match=r"raw|crosses"):
        vanilla(Skipping(), "b", example=torch.randn(8, 8))


def test_a_topology_of_replayed_segments_passes_values_that_cross_hop_by_hop() -> None:
    topology = multi_hop(encoder(), ("blocks.0", "blocks.1"), labels="server", example=words(8))
    assert [edge.values for edge in topology.edges] == [("blocks_0",), ("blocks_1",)]


class Gated(nn.Module):
    """A net of digits that no trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Sequential(nn.Flatten(), nn.Linear(64, 16)), nn.Linear(16, 16)
        self.norm, self.gate, self.head = nn.BatchNorm1d(16), nn.Parameter(torch.ones(16)), nn.Linear(16, 10)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        h = functional.dropout(functional.relu(self.stem(x)) * scale, 0.2, training=self.training)
        return {"logits": self.head(functional.relu(self.norm(self.block(h))) * self.gate)}


def gated(folder: Path, **given: Any) -> Run:
    """Train it for two rounds with two clients, into `folder`."""
    data = toy_data(60).clients(2, auxiliary=12, victims=4, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gated()
    topology = vanilla(model, "stem", example=data.victims.x)
    logging = Logging(folder=folder, **given)
    return train(topology, data, rounds=2, schedule=SplitFedV1(), defenses=[Noise(0.1)], logging=logging)


def test_a_replayed_run_is_stopped_resumed_attacked_and_exported(tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    whole = gated(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        gated(tmp_path / "half", progress=stop)
    resumed = gated(tmp_path / "half", resume=True)
    assert_same(whole.state()["party-server~0"], resumed.state()["party-server~0"])
    assert whole.history[-1]["test"] == resumed.history[-1]["test"]
    for attack in ("inverse_network", "rmle", "shadow"):
        (found,) = whole.attack(attack, budget="quick")
        assert found.prediction.shape == found.truth.shape
    state = whole.engine.topology.state_dict(whole.engine.modules(0))
    Gated().load_state_dict(state, strict=True)
    assert whole.engine.traffic.bytes() > 0


def test_a_study_cuts_by_replay_what_cannot_be_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "import torch\nfrom torch import Tensor, nn\nfrom torch.nn import functional\n"
    (tmp_path / "replayed_net.py").write_text(head + inspect.getsource(Gated), "utf-8")
    study = small(model={"name": "replayed_net:Gated"}, topology=[{"name": "vanilla", "cut": "stem"}], attack=[])
    path = write(tmp_path, study)
    assert main(["plan", str(path), "--schedules", "sequential"]) == 0
    assert "cut by replay, as its model cannot be traced" in capsys.readouterr().out
    assert main(["run", str(path), "--folder", str(tmp_path / "out")]) == 0
    sys.modules.pop("replayed_net", None)


def test_others_overwrite_in_place_what_is_remembered_of_them() -> None:
    class Overwriting(Shared):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.a(x) * 2
            h.clamp_(min=0).mul_(0.5)
            return {"y": self.c(self.b(h))}

    model = Overwriting()
    for rows in (8, 5, 8):
        x = torch.randn(rows, 8)
        pieces = cut(model, ("b",), x)
        for _ in range(2):
            assert torch.equal(chained(pieces, {"x": x})["y"], model(x)["y"])


@pytest.mark.parametrize("kind", [Encoder, Shared])
def test_what_is_changed_after_the_cut_is_found_before_the_run(kind: type[nn.Module]) -> None:
    """A comparison at the cut does not stand in for the one before the run; one is replayed, the other traced."""
    model = kind()
    x = words(8) if kind is Encoder else torch.randn(8, 8)
    topology = vanilla(model, "blocks.0" if kind is Encoder else "b", example=x)
    leak(next(model.parameters()), 0.5)
    with pytest.raises(InvalidInput, match="the gradient of weight"):
        check_topology(topology, {next(iter(topology.inputs)): x})


def test_a_cut_after_dropout_which_returns_what_it_is_given_in_evaluation() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)

        def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
            return {"y": self.b(functional.relu(self.drop(self.a(x) * scale)))}

    model, x = Dropping(), torch.randn(8, 8)
    pieces = cut(model, ("drop",), x)
    assert [piece.outputs for piece in pieces] == [("drop",), ("y",)]
    for module in (model, *(piece.module for piece in pieces)):
        module.eval()
    assert torch.equal(chained(pieces, {"x": x})["y"], model(x)["y"])


def test_a_plan_is_the_same_in_every_process() -> None:
    """A resumed run is told by what its segments hold: names of weights stand in no order of a set."""
    (bottom, _) = cut(encoder(), ("blocks.1",), words(8))
    assert isinstance(bottom.module, ReplayedSegment)
    for (way,) in bottom.module.replay_plan.ways.values():
        names = [name for name in way.state if name.startswith("blocks.2.")]
        assert len(names) == 12
        assert names == sorted(names)
