"""Models of the transformers package with two or three blocks of 16 numbers, dropout on, and rows for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from splitfed.core.random import generator
from splitfed.models.transformers import OneOutputModel, transformers

OUTPUTS = 4


@dataclass(frozen=True)
class Tiny:
    """A class of the package, keys of its configuration, and the shape of a row."""

    architecture: str
    config: Mapping[str, Any]
    shape: tuple[int, ...] = (6,)
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **changes: Any) -> OneOutputModel:
        given = {"architecture": self.architecture, "config": self.config, **self.options, **changes}
        return transformers(self.shape, OUTPUTS, **given)

    def rows(self, count: int = 8) -> Tensor | dict[str, Tensor]:
        """Return rows as a model takes them: tokens, tokens with a mask that hides some, or images."""
        drawn = generator(1, "rows")
        if len(self.shape) == 3:
            return torch.rand(count, *self.shape, generator=drawn)
        ids = torch.randint(1, 50, (count, self.shape[-1]), generator=drawn)
        if len(self.shape) == 1:
            return ids
        lengths = torch.randint(2, self.shape[-1] + 1, (count, 1), generator=drawn)
        mask = (torch.arange(self.shape[-1]) < lengths).long()
        return {"input_ids": ids * mask, "attention_mask": mask}


WIDTH = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"vocab_size": 50, "max_position_embeddings": 8}
PATCHES = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
DECODER = {**WIDTH, **TOKENS, "num_key_value_heads": 1, "attention_dropout": 0.1, "tie_word_embeddings": False}
DISTILBERT = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32}
GPT2 = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 3, "n_head": 2}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 2, 1], "layer_type": "basic"}
MOBILENET = {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4, "classifier_dropout_prob": 0.2}
CONVNEXT = {"patch_size": 2, "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "drop_path_rate": 0.2}
IMAGE = (1, 8, 8)

TINY: Mapping[str, Tiny] = {
    "bert": Tiny("BertForSequenceClassification", {**WIDTH, **TOKENS}),
    "bert_masked": Tiny("BertForSequenceClassification", {**WIDTH, **TOKENS}, (2, 6)),
    "distilbert": Tiny("DistilBertForSequenceClassification", {**DISTILBERT, **TOKENS}),
    "distilbert_masked": Tiny("DistilBertForSequenceClassification", {**DISTILBERT, **TOKENS}, (2, 6)),
    "gpt2": Tiny("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "gpt2_masked": Tiny("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}, (2, 6)),
    "llama": Tiny("LlamaForCausalLM", DECODER),
    "qwen2": Tiny("Qwen2ForCausalLM", DECODER),
    "vit": Tiny("ViTForImageClassification", {**WIDTH, **PATCHES, "patch_size": 4}, IMAGE),
    "resnet": Tiny("ResNetForImageClassification", RESNET, IMAGE),
    "mobilenet_v2": Tiny("MobileNetV2ForImageClassification", MOBILENET, (1, 32, 32)),
    "convnext": Tiny("ConvNextForImageClassification", CONVNEXT, IMAGE),
    "t5": Tiny("T5EncoderModel", T5),
    "t5_masked": Tiny("T5EncoderModel", T5, (2, 6)),
}
