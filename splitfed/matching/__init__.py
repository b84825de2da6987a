"""ExpertMatcher: a client finds the expert model that fits its data, without sending its data; imported on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitfed.matching.autoencoder import Autoencoder as Autoencoder
    from splitfed.matching.client import Client as Client
    from splitfed.matching.matcher import Match as Match
    from splitfed.matching.matcher import Matcher as Matcher
    from splitfed.matching.measures import MEASURES as MEASURES
    from splitfed.matching.repository import Expert as Expert
    from splitfed.matching.repository import Repository as Repository

_MODULES = {
    "Autoencoder": "autoencoder",
    "Client": "client",
    "Expert": "repository",
    "MEASURES": "measures",
    "Match": "matcher",
    "Matcher": "matcher",
    "Repository": "repository",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
