"""Cost of a layer on ciphertexts: `python -m experiments.benchmarks.encryption`; with --quick fewer repetitions.

CPU time of one thread. What is compared runs alternately in one process; a ratio is the median over pairs. The layer
has 64 rows, 256 features and 10 results, at degree 8192, moduli 60-40-40-60, scale 2^40, unless said otherwise.
TenSEAL's own product of a row (`CKKSVector.mm`) takes more than a second: it is timed for one row and counted for 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from splitfed.encryption.backend import import_tenseal
from splitfed.encryption.ciphertexts import BATCH, CONSTANTS, ROWS, decrypt, encrypt, message_bytes
from splitfed.encryption.keys import KeyHolder, make_keys
from splitfed.encryption.linear import linear, linear_encrypted
from splitfed.encryption.parameters import preset

ROW_COUNT, FEATURES, RESULTS = 64, 256, 10
FEW_FEATURES, FEW_RESULTS = 16, 4
BOUND = 4.0


def alternate(variants: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of every variant, `repeats` times each in turn."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            start = time.process_time()
            variant()
            found[name].append(time.process_time() - start)
    return found


def ratio(found: Mapping[str, list[float]], name: str, base: str, times: float = 1.0) -> float:
    """Return the median over pairs of a variant's time over `times` that of another."""
    return statistics.median(a / (times * b) for a, b in zip(found[name], found[base], strict=True))


def layouts(holder: KeyHolder, x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Callable[[], Any]]:
    """Return the layer in each layout, and TenSEAL's own products of batches and of one row."""
    context, tenseal = holder.public, import_tenseal()
    batch, rows = (encrypt(x, context, bound=BOUND, layout=layout) for layout in (BATCH, ROWS))
    columns, shift = tenseal.plain_tensor(weight.T.tolist()), tenseal.plain_tensor([bias.tolist()])
    bare = tenseal.ckks_tensor(context.context, tenseal.plain_tensor(x[:, None].tolist()), batch=True)
    row = tenseal.ckks_vector(context.context, x[0].tolist())
    return {
        "batch": lambda: linear(batch, weight, bias),
        "TenSEAL batch": lambda: bare.mm(columns).add(shift),
        "rows": lambda: linear(rows, weight, bias),
        "TenSEAL row": lambda: row.mm(columns).add(bias.tolist()),
    }


def encrypted_weights(holder: KeyHolder, x: Tensor, weight: Tensor) -> dict[str, Callable[[], Any]]:
    """Return a layer of few features with encrypted weights, and TenSEAL's own product of the same ciphertexts."""
    context, tenseal = holder.public, import_tenseal()
    inputs = encrypt(x, context, bound=BOUND)
    weights = encrypt(weight, context, bound=BOUND, layout=CONSTANTS)
    repeated = weight.T.expand(len(x), -1, -1).tolist()
    bare = tenseal.ckks_tensor(context.context, tenseal.plain_tensor(x[:, None].tolist()), batch=True)
    bare_weights = tenseal.ckks_tensor(context.context, tenseal.plain_tensor(repeated), batch=True)
    return {
        "encrypted weights": lambda: linear_encrypted(inputs, weights),
        "TenSEAL encrypted weights": lambda: bare.mm(bare_weights),
    }


def main() -> None:
    """Print seconds, ratios with the bounds that they are held to, errors and bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 repetitions in place of 7")
    repeats = 2 if parser.parse_args().quick else 7
    torch.manual_seed(0)
    holder = make_keys(preset("depth_2"), rotations=True)
    x = torch.randn(ROW_COUNT, FEATURES, dtype=torch.float64).clamp(-BOUND, BOUND)
    weight, bias = torch.randn(RESULTS, FEATURES, dtype=torch.float64) / 16, torch.randn(RESULTS, dtype=torch.float64)
    found = alternate(layouts(holder, x, weight, bias), repeats)
    narrow = x[:, :FEW_FEATURES], weight[:FEW_RESULTS, :FEW_FEATURES]
    found |= alternate(encrypted_weights(holder, *narrow), repeats)
    for name, seconds in found.items():
        print(f"{name:<26} {statistics.median(seconds):.3f} s")
    print(f"batch over TenSEAL's       {ratio(found, 'batch', 'TenSEAL batch'):.3f} (bound 1.15)")
    print(
        f"encrypted weights, {FEW_FEATURES} by {FEW_RESULTS}, over TenSEAL's "
        f"{ratio(found, 'encrypted weights', 'TenSEAL encrypted weights'):.3f} (bound 1.15)"
    )
    for name in ("batch", "rows"):
        faster = 1 / ratio(found, name, "TenSEAL row", ROW_COUNT)
        print(f"{name}: {faster:.0f} times less than row by row (best: at least 20)")
    truth = torch.nn.functional.linear(x, weight, bias)
    for layout in (BATCH, ROWS):
        sent = encrypt(x, holder.public, bound=BOUND, layout=layout)
        out = linear(sent, weight, bias)
        error = float((decrypt(out, holder) - truth).abs().max())
        predicted, real = message_bytes(holder.parameters, layout, (ROW_COUNT, FEATURES)), sent.to_tensor().nbytes
        print(
            f"{layout}: error {error:.1e}, stated {out.precision:.1e}; {real} bytes there, predicted "
            f"{predicted} ({predicted / real - 1:+.2%}); {out.to_tensor().nbytes} bytes back"
        )


if __name__ == "__main__":
    main()
