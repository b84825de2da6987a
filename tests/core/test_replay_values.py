"""What crosses a replayed cut: whole numbers, masks, values whose first dimension is not the batch; and tied weights.

Everything is compared with the uncut model, trained beside parties for some steps with momentum.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.core.cutting import cut
from splitfed.core.defense import Accounted, ReleaseDefense
from splitfed.core.defense_context import Context
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.privacy_events import Event, Protects, Pure
from splitfed.core.tasks import classification
from splitfed.core.topology import Topology
from splitfed.defenses import GaussianRelease, Noise, Quantization
from splitfed.topologies import local, multi_hop, u_shaped, vanilla
from tests.examples import engine_of, placed
from tests.predicted_bytes import step_bytes

ROWS, LENGTH, WIDTH, WORDS = 24, 6, 8, 12
DECAY = Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})


class Blocks(nn.Module):
    """Layers of one make; a subclass says what its `forward` does with them."""

    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, module in more.items():
            self.add_module(name, module)


def tokens(rows: int = ROWS) -> Tensor:
    return torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


class Masked(Blocks):
    """Words of number 0 are filled in: a mask of booleans, and their places as whole numbers, cross."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        mask, first = words.gt(5), words.argmax(1)
        h = self.words(words)
        for block in self.blocks:
            h = h + block(h).relu() * mask.unsqueeze(2)
        return {"logits": self.head(h.sum(1) + h[torch.arange(len(words)), first])}


class Biased(Blocks):
    """A bias of positions, learnt, is made once before the first block and read by all: it has no batch dimension."""

    def __init__(self) -> None:
        super().__init__(places=nn.Embedding(LENGTH, 1))

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        places = torch.arange(words.shape[1])
        bias = self.places((places[None] - places[:, None]).abs()).permute(2, 0, 1)
        h = self.words(words)
        for block in self.blocks:
            h = h + (block(h) @ h.mT + bias).softmax(2) @ h
        return {"logits": self.head(h.mean(1))}


class Attention(nn.Module):
    """Makes the bias of positions where it gets none, and hands it on beside its own result; with dropout."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, 1) if makes else None
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, h: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.places is not None
            places = torch.arange(h.shape[1])
            bias = self.places((places[None] - places[:, None]).abs()).permute(2, 0, 1)
        return h + self.dropout((self.linear(h) @ h.mT + bias).softmax(2) @ h), bias


class HandedThrough(Blocks):
    """One bias of positions, handed from block to block, as T5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(makes=number == 0) for number in range(3))

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h, bias = self.words(words), None
        for block in self.blocks:
            h, bias = block(h, bias)
        return {"logits": self.head(h.mean(1))}


@pytest.mark.parametrize("builder", [u_shaped, multi_hop])
def test_a_value_that_blocks_with_dropout_hand_through_reaches_the_last(builder: Any) -> None:
    # Cutting compares with the uncut model, which draws the same numbers there; a run's parties draw their own.
    topology = builder(build(HandedThrough), ("blocks.0", "blocks.1"), example=tokens(8))
    assert any("blocks_0_1" in value for value in topology.segments[2].inputs)


class SequenceFirst(Blocks):
    """The batch is the second dimension between the blocks, and a recurrent net hands its state on."""

    def __init__(self) -> None:
        super().__init__(recurrent=nn.LSTM(WIDTH, WIDTH), again=nn.LSTM(WIDTH, WIDTH))

    def forward(self, words: Tensor, unused: Any = None) -> tuple[Tensor, None]:
        h, state = self.recurrent(self.words(words).transpose(0, 1))
        h, (last, _) = self.again(self.blocks[0](h), state)
        return self.head(h.mean(0) + last[0]), None


class Ends(Blocks):
    """The words' table is the last layer, too."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h = self.words(words)
        for block in self.blocks:
            h = h + block(h).relu()
        return {"logits": functional.linear(h.mean(1), self.words.weight)[:, :4]}


class TwiceEnds(Ends):
    """As `Ends`, with the table read twice at the client's first end, so that three gradients are summed."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h = self.words(words) + self.words(words.flip(1))
        for block in self.blocks:
            h = h + block(h).relu()
        return {"logits": functional.linear(h.mean(1), self.words.weight)[:, :4]}


def build(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind()


def logits(result: Any) -> Tensor:
    return result["logits"] if isinstance(result, Mapping) else result[0]


def check_trains_as_uncut(model: nn.Module, topology: Topology, near: float = 0.0) -> Topology:
    """Nine steps of both, with the same rows, momentum and weight decay; at most `near` apart."""
    x, y, uncut = tokens(), torch.arange(ROWS) % 4, copy.deepcopy(model)
    steps = [chosen for _ in range(3) for chosen in torch.arange(ROWS).split(8)]
    engine = engine_of(topology, x, y, optim=DECAY)
    engine.train(0, 0, steps)
    optimizer, _ = DECAY.build(list(uncut.parameters()))
    for chosen in steps:
        optimizer.zero_grad()
        functional.cross_entropy(logits(uncut(x[chosen])), y[chosen]).backward()
        optimizer.step()
    state = topology.state_dict(engine.modules(0))
    assert state.keys() == uncut.state_dict().keys()
    for key, value in uncut.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=near, msg=key)
    return topology


@pytest.mark.parametrize("kind", [Masked, Biased, SequenceFirst])
def test_any_tensor_crosses_and_trains_as_uncut(kind: type[nn.Module]) -> None:
    model = build(kind)
    at = "blocks.0" if kind is not SequenceFirst else "recurrent"
    topology = check_trains_as_uncut(model, vanilla(model, at, example=tokens(8)))
    assert len(topology.crossings[0].values) > 1


def test_whole_numbers_and_masks_cross_and_no_gradient_comes_back_for_them() -> None:
    model = build(Masked)
    topology = multi_hop(model, ("before:blocks.1", "before:blocks.2"), labels="server", example=tokens(8))
    engine = engine_of(topology, tokens(), torch.arange(ROWS) % 4, optim=DECAY)
    engine.train(0, 0, [torch.arange(8)])
    sizes = {kind: size for (_, kind, sender, _), (_, size) in engine.traffic.counters.items() if sender == "client0"}
    values = 8 * LENGTH * WIDTH * 4
    # A mask takes a byte a word; what is seen of the place of the largest word, eight.
    assert sizes["activation"] == values + 8 * LENGTH * 1 + 8 * 8
    back = {kind: size for (_, kind, _, to), (_, size) in engine.traffic.counters.items() if to == "client0"}
    assert back["gradient"] == values
    assert engine.traffic.bytes() == step_bytes(topology, pass_example(topology, {"words": tokens(8)}), 8)


class Named(Masked):
    """As `Masked`, and the blocks read the words themselves: raw rows, which cross where they are named."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h = self.words(words)
        for block in self.blocks:
            h = h + block(h).relu() * words.unsqueeze(2)
        return {"logits": self.head(h.sum(1))}


def test_a_defense_that_cannot_act_on_whole_numbers_is_refused_and_others_say_that_they_leave_them() -> None:
    model = build(Named)
    topology = vanilla(model, "words", example=tokens(8), sent_inputs=("words",))
    x, y, where = tokens(), torch.arange(ROWS) % 4, r"'words_sent', torch\.int64, on edge 'bottom->top'"
    for defense in (Quantization(bits=4), GaussianRelease(clip=1.0, noise_multiplier=1.0), Promise()):
        with pytest.raises(InvalidInput, match=rf"cannot act on {where}"):
            engine_of(topology, x, y, optim=DECAY, defenses=[defense])
    with pytest.warns(UserWarning, match=rf"Noise leaves {where} as it is"):
        engine = engine_of(topology, x, y, optim=DECAY, defenses=[Noise(0.1)], recording=Recording(("server",)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.train(0, 0, [torch.arange(8)])
    seen = next(m for m in engine.link.recorders["server"].messages() if m.kind == "activation").tensors
    assert torch.equal(seen["words_sent"], x[:8])
    (noisy,) = (value for value in seen.values() if value.is_floating_point())
    assert 0.05 < (noisy - model.words(x[:8])).std() < 0.2


@dataclass(frozen=True, kw_only=True)
class Promise(ReleaseDefense, Accounted):
    """Promises something of releases, and adds no layer."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z

    def event(self) -> Event:
        return Event(Pure(1.0), Protects.RELEASES)


def test_what_a_later_party_reads_is_handed_on_from_neighbour_to_neighbour() -> None:
    model = build(Masked)
    topology = multi_hop(model, ("before:blocks.1", "before:blocks.2"), labels="server", example=tokens(8))
    assert {(topology.role_of(e.source), topology.role_of(e.target)) for e in topology.crossings} == {
        ("client", "hop1"),
        ("hop1", "server"),
    }
    assert {"gt_hop1", "argmax_hop1"} <= set(topology.crossings[1].values)
    check_trains_as_uncut(model, topology)
    biased = build(Biased)
    check_trains_as_uncut(biased, multi_hop(biased, ("blocks.0", "blocks.1"), labels="server", example=tokens(8)))


def test_a_value_without_a_batch_dimension_crosses_once_a_row_and_takes_all_gradients_back() -> None:
    pieces = cut(build(Biased), ("blocks.0",), tokens(8))
    made = dict(zip(pieces[0].outputs, pieces[0].module(tokens(5)), strict=True))
    (bias,) = (value for value in made.values() if value.dim() == 4)
    assert bias.shape == (5, 1, LENGTH, LENGTH)
    assert torch.equal(bias[0], bias[4])


def test_a_batch_in_the_second_dimension_crosses_as_the_first() -> None:
    pieces = cut(build(SequenceFirst), ("recurrent",), tokens(8))
    made = pieces[0].module(tokens(5))
    assert {tuple(value.shape) for value in made} == {(5, LENGTH, WIDTH), (5, 1, WIDTH)}


@pytest.mark.parametrize("kind", [Ends, TwiceEnds])
def test_tied_weights_of_one_party_are_one_parameter_with_the_sum_of_both_gradients(kind: type[nn.Module]) -> None:
    model = build(kind)
    topology = u_shaped(model, ("words", "blocks.2"), example=tokens(8))
    # Three gradients of the table are added in another order; each of nine steps rounds a number below 1 three times.
    near = 0.0 if kind is Ends else 9 * 3 * torch.finfo(torch.float32).eps
    check_trains_as_uncut(model, topology, near)
    first, last = topology.segments[0].module, topology.segments[2].module
    assert first.get_submodule("words").weight is last.get_submodule("words").weight
    build(kind).load_state_dict(topology.state_dict(), strict=True)


@pytest.mark.parametrize("builder", [vanilla, multi_hop])
def test_tied_weights_of_two_parties_are_refused(builder: Any) -> None:
    at = "blocks.0" if builder is vanilla else ("blocks.0", "blocks.1")
    with pytest.raises(InvalidInput, match=r"parameter 'words\.weight' would be shared by roles 'client' and 'server'"):
        builder(build(Ends), at, example=tokens(8))


def test_a_cut_before_a_submodule() -> None:
    model = build(Biased)
    before, after = (cut(model, (at,), tokens(8)) for at in ("before:blocks.1", "blocks.0"))
    # What is done with the block's result belongs to what stands before the next block.
    assert list(before[0].module.state_dict()) == list(after[0].module.state_dict())
    assert before[0].outputs != after[0].outputs
    with pytest.raises(InvalidInput, match="cut 'before:words' leaves an empty segment before"):
        cut(model, ("before:words",), tokens(8))
    check_trains_as_uncut(model, local(model, ("before:blocks.1", "before:head"), example=tokens(8)))
    with pytest.raises(InvalidInput, match="leave an empty segment: two are the same place"):
        cut(model, ("before:blocks.1", "before:blocks.1"), tokens(8))
    with pytest.raises(InvalidInput, match="cut 'head#x' is not allowed; expected the number of a call"):
        cut(model, ("head#x",), tokens(8))


class Padded(Blocks):
    """Takes the padding mask as an argument, and reads it in every block, as everyday encoders do."""

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = self.words(words)
        for block in self.blocks:
            h = h + block(h).relu().masked_fill(mask.unsqueeze(2), 0.0)
        return {"logits": self.head(h.sum(1))}


@pytest.mark.parametrize("builder", [vanilla, u_shaped, multi_hop])
def test_an_input_crosses_if_and_only_if_it_is_named(builder: Any) -> None:
    model, x = build(Padded), tokens()
    inputs = {"words": x, "mask": x.gt(6)}
    example = {name: value[:8] for name, value in inputs.items()}
    at = "words" if builder is vanilla else ("words", "blocks.1")
    with pytest.raises(InvalidInput, match="reads 'mask', raw data of role 'client': raw data never crosses"):
        builder(model, at, example=example)
    with pytest.raises(InvalidInput, match="unknown input of Padded 'maks'; did you mean 'mask'"):
        builder(model, at, example=example, sent_inputs=("maks",))
    with pytest.raises(InvalidInput, match=r"sent_inputs=\('mask',\) needs rows as example"):
        builder(model, at, sent_inputs=("mask",))
    topology = builder(model, at, example=example, sent_inputs=("mask",)).with_task(classification(4))
    assert "mask_sent" in topology.crossings[0].values
    y, uncut = torch.arange(ROWS) % 4, copy.deepcopy(model)
    engine = placed(topology, inputs, {h.value: y for h in topology.heads}, optim=DECAY)
    optimizer, _ = DECAY.build(list(uncut.parameters()))
    steps = [chosen for _ in range(3) for chosen in torch.arange(ROWS).split(8)]
    engine.train(0, 0, steps)
    for chosen in steps:
        optimizer.zero_grad()
        functional.cross_entropy(uncut(x[chosen], inputs["mask"][chosen])["logits"], y[chosen]).backward()
        optimizer.step()
    for name, value in topology.state_dict(engine.modules(0)).items():
        assert torch.equal(value, uncut.state_dict()[name]), name


class Recurring(Blocks):
    """Calls one block three times."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h = self.words(words)
        for _ in range(3):
            h = h + self.blocks[0](h).relu()
        return {"logits": self.head(h.mean(1))}


@pytest.mark.parametrize(
    ("at", "same"), [("before:blocks.0", "words"), ("before:blocks.0#1", "words"), ("blocks.0", "blocks.0#3")]
)
def test_a_cut_before_is_before_the_first_call_and_a_cut_after_behind_the_last(at: str, same: str) -> None:
    model = build(Recurring)
    cuts = [("words", *(() if name == "words" else (name,))) for name in (at, same)]
    if same == "words":
        cuts = [(at,), ("words",)]
    one, other = (cut(model, places, tokens(8))[-1] for places in cuts)
    assert list(one.module.state_dict()) == list(other.module.state_dict())
    assert one.inputs == other.inputs


class Several(Blocks):
    """Several results, of which one is used."""

    def forward(self, words: Tensor, unused: Any = None) -> dict[str, Tensor]:
        h = self.words(words)
        early = h.mean(1)
        for block in self.blocks:
            h = h + block(h).relu()
        return {"early": early, "logits": self.head(h.mean(1)), "last": h}


def test_one_of_several_results_is_used() -> None:
    model = build(Several)
    with pytest.raises(InvalidInput, match="the model must have one output for this topology; it has 3"):
        vanilla(model, "blocks.0", example=tokens(8))
    topology = vanilla(model, "blocks.0", example=tokens(8), output="logits")
    check_trains_as_uncut(model, topology)
    with pytest.raises(InvalidInput, match="unknown output of the model 'logit'; did you mean 'logits'"):
        vanilla(model, "blocks.0", example=tokens(8), output="logit")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h), self.c(h)


def test_one_of_several_results_of_a_traced_model_is_used() -> None:
    topology = vanilla(Pair(), "a", output="1")
    assert [segment.outputs for segment in topology.segments] == [("a",), ("c",)]
    with pytest.raises(InvalidInput, match="unknown output of the model '2'"):
        vanilla(Pair(), "a", output="2")
