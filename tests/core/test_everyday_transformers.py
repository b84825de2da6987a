"""Models of the transformers package as people wrap them by hand: padding masks, warnings, hidden states, positions."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.topology import Topology
from splitfed.topologies import u_shaped, vanilla
from tests.core.training_beside import CLASSES, built, check_trains_beside
from tests.thinning import thin

package: Any = importlib.import_module("transformers")

LENGTH, WORDS = 6, 32
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
COMMON = {**TOKENS, **SIZES, "max_position_embeddings": 16}
GPT = {**TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "use_cache": False}
T5 = {**TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
RELATIVE = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
}

FAMILIES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "Bert": ("BertModel", COMMON, "encoder.layer.0", "encoder.layer.1"),
    "Roberta": ("RobertaModel", {**COMMON, "pad_token_id": 1}, "encoder.layer.0", "encoder.layer.1"),
    "GPT2": ("GPT2Model", GPT, "h.0", "h.1"),
    "Llama": ("LlamaModel", {**COMMON, "use_cache": False}, "layers.0", "layers.1"),
    "Mistral": (
        "MistralModel",
        {**COMMON, "use_cache": False, "num_key_value_heads": 1, "sliding_window": 4},
        "layers.0",
        "layers.1",
    ),
    "T5": ("T5EncoderModel", T5, "encoder.block.0", "encoder.block.1"),
    "DebertaV2": ("DebertaV2Model", {**COMMON, **RELATIVE}, "encoder.layer.0", "encoder.layer.1"),
}


class Classifier(nn.Module):
    """A model of the package, the mean of its last states over the words that are there, and a layer."""

    def __init__(self, family: str, attention: str = "eager", **config: Any) -> None:
        super().__init__()
        name, sizes, *_ = FAMILIES[family]
        kind = getattr(package, name)
        drop = {key: 0.0 for key in vars(kind.config_class()) if "dropout" in key or key.endswith("pdrop")}
        settings = {**sizes, **drop, "attn_implementation": attention, **config}
        self.model = kind(kind.config_class(**settings))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return {"logits": self.head(states.mean(1))}


def words(masked: bool = True) -> dict[str, Tensor]:
    """Batches of four texts: with padding, without, with, and one that ends early."""
    drawn = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, WORDS, (16, LENGTH), generator=drawn), torch.ones(16, LENGTH, dtype=torch.int64)
    for row, length in ((1, 3), (2, 5), (9, 2), (11, 4), (15, 1)):
        mask[row, length:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids, "attention_mask": mask} if masked else {"input_ids": ids}


def cut_for(builder: Any, family: str, model: nn.Module, rows: Mapping[str, Tensor], **given: Any) -> Topology:
    first, second = (f"model.{name}" for name in FAMILIES[family][2:])
    at = first if builder is vanilla else (first, second)
    topology: Topology = builder(model, at, example={name: x[:8] for name, x in rows.items()}, **given)
    return topology


@pytest.mark.parametrize(("family", "attention"), thin(itertools.product(FAMILIES, ["eager", "sdpa"]), 14))
def test_a_mask_of_padding_is_given_by_hand(family: str, attention: str) -> None:
    if family == "DebertaV2" and attention == "sdpa":
        pytest.skip("it has no other attention than its own")
    model, rows = built(Classifier, family, attention), words()
    # It multiplies the mask by itself, which is the mask as it is.
    named = {"sent_inputs": ("attention_mask",)} if family == "DebertaV2" else {}
    topology = cut_for(vanilla, family, model, rows, **named)
    # The server gets what hides padding, and no words.
    assert "input_ids" not in {value for edge in topology.crossings for value in edge.values}
    near = 1e-6 if family in ("T5", "DebertaV2") else 0.0
    check_trains_beside(model, topology, rows, near=near)


@pytest.mark.parametrize("family", thin(["Bert", "Llama"], 2))
def test_a_mask_of_padding_in_a_u_shape(family: str) -> None:
    model, rows = built(Classifier, family, "sdpa"), words()
    check_trains_beside(model, cut_for(u_shaped, family, model, rows), rows)


@pytest.mark.parametrize("family", thin(["Bert", "GPT2", "Llama"], 3))
def test_padding_without_a_mask_is_warned_of_by_who_holds_the_words(family: str) -> None:
    model, rows = built(Classifier, family), words(masked=False)
    topology = cut_for(vanilla, family, model, rows)
    assert [len(edge.values) for edge in topology.crossings] == [1]
    check_trains_beside(model, topology, rows)


class MixesStates(Classifier):
    """Reads the states behind every block, those of the client among them, and has the attentions returned too."""

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        found = self.model(input_ids=input_ids, output_hidden_states=True, output_attentions=True)
        mixed = torch.stack(found.hidden_states).mean(0)
        return {"logits": self.head(mixed.mean(1)), "states": found.hidden_states, "attentions": found.attentions}


@pytest.mark.parametrize(("family", "builder"), thin([("Bert", vanilla), ("Llama", vanilla), ("Llama", u_shaped)], 3))
def test_hidden_states_of_all_parties_are_read(family: str, builder: Any) -> None:
    model, rows = built(MixesStates, family), words(masked=False)
    with pytest.raises(InvalidInput, match=r"what a hook takes out of a submodule .* name the output that is used"):
        cut_for(builder, family, model, rows)
    topology = cut_for(builder, family, model, rows, output="logits")
    check_trains_beside(model, topology, rows, output="logits", near=1e-6)


def test_hidden_states_that_nobody_reads_cross_nowhere() -> None:
    config = package.BertConfig(**COMMON, num_labels=CLASSES, output_hidden_states=True, output_attentions=True)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config._attn_implementation = "eager"
    model, rows = built(package.BertForSequenceClassification, config), words()
    topology = vanilla(model, "bert.encoder.layer.0", example={n: x[:8] for n, x in rows.items()}, output="logits")
    assert {value for edge in topology.crossings for value in edge.values} == {"all", "bert_encoder_layer_0", "where"}
    check_trains_beside(model, topology, rows, output="logits")
