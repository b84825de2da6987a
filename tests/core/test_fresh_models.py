"""Models that nobody had in mind when the cutters were written: trained to the uncut model's bits, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from tests.core import fresh_models as made, fresh_models_by_hand as by_hand, fresh_models_more as more, fresh_runs
from tests.core.fresh_runs import TEST, TRAIN, Fresh, Rows, check
from tests.thinning import thin


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
    "tcn": series(made.TCN, "network.0", "network.1.net.1"),
    "tcn_past_a_skip_of_the_series": series(made.TCN, "network.0.net.1", refused="sent_inputs"),
    "reversible_norm": series(made.Forecaster, "embed", "trend"),
    "reversible_norm_between_parties": series(partial(made.Forecaster, False), "embed", refused="sent_inputs"),
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
    "rwkv": words("idx", more.RWKV, "ln0", "blocks.0.output", slow=True),
    "set_transformer": series(more.SetTransformer, "inp", "enc.0"),
    "graph_attention": series(more.GraphAttention, "out"),
    "byol": table(more.BYOL, "target"),
    "moco_queue": table(more.MoCo, "encoder"),
    "manifold_mixup": table(more.ManifoldMixup, "stem", draws=True),
    "spec_augment_by_numpy": series(more.SpeechNet, "augment", draws=True),
    "ctc_encoder": Fresh(more.CTCEncoder, ("conv",), with_lengths, sent=("lengths",)),
    "hyper_network": table(more.HyperNetwork, "stem"),
    "prefix_tuning": words("input_ids", more.PrefixEncoder, "stem", "layers.0.o", near=True),
    "style_transfer": Fresh(
        more.AdaIN, ("encoder#2",), lambda n: {"content": drawn(n, 3, 8, 8), "style": drawn(n, 3, 8, 8, seed=6)}
    ),
    "mixture_density": table(more.MixtureDensity, "z_h", output="logits"),
    "batch_renorm": table(more.Renormed, "brn1", "fc2"),
    "act_norm": table(more.Flow, "nets.0"),
    "act_norm_of_raw_columns": table(partial(more.Flow, False), "nets.0", refused="sent_inputs"),
    "prototypes": table(more.Prototypes, "trunk"),
}
BY_HAND: dict[str, Fresh] = {
    "table_in_a_dictionary": series(by_hand.SharedTable, "a"),
    "states_by_the_number_of_rows": series(by_hand.StatesByRows, "a"),
    "mask_made_when_first_asked_for": series(by_hand.LazyMask, "b"),
    "cached_function": table(by_hand.CachedFunction, "a", "b"),
    "schedule_object": table(by_hand.Annealed, "a", refused="schedule"),
    "branches_in_turn": table(by_hand.ReplicaEpochs, "a", refused="turn"),
    "generator_as_an_attribute": table(by_hand.Generated, "a", refused="'factors' of the model is a generator at work"),
    "lock_as_an_attribute": table(by_hand.Locked, "a"),
    "window_in_a_deque": table(by_hand.Window, "a"),
    "global_of_a_helper_of_a_helper": table(by_hand.WarmUp, "a", refused="SEEN"),
    "small_batches": table(by_hand.SmallBatches, "a"),
    "overwritten_behind_the_cut": table(by_hand.HiddenUnits, "a", "b"),
    "buffer_by_data_on_two_sides": table(by_hand.Centroids, "a"),
    "buffer_by_data_read_in_the_next_pass": table(by_hand.LateCentroids, "b", refused="center"),
    "buffer_by_data_on_one_side": table(by_hand.KeptCentroids, "a"),
    "expanded_keys": series(by_hand.MultiQuery, "q"),
    "generator_of_its_own": table(by_hand.OwnGenerator, "a", refused="noise"),
    "padding_seen_from_the_rows": Fresh(
        by_hand.PaddingByHand, ("inp", "ff"), lambda n: {"x": padded(n)}, refused="sent_inputs"
    ),
    "differences_of_the_rows": series(by_hand.Differences, "a", refused="sent_inputs"),
    "rows_kept_by_the_model": table(lambda: by_hand.Neighbours(training_rows()), "a", refused="bank"),
    "tied_by_a_list": table(by_hand.TiedByList, "encoder", refused="would be shared by roles"),
    "sorted_by_length": Fresh(by_hand.SortedByLength, ("inp",), lambda n: {"x": padded(n)}, refused="sent_inputs"),
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
    "conv_dim": (8,),
    "conv_stride": (2,),
    "conv_kernel": (3,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "activation_dropout": 0.0,
    "classifier_proj_size": 8,
    "num_labels": 4,
}
SEGMENTS = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [4, 8],
    "strides": [2, 2],
    "patch_sizes": [3, 3],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
    "classifier_dropout_prob": 0.0,
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
        slow=True,
        inputs=lambda count: {"pixel_values": drawn(count, 3, 8, 8)},
    ),
    "nystromformer": transformer(
        "NystromformerForSequenceClassification",
        {**TEXT, "num_landmarks": 3, "segment_means_seq_len": 6, "conv_kernel_size": 3},
        "nystromformer.embeddings",
        "nystromformer.encoder.layer.0",
        slow=True,
    ),
}
MODELS = {**PUBLISHED, **BY_HAND, **TRANSFORMERS}
OPEN: dict[str, str] = {}
"""What is neither exact nor refused as it should be, and what comes of it."""


def test_the_table_is_long_enough() -> None:
    assert len(MODELS) >= 40
    assert len(PUBLISHED) + len(TRANSFORMERS) >= 24


def test_a_row_that_was_trained_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    train = fresh_runs.train_whole
    monkeypatch.setattr(fresh_runs, "train_whole", lambda fresh, model, rows: train(fresh, model, rows.flip(0)))
    with pytest.raises(AssertionError, match=r"z_h\.0\.weight|head"):
        check(MODELS["mixture_density"])


def cases(models: dict[str, Fresh]) -> list[Any]:
    """Return the names of a table: what takes longer than a second is a proof for the long run of the tests."""
    marks = {
        name: [
            *([pytest.mark.xfail(strict=True, reason=OPEN[name])] if name in OPEN else []),
            *([pytest.mark.exhaustive] if fresh.slow else []),
        ]
        for name, fresh in models.items()
    }
    return thin([pytest.param(name, marks=found) for name, found in marks.items()], 7)


@pytest.mark.parametrize("name", cases({**PUBLISHED, **BY_HAND}))
def test_a_model_that_nobody_had_in_mind_is_exact_or_refused(name: str) -> None:
    if name == "ctc_encoder" and torch.__version__ < "2.7":
        # There torch shows to nobody how a sequence is unpacked.
        with pytest.raises(InvalidInput, match="'_pad_packed_sequence' reads a tensor of which it is not seen"):
            check(MODELS[name])
    else:
        check(MODELS[name])


@pytest.mark.parametrize("name", cases(TRANSFORMERS))
def test_a_model_of_the_transformers_package_that_its_user_made_is_exact_or_refused(name: str) -> None:
    check(TRANSFORMERS[name])
