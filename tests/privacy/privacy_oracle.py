"""What dp-accounting says of compositions: upper bounds by loss distributions, within a fraction of a per cent; RDP."""

from __future__ import annotations

import dp_accounting as dp

DELTA = 1e-5
STEP = 1e-3
CASES: dict[str, tuple[tuple[str, float, float, int], ...]] = {
    "one Gaussian": (("gaussian", 1.0, 1.0, 1),),
    "ten Gaussians": (("gaussian", 2.0, 1.0, 10),),
    "two kinds of Gaussians": (("gaussian", 4.0, 1.0, 30), ("gaussian", 10.0, 1.0, 100)),
    "one Laplace": (("laplace", 2.0, 1.0, 1),),
    "fifty Laplace": (("laplace", 2.0, 1.0, 50),),
    "a thousand Laplace": (("laplace", 10.0, 1.0, 1000),),
    "Laplace and Gaussian": (("laplace", 5.0, 1.0, 20), ("gaussian", 5.0, 1.0, 20)),
    "sampled, small": (("gaussian", 1.0, 0.01, 1000),),
    "sampled, large": (("gaussian", 1.0, 0.1, 100),),
    "sampled, little noise": (("gaussian", 0.7, 0.02, 2000),),
    "sampled and not": (("gaussian", 1.0, 0.1, 100), ("gaussian", 4.0, 1.0, 10)),
}


def epsilon(case: str, accountant: str) -> float:
    """Epsilon at `DELTA` by its accountant "pld" or "rdp"."""
    found = dp.rdp.RdpAccountant() if accountant == "rdp" else dp.pld.PLDAccountant(value_discretization_interval=STEP)
    for kind, noise, rate, times in CASES[case]:
        event = {"gaussian": dp.GaussianDpEvent, "laplace": dp.LaplaceDpEvent}[kind](noise)
        found.compose(event if rate == 1 else dp.PoissonSampledDpEvent(rate, event), times)
    return float(found.get_epsilon(DELTA))
