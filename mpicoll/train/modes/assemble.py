"""From the options to a run in which nobody waits for everybody."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.data import Dataset
from mpicoll.train.engine import OneAfterTheOther
from mpicoll.train.failures import UsageError
from mpicoll.train.models import Model
from mpicoll.train.modes.exchange import Exchange
from mpicoll.train.modes.loop import AsynchronousLoop
from mpicoll.train.modes.peers import Gossip, PeerToPeer
from mpicoll.train.modes.saving import ChiefSaver
from mpicoll.train.modes.served import Served
from mpicoll.train.modes.stragglers import delayed

EXCHANGES: dict[str, Callable[..., Exchange]] = {"ps": Served, "p2p": PeerToPeer, "gossip": Gossip}


def check_ranks(config: TrainConfig, size: int) -> None:
    """Refuse numbers of ranks that the options do not fit.

    Raises
    ------
    UsageError
        If no worker is left, or there are no ranks of which the options speak.
    """
    if config.servers >= size:
        raise UsageError(f"--servers {config.servers}: {size} ranks leave no worker")
    if config.backup and config.backup >= size - config.servers:
        raise UsageError(f"--backup {config.backup}: {size - config.servers} workers leave none whose gradients count")
    for rank, _ in config.slow:
        if rank >= size:
            raise UsageError(f"--slow {rank}: there are {size} ranks, from 0")


def make_free_trainer(
    config: TrainConfig, comm: MPI.Intracomm, dataset: Dataset, model: Model, clock: Clock, saver: ChiefSaver
) -> AsynchronousLoop:
    """Return this rank's trainer, which goes on from what `saver` has found. Collective over `comm`."""
    replica = model.initial(config.seed)
    comm.Bcast(replica)
    if saver.state is not None:
        replica[:] = saver.state["parameters"]
    exchange = EXCHANGES[config.mode](config, comm, replica, saver.state)
    engine = delayed(OneAfterTheOther(model), config, comm.Get_rank())
    trainer = AsynchronousLoop(config, comm, dataset, model, engine, exchange, replica, clock, saver.done)
    trainer.epochs = list(saver.epochs)
    return trainer
