"""Runs segments of a topology on an adversary's own machine, with trained, own or fresh weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from splitfed.core.defense import Defense, concatenate_values, penalty_term
from splitfed.core.defense_context import Context
from splitfed.core.messages import Stamp
from splitfed.core.step_plan import Port, segment_plans
from splitfed.core.topology import Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.threats.imitated_defenses import Feed, ImitatedStates, task_weight, training_context
from splitfed.threats.repeated_releases import mean_release, release_seed


class _Penalties(NamedTuple):
    """Collects the terms that the defenses add to the senders' losses in `epoch`."""

    epoch: int
    terms: list[Tensor]


class SegmentRunner:
    """Copies of segments in evaluation mode that map raw rows to releases, differentiable in the rows.

    With `role` the segments upstream of it are run, and the values that arrive there are returned, value -> (n, ...),
    except those without data (constants, masks). Otherwise the segments that compute `values` (name in the result ->
    value) from the values `given` are run. `modules`: the segments to copy, by name; those in `trainable` may learn,
    all others are frozen. `defenses` act on the edges between roles, with copies of `states` (edge and position -> what
    `start` returned), and draw from `seed`; `epoch`: of the run, for defenses that change over it. `releases`: a sample
    is the mean of that many releases of the same rows.
    """

    def __init__(
        self,
        topology: Topology,
        facts: TopologyFacts,
        modules: Mapping[str, nn.Module],
        feed: Feed,
        *,
        role: str | None = None,
        values: Mapping[str, str] | None = None,
        given: Collection[str] = (),
        trainable: Collection[str] = (),
        defenses: Sequence[Defense] = (),
        states: Mapping[tuple[str, int], Any] | None = None,
        seed: int = 0,
        epoch: int = 0,
        releases: int = 1,
    ) -> None:
        self._feed, self._role, self._values = feed, role, dict(values or {})
        self._defenses, self._seed, self._epoch = tuple(defenses), seed, epoch
        self._states = copy.deepcopy(dict(states or {}))
        self._samples, self._releases = 0, releases
        names = topology.makers(self._values.values(), given)
        if role is not None:
            names = tuple(s.name for s in topology.upstream(role))
        # Plans hold no module: nothing of the topology can be reached but the copies.
        work = segment_plans(topology, facts, defenses, checked=True)
        plans = {p.segment: (sender, p) for sender, parts in work.items() for p in parts}
        self._steps = [plans[name] for name in names]
        ports = [port for _, plan in plans.values() for port in plan.departures]
        self._dataless = frozenset().union(*(port.dataless for port in ports))
        self._held = {(port.edge, guard.position): guard.defense for port in ports for guard in port.guards}
        self._roles, self._owners = topology.roles, dict(topology.inputs)
        self.modules = copy.deepcopy({name: modules[name] for name in names})
        for name, module in self.modules.items():
            module.eval().requires_grad_(name in trainable)

    def __call__(self, x: Tensor, received: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the releases of raw rows x (n, *shape), every defense at its mean; `received`: the `given` values."""
        return self._run(x, received or {}, None)

    def dataless(self, x: Tensor) -> dict[str, Tensor]:
        """Return the values without data (constants, masks) that arrive at the role for raw rows x."""
        with torch.no_grad():
            return {name: z for name, z in self._walk(x, {}, None).items() if name in self._dataless}

    def sample(self, x: Tensor, number: int | None = None) -> dict[str, Tensor]:
        """Return a random sample of the releases of rows x.

        `number` fixes the draws of the defenses, None draws afresh.
        """
        if self._releases == 1:
            return self._run(x, {}, self._draw_number(number))
        numbers = (
            self._draw_number(None if number is None else release_seed(number, "sample", release=release))
            for release in range(self._releases)
        )
        return mean_release((self._run(x, {}, drawn) for drawn in numbers), self._releases)[0]

    def in_training(
        self, x: Tensor, number: int | None = None, epoch: int | None = None
    ) -> tuple[dict[str, Tensor], Tensor, float]:
        """Return the releases of rows x in a training step, the penalty, and the factor of the task's loss.

        The penalty is the sum of what defenses add to the senders' losses in `epoch` (default: the last): a scalar
        whose gradient is exact; its value is not where a defense defines its penalty by the gradient alone. `number`
        fixes the draws; None: fresh ones.
        """
        penalties = _Penalties(self._epoch if epoch is None else epoch, [])
        releases = self._run(x, {}, self._draw_number(number), penalties)
        penalty = torch.stack(penalties.terms).sum() if penalties.terms else torch.zeros(())
        return releases, penalty, task_weight(self._defenses, penalties.epoch)

    @property
    def defenses(self) -> ImitatedStates:
        """States of the imitated defenses."""
        held = self._held
        return ImitatedStates({key: (held[key], state) for key, state in self._states.items() if key in held})

    @property
    def least_rows(self) -> int:
        """Smallest batch that `in_training` accepts, as required by the defenses."""
        return max([1, *(d.least_rows for d in self._defenses)])

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights that may learn."""
        return (p for module in self.modules.values() for p in module.parameters() if p.requires_grad)

    def _draw_number(self, number: int | None) -> int:
        if number is None:
            self._samples += 1
            return self._samples
        return number

    def _run(
        self, x: Tensor, received: Mapping[str, Tensor], sample: int | None, penalties: _Penalties | None = None
    ) -> dict[str, Tensor]:
        found = self._walk(x, received, sample, penalties)
        return found if self._role is None else {n: z for n, z in found.items() if n not in self._dataless}

    def _walk(
        self, x: Tensor, received: Mapping[str, Tensor], sample: int | None, penalties: _Penalties | None = None
    ) -> dict[str, Tensor]:
        inputs = dict(self._feed(x))
        made = {**inputs, **received}
        arrived: dict[str, dict[str, Tensor]] = {role: {} for role in self._roles}
        for role, step in self._steps:
            module, readable = self.modules[step.segment], {**made, **arrived[role]}
            result = module(*(readable[n].clone() if n in step.overwritten else readable[n] for n in step.inputs))
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            made.update(zip(step.outputs, outputs, strict=True))
            owned = {n: t for n, t in inputs.items() if self._owners[n] == role}
            for port in step.ports_to_others:
                values = {name: made[name] for name in port.values}
                stamp = Stamp("sample", 0, sample or 0, 0)
                sender = Context(role, port.edge, stamp, self._seed, 0, owned, module=module)
                arrived[str(port.role)] |= self._defend(port, values, sender, sample, penalties, arrived[role])
        if self._role is not None:
            return arrived[self._role]
        return {name: made[value] for name, value in self._values.items()}

    def _defend(
        self,
        port: Port,
        values: dict[str, Tensor],
        sender: Context,
        sample: int | None,
        penalties: _Penalties | None,
        arrived: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Return the defended `values` that cross, from a sender that has received `arrived`; collect the penalties."""
        for guard in port.guards:
            state = self._states.get((port.edge, guard.position))
            context = replace(sender, position=guard.position, state=state)
            if penalties is not None and guard.penalty_defense is not None:
                step_context = training_context(context, sample or 0, penalties.epoch, arrived)
                z = concatenate_values([values[name] for name in port.defended])
                penalties.terms.append(guard.share * penalty_term(guard.penalty_defense.penalty(z, step_context), z))
            if (defense := guard.release_defense) is not None:
                act = defense.expected if sample is None else defense.release
                values = {**values, **{name: act(name, values[name], context) for name in port.defended}}
        return values
