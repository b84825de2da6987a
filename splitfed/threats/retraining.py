"""Retrains a run's topology from fresh weights on other rows, as an attacker can on its own machine.

The copy uses the same executor, defenses and optimizers as the run, so an attack that learns from copies adapts to
every defense, including those that only change the loss.
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
    """An untrained copy of one replica of `engine`, with fresh weights; defenses draw afresh in every call.

    `feed(x)` returns the inputs of the topology for rows x.
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
        """Train on rows x (n, *shape) with labels y (n,); a last batch below the model's minimum is left out.

        `restart_every`: number of epochs after which optimizers are reset, as those of the run are after every round.
        `drop_last`: whether an incomplete last batch is left out if there is a whole one, as in the run. Raises
        `InvalidInput` if there are too few rows.
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
    """Return `topology` with copies of its modules whose weights are drawn from `seed` by their own initialization.

    Raises `InvalidInput` for a module with weights of its own and no `reset_parameters`.
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
