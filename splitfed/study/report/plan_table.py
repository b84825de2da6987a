"""What `splitfed plan` prints: the cost of every schedule, the published formulas, and what each defense promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from splitfed.privacy.ledger import describe_ledger
from splitfed.registry import EXTENSIONS, resolve
from splitfed.study.config.run_spec import COMPUTATION, name_clients
from splitfed.study.report.data import call_defense
from splitfed.study.report.remarks import describe_start, start_warnings
from splitfed.study.report.units import count_noun, format_bytes, format_seconds

Json = Mapping[str, Any]
EQUAL_SEEDS = (
    "settings of a study draw equal noise from equal seeds: of the runs with one seed publish one, and add up the "
    "figures of those that are published"
)
HINT = "simulated time needs [training.speeds], say default = {compute = 1e9, up = 1e6, down = 1e6, latency = 0.01}"


def print_plan(plan: Json, console: Console) -> None:
    """Print `plan`, as `costs.plan` returns it."""

    def say(text: str, **style: Any) -> None:
        console.print(text, highlight=False, markup=False, **style)

    say(
        f"{plan['study']}: {count_noun(plan['clients'], 'client')}, {count_noun(plan['rounds'], 'round')} of "
        f"{count_noun(plan['local_epochs'], 'local epoch')}, nothing trained"
    )
    split = "" if plan["seeds"] == 1 else f" for the split of seed {plan['seed']}"
    say(f"bytes and messages are exact{split}; operations are the mean over the parties of a role, memory an estimate")
    say("* marks the study's own schedules")
    for line in describe_differences(plan["clients_differ"]):
        say(line)
    for place in plan["topologies"]:
        say(f"\n{place['topology']}", style="bold")
        if place["cut_choice"]:
            say(place["cut_choice"])
        if place["replayed"]:
            say("cut by replay, as its model cannot be traced: every party goes through the whole forward")
        for told in place["told"]:
            say(told)
        rows = [row for row in place["schedules"] if row["refused"] is None]
        console.print(_traffic_table(rows))
        say("")
        console.print(_work_table(rows))
        say("")
        for row in place["schedules"]:
            if row["refused"] is not None:
                say(f"{row['schedule']} is refused: {row['refused']}")
                continue
            if row["at_most"] is not None:
                say(f"{_schedule_name(row)} counts at most what crosses: {row['at_most']}")
            for name, describe in EXTENSIONS["planned_batches"].items():
                if name in row:
                    say(f"{_schedule_name(row)}: {resolve(describe)(row[name])}")
            if row["in_study"]:
                more = [f" ({said})" for said in start_warnings(plan["starts_asked"], row["starts"])]
                say(f"{_schedule_name(row)}: {describe_start(row['restart_optimizers'], row['starts'])}{''.join(more)}")
        if place["federated_averaging_bytes"] is not None:
            sent = format_bytes(place["federated_averaging_bytes"])
            say(f"beside it: federated averaging of the uncut model by every client in every round sends {sent}")
        if place["formulas"] is not None:
            console.print(_formula_table(place["formulas"]))
            say(_crossover_sentence(place["formulas"]))
            console.print(_latency_table(place["formulas"]["latency"]))
            say(_best_cut_sentence(place["formulas"]))
    if not plan["speeds"]:
        say(f"\n{HINT}")
    say("\ndefenses (the figures above are without them)")
    for defense in plan["defenses"]:
        say(f"  {call_defense(defense['defense'])}: {defense['guarantee']}")
        for run in defense["bytes"]:
            share = run["bytes"] / run["undefended"]
            where = ", ".join(
                [run["topology"], run["schedule"], *filter(None, [run.get("method"), run.get(COMPUTATION)])]
            )
            say(f"    {where}: {format_bytes(run['bytes'])}, {share:.3g} x what crosses without it")
    for place in plan["privacy"]:
        above = f" + {place['method']}" if "method" in place else ""
        above += f", {place[COMPUTATION]}" if COMPUTATION in place else ""
        say(f"\nprivacy of {place['defense']}, {place['topology']}, {place['schedule']}{above}")
        for said in [place["refused"]] if place["refused"] else describe_ledger(place["ledger"]):
            say(f"  {said}")
    if len(plan["privacy"]) > 1:
        say(f"\n{EQUAL_SEEDS}")


def describe_differences(clients: Sequence[Json]) -> list[str]:
    """Return a line for each model, and each batch size, that some of the clients have; none where all are alike."""
    lines = []
    for key, name in (("model", ""), ("batch_size", "batch size ")):
        for value in dict.fromkeys(one[key] for one in clients if key in one):
            having = [one["client"] for one in clients if one.get(key) == value]
            lines.append(f"{name_clients(having)}: {name}{value}")
    return lines


def _traffic_table(rows: Sequence[Json]) -> Table:
    kinds = sorted({kind for row in rows for kind in row["bytes_by_kind"]})
    table = _table("schedule", ("bytes\nin all", "client\nmean", "client\nlargest", *kinds))
    for row in rows:
        own = row["client_bytes"]
        sizes = (row["bytes"], fmean(own), max(own), *(row["bytes_by_kind"].get(kind, 0) for kind in kinds))
        table.add_row(_schedule_name(row), *map(format_bytes, sizes))
    return table


def _work_table(rows: Sequence[Json]) -> Table:
    """Operations and memory of a party of each role, messages and time."""
    busy = list(dict.fromkeys(role for row in rows for role in row["flops"]))
    roles = list(dict.fromkeys(role for row in rows for role in row["memory"]))
    titles = [
        *(f"GFLOP\n{role}" for role in busy),
        *(f"memory\n{role}" for role in roles),
        "messages",
        "simulated\ntime",
    ]
    table = _table("schedule", titles)
    for row in rows:
        table.add_row(
            _schedule_name(row),
            *(_format_entry(row["flops"], role, lambda each: f"{fmean(each) / 1e9:.3g}") for role in busy),
            *(_format_entry(row["memory"], role, lambda m: format_bytes(m["total"])) for role in roles),
            f"{row['messages']:,}",
            "-" if row["seconds"] is None else format_seconds(row["seconds"]),
        )
    return table


def _formula_table(known: Json) -> Table:
    table = _table(f"formula ({known['source']})", (f"{known['unit']}, a client", "all clients"))
    for key in ("split_with_hand_over", "split_without_hand_over", "federated"):
        table.add_row(key.replace("_", " "), *(f"{known[key][who]:.4g}" for who in ("client", "total")))
    for schedule, formula in known["schedules"].items():
        table.add_row(f"{schedule} ({formula['source']})", "-", f"{formula['total']:.4g}")
    return table


def _latency_table(known: Json) -> Table:
    thapa = known["thapa"]
    table = _table(f"formula ({known['source']})", (f"time of a round at {known['unit']}", "by Thapa et al., 2022"))
    for key, other in (("split", "split"), ("splitfed", "splitfed_v1"), ("local_loss", ""), ("federated", "federated")):
        table.add_row(key, f"{known[key]:.4g}", _format_entry(thapa, other, lambda seconds: f"{seconds:.4g}"))
    return table


def _best_cut_sentence(known: Json) -> str:
    best, own = known["latency"]["optimal_client_share"], known["client_share"]
    if best is None:
        return f"by these formulas the less the client holds the sooner local_loss ends (here {own:.3g} of all weights)"
    return f"by these formulas local_loss ends soonest with {best:.3g} of all weights at the client (here {own:.3g})"


def _crossover_sentence(known: Json) -> str:
    least = known["crossover_clients"]
    return (
        f"by these formulas split learning sends fewer floats for more than {least['with_hand_over']:.4g} clients "
        f"with hand-over, {least['without_hand_over']:.4g} without ({known['examples']:,} examples in all)"
    )


def _table(first: str, titles: Sequence[str]) -> Table:
    numbers = (Column(title, justify="right", overflow="fold") for title in titles)
    first_column = Column(first, overflow="fold", min_width=14)
    return Table(first_column, *numbers, box=None, header_style="bold", pad_edge=False)


def _schedule_name(row: Json) -> str:
    above = "" if row["method"] == "none" else f" + {row['method']}"
    above += "" if row["computation"] == "none" else f", {row['computation']}"
    return f"{row['schedule']}{above} *" if row["in_study"] else str(row["schedule"])


def _format_entry(found: Json, key: str, write: Callable[[Any], str]) -> str:
    return write(found[key]) if key in found else "-"
