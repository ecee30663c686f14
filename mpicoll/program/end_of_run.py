"""End of a profiled run: gather the records of all ranks, analyse them, repeat calls, write the profile."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from mpicoll.program.call_recorder import CallRecorder, clock

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from mpicoll.program.library_comparison import Comparison
    from mpicoll.program.profile_analysis import Target
    from mpicoll.program.rank_records import RankRecord

_POLL_SECONDS = 0.002
_LARGEST_POLL_SECONDS = 0.05
_WRITE_SECONDS = 60.0
"""Seconds that ranks wait for rank 0 to write the profile: a rank with an exit status then aborts MPI at once."""
_LEFT = 1
"""Tag of an empty message: its sender waits for the other ranks no more."""
_NEWS_SECONDS = 0.05
"""Seconds in which such a message, sent before the last rank arrived, is seen for certain."""
_FLUSH_SECONDS = 0.1
"""Seconds left to the launcher to read rank 0's output before a rank with an exit status aborts MPI."""


class EndOfRun:
    """Writer of the profile: created collectively when MPI is initialised, used once before it is finalised."""

    def __init__(self, MPI: Any, recorder: CallRecorder) -> None:
        from mpicoll.program import program_clock

        self._MPI, self._recorder = MPI, recorder
        self._comm = MPI.Intracomm(MPI.COMM_WORLD).Dup()
        self._identity = program_clock.system_identity()
        self._begun = clock()
        self._left: list[Any] = []  # requests of messages that say so
        self._offset = program_clock.offset_to_first(self._comm, clock, self._identity)

    def report(self, options: argparse.Namespace, facts: dict[str, Any], limit: float | None) -> None:
        """Write the profile on rank 0; collective over COMM_WORLD.

        If the other ranks have not arrived after `limit` seconds, this rank writes a profile of its own calls alone,
        to files of its own, and tells the others, which do so, too. With `limit` None it waits for them.
        """
        if self._MPI.Is_finalized():
            return
        from mpicoll.environment import cores
        from mpicoll.program import method_wrappers, program_clock, rank_records

        facts["overhead_seconds_per_call"] = method_wrappers.overhead(self._recorder)
        facts["cores"] = cores()
        facts["system"] = self._identity
        if not self._everybody_comes(limit) or self._has_somebody_left():
            self._leave()
            drift = program_clock.Drift(0.0, 0.0, 1.0, 0.0)
            self._write([rank_records.own_record(self._recorder, facts, drift)], options, missing=True)
            return
        ended = clock()
        later = program_clock.offset_to_first(self._comm, clock, self._identity)
        drift = program_clock.Drift(self._begun, self._offset, ended, later)
        record = rank_records.own_record(self._recorder, facts, drift)
        records = rank_records.gather(self._comm, record)
        self._write(records, options, missing=False)
        if any(each.facts["status"] for each in records):
            time.sleep(_FLUSH_SECONDS)
        self._everybody_comes(_WRITE_SECONDS)

    def _everybody_comes(self, limit: float | None) -> bool:
        """Return True once all ranks have arrived, False after `limit` seconds."""
        request, begun, pause = self._comm.Ibarrier(), time.monotonic(), _POLL_SECONDS
        while not request.Test():
            if (limit is not None and time.monotonic() - begun > limit) or self._comm.Iprobe(tag=_LEFT):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LARGEST_POLL_SECONDS)
        return True

    def _has_somebody_left(self) -> bool:
        """Return whether a rank had left before the last one arrived, which may complete the barrier nevertheless."""
        until = time.monotonic() + _NEWS_SECONDS
        while time.monotonic() < until:
            if self._comm.Iprobe(tag=_LEFT):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _leave(self) -> None:
        """Tell the other ranks not to wait for this one."""
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._left.append(self._comm.Isend([None, 0, self._MPI.BYTE], rank, _LEFT))

    def _write(self, records: list[RankRecord], options: argparse.Namespace, *, missing: bool) -> None:
        from mpicoll.program import profile_analysis, profile_report, profile_text

        analysis = profile_analysis.analyze(records, self._comm.size) if records else None
        targets = analysis.targets if analysis is not None else []
        comparisons = [] if missing or not options.compare else self._repeat_calls(targets, options.compare)
        if analysis is None:
            return
        profile = profile_report.profile_of(records, analysis, comparisons, self._comm.size, missing=missing)
        sys.stdout.flush()
        sys.stderr.write(profile_text.as_text(profile))
        sys.stderr.flush()
        files = {"json": options.json, "html": options.html}
        if missing:  # several ranks may fail
            files = {kind: profile_report.own_file(path, self._comm.rank) for kind, path in files.items()}
        try:
            profile_report.write_files(profile, files["json"], files["html"])
        except (OSError, ImportError) as error:  # others wait for this rank, and the program's exit status stays
            sys.stderr.write(f"python -m mpicoll run: the profile was not written: {error}\n")
        else:
            written = " and ".join(str(path) for path in files.values() if path is not None)
            if missing and written:
                sys.stderr.write(f"python -m mpicoll run: the calls of rank {self._comm.rank} are in {written}\n")

    def _repeat_calls(self, targets: Sequence[Target], seconds: float) -> list[Comparison]:
        """Return how long calls take with either library; nothing if that fails, which must not cost the profile."""
        from mpicoll.program import library_comparison

        try:
            return library_comparison.compare(self._comm, self._recorder, targets, seconds)
        except Exception as error:
            sys.stderr.write(f"python -m mpicoll run: calls were not repeated: {type(error).__name__}: {error}\n")
            return []
