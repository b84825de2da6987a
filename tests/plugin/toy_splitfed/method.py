"""Toy method: trains as the schedule says and adds nothing.

Paper: none; an example of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitfed.federated.base import Method


@dataclass(frozen=True, kw_only=True)
class ToyMethod(Method):
    """A method without a local objective and without uploads."""
