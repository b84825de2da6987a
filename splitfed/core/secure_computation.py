"""The contract of a secure computation: segments of a topology that are computed on values which nobody there can read.

A topology carries one as plain data. What a run, its plan and its adversaries need of it is named here as
"module:object", and found by `splitfed.registry.resolve` in the rooms that need it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True)
class SecureComputation(ABC):
    """How the parties of some roles compute on values that they cannot read.

    `name`: under which a study and a report have it. `parties`: the `PartyMaker` of its runs
    (`splitfed.engines.party_maker`), `plan`: its `ComputationPlan` (`splitfed.planning.computation`), `views`: its
    `ComputationViews` (`splitfed.threats.computation_views`). `refusals`: what cannot be had beside it -> why, the
    end of a sentence. `own_messages`: kinds of messages that its runs have besides -> what they hold.
    """

    name: ClassVar[str]
    parties: ClassVar[str]
    plan: ClassVar[str]
    views: ClassVar[str]
    refusals: ClassVar[Mapping[str, str]]
    own_messages: ClassVar[Mapping[str, str]]

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is called among others of its name, such as the name of its protocol."""

    @property
    @abstractmethod
    def hidden(self) -> frozenset[str]:
        """The kinds of messages of a training step whose values cross unreadable: "activation", "gradient"."""

    @abstractmethod
    def describe(self) -> str:
        """Return in a few words how values cross."""

    @abstractmethod
    def check_installed(self) -> None:
        """Raise `InvalidInput` naming the package that is needed and not installed."""

    @abstractmethod
    def with_key_folder(self, folder: str | os.PathLike[str] | None) -> Self:
        """Return the same with its secret keys kept in `folder`, None for in no file."""
