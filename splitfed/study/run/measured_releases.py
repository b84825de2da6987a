"""What the releases of a finished run tell without an attack: their dependence on the input, and information."""

from __future__ import annotations

from typing import Any

import torch

from splitfed.core.errors import InvalidInput
from splitfed.core.random import generator
from splitfed.stats.dependence import permutation_test
from splitfed.stats.hsic import LEAST as LEAST_ROWS, permutation_test_hsic
from splitfed.stats.token_points import as_points
from splitfed.training.run import Run

PERMUTATIONS = 200
Json = dict[str, Any]


def measure_dependence(run: Run) -> Json | None:
    """Return how strongly the victims' releases, as the curious party received them, depend on their input."""
    topology = run.engine.topology
    curious = any(role not in topology.data_roles for role in topology.roles)
    if len(run.data.victims) < 4 or not curious or topology.computation is not None:
        return None
    view = run.observe().select(kind="activation")
    released = torch.cat([z.flatten(1) for z in view.tensors().values()], 1)
    if not bool(torch.isfinite(released).all()):
        return None
    random = generator(run.seed, "dependence")
    test = permutation_test(as_points(run.data.victims.x), released, PERMUTATIONS, random)
    return {
        "u_distance_correlation_sqr": test.statistic,
        "p_value": test.p_value,
        "permutations": PERMUTATIONS,
        "edge": ", ".join(dict.fromkeys(message.edge for message in view.messages)),
    }


def measure_information(run: Run) -> Json | None:
    """Return what the victims' releases, as the curious party receives them, tell without an attack; see `Run`."""
    topology = run.engine.topology
    curious = any(role not in topology.data_roles for role in topology.roles)
    if len(run.data.victims) < LEAST_ROWS or not curious:
        return None
    try:
        found = run.measure_release()
    except InvalidInput:
        # Token ids, ciphertexts, or nothing that arrives: there is nothing to measure.
        return None
    bound, mutual = found.bound, found.mutual
    released = run.observe().select(kind="activation").tensors().values()
    rows = torch.cat([z.flatten(1) for z in released], 1)
    finite = bool(torch.isfinite(rows).all())
    test = (
        permutation_test_hsic(run.data.victims.x, rows, PERMUTATIONS, generator(run.seed, "hsic")) if finite else None
    )
    return {
        "why": found.why,
        "assumed": "" if bound is None else bound.assumed,
        "empty": None if bound is None else bound.empty,
        "dfil": None if bound is None else bound.dfil,
        "dfil_error": None if bound is None else bound.error,
        "least_mse": None if bound is None else bound.least,
        "mutual_lower": None if mutual is None else mutual.lower,
        "mutual_upper": None if mutual is None else mutual.upper,
        "mutual_errors": None if mutual is None else [mutual.lower_error, mutual.upper_error],
        "saturated": None if mutual is None else mutual.saturated,
        "usable": None if found.usable is None else found.usable.mean,
        "invertibility": None if found.invertibility is None else found.invertibility.mean,
        "cka": None if test is None else test.statistic,
        "cka_p_value": None if test is None else test.p_value,
    }
