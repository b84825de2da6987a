"""The command line: the only place that knows everything by name; what is heavy is imported when it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from splitfed.core.errors import InvalidInput, SplitfedError, unknown
from splitfed.study.run import failures
from splitfed.study.run.request import RunRequest
from splitfed.study.run.terminal_messages import abandon_output, one_line_warnings, print_error, resume_command

Options = argparse.Namespace
Argument = tuple[tuple[str, ...], dict[str, Any]]
Command = tuple[Callable[[Options], None], str, *tuple[Argument, ...]]

ABOUT = (
    "A framework for split learning and its privacy: train split models, defend and attack them, and count what that "
    "costs. A study is a TOML file; docs/studies.md says what it may contain."
)
EPILOG = (
    "Options of a command: splitfed COMMAND --help. Exit code 0: done; 1: splitfed or a computation failed, or an "
    "audited claim does not hold; 2: a mistake in the input, or a machine that refused, such as a full disk, one line "
    "each; 130: interrupted; 143: terminated."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: those of the process) and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    # Small models run four times as fast on one thread; whoever trains large ones sets more.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with failures.catch_termination(), one_line_warnings():
        try:
            options = _parse_options(argv)
            options.command(options)
            # What cannot be written is to be known here, not when the process ends.
            sys.stdout.flush()
        except SystemExit as stop:
            return int(stop.code or 0)
        except KeyboardInterrupt as stop:
            failures.ignore_signals()
            ended = isinstance(stop, failures.Terminated)
            print_error(f"{'terminated' if ended else 'interrupted'}; what is finished is kept: {resume_command(argv)}")
            return 143 if ended else 130
        except BrokenPipeError:
            # Whoever read our output has left; what is still buffered cannot be written.
            abandon_output()
            return 1
        except Exception as error:  # the last line of defence: a failure of ours is one line too
            if "--debug" in argv:
                raise
            return _report_failure(error, argv)
    return 0


def _report_failure(error: Exception, given: Sequence[str]) -> int:
    """Say in one line what went wrong, or one a mistake, and return the exit code."""
    machine_failure = None if isinstance(error, SplitfedError) else failures.explain_failure(error)
    if isinstance(error, SplitfedError):
        print_error(str(error))
        return 2 if isinstance(error, InvalidInput) else 1
    if machine_failure is not None:
        what, advice = machine_failure
        try:
            sys.stdout.flush()
        except OSError:
            # What is full may be the disk that standard output goes to; the process would try again when it ends.
            abandon_output()
        print_error(f"{what}; {advice}, then {resume_command(given)}")
        return 2
    reason = " ".join(str(error).split())[:300]
    print_error(f"internal error: {type(error).__name__}: {reason} (--debug shows where)")
    return 1


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what the user got wrong."""
        raise InvalidInput(f"{self.prog}: {message} (see {self.prog} --help)")


def _argument(*names: str, **options: Any) -> Argument:
    """Return what `ArgumentParser.add_argument` is to be called with."""
    return names, options


_EVERYWHERE = (
    _argument("--json", action="store_true", help="print the results as JSON on the last line"),
    _argument("--debug", action="store_true", help="print the traceback of an error"),
)
_RUN = _argument("run", help="folder of the run, STUDY/runs/NAME")
_STUDY = _argument("study", help="file of the study, in TOML")
_TRUST = _argument(
    "--trust",
    action="store_true",
    help="allow the code and data files that results of somebody else name; your own results need no --trust",
)


def _commands() -> dict[str, Command]:
    """Return each command: what it calls, its line of help, and its arguments beside those that all have."""
    return {
        "demo": (
            _run_demo,
            "train, defend and attack a model of digits, and write a report, in a minute",
            _argument("--folder", default="demo", help="folder of the results (default: demo)"),
            _argument("--workers", type=int, help="processes (default: one per core, at most 2)"),
        ),
        "run": (
            _run_study,
            "train and attack every setting of a study, and write its report",
            _STUDY,
            _argument("--folder", help="folder of the results (default: the study's name)"),
            _argument("--resume", action="store_true", help="continue an interrupted study in its folder"),
            _argument("--workers", type=int, default=1, help="number of processes that share the runs (default: 1)"),
            _argument("--dry-run", action="store_true", help="check all, list the runs and their time, write nothing"),
            _TRUST,
        ),
        "plan": (
            _print_plan,
            "print bytes, operations, memory, time and epsilon of a study without training it",
            _STUDY,
            _argument(
                "--schedules",
                default="all",
                help="schedules to compare with the study's own: all (default), or names separated by commas",
            ),
            _TRUST,
        ),
        "cuts": (
            _list_cuts,
            "list where a model can be cut, what would cross there, and what cut = 'auto' takes",
            _argument("model", help="name of a model, module:Class, file.py:function, or the file of a study, in TOML"),
            _argument("--shape", help="shape of one row of the input, such as 1,28,28; a study has its own"),
            _argument("--outputs", type=int, help="outputs of the model (default: 10)"),
            _argument(
                "--set",
                action="append",
                default=[],
                metavar="KEY=VALUE",
                help="parameter of the model as in a study, such as hidden=[64,32]; once for each",
            ),
            _argument(
                "--integers",
                type=int,
                help="fill the rows with whole numbers below this, for a model that reads token ids",
            ),
            _argument(
                "--depth",
                type=int,
                help="how deep submodules are tried: 1 for those of the model itself (default: all)",
            ),
            _argument("--figure", help=".svg or .png file for a drawing of the model with its places"),
            _TRUST,
        ),
        "attack": (
            _attack_run,
            "run more attacks on a finished run, without training it again",
            _RUN,
            _argument("--attack", help="attacks to run: names separated by commas"),
            _argument("--list", action="store_true", help="list which attacks apply, and why others do not"),
            _argument(
                "--budget",
                help="effort of the attacks: fast (a quick look), default (enough: doubling its time gained next to "
                "nothing) or paper (the authors' settings); without --budget: default where an attack has it, else "
                "fast",
            ),
            _argument("--preset", dest="budget", help=argparse.SUPPRESS),  # as it was called before
            _argument("--adversary", help="attacking party (default: the first without data; with --list: all)"),
            _TRUST,
        ),
        "continue": (
            _continue_run,
            "train a finished run for more rounds, and measure and attack it again",
            _RUN,
            _argument("--rounds", type=int, required=True, help="number of rounds beyond those that it has"),
            _TRUST,
        ),
        "predict": (
            _predict_rows,
            "predict new rows with the model of a finished run, its defenses included",
            _RUN,
            _argument("--input", required=True, help="file of the rows: .npy, .npz (array x) or .csv (numbers only)"),
            _argument("--client", type=int, default=0, help="number of the client that predicts (default: 0)"),
            _argument("--head", help="output to predict, if the model has several (default: the first)"),
            _argument("--output", help=".csv file for the predictions (default: print the first rows)"),
            _argument("--view", metavar="PARTY", help="record what this party receives, into --view-output"),
            _argument("--view-output", help=".safetensors file for what --view records"),
            _TRUST,
        ),
        "audit": (
            _audit_run,
            "compare the epsilon that a finished run claims with a measured lower bound",
            _RUN,
            _argument(
                "--trials",
                type=int,
                default=20_000,
                help="samples of each of two neighbouring inputs, at least 40 (default: 20000)",
            ),
            _TRUST,
        ),
        "compare": (
            _compare,
            "compare settings of finished runs, paired by seed and by victim: differences, tests, seeds for a claim",
            _argument("folders", nargs="+", help="folders of studies or of runs, at least two; or one study"),
            _argument("--axis", help="of one study: compare all values of topology, schedule, method, defense, ..."),
            _argument(
                "--setting",
                action="append",
                default=[],
                metavar="AXIS=VALUE",
                help="of one study: a setting to compare, such as defense=none; once for each; several axes with ; "
                "between",
            ),
            _argument("--only", metavar="AXIS=VALUE", help="leave out all runs but those with these values"),
            _argument("--metric", help="metrics to compare, separated by commas, such as accuracy,psnr (default: all)"),
            _argument("--level", type=float, default=0.05, help="level of claims after correction (default: 0.05)"),
            _argument(
                "--power", type=float, default=0.8, help="chance of a claim that seeds are counted for (default: 0.8)"
            ),
            _argument("--no-rows", action="store_true", help="compare over seeds alone, not over victims"),
            _argument("--test-rows", action="store_true", help="rebuild the runs and compare their test rows too"),
            _argument("--markdown", help=".md file for the same as Markdown"),
            _TRUST,
        ),
        "report": (
            _write_report,
            "write the report of a study again from its folder of results",
            _argument("folder", help="folder of the study's results"),
        ),
        "list": (
            _list,
            "list the names of algorithms, data sets and models",
            _argument(
                "kind",
                nargs="?",
                help="topologies, schedules, defenses, attacks, detectors, poisoning, aggregation, methods, data, "
                "models or encryption (default: all)",
            ),
        ),
    }


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser("splitfed", description=ABOUT, epilog=EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=lambda options: parser.print_help())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for name, (function, text, *arguments) in _commands().items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=function)
        for names, options in (*_EVERYWHERE, *arguments):
            command.add_argument(*names, **options)
    worker = commands.add_parser("_worker")
    for name in ("folder", "code", "token", "call"):
        worker.add_argument(name)
    worker.add_argument("--debug", action="store_true")
    worker.set_defaults(command=_work)
    return parser, dict(commands.choices)


def _parse_options(given: Sequence[str]) -> Options:
    parser, commands = _parser()
    if given and not given[0].startswith("-") and given[0] not in commands:
        raise unknown("command", given[0], [name for name in commands if not name.startswith("_")])
    options, rest = parser.parse_known_args(given)
    if rest:
        known = commands.get(given[0], parser)
        names = [text for action in known._actions for text in action.option_strings]
        if rest[0].startswith("-"):
            raise unknown("option", rest[0].partition("=")[0], names)
        raise InvalidInput(f"argument {rest[0]!r} is one too many (see {known.prog} --help)")
    if options.version:
        from splitfed import __version__

        print(__version__)
        raise SystemExit(0)
    return options


def _run_demo(options: Options) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(2, cores) if options.workers is None else options.workers
    with resources.as_file(resources.files("splitfed.study.config") / "demo.toml") as path:
        _run(RunRequest(path, Path(options.folder), resume=True, workers=workers, as_json=options.json))


def _run_study(options: Options) -> None:
    folder = None if options.folder is None else Path(options.folder)
    given = (options.resume, options.workers, options.json, options.trust, options.dry_run)
    _run(RunRequest(Path(options.study), folder, *given))


def _run(request: RunRequest) -> None:
    from splitfed.study.run.run_command import run_command

    if not run_command(request):
        raise SystemExit(1)


def _attack_run(options: Options) -> None:
    from splitfed.study.report.remarks import attack_remarks
    from splitfed.study.run import reattack

    if options.list == (options.attack is not None):
        raise InvalidInput("splitfed attack: expected --attack NAMES, or --list to see which apply")
    if options.list:
        found = reattack.applicable_attacks(Path(options.run), options.adversary, trust=options.trust)
        print(json.dumps(found) if options.json else reattack.format_applicable(found))
        return
    names = [name.strip() for name in options.attack.split(",") if name.strip()]
    entries = reattack.attack_run(Path(options.run), names, options.budget, options.adversary, trust=options.trust)
    if options.json:
        print(json.dumps(entries))
        return
    for attack in entries:
        means = {metric: who["attack"]["mean"] for metric, who in attack["scores"].items() if "attack" in who}
        scores = ", ".join(f"{metric} {'-' if mean is None else format(mean, '.3g')}" for metric, mean in means.items())
        quick = " (quick look)" if attack.get("quick") else ""
        print(f"{attack['label']} by {attack['adversary']}: {scores}{quick}")
        for said in attack_remarks(attack):
            print(said)


def _continue_run(options: Options) -> None:
    from splitfed.study.run import longer, session

    found = longer.continue_run(Path(options.run), options.rounds, trust=options.trust)
    print(json.dumps(found) if options.json else session.format_outcome(found))


def _print_plan(options: Options) -> None:
    from rich.console import Console

    from splitfed.registry import TABLES
    from splitfed.study.report import plan_table, planned_costs
    from splitfed.study.run import session
    from splitfed.study.run.search_plan import plan_search, print_search_plan

    names = [name.strip() for name in options.schedules.split(",") if name.strip()]
    others = list(TABLES["schedules"]) if names == ["all"] else planned_costs.check_schedule_names(names)
    study = session.prepare_study(Path(options.study), trust=options.trust)
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

    from splitfed.study.report import cut_table
    from splitfed.study.report.figures.cut_places import check_figure_file, save_figure
    from splitfed.study.run import cut_survey, progress

    figure = None if options.figure is None else check_figure_file(Path(options.figure))
    request = cut_survey.ModelRequest(options.model, options.shape, options.outputs, options.set, options.integers)
    with progress.open_bar("places") as bar:
        found = cut_survey.survey(request, options.depth, bar, trust=options.trust)
    auto = {name: choice.cuts for name, choice in found.auto.items()}
    if figure is not None:
        save_figure(figure, found.model, found.places, auto["vanilla"])
    if options.json:
        print(json.dumps(cut_survey.survey_to_json(found)))
        return
    # A file is as wide as it needs to be.
    cut_table.print_places(found.places, auto, Console(width=None if sys.stdout.isatty() else 120))
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
    found = prediction.predict(*given, trust=options.trust)
    print(json.dumps(found) if options.json else prediction.format_prediction(found))


def _audit_run(options: Options) -> None:
    from splitfed.study.run import audit

    findings = audit.audit(Path(options.run), options.trials, trust=options.trust)
    print(json.dumps(findings) if options.json else audit.format_audit(findings))
    if not findings["held"]:
        raise SystemExit(1)


def _compare(options: Options) -> None:
    from splitfed.study.run import compare
    from splitfed.training.checkpoint import write_atomic

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
    from splitfed.study.report.document import summarise, write_report

    path = write_report(Path(options.folder))
    print(json.dumps(summarise(Path(options.folder))) if options.json else path)


def _list(options: Options) -> None:
    from splitfed.core.encryption_settings import describe_protocols
    from splitfed.old_names import current_kind
    from splitfed.registry import TABLES, read_head

    kind, known = options.kind and current_kind(options.kind), [*TABLES, "encryption"]
    if kind and kind not in known:
        raise unknown("kind", kind, known)
    found = {
        one: [read_head(one, name)._asdict() for name in TABLES[one]] if one in TABLES else describe_protocols()
        for one in ([kind] if kind else known)
    }
    if options.json:
        print(json.dumps(found[kind] if kind else found))
        return
    for shown, heads in found.items():
        print(f"{shown}{'' if heads else ': none yet'}")
        for entry in heads:
            print(f"  {entry['name']:22}{entry['summary']}")
            if kind and entry["paper"]:
                print(f"  {'':22}{entry['paper']}")


def _work(options: Options) -> None:
    from splitfed.models.import_paths import Code
    from splitfed.study.run import session

    session.run_worker(Path(options.folder), Code.from_json(options.code), options.token, options.call)


if __name__ == "__main__":
    sys.exit(main())
