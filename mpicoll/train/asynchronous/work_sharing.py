"""Coordination of asynchronous training: workers draw shares of batches from a shared counter."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Whole
from mpicoll.consensus import all_succeed, share, wait_politely
from mpicoll.decentralized.mailboxes import Counter
from mpicoll.errors import TrainingError
from mpicoll.parameter_server.message_memory import abandon_all
from mpicoll.parameter_server.windows import remote_memory
from mpicoll.train.asynchronous.asynchronous_state import ResumedState, whole_shares
from mpicoll.train.asynchronous.asynchronous_strategy import AsynchronousStrategy
from mpicoll.train.asynchronous.server_exchange import ServerExchange, transport
from mpicoll.train.asynchronous.share_records import ShareRecord, ShareRecords
from mpicoll.train.config import TrainConfig
from mpicoll.train.coordination import SavedState, Share, ShareResult
from mpicoll.train.metrics import EpochRecord, StepRecord, epoch_means, perplexity, wrong_loss
from mpicoll.train.step_plan import StepPlan

_STOP = 1 << 40
"""A draw of this many numbers leaves no share for any rank, which stops the run."""
_DECIDED = 1 << 28
"""Added to the counter by workers in step, the first of which then adds the step at whose begin all of them stop."""


class WorkSharing:
    """Coordination of asynchronous workers; a :class:`~mpicoll.train.coordination.Coordination`.

    A batch is divided into as many shares as in synchronous training, but each worker takes the next free share: faster
    workers take more, and every sample is taken once in an epoch. Rank 0, the chief, is a worker that between its own
    steps also evaluates, reports progress and saves checkpoints. Other workers do not wait for that. The last
    ``config.servers`` ranks take no shares, and serve in :meth:`finish`.

    Numbers of shares are drawn from a counter in remote memory. A rank that wants to stop the run draws all remaining
    ones. A failure flag is stored beside the counter.
    """

    def __init__(
        self, config: TrainConfig, comm: MPI.Intracomm, step_plan: StepPlan, strategy: AsynchronousStrategy,
        resumed: ResumedState,
    ) -> None:  # fmt: skip
        self._comm, self._strategy, self.step_plan = comm, strategy, step_plan
        self.averages_at_end = strategy.exchange.averages_at_end
        self._rank, workers = comm.Get_rank(), comm.Get_size() - config.servers
        self._is_worker, self.attends, self.together = self._rank < workers, self._rank == 0, False
        self.shares_per_step, self._total = workers, step_plan.total_steps * workers
        self._samples_per_share = config.step_batch / workers
        self._takes_own = config.staleness == 0 and not config.backup
        self.first = self.done = resumed.done
        self._offset, self.anew = resumed.offset, resumed.anew
        plain = MPI.Intracomm(comm)
        memory = remote_memory(plain.Dup() if config.goes_on else plain, transport(config), config.timeout)
        start = self.done + (_STOP if resumed.is_stopped else 0)
        self._counter = Counter(memory, comm.Get_size() - 1, start=start, failed=resumed.has_failed)
        self._shares = ShareRecords(step_plan, workers)
        self._stop, self.stopped, self._was_cut_short = False, False, False
        self._failure: Exception | None = None
        self._began, self._wall_seconds = time.perf_counter(), 0.0

    @property
    def records(self) -> list[StepRecord]:
        """A record for each step of which this rank knows a share; after `finish` for all steps, on all ranks."""
        return self._shares.records

    @property
    def taken(self) -> int:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        return len(self._shares.own)

    @property
    def samples_seen(self) -> float:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        return (self.done - self.first) * self._samples_per_share

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks per second, as far as this rank knows."""
        seconds = self._wall_seconds or time.perf_counter() - self._began
        return self.samples_seen / max(seconds, 1e-9)

    def shares(self) -> Iterator[Share]:
        """Yield this worker's shares: the next free ones, or with synchronous steps its own part of each step."""
        self._began = time.perf_counter()
        own = self.first + self._rank
        while self._is_worker:
            if self._stop:
                self._counter.draw(_STOP)
            number = self._draw(0 if self._takes_own else 1)
            if self._takes_own:
                number, own = self._own_share(number, own), own + self.shares_per_step
            if number >= self._total:
                return
            self.done = number
            yield Share(*divmod(number, self.shares_per_step), self.shares_per_step, number)

    def _own_share(self, number: int, own: int) -> int:
        """Return this worker's share of the next step, or a greater number than there are, where all workers stop.

        Workers learn in the midst of a step that the run is to stop, and each step needs all of them. The first one
        that does decides that this step is the last, and adds its number to the counter, from which nobody draws
        shares. No worker ends the step before that: it needs the share that the first one takes then.
        """
        if number < _STOP:
            return own
        if self._counter.is_failed():
            return max(number, own)
        step = own // self.shares_per_step
        if number % _STOP < _DECIDED and self._counter.draw(_DECIDED) % _STOP < _DECIDED:
            self._counter.draw(step + 1)
        number = self._counter.draw(0)
        last = number % _DECIDED - self.first
        return own if last <= 0 or step < last else max(number, own)

    def check(self, step: int, loss: float) -> None:
        """Raise if the loss is not finite.

        Raises
        ------
        NonFiniteLoss
            On this rank; `fail` tells the other ranks.
        """
        if not math.isfinite(loss):
            raise wrong_loss(loss, step)

    def record(self, share: Share, result: ShareResult) -> None:
        """Record the result of a share on this rank; the other ranks get it in `finish`."""
        self._shares.add(ShareRecord(share.done, result.rate, result.loss, result.correct, result.rows, result.seconds))

    def ask_to_stop(self) -> None:
        """Request that all ranks stop; may be called from a signal handler."""
        self._stop = True
        if not self._is_worker:  # a server does not look at `_stop`
            self._counter.draw(_STOP)

    def beat(self) -> None:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        self._strategy.exchange.beat()

    def lagging(self) -> int | None:
        """Return None: no rank waits for the slowest one."""
        return None

    def epochs_over(self, done: int) -> int:
        """Return the number of epochs that have ended; the last one ends when all workers have finished."""
        plan = self.step_plan
        if self.together and not self.stopped:
            return plan.epoch_count
        return min(plan.epoch_count - 1, done // self.shares_per_step // plan.steps_per_epoch)

    def epoch_pace(self) -> float:
        """Return samples per second since training began, since workers may be in different epochs."""
        return self.samples_per_second

    def state(self, done: int) -> SavedState | None:
        """Return the exchange's state without stopping the other ranks.

        None if the run has failed, which is known until `finish`, or if no gradient of it has been applied yet, as
        where the chief was slow to begin.
        """
        if not self.together and self._counter.is_failed():
            return None
        state, shares = self._strategy.exchange.state()
        number = done if shares is None else self.first + shares
        if number == self.first:
            return None
        facts = {
            "done": number,
            "workers": self.shares_per_step,
            "vectors": {name: (vector.size, vector.dtype.str) for name, vector in state.items()},
        }
        return SavedState(number + self._offset, {name: Whole(vector) for name, vector in state.items()}, facts)

    def settle(self) -> int:
        """Wait until the other workers have finished; return the shares that were taken."""
        self._strategy.exchange.settle()
        return self.done if self._is_cut_short() else self._total

    def _is_cut_short(self) -> bool:
        return self._draw(0) >= _STOP

    def _draw(self, count: int) -> int:
        number = self._counter.draw(count)
        self._was_cut_short |= number >= _STOP
        return number

    def fail(self, error: Exception) -> None:
        """End the run on all ranks without saving a checkpoint; `finish` raises the error."""
        self._failure = error
        self._counter.tell_failure()
        self._counter.draw(_STOP)

    def finish(self, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Finish, or serve until all workers have finished; take over the final model and the records of all ranks."""
        exchange, comm = self._strategy.exchange, self._comm
        exchange.finish()
        self._wall_seconds, self._strategy.is_left = time.perf_counter() - self._began, True
        is_cut_short = self._is_cut_short()
        exchange.close()
        all_succeed(comm, self._raise)
        holder = comm.Get_rank() if exchange.has_result else -1  # rank 0 may have been dropped
        facts = np.array([is_cut_short, self.done, self._wall_seconds, holder], np.float64)
        comm.Allreduce(MPI.IN_PLACE, facts, MPI.MAX)
        self.stopped, self._wall_seconds = bool(facts[0]), float(facts[2])
        self.done = int(facts[1]) if self.stopped else self._total
        comm.Bcast(self._strategy.vector, max(0, int(facts[3])))
        self._counter.close()
        self._shares.share(comm)
        self.together = True
        return self._shared_epochs(epochs)

    def rescued(self, comm: MPI.Intracomm) -> ResumedState:
        """Return the state from which the ranks of `comm` go on, those that are left after others have died.

        Shares that were in flight are taken again or left out, as after a checkpoint; on another number of workers, or
        with synchronous steps, those of the last step that is not complete are taken again. Collective over `comm`.

        Raises
        ------
        TrainingError
            On every rank: all workers have died, or all copies of a part of the parameters are lost.
        """
        exchange = self._strategy.exchange
        assert isinstance(exchange, ServerExchange)
        abandon_all()
        facts = np.array([self.done, self._stop or self._was_cut_short, self._failure is not None, self._is_worker])
        table = np.empty((comm.Get_size(), facts.size), np.int64)
        comm.Allgather(facts.astype(np.int64), table)
        workers = int(table[:, 3].sum())
        if workers == 0:
            raise TrainingError(
                "the only worker died" if self.shares_per_step == 1 else f"all {self.shares_per_step} workers died"
            )
        state, shares = exchange.rescue(comm)
        number = int(table[:, 0].max()) if shares is None else self.first + shares
        done = whole_shares(self.step_plan.config, workers, number, self.shares_per_step)
        is_stopped, has_failed = bool(table[:, 1].any()), bool(table[:, 2].any())
        servers = comm.Get_size() - workers
        return ResumedState(state, done, number + self._offset - done, self.anew, servers, is_stopped, has_failed)

    def take_over(self, before: WorkSharing) -> None:
        """Take over the records and the failure of this rank's part before others died."""
        self._failure = before._failure
        self._shares.take_over(before._shares, before.first)

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _shared_epochs(self, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Return the chief's epochs on all ranks, with means over all shares."""
        wait_politely(self._comm)
        told = share(self._comm, {"epochs": [record._asdict() for record in epochs]} if self.attends else None)
        return [self._with_means(EpochRecord(**record)) for record in told["epochs"]]

    def _with_means(self, record: EpochRecord) -> EpochRecord:
        loss, accuracy = epoch_means(self.step_plan, self.records, record.epoch)
        return (
            record
            if loss is None
            else record._replace(
                train_loss=loss, train_accuracy=accuracy, train_perplexity=perplexity(loss, self.step_plan.config)
            )
        )

    def facts(self) -> dict[str, Any]:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        sums, steps = np.array([float(self._strategy.exchange.sent().read)]), np.empty(self._comm.Get_size())
        self._comm.Allgather(np.array([float(self.taken)]), steps)
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        mode = {
            "read_nbytes_per_step": float(sums[0] / max(1, steps.sum())),
            "steps_by_rank": steps.astype(int).tolist(),
            "steps_per_second": float(steps.sum() / self._wall_seconds),
            **self._strategy.exchange.facts(),
        }
        return {"slowest_rank": None, "mode": mode, "shares": None, "loss_scale": None}
