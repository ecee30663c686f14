"""Samples of texts: windows of bytes, of files that are mapped into memory, or of synthetic sentences."""

from __future__ import annotations

import hashlib
import itertools
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed
from mpicoll.data.user_paths import expanded
from mpicoll.errors import DataError
from mpicoll.gradients import differing_ranks
from mpicoll.quantities import counted
from mpicoll.train.config import TrainConfig, parse_synthetic_text

BYTES = 256
_CHECKED_BYTES = 4096
"""Bytes at each end of a file that are compared between ranks, together with its length."""
_VOCABULARY = """
the a one this every some no each ring tree node rank core link message vector gradient buffer batch layer weight sends
receives adds waits for holds reads writes shares sums divides after before with without under over slow fast small
large first last next early late long short
"""
_WORDS = _VOCABULARY.split()


class TextSamples:
    """Windows of ``context + 1`` bytes, which overlap by one byte; a :class:`~mpicoll.data.datasets.Samples`.

    A sample's features are its first ``context`` bytes, and its labels the byte after each of them. No window contains
    bytes of two texts.

    Parameters
    ----------
    texts : list of (nbytes,) arrays of uint8
        In memory or mapped.
    context
        Number of bytes of a sample.
    first, stop
        First window, and the one after the last; windows are counted over all texts.
    """

    def __init__(self, texts: Sequence[np.ndarray], context: int, first: int, stop: int) -> None:
        self._texts, self._context, self._first, self.count = texts, context, first, stop - first
        self._starts = np.array([0, *itertools.accumulate(windows(len(text), context) for text in texts)])

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes, (rows, context) of uint8, and those after each of them, of int64."""
        both = np.empty((len(indices), self._context + 1), np.uint8)
        numbers = indices.astype(np.int64) + self._first
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        for row, number, owner in zip(both, numbers.tolist(), owners.tolist(), strict=True):
            begin = (number - int(self._starts[owner])) * self._context
            row[:] = self._texts[owner][begin : begin + self._context + 1]
        return np.ascontiguousarray(both[:, :-1]), both[:, 1:].astype(np.int64)


def windows(nbytes: int, context: int) -> int:
    """Return the number of windows of ``context + 1`` bytes in a text, of which neighbours overlap by one byte."""
    return max(0, (nbytes - 1) // context)


def load_text(config: TrainConfig, comm: MPI.Intracomm) -> tuple[TextSamples, TextSamples]:
    """Return the training part and the test part, the end, of the text that `config` names. Collective over `comm`.

    Raises
    ------
    DataError
        On every rank, if one of them cannot read a file, has another one than the others, or it is too short.
    """

    def texts_of_rank() -> list[np.ndarray]:
        if config.dataset.startswith("text:"):
            return _map_texts(expanded(config.dataset.removeprefix("text:")))
        return [synthetic_text(parse_synthetic_text(config.dataset), config.seed)]

    texts = all_succeed(comm, texts_of_rank)
    if differing := differing_ranks(comm, _digest(texts)):
        raise DataError(f"{config.dataset}: rank {', '.join(map(str, differing))} has another text than the others")
    count = sum(windows(len(text), config.context) for text in texts)
    held_out = round(count * config.test_fraction)
    if count - held_out < 1:
        raise DataError(
            f"{config.dataset}: {counted(sum(map(len, texts)), 'byte')} in {counted(len(texts), 'file')} give "
            f"{counted(count, 'sample')} of --context {config.context} and the byte after it, "
            "of which --test-fraction leaves none to train on"
        )
    train, test = ((0, count - held_out), (count - held_out, count))
    return TextSamples(texts, config.context, *train), TextSamples(texts, config.context, *test)


def _digest(texts: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)},".encode())
        digest.update(text[:_CHECKED_BYTES].tobytes() + text[-_CHECKED_BYTES:].tobytes())
    return digest.digest()


def _map_texts(path: Path) -> list[np.ndarray]:
    """Map a file, or all files ``*.txt`` of a directory in the order of their names; empty ones are left out."""
    try:
        paths = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        found = [_map_text(each) for each in paths]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    texts = [text for text in found if len(text)]
    if not texts:
        raise DataError(
            f"{path}: no text: " + ("no file *.txt with any bytes" if path.is_dir() else "the file is empty")
        )
    return texts


def _map_text(path: Path) -> np.ndarray:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: not a regular file")
    if not status.st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, "r")


def synthetic_text(nbytes: int, seed: int) -> np.ndarray:
    """Return `nbytes` bytes of sentences, (nbytes,) of uint8, determined by the arguments.

    Sentences have 3 to 9 words. A word is one of those that may follow the word before it, which `seed` chooses.
    """
    random = np.random.default_rng((seed, nbytes))
    following = random.integers(0, len(_WORDS), (len(_WORDS), 4))
    parts: list[str] = []
    length, word = 0, 0
    while length < nbytes:
        sentence = []
        for choice in random.integers(0, 4, random.integers(3, 10)):
            word = int(following[word, choice])
            sentence.append(_WORDS[word])
        parts.append(" ".join(sentence).capitalize() + ".\n")
        length += len(parts[-1])
    return np.frombuffer("".join(parts).encode()[:nbytes], np.uint8)
