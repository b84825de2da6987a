"""Trains a run's topology once more, from fresh weights and on other rows: what an attacker can do on its own machine.

The copy goes through the same executor as the run, with the same defenses and optimizers, so an attack that learns
from copies adapts to every defense, also to those that only change the loss.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, generator, stream
from splitfed.core.topology import Topology
from splitfed.engines.base import RunSetup
from splitfed.engines.factory import make_engine
from splitfed.threats.imitated_defenses import Feed


class Rerun:
    """A copy of one replica of `engine`, as its parties would be before training; defenses draw afresh at every call.

    `feed(x)` returns what each input of the topology gets of rows x.
    """

    def __init__(self, engine: RunSetup, replica: int, feed: Feed, seed: int) -> None:
        topology = fresh(engine.topologies[replica], derive(seed, "fresh"))
        if any(head.target is not None for head in topology.heads):
            raise InvalidInput(f"topology {topology.name!r} learns several label sets; a copy needs just the main one")
        facts = engine.all_facts[replica]
        self._engine = make_engine(
            topology,
            facts,
            1,
            defenses=engine.defenses,
            optims=engine.optims,
            seed=derive(seed, "copy"),
            device=engine.device,
            accumulate=engine.accumulate,
        )
        self._least = max([2 if facts.batch_norm else 1, *(d.least_rows for d in engine.defenses)])
        self._feed, self._seed, self._calls = feed, seed, 0

    def train(
        self,
        x: Tensor,
        y: Tensor,
        epochs: int,
        batch_size: int,
        restart_every: int | None = None,
        drop_last: bool = False,
    ) -> None:
        """Train on rows x (n, *shape) with labels y (n,); a last batch too small for the model is left out.

        `restart_every`: after how many epochs optimizers forget their state, as the run's do after every round.
        `drop_last`: any last incomplete batch behind a whole one is left out, as the run does.
        """
        if min(len(x), batch_size) < self._least:
            raise InvalidInput(
                f"{len(x)} rows in batches of {batch_size} are too few for a copy: it needs {self._least}"
            )
        least = batch_size if drop_last and len(x) >= batch_size else self._least
        self._engine.own(0, "train", self._feed(x), {head.value: y for head in self._engine.topology.heads})
        for epoch in range(epochs):
            if restart_every is not None and epoch % restart_every == 0:
                self._engine.restart_optimizers()
            order = torch.randperm(len(x), generator=generator(self._seed, "order", epoch))
            self._engine.train(0, epoch, [rows for rows in order.split(batch_size) if len(rows) >= least])
            self._engine.end_round()

    def predict(self, x: Tensor) -> Tensor:
        """Return the first head's output for rows x: (n, outputs)."""
        self._calls += 1
        self._engine.own(0, "query", self._feed(x), {})
        found = self._engine.predict(0, "query", "query", self._calls)
        return found.outputs[self._engine.topology.heads[0].value].to(self._engine.device)


def fresh(topology: Topology, seed: int) -> Topology:
    """Return `topology` with copies of its modules, every weight drawn anew from `seed` as its module draws it.

    Raises `InvalidInput` for a module with weights of its own and no `reset_parameters`: nobody can say how those
    are drawn.
    """
    # Copied together, so that weights which a party shares between its segments stay shared.
    modules = copy.deepcopy({s.name: s.module for s in topology.segments})
    with stream(seed), torch.no_grad():
        for segment, whole in modules.items():
            for place, module in whole.named_modules():
                _redraw(segment, place, module)
    return replace(
        topology, segments=tuple(replace(s, module=modules[s.name], original=None) for s in topology.segments)
    )


def _redraw(segment: str, place: str, module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
        return
    for name, _ in module.named_parameters(place, recurse=False):
        raise InvalidInput(
            f"weight {name!r} of segment {segment!r} belongs to no module with reset_parameters: "
            "a fresh copy cannot be drawn"
        )
