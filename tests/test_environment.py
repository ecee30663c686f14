"""What is read from the launcher's variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpicoll import environment
from mpicoll.environment import core_limit


@pytest.mark.parametrize(
    ("variables", "size", "rank", "local"),
    [
        ({}, None, 0, None),
        ({"PMI_SIZE": "8", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4"}, 8, 3, 4),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8, 3, 2),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, 8, 5, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, None, 0, 2),
        ({"SLURM_NTASKS": "8"}, None, 0, None),  # a single process inside an allocation of eight
        ({"PMI_SIZE": "junk", "PMI_RANK": "-1"}, None, 0, None),
    ],
)
def test_the_launchers_variables(variables, size, rank, local):
    assert environment.launched_size(variables) == size
    assert environment.launched_rank(variables) == rank
    assert environment.local_ranks(variables) == local


def test_mismatch_is_found_only_when_many_were_launched_and_one_is_seen(monkeypatch):
    for name in ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert environment.launcher_mismatch(1, "MPICH") is None
    monkeypatch.setenv("PMI_SIZE", "8")
    assert "8 processes" in environment.launcher_mismatch(1, "MPICH")
    assert environment.launcher_mismatch(8, "MPICH") is None


def test_switches_have_few_values() -> None:
    right = {"MPICOLL_NODE": "off", "MPICOLL_SEGMENTS": "", "MPICOLL_PROGRESS_THREAD": "eager"}
    environment.check_switches(right)
    for name in ("MPICOLL_NODE", "MPICOLL_PROGRESS", "MPICOLL_SEGMENTS", "MPICOLL_ARENA", "MPICOLL_TRANSFER"):
        for value in ("0", "OFF", "eager", " off"):
            with pytest.raises(ValueError, match=f"{name}: '{value}' is not one of on, off"):
                environment.check_switches({**right, name: value})


def test_all_variables_are_known_and_documented() -> None:
    repository = Path(__file__).resolve().parent.parent
    files = [path for top in ("kernels", "mpicoll", "bench") for path in (repository / top).rglob("*.py")]
    read = {name for path in files for name in re.findall(r"[\"'](MPICOLL_[A-Z_]*[A-Z])[\"']", path.read_text())}
    assert read == set(environment.VARIABLES)
    table = (repository / "docs" / "reference" / "environment.md").read_text()
    assert set(re.findall(r"^\| `(MPICOLL_[A-Z_]+)`", table, re.MULTILINE)) == set(environment.VARIABLES)


def test_variables_that_do_not_exist_are_found() -> None:
    given = {"MPICOLL_CORSE": "1", "MPICOLL_NODES": "2", "MPICOLL_TEST_ALL": "1", "MPICOLL_XYZZY": "", "PATH": "/bin"}
    assert environment.unknown_variables(given) == {"MPICOLL_CORSE": "MPICOLL_CORES", "MPICOLL_XYZZY": ""}


def test_a_limit_of_cores_is_read(tmp_path: Path) -> None:
    assert core_limit({"MPICOLL_CORES": "3"}, tmp_path) == 3
    for wrong in ("0", "-1", "two", "1.5", "²", "٣", "1" * 30):
        with pytest.raises(ValueError, match=f"MPICOLL_CORES: '{wrong}'"):
            core_limit({"MPICOLL_CORES": wrong}, tmp_path)
    assert core_limit({}, tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/old\n0::/some/group\n")
    group = tmp_path / "sys/fs/cgroup/some/group"
    group.mkdir(parents=True)
    for content, limit in (("max 100000", None), ("150000 100000", 2), ("1000 100000", 1), ("damaged", None)):
        (group / "cpu.max").write_text(content + "\n")
        assert core_limit({}, tmp_path) == limit


def test_the_group_of_processes_is_read_where_linux_makes_groups(tmp_path: Path) -> None:
    assert environment.scheduling_group(tmp_path) == ""
    switch, group = tmp_path / "proc/sys/kernel/sched_autogroup_enabled", tmp_path / "proc/self/autogroup"
    for file, text in ((switch, "1\n"), (group, "/autogroup-69 nice 0\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert environment.scheduling_group(tmp_path) == "/autogroup-69"
    switch.write_text("0\n")
    assert environment.scheduling_group(tmp_path) == ""
