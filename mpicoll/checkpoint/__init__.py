"""Checkpoints of training runs: written by all ranks, safe against crashes, readable on any number of ranks.

::

    run/
      .lock                        held by the job that writes here
      .step-00000200.<random>/     being written, or to be removed; cleaned when the next job starts
      step-00000100/
        manifest.json              location of every tensor; lengths and SHA-256 of the files; facts of the run
        rank-0000.safetensors      pieces of vectors that rank 0 wrote, and tensors that belong to it alone
        rank-0001.safetensors

A folder gets its name ``step-...`` by one atomic rename, once all its files are on the disk on all ranks. Files are not
trusted: nothing is unpickled, lengths are checked before memory is allocated, links are not followed.
"""

from mpicoll.checkpoint.background_saves import BackgroundSaves
from mpicoll.checkpoint.reader import Checkpoint, open_checkpoint
from mpicoll.checkpoint.write_assignment import PerRank, Piece, Tensors, Whole
from mpicoll.checkpoint.writer import CheckpointStore

__all__ = [
    "BackgroundSaves",
    "Checkpoint",
    "CheckpointStore",
    "PerRank",
    "Piece",
    "Tensors",
    "Whole",
    "open_checkpoint",
]
