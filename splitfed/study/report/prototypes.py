"""The picture of prototypes in a report: what a run leaves for it in its folder, and how it is read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup
from safetensors.torch import load_file, save

from splitfed.core import digests
from splitfed.core.random import generator
from splitfed.study.report.contained import path_inside
from splitfed.study.report.data import Setting
from splitfed.study.report.figures.federated import PrototypeEmbeddings, compute_embeddings, plot_prototypes
from splitfed.training.checkpoint import write_atomic
from splitfed.training.run import Run

FILE = "prototypes.safetensors"
ROWS = 400


def save_prototypes(run: Run, folder: Path) -> dict[str, str]:
    """Write some test embeddings and the prototypes of `run` into its `folder`, where its method has prototypes.

    Returns file -> digest of what was written.
    """
    tested = any(len(client.test) for client in run.data.clients)
    means = {} if run.method is None else run.method.traits(run.engine.topology).class_means
    if "prototype" not in means or not run.method_state.get("prototypes") or not tested:
        return {}
    found = compute_embeddings(run)
    some = torch.randperm(len(found.z), generator=generator(run.seed, "kept"))[:ROWS].sort().values
    tensors = {f"prototype/{name}": t.float().contiguous() for name, t in found.prototypes.items()}
    tensors |= {"z": found.z[some].float().contiguous(), "y": found.y[some].contiguous()}
    content = save(tensors)
    write_atomic(folder / FILE, content)
    return {FILE: digests.of(content)}


def prototype_pictures(named: Sequence[tuple[str, Setting]]) -> list[tuple[str, Markup]]:
    """Return name and picture of every setting of `named` that has prototypes, all of the seed that most have."""
    there = [(name, s) for name, s in named if any(_file(run) for run in s.runs)]
    seeds = Counter(seed for _, s in there for seed in s.seeds)
    found = []
    for i, (name, setting) in enumerate(there):
        seed = min(setting.seeds, key=lambda s: (-seeds[s], s))
        run = next(run for run in setting.runs if int(run["seed"]) == seed)
        path = _file(run)
        if path is None:
            continue
        digests.check_file(path, run.get("files", {}).get(FILE), f"delete it and result.json, {digests.AGAIN}")
        known = load_file(path)
        if len(known["z"]) + len(known) - 2 >= 4:
            marks = {key.removeprefix("prototype/"): t for key, t in known.items() if key.startswith("prototype/")}
            found.append(
                (name, Markup(plot_prototypes(PrototypeEmbeddings(known["z"], known["y"], marks), f"prototypes{i}")))
            )
    return found


def _file(run: Mapping[str, Any]) -> Path | None:
    """Return the path of the run's file; None where there is none in its own folder."""
    path = path_inside(Path(run["folder"]), FILE)
    return path if path is not None and path.is_file() else None
