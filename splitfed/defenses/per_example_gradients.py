"""Per-example gradients: the gradient of every row of a batch, for the weights of ordinary layers.

They follow from a layer's inputs and the gradient at its outputs. For a plain linear layer no row's gradient is formed:
its norm is a product of two norms, and a weighted sum of the rows one matrix product (Goodfellow, "Efficient
per-example gradient computations", 2015; Bu, Wang, Zha, Karypis, "Differentially private optimization on large model at
small cost", ICML 2023). Other layers use Opacus (Yousefpour et al., "Opacus: user-friendly differential privacy library
in PyTorch", 2021), and layers without a formula in Opacus use `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap

_AT_ONCE = 16
"""Number of rows converted to float64 at a time."""

Samples = Mapping[nn.Parameter, Tensor]


class Call(NamedTuple):
    """One use of a layer in the forward pass: its inputs, (rows, ...) each, and the graph edge of its output."""

    layer: nn.Module
    x: Tensor
    edge: GradientEdge
    more: tuple[Tensor, ...] = ()


class LayerUse(NamedTuple):
    """One use of a layer: its inputs and the gradient at its output, all (rows, ...)."""

    layer: nn.Module
    x: Tensor
    g: Tensor
    more: tuple[Tensor, ...] = ()


def own_weights(layer: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights of `layer` itself, without those of its submodules."""
    return [p for p in layer.parameters(recurse=False) if p.requires_grad]


def layers_with_weights(module: nn.Module) -> dict[str, nn.Module]:
    """Return the distinct modules within `module` that have trainable weights of their own, by name."""
    return {name: inner for name, inner in module.named_modules() if own_weights(inner)}


@contextmanager
def record_calls(layers: Sequence[nn.Module], calls: list[Call], rows: int) -> Iterator[None]:
    """Append every use of one of `layers` inside the block to `calls`; all hooks are removed at its end.

    An output computed from one row for all `rows`, as from position numbers, is expanded to one for each row, so that
    each has a gradient of its own. A use with inputs or outputs that are not tensors is left out; the check of the sums
    detects that it is missing.
    """

    def note(layer: nn.Module, given: tuple[Any, ...], output: Any) -> Tensor | None:
        if not (given and isinstance(output, Tensor) and output.requires_grad):
            return None
        if not all(isinstance(one, Tensor) for one in given):
            return None
        # Unseen by the pass of a replayed model, which counts the functions of torch that are called.
        with torch._C.DisableTorchFunction():
            values = [one.data for one in given]
            shared = rows > 1 and output.dim() > 0 and all(one.shape[:1] == (1,) for one in (*values, output))
            if shared:
                values = [one.expand(rows, *one.shape[1:]) for one in values]
                output = output.expand(rows, *output.shape[1:]).clone()
        # The place in the graph, not the tensor: what follows may overwrite that.
        calls.append(Call(layer, values[0], get_gradient_edge(output), tuple(values[1:])))
        return output if shared else None

    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def per_row_gradients(used: LayerUse) -> Samples:
    """Return, for every trainable weight of the layer, the gradient of each row: (rows, *shape of the weight)."""
    from opacus.grad_sample import GradSampleModule

    layer, g = used.layer, used.g
    if type(layer) is nn.Bilinear:
        one, other, out = (t.reshape(len(t), -1, t.shape[-1]) for t in (used.x, *used.more, g))
        of = {layer.weight: lambda: torch.einsum("rtk,rti,rtj->rkij", out, one, other), layer.bias: lambda: out.sum(1)}
        return {weight: of[weight]() for weight in own_weights(layer)}
    formula = GradSampleModule.GRAD_SAMPLERS.get(type(layer))
    if formula is None or used.more:
        return _by_transform(used)
    if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
        g = g.masked_fill((used.x == layer.padding_idx).unsqueeze(-1), 0)
    found = formula(layer, [used.x], g)
    return {weight: found[weight] for weight in own_weights(layer)}


class RowGradients(NamedTuple):
    """Per-row gradients of a step: the squared norm over all weights, (rows,), in float64, and their weighted sums.

    `add_up` maps factors, (rows,), to weight -> the sum of the rows' gradients times them, in float64: rounded to
    float32, a sum would depend on each row by more than its clipped gradient. `replaced`: number of rows that were not
    finite; they count as zeros.
    """

    norms: Tensor
    add_up: Callable[[Tensor], Samples]
    replaced: int


def measure_norms(used: Sequence[LayerUse], rows: int) -> RowGradients:
    """Return the gradient norms of `rows` rows, from the uses of layers, and the function that sums the rows."""
    dense: list[LayerUse] = []
    gradients: dict[nn.Parameter, Tensor] = {}
    for one in used:
        if _dense(one, used):
            dense.append(one)
            continue
        for weight, row_gradients in per_row_gradients(one).items():
            gradients[weight] = gradients[weight] + row_gradients if weight in gradients else row_gradients
    total = torch.zeros(rows, dtype=torch.float64)
    for row_gradients in gradients.values():
        total = total.to(row_gradients.device) + _square_sum(row_gradients.reshape(rows, -1))
    for layer, x, g, _ in dense:
        for weight in own_weights(layer):
            length = _square_sum(g)
            total = total.to(g.device) + (length if weight.dim() == 1 else length * _square_sum(x))
    fine = torch.isfinite(total)
    replaced = rows - int(fine.sum())
    if replaced:
        total = total.where(fine, total.new_zeros(()))
        gradients = {weight: _zero_other_rows(row_gradients, fine) for weight, row_gradients in gradients.items()}
        dense = [LayerUse(one.layer, _zero_other_rows(one.x, fine), _zero_other_rows(one.g, fine)) for one in dense]

    def add_up(factors: Tensor) -> Samples:
        sums = {weight: _weighted_sum(factors, row_gradients) for weight, row_gradients in gradients.items()}
        for layer, x, g, _ in dense:
            scaled = g.double() * factors.to(g.device)[:, None]
            for weight in own_weights(layer):
                sums[weight] = scaled.sum(0) if weight.dim() == 1 else scaled.T @ x.double()
        return sums

    return RowGradients(total, add_up, replaced)


def _square_sum(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row of (rows, n), in float64, in chunks of rows."""
    return torch.cat([part.double().square().sum(1) for part in rows.split(_AT_ONCE)])


def _weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """Return the sum over rows of `factors` (rows,) times `rows` (rows, ...), in float64, in chunks of rows."""
    parts = zip(factors.to(rows.device).split(_AT_ONCE), rows.split(_AT_ONCE), strict=True)
    return torch.stack([torch.tensordot(f, part.double(), dims=1) for f, part in parts]).sum(0)


def _zero_other_rows(rows: Tensor, fine: Tensor) -> Tensor:
    """Return `rows` (rows, ...) with zeros in the rows where `fine` is false."""
    return torch.where(fine.to(rows.device).view(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros_like(rows))


def _dense(one: LayerUse, all_used: Sequence[LayerUse]) -> bool:
    """Return whether the layer is a plain linear one whose weights are used only once in this step."""
    if type(one.layer) is not nn.Linear or one.x.dim() != 2:
        return False
    mine = {id(weight) for weight in own_weights(one.layer)}
    return sum(any(id(weight) in mine for weight in own_weights(other.layer)) for other in all_used) == 1


def _by_transform(used: LayerUse) -> Samples:
    """Return the per-row gradients of the layer by `torch.func`, vectorised over rows."""
    weights: dict[str, Any] = {n: p for n, p in used.layer.named_parameters(recurse=False) if p.requires_grad}

    def one(g: Tensor, *given: Tensor) -> dict[str, Tensor]:
        made: Any = vjp(lambda w: functional_call(used.layer, w, tuple(x.unsqueeze(0) for x in given)), weights)
        output, back = made
        found: dict[str, Tensor] = back(g.reshape(output.shape))[0]
        return found

    # What draws inside draws anew: the gradient of a row is still its own, and whoever checks the sums finds another.
    found = vmap(one, randomness="different")(used.g, used.x, *used.more)
    return {weight: found[name].detach() for name, weight in weights.items()}
