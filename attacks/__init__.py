"""Attacks: what a curious party can infer from its view, one file an attack; exports every registered attack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitfed.core.lazy_package import make_lazy
from splitfed.registry import TABLES

if TYPE_CHECKING:
    from splitfed.attacks.base import (
        Attack as Attack,
        Knowledge as Knowledge,
        Needs as Needs,
        Outcome as Outcome,
        Phase as Phase,
        Target as Target,
    )

    def __getattr__(name: str) -> Any: ...


_TARGETS = (target.partition(":") for target in TABLES["attacks"].values())
make_lazy(__name__, {name: (module, name) for module, _, name in _TARGETS if module.startswith(f"{__name__}.")})
