"""`import mpicoll.jax` without JAX says what to install, and its calls say which threads MPI must serve."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = """
import sys
sys.modules["jax"] = None  # as if it were not installed
try:
    import mpicoll.jax
except ImportError as error:
    print(error.name, error)
"""
OLD = """
import sys, types
sys.modules["jax"] = types.SimpleNamespace(__version__="0.4.30", __version_info__=(0, 4, 30))
try:
    import mpicoll.jax
except ImportError as error:
    print(error.name, error)
"""
SERIALIZED = """
import mpi4py
mpi4py.rc.thread_level = "serialized"
import mpicoll.jax
try:
    mpicoll.jax.allreduce(1.0)
except RuntimeError as error:
    print(error)
"""


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def test_the_error_says_what_to_install() -> None:
    assert printed(MISSING) == 'jax mpicoll.jax: JAX is missing; pip install "mpicoll[jax]"\n'


def test_an_old_jax_is_refused() -> None:
    assert printed(OLD) == "jax mpicoll.jax: it needs JAX 0.8 or newer, not 0.4.30\n"


def test_a_library_that_serves_one_thread_is_refused() -> None:
    pytest.importorskip("jax", reason="JAX is not installed: make test-jax")
    assert "MPI_THREAD_MULTIPLE" in printed(SERIALIZED)
