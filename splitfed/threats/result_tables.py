"""What an attack achieved, as flat rows, in a line and as a table of HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitfed.attacks.threat_model import WHITE_BOX
from splitfed.drawing.html_table import html_table

if TYPE_CHECKING:
    from splitfed.threats.attack_result import AttackResult

COLUMNS = ("metric", "of", "mean", "low", "high", "median", "worst_decile", "n")


def result_rows(result: AttackResult) -> list[dict[str, Any]]:
    """Return a flat row a metric and predictor.

    "of": "attack", a baseline, or "stolen clone", "stolen trained" and "stolen fresh" of a stolen model. "low", "high":
    the 95 % interval of the mean over "n" victims, None where there is none. "median", "worst_decile": of
    reconstructions, see `splitfed.stats.intervals.Interval`; None of other scores.
    """
    own = {**result.scores, **{f"stolen {who}": scores for who, scores in (result.stolen or {}).items()}}
    return [
        {
            "attack": result.attack,
            "adversary": result.adversary,
            "threat_model": result.threat_model,
            "metric": metric,
            "of": who,
            "mean": found.mean,
            "low": found.low if found.known else None,
            "high": found.high if found.known else None,
            "median": found.median,
            "worst_decile": found.worst_decile,
            "n": found.n,
            "seconds": result.seconds,
            "quick": result.quick,
            "under_trained": ", ".join(result.under_trained),
            "unadapted": ", ".join(result.unadapted),
            "releases": result.releases,
        }
        for metric in dict.fromkeys(metric for scores in own.values() for metric in scores)
        for who, scores in own.items()
        if (found := scores.get(metric)) is not None
    ]


def describe_result(result: AttackResult) -> str:
    """Return a line: who attacked how many victims, and each score with what the baselines reach."""
    said = []
    for metric, found in result.scores.get("attack", {}).items():
        others = [f"{who} {scores[metric].mean:.4g}" for who, scores in result.scores.items() if metric in scores]
        beside = ", ".join(other for other in others if not other.startswith("attack "))
        said.append(f"{metric} {found.mean:.4g}" + (f" ({beside})" if beside else ""))
    quick = (", white box" if result.threat_model == WHITE_BOX else "") + (", a quick look" if result.quick else "")
    low = f", under-trained (below {', '.join(result.under_trained)})" if result.under_trained else ""
    blind = f", did not adapt to {', '.join(result.unadapted)}" if result.unadapted else ""
    victims = f"{result.victims} victim{'' if result.victims == 1 else 's'}"
    victims += "" if result.repeated is None else f", {result.repeated}"
    return (
        f"AttackResult({result.attack} by {result.adversary}, {victims}{quick}{low}{blind}: "
        f"{'; '.join(said) or 'no score'})"
    )


def result_html(result: AttackResult) -> str:
    """Return the rows as a table of HTML, under that line."""
    caption = describe_result(result).partition(": ")[0].removeprefix("AttackResult(")
    return html_table(caption, COLUMNS, [[row[name] for name in COLUMNS] for row in result_rows(result)])
