"""Tests of `mpicoll.torch`, where PyTorch is installed: ``make test-torch``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from mpi4py import MPI

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
TIMEOUT = timedelta(seconds=20)


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """The default process group, all ranks."""
    import torch
    import torch.distributed as dist

    import mpicoll.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("mpicoll", timeout=TIMEOUT)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def initialized() -> Iterator[None]:
    """Horovod's interface, ready for calls."""
    import torch

    import mpicoll.torch as hvd

    torch.set_num_threads(1)
    hvd.init(TIMEOUT)
    yield
    hvd.shutdown()
    assert not hvd.is_initialized()


@pytest.fixture
def pg(world: Any) -> Iterator[Any]:
    """A fresh group of all ranks."""
    import torch.distributed as dist

    made = dist.new_group(list(range(MPI.COMM_WORLD.size)), timeout=TIMEOUT)
    yield made
    dist.destroy_process_group(made)
