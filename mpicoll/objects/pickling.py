"""The pickler of mpi4py, ``MPI.pickle``: the only module that pickles.

What is unpickled comes from ranks of the same communicator, which run the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

_OUT_OF_BAND_PROTOCOL = 5

dumps = MPI.pickle.dumps
"""``dumps(obj)`` returns the pickle of an object, with everything in it."""
loads = MPI.pickle.loads
"""``loads(data)`` returns the object of a pickle."""
loads_apart = MPI.pickle.loads_oob
"""``loads_apart(data, buffers)`` returns the object of a pickle and the buffers that it leaves out; it keeps them."""


def dumps_apart(obj: Any) -> tuple[bytes, Sequence[Any]]:
    """Return a pickle and the large buffers that it leaves out, all of NumPy arrays.

    There are none where the program has given mpi4py another pickler, or an older protocol. Classes that give the
    pickler buffers of other objects get ``bytes`` and ``bytearray`` from a pickle with everything in it, and a part of
    the message from one without; some take the whole object of what they get.
    """
    protocol = MPI.pickle.PROTOCOL
    if protocol is None or protocol < _OUT_OF_BAND_PROTOCOL:
        return MPI.pickle.dumps(obj), ()
    try:
        data, buffers = MPI.pickle.dumps_oob(obj)
    except TypeError:  # of a pickler that knows no buffers, or of the object, which the next line raises again
        return MPI.pickle.dumps(obj), ()
    if all(isinstance(each.obj, np.ndarray) for each in buffers):
        return data, buffers
    return MPI.pickle.dumps(obj), ()
