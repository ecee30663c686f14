"""Sharded optimizer for a training loop of the user's own.

>>> sharded = mpicoll.ShardedOptimizer(units, comm=comm, stage=3, optimizer="adam", lr=1e-3)
>>> weights, bias = sharded.gather(0)       # whole arrays of a unit, read-only
>>> sharded.complete(0, [gradient_of_weights, gradient_of_bias])
>>> sharded.step(samples=len(batch))
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor
from mpicoll.errors import MismatchError, UsageError
from mpicoll.gradients.synchronizer_options import REFUSED, agree
from mpicoll.messages.call_agreement import announced
from mpicoll.parallel import sharded_arguments as arguments
from mpicoll.parallel.sharded import Sharded
from mpicoll.parallel.state_dicts import ShardedState
from mpicoll.parallel.unit_parameters import UnitModel, described
from mpicoll.train.config import LEARNING_RATES, TrainConfig


class ShardedOptimizer(ShardedState):
    """Optimizer of a model of the user's own whose state, gradients and parameters are divided among the ranks.

    The stages are those of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
    models", SC20, section 5), and the code is that of the trainer's sharded strategies: see
    :class:`~mpicoll.parallel.sharded.Sharded` for the bytes that a rank holds.

    The model consists of *units*, which are communicated one at a time. In a step, every rank gathers the units in the
    same order, computes with them, gives the gradients of every unit once, and calls :meth:`step`. One unit may be in
    use at a time, from :meth:`gather` to :meth:`release` or :meth:`complete`.

    The constructor and every method but :meth:`release` and :meth:`nbytes` are collective over `comm`, with equal
    arguments but for gradients and `samples`. An argument that is wrong on one rank raises there, and RemoteError on
    the ranks that wait for it.

    Parameters
    ----------
    units : list
        Initial parameters, equal on all ranks, all float32 or all float64. A unit is a list of arrays, a function that
        returns such a list and is called twice, or a layer of :mod:`mpicoll.models.layers`. Arrays are copied. With
        functions or layers, no rank ever holds more than one whole unit of initial parameters.
    comm : MPI.Intracomm
        Communicator of the ranks. Another one than :class:`mpicoll.Intracomm` is wrapped in one.
    stage : int
        1 divides the optimizer state, 2 also the gradients, 3 also the parameters.
    optimizer : str
        ``"sgd"``, ``"momentum"``, ``"adagrad"``, ``"adam"`` or ``"adamw"``.
    lr : float, optional
        Learning rate, until :meth:`step` is given another; by default 0.1 for sgd and momentum, 0.01 for adagrad,
        0.001 for adam and adamw.
    weight_decay : float
        Factor of the parameters that is added to their gradients (adamw: decoupled). Arrays of one dimension or none,
        and the biases of layers, are not decayed.
    clip : float, optional
        Largest norm of all gradients together, to which longer ones are scaled down.
    overlap : bool
        Stage 1: reduce gradients while others are computed. Stage 3: gather the next unit while one is used, in a
        second buffer. No effect in stage 2.
    compression : str or Compressor, optional
        Compressor of the gradients, which needs no error feedback and encodes each rank's chunk by itself: ``"int8"``,
        ``"fp8"``, ``"bf16"``, ``"qsgd"``, ... Parameters are not compressed.
    offload : path, optional
        Folder in which each rank keeps its optimizer state, in a file without a name that is mapped into memory.
    dtype, seed
        For units that are layers: float32 or float64, and the seed of the initial parameters.
    settings
        Of the optimizer, such as ``momentum=0.9, nesterov=True`` or ``beta1=0.9, beta2=0.999, epsilon=1e-8``.

    Attributes
    ----------
    shapes : list of list of tuple
        Shapes of the arrays of each unit.
    lr : float
        Learning rate of the next step.
    steps : int
        Number of steps, those before :meth:`load_state_dict` included.

    Raises
    ------
    TypeError, ValueError
        If an argument of this rank is wrong; the message names it.
    mpicoll.errors.UsageError
        On every rank, if `offload` cannot be used on one of them.
    RemoteError
        If only arguments of other ranks are wrong.
    MismatchError
        On every rank, if arguments differ between ranks, initial parameters included.
    """

    def __init__(
        self,
        units: Iterable[Any],
        *,
        comm: MPI.Intracomm,
        stage: int = 3,
        optimizer: str = "adamw",
        lr: float | None = None,
        weight_decay: float = 0.0,
        clip: float | None = None,
        overlap: bool = True,
        compression: str | Compressor | None = None,
        offload: Any = None,
        dtype: Any = None,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm: {comm!r} is not an intracommunicator")
        self.comm = comm if isinstance(comm, Intracomm) else Intracomm(comm)
        problem: Exception | None = None
        digest = REFUSED
        try:
            found = described(units, dtype, seed)
            compression = arguments.checked_compression(compression, found.model.dtype)
            config = arguments.config_of(stage, optimizer, weight_decay, clip, compression, offload, settings)
            self.lr = arguments.number(LEARNING_RATES[optimizer] if lr is None else lr, "lr")
            facts = stage, optimizer, config.optimizer_settings, weight_decay, clip, bool(overlap), offload is None
            digest = hashlib.sha256(repr((*facts, compression)).encode() + found.digest).digest()
        except Exception as error:  # a function that makes a unit may raise anything
            problem = error
        agree(self.comm, digest, problem, who=arguments.NAME, facts=arguments.FACTS)
        self._build(found, config, overlap)

    def _build(self, found: UnitModel, config: TrainConfig, overlap: bool) -> None:
        model = found.model
        self.shapes = [list(layer.shapes) for layer in model.layers]
        self._clip, self._dtype = config.clip, model.dtype
        try:
            self._sharded = Sharded(model, found.initial, self.comm, config, overlap=overlap)
        except UsageError as error:
            raise UsageError(str(error).replace("--offload", "offload")) from None
        self._start_step()

    def _start_step(self) -> None:
        self._in_use: int | None = None
        self._begun, self._complete = set[int](), set[int]()
        self._calls = hashlib.sha256()

    # ---- parameters -------------------------------------------------------------------------------------------------

    def gather(self, unit: int) -> list[np.ndarray]:
        """Return the arrays of unit number `unit`, read-only, valid until :meth:`release` or :meth:`complete`.

        Stages 1 and 2 hold all parameters and send nothing.

        Raises
        ------
        IndexError, TypeError
            If there is no such unit.
        RuntimeError
            If another unit is in use.
        """
        with announced(self.comm.channel):
            number = self._number(unit)
            if self._in_use not in (None, number):
                raise RuntimeError(f"gather({number}): unit {self._in_use} is in use; release() or complete() it first")
        self._calls.update(b"g%d" % number)
        self._in_use = number
        views = [array.view() for array in self._sharded.parameters(number)]
        for view in views:
            view.flags.writeable = False
        return views

    def release(self, unit: int) -> None:
        """End the use of a unit; its arrays must not be accessed any more. Not collective.

        Raises
        ------
        RuntimeError
            If the unit is not in use.
        """
        with announced(self.comm.channel):
            number = self._number(unit)
            if self._in_use != number:
                raise RuntimeError(f"release({number}): the unit is not in use")
        self._sharded.release(number)
        self._in_use = None

    @contextmanager
    def gathered(self, unit: int) -> Iterator[list[np.ndarray]]:
        """Context manager of :meth:`gather` and :meth:`release`, unless :meth:`complete` comes before the end."""
        arrays = self.gather(unit)
        try:
            yield arrays
        finally:
            if self._in_use == self._number(unit):
                self.release(unit)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def complete(self, unit: int, gradients: Sequence[np.ndarray] | None, *, last: bool = True) -> None:
        """Give this rank's gradients of a unit, and release its parameters.

        Gradients are copied. What several calls give before a step is added up, for batches that are computed in parts.

        Parameters
        ----------
        gradients
            An array for each array of the unit, of its shape; None for zeros.
        last
            False if more gradients of the unit follow before the step.

        Raises
        ------
        IndexError, TypeError, ValueError
            If there is no such unit, or the gradients do not fit it.
        RuntimeError
            If another unit is in use, or the unit has been completed with ``last=True`` in this step.
        """
        with announced(self.comm.channel):
            number = self._number(unit)
            if self._in_use not in (None, number):
                raise RuntimeError(f"complete({number}): unit {self._in_use} is in use")
            if number in self._complete:
                raise RuntimeError(f"complete({number}): the unit is complete; give last=False for all parts but one")
            arrays = arguments.gradients_of(gradients, number, self.shapes[number], self._dtype)
        self._calls.update(b"c%d,%d" % (number, last))
        self._in_use = None
        self._sharded.begin(1.0, last=last, compress=True)
        for into, array in zip(self._sharded.gradients(number), arrays, strict=True):
            if number in self._begun:
                into += array
            else:
                into[...] = array
        self._begun.add(number)
        if last:
            self._complete.add(number)
        self._sharded.complete(number)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def step(self, lr: float | None = None, *, samples: float = 1.0) -> float:
        """Update the parameters by the sum of all ranks' gradients, divided by the sum of their `samples`.

        Parameters
        ----------
        lr
            Learning rate of this step and those after it; None for the one before.
        samples
            Number of samples whose gradients this rank has added up, 0 for none. With 1 on each rank, gradients are
            averaged over the ranks.

        Returns
        -------
        float
            Norm of the divided gradients before clipping; NaN without `clip`.

        Raises
        ------
        RuntimeError
            If a unit is in use, or has no complete gradients.
        TypeError, ValueError
            If an argument is wrong, or no rank has samples.
        MismatchError
            On every rank, if ranks gathered or completed units in other orders, or have other learning rates. The
            gradients are discarded then, and no parameter has changed.
        """
        with announced(self.comm.channel):
            rate = self.lr if lr is None else arguments.number(lr, "lr")
            weight = arguments.number(samples, "samples")
            self._check_step()
        self._sharded.reduce()
        self._calls.update(repr(rate).encode())
        try:
            total = arguments.agreed_samples(self.comm, self._calls.digest(), weight)
        except (MismatchError, ValueError):
            self.discard()
            raise
        self._sharded.begin(1 / total, last=True, compress=True)
        self.lr = rate
        norm = self._sharded.update(rate, self._clip)
        self._start_step()
        return norm

    def _check_step(self) -> None:
        if self._in_use is not None:
            raise RuntimeError(f"step: unit {self._in_use} is in use")
        missing = sorted(set(range(len(self.shapes))) - self._complete)
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise RuntimeError(f"step: units without complete gradients: {shown}; complete(unit, None) gives zeros")

    def discard(self) -> None:
        """Discard the gradients of this step, for example if they are not finite."""
        self._sharded.discard()
        self._start_step()

    def _number(self, unit: Any) -> int:
        number = operator.index(unit)
        if not 0 <= number < len(self.shapes):
            raise IndexError(f"unit: {number} is not in 0..{len(self.shapes) - 1}")
        return number
