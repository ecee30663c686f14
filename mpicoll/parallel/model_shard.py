"""Model shard: one rank's part of a model, the layers of its pipeline stage and its columns or rows of them."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.errors import UsageError
from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Shape
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.parallel.common_arrays import CommonArrays
from mpicoll.parallel.gradient_norm import Gradients, sum_of_squares
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.pipeline import stage_bounds
from mpicoll.parallel.tensor import divide


class ModelShard:
    """Model shard of a rank of the mesh; the whole model if there are replicas only.

    Parameters
    ----------
    whole
        The model that the mesh shares.
    mesh
        This rank's place in the mesh.
    inputs
        Shape of a sample's features.

    Attributes
    ----------
    model : Model
        This rank's layers.
    inputs : tuple of int
        Shape of a sample's input of the first of them.
    common : CommonArrays
        The arrays of which the ranks that share the layers have copies.

    Raises
    ------
    UsageError
        On every rank, if there are too few layers, or layers that are too narrow.
    """

    def __init__(self, whole: Model, mesh: Mesh, inputs: Shape) -> None:
        self._whole, self._mesh = whole, mesh
        first, stop = 0, len(whole.layers)
        divided = divide(whole.layers, mesh.tensor)
        if mesh.pipeline is not None:
            first, stop = self._stage(mesh.pipeline)
            inputs = divided[first - 1].layer.output if first else inputs
        self._first, self._divided = first, divided[first:stop]
        self.inputs = inputs
        divided_any = mesh.tensor is not None or mesh.pipeline is not None
        self.model = (
            Model([layer for layer, *_ in self._divided], whole.dtype, whole.loss_function) if divided_any else whole
        )
        self.model.recompute = whole.recompute
        counted = mesh.tensor is None or mesh.tensor.Get_rank() == 0
        spans = [[(span.start, span.stop) for span in layer] for layer in self.model.layout.spans]
        self._counted = [
            span
            for layer, (_, _, common) in zip(spans, self._divided, strict=True)
            for span, same in zip(layer, common, strict=True)
            if counted or not same
        ]
        self.common = CommonArrays(spans, self._divided, mesh, aligned=self._is_aligned())

    def _stage(self, comm: MPI.Intracomm) -> tuple[int, int]:
        bounds, stages = self._whole.layout.bounds, comm.Get_size()
        if stages > len(self._whole.layers):
            raise UsageError(f"--pipeline {stages} needs a layer for each stage; there are {len(self._whole.layers)}")
        cuts = stage_bounds(np.diff(bounds).tolist(), stages)
        return cuts[comm.Get_rank()], cuts[comm.Get_rank() + 1]

    def _is_aligned(self) -> bool:
        """Return True if all ranks that share the layers have equally long parts of each array."""
        ranks = 1 if self._mesh.tensor is None else self._mesh.tensor.Get_size()
        wholes = self._whole.layout.spans[self._first : self._first + len(self._divided)]
        arrays = zip(wholes, self.model.layout.spans, self._divided, strict=True)
        return all(
            same or (mine.stop - mine.start) * ranks == whole.stop - whole.start
            for layer, part, (_, _, common) in arrays
            for whole, mine, same in zip(layer, part, common, strict=True)
        )

    def cut(self, vector: np.ndarray) -> np.ndarray:
        """Return a copy of this rank's part of a vector of the whole model, (parameter_count,) of its dtype."""
        own = np.empty(self.model.parameter_count, vector.dtype)
        there, here = FlatParameters(self._whole.layout, vector), FlatParameters(self.model.layout, own)
        for number, (_, cuts, _) in enumerate(self._divided):
            from_arrays, to_arrays = there.parameters(self._first + number), here.parameters(number)
            for array, index, into in zip(from_arrays, cuts, to_arrays, strict=True):
                into[...] = array[index]
        return own

    def initial(self, whole: InitialParameters) -> InitialParameters:
        """Return the initial parameters of this rank's part, from those of the whole model."""
        return _PartOfParameters(self, whole)

    def fill(self, whole: InitialParameters, start: int, into: np.ndarray) -> None:
        """Write elements of this rank's part, from number `start` on, of the initial parameters `whole`."""
        if self._mesh.tensor is None:
            whole.fill(self._whole.layout.bounds[self._first] + start, into)
            return
        stop = start + len(into)
        for number, (_, cuts, _) in enumerate(self._divided):
            there = self._whole.layout.spans[self._first + number]
            shapes = self._whole.layers[self._first + number].shapes
            for here, span, shape, index in zip(self.model.layout.spans[number], there, shapes, cuts, strict=True):
                first, last = max(here.start, start), min(here.stop, stop)
                if first < last:  # one array at a time is whole in memory
                    array = np.empty(span.stop - span.start, into.dtype)
                    whole.fill(span.start, array)
                    own = array.reshape(shape)[index].reshape(-1)
                    into[first - start : last - start] = own[first - here.start : last - here.start]

    def total_squares(self, own: Gradients) -> float:
        """Return the sum of squares over the whole model: :data:`~mpicoll.parallel.gradient_norm.Squares`."""
        sums = np.array([sum(self._squares(piece, start) for start, piece in own)], np.float64)
        for comm in (self._mesh.tensor, self._mesh.pipeline):
            if comm is not None:
                comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        return float(sums[0])

    def _squares(self, piece: np.ndarray, start: int) -> float:
        stop = start + piece.size
        cut = [(max(a, start) - start, min(b, stop) - start) for a, b in self._counted if a < stop and b > start]
        return sum(sum_of_squares(piece[a:b]) for a, b in cut)


class _PartOfParameters:
    """Initial parameters of a model shard; an :class:`~mpicoll.models.initial_parameters.InitialParameters`."""

    def __init__(self, shard: ModelShard, whole: InitialParameters) -> None:
        self._shard, self._whole = shard, whole

    def fill(self, start: int, into: np.ndarray) -> None:
        self._shard.fill(self._whole, start, into)
