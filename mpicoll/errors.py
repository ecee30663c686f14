"""Exceptions of mpicoll; all of them derive from :class:`MpicollError`."""

from __future__ import annotations

from collections.abc import Sequence


class MpicollError(Exception):
    """Base class of all exceptions of mpicoll."""


def described(error: BaseException) -> str:
    """Return the type and the message of an exception, as the last line of a traceback has them."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def named_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks as they stand in messages: ``rank 3``, ``ranks 1, 2``; the first `most` and the number of others."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


class UnknownAlgorithm(MpicollError, ValueError):
    """The name is not an algorithm of this collective; the message lists those that are."""


class UnknownCompressor(MpicollError, ValueError):
    """The name is not a compressor; the message lists those that are."""


class CorruptPayload(MpicollError, RuntimeError):
    """A compressed payload is damaged: no compressor can have written it.

    Raised on every rank of the call. A rank that completed the call before another rank found the damage raises it in
    its next call.
    """


class MismatchError(MpicollError, RuntimeError):
    """The ranks of a communicator made different calls: other collectives or arguments. The message names them.

    :class:`mpicoll.GradientSynchronizer` raises it if its arguments differ between ranks.
    """


class RemoteError(MpicollError, RuntimeError):
    """Another rank refused its arguments, was interrupted or failed, and this call cannot complete."""


class OperationError(MpicollError, RuntimeError):
    """The function of an operation raised an exception while shared memory was reduced, on the rank that raises this.

    In messages the function's own exception is raised there. The other ranks raise :class:`RemoteError`, at the latest
    in their next call.
    """


class RankFailed(MpicollError, RuntimeError):
    """Ranks of the communicator have died, and the MPI library lets the others go on (ULFM).

    Raised on each rank that waits for the others, some tenths of a second after the death. The communicator is broken;
    ``MPI.Comm.Shrink`` makes one without the dead ranks.

    Attributes
    ----------
    failed_ranks
        The ranks that are known to have died; empty where only another rank knows them.
    """

    def __init__(self, message: str, failed_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.failed_ranks = tuple(failed_ranks)


class CommunicatorBroken(MpicollError, RuntimeError):
    """An earlier failure left messages in flight on this communicator; make a new one to go on."""


class CommunicatorBusy(MpicollError, RuntimeError):
    """Another collective is being called on this communicator, from a thread or a callback; nothing was exchanged."""

    def __init__(self) -> None:
        super().__init__("another collective is being called on this communicator, from a thread or a callback")


class MachineFileError(MpicollError, ValueError):
    """A file that should describe a machine does not; the message names it and says why."""


class CheckpointError(MpicollError, RuntimeError):
    """A checkpoint could not be written, or cannot be used; the message names the file and the reason.

    After a failed save earlier checkpoints are as they were, and a later save may succeed.
    """


class CollectiveTimeout(MpicollError, TimeoutError):
    """A rank waited longer than the communicator's timeout.

    Attributes
    ----------
    missing_ranks
        Ranks that had not entered this call, or no longer answered, at the deadline.
    """

    def __init__(self, message: str, missing_ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing_ranks = tuple(missing_ranks)


class TrainingError(MpicollError):
    """Base class of errors that end a training run; the message is one line, the same on every rank.

    The command line ends with :attr:`exit_status`.

    Attributes
    ----------
    of_one_rank
        True for an error of one rank, of which the others do not know.
    """

    exit_status = 1
    of_one_rank = False


class UsageError(TrainingError, ValueError):
    """Options that are unknown, out of range, or contradict each other."""

    exit_status = 2


class DataError(TrainingError, ValueError):
    """A data set that is missing, damaged, or does not fit the model."""


class ModelTooLarge(TrainingError, MemoryError):
    """Ranks may not use as much memory as their parts of the model's state need; the message says how much that is."""


class NonFiniteLoss(TrainingError, ArithmeticError):
    """The loss has become infinite or NaN."""


class ReplicasDiffer(TrainingError, RuntimeError):
    """Ranks that must hold the same bits do not."""


class CheckpointFailed(TrainingError, CheckpointError):
    """A checkpoint could not be written, or is damaged, incomplete, of another format or of another model."""


class SearchError(MpicollError, RuntimeError):
    """A study of hyper-parameters cannot go on; trials that have finished are kept in its storage."""
