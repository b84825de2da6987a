"""The table of trade-offs: a cell of a tiny budget, and what is shown of a few."""

from __future__ import annotations

from pathlib import Path

from experiments.papers.tradeoff import SETTINGS, Budget, _key, measure, show


def test_a_tiny_cell_and_what_is_shown_of_some(tmp_path: Path) -> None:
    tiny = Budget(300, 1, 60, 10, (4,), (1,))
    disco = next(s for s in SETTINGS if s.family == "DISCO")
    entry = {"seconds": 1.0, **measure("digits", disco, 0, tmp_path, tiny)}
    assert 0 <= entry["accuracy"] <= 1
    assert {"attack ssim", "attack psnr", "mean_image mse", "random_pairing ssim"} <= set(entry)
    done = {}
    for seed, (accuracy, ssim) in enumerate(((0.9, 0.8), (0.8, 0.6))):
        done[_key("digits", SETTINGS[0], seed)] = {**entry, "accuracy": accuracy, "attack ssim": ssim}
        done[_key("digits", disco, seed)] = {**entry, "accuracy": accuracy - 0.1, "attack ssim": ssim - 0.3}
    text = show(done, tmp_path)
    assert "| none | 85.0 (" in text
    assert f"Against no defense, seed by seed: {disco.name}: SSIM -0.30 (-0.30 to -0.30), accuracy -10.0 (" in text
    assert (tmp_path / "tradeoff.svg").read_text("utf-8").startswith("<?xml")
    assert "tradeoff.svg" not in show(done, None)
    assert show({}, None)
