"""Models of the transformers package: what is built, what is refused, what a folder must hold, and runs with them."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import splitfed as sf
from splitfed.cli import main
from splitfed.core.errors import InvalidInput
from splitfed.core.random import stream
from splitfed.models.transformers import OneOutputModel, transformers
from splitfed.study.trust import code_of
from tests.examples import assert_same, refusal
from tests.models.tiny_transformers import OUTPUTS, TINY, TOKENS, WIDTH
from tests.study.examples import small, write

package: Any = importlib.import_module("transformers")

BERT = TINY["bert"]
TWO_BLOCKS = {**WIDTH, **TOKENS, "vocab_size": 17, "num_hidden_layers": 2}


def own_bert(**changes: Any) -> Any:
    """Return the class itself, of the same configuration."""
    config = package.BertConfig(**{**BERT.config, "num_labels": OUTPUTS, **changes})
    return package.BertForSequenceClassification(config)


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
def test_one_output_comes_of_a_model_whose_weights_are_the_classes_own(name: str) -> None:
    model = TINY[name].build()
    kind = getattr(package, TINY[name].architecture)
    assert isinstance(model, kind)
    assert model.training
    rows = TINY[name].rows(3)
    # Of an encoder without a head, every token's last state.
    assert model(rows).shape == ((3, 6, 16) if name == "t5" else (3, OUTPUTS))
    kind(model.config).load_state_dict(model.state_dict(), strict=True)


def test_the_seed_fixes_the_weights_and_torchs_own_generator_stays() -> None:
    with stream(1):
        first, drawn = BERT.build(seed=3), torch.rand(3)
    with stream(2):
        again, other, free = BERT.build(seed=3), BERT.build(seed=4), BERT.build(seed=None)
    with stream(1):
        assert torch.equal(torch.rand(3), drawn)
    assert_same(again.state_dict(), first.state_dict())
    weights = [model.state_dict()["bert.encoder.layer.0.attention.self.query.weight"] for model in (first, other, free)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_images_say_how_large_they_are_unless_the_configuration_does() -> None:
    vit = TINY["vit"]
    assert vit.build().config.image_size == 8
    assert vit.build().config.num_channels == 1
    wide = transformers((3, 8, 12), 2, architecture=vit.architecture, config=vit.config)
    assert wide(torch.rand(2, 3, 8, 12)).shape == (2, 2)
    assert wide.config.image_size == [8, 12]
    told = transformers((3, 8, 8), 2, architecture=vit.architecture, config={**vit.config, "image_size": 16})
    assert told.config.image_size == 16


def test_blocks_are_named_in_the_order_they_run() -> None:
    assert BERT.build().cuts == tuple(f"bert.encoder.layer.{i}" for i in range(3))
    # Lists inside of a block are no blocks.
    assert TINY["convnext"].build().cuts == ("convnext.encoder.stages.0", "convnext.encoder.stages.1")


def test_an_output_is_named_and_an_unknown_one_told() -> None:
    pooled = BERT.build(architecture="BertModel", output="pooler_output")
    assert pooled(BERT.rows()).shape == (8, 16)
    states = BERT.build(architecture="BertModel")
    assert states(BERT.rows()).shape == (8, 6, 16)
    text = "unknown output of BertModel: 'poler_output'; did you mean 'pooler_output'?"
    assert refusal(BERT.build(architecture="BertModel", output="poler_output"), BERT.rows()).startswith(text)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2"])
def test_padding_is_hidden_as_the_package_hides_it(name: str) -> None:
    """By one mask a row where that says the same; a decoder, which looks back alone, is given its own."""
    model = TINY[name].build().eval()
    assert model.masks_by_row or name == "gpt2"
    rows = TINY[f"{name}_masked"].rows()
    assert isinstance(rows, dict)
    kind = getattr(package, TINY[name].architecture)
    text = rows["attention_mask"].bool()
    with torch.no_grad():
        found = model(**rows)
        own = model.pick_output(kind.forward(model, **rows))
        changed = model(rows["input_ids"].masked_fill(~text, 7), rows["attention_mask"])
        unmasked = model(rows["input_ids"])
    if name != "bert":
        found, own, changed, unmasked = (one[text] for one in (found, own, changed, unmasked))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, changed, rtol=1e-4, atol=1e-5)
    # No token of a decoder sees padding, which is behind it.
    assert torch.allclose(found, unmasked, rtol=1e-4, atol=1e-5) is (name == "gpt2")


def test_padding_tokens_without_a_mask_do_not_stop_a_cut() -> None:
    """The package would look for them, and warn."""
    model = TINY["gpt2"].build(config={**TINY["gpt2"].config, "pad_token_id": 0})
    rows = TINY["gpt2"].rows().clone()  # type: ignore[union-attr]
    rows[:, -1] = 0
    assert len(sf.cut(model, model.cuts[:1], rows)) == 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no class": ({"architecture": None}, "architecture is missing; expected a class of the transformers package"),
    "unknown class": (
        {"architecture": "BertForSequenceClasification"},
        "unknown architecture 'BertForSequenceClasification'; did you mean 'BertForSequenceClassification'",
    ),
    "no model": ({"architecture": "BertConfig"}, "unknown architecture 'BertConfig'"),
    "no model of its own": ({"architecture": "BertPreTrainedModel"}, "unknown architecture 'BertPreTrainedModel'"),
    "a class by rule": ({"architecture": "AutoModel"}, "unknown architecture 'AutoModel'"),
    "two texts": (
        {"architecture": "T5ForConditionalGeneration"},
        "T5ForConditionalGeneration reads two texts, one for its encoder and one for its decoder; take its encoder",
    ),
    "two models": ({"architecture": "CLIPModel"}, "CLIPModel is made of several models (text_config, vision_config)"),
    "sound": ({"architecture": "Wav2Vec2Model"}, "Wav2Vec2Model reads input_values; expected a model of input_ids or"),
    "key": ({"config": {"hiden_size": 16}}, "unknown key of BertConfig: 'hiden_size'; did you mean 'hidden_size'"),
    "labels": (
        {"config": {"num_labels": 3}},
        "config key 'num_labels' is not allowed; outputs sets the number of labels",
    ),
    "cache": (
        {"config": {"use_cache": True}},
        "config key 'use_cache' is not allowed; cutting and training require its value",
    ),
    "type": ({"config": {"hidden_size": "wide"}}, "BertForSequenceClassification cannot be made: "),
    "heads": (
        {"config": {"hidden_size": 16, "num_attention_heads": 3}},
        "BertForSequenceClassification cannot be made: ValueError: The hidden size (16) is not a multiple of",
    ),
    "attention": ({"attention": "flash"}, "unknown attention 'flash' (allowed: eager, sdpa)"),
    "outputs": ({"outputs": 0}, "outputs=0 is not allowed; expected a whole number of at least 1"),
    "images": (
        {"shape": (1, 8, 8)},
        "BertForSequenceClassification cannot take rows of shape (1, 8, 8); expected (length",
    ),
    "long texts": ({"shape": (9,)}, "max_position_embeddings of the configuration is 8; a row has 9 tokens"),
    "mask": (
        {"architecture": "FNetModel", "shape": (2, 6), "config": {"vocab_size": 50}},
        "FNetModel takes no attention_mask; expected rows of shape (length,)",
    ),
    "folder": ({"folder": "nowhere"}, "folder nowhere is missing; expected one that save_pretrained wrote"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_line(case: str) -> None:
    changes, text = REFUSED[case]
    given = {"shape": (6,), "outputs": OUTPUTS, "architecture": BERT.architecture, "config": BERT.config, **changes}
    assert refusal(transformers, given.pop("shape"), given.pop("outputs"), **given).startswith(text)


def test_images_of_other_channels_are_refused() -> None:
    config = {**TINY["vit"].config, "num_channels": 3}
    text = "num_channels of the configuration is 3; the images have 1"
    assert refusal(TINY["vit"].build, config=config) == text


def test_without_the_package_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = "model 'transformers' needs the package transformers (import of transformers halted; None in sys.modules)"
    assert refusal(BERT.build) == f"{text}: install splitfed[transformers]"
    model = {"name": "transformers", "architecture": BERT.architecture, "config": TWO_BLOCKS}
    study = small(model=model, topology=[{"name": "vanilla", "cut": "bert.encoder.layer.0"}], attack=[], defense=None)
    assert main(["plan", str(write(tmp_path, study))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("install splitfed[transformers]")


def test_an_old_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for old in ("4.57.1", "5.2.9"):
        monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=old))
        assert refusal(BERT.build) == f"the package transformers is of version {old}; expected 5.3 or newer"


def test_the_package_is_imported_when_a_model_is_made_and_not_before() -> None:
    code = (
        "import sys, splitfed; assert callable(splitfed.models.transformers); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a BERT for four labels, as its own class writes them."""
    folder = tmp_path_factory.mktemp("saved")
    with stream(9):
        own_bert().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def from_folder(folder: Path, outputs: int = OUTPUTS, **changes: Any) -> OneOutputModel:
    return transformers((6,), outputs, folder=folder, **changes)


def test_a_saved_model_is_loaded_and_trains_without_network_and_foreign_code(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*given: object, **options: object) -> None:
        raise AssertionError("the network is asked")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, offline)
    monkeypatch.setattr(socket, "getaddrinfo", offline)
    (copied / "foreign.py").write_text(f"open({str(copied / 'noticed')!r}, 'w').close()\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = from_folder(copied)
    with stream(9):
        assert_same(model.state_dict(), own_bert().state_dict())
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert not (copied / "noticed").exists()


def test_keys_of_the_configuration_change_what_is_saved(saved: Path) -> None:
    model = from_folder(saved, config={"hidden_dropout_prob": 0.3})
    assert (model.config.hidden_dropout_prob, model.config.num_hidden_layers) == (0.3, 3)


def test_a_saved_model_is_measured_without_its_weights_before_it_is_made(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself refuses to load on a device without numbers, which left every folder unmeasured."""
    with torch.device("meta"):
        measured = from_folder(saved)
    assert all(weight.is_meta for weight in measured.parameters())
    needed = sum(weight.nbytes for weight in from_folder(saved).parameters())
    assert sum(weight.nbytes for weight in measured.parameters()) == needed
    making = importlib.import_module("splitfed.models.build")
    monkeypatch.setattr(making, "_memory", lambda: needed - 1)
    monkeypatch.setattr(making, "LARGE", 1)
    with pytest.raises(InvalidInput, match="model 'transformers' has weights of "):
        making.build("transformers", (6,), OUTPUTS, 0, folder=saved)


def test_a_model_of_too_many_layers_is_refused_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects without a single number of theirs are too many for any machine."""
    making = importlib.import_module("splitfed.models.build")
    monkeypatch.setattr(making, "MOST_MODULES", 500)
    deep = {**TWO_BLOCKS, "num_hidden_layers": 2**40}
    with pytest.raises(
        InvalidInput, match=r"^model 'transformers' has more than 500 modules \(layers and their parts\)$"
    ):
        making.build("transformers", (6,), OUTPUTS, 0, architecture="BertForSequenceClassification", config=deep)


def test_weights_that_a_folder_lacks_are_drawn_from_the_seed_and_told(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"classifier\.bias, classifier\.weight drawn from the seed$"):
        one, other = from_folder(saved, 2, seed=1), from_folder(saved, 2, seed=2)
    assert one(BERT.rows()).shape == (8, 2)
    assert not torch.equal(one.state_dict()["classifier.weight"], other.state_dict()["classifier.weight"])
    kept = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(one.state_dict()[kept], other.state_dict()[kept])
    with pytest.warns(UserWarning, match=r"bert\.pooler\.dense\.bias, bert\.pooler\.dense\.weight left out$"):
        from_folder(saved, architecture="BertForTokenClassification")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def in_parts(folder: Path) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")


def cut_short(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


BROKEN: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "no configuration": (
        without("config.json"),
        {},
        "holds no config.json; expected a folder that save_pretrained wrote",
    ),
    "no weights": (without("model.safetensors"), {}, "holds no model.safetensors"),
    "pickled weights": (
        pickled,
        {},
        "holds no model.safetensors; pickled weights (.bin) are not read, save them again",
    ),
    "a part": (in_parts, {}, "holds no part-2.safetensors"),
    "half a file": (cut_short, {}, "cannot be made: "),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), {}, "config.json in {} cannot be read: Expecting"),
    "an internal key": (
        with_config(_attn_implementation_internal="someone/kernel"),
        {},
        "config.json in {} has '_attn_implementation_internal', a key internal to the package that may name code",
    ),
    "an internal key inside": (with_config(rope={"x": [{"_experts_implementation_internal": "a/b"}]}), {}, "in {} has"),
    "a class of its own": (with_config(auto_map={"AutoModel": "a--b.C"}), {}, "config.json in {} has 'auto_map'"),
    "quantized": (with_config(quantization_config={"bits": 4}), {}, "holds quantized weights, which cannot be trained"),
    "another model": (
        with_config(),
        {"architecture": "GPT2LMHeadModel"},
        "holds a model of type 'bert'; GPT2LMHeadModel is a 'gpt2'",
    ),
    "another width": (with_config(), {"config": {"intermediate_size": 64}}, "has shape (32,); the model's has (64,)"),
    "no class": (with_config(architectures=None), {}, "architecture is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_lacks_something_is_refused(case: str, copied: Path) -> None:
    change, given, text = BROKEN[case]
    change(copied)
    assert text.format(copied) in refusal(from_folder, copied, **given)


def tokens(rows: int = 96, **changes: Any) -> sf.Dataset:
    return sf.data.markov_tokens(rows, length=8, classes=2, shortest=4, **changes)


def trained(data: sf.Dataset, folder: Path, **given: Any) -> sf.Run:
    """Train a BERT in a U-shape for two rounds, its texts of different lengths."""
    model = transformers(data.shape, 2, architecture=BERT.architecture, config=TWO_BLOCKS)
    example = {name: part.select(data.x[:8]) for name, part in data.features.items()}
    topology = sf.topologies.u_shaped(model, model.cuts, example=example)
    recording = sf.Recording(("server",))
    logging = sf.Logging(folder=folder, record=recording, **given)
    federation = data.clients(2, auxiliary=16, victims=16, seed=0)
    return sf.train(topology, federation, rounds=2, batch_size=16, schedule="splitfed_v1", logging=logging)


@pytest.mark.exhaustive
def test_a_run_on_tokens_is_resumed_attacked_and_exported(tmp_path: Path) -> None:
    def stop(done: int, rounds: int, metrics: Any) -> None:
        raise KeyboardInterrupt

    data = tokens()
    whole = trained(data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(data, tmp_path / "half", progress=stop)
    resumed = trained(data, tmp_path / "half", resume=True)
    assert_same(whole.state(), resumed.state())
    assert whole.history[-1]["test"] == resumed.history[-1]["test"]
    seen = whole.engine.view("server").select(kind="gradient").tensors()
    assert {len(values.shape) for values in seen.values()} == {3}
    # Gradients that come back for an example point where its label does; chance is one half.
    (found,) = whole.attack("direction")
    assert found.scores["attack"]["auc"].mean > 0.7
    state = whole.engine.topology.state_dict(whole.engine.modules(0))
    own = own_bert(**TWO_BLOCKS, num_labels=2)
    own.load_state_dict(state, strict=True)
    rows = {name: part.select(data.x[:8]) for name, part in data.features.items()}
    mine = transformers(data.shape, 2, architecture=BERT.architecture, config=TWO_BLOCKS).eval()
    mine.load_state_dict(state, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(mine(**rows), own.eval()(**rows).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_a_study_names_a_model_and_a_folder_beside_it(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data = {"name": "markov_tokens", "rows": 96, "length": 6, "classes": OUTPUTS, "victims": 4, "auxiliary": 8}
    study = small(
        data=data,
        model={"name": "transformers", "folder": "weights", "config": {"hidden_dropout_prob": 0.2}},
        training={"rounds": 1, "batch_size": 32},
        topology=[{"name": "vanilla", "cut": "bert.encoder.layer.0"}],
        defense=None,
        attack=[],
    )
    (tmp_path / "weights").symlink_to(saved)
    assert main(["run", str(write(tmp_path, study)), "--folder", str(tmp_path / "out")]) == 0
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert "folder" in (run / "config.toml").read_text()
    # A folder of weights is reached as a file of data is: by whoever wrote the study.
    assert (run / "mark.json").is_file()
    capsys.readouterr()
    study["model"]["config"] = {"hiden_dropout_prob": 0.2}
    assert main(["plan", str(write(tmp_path, study))]) == 2
    assert "unknown key of BertConfig: 'hiden_dropout_prob'; did you mean" in capsys.readouterr().err


def test_weights_outside_of_a_strangers_folder_are_not_read(tmp_path: Path, saved: Path) -> None:
    (tmp_path / "runs").mkdir()
    for path in (str(saved), "../saved", "~/saved"):
        text = re.escape(f"would read {path!r}: that can run code or read files of yours")
        with pytest.raises(InvalidInput, match=text):
            code_of(tmp_path / "runs", {"model": {"name": "transformers", "folder": path}}, trust=False)
    code_of(tmp_path / "runs", {"model": {"name": "transformers", "folder": "saved"}}, trust=False)


def test_a_piece_of_a_topology_is_made_of_a_configuration_alone(tmp_path: Path) -> None:
    piece = {"model": "transformers", "folder": "weights", "width": 4}
    topology = [{"name": "vertical", "bottoms": piece, "fusion": "sum", "top": {"model": "mlp"}, "labels": "server"}]
    study = small(model=None, topology=topology, defense=None, attack=[])
    with pytest.raises(InvalidInput, match="unknown key 'folder'"):
        sf.study.run.checked_study.check_study(study, "study.toml", tmp_path)
