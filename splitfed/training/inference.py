"""Inference alone: rows through the parties of a topology, with the weights that it has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput, check_count, check_names
from splitfed.core.example_pass import pass_example
from splitfed.core.random import read_seed
from splitfed.core.rows import type_name
from splitfed.core.topology import Topology
from splitfed.data.conversion import as_tensor, check_finite
from splitfed.data.from_python import Array
from splitfed.engines.factory import make_engine
from splitfed.planning.computation import plan_of
from splitfed.training.run_plan import find_device


def predict(
    topology: Topology,
    x: Array,
    *,
    head: str | None = None,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return what `topology` makes of rows `x` (rows, ...) in evaluation mode, through its parties: (rows, outputs).

    x: finite numbers, a tensor or an array, real ones taken as the type of the weights. The model must have one input.
    A secure `computation` of the topology is that of inference alone: no gradient comes back. `head`: whose
    output, where there are several (default: the first). `seed`: of what the model draws. Raises `InvalidInput` for
    what does not fit.
    """
    check_count("batch_size", batch_size, low=1)
    seed = read_seed(seed)
    rows = as_tensor("x", x, share=True)
    if rows.is_floating_point():
        weights = (one for one in topology.state_dict().values() if one.is_floating_point())
        rows = rows.to(next((one.dtype for one in weights), torch.float32))
    check_finite("x", rows)
    if len(topology.inputs) != 1 or rows.dim() == 0 or len(rows) == 0:
        raise InvalidInput(
            f"rows of shape {tuple(rows.shape)} for {len(topology.inputs)} inputs cannot be predicted; expected one "
            "input and at least one row"
        )
    values = [one.value for one in topology.heads]
    head = values[0] if head is None else head
    check_names("head", values, head)
    (name,) = topology.inputs
    few = rows[:4]
    try:
        facts = pass_example(topology, {name: few if len(few) > 1 else few.repeat(2, *[1] * (rows.dim() - 1))})
    except InvalidInput as error:
        shape, kind = tuple(rows.shape[1:]), type_name(rows.dtype)
        raise InvalidInput(f"x with rows of shape {shape} and type {kind} does not fit: {error}") from None
    # Who is handed a topology must not find the user's model behind it.
    bare = replace(topology, segments=tuple(replace(s, original=None) for s in topology.segments))
    ready = plan_of(bare).fit_inference(bare, facts, min(batch_size, len(rows)))
    engine = make_engine(ready, facts, 1, seed=seed, device=find_device(device))
    engine.run_parties.maker.write_keys()
    engine.own(0, "test", {name: rows}, {})
    return engine.predict(0, "test", "predict", batch_size=batch_size, head=head).outputs[head]
