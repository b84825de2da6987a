"""Every way of writing a model is cut exactly or refused by name; none trains something else without a word."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from splitfed.core.cutting import cut
from splitfed.core.errors import InvalidInput
from splitfed.topologies import multi_hop
from tests.core import cut_idioms as made
from tests.core.cut_idioms import Net, between, ends, leaking, written_under_another_name
from tests.core.idioms import Idiom, build, check_left_alone, check_training, rows
from tests.thinning import thin

OWN = ("at", "draws", "replayed")


def net(change: Callable[[Any, Tensor], Tensor], refused: str | None = None, **rest: Any) -> Idiom:
    """Return a net of three layers with `change` between the first two."""
    extra = {k: v for k, v in rest.items() if k not in OWN}
    own = {k: v for k, v in rest.items() if k in OWN}
    return Idiom(lambda: Net(between(change), **copy.deepcopy(extra)), refused, **own)


def whole(forward: Callable[[Any, Tensor], Any], refused: str | None = None, **rest: Any) -> Idiom:
    """Return a net of three layers with `forward`."""
    extra = {k: v for k, v in rest.items() if k not in OWN}
    own = {k: v for k, v in rest.items() if k in OWN}
    return Idiom(lambda: Net(forward, **copy.deepcopy(extra)), refused, **own)


def buffer(model: Net, name: str, value: Tensor, persistent: bool = True) -> Net:
    """Return `model` with a buffer."""
    model.register_buffer(name, value, persistent=persistent)
    return model


def evaluated(model: nn.Module, *names: str) -> nn.Module:
    """Return `model` with some submodules in evaluation mode."""
    for name in names:
        model.get_submodule(name).eval()
    return model


def frozen(model: Net) -> Net:
    """Return `model` with its first layer frozen."""
    model.a.requires_grad_(False)
    return model


def tied(model: Net, one: str, other: str) -> Net:
    """Return `model` with the weight of the layer `one` in `other` as well."""
    model.get_submodule(other).weight = model.get_submodule(one).weight
    return model


def forward_leaking(model: Net, change: Callable[[Tensor], Tensor] = lambda output: output * 2) -> Net:
    """Return `model` with a hook that changes what its second layer returns."""
    model.b.register_forward_hook(lambda module, inputs, output: change(output))
    return model


def with_gradients_off(m: Any, h: Tensor) -> Tensor:
    """Run a layer as some libraries do in place of `torch.no_grad`."""
    torch.set_grad_enabled(False)
    found: Tensor = m.d(h)
    torch.set_grad_enabled(True)
    return found


MASK = torch.arange(5) == 4
OVERWRITES = "overwrites"
IDIOMS: dict[str, Idiom] = {
    # Exact: what most models are made of.
    "plain": net(lambda m, h: h),
    "module_dropout": net(lambda m, h: m.drop(h), drop=nn.Dropout(0.3), draws=True),
    "functional_relu_in_place": whole(lambda m, x: m.c(m.b(functional.relu(m.a(x), inplace=True)))),
    "batch_norm": net(lambda m, h: m.norm(h), norm=nn.BatchNorm1d(8)),
    "batch_norm_without_weights": net(lambda m, h: m.norm(h), norm=nn.BatchNorm1d(8, affine=False)),
    "frozen_batch_norm": Idiom(lambda: evaluated(Net(between(lambda m, h: m.norm(h)), norm=nn.BatchNorm1d(8)), "norm")),
    "whole_model_in_evaluation_mode": Idiom(
        lambda: Net(between(lambda m, h: m.norm(h)), norm=nn.BatchNorm1d(8)).eval()
    ),
    "layer_norm": net(lambda m, h: m.norm(h), norm=nn.LayerNorm(8)),
    "group_norm": net(lambda m, h: m.norm(h), norm=nn.GroupNorm(2, 8)),
    "residual": whole(lambda m, x: m.c((h := torch.relu(m.a(x))) + m.b(h))),
    "gate": whole(lambda m, x: m.c((h := torch.relu(m.a(x))) * torch.sigmoid(m.b(h)))),
    "frozen_weights": Idiom(lambda: frozen(Net(ends))),
    "parameter_read_directly": net(lambda m, h: h * m.scale, scale=nn.Parameter(torch.ones(8))),
    "parameter_list": net(lambda m, h: h * m.scales[0] + m.scales[1], scales=nn.ParameterList([torch.ones(8)] * 2)),
    "constant_made_in_forward": net(lambda m, h: h * torch.tensor(2.0)),
    "arange_made_in_forward": net(lambda m, h: h + torch.arange(8)),
    "zeros_of_the_batch": net(lambda m, h: h + torch.zeros((h.shape[0], 8))),
    "item": net(lambda m, h: h * h.mean().item()),
    "checkpointing": net(lambda m, h: checkpoint(m.d, h, use_reentrant=False), d=nn.Linear(8, 8)),
    "new_tensor_from_the_input": net(lambda m, h: h + h.new_ones(8)),
    "tensor_kept_as_an_attribute": net(lambda m, h: h * m.mask, mask=torch.arange(8.0)),
    "buffer_that_is_read": Idiom(lambda: buffer(Net(between(lambda m, h: h * m.mask)), "mask", torch.arange(8.0))),
    "buffer_that_is_not_saved": Idiom(
        lambda: buffer(Net(between(lambda m, h: h * m.mask)), "mask", torch.arange(8.0), persistent=False)
    ),
    "buffer_changed_in_place": Idiom(lambda: buffer(Net(made.running_mean), "mean", torch.zeros(8))),
    "counter_in_a_buffer": Idiom(lambda: buffer(Net(made.counting_buffer), "n", torch.zeros(()))),
    "unused_submodule": net(lambda m, h: h, spare=nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3))),
    "unused_parameter": net(lambda m, h: h, spare=nn.Parameter(torch.ones(3))),
    "noise_drawn_in_forward": net(lambda m, h: h + torch.randn(8), draws=True),
    "noise_like_a_tensor": Idiom(lambda: Net(made.swapped), draws=True),
    "stop_gradient_before_a_cut": whole(made.skip_with_stop, at=("a",)),
    "stop_gradient_behind_a_cut": whole(lambda m, x: m.c(m.b(m.a(x).detach()))),
    "stop_gradient_of_a_skip": whole(lambda m, x: m.c(m.b(h := torch.relu(m.a(x))) + h.detach())),
    "value_kept_as_an_attribute": whole(made.remembering, last=None),
    "activation_in_place_behind_a_cut": whole(lambda m, x: m.c(m.act(m.b(m.a(x)))), act=nn.ReLU(inplace=True)),
    "loop_over_modules": net(
        lambda m, h: functional.relu(m.layers[1](m.layers[0](h))), layers=nn.ModuleList([nn.Linear(8, 8)] * 2)
    ),
    "module_dict": net(lambda m, h: m.parts["one"](h), parts=nn.ModuleDict({"one": nn.Linear(8, 8)})),
    "weights_tied_on_one_side": Idiom(
        lambda: tied(Net(between(lambda m, h: m.d(m.e(h))), d=nn.Linear(8, 8), e=nn.Linear(8, 8)), "d", "e")
    ),
    "weight_norm": Idiom(
        lambda: nn.Sequential(
            nn.Linear(8, 8), torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)
        ),
        at=("0",),
    ),
    "spectral_norm": Idiom(
        lambda: nn.Sequential(nn.Linear(8, 8), torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))),
        at=("0",),
    ),
    "stochastic_depth_by_multiplication": net(
        lambda m, h: h * torch.bernoulli(torch.full((h.shape[0], 1), 0.8)), draws=True
    ),
    "einsum": net(lambda m, h: torch.einsum("nd,de->ne", h, m.b.weight), at=("a",)),
    "chunks": net(lambda m, h: torch.cat(h.chunk(2, 1)[::-1], 1)),
    "softmax_attention_over_rows": net(lambda m, h: torch.softmax(h @ h.t(), 1) @ h),
    "lstm_last_step": Idiom(made.Recurrent, at=("lstm",)),
    "transformer_with_class_token": Idiom(made.Tokens, at=("attention",)),
    "embedding_of_words": Idiom(made.Words, at=("embed",), words=True),
    "convolution_with_pooling": Idiom(made.Conv, at=("norm", "pool")),
    "cut_in_front_of_an_in_place_operation": Idiom(made.Conv, at=("norm",)),
    "sequential": Idiom(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 4)), at=("1",)),
    "nested_sequential": Idiom(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)), nn.Linear(8, 4)), at=("0.0",)
    ),
    "dense_connections": Idiom(made.Dense, at=("blocks.1",), rounds=True),
    "forward_hook_that_changes_the_output": Idiom(lambda: forward_leaking(Net(ends))),
    "masked_classes": whole(made.masked_classes, out=MASK),
    # Refused by the trace, or changed by it; exact by replay unless it is said why not.
    "no_grad_before_masked_classes": whole(
        lambda m, x: made.masked_classes(m, x, made.without_gradients), replayed=True, out=MASK
    ),
    "numbers_differ_before_masked_classes": whole(
        lambda m, x: made.masked_classes(m, x, made.autocast), replayed=True, out=MASK
    ),
    "no_grad": whole(made.without_gradients, replayed=True),
    "no_grad_decorator": net(lambda m, h: torch.no_grad()(m.d)(h), replayed=True, d=nn.Linear(8, 8)),
    "inference_mode": whole(made.inference, "is made in inference mode, and crosses a cut: use torch.no_grad()"),
    "autocast": whole(made.autocast, replayed=True),
    "gradients_in_training_only": whole(made.gradients_by_the_mode, replayed=True),
    "state_of_its_own": Idiom(
        lambda: made.OwnState(ends), "'_extra_state' in the state of OwnState is a dict; parties keep and send state as"
    ),
    "buffer_replaced": Idiom(lambda: buffer(Net(made.replaced_buffer), "n", torch.zeros(())), replayed=True),
    "buffer_changed_in_training_only": Idiom(
        lambda: buffer(Net(made.running_mean_in_training), "mean", torch.zeros(8)), replayed=True
    ),
    "python_counter": Idiom(lambda: made.Counting(ends, steps=0), "forward changes the attribute 'steps' of the model"),
    "class_counter": Idiom(
        lambda: made.CountingInClass(ends), "forward changes the attribute 'flag' of class CountingInClass"
    ),
    "global_counter": Idiom(lambda: made.CountingInGlobal(ends), "forward changes the global 'COUNTS'"),
    "list_of_what_was_seen": whole(made.logging_shapes, "forward changes the attribute 'shapes'", shapes=[]),
    "recurrent_state": whole(made.recurrent_state, replayed=True, last=torch.zeros(8)),
    "overridden_train": Idiom(
        lambda: made.OwnTrain(between(lambda m, h: m.norm(h)), norm=nn.BatchNorm1d(8)),
        "submodule 'norm' is not in evaluation mode, as it is in the uncut model; a party switches modes itself",
    ),
    "functional_dropout": net(lambda m, h: functional.dropout(h, 0.5, m.training), replayed=True, draws=True),
    "branch_on_the_mode": net(lambda m, h: m.d(h) if m.training else h, replayed=True, d=nn.Linear(8, 8)),
    "branch_on_values": net(lambda m, h: h if h.sum() > 0 else -h, replayed=True),
    "branch_on_the_batch": net(lambda m, h: h if h.shape[0] > 6 else -h, replayed=True),
    "python_random_numbers": whole(made.python_random, "other random numbers are drawn from random"),
    "numpy_random_numbers": whole(made.numpy_random, "other random numbers are drawn from numpy.random"),
    "random_numbers_of_the_system": Idiom(
        lambda: forward_leaking(Net(ends), lambda output: output * made.SYSTEM.random()),
        "the uncut model itself does not repeat its results from the same seeds; draw within a submodule that no cut "
        "lies in, such as nn.Dropout, or by a function of torch, and keep in a buffer what else changes from call to "
        "call",
    ),
    "random_numbers_in_training_only": whole(
        made.stochastic_depth, "other values cross in evaluation than in training"
    ),
    "number_taken_out": net(lambda m, h: h * float(h.abs().max()), replayed=True),
    "in_place_on_a_view_swapdims": whole(written_under_another_name(lambda h: h.swapdims(0, 1)), OVERWRITES),
    "in_place_on_a_view_tensor_split": whole(written_under_another_name(lambda h: h.tensor_split(1, 1)[0]), OVERWRITES),
    "in_place_on_a_view_broadcast_to": whole(written_under_another_name(lambda h: h.broadcast_to(h.shape)), OVERWRITES),
    "in_place_on_a_view_moveaxis": whole(written_under_another_name(lambda h: h.moveaxis(0, 1)), OVERWRITES),
    "in_place_on_a_view_of_mine": whole(written_under_another_name(lambda h: torch.hsplit(h, 1)[0]), OVERWRITES),
    "in_place_where_a_reader_follows": whole(
        lambda m, x: m.c(m.b(functional.relu(h := m.a(x), inplace=True)) + h), replayed=True
    ),
    "custom_backward": net(lambda m, h: made.Double.apply(h), replayed=True),
    "custom_backward_in_a_submodule": net(lambda m, h: m.twice(h), replayed=True, twice=made.DoubleLayer()),
    "leak_of_a_weight": Idiom(lambda: leaking("a.weight", 0.5)(Net(ends)), "the gradient of weight 'a.weight' differs"),
    "leak_that_stops_a_weight": Idiom(
        lambda: leaking("b.bias", 0.0)(Net(ends)), "the gradient of weight 'b.bias' differs"
    ),
    "set_grad_enabled": net(with_gradients_off, replayed=True, d=nn.Linear(8, 8)),
    "dictionary": whole(lambda m, x: {"out": ends(m, x)}, replayed=True),
    "weights_tied_across_a_cut": Idiom(lambda: tied(Net(ends), "a", "b"), "would be shared by roles"),
    "parameter_on_two_sides": whole(
        lambda m, x: m.c(m.b(m.a(x) * m.scale) * m.scale),
        "would be shared by roles",
        scale=nn.Parameter(torch.ones(8)),
    ),
    "norm_on_two_sides": whole(
        lambda m, x: m.c(m.norm(m.b(m.norm(m.a(x))))), "would be shared by roles", norm=nn.BatchNorm1d(8, affine=False)
    ),
    "keyword_argument_of_a_submodule": whole(lambda m, x: m.c(m.b(m.a(input=x)))),
    "whole_numbers_cross": Idiom(
        lambda: Net(lambda m, x: m.c(m.e(m.d(m.a(x)))), d=made.Largest(), e=nn.Embedding(8, 8)),
        at=("d",),
    ),
}


EXACT = [name for name, idiom in IDIOMS.items() if idiom.refused is None]
REFUSED = [name for name, idiom in IDIOMS.items() if idiom.refused is not None]


def test_the_table_is_long_enough() -> None:
    assert len(IDIOMS) >= 60
    assert len(EXACT) >= 65
    assert sum(idiom.replayed for idiom in IDIOMS.values()) >= 15


@pytest.mark.parametrize("name", thin(EXACT, 2))
def test_an_idiom_that_is_cut_trains_as_the_uncut_model_does(name: str) -> None:
    check_training(IDIOMS[name])


@pytest.mark.parametrize("name", REFUSED)
def test_an_idiom_that_is_not_cut_is_refused_in_one_line(name: str) -> None:
    idiom, model = IDIOMS[name], build(IDIOMS[name])
    assert idiom.refused is not None
    with pytest.raises(InvalidInput, match=re.escape(idiom.refused)) as caught:
        refused(model, idiom)
    assert "\n" not in str(caught.value)


def refused(model: nn.Module, idiom: Idiom) -> None:
    """Cut the model with an example; what only roles tell is refused by the builder."""
    cut(model, idiom.at, rows(idiom, 8))
    if len(idiom.at) == 2:
        multi_hop(model, idiom.at, labels="server", example=rows(idiom, 8))


@pytest.mark.parametrize("name", thin(IDIOMS, 3))
def test_the_users_model_and_random_numbers_are_left_as_they_were(name: str) -> None:
    check_left_alone(IDIOMS[name])
