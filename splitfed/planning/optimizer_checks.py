"""Checks, before training, of optimizers against a run's parties, defenses, schedule and method."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from splitfed.core.defense import Defense, LearnedDefense, WeightDefense
from splitfed.core.errors import InvalidInput, check_names
from splitfed.core.optimizers import Optim
from splitfed.core.parameter_groups import check_groups
from splitfed.core.step_plan import find_weight_defenses
from splitfed.core.topology import Topology, name_weights
from splitfed.federated.base import Method
from splitfed.schedules.base import Schedule, Training


def optims_of(topology: Topology, optimizer: str | Optim | Mapping[str, Optim] | None) -> dict[str, Optim]:
    """Return role -> optimizer, from one for all (an `Optim`, or a name with torch's defaults) or one by role."""
    if isinstance(optimizer, str):
        optimizer = Optim(optimizer, {})
    if optimizer is None or isinstance(optimizer, Optim):
        return dict.fromkeys(topology.roles, optimizer or Optim())
    if not isinstance(optimizer, Mapping) or not all(isinstance(o, Optim) for o in optimizer.values()):
        raise InvalidInput(f"optimizer={optimizer!r} is not allowed; expected an Optim, a name, or role -> Optim")
    check_names("role in optimizer", topology.roles, *optimizer)
    return {role: optimizer.get(role, Optim()) for role in topology.roles}


def check_optimizers(topologies: Sequence[Topology], defenses: Sequence[Defense], optims: Mapping[str, Optim]) -> None:
    """Raise `InvalidInput` for parameter groups without a weight, or clipping beside a defense that clips by row."""
    makes = {id(t): t for t in topologies}.values()
    named = {role: [one for t in makes for one in name_weights(t, role)] for role in optims}
    check_groups(named, {role: optim.groups for role, optim in optims.items()})
    clipped = {role: optim.clip_norm for role, optim in optims.items() if optim.clip_norm is not None}
    for topology, role in itertools.product({id(t): t for t in topologies}.values(), clipped):
        given = f"clip_norm={clipped[role]:g} of {role!r} is not allowed"
        if (guard := find_weight_defenses(topology, defenses).get(role)) is not None:
            name = type(guard[1]).__name__
            raise InvalidInput(f"{given} beside {name}, which clips every row's gradient there; leave one of them out")


def check_accumulation(
    schedule: Schedule, method: Method | None, defenses: Sequence[Defense], topology: Topology, training: Training
) -> None:
    """Raise `InvalidInput` for one optimizer step over several batches if the run needs one after each batch."""
    if training.accumulate == 1:
        return
    given = f"accumulate={training.accumulate} is not allowed"
    if not schedule.accumulates:
        raise InvalidInput(
            f"{given} with schedule {type(schedule).__name__}, whose clients do not train several batches in a row; "
            "take a larger batch_size"
        )
    if method is not None and not method.traits(topology).accumulates:
        raise InvalidInput(f"{given} with method {type(method).__name__}, which acts on every step of a batch")
    if topology.computation is not None:
        raise InvalidInput(f"{given} {topology.computation.refusals['accumulate']}")
    for defense in defenses:
        name = type(defense).__name__
        if isinstance(defense, WeightDefense):
            raise InvalidInput(f"{given} beside {name}, which adds its noise to every batch: take a larger batch_size")
        if isinstance(defense, LearnedDefense):
            raise InvalidInput(f"{given} beside {name}, which learns from every batch: take a larger batch_size")
