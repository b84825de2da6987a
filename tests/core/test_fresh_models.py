"""Forty models that nobody had in mind when the cutters were written: trained to the uncut model's bits, or refused."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.core.messages import Stamp
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.step_state import forward_seed
from splitfed.core.topology import Topology
from splitfed.topologies import u_shaped, vanilla
from tests.core import fresh_models as made
from tests.core import fresh_models_by_hand as by_hand
from tests.core import fresh_models_more as more
from tests.core.idioms import left_alone

TRAIN, TEST, SIZE, ROUNDS, SEED = 19, 5, 8, 3, 2
"""Batches of 8, 8 and 3 rows."""
OPTIM = Optim("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
Rows = dict[str, Tensor]


@dataclass(frozen=True)
class Fresh:
    """A model, the submodules it is cut behind (one: vanilla, two: U-shaped), its rows, and what must come of it.

    `refused`: a text that the refusal contains (None: trained to the bits of the uncut model). `open`: why it is
    neither yet. `draws`: it draws random numbers, so that the reference draws from the streams of the parties. `near`:
    gradients of one value are added up in parts, so that last digits are others. `output`, `sent`: as for `vanilla`.
    """

    model: Callable[[], nn.Module]
    at: tuple[str, ...]
    inputs: Callable[[int], Rows]
    refused: str | None = None
    open: str | None = None
    draws: bool = False
    near: bool = False
    output: str | None = None
    sent: tuple[str, ...] | None = None


def drawn(count: int, *shape: int, seed: int = 5) -> Tensor:
    """Return rows of real numbers."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, length: int = 6, seed: int = 5) -> Tensor:
    """Return rows of whole numbers."""
    return torch.randint(1, 16, (count, length), generator=torch.Generator().manual_seed(seed))


def padded(count: int) -> Tensor:
    """Return series whose ends are zeros, from the second row on at other lengths."""
    return drawn(count, 6, 4) * (torch.arange(6) < 3 + torch.arange(count)[:, None] % 4)[:, :, None]


def with_lengths(count: int) -> Rows:
    """Return padded series, and their lengths in a part of the same shape."""
    lengths = (3 + torch.arange(count) % 4).float()
    return {"x": padded(count), "lengths": lengths[:, None, None].expand(-1, 6, 4).clone()}


def masked_tokens(count: int) -> Rows:
    """Return words and a mask of padding."""
    mask = (torch.arange(6) < 3 + torch.arange(count)[:, None] % 4).long()
    return {"input_ids": tokens(count) * mask, "attention_mask": mask}


def row(shape: tuple[int, ...], model: Callable[[], nn.Module], *at: str, **rest: Any) -> Fresh:
    """Return a row of the table whose model takes one argument of real numbers."""
    name = rest.pop("name", "x")
    return Fresh(model, at, lambda count: {name: drawn(count, *shape)}, **rest)


def words(name: str, model: Callable[[], nn.Module], *at: str, **rest: Any) -> Fresh:
    """Return a row of the table whose model takes words by the argument `name`."""
    return Fresh(model, at, lambda count: {name: tokens(count)}, **rest)


table, image, series = partial(row, (8,)), partial(row, (3, 8, 8)), partial(row, (6, 4))


def training_rows() -> Tensor:
    """Return the rows that a client trains on, which one of the models keeps."""
    return drawn(TRAIN + TEST, 8)


PUBLISHED: dict[str, Fresh] = {
    "conv_mixer": image(made.conv_mixer, "2", "3.0.fn.1", name="input"),
    "efficient_net": image(made.EfficientNet, "_blocks.0", draws=True, name="inputs"),
    "unet_plus_plus": image(made.UNetPlusPlus, "nodes.x_0_1", near=True),
    "point_net": row((6, 3), made.PointNet, "conv1", output="0"),
    "tcn": series(made.TCN, "network.0.net.1", "network.1"),
    "reversible_norm": series(made.Forecaster, "embed", "trend"),
    "reversible_norm_between_parties": series(made.Forecaster, "embed", refused="sent_inputs"),
    "n_beats": table(made.NBeats, "before:blocks.1", "blocks.1.fc"),
    "n_beats_past_the_first_block": table(made.NBeats, "blocks.0", refused="sent_inputs"),
    "tab_net": table(made.TabNet, "initial", near=True),
    "ft_transformer": table(made.FTTransformer, "tokens", "layers.0.linear1", name="x_num"),
    "deep_fm": Fresh(made.DeepFM, ("fc",), lambda n: {"x": tokens(n, 5)}),
    "dlrm": table(made.DLRM, "emb_l.1"),
    "neural_collaborative_filtering": Fresh(
        more.NeuMF, ("item_mlp",), lambda n: {"user": tokens(n, 1), "item": tokens(n, 1, seed=6)}
    ),
    "state_space": series(more.S4D, "encoder", "norm"),
    "rwkv": words("idx", more.RWKV, "ln0", "blocks.0.output"),
    "set_transformer": series(more.SetTransformer, "inp", "enc.0"),
    "graph_attention": series(more.GraphAttention, "heads.1"),
    "byol": table(more.BYOL, "target"),
    "moco_queue": table(more.MoCo, "encoder"),
    "manifold_mixup": table(more.ManifoldMixup, "stem", draws=True),
    "spec_augment_by_numpy": series(more.SpeechNet, "augment", refused="numpy.random"),
    "ctc_encoder": Fresh(more.CTCEncoder, ("conv",), with_lengths, sent=("lengths",)),
    "hyper_network": table(more.HyperNetwork, "stem"),
    "prefix_tuning": words("input_ids", more.PrefixEncoder, "stem", "layers.0.o", near=True),
    "style_transfer": Fresh(
        more.AdaIN, ("encoder#2",), lambda n: {"content": drawn(n, 3, 8, 8), "style": drawn(n, 3, 8, 8, seed=6)}
    ),
    "mixture_density": table(more.MixtureDensity, "z_h", output="logits"),
    "batch_renorm": table(more.Renormed, "brn1", "fc2"),
    "act_norm": table(more.Flow, "nets.0"),
    "prototypes": table(more.Prototypes, "trunk"),
}
BY_HAND: dict[str, Fresh] = {
    "table_in_a_dictionary": series(by_hand.SharedTable, "a"),
    "states_by_the_number_of_rows": series(by_hand.StatesByRows, "a"),
    "mask_made_when_first_asked_for": series(by_hand.LazyMask, "b"),
    "cached_function": table(by_hand.CachedFunction, "a", "b"),
    "schedule_object": table(by_hand.Annealed, "a", refused="schedule"),
    "branches_in_turn": table(by_hand.Turns, "a", refused="turn"),
    "generator_as_an_attribute": table(by_hand.Generated, "a", refused="factors"),
    "window_in_a_deque": table(by_hand.Window, "a", refused="means"),
    "global_of_a_helper_of_a_helper": table(by_hand.WarmUp, "a", refused="SEEN"),
    "small_batches": table(by_hand.SmallBatches, "a"),
    "overwritten_behind_the_cut": table(by_hand.HiddenUnits, "a", "b"),
    "buffer_by_data_on_two_sides": table(by_hand.Centroids, "a", refused="center"),
    "buffer_by_data_on_one_side": table(by_hand.KeptCentroids, "a"),
    "expanded_keys": series(by_hand.MultiQuery, "q"),
    "generator_of_its_own": table(by_hand.OwnGenerator, "a", refused="generator"),
    "padding_seen_from_the_rows": Fresh(by_hand.PaddingByHand, ("inp", "ff"), lambda n: {"x": padded(n)}),
    "differences_of_the_rows": series(by_hand.Differences, "a", refused="sent_inputs"),
    "rows_kept_by_the_model": table(lambda: by_hand.Neighbours(training_rows()), "a", refused="bank"),
    "tied_by_a_list": table(by_hand.TiedByList, "encoder", refused="would be shared by roles"),
    "sorted_by_length": Fresh(by_hand.SortedByLength, ("inp",), lambda n: {"x": padded(n)}),
    "range_seen_by_a_hook": table(by_hand.Observed, "a", "b"),
}


def transformer(name: str, config: dict[str, Any], *at: str, **rest: Any) -> Fresh:
    """Return a row of the table with a model of the transformers package, made by its user from a configuration."""

    def build_it() -> nn.Module:
        import transformers

        made_config = getattr(transformers, name.split("For")[0].removesuffix("Model") + "Config")(**config)
        made_config.use_cache = False
        return getattr(transformers, name)(made_config)  # type: ignore[no-any-return]

    inputs = rest.pop("inputs", lambda count: {"input_ids": tokens(count)})
    return Fresh(build_it, at, inputs, output="logits", **rest)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 4}
WIDTH = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**NO_DROPOUT, **WIDTH, "vocab_size": 16, "max_position_embeddings": 16, "pad_token_id": 0}
SPEECH = {
    **{"conv_dim": (8,), "conv_stride": (2,), "conv_kernel": (3,), "num_feat_extract_layers": 1},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0},
    **{"activation_dropout": 0.0, "classifier_proj_size": 8, "num_labels": 4},
}
SEGMENTS = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 8], "strides": [2, 2]},
    **{"patch_sizes": [3, 3], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0},
    **{"classifier_dropout_prob": 0.0},
}
TRANSFORMERS: dict[str, Fresh] = {
    "albert": transformer(
        "AlbertForSequenceClassification",
        {**TEXT, "embedding_size": 6, "classifier_dropout_prob": 0.0},
        "albert.embeddings",
        "albert.encoder",
    ),
    "albert_between_calls_of_one_layer": transformer(
        "AlbertForSequenceClassification",
        {**TEXT, "embedding_size": 6, "classifier_dropout_prob": 0.0},
        "albert.encoder.albert_layer_groups.0#1",
        refused="would be shared by roles",
    ),
    "deberta_with_a_mask": transformer(
        "DebertaV2ForSequenceClassification",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_dropout": 0.0},
        "deberta.embeddings",
        inputs=masked_tokens,
        sent=("attention_mask",),
    ),
    "wav2vec2": transformer(
        "Wav2Vec2ForSequenceClassification",
        {**{k: v for k, v in TEXT.items() if k in WIDTH}, **SPEECH},
        "wav2vec2.feature_projection",
        "wav2vec2.encoder.layers.0",
        inputs=lambda count: {"input_values": drawn(count, 40)},
    ),
    "mixtral": transformer(
        "MixtralForSequenceClassification",
        {**TEXT, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2},
        "model.embed_tokens",
        "model.layers.1",
    ),
    "segformer": transformer(
        "SegformerForImageClassification",
        {**NO_DROPOUT, **SEGMENTS},
        "segformer.stages.0.patch_embeddings",
        "segformer.stages.0.blocks.0",
        inputs=lambda count: {"pixel_values": drawn(count, 3, 8, 8)},
    ),
    "nystromformer": transformer(
        "NystromformerForSequenceClassification",
        {**TEXT, "num_landmarks": 3, "segment_means_seq_len": 6, "conv_kernel_size": 3},
        "nystromformer.embeddings",
        "nystromformer.encoder.layer.0",
    ),
}
MODELS = {**PUBLISHED, **BY_HAND, **TRANSFORMERS}


def build(fresh: Fresh) -> nn.Module:
    """Return the model, from the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return fresh.model()


def topology_of(fresh: Fresh, model: nn.Module) -> Topology:
    """Cut the model, with eight rows as an example."""
    rows = fresh.inputs(SIZE)
    example: Any = rows if len(rows) > 1 else next(iter(rows.values()))
    rest: dict[str, Any] = {"example": example, "output": fresh.output, "sent_inputs": fresh.sent}
    return u_shaped(model, fresh.at, **rest) if len(fresh.at) == 2 else vanilla(model, fresh.at[0], **rest)


def data_of(fresh: Fresh) -> sf.Federation:
    """Return the rows as those of one client."""
    rows, labels = fresh.inputs(TRAIN + TEST), torch.arange(TRAIN + TEST) % 4
    whole = "float32" if next(iter(rows.values())).is_floating_point() else "int64"
    given: Any = rows if len(rows) > 1 else next(iter(rows.values()))
    data = sf.data.from_arrays(given, labels, task=sf.classification(4), dtype=whole)  # type: ignore[arg-type]
    return data.clients(1, auxiliary=0, victims=0, validation=0.0, test=TEST / (TRAIN + TEST), seed=0)


def train_split(fresh: Fresh, model: nn.Module) -> sf.Run:
    """Cut and train, scored at the end alone."""
    seldom = sf.Evaluation(every=ROUNDS)
    topology, data = topology_of(fresh, model), data_of(fresh)
    return sf.train(
        topology, data, rounds=ROUNDS, batch_size=SIZE, optimizer=OPTIM, seed=SEED, evaluation=seldom
    )


def train_whole(fresh: Fresh, model: nn.Module, positions: Tensor) -> None:
    """Train the uncut model as anybody would, on the same rows in the same order."""
    rows, labels = fresh.inputs(TRAIN + TEST), torch.arange(TRAIN + TEST) % 4
    order = sf.LocalUpdate().training(SIZE, SEED)
    model.train()
    optimizer, _ = OPTIM.build([p for p in model.parameters() if p.requires_grad])
    for epoch in range(ROUNDS):
        batches = order.batches(len(positions), epoch, 0)
        assert sorted(torch.cat(batches).tolist()) == list(range(TRAIN))
        assert [len(b) for b in batches] == [8, 8, 3]
        for step, batch in enumerate(batches):
            chosen = positions[batch]
            optimizer.zero_grad()
            with streams_of_parties(fresh, model, Stamp("train", 0, epoch, step)):
                output = model(**{name: part[chosen] for name, part in rows.items()})
            functional.cross_entropy(logits(output), labels[chosen]).backward()
            optimizer.step()


@contextlib.contextmanager
def streams_of_parties(fresh: Fresh, model: nn.Module, stamp: Stamp) -> Iterator[None]:
    """Let what comes before the cut draw from the client's stream, and what comes behind from the server's."""
    if not fresh.draws:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(stream(forward_seed(SEED, "client0", "bottom", stamp)))

        def changed(module: nn.Module, inputs: Any, output: Any) -> None:
            stack.enter_context(stream(forward_seed(SEED, "server", "top", stamp)))

        (at,) = fresh.at
        hook = model.get_submodule(at).register_forward_hook(changed)
        yield
        hook.remove()


def logits(output: Any) -> Tensor:
    """Return the scores among what a model returned."""
    if isinstance(output, Tensor):
        return output
    if hasattr(output, "logits"):
        return output.logits  # type: ignore[no-any-return]
    return output[0]  # type: ignore[no-any-return]


def described(value: Any, depth: int = 0) -> Any:
    """Return what a value holds, in a form that compares by contents."""
    if isinstance(value, Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, nn.Module) or depth > 4:
        return id(value)
    if isinstance(value, Mapping):
        return {str(k): described(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, by_hand.deque)):
        return [described(v, depth + 1) for v in value]
    if is_dataclass(value):
        return {f.name: described(getattr(value, f.name), depth + 1) for f in fields(value)}
    if isinstance(value, SimpleNamespace):
        return described(vars(value), depth + 1)
    return repr(value)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Hold that the block leaves the model, what it refers to, and all generators of random numbers as they were."""

    def everything() -> Any:
        known = vars(nn.Module())
        plain = {
            n: {k: described(v) for k, v in vars(m).items() if k not in known} for n, m in model.named_modules()
        }
        return plain, dict(by_hand.SEEN), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = everything()
    with left_alone(model):
        yield
    assert everything() == before


def check(fresh: Fresh) -> None:
    """Hold that a row is exact or refused, as it says, and that nothing of the user's is changed."""
    model = build(fresh)
    uncut = build(fresh)
    if fresh.refused is not None:
        with untouched(model), pytest.raises(InvalidInput) as caught:
            train_split(fresh, model)
        assert "\n" not in str(caught.value)
        assert fresh.refused in str(caught.value)
        return
    with untouched(model):
        run = train_split(fresh, model)
    train_whole(fresh, uncut, data_of(fresh).sources["client0/train"])
    state = run.export(build(fresh)).state_dict()
    assert state.keys() == uncut.state_dict().keys()
    for key, value in uncut.state_dict().items():
        # Nine steps of sums of five numbers below 1, each off by a unit in the last place.
        near = 9 * 5 * torch.finfo(torch.float32).eps if fresh.near else 0.0
        torch.testing.assert_close(state[key], value, rtol=0, atol=near, msg=lambda text: f"{key}: {text}")


def test_the_table_is_long_enough() -> None:
    assert len(MODELS) >= 40
    assert len(PUBLISHED) + len(TRANSFORMERS) >= 24


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.xfail(strict=True, reason=f.open)] if f.open else []) for n, f in MODELS.items()
    ],
)
def test_a_model_that_nobody_had_in_mind_is_exact_or_refused(name: str) -> None:
    check(MODELS[name])
