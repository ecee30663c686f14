"""The ways in which a training run ends early on purpose; each is raised on every rank with the same message."""

from __future__ import annotations

from mpicoll.errors import CheckpointError, MpicollError


class TrainingError(MpicollError):
    """Base class; its message is one line for the user, and the run ends with :attr:`exit_status`."""

    exit_status = 1


class UsageError(TrainingError, ValueError):
    """Options that are unknown, out of range, or contradict each other."""

    exit_status = 2


class DataError(TrainingError, ValueError):
    """A data set that is missing, damaged, or does not fit the model."""


class NonFiniteLoss(TrainingError, ArithmeticError):
    """The loss has become infinite or NaN."""


class ReplicasDiffer(TrainingError, RuntimeError):
    """Ranks that must hold the same bits do not."""


class CheckpointFailed(TrainingError, CheckpointError):
    """A checkpoint could not be written, or is damaged, incomplete, of another format or of another model."""
