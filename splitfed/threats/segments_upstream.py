"""The upstream function of a party: from the raw input to what arrives there, or to the outputs, from known weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense, concatenate_values, penalty_term
from splitfed.core.defense_context import Context
from splitfed.core.messages import Stamp
from splitfed.core.probe import Facts
from splitfed.core.step_plan import segment_plans
from splitfed.core.topology import Edge, Topology
from splitfed.threats.imitated_defenses import ImitatedStates, training_context


class _Penalties(NamedTuple):
    """The terms that the defenses add to the senders' losses in `epoch`, collected on a walk."""

    epoch: int
    terms: list[Tensor]


class Upstream:
    """Differentiable in its input; holds frozen copies in evaluation mode and each defense at its mean.

    `role`: what arrives there is returned; None: the outputs of the whole model, by head.
    """

    def __init__(
        self,
        topology: Topology,
        facts: Facts,
        modules: Mapping[str, nn.Module],
        defenses: Sequence[Defense],
        role: str | None,
        seed: int,
        states: Mapping[tuple[str, int], Any] | None = None,
    ) -> None:
        self._topology, self._facts, self._role, self._seed = topology, facts, role, seed
        self._segments = topology.segments if role is None else topology.upstream(role)
        self._states = copy.deepcopy(dict(states or {}))
        self._samples = 0
        self._modules = copy.deepcopy({s.name: modules[s.name] for s in self._segments})
        for module in self._modules.values():
            module.eval().requires_grad_(False)
        self._ports = {
            (d.segment, p.segment): p
            for work in segment_plans(topology, facts, defenses).values()
            for d in work
            for p in d.departures
        }

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what arrives at the role for raw `inputs`, every defense at its mean: value -> (n, ...)."""
        return self._forward(inputs, None)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The copies by segment."""
        return self._modules

    def sample(self, inputs: Mapping[str, Tensor], number: int | None = None) -> dict[str, Tensor]:
        """Return what might arrive at the role for raw `inputs`: every defense draws afresh, or as at draw `number`."""
        return self._forward(inputs, self._draw(number))

    def in_training(
        self, inputs: Mapping[str, Tensor], number: int | None, epoch: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return `sample` at draw `number`, or drawn afresh, and what the defenses add to the senders' losses.

        That is the sum of their penalties as weighed in `epoch`. Its gradient is right; its value is not where a
        defense gives its penalty by the gradient alone.
        """
        penalties = _Penalties(epoch, [])
        releases = self._forward(inputs, self._draw(number), penalties)
        return releases, torch.stack(penalties.terms).sum() if penalties.terms else torch.zeros(())

    @property
    def defenses(self) -> ImitatedStates:
        """What the defenses keep and learn."""
        guards = {(p.edge, g.position): g.defense for p in self._ports.values() for g in p.guards}
        return ImitatedStates({key: (guards[key], state) for key, state in self._states.items() if key in guards})

    def _draw(self, number: int | None) -> int:
        if number is None:
            self._samples += 1
            return self._samples
        return number

    def _forward(
        self, inputs: Mapping[str, Tensor], sample: int | None, penalties: _Penalties | None = None
    ) -> dict[str, Tensor]:
        values_made = dict(inputs)
        arrived: dict[str, dict[str, Tensor]] = {role: {} for role in self._topology.roles}
        for segment in self._segments:
            readable = {**values_made, **arrived[segment.role]}
            overwritten = self._facts.overwritten[segment.name]
            arguments = [readable[n].clone() if n in overwritten else readable[n] for n in segment.inputs]
            result = self._modules[segment.name](*arguments)
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            values_made.update(zip(segment.outputs, outputs, strict=True))
            for edge in self._topology.crossings:
                if edge.source == segment.name:
                    held = {n: t for n, t in inputs.items() if self._topology.inputs[n] == segment.role}
                    values = self._defend_edge(edge, values_made, held, arrived[segment.role], sample, penalties)
                    arrived[self._topology.role_of(edge.target)].update(values)
        return (
            {h.value: values_made[h.value] for h in self._topology.heads} if self._role is None else arrived[self._role]
        )

    def _defend_edge(
        self,
        edge: Edge,
        made: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        arrived: Mapping[str, Tensor],
        sample: int | None,
        penalties: _Penalties | None,
    ) -> dict[str, Tensor]:
        """Return what arrives on `edge`, whose sender holds `inputs` and has received what `arrived`."""
        port, role = self._ports[edge.source, edge.target], self._topology.role_of(edge.source)
        module = self._modules[edge.source]
        values = {name: made[name] for name in port.values}
        for guard in port.guards:
            state = self._states.get((port.edge, guard.position))
            stamp = Stamp("sample", 0, sample or 0, 0)
            context = Context(role, port.edge, stamp, self._seed, guard.position, inputs, {}, state, module)
            if penalties is not None and guard.penalty_defense is not None:
                step_context = training_context(context, sample or 0, penalties.epoch, arrived)
                z = concatenate_values(list(values.values()))
                penalties.terms.append(guard.share * penalty_term(guard.penalty_defense.penalty(z, step_context), z))
            if guard.release_defense is None:
                continue
            act = guard.release_defense.expected if sample is None else guard.release_defense.release
            values = {name: act(name, z, context) for name, z in values.items()}
        return values
