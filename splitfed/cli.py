"""The command line: one function a command; packages that are slow to import are imported where they are used."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from splitfed.cli_options import Options, build_parser, parse_options
from splitfed.core.errors import InvalidInput, SplitfedError, unknown
from splitfed.study.run import failures
from splitfed.study.run.terminal_messages import (
    abandon_output,
    one_line_warnings,
    others_print_aside,
    print_error,
    resume_command,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: those of the process) and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Small models run four times as fast on one thread; whoever trains large ones sets more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with failures.catch_termination(), one_line_warnings():
        try:
            options = parse_options(argv)
            if options.version or options.command is None:
                print(_version() if options.version else build_parser()[0].format_help(), end="")
                return 0
            _check_before_imports(options)
            COMMANDS[options.command](options)
            # A failure to write the output is reported here, not by the interpreter when the process ends.
            sys.stdout.flush()
        except SystemExit as stop:
            return int(stop.code or 0)
        except KeyboardInterrupt as stop:
            failures.ignore_signals()
            ended = isinstance(stop, failures.Terminated)
            print_error(f"{'terminated' if ended else 'interrupted'}; what is finished is kept: {resume_command(argv)}")
            return 143 if ended else 130
        except BrokenPipeError:
            # The reader of the output has closed the pipe; what is still buffered cannot be written.
            abandon_output()
            return 1
        except Exception as error:  # an error in splitfed itself is reported in one line too
            if "--debug" in argv:
                raise
            return _report_failure(error, argv)
    return 0


def _report_failure(error: Exception, given: Sequence[str]) -> int:
    """Print the error, one line for each mistake in a study, and return the exit code."""
    machine_failure = None if isinstance(error, SplitfedError) else failures.explain_failure(error)
    if isinstance(error, SplitfedError):
        print_error(str(error))
        return 2 if isinstance(error, InvalidInput) else 1
    if machine_failure is not None:
        what, advice = machine_failure
        try:
            sys.stdout.flush()
        except OSError:
            # The full disk may be that of standard output, which the process would flush again when it ends.
            abandon_output()
        print_error(f"{what}; {advice}, then {resume_command(given)}")
        return 2
    reason = " ".join(str(error).split())[:300]
    print_error(f"internal error: {type(error).__name__}: {reason} (--debug shows where)")
    return 1


def _version() -> str:
    from splitfed import __version__

    return f"{__version__}\n"


def _check_before_imports(options: Options) -> None:
    """Raise `InvalidInput` for mistakes that can be found without torch, then import what all other checks need."""
    workers = getattr(options, "workers", None)
    if workers is not None and workers < 1:
        raise InvalidInput(f"workers={workers} is not allowed; expected a whole number of at least 1")
    if options.command not in ("run", "plan"):
        return
    from splitfed.study.config.mistakes import InvalidStudy
    from splitfed.study.config.table_check import check_file

    path, early = Path(options.study), None
    try:
        check_file(path)
    except InvalidStudy as error:
        # Printed at once; mistakes in values, which take longer to find, are printed after it.
        print_error(str(error))
        early = error
    _import_checks()
    if early is not None:
        from splitfed.study.run.checked_study import mistakes_in_values, read_study_file

        with others_print_aside():
            raw, base, code = read_study_file(path, trust=options.trust)
            more = mistakes_in_values(raw, path.name, base, code, early)
        if more:
            print_error("\n".join(more))
        raise SystemExit(2)


def _import_checks() -> None:
    """Import the modules that all checks of a study need, without garbage collection in between."""
    if "torch" in sys.modules or not gc.isenabled():
        return
    # None of torch's many objects is freed, but the collector would traverse them again and again.
    gc.disable()
    try:
        importlib.import_module("splitfed.study.run.checked_study")
    finally:
        gc.freeze()
        gc.enable()


def _run_demo(options: Options) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(2, cores) if options.workers is None else options.workers
    with resources.as_file(resources.files("splitfed.study.config") / "demo.toml") as path:
        _run(path, Path(options.folder), resume=True, workers=workers, as_json=options.json)


def _run_study(options: Options) -> None:
    folder = None if options.folder is None else Path(options.folder)
    _run(
        *(Path(options.study), folder),
        resume=options.resume,
        workers=options.workers,
        as_json=options.json,
        trust=options.trust,
        dry_run=options.dry_run,
    )


def _run(path: Path, folder: Path | None, *, trust: bool = False, **given: Any) -> None:
    """Do the study in the file `path`; `given` are the options of `run_command`."""
    from splitfed.study.run.checked_study import folder_named_after, prepare_study

    home = folder or folder_named_after(path)
    with others_print_aside():
        ready = prepare_study(path, trust=trust, folder=home)
    # Imported after the checks: it imports a database and figures, which a study with a mistake does not need.
    from splitfed.study.run.run_command import run_command

    if not run_command(ready, home or Path(ready.grid.name), trust=trust, **given):
        raise SystemExit(1)


def _attack_run(options: Options) -> None:
    from splitfed.attacks.threat_model import WHITE_BOX
    from splitfed.study.report.remarks import attack_remarks, score_details
    from splitfed.study.results import to_json
    from splitfed.study.run import reattack
    from splitfed.study.run.store import study_of

    if options.list == (options.attack is not None):
        raise InvalidInput("splitfed attack: expected --attack NAMES, or --list to see which apply")
    if options.list:
        with others_print_aside():
            found = reattack.applicable_attacks(Path(options.run), options.adversary, trust=options.trust)
        print(json.dumps(found) if options.json else reattack.format_applicable(found))
        return
    names = [name.strip() for name in options.attack.split(",") if name.strip()]
    given = Path(options.run), names, options.budget, options.adversary
    with others_print_aside():
        asked = {"releases": options.releases, "threat_model": options.threat_model, "round": options.round}
        entries = reattack.attack_run(*given, **asked, trust=options.trust)
    if options.json:
        print(json.dumps([to_json(attack) for attack in entries]))
        return
    for attack in entries:
        own = {metric: who["attack"] for metric, who in attack.scores.items() if "attack" in who}
        scores = ", ".join(f"{metric} {found}" for metric, found in own.items())
        quick = " (quick look)" if attack.quick else ""
        model = ", white box" if attack.threat_model == WHITE_BOX else ""
        print(f"{attack.label} by {attack.adversary}{model}: {scores}{quick}")
        for said in (*score_details(attack), *attack_remarks(attack)):
            print(said)
    if (study := study_of(Path(options.run))) is not None:
        print(f"results.csv has it; report.html once more: splitfed report {study}")


def _continue_run(options: Options) -> None:
    from splitfed.study.results import to_json
    from splitfed.study.run import longer, session

    with others_print_aside():
        found = longer.continue_run(Path(options.run), options.rounds, trust=options.trust)
    print(json.dumps(to_json(found)) if options.json else session.format_outcome(found))


def _print_plan(options: Options) -> None:
    from rich.console import Console

    from splitfed.study.report import plan_table, planned_costs
    from splitfed.study.run.checked_study import prepare_study
    from splitfed.study.run.search_plan import plan_search, print_search_plan

    others = planned_costs.check_schedule_names([name.strip() for name in options.schedules.split(",") if name.strip()])
    with others_print_aside():
        study = prepare_study(Path(options.study), trust=options.trust)
        costs = planned_costs.plan_study(study.grid, study.data, others)
        search = None if study.search is None else plan_search(study.search, study.grid.cells, study.data)
    if options.json:
        print(json.dumps(costs if search is None else {**costs, "search": search}))
        return
    # A file is as wide as it needs to be.
    console = Console(width=None if sys.stdout.isatty() else 120)
    if search is not None:
        print_search_plan(search, console)
    plan_table.print_plan(costs, console)


def _list_cuts(options: Options) -> None:
    from rich.console import Console

    from splitfed.core.equivalence import describe_proof
    from splitfed.core.weight_sharing import count_weights
    from splitfed.study.report import cut_table
    from splitfed.study.report.figures.cut_places import check_figure_file, save_figure
    from splitfed.study.run import cut_survey, progress

    figure = None if options.figure is None else check_figure_file(Path(options.figure))
    request = cut_survey.ModelRequest(options.model, options.shape, options.outputs, options.set, options.integers)
    with progress.open_bar("places") as bar, others_print_aside():
        found = cut_survey.survey(request, options.depth, bar, blocks=options.blocks, trust=options.trust)
    auto = {name: choice.cuts for name, choice in found.auto.items()}
    if figure is not None:
        save_figure(figure, found.model, found.places, auto.get("vanilla", ()))
    if options.json:
        print(json.dumps(cut_survey.survey_to_json(found)))
        return
    # A file is as wide as it needs to be.
    cut_table.print_places(found.places, auto, Console(width=None if sys.stdout.isatty() else 120))
    if proof := describe_proof(count_weights((found.model,))):
        print(proof)
    for name, choice in found.auto.items():
        print(f"{'* ' if name == 'vanilla' else ''}{name}: {choice.why}")
    if figure is not None:
        print(f"figure: {figure.resolve()}")


def _predict_rows(options: Options) -> None:
    from splitfed.study.run import prediction

    if (options.view is None) != (options.view_output is None):
        raise InvalidInput("--view and --view-output belong together: whose view, and the file for it")
    output, view = (None if given is None else Path(given) for given in (options.output, options.view_output))
    given = (Path(options.run), Path(options.input), options.client, options.head, output, options.view, view)
    with others_print_aside():
        found = prediction.predict(*given, standardized=options.standardized, trust=options.trust)
    print(json.dumps(found) if options.json else prediction.format_prediction(found))


def _audit_run(options: Options) -> None:
    from splitfed.study.run import audit

    with others_print_aside():
        findings = audit.audit_folder(Path(options.run), options.trials, trust=options.trust)
    print(json.dumps(findings) if options.json else audit.format_audit(findings))
    if not findings["held"]:
        raise SystemExit(1)


def _compare(options: Options) -> None:
    from splitfed.study.run import compare
    from splitfed.training.checkpoint import write_atomic

    with others_print_aside():
        found = compare.compare(
            *options.folders,
            settings=[compare.parse_setting(text) for text in options.setting],
            axis=options.axis,
            only=None if options.only is None else compare.parse_setting(options.only),
            metrics=[name.strip() for name in (options.metric or "").split(",") if name.strip()],
            level=options.level,
            power=options.power,
            rows=not options.no_rows,
            test_rows=options.test_rows,
            trust=options.trust,
        )
    if options.markdown is not None:
        write_atomic(Path(options.markdown), f"{found.to_markdown()}\n".encode())
    print(json.dumps(found.to_json()) if options.json else found.to_text())


def _write_report(options: Options) -> None:
    from splitfed.study.report.data import describe_unfinished
    from splitfed.study.report.document import write_report
    from splitfed.study.report.summary import summarise

    path = write_report(Path(options.folder))
    print(json.dumps(summarise(Path(options.folder))) if options.json else path)
    if said := describe_unfinished(Path(options.folder)):
        print(f"{said}; the report leaves them out", file=sys.stderr)


def _list(options: Options) -> None:
    from splitfed.registry import EXTENSIONS, TABLES, read_head, resolve

    listings = EXTENSIONS["listings"]
    kind, known = options.kind, [*TABLES, *listings]
    if kind and kind not in known:
        raise unknown("kind", kind, known)
    found = {
        one: [read_head(one, name)._asdict() for name in TABLES[one]] if one in TABLES else resolve(listings[one])()
        for one in ([kind] if kind else known)
    }
    if options.json:
        print(json.dumps(found[kind] if kind else found))
        return
    width = max((len(entry["name"]) for heads in found.values() for entry in heads), default=0) + 2
    for shown, heads in found.items():
        print(f"{shown}{'' if heads else ': none yet'}")
        for entry in heads:
            print(f"  {entry['name']:{width}}{entry['summary']}")
            if kind and entry["paper"]:
                print(f"  {'':{width}}{entry['paper']}")


def _work(options: Options) -> None:
    from splitfed.models.import_paths import NameResolver
    from splitfed.study.run import session

    session.run_worker(Path(options.folder), NameResolver.from_json(options.code), options.token, int(options.channel))


COMMANDS: dict[str, Callable[[Options], None]] = {
    "demo": _run_demo,
    "run": _run_study,
    "plan": _print_plan,
    "cuts": _list_cuts,
    "attack": _attack_run,
    "continue": _continue_run,
    "predict": _predict_rows,
    "audit": _audit_run,
    "compare": _compare,
    "report": _write_report,
    "list": _list,
    "_worker": _work,
}
"""Command -> the function that runs it."""


if __name__ == "__main__":
    sys.exit(main())
