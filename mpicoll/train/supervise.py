"""Start a training job, and start it again from its newest good checkpoint when it fails.

    python -m mpicoll.train.supervise -- mpirun -n 8 python -m mpicoll.train --checkpoint run
    python -m mpicoll.train.supervise --restarts 5 --min-ranks 4 --stall 600 -- mpirun -n 8 python -m mpicoll.train ...

The command after ``--`` is the launcher's, with ``--checkpoint FOLDER`` among the options of the program; a program of
your own has to understand ``--resume fallback``, which a restart has in place of any other ``--resume``. After SIGTERM
or SIGINT a rank gets SIGTERM: the job saves a checkpoint and ends, and nothing is started again. A second signal kills
the job.

Exit status: 0 if a start ended well; 2 if options are wrong, for which no restart is of use; else that of the last
start, 1 if its launcher ended with 0 although training had not ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpicoll.errors import UsageError
from mpicoll.quantities import counted, positive, positive_number
from mpicoll.train.run_report import Replacing, check_writable, complain
from mpicoll.train.supervised_job import Job, newest_step

_USAGE_STATUS = 2
_LONGEST_BACKOFF_SECONDS = 60.0
_FAILURES_PER_SIZE = 2
"""Failures in a row, without a new checkpoint, after which one rank fewer is started."""
_RESUME, _FALLBACK = "--resume", "fallback"


class Attempt(NamedTuple):
    """One start of the job, as it is written by ``--json``; `resumed_from` and `newest_step` are steps or None."""

    ranks: int | None
    resumed_from: int | None
    newest_step: int | None
    status: int
    seconds: float
    reason: str


class Supervisor:
    """Starts of one job.

    Parameters
    ----------
    arguments
        Options, with the launcher's command line as `command`.

    Raises
    ------
    ValueError
        If the command lacks what is needed; the message says what.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._options, self._command = arguments, list(arguments.command)
        self._folder = _folder_of(self._command)
        self._ranks = _place_of_ranks(self._command)
        self.attempts: list[Attempt] = []
        self._job: Job | None = None
        self._stopped = False
        size = self.ranks
        if arguments.min_ranks is not None and (size is None or not arguments.min_ranks <= size):
            raise ValueError(
                f"--min-ranks {arguments.min_ranks}: the command starts "
                f"{counted(size, 'rank') if size else 'an unknown number of ranks'}"
            )
        resumes = any(word.partition("=")[0] == _RESUME for word in self._command)
        if newest_step(self._folder) is not None and not resumes:
            raise ValueError(f"{self._folder} holds checkpoints already: add --resume to the command, or remove them")

    @property
    def ranks(self) -> int | None:
        """The number of ranks of the next start, None if the command does not say."""
        return None if self._ranks is None else int(self._command[self._ranks])

    def run(self) -> int:
        """Start the job until it ends well, or is given up; return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        failures = 0
        while True:
            last = self._start()
            if last.status == 0 or self._stopped:
                return last.status
            if last.status == _USAGE_STATUS:
                if not self._take_one_fewer():
                    return self._give_up("its options are wrong")
            else:
                moved = last.newest_step is not None and last.newest_step != last.resumed_from
                failures = 1 if moved else failures + 1
                if failures > self._options.restarts:
                    return self._give_up(f"{failures} starts in a row have failed without a new checkpoint")
                self._shrink(failures)
            self._pause(last, failures)
            if self._stopped:
                return last.status

    def _start(self) -> Attempt:
        resumed_from, began = newest_step(self._folder), time.monotonic()
        again = bool(self.attempts) and resumed_from is not None
        command = _resuming(self._command) if again else self._command
        self._job = Job(command, self._folder, tells_its_end=_is_trainer(command))
        if self._stopped:  # a signal came before there was a job to pass it to
            self._job.ask_to_stop(again=False)
        status = self._job.wait(self._options.stall, self._options.grace)
        seconds, newest = round(time.monotonic() - began, 3), newest_step(self._folder)
        self.attempts.append(Attempt(self.ranks, resumed_from, newest, status, seconds, self._job.reason))
        self._job = None
        return self.attempts[-1]

    def _shrink(self, failures: int) -> None:
        """Take one rank fewer if a number of ranks has failed several times: a host or a core may be gone."""
        least, size = self._options.min_ranks, self.ranks
        if least is not None and size is not None and size > least and failures % _FAILURES_PER_SIZE == 0:
            self._set_ranks(size - 1)

    def _take_one_fewer(self) -> bool:
        """Take one rank fewer where the options are wrong for a number that this supervisor chose; False elsewhere."""
        least, size = self._options.min_ranks, self.ranks
        if least is None or size is None or size == self.attempts[0].ranks or size <= least:
            return False
        self._set_ranks(size - 1)
        return True

    def _set_ranks(self, size: int) -> None:
        assert self._ranks is not None
        self._command[self._ranks] = str(size)

    def _pause(self, last: Attempt, failures: int) -> None:
        seconds = min(_LONGEST_BACKOFF_SECONDS, self._options.backoff * 2 ** (failures - 1))
        ended = last.reason or f"it ended with status {last.status}"
        begin = "from the beginning" if last.newest_step is None else f"from step {last.newest_step}"
        ranks = "" if self.ranks in (None, last.ranks) else f" on {counted(self.ranks or 0, 'rank')}"
        _say(f"{ended}; restart {failures} of {self._options.restarts} {begin}{ranks} in {seconds:g} s")
        until = time.monotonic() + seconds
        while not self._stopped and time.monotonic() < until:
            time.sleep(min(0.1, seconds))

    def _give_up(self, reason: str) -> int:
        last = self.attempts[-1]
        _say(f"given up with status {last.status}: {reason}")
        return last.status

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = True
        if self._job is not None:
            self._job.ask_to_stop()


def _folder_of(command: Sequence[str]) -> Path:
    for place, word in enumerate(command):
        if word.startswith("--checkpoint="):
            return Path(word.partition("=")[2]).expanduser()
        if word == "--checkpoint" and place + 1 < len(command):
            return Path(command[place + 1]).expanduser()
    raise ValueError("the command has no --checkpoint FOLDER: a restart would begin anew")


def _resuming(command: Sequence[str]) -> list[str]:
    """Return a command that continues from the newest checkpoint that is not damaged, whatever it resumed from."""
    words, found = list(command), []
    while words:
        word = words.pop(0)
        if word.partition("=")[0] != _RESUME:
            found.append(word)
        elif word == _RESUME and words and not words[0].startswith("-"):
            words.pop(0)  # its value
    return [*found, _RESUME, _FALLBACK]


def _is_trainer(command: Sequence[str]) -> bool:
    """Return True if a launcher's command starts the module ``mpicoll.train``."""
    return any(pair == ("-m", "mpicoll.train") for pair in itertools.pairwise(command))


def _place_of_ranks(command: Sequence[str]) -> int | None:
    """Return the place of the number of ranks in a launcher's command, None if it is not one of mpirun's forms."""
    found = None
    for place, word in enumerate(command[:-1]):
        if word in ("-n", "-np", "--n", "--np") and command[place + 1].isdecimal():
            found = place + 1  # the last one: an earlier one may be that of `nice`
        if word.partition("=")[0] in ("-m", "--checkpoint") or word.endswith(".py") or "python" in Path(word).name:
            break  # what follows belongs to the program
    return found


def _say(text: str) -> None:
    complain(f"mpicoll.train.supervise: {text}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll.train.supervise",
        usage="%(prog)s [options] -- COMMAND ...",
        description="Start a training job, and start it again from its newest good checkpoint when it fails.",
    )
    parser.add_argument("--restarts", type=_count, default=3, metavar="N", help="restarts in a row without a new "
                        "checkpoint, after which the job is given up (default: %(default)s)")  # fmt: skip
    parser.add_argument("--min-ranks", type=positive, metavar="N", help="start one rank fewer, but at least so many, "
                        "each time two starts in a row have failed without a new checkpoint (default: as many ranks "
                        "as the command says)")  # fmt: skip
    parser.add_argument("--backoff", type=positive_number, default=1.0, metavar="SECONDS", help="pause before the "
                        "first restart; it doubles with each failure in a row, up to a minute "
                        "(default: %(default)g)")  # fmt: skip
    parser.add_argument("--stall", type=positive_number, metavar="SECONDS", help="kill a job that writes no "
                        "checkpoint for so long, and start it again (default: no limit)")  # fmt: skip
    parser.add_argument("--grace", type=positive_number, default=60.0, metavar="SECONDS", help="kill a job that has "
                        "not ended so long after it was asked to stop (default: %(default)g)")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all starts with their ends to a file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not arguments.command:
        parser.error("a command is missing: -- mpirun -n 8 python -m mpicoll.train --checkpoint FOLDER ...")
    try:
        check_writable({"--json": arguments.json})
        supervisor = Supervisor(arguments)
    except (ValueError, UsageError) as error:
        parser.error(str(error))
    try:
        return supervisor.run()
    except OSError as error:
        _say(f"the command cannot be started: {error}")
        return 1
    finally:
        if arguments.json is not None:
            _write(arguments.json, supervisor.attempts)


def _write(path: str, attempts: Sequence[Attempt]) -> None:
    """Write all starts; a file that cannot be written changes nothing of how the job has ended."""
    try:
        with Replacing(path) as stream:
            json.dump([attempt._asdict() for attempt in attempts], stream, indent=1)
    except OSError as error:
        _say(f"--json {path}: {error}")


if __name__ == "__main__":
    sys.exit(main())
