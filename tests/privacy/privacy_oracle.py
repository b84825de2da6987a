"""What the dp-accounting package (0.6.0) says of compositions: `python -m tests.privacy.privacy_oracle` writes it anew.

Stored, because dp-accounting asks for attrs below 24, which does not install beside what the tests need: run once by
hand in an environment of its own (`pip install dp-accounting`), it says the same for ever. The figures are those of
its accountant of privacy loss distributions, which are upper bounds within a fraction of a per cent of the truth.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

STORED = Path(__file__).with_name("privacy_oracle.json")
DELTA = 1e-5
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
}


def stored() -> dict[str, dict[str, float]]:
    """Case -> {"pld": epsilon, "rdp": epsilon} at `DELTA`."""
    values: dict[str, dict[str, float]] = json.loads(STORED.read_text())
    return values


def main() -> None:
    dp = importlib.import_module("dp_accounting")
    kinds = {"gaussian": dp.GaussianDpEvent, "laplace": dp.LaplaceDpEvent}
    values = {}
    for name, case in CASES.items():
        found = {}
        for which, make in (("pld", dp.pld.PLDAccountant), ("rdp", dp.rdp.RdpAccountant)):
            accountant = make()
            for kind, noise, rate, times in case:
                event = kinds[kind](noise)
                accountant.compose(event if rate == 1 else dp.PoissonSampledDpEvent(rate, event), times)
            found[which] = float(accountant.get_epsilon(DELTA))
        values[name] = found
    STORED.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
