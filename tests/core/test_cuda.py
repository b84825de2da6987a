"""The same work on a GPU: close to the CPU's, repeatable, defended and attacked; skipped without one."""

from __future__ import annotations

import pytest
import torch

import splitfed
from splitfed.models import lenet
from splitfed.topologies import u_shaped, vanilla
from tests.core.test_model_loss import language

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trained(device: str, *defenses: splitfed.Defense, shape: str = "vanilla") -> splitfed.Run:
    data = splitfed.data.digits().clients(2, auxiliary=300, victims=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lenet((1, 8, 8), 10)
    topology = vanilla(model, "pool1") if shape == "vanilla" else u_shaped(model, ("pool1", "fc2"))
    return splitfed.train(topology, data, rounds=2, defenses=defenses, device=device)


@pytest.mark.parametrize("shape", ["vanilla", "u_shaped"])
def test_gpu_agrees_with_cpu(shape: str) -> None:
    cpu, gpu = trained("cpu", shape=shape), trained("cuda", shape=shape)
    assert gpu.bytes == cpu.bytes
    assert [e["loss"] for e in gpu.history] == pytest.approx([e["loss"] for e in cpu.history], rel=1e-2)


def test_a_defended_run_repeats_and_can_be_attacked() -> None:
    defenses = (splitfed.defenses.DistanceCorrelation(0.3), splitfed.defenses.Noise(0.2, relative=True))
    first, second = trained("cuda", *defenses), trained("cuda", *defenses)
    assert [e["loss"] for e in first.history] == pytest.approx([e["loss"] for e in second.history], rel=1e-3)
    for result in first.attack(["inverse_network", "rmle"], budget="quick"):
        assert result.prediction.device.type == "cpu"
        assert bool(torch.isfinite(result.prediction).all())


def test_a_replayed_model_with_its_own_loss_agrees_with_the_cpu() -> None:
    words = torch.randint(0, 11, (32, 5), generator=torch.Generator().manual_seed(1))
    losses = []
    for device in ("cpu", "cuda"):
        model = language()
        task = splitfed.model_task(model, {"words": words[:8], "labels": words[:8]})
        topology = vanilla(model, "words", task, words[:8])
        data = splitfed.Dataset("words", words, words, task).clients(1, auxiliary=4, victims=2)
        losses.append([e["loss"] for e in splitfed.train(topology, data, rounds=2, device=device).history])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
