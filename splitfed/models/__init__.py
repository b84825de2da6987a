"""Small models by name, and `build`, which makes any model from a seed; nothing is imported before use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitfed.models.build import build as build
    from splitfed.models.fedavg_cnn import fedavg_cnn as fedavg_cnn
    from splitfed.models.lenet import lenet as lenet
    from splitfed.models.mlp import mlp as mlp
    from splitfed.models.resnet8 import resnet8 as resnet8
    from splitfed.models.resnet18 import resnet18 as resnet18
    from splitfed.models.vgg11 import vgg11 as vgg11

_NAMES = ("build", "fedavg_cnn", "lenet", "mlp", "resnet8", "resnet18", "vgg11")


class _Package(ModuleType):
    """A package whose functions keep their names although their files bear the same ones."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing splitfed.models.mlp makes the import system bind the file to `mlp`: bind its function.
        if isinstance(value, ModuleType) and name in _NAMES:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def __dir__() -> list[str]:
    return sorted(_NAMES)
