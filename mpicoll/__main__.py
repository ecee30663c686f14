"""Command line: ``python -m mpicoll COMMAND``. Only the commands that measure or run programs need MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from mpicoll.command_frame import run_framed

_MODULES = {
    "doctor": "mpicoll.doctor",
    "predict": "mpicoll.predict.cli",
    "run": "mpicoll.program.run_command",
    "tune": "mpicoll.tune",
    "warmup": "mpicoll.warmup",
}
"""Modules of the commands that have a parser of their own; imported when they are called for, as programs wait."""
_OTHERS = "mpicoll.explain_command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 for unusable arguments, or 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = argv[0] if argv else ""
    if command == "run":  # an interrupt, like an exception, is the program's
        return _run(command, argv)
    known = command in _MODULES or command == "explain"
    return run_framed(f"mpicoll {command}" if known else "mpicoll", lambda: _run(command, argv))


def _run(command: str, argv: list[str]) -> int:
    if command not in _MODULES:
        return int(import_module(_OTHERS).main(argv))
    module = _MODULES[command]
    if command == "predict" and "--training" in argv:
        module = "mpicoll.train.prediction.prediction_command"
    return int(import_module(module).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
