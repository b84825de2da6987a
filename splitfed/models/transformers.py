"""Transformers: a model of the `transformers` package, from a configuration or from a local folder of weights.

Paper: Wolf et al., "Transformers: State-of-the-Art Natural Language Processing", EMNLP 2020 (system demonstrations), of
the package; every class of it names its own.

Deviates from the package's defaults: `forward` takes tokens, with a mask or without, or images, and returns one tensor;
keys and values are not cached; attention is computed by plain operations ("eager"), which have the second derivatives
that attacks on gradients need; experts of a mixture are computed by `batched_mm`, whose shapes do not depend on the
tokens. The package is imported when a model is made. Nothing is downloaded, no pickled weights are read, and no code in
a folder is run.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput, check_count, check_names, describe_error
from splitfed.core.nearest_names import nearest_names
from splitfed.core.random import generator, initialization

_OUTPUTS = ("logits", "last_hidden_state")
"""Default outputs, of which the first that a model has is returned."""

_LABELS = frozenset(("num_labels", "id2label", "label2id"))
_OUTPUT_KEYS = ("return_dict", "output_hidden_states", "output_attentions")
_INNER_KEYS = ("architectures", "is_encoder_decoder", "transformers_version", "attn_implementation")
_SET_HERE = frozenset((*_OUTPUT_KEYS, *_INNER_KEYS, "experts_implementation", "use_cache", "dtype", "torch_dtype"))


# Keys with plain values that some versions of the package write into every folder.
_HARMLESS = frozenset(("_name_or_path", "_commit_hash", "_num_labels", "_attn_implementation_autoset"))
_CODE_KEYS = frozenset(("auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"))


class OneOutputModel(nn.Module):
    """Mixed into a class of the package: `forward` returns one selected output, and takes only arguments named here.

    Names of weights are those of the class, so that they load into it with `strict=True`. `cuts`: its blocks, as a
    topology names them. `masks_by_row`: whether one mask for all tokens of a row is equivalent for its attention.
    """

    cuts: tuple[str, ...]
    output_name: str | None
    masks_by_row: bool

    def pick_output(self, result: Mapping[str, Any]) -> Tensor:
        """Return the selected output among those of `result`."""
        found = {name: value for name, value in result.items() if isinstance(value, Tensor)}
        name = self.output_name or next((one for one in _OUTPUTS if one in found), "logits")
        check_names(f"output of {type(self).__name__}:", found, name)
        return found[name]


class TokenModel(OneOutputModel):
    """A model of token ids."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return one output, (rows, ...), for ids and a mask, (rows, length) int64 each: 1 for text, 0 for padding."""
        if attention_mask is None:
            return self.pick_output(super().forward(input_ids=input_ids))
        if self.masks_by_row:
            # A mask of four dimensions is used unchanged; for one of two, the package branches on its values.
            hidden = attention_mask.eq(0)[:, None, None, :]
            least = torch.finfo(torch.float32).min
            attention_mask = torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, least)
        return self.pick_output(super().forward(input_ids=input_ids, attention_mask=attention_mask))


class ImageModel(OneOutputModel):
    """A model of images."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return one output, (rows, ...), for images (rows, channels, height, width)."""
        return self.pick_output(super().forward(pixel_values=pixel_values))


_KINDS: Mapping[str, type[OneOutputModel]] = {"input_ids": TokenModel, "pixel_values": ImageModel}
"""Name of a class's first argument -> the mixin for it."""


def transformers(
    shape: tuple[int, ...],
    outputs: int,
    *,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    output: str | None = None,
    attention: Literal["eager", "sdpa"] = "eager",
    seed: int | None = 0,
) -> OneOutputModel:
    """Return a model of the transformers package, of the class `architecture`, in training mode.

    shape: (length,) of token ids, (2, length) of ids with their attention mask, or (channels, height, width) of images.
    `config`: keys of the class's configuration, with the class's defaults for the others; images determine the channels
    and, unless the key is given, the image size, and `outputs` the number of labels. `folder`: configuration and
    weights as `save_pretrained` writes them, of which `config` changes single keys; `architecture` is then by default
    the class that the folder names. Missing weights are drawn from the seed, with a warning. `output`: the output to
    return; default "logits", otherwise "last_hidden_state". `attention`: "sdpa" is faster for long texts, but has no
    second derivatives. The weights depend on `folder` and `seed` only, without a change of torch's global generator;
    seed None draws from that generator.

    Raises `InvalidInput` without the package (install `splitfed[transformers]`), for an unknown class or key, for a
    class that reads two texts, or neither tokens nor images, for a shape that does not match, and for an incomplete
    folder.
    """
    check_count("outputs", outputs, low=1)
    check_names("attention", ("eager", "sdpa"), attention)
    package = _import_package()
    saved = None if folder is None else _SavedModel(folder)
    kind = _find_class(package, architecture, saved)
    settings = _check_settings(kind, dict(config or {}), shape, saved)
    settings |= {"num_labels": outputs, "attn_implementation": attention, "experts_implementation": "batched_mm"}
    with _quiet(package), initialization(seed):
        try:
            made = kind(kind.config_class(**settings)) if saved is None else saved.load(kind, settings)
        except InvalidInput:
            raise
        except Exception as error:  # whatever a configuration raises that its class does not take
            raise InvalidInput(f"{kind.__name__} cannot be made: {describe_error(error)}") from error
    _check_shape(made, kind, shape)
    bases = (_KINDS[kind.main_input_name], kind)
    made.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
    assert isinstance(made, OneOutputModel)
    made.cuts, made.output_name, made.masks_by_row = _list_blocks(made), output, False
    for module in made.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It computes with a number read from the tokens, which other parties do not have.
            vars(module)["warn_if_padding_and_no_attention_mask"] = _warn_of_nothing
    if isinstance(made, TokenModel) and _takes_mask(kind):
        made.masks_by_row = _find_mask(made, kind, shape[-1])
    model: OneOutputModel = made.train()
    return model


def _import_package() -> Any:
    """Import and return the package; raise `InvalidInput` if it is missing or too old."""
    try:
        import transformers as package
    except ImportError as error:
        raise InvalidInput(
            f"model 'transformers' needs the package transformers ({_one_line(error)}): install splitfed[transformers]"
        ) from None
    # Older versions download and run code if a configuration has a certain internal key.
    if tuple(int(part) for part in re.findall(r"\d+", package.__version__)[:2]) < (5, 3):
        raise InvalidInput(f"the package transformers is of version {package.__version__}; expected 5.3 or newer")
    return package


class _SavedModel:
    """A checked local folder written by `save_pretrained`: its configuration, and all weights as safetensors."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser()
        if not self.path.is_dir():
            found = "is a file" if self.path.exists() else "is missing"
            raise InvalidInput(f"folder {self.path} {found}; expected one that save_pretrained wrote")
        self.config = self._read("config.json")
        if internal := sorted(set(_internal_keys(self.config))):
            raise InvalidInput(
                f"config.json in {self.path} has {internal[0]!r}, a key internal to the package that may name code to "
                "load; remove it"
            )
        if self.config.get("quantization_config"):
            raise InvalidInput(f"{self.path} holds quantized weights, which cannot be trained; save them in full")
        index = "model.safetensors.index.json"
        files = ["model.safetensors"]
        if not (self.path / files[0]).is_file() and (self.path / index).is_file():
            weights = self._read(index).get("weight_map")
            files = sorted(set(weights.values())) if isinstance(weights, dict) else [index]
        missing = [name for name in files if not (self.path / name).is_file()]
        if missing:
            pickled = any(self.path.glob("*.bin"))
            why = "; pickled weights (.bin) are not read, save them again by save_pretrained" if pickled else ""
            raise InvalidInput(f"{self.path} holds no {', '.join(missing)}{why}")

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text("utf-8"))
        except FileNotFoundError:
            raise InvalidInput(f"{self.path} holds no {name}; expected a folder that save_pretrained wrote") from None
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{name} in {self.path} cannot be read: {_one_line(error)}") from None
        if not isinstance(found, dict):
            raise InvalidInput(f"{name} in {self.path} holds a {type(found).__name__}; expected an object")
        return found

    @property
    def architecture(self) -> str | None:
        """The class that the weights were saved from; None if the folder does not name it."""
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else None

    def load(self, kind: Any, settings: Mapping[str, Any]) -> Any:
        """Return a `kind` with these weights in float32; warn of weights that are newly drawn, or left out."""
        local = {"local_files_only": True, "trust_remote_code": False}
        before = kind.config_class.from_pretrained(self.path, **local).num_labels
        config = kind.config_class.from_pretrained(self.path, **local, **settings)
        if torch.get_default_device().type == "meta":
            # For measuring only; the package reads no weights there.
            return kind(config)
        model, info = kind.from_pretrained(
            self.path,
            config=config,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation=settings["attn_implementation"],
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **local,
        )
        labels = before, settings["num_labels"]
        other = sorted((name, tuple(there), tuple(here)) for name, there, here in info["mismatched_keys"])
        for name, there, here in other:
            # A head with another number of labels is newly drawn; nothing else may differ.
            if labels[0] == labels[1] or (there[:1], here[:1]) != ((labels[0],), (labels[1],)):
                raise InvalidInput(f"weight {name!r} in {self.path} has shape {there}; the model's has {here}")
        drawn = {*info["missing_keys"], *(name for name, _, _ in other)}
        if not set(model.state_dict()) - drawn:
            raise InvalidInput(f"{self.path} holds no weight of {kind.__name__}")
        texts = [
            f"{_some(names)} {what}"
            for names, what in ((drawn, "drawn from the seed"), (info["unexpected_keys"], "left out"))
            if names
        ]
        if texts:
            # From here to the caller of the builder.
            warnings.warn(f"{kind.__name__} from {self.path}: {'; '.join(texts)}", UserWarning, stacklevel=3)
        return model


def _internal_keys(config: object) -> Iterator[str]:
    """Yield the keys, at any depth, that are internal to the package or that name code."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if (key.startswith("_") and key not in _HARMLESS) or key in _CODE_KEYS:
            yield key
        yield from _internal_keys(value)
    for value in config if isinstance(config, list) else ():
        yield from _internal_keys(value)


def _find_class(package: Any, name: str | None, saved: _SavedModel | None) -> Any:
    """Return the class of the package named by `name`, or else by the folder; refuse unsupported ones."""
    name = name or (None if saved is None else saved.architecture)
    if name is None:
        raise InvalidInput("architecture is missing; expected a class of the transformers package")
    try:
        found: Any = getattr(package, name, None)
    except ImportError as error:
        raise InvalidInput(f"architecture {name!r} cannot be imported: {_one_line(error)}") from error
    is_model = isinstance(found, type) and issubclass(found, package.PreTrainedModel)
    if not is_model or name.endswith("PreTrainedModel"):
        models = [one for one in dir(package) if one.endswith("Model") or "For" in one or "Head" in one]
        named = [one for one in models if not one.startswith("Auto") and "pretrained" not in one.lower()]
        near = nearest_names(name, named, cutoff=0.7)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise InvalidInput(
            f"unknown architecture {name!r}{hint} (expected a model class of transformers {package.__version__})"
        )
    if "decoder_input_ids" in inspect.signature(found.forward).parameters:
        raise InvalidInput(
            f"{name} reads two texts, one for its encoder and one for its decoder; take its encoder alone"
        )
    if found.config_class.sub_configs:
        parts = ", ".join(sorted(found.config_class.sub_configs))
        raise InvalidInput(f"{name} is made of several models ({parts}); take one of them")
    if found.main_input_name not in _KINDS:
        raise InvalidInput(f"{name} reads {found.main_input_name}; expected a model of {' or '.join(_KINDS)}")
    if saved is not None and saved.config.get("model_type") != found.config_class.model_type:
        there = saved.config.get("model_type")
        raise InvalidInput(
            f"{saved.path} holds a model of type {there!r}; {name} is a {found.config_class.model_type!r}"
        )
    return found


def _check_settings(
    kind: Any, given: dict[str, Any], shape: Sequence[int], saved: _SavedModel | None
) -> dict[str, Any]:
    """Return the configuration: `given` keys and those that follow from the shape; raise `InvalidInput` for others."""
    taken = {*inspect.signature(kind.config_class.__init__).parameters, *kind.config_class.attribute_map}
    allowed = taken - _LABELS - _SET_HERE - {"self", "kwargs"}
    for key in given:
        if key in _LABELS:
            raise InvalidInput(f"config key {key!r} is not allowed; outputs sets the number of labels")
        if key in _SET_HERE:
            raise InvalidInput(f"config key {key!r} is not allowed; cutting and training require its value")
        check_names(f"key of {kind.config_class.__name__}:", allowed, key)
    tokens = kind.main_input_name == "input_ids"
    if min(shape) < 1 or (len(shape) != 1 and (len(shape) != 2 or shape[0] != 2) if tokens else len(shape) != 3):
        row = "(length,) of tokens, or (2, length) with their mask" if tokens else "(channels, height, width)"
        raise InvalidInput(f"{kind.__name__} cannot take rows of shape {tuple(shape)}; expected {row}")
    if len(shape) == 2 and not _takes_mask(kind):
        raise InvalidInput(f"{kind.__name__} takes no attention_mask; expected rows of shape (length,)")
    settings = dict(given)
    if not tokens and saved is None:
        height, width = shape[1:]
        implied = {"num_channels": shape[0], "image_size": height if height == width else [height, width]}
        settings = {key: value for key, value in implied.items() if key in allowed} | settings
    if "use_cache" in taken:
        settings["use_cache"] = False
    return settings


def _takes_mask(kind: Any) -> bool:
    return "attention_mask" in inspect.signature(kind.forward).parameters


def _check_shape(model: Any, kind: Any, shape: Sequence[int]) -> None:
    """Raise `InvalidInput` for images of other channels, and texts longer than the positions, of the configuration."""
    channels = getattr(model.config, "num_channels", None)
    if kind.main_input_name == "pixel_values" and channels not in (None, shape[0]):
        raise InvalidInput(f"num_channels of the configuration is {channels}; the images have {shape[0]}")
    longest = getattr(model.config, "max_position_embeddings", None)
    if kind.main_input_name == "input_ids" and isinstance(longest, int) and 0 < longest < shape[-1]:
        raise InvalidInput(f"max_position_embeddings of the configuration is {longest}; a row has {shape[-1]} tokens")


def _find_mask(model: Any, kind: Any, length: int) -> bool:
    """Return whether one mask for all tokens of a row gives the same results as the mask that the model makes itself.

    Measured on artificial tokens of that length. False for a model with causal or local attention.
    """
    tokens = torch.randint(1, model.config.vocab_size, (2, length), generator=generator(0, "tokens to mask"))
    mask = torch.ones_like(tokens)
    mask[1, (length + 1) // 2 :] = 0
    model.eval()
    model.masks_by_row = True
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            by_row = model(tokens, mask)
            own = model.pick_output(kind.forward(model, input_ids=tokens, attention_mask=mask))
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, KeyError):
            return False  # It says so itself when it is cut.
    if own.dim() > 2 and own.shape[:2] == mask.shape:
        # Results at padding positions do not matter.
        by_row, own = by_row[mask.bool()], own[mask.bool()]
    return torch.allclose(by_row, own, rtol=1e-3, atol=1e-5 * max(1.0, float(own.abs().max())))


def _list_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all blocks: the members of its lists of modules that are in no other such list."""
    lists = {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{name}.{number}" for name in outer for number in range(lists[name]))


@contextmanager
def _quiet(package: Any) -> Iterator[None]:
    """Suppress progress bars and log messages of the package below errors; this module gives its own warnings."""
    log = package.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _warn_of_nothing(*given: Any) -> None:
    """Replace a warning of the package that would read tokens."""


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
