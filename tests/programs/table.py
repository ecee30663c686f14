"""The programs: which release, where its tests are, how they are run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program that others wrote, and how its own tests are run.

    Attributes
    ----------
    requirement
        Name and version for pip; the extra ``programs`` in pyproject.toml has the same.
    about
        What it uses MPI for.
    folders
        Folders of the source distribution that hold the tests; none if they are installed with the program.
    arguments
        Of pytest, in a folder that has `folders` and nothing else of the source distribution.
    ranks
        Numbers of ranks on which it can run; empty for any.
    seconds
        Deadline of one run.
    quick
        It ends within some seconds.
    """

    requirement: str
    about: str
    arguments: tuple[str, ...]
    folders: tuple[str, ...] = ("tests",)
    ranks: tuple[int, ...] = ()
    seconds: float = 600.0
    quick: bool = False

    @property
    def name(self) -> str:
        return self.requirement.partition("==")[0]

    @property
    def version(self) -> str:
        return self.requirement.partition("==")[2]


PROGRAMS = (
    Program(
        "mpi-list==0.4.0",
        "distributed lists: collectives of Python objects",
        ("tests",),
        quick=True,
    ),
    Program(
        "NuMPI==0.18.1",
        "reductions of NumPy arrays, optimisers and files on subsets of the ranks",
        ("test",),
        folders=("test",),
    ),
    Program(
        "pshmem==1.3.5",
        "arrays in MPI windows of shared memory, filled by broadcasts between nodes",
        ("--pyargs", "pshmem.test"),
        folders=(),
    ),
    Program(
        "pySDC==5.9",
        "time integration parallel across the nodes of a step",
        ("pySDC/projects/DAE/tests/test_MPI_sweepers.py",),
        folders=("pySDC/projects/DAE/tests",),
        ranks=(2, 3),  # on 8 its tests hang with plain mpi4py
    ),
    Program(
        "mpi4py-fft==2.0.6",
        "distributed FFTs: Alltoallw of subarrays on Cartesian communicators",
        # test_speed.py compares with pyFFTW, which its release does not ask for.
        ("--ignore", "tests/test_speed.py", "tests"),
    ),
    Program(
        "pylops-mpi==0.8.0",
        "distributed linear operators and solvers",
        # Its conftest.py adds the rank to the name of a test, by an attribute that pytest no longer has.
        ("--noconftest", "--with-mpi", "tests"),
    ),
)
"""The quickest first."""


def named(name: str) -> Program:
    """Return the program of this name.

    Raises
    ------
    ValueError
        If there is none.
    """
    for program in PROGRAMS:
        if program.name == name:
            return program
    raise ValueError(f"program: {name!r} is none of {', '.join(program.name for program in PROGRAMS)}")
