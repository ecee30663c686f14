import subprocess
import sys

import pytest

from mpicoll.train import process_facts

VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "PMI_SIZE",
             "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE",
             "SLURM_STEP_NUM_TASKS", "SLURM_NODEID")  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_facts, "cores", lambda: 8)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 8),
        ({"MPI_LOCALNRANKS": "2"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2),
        ({"MPI_LOCALNRANKS": "100"}, 1),
        ({"MPI_LOCALNRANKS": "junk"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2),4", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "7"}, 8),
    ],
)
def test_cores_are_divided_among_local_ranks(monkeypatch, variables, threads):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = dict(variables)
    assert process_facts.limit_threads(chosen) == threads
    assert chosen["OMP_NUM_THREADS"] == chosen["NUMBA_NUM_THREADS"] == str(threads)


def test_what_the_user_set_stays():
    chosen = {"OMP_NUM_THREADS": "5"}
    process_facts.limit_threads(chosen)
    assert chosen["OMP_NUM_THREADS"] == "5"


def test_process_age_counts_from_the_start_of_the_process():
    code = "import time; time.sleep(0.3); from mpicoll.train.process_facts import process_age; print(process_age())"
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.25 < age < 30


def test_options_are_read_without_numpy_and_mpi():
    code = (
        "import sys, mpicoll.train.__main__, mpicoll.train.process_facts, mpicoll.train.config; "
        "assert not {'numpy', 'numba', 'mpi4py.MPI'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
