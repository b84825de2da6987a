"""The plot of what a training attack recovered while training went on: its error by round, beside that of the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitfed.study.report.data import Setting
from splitfed.study.report.figures.style import MUTED, SeriesStyles, add_legend, as_svg, canvas

Summary = Mapping[str, Any]


def error_by_round(run: Mapping[str, Any], attack: str, who: str = "attack") -> dict[int, float]:
    """Return round (from 1) -> mean squared error over the victims, where that labelled `attack` was scored."""
    party = next((a["adversary"] for a in run["attacks"] if a["label"] == attack and a.get("lives") != "outside"), None)
    found = {}
    for entry in run["history"]:
        score = (entry.get("training_attack_scores") or {}).get(party, {}).get("mse", {}).get(who)
        if score is not None:
            found[int(entry["round"]) + 1] = float(score)
    return found


def plot_error_by_round(
    summary: Summary, settings: Sequence[Setting], attack: str, looks: SeriesStyles, name: str
) -> str | None:
    """Return an SVG of the mean squared error of the training attack labelled `attack`, by round; a line a setting.

    A thick line is the mean over seeds, thin ones are single seeds, the dashed one is the baseline that answers with
    the mean. None where no run was attacked while training went on.
    """
    curves = [(s, [error_by_round(run, attack) for run in s.runs], s.runs[0]) for s in settings]
    curves = [(setting, seed_curves, run) for setting, seed_curves, run in curves if all(seed_curves)]
    if not curves:
        return None
    with canvas(1, 6.4, 3.9) as (figure, (axis,)):
        for setting, seed_curves, _ in curves:
            style: dict[str, Any] = {"color": looks.colours[setting.family], "ls": looks.dashes[setting.place]}
            for rounds in seed_curves if len(seed_curves) > 1 else []:
                axis.plot(list(rounds), list(rounds.values()), lw=0.6, alpha=0.6, **style)
            shared = [r for r in seed_curves[0] if all(r in rounds for rounds in seed_curves)]
            mean = [sum(rounds[r] for rounds in seed_curves) / len(seed_curves) for r in shared]
            axis.plot(shared, mean, lw=2, marker=".", label=looks.label(setting.defense, setting.place), **style)
        blind = [value for *_, run in curves for value in error_by_round(run, attack, "mean_image").values()]
        if blind:
            label = "baseline: the mean"
            axis.axhline(sum(blind) / len(blind), color=MUTED, ls=(0, (5, 3)), lw=1.2, label=label)
        axis.set(yscale="log", xlabel="round", ylabel="MSE over the victims: less is more leakage")
        axis.xaxis.get_major_locator().set_params(integer=True)
        add_legend(figure, axis)
        return as_svg(figure, name)
