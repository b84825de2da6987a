"""Commands and options of the command line, and their parser, which reports a mistake in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from splitfed.core.errors import InvalidInput, unknown
from splitfed.registry import EXTENSIONS, TABLES

Options = argparse.Namespace
Argument = tuple[tuple[str, ...], dict[str, Any]]
Command = tuple[str, *tuple[Argument, ...]]

ABOUT = (
    "A framework for split learning and its privacy: train split models, defend and attack them, and count what that "
    "costs. A study is a TOML file; docs/studies.md says what it may contain."
)
EPILOG = (
    "Options of a command: splitfed COMMAND --help. Exit code 0: done; 1: splitfed or a computation failed, or an "
    "audited claim does not hold; 2: a mistake in the input, or a machine that refused, such as a full disk, one line "
    "each; 130: interrupted; 143: terminated."
)


class Parser(argparse.ArgumentParser):
    """Parser that raises `InvalidInput` with a message of one line."""

    def error(self, message: str) -> NoReturn:
        """Raise `InvalidInput` with `message`."""
        raise InvalidInput(f"{self.prog}: {message} (see {self.prog} --help)")


def _argument(*names: str, **options: Any) -> Argument:
    """Return the arguments of a call of `ArgumentParser.add_argument`."""
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


COMMANDS: dict[str, Command] = {
    "demo": (
        "train, defend and attack a model of digits, and write a report, in a minute",
        _argument("--folder", default="demo", help="folder of the results (default: demo)"),
        _argument("--workers", type=int, help="processes (default: one per core, at most 2)"),
    ),
    "run": (
        "train and attack every setting of a study, and write its report",
        _STUDY,
        _argument("--folder", help="folder of the results (default: the study's name)"),
        _argument("--resume", action="store_true", help="continue an interrupted study in its folder"),
        _argument("--workers", type=int, default=1, help="number of processes that share the runs (default: 1)"),
        _argument("--dry-run", action="store_true", help="check all, list the runs and their time, write nothing"),
        _TRUST,
    ),
    "plan": (
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
        "list where a model can be cut, what would cross there, and what cut = 'auto' takes",
        _argument("model", help="name of a model, file.py:Name or module:Name, or the file of a study, in TOML"),
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
        _argument(
            "--blocks",
            action="store_true",
            help="try only the blocks of a model that repeats them, such as encoder.layer.3, and what stands beside "
            "their list",
        ),
        _argument("--figure", help=".svg or .png file for a drawing of the model with its places"),
        _TRUST,
    ),
    "attack": (
        "run more attacks on a finished run, without training it again",
        _RUN,
        _argument("--attack", help="attacks to run: names separated by commas"),
        _argument("--list", action="store_true", help="list which attacks apply, and why others do not"),
        _argument(
            "--budget",
            help="effort of the attacks: quick (a quick look), standard (enough: doubling its time gained next to "
            "nothing) or full (the authors' settings); without --budget: standard where an attack has it, else quick",
        ),
        _argument(
            "--threat-model",
            choices=("black_box", "white_box"),
            help="what an attack that has a threat model may know (default: what holds for the adversary)",
        ),
        _argument("--adversary", help="attacking party (default: the first without data; with --list: all)"),
        _argument(
            "--releases",
            type=int,
            default=1,
            help="how often each victim's row is released, with noise drawn anew; attacks get the mean (default: 1)",
        ),
        _argument(
            "--round",
            type=int,
            help="round of recorded training, from 0, up to which attacks on it read what was recorded",
        ),
        _TRUST,
    ),
    "continue": (
        "train a finished run for more rounds, and measure and attack it again",
        _RUN,
        _argument("--rounds", type=int, required=True, help="number of rounds beyond those that it has"),
        _TRUST,
    ),
    "predict": (
        "predict new rows with the model of a finished run, its defenses included",
        _RUN,
        _argument("--input", required=True, help="file of the rows: .npy, .npz (array x) or .csv (numbers only)"),
        _argument("--client", type=int, default=0, help="number of the client that predicts (default: 0)"),
        _argument("--head", help="output to predict, if the model has several (default: the first)"),
        _argument("--output", help=".csv file for the predictions (default: print the first rows)"),
        _argument(
            "--standardized",
            action="store_true",
            help="the rows are standardised as the run's data are (standardize = true)",
        ),
        _argument("--view", metavar="PARTY", help="record what this party receives, into --view-output"),
        _argument("--view-output", help=".safetensors file for what --view records"),
        _TRUST,
    ),
    "audit": (
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
        "compare settings of finished runs, paired by seed and by victim: differences, tests, seeds for a claim",
        _argument("folders", nargs="+", help="folders of studies or of runs, at least two; or one study"),
        _argument("--axis", help="of one study: compare all values of topology, schedule, method, defense, ..."),
        _argument(
            "--setting",
            action="append",
            default=[],
            metavar="AXIS=VALUE",
            help="of one study: a setting to compare, such as defense=none; once for each; several axes with ; between",
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
        "write the report of a study again from its folder of results",
        _argument("folder", help="folder of the study's results"),
    ),
    "list": (
        "list the names of algorithms, data sets and models",
        _argument(
            "kind",
            nargs="?",
            help=f"{', '.join([*TABLES, *EXTENSIONS['listings']])} (default: all)",
        ),
    ),
}
"""Command -> its line of help, and its arguments beside those that all commands have."""


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and that of each command by name."""
    parser = Parser("splitfed", description=ABOUT, epilog=EPILOG)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for name, (text, *arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(command=name)
        for names, options in (*_EVERYWHERE, *arguments):
            command.add_argument(*names, **options)
    worker = commands.add_parser("_worker")
    for name in ("folder", "code", "token", "channel"):
        worker.add_argument(name)
    worker.add_argument("--debug", action="store_true")
    worker.set_defaults(command="_worker")
    return parser, dict(commands.choices)


def parse_options(given: Sequence[str]) -> Options:
    """Return the options in `given`; `command`: the name of the command, None for none. Raises `InvalidInput`.

    Help that is asked for is printed, and `SystemExit` raised.
    """
    parser, commands = build_parser()
    if given and not given[0].startswith("-") and given[0] not in commands:
        raise unknown("command", given[0], [name for name in commands if not name.startswith("_")])
    options, rest = parser.parse_known_args(given)
    if rest:
        known = commands.get(given[0], parser)
        names = [text for action in known._actions for text in action.option_strings]
        if rest[0].startswith("-"):
            raise unknown("option", rest[0].partition("=")[0], names)
        raise InvalidInput(f"argument {rest[0]!r} is one too many (see {known.prog} --help)")
    return options
