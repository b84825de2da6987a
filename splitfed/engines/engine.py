"""The contract of an engine: it places parties, runs steps over them, and moves weights between them."""

from __future__ import annotations

from typing import Protocol

from splitfed.engines.base import Batches, RunSetup, Stateful, Trainer
from splitfed.engines.inference import Inference
from splitfed.engines.observers import Observable
from splitfed.engines.party_data import PartyData


class Engine(PartyData, Inference, Observable, Trainer, RunSetup, Stateful, Protocol):
    """All contracts of an engine, for the code that leads a run; other code names only the contract it needs."""

    def train(
        self, replica: int, epoch: int, batches: Batches, first: int = 0, part: str = "train", task: float = 1.0
    ) -> list[float]:
        """Train `replica` on `batches` of `part`; return the total loss of each step that had rows.

        `task` multiplies the losses of the heads; at 0 no label is sent.
        """
