"""``mpirun -n 8 python -m mpicoll run PROGRAM.py``: an unmodified mpi4py program on mpicoll's communicators.

``MPI.COMM_WORLD`` and ``MPI.COMM_SELF`` are mpicoll's before the first line of the program; communicators made from
them become so after their first collectives. Arguments, ``__main__``, exit status and tracebacks are the program's; an
exception that nobody catches on one rank ends the job, as with ``python -m mpi4py``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpicoll.environment import launched_rank, launched_size, silent_unless
from mpicoll.help_text import without_markup
from mpicoll.program import main_module
from mpicoll.program.program_session import ProgramSession

_EXAMPLES = """examples:
  mpirun -n 8 python -m mpicoll run program.py --its-own option
  mpirun -n 8 python -m mpicoll run --profile --html profile.html -m package.module
  mpirun -n 8 python -m mpicoll run --native --profile program.py
"""
_WITH_VALUE = ("--json", "--html", "--timeout", "--library-calls", "--compare")
DEFAULT_TIMEOUT = 86400.0
"""Default of --timeout in seconds, a day: ranks of an MPI program may wait for hours for one with more to compute."""

_COMPARE = 5.0
LIBRARY_CALLS = 16
"""Default of --library-calls: most communicators that a program makes for one step of its work see fewer."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of mpicoll's own options, which stand before the program."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll run",
        usage="python -m mpicoll run [OPTION ...] [--] (PROGRAM | -m MODULE | -c COMMAND | -) [ARG ...]",
        description=without_markup(__doc__),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--native", action="store_true", help="keep mpi4py's communicators and the MPI library, for comparison")
    add("--shared-arrays", action="store_true", help="let NumPy allocate large arrays in memory that a node shares")
    timeout = f"seconds that a rank waits in one collective before it fails (default: {DEFAULT_TIMEOUT:g})"
    add("--timeout", type=_seconds, metavar="SECONDS", help=timeout)
    calls = f"collectives that a new communicator makes by the MPI library first (default: {LIBRARY_CALLS})"
    add("--library-calls", type=_number, metavar="N", help=calls)
    add("--profile", action="store_true", help="write a profile of the collective calls to standard error")
    add("--json", type=Path, metavar="FILE", help="write the profile as JSON; implies --profile")
    add("--html", type=Path, metavar="FILE", help="write it as an HTML page; implies --profile; needs mpicoll[report]")
    compare = (
        "seconds in which the profile repeats the calls after the run, by mpicoll and by the MPI library (default: "
        f"{_COMPARE:g}; 0: it does not)"
    )
    add("--compare", type=_seconds_or_none, metavar="SECONDS", help=compare)
    return parser


def _settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that would change nothing beside others, and set those that are not given."""
    options.profile = options.profile or options.json is not None or options.html is not None
    if options.compare is not None and not options.profile:
        parser.error("--compare has no meaning without --profile")
    for name in ("timeout", "library_calls") if options.native else ():
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has no meaning with --native")
    usual = {"compare": _COMPARE, "timeout": DEFAULT_TIMEOUT, "library_calls": LIBRARY_CALLS}
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _number(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of calls")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")


def _seconds_or_none(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into mpicoll's options and the program with its arguments."""
    place = 0
    while place < len(argv):
        word = argv[place]
        if word == "--":
            return list(argv[:place]), list(argv[place + 1 :])
        if word in ("-m", "-c", "-") or not word.startswith("-"):
            break
        place += 2 if word in _WITH_VALUE else 1
    return list(argv[:place]), list(argv[place:])


def _check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, with exit status 2, before the program starts."""
    for name, path in (("--json", options.json), ("--html", options.html)):
        wrong = "" if path is None else _obstacle(path.absolute())
        if wrong:
            parser.error(f"{name}: {wrong}")
    if options.html is not None and importlib.util.find_spec("jinja2") is None:
        parser.error('--html needs Jinja2: pip install "mpicoll[report]"')


def _obstacle(path: Path) -> str:
    """Return why a file cannot be written, "" if it can."""
    if not path.parent.is_dir():
        return f"{str(path.parent)!r} is not a folder"
    if path.is_dir():
        return f"{str(path)!r} is a folder"
    return "" if os.access(path if path.exists() else path.parent, os.W_OK) else f"{str(path)!r} cannot be written"


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit status; 2 for unusable options."""
    own, program = split(argv)
    parser = make_parser()
    try:
        with silent_unless(launched_rank() == 0):
            options = parser.parse_args(own)
            if not program:
                parser.error("no program was given")
            _settle(parser, options)
    except SystemExit as end:
        return int(end.code or 0)
    if launched_rank() == 0:  # it writes the files; other hosts may have other folders and packages
        try:
            _check_files(parser, options)
        except SystemExit as end:
            return _end_all(int(end.code or 0))
    for name in ("json", "html"):  # the program may go elsewhere
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).absolute())
    return _run(program, ProgramSession(options, program))


def _end_all(status: int) -> int:
    """End the job, whose other ranks have started; or return the exit status if there are none."""
    if (launched_size() or 1) > 1:
        from mpicoll.communicator import abort

        abort.end("", status)
    return status


def _run(program: list[str], session: ProgramSession) -> int:
    session.begin()
    try:
        main_module.execute(program)
    except main_module.CannotStart as error:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        session.forget()
        return error.status
    except SystemExit as end:
        session.end_with(_status(end.code))
        end.__traceback__ = None
        raise
    except BaseException as error:
        return _fail(error, session)
    return 0


def _status(code: Any) -> int:
    """Return the exit status that Python makes of SystemExit's argument."""
    return code if isinstance(code, int) else 0 if code is None else 1


def _fail(error: BaseException, session: ProgramSession) -> int:
    """Print the traceback as Python does, by the program's hook without our frames, and end the job."""
    error.__traceback__ = main_module.without_our_frames(error.__traceback__)
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        if not isinstance(end.code, (int, type(None))):
            sys.stderr.write(f"{end.code}\n")
        status = _status(end.code)
    except BaseException as another:
        another.__traceback__ = main_module.without_our_frames(another.__traceback__)
        another.__context__ = None if another.__context__ is error else another.__context__
        for text, each in (("Error in sys.excepthook:\n", another), ("\nOriginal exception was:\n", error)):
            sys.stderr.write(text)
            sys.__excepthook__(type(each), each, each.__traceback__)
    session.fail(status, abort=os.environ.get("MPICOLL_ABORT") != "0")
    return status
