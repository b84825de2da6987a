"""Models as people publish them are cut exactly or refused by name, and left as they were; the table goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn

from splitfed.core.cut_names import read_cuts
from splitfed.core.errors import InvalidInput
from splitfed.core.replay import replay
from tests.core import (
    cut_idioms_convolutions as convolutions,
    cut_idioms_images as images,
    cut_idioms_sequences as sequences,
    cut_idioms_tables as tables,
    cut_idioms_transformers as transformers,
)
from tests.core.idioms import Idiom, build, check_training, left_alone, rows, topology_of
from tests.thinning import thin

Model = Callable[[], nn.Module]


def table(model: Model, *at: str, **rest: Any) -> Idiom:
    """Return a model of tables, cut after `at`."""
    return Idiom(model, at=at, **rest)


image, series, words = partial(table, shape=(3, 8, 8)), partial(table, shape=(6, 4)), partial(table, words=True)


CONVOLUTIONS = {
    "squeeze_excitation": image(convolutions.SENet, "stem", "se"),
    "squeeze_excitation_inside": image(convolutions.SENet, "se.fc", replayed=True),
    "dense_net": image(convolutions.DenseNet, "features.conv0", "features.layer1", rounds=True),
    "inception": image(convolutions.Inception, "stem", "branch3"),
    "residual_net": image(convolutions.ResNet, "layer1.0.conv2", "layer2"),
    "forward_of_the_base_class": image(convolutions.NewHead, "bn1", "fc"),
    "sequential_by_names": image(convolutions.mobile_net, "one.conv.4", "two"),
    "channel_shuffle": image(convolutions.ShuffleNet, "stem", "right.1"),
    "layer_scale": image(convolutions.ConvNeXt, "stem", "blocks.0.pwconv2"),
    "layer_scale_between_blocks": image(convolutions.ConvNeXt, "blocks.0", "blocks.1"),
    "query_that_returns_transposed": image(convolutions.OldSpectralNorm, "query", replayed=True),
    "drop_path": image(partial(convolutions.ConvNeXt, 0.3), "stem", "norm", draws=True, replayed=True),
    "group_and_instance_norm": image(convolutions.GroupNormNet, "one.1", "two"),
    "parametrizations": image(convolutions.ParametrizedNet, "one", "two"),
    "parametrization_itself": image(
        convolutions.ParametrizedNet,
        "two.parametrizations.weight",
        replayed=True,
    ),
    "spectral_norm_by_hooks": image(convolutions.OldSpectralNorm, "one", "value", replayed=True),
    "checkpoint": image(partial(convolutions.CheckpointedBlocks, False), "blocks.0", "blocks.1", replayed=True),
    "checkpoint_from_inside": image(
        partial(convolutions.CheckpointedBlocks, False), "blocks.0.1", refused="a checkpoint around a cut"
    ),
    "reentrant_checkpoint": image(partial(convolutions.CheckpointedBlocks, True), "stem", "head.pool", replayed=True),
    "reentrant_checkpoint_from_inside": image(
        partial(convolutions.CheckpointedBlocks, True),
        "blocks.0",
        refused="is another model than the uncut one: in",
    ),
    "checkpoint_sequential": image(convolutions.CheckpointedSequential, "stem", "blocks.1"),
    "half_precision_block": image(convolutions.HalfPrecisionBlock, "stem", "block"),
    "several_exits": image(convolutions.BranchyNet, "blocks.1", refused="must have one output for this topology; it"),
    "named_tuple_of_logits": image(
        convolutions.AuxiliaryTuple, "block", refused="one output for this topology; it has 2: ['aux', 'logits']"
    ),
    "auxiliary_logits_in_training": image(
        convolutions.GoogLeNet,
        "stem",
        refused="GoogLeNet returns logits, aux in training, head in evaluation: return the same in both modes",
    ),
}
IMAGES = {
    "skips_with_crop_and_interpolation": image(images.UNet, "down1", "up2"),
    "skips_from_a_stack": image(images.TransposedUNet, "downs.1", "ups.0", replayed=True),
    "feature_pyramid": image(images.FPN, "body.c2", "lateral.c2"),
    "taps_in_modules": image(images.PerceptualTaps, "features.1", "features.3"),
    "slices_of_a_sequential": image(images.SequentialSlices, "net.0", replayed=True),
    "device_and_type_of_weights": image(images.InputNormNet, "stem", replayed=True),
    "reshape_and_unflatten": image(images.Autoencoder, "encoder.0", "decoder"),
    "dataclass": image(images.DataclassOutput, "stem", "block", replayed=True),
    "coordinates_of_pixels": image(images.Coordinates, "stem", "block", replayed=True),
    "raw_data_read_again": image(images.SpatialTransformer, "fc_loc", refused="raw data never crosses"),
    "grid_sample": image(images.SpatialTransformer, "block.0", replayed=True),
    "features_kept_by_hooks": image(images.HookedFeatures, "stem"),
    "one_encoder_twice": image(images.SiameseNet, "project"),
    "one_encoder_on_two_sides": image(images.SiameseNet, "encoder", refused="weights tied across a cut"),
    "a_number_of_the_batch": image(images.MinibatchStd, "stem", "block"),
    "train_overridden": image(
        images.FrozenBackbone, "adapter", refused="call .eval() on that submodule before the cut, not in train()"
    ),
    "vision_transformer": image(images.ViT, "patch", "qkv", replayed=True),
    "attention_kept_for_a_picture": image(partial(images.ViT, True), "patch", "norm", replayed=True),
    "shifted_windows": image(images.Swin, "patch"),
    "windows_are_no_batch": image(images.Swin, "proj", refused="the first dimension must be the batch"),
}
SEQUENCES = {
    "last_step": series(sequences.LastStep, "lstm"),
    "last_hidden_state": series(sequences.HiddenState, "proj"),
    "both_directions": words(sequences.BidirectionalGRU, "embedding"),
    "attention_pooling": series(sequences.AttentionPooling, "score"),
    "time_first": series(sequences.TimeFirst, "lstm", replayed=True),
    "packed": words(sequences.PackedWords, "embedding", replayed=True),
    "packed_within": words(sequences.PackedWords, "lstm", refused="packed = pack_padded_sequence("),
    "cells": series(sequences.Cells, "cell", replayed=True),
    "cell_on_two_sides": series(sequences.Cells, "proj", refused="parameter 'cell.weight_ih' would be shared by roles"),
    "attention_over_the_encoder": series(sequences.SequenceToSequence, "out"),
    "dilated_and_gated": series(sequences.WaveNet, "filters.0", "skips.1"),
    "widths_of_words": words(sequences.TextCNN, "embed", "convs.1"),
    "mean_of_embeddings": words(sequences.MaskedMean, "embed", "fc1"),
    "embedding_bag": words(sequences.Bag, "embed", "fc1"),
    "fourier_mixing": series(sequences.FNet, "embed", "norms.0"),
    "filter_of_complex_numbers": series(sequences.GlobalFilter, "embed", "mix"),
    "token_mixing": series(sequences.Mixer, "tokens.0", "channels"),
}
TRANSFORMERS = {
    "mask_of_padding": words(transformers.PaddedTransformer, "embed"),
    "causal_mask": series(transformers.CausalTransformer, "embed", "layers.0", replayed=True),
    "latent_queries": series(transformers.Perceiver, "cross", "decoder.layers.0", replayed=True),
    "gpt": words(transformers.GPT, "transformer.drop", "transformer.h.0", replayed=True),
    "gpt_within_a_block": words(partial(transformers.GPT, False), "transformer.h.0.attn.c_attn", replayed=True),
    "gpt_with_tied_embeddings": words(
        partial(transformers.GPT, True, True), "transformer.drop", refused="would be shared by roles"
    ),
    "function_that_holds_submodules": words(
        partial(transformers.GPT, True, False, transformers.ClosureBlock),
        "transformer.drop",
        refused="'mlpf' of 'transformer.h.0' is a function or a reference that leads to a ModuleDict",
    ),
    "llama": words(transformers.Llama, "layers.0", "layers.1.attention_norm", replayed=True, rounds=True),
    "llama_without_end": words(transformers.Llama, "output", refused="'output' leaves an empty segment after 'output'"),
    "rotary_buffer": words(transformers.RotaryCache, "tok_embeddings", "layers.0", replayed=True),
}
TABLES = {
    "dropout_in_evaluation": table(tables.MCDropout, "fc1", draws=True),
    "stochastic_depth_by_bernoulli": table(tables.StochasticDepth, "inp", draws=True, replayed=True),
    "layers_skipped_by_a_number": table(
        tables.LayerDrop, "layers.0", refused="by 'item', that steers which operations run"
    ),
    "parameter_list": table(tables.ListOfParameters, "inp"),
    "moving_average": table(tables.MovingAverage, "inp", "mid", replayed=True),
    "dense_experts": table(tables.DenseExperts, "inp", "experts.1", rounds=True),
    "sparse_experts_after_the_cut": table(tables.SparseNet, "inp", replayed=True),
    "sparse_experts_before_the_cut": table(tables.SparseNet, "moe", replayed=True),
    "largest_by_scatter": table(tables.TopKMask, "inp", "mid"),
    "graph_convolution": table(tables.GraphConvolution, "gc1"),
    "graph_on_two_sides": table(tables.GraphConvolution, "gc2", replayed=True),
    "capsules": table(tables.Capsules, "inp", replayed=True),
    "graph_of_the_batch": table(tables.BatchGraph, "inp", "mid"),
    "low_rank_adapters": table(tables.LoRA, "inp", "mid.base"),
    "gates_and_where": table(tables.GatedNet, "inp", "mid"),
    "in_place": table(tables.InPlace, "inp", "mid", replayed=True),
    "steps_of_a_solver": table(tables.Euler, "inp", "f", replayed=True),
    "nearest_code_word": table(tables.VectorQuantizer, "inp", "codebook"),
    "weights_rounded": table(tables.QuantizationAware, "mid", refused="'mid' is never called by QuantizationAware"),
    "wide_and_deep": table(tables.WideAndDeep, "embeddings.1", sent=("x",)),
    "categories_cross": table(tables.WideAndDeep, "embeddings.0", sent=("x",)),
    "cosine_classifier": table(tables.Cosine, "inp"),
    "columns_read_again": table(tables.Cosine, "film", refused="raw data never crosses"),
    "reparameterization": table(tables.VAE, "mu", draws=True, replayed=True),
    "other_values_in_evaluation": table(tables.VAE, "logvar", refused="other values cross in evaluation than in"),
    "loss_terms_returned": table(tables.VAEOutputs, "inp", refused="must have one output for this topology; it has 3"),
    "gradient_reversal": table(tables.Domains, "features", refused="it has 2: ['label', 'domain']"),
    "embeddings_renormalized": words(tables.Recommender, "item", "fc1"),
    "check_for_nan": table(tables.ChecksForNaN, "inp", "mid", replayed=True),
    "ensemble": table(tables.Ensemble, "members.2.0"),
    "model_output": table(tables.ByName, "encoder", "pooler", replayed=True),
}
IDIOMS = {**CONVOLUTIONS, **IMAGES, **SEQUENCES, **TRANSFORMERS, **TABLES}


def test_the_table_is_long_enough() -> None:
    assert len(IDIOMS) >= 90
    assert sum(idiom.refused is None for idiom in IDIOMS.values()) >= 60


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", thin([name for name, idiom in IDIOMS.items() if idiom.refused is None], 8))
def test_a_published_model_that_is_cut_trains_as_the_uncut_one_does(name: str) -> None:
    check_training(IDIOMS[name])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", thin([name for name, idiom in IDIOMS.items() if idiom.refused is not None], 4))
def test_a_published_model_that_is_not_cut_is_refused_in_one_line(name: str) -> None:
    idiom = IDIOMS[name]
    model = build(idiom)
    assert idiom.refused is not None
    with (
        left_alone(model),
        pytest.raises(InvalidInput, match=re.escape(idiom.refused)) as caught,
    ):
        topology_of(idiom, model, rows(idiom, 8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "idiom",
    [
        pytest.param(series(sequences.LastStep, "proj"), id="zeros_as_long_as_the_batch"),
        pytest.param(series(sequences.SequenceToSequence, "encoder"), id="parameter_expanded_to_the_batch"),
        pytest.param(series(transformers.Perceiver, "embed"), id="parameter_repeated_by_len"),
        pytest.param(table(tables.Capsules, "inp"), id="view_by_size"),
        pytest.param(image(images.InputNormNet, "stem"), id="device_and_type_of_another_partys_weights"),
        pytest.param(table(tables.GraphConvolution, "gc2"), id="constant_buffer_on_two_sides"),
    ],
)
def test_what_is_asked_for_its_shape_type_or_device_alone_is_not_read(idiom: Idiom) -> None:
    model = build(idiom)
    bottom, top = replay(model, read_cuts(model, idiom.at), rows(idiom, 8)).segments
    assert bottom[1] == ("x",)
    assert top[1] == bottom[2]
    assert not bottom[0].state_dict().keys() & top[0].state_dict().keys()
    assert bottom[0].state_dict().keys() | top[0].state_dict().keys() == model.state_dict().keys()


def test_outside_of_a_step_a_segment_has_its_own_weights_alone() -> None:
    idiom = image(images.InputNormNet, "stem")
    model = build(idiom)
    for segment, _, _ in replay(model, read_cuts(model, idiom.at), rows(idiom, 8)).segments:
        assert not any(tensor.is_meta for tensor in (*segment.parameters(), *segment.buffers()))
        assert {name for name, _ in segment.named_parameters()} <= segment.state_dict().keys()
