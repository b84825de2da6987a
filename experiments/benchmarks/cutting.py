"""What it costs to cut a model of real size: CPU seconds and memory, beside a pass of the uncut model.

`python -m experiments.benchmarks.cutting [bert] [gpt2] [vit] [resnet]`, all by default. Every figure is of a fresh
process with one thread. A ratio is of the CPU time of one process: a cut after the middle of the model, with
its proof, over one forward and backward pass of eight rows (16 tokens, or 224 x 224 images), the better of three after
one that is not counted. Memory is the most that the process held: with the cut, and with one such pass alone.
`python -m experiments.benchmarks.cutting cuts` measures `splitfed cuts --blocks` of BERT-base, import included;
`python -m experiments.benchmarks.cutting start bert vit resnet` what a run does before its first step, in passes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.cutting import cut
from splitfed.engines.local import LocalEngine
from splitfed.topologies import vanilla

ROWS, TOKENS, SIDE = 8, 16, 224
TIMES, MEMORY = 6.0, 2.0
"""The aims: a cut over a pass; what a cut holds more than a pass does, over the weights."""
CUTS_SECONDS = 120.0


class Workload(NamedTuple):
    """One architecture of `transformers` with its default configuration: where it is cut, and its blocks."""

    architecture: str
    configuration: str
    keys: Mapping[str, Any]
    cut: str
    images: bool = False


WORKLOADS: Mapping[str, Workload] = {
    "bert": Workload("BertForSequenceClassification", "BertConfig", {}, "bert.encoder.layer.5"),
    "gpt2": Workload(
        "GPT2LMHeadModel", "GPT2Config", {"tie_word_embeddings": False, "use_cache": False}, "transformer.h.5"
    ),
    "vit": Workload("ViTForImageClassification", "ViTConfig", {}, "vit.layers.5", images=True),
    "resnet": Workload("ResNetForImageClassification", "ResNetConfig", {}, "resnet.encoder.stages.1", images=True),
}


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model with random weights, and eight rows of its input."""
    import transformers

    work = WORKLOADS[name]
    config = getattr(transformers, work.configuration)(**work.keys)
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, work.architecture)(config)
    if work.images:
        return model, {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE)}
    return model, {"input_ids": torch.randint(0, config.vocab_size, (ROWS, TOKENS))}


def one_pass(model: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """Run forward and backward, and drop the gradients."""
    model.train()
    model(**rows)["logits"].sum().backward()
    model.zero_grad(set_to_none=True)


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    started = time.process_time()
    run()
    return time.process_time() - started


def held() -> float:
    """Return the most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(what: str, name: str) -> dict[str, float]:
    """Measure one thing in this process."""
    torch.set_num_threads(1)
    model, rows = build(name)
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    found = {"weights": weights, "built": held()}
    if what == "pass":
        one_pass(model, rows)
    elif what == "memory":
        cut(model, (WORKLOADS[name].cut,), rows, "logits")
    elif what in ("cut", "start"):
        one_pass(model, rows)
        found["pass"] = min(seconds(lambda: one_pass(model, rows)) for _ in range(3))
    if what == "start":
        found["start"] = start(model, rows, WORKLOADS[name].cut)
    elif what == "cut":
        found["cut"] = seconds(lambda: cut(model, (WORKLOADS[name].cut,), rows, "logits"))
    return {**found, "peak": held()}


def start(model: nn.Module, rows: Mapping[str, Tensor], at: str) -> float:
    """Return the CPU seconds from the call of `train` to the first step of a run."""
    topology = vanilla(model, at, output="logits", example=rows, task=sf.classification(2))
    x = next(iter(rows.values())).repeat(3, *[1] * (next(iter(rows.values())).dim() - 1))
    kind: Any = "float32" if x.is_floating_point() else "int64"
    data = sf.data.from_arrays(x, torch.arange(len(x)) % 2, dtype=kind)
    stopped: list[float] = []

    def first_step(*_: Any, **__: Any) -> None:
        stopped.append(time.process_time())
        raise KeyboardInterrupt

    began = time.process_time()
    with mock.patch.object(LocalEngine, "train", first_step), contextlib.suppress(KeyboardInterrupt):
        sf.train(topology, data.clients(1, victims=1, validation=0.0), rounds=1, batch_size=ROWS, seed=0)
    return stopped[0] - began


def measure(what: str, name: str) -> dict[str, float]:
    """Measure one thing in a fresh process."""
    command = [sys.executable, "-m", "experiments.benchmarks.cutting", "--child", what, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def made_bert(shape: Sequence[int], outputs: int) -> nn.Module:
    """Return BERT-base, as a model that the command line makes by its path."""
    return build("bert")[0]


def list_cuts() -> None:
    """Print CPU seconds and memory of `splitfed cuts --blocks` of BERT-base."""
    model = [f"{__file__}:made_bert", "--shape", str(TOKENS), "--integers", "30522", "--blocks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "splitfed", "cuts", *model], check=True, env=environment)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(f"splitfed cuts --blocks: {taken:.1f} s of CPU (aim: {CUTS_SECONDS:.0f} s), {peak:.0f} MB")


def main(names: Sequence[str]) -> None:
    if names and names[0] == "--child":
        print(json.dumps(child(names[1], names[2])))
        return
    if names and names[0] == "cuts":
        list_cuts()
        return
    if names and names[0] == "start":
        for name in names[1:]:
            times = measure("start", name)
            print(f"{name}: a run's start {times['start'] / times['pass']:.2f} passes", flush=True)
        return
    for name in names or WORKLOADS:
        one, memory, times = (measure(what, name) for what in ("pass", "memory", "cut"))
        more = (memory["peak"] - one["peak"]) / one["weights"]
        print(
            f"{name}: weights {one['weights']:.0f} MB; a pass {times['pass']:.2f} s, {one['peak']:.0f} MB; "
            f"a cut {times['cut']:.2f} s, {times['cut'] / times['pass']:.2f} passes; {memory['peak']:.0f} MB, "
            f"{more:.2f} weights more",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
