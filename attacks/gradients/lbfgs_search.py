"""Shared by `dlg` and `idlg`: L-BFGS from several starts for rows whose gradient fits a client's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from splitfed.attacks.base import Progress
from splitfed.attacks.gradients.gradient_matching import ClientGradient

_CHUNK = 20  # iterations between two reports
_ENOUGH = 1e-10  # of |g*|²: single-precision weights say no more
_NEAR = 1e-6  # below it, a search that stalls has met their rounding

QUICK = {"iterations": 200, "restarts": 3}
"""Parameters of the budget "quick" of `dlg` and `idlg`."""


def best_fit(
    client: ClientGradient,
    shape: Sequence[int],
    labels: Mapping[str, Tensor] | None,
    iterations: int,
    restarts: int,
    generator: torch.Generator,
    progress: Progress,
) -> Tensor:
    """Return the rows, (rows, *shape) float32, of the start that ends with the smallest misfit of gradients.

    `labels`: head -> logits, if they are known; None: they are optimized too.
    """
    candidates: list[tuple[float, Tensor]] = []
    for start in range(restarts):
        x = client.draw((client.rows, *shape), generator)
        drawn, back = client.draw_unknowns(shape, generator)
        chosen = drawn if labels is None else labels
        fits = [math.inf]
        for done, misfit in _search(client, x, chosen, back, iterations):
            fits.append(misfit)
            progress(start * iterations + done, restarts * iterations)
        candidates.append((fits[-1], x.detach()))
        if fits[-1] < _ENOUGH:
            break
    return min(candidates, key=lambda one: one[0])[1].nan_to_num().float()


def _search(
    client: ClientGradient, x: Tensor, labels: Mapping[str, Tensor], back: Mapping[str, Tensor], iterations: int
) -> Iterator[tuple[int, float]]:
    """Optimize x, and those of `labels` and `back` that require a gradient; yield (iterations done, misfit)."""
    unit = sum(float(g.square().sum()) for g in client.target) or 1.0
    free = [t for t in (x, *labels.values(), *back.values()) if t.requires_grad]
    optimizer = torch.optim.LBFGS(
        free, lr=1.0, max_iter=_CHUNK, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def misfit() -> Tensor:
        pairs = zip(client.gradient(x, labels, back), client.target, strict=True)
        return sum(((g - seen).square().sum() for g, seen in pairs), x.new_zeros(())) / unit

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = misfit()
        loss.backward()
        return loss.detach()

    last = math.inf
    for done in range(_CHUNK, iterations + _CHUNK, _CHUNK):
        before = [t.detach().clone() for t in free]
        optimizer.step(closure)
        now = float(misfit().detach())
        if not math.isfinite(now):
            with torch.no_grad():
                for tensor, kept in zip(free, before, strict=True):
                    tensor.copy_(kept)
            break
        yield min(done, iterations), now
        if now < _ENOUGH or now == last or (now < _NEAR and now > 0.9 * last):
            break
        last = now
