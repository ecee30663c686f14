"""How a flat vector is divided into units and chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from mpicoll.models.builders import perceptron
from mpicoll.parallel.parameter_groups import ParameterGroups, cut
from mpicoll.parallel.sharded_parameters import ChunkedParameters


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60), st.integers(1, 9))
def test_units_and_chunks_cover_the_vector_once(sizes: list[int], least: int, size: int) -> None:
    bounds = np.cumsum([0, *sizes]).tolist()
    units = cut(bounds, least, size)
    assert [layer for unit in units for layer in unit.layers] == list(range(len(sizes)))
    assert all(unit.length >= least for unit in units[:-1])
    assert len(units) == 1 or units[-1].length > 0
    at = 0
    for unit in units:
        assert (unit.start, unit.stop) == (bounds[unit.layers[0]], bounds[unit.layers[-1] + 1])
        last = max((layer for layer in unit.layers if sizes[layer]), default=unit.layers[0])
        assert bounds[last] - unit.start < least
        for rank in range(size):
            chunk = unit.chunk(rank)
            assert chunk.start == at
            assert chunk.stop - chunk.start in {unit.block, max(0, min(unit.block, unit.stop - at))}
            at = chunk.stop
    assert at == bounds[-1]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_unit_is_gathered_once_for_each_pass_but_where_it_is_still_there(ahead: bool) -> None:
    model = perceptron((4, 4, 4, 4, 4, 4), "float64")
    division, initial = ParameterGroups(model, MPI.COMM_SELF, 1), model.initial(0)
    division.sent_nbytes = lambda unit: 1  # type: ignore[method-assign]
    parameters = ChunkedParameters(division, model.initial_parameters(0), ahead=ahead)

    def go(layers: range) -> float:
        before = division.meter.traffic(0).sent
        for layer in layers:
            found = np.concatenate([array.ravel() for array in parameters.arrays(layer)])
            np.testing.assert_array_equal(found, initial[20 * layer : 20 * layer + 20])
        return division.meter.traffic(0).sent - before

    up, down = range(5), range(4, -1, -1)
    assert go(up) == 5
    assert go(down) == 3 if ahead else 4
    parameters.before_update()
    assert go(up) == 5
    assert go(up) == 5  # two evaluations
    assert go(up) == 5
    assert go(down) == 3 if ahead else 4
