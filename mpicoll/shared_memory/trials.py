"""Trials of the methods of access to private memory in the blocking calls of a domain.

:mod:`mpicoll.kernels.method_trials` describes them.
"""

from __future__ import annotations

import os

import numpy as np

from mpicoll.kernels import method_trials as layout
from mpicoll.kernels import operation_words as words


class Trials:
    """Trials in the calls that are made on a job; all ranks of its domain have an object.

    The first rank decides, so its setting of ``MPICOLL_TRIALS`` is the one that counts.

    Parameters
    ----------
    job
        Job of the blocking calls.
    address
        Address of `method_trials.shared_words` words, in memory that all ranks share; zeros at first.
    oversubscribed
        Whether ranks share cores. Then the times of single calls say nothing about methods, and there are no trials.

    Attributes
    ----------
    obstacle
        The reason why there are none, "" if there are.
    """

    def __init__(self, job: np.ndarray, address: int, oversubscribed: bool) -> None:
        setting = os.environ.get("MPICOLL_TRIALS", "on")
        self._own = np.zeros(layout.own_words(), np.int64)
        is_eager = setting == "eager"
        self._own[layout.OWN_FIRST] = 1 if is_eager else layout.FIRST_TRIAL
        self._own[layout.OWN_LONGEST] = 1 if is_eager else layout.LONGEST_INTERVAL
        self._job = job.ctypes.data
        job[words.METHODS] = address
        self.obstacle = "MPICOLL_TRIALS=off" if setting == "off" else ""
        if setting == "on" and oversubscribed:
            self.obstacle = "ranks share cores"
        if not self.obstacle:
            job[words.METHOD_TIMES] = self._own.ctypes.data

    def are_for(self, collective: str, nbytes: int) -> bool:
        """Return whether they decide about a collective, and vectors of this length."""
        return layout.is_tried(words.COLLECTIVES.index(collective), int(nbytes).bit_length())

    def method(self, collective: str, nbytes: int, first: int, is_blocking: bool) -> int:
        """Return the method of the next call on a long vector; `first` is that before any trial."""
        if not self.are_for(collective, nbytes):
            return first
        number = words.COLLECTIVES.index(collective)
        return int(layout.method_now.run(self._job, number, int(nbytes), first + 1, int(is_blocking))) - 1


class OwnTrials:
    """Trials in calls whose method each rank chooses by itself (:mod:`mpicoll.kernels.exchange_methods`).

    Parameters
    ----------
    collective
        Name of the collective whose times tell most about them.
    oversubscribed
        As for :class:`Trials`.

    Attributes
    ----------
    address
        Of the job that they are made in.
    """

    def __init__(self, collective: str, oversubscribed: bool) -> None:
        self._decisions = np.zeros(layout.shared_words(1), np.int64)
        self._job = np.zeros(words.job_words(1), np.int64)
        self._job[[words.SIZE, words.COLLECTIVE, words.ITEMSIZE]] = 1, words.COLLECTIVES.index(collective), 1
        self._trials = Trials(self._job, self._decisions.ctypes.data, oversubscribed)
        self.address = int(self._job.ctypes.data)
