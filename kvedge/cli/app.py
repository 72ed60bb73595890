"""The parser of the ``kvedge`` command, and the one place where an error becomes an exit code."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from kvedge import c_library
from kvedge.cli import (
    bench,
    doctor,
    evaluate,
    execute,
    generate,
    info,
    interrupts,
    plan,
    ranks,
    store,
    tune,
)
from kvedge.console import exits, streams
from kvedge.console.help import HelpFormatter
from kvedge.console.output import Output
from kvedge.console.terminal import plain_warnings, report
from kvedge.errors import KvedgeError

# Each has NAME, SUMMARY, DESCRIPTION, EXAMPLES, add_options(parser), run(options, output) -> code.
_COMMANDS = (generate, execute, info, doctor, plan, evaluate, tune, bench, store)

# Errors that say what is wrong with the user's input or machine; any other is a bug of ours.
_EXPECTED = (KvedgeError, exits.CommandError, exits.UsageError, OSError, MemoryError)


class _Parser(argparse.ArgumentParser):
    """Reports a usage error as one line instead of the whole usage text."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise exits.UsageError(f"{message} (see '{self.prog} --help')")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own says nothing where it cannot be written
        (sys.stderr if file is None else file).write(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="kvedge",
        description="An INT8 key/value cache and its attention, for language models on CPUs.",
        epilog=exits.HELP,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    library = parser.add_argument_group("the C library, for a compiler's command line")
    library.add_argument("--cflags", action="store_true", help="print the flags to compile with")
    library.add_argument("--libs", action="store_true", help="print the flags to link with")
    common = _Parser(add_help=False)
    group = common.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            parents=[common],
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=f"examples:\n{module.EXAMPLES}\n{exits.HELP}",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``kvedge`` command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the command's name; by default those of the process.

    Returns
    -------
    int
        The exit code (:mod:`kvedge.console.exits`). No exception leaves this function.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        streams.prepare()
        # torchrun ends ranks by SIGTERM where another failed: at once, with nothing to save alone
        ends = contextlib.nullcontext() if ranks.is_rank() else interrupts.as_interrupts()
        with plain_warnings(), ends:
            code = _code(arguments)
        sys.stdout.flush()  # here, so that a closed pipe is noticed while it can be handled
        return code
    except BrokenPipeError:
        streams.drop_stdout()
        return exits.BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        try:
            sys.stdout.flush()
        except OSError:  # a terminal that was closed
            streams.drop_stdout()
        return interrupts.code_of(interrupt)
    except Exception as error:
        return _report(error, debug="--debug" in arguments)


def _code(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SystemExit as leave:  # argparse after --help
        return leave.code if isinstance(leave.code, int) else exits.OK


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_unknown(parser, options, unknown)
    if options.version:
        from kvedge import __version__

        print(f"kvedge {__version__}")
        return exits.OK
    if options.cflags or options.libs:
        flags = [(options.cflags, c_library.compile_flags), (options.libs, c_library.link_flags)]
        print(*(tell() for is_asked, tell in flags if is_asked))
        return exits.OK
    if options.command is None:
        parser.print_help(sys.stderr)
        return exits.USAGE
    output = Output()
    try:
        code: int = options.run(options, output)
    finally:
        output.stop()
    return code


def _refuse_unknown(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: list[str]
) -> None:
    """Raise a UsageError that leads to the help of the subcommand, and to a flag of a like name."""
    for name in (options.command, getattr(options, "benchmark", None)):
        if name is not None:
            parser = _subparser(parser, name)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    flag = unknown[0].partition("=")[0]
    near = difflib.get_close_matches(flag, flags, n=1) if flag.startswith("-") else []
    meant = f"; did you mean {near[0]}?" if near else ""
    listed = " ".join(unknown)
    raise exits.UsageError(f"unknown arguments: {listed}{meant} (see '{parser.prog} --help')")


def _subparser(parser: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of a subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: argparse.ArgumentParser = action.choices[name]
            return found
    raise AssertionError(name)


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            report(line)
    message = exits.message_of(error)
    if not isinstance(error, _EXPECTED):
        message = f"unexpected {type(error).__name__}: {message}"
        if not debug:
            message += " (--debug shows where)"
    report(f"kvedge: {message}")
    if exits.is_about_stdout(error):
        streams.drop_stdout()
    return exits.code_of(error)
