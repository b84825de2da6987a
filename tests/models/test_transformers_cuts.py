"""Models of the transformers package cut after every block, in vanilla, U-shaped and multi-hop: exact each time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.core.topology import Segment
from splitfed.models.transformers import OneOutputModel
from splitfed.topologies import multi_hop, u_shaped, vanilla
from tests.models.tiny_transformers import GPT2, TINY, Tiny


def by_name(model: OneOutputModel, rows: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return rows if isinstance(rows, dict) else {model.main_input_name: rows}  # type: ignore[dict-item]


def run_pieces(pieces: tuple[Segment, ...], inputs: Mapping[str, Tensor]) -> Tensor:
    values = dict(inputs)
    for piece in pieces:
        made = piece.module(*(values[name] for name in piece.inputs))
        values.update(zip(piece.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return values[pieces[-1].outputs[0]]


def gradients(model: OneOutputModel) -> dict[str, Tensor | None]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def check_cut(model: OneOutputModel, at: str, rows: Tensor | dict[str, Tensor]) -> None:
    """Cut with an example, which compares the parties with the uncut model, and compare the pieces once more here."""
    pieces = vanilla(model, at, example=rows).segments
    assert [piece.role for piece in pieces] == ["client", "server"]
    inputs = by_name(model, rows)
    with stream(5):
        whole = model(**inputs)
        whole.square().sum().backward()
    wanted = gradients(model)
    # One stream runs through the pieces, whose weights are still the model's: dropout draws the same.
    with stream(5):
        parts = run_pieces(pieces, inputs)
        parts.square().sum().backward()
    assert torch.equal(whole, parts)
    for name, gradient in gradients(model).items():
        expected = wanted[name]
        assert (gradient is None) is (expected is None), name
        assert gradient is None or torch.equal(gradient, expected), name  # type: ignore[arg-type]
    names = [name for piece in pieces for name in piece.module.state_dict()]
    assert sorted(names) == sorted(model.state_dict())


@pytest.mark.parametrize("name", ["bert_masked", "gpt2", "convnext"])
def test_a_cut_in_the_middle_is_exact(name: str) -> None:
    model = TINY[name].build()
    check_cut(model, model.cuts[-1], TINY[name].rows())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TINY)
def test_a_cut_after_every_block_is_exact(name: str) -> None:
    model, rows = TINY[name].build(), TINY[name].rows()
    assert len(model.cuts) >= 2
    for at in model.cuts:
        check_cut(model, at, rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TINY)
def test_a_u_shape_with_a_cut_after_every_block_is_exact(name: str) -> None:
    model = TINY[name].build()
    cuts = model.cuts[len(model.cuts) % 2 :]
    topology = u_shaped(model, cuts, example=TINY[name].rows())
    assert len(topology.segments) == len(cuts) + 1
    assert {segment.role for segment in topology.segments[::2]} == {"client"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TINY)
def test_a_chain_of_parties_with_a_block_each_is_exact(name: str) -> None:
    """Masks that every block reads, and T5's bias of positions, are handed on from party to party."""
    model = TINY[name].build()
    topology = multi_hop(model, model.cuts, example=TINY[name].rows())
    assert len(topology.roles) == len(model.cuts) + 1
    neighbours = set(zip(topology.roles, topology.roles[1:], strict=False))
    assert {(topology.role_of(e.source), topology.role_of(e.target)) for e in topology.crossings} == neighbours


@pytest.mark.exhaustive
def test_gpt2_with_its_tied_table_is_cut_where_one_party_holds_both_ends() -> None:
    tied = Tiny("GPT2LMHeadModel", GPT2)
    model = tied.build()
    topology = u_shaped(model, ("transformer.drop", model.cuts[-1]), example=tied.rows())
    first, last = topology.segments[0].module, topology.segments[2].module
    assert first.get_submodule("transformer.wte").weight is last.get_submodule("lm_head").weight
    with pytest.raises(InvalidInput, match="would be shared by roles 'client' and 'server'"):
        vanilla(model, "transformer.drop", example=tied.rows())
