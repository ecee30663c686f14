"""Which of mpi4py's tests concern mpicoll, and which of those are left out, with the reason."""

from __future__ import annotations

from fnmatch import fnmatchcase

QUICK = (
    "test_cco_buf",
    "test_cco_nb_buf",
    "test_cco_pr_buf",
    "test_cco_vec",
    "test_cco_nb_vec",
    "test_cco_pr_vec",
    "test_cco_obj",
    "test_comm",
    "test_comm_topo",
    "test_comm_inter",
    "test_cco_ngh_buf",
    "test_cco_ngh_obj",
    "test_cco_pr_ngh_buf",
    "test_request",
)
"""What mpicoll overrides: collectives, making communicators, topologies, requests."""

MODULES = (
    *QUICK,
    "test_cco_buf_inter",
    "test_cco_obj_inter",
    "test_cco_vec_inter",
    "test_msgspec",
    "test_msgzero",
    "test_attributes",
    "test_cffi",
    "test_ctypes",
    "test_errhandler",
    "test_group",
    "test_handle",
    "test_op",
    "test_pack",
    "test_pickle",
    "test_status",
    "test_subclass",
    "test_p2p_buf",
    "test_p2p_buf_matched",
    "test_p2p_buf_part",
    "test_p2p_obj",
    "test_p2p_obj_matched",
)
"""And everything else that a communicator does, which is inherited and has to go on working."""

_CONSTANTS = "is about MPI.COMM_WORLD and MPI.COMM_SELF as objects of mpi4py, which stand for other objects here"
_OTHER_OBJECTS = "is about objects to which a communicator is no more than an argument, or none at all"

LEFT_OUT_MODULES = {
    "test_objmodel": _CONSTANTS,
    **dict.fromkeys(
        (
            "test_address",
            "test_buffer",
            "test_datatype",
            "test_doc",
            "test_dynproc",
            "test_environ",
            "test_errorcode",
            "test_exceptions",
            "test_file",
            "test_grequest",
            "test_info",
            "test_io",
            "test_mpiabi",
            "test_mpiapi",
            "test_mpimem",
            "test_package",
            "test_rma",
            "test_rma_nb",
            "test_session",
            "test_spawn",
            "test_threads",
            "test_toplevel",
            "test_ulfm",
            "test_util_dtlib",
            "test_util_pkl5",
            "test_util_pool",
            "test_util_sync",
            "test_win",
        ),
        _OTHER_OBJECTS,
    ),
}
"""Modules that are not run, with the reason."""

LEFT_OUT = {
    "test_p2p_obj.*.testCommLock": "is about a lock that mpi4py's own bcast keeps in a private table; mpicoll's "
    "takes turns otherwise",
    "test_ctypes.*.testHandleAdress": "makes an object of a communicator's type without a communicator, which "
    "mpicoll.Intracomm refuses",
    "test_comm.TestComm[SW]*[fd].testPickle": f"{_CONSTANTS}; tests/mpi/test_communicators.py pickles mpicoll's",
}
"""Patterns of names of tests that are not run, with the reason."""


def left_out(name: str) -> str:
    """Return why the test with this name is left out, or nothing."""
    return next((reason for pattern, reason in LEFT_OUT.items() if fnmatchcase(name, pattern)), "")
