"""Memory that is left, by files of the system."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpicoll.environment import address_space_left
from mpicoll.models.builders import perceptron
from mpicoll.train.available_memory import group_limit, machine_limit
from mpicoll.train.memory_check import offloaded_nbytes, state_nbytes
from mpicoll.train.options import parse

MEGABYTE = 1 << 20
NO_LIMIT = (1 << 63) - 1


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group(top: str, path: str, limit: str, used: int, cached: int, *, old: bool = False) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    names = names if old else ("memory.max", "memory.current", "inactive_file")
    place = f"{top}/{path}".rstrip("/")
    stat = f"anon 5\n{names[2]} {cached}\n"
    return {f"{place}/{names[0]}": f"{limit}\n", f"{place}/{names[1]}": f"{used}\n", f"{place}/memory.stat": stat}


def test_this_machine() -> None:
    assert 0 < address_space_left() <= NO_LIMIT
    assert MEGABYTE < machine_limit().left < NO_LIMIT
    assert machine_limit().key == machine_limit().key != group_limit().key
    assert group_limit().left > 0


def test_memory_that_can_be_freed_and_swap_space_count(tmp_path: Path) -> None:
    files(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 3000 kB\nSwapFree: 500 kB\nHugePages_Free: 0\n"})
    assert machine_limit(tmp_path).left == 3500 << 10


@pytest.mark.parametrize("text", ["", "MemAvailable: x kB", "MemTotal: 5 kB"])
def test_a_machine_that_does_not_say_has_no_limit(tmp_path: Path, text: str) -> None:
    files(tmp_path, {"proc/meminfo": text})
    assert machine_limit(tmp_path).left == NO_LIMIT
    assert machine_limit(tmp_path / "nothing").left == NO_LIMIT


def test_the_smallest_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    files(tmp_path, {"proc/self/cgroup": "0::/job/step\n", **group(top, "job/step", "max", 50, 0)})
    assert group_limit(tmp_path).left == NO_LIMIT
    files(tmp_path, group(top, "job", "1000", 700, 100))
    assert group_limit(tmp_path).left == 400
    files(tmp_path, group(top, "job/step", "900", 50, 0))
    assert group_limit(tmp_path).left == 400
    files(tmp_path, group(top, "job/step", "300", 350, 0))
    assert group_limit(tmp_path).left == 0


def test_the_older_version(tmp_path: Path) -> None:
    files(tmp_path, {"proc/self/cgroup": "4:cpu:/\n3:memory:/pod\n0::/\n"})
    files(tmp_path, group("sys/fs/cgroup/memory", "pod", "1000", 400, 0, old=True))
    assert group_limit(tmp_path).left == 600


def test_a_path_of_outside_the_container_means_its_top(tmp_path: Path) -> None:
    files(tmp_path, {"proc/self/cgroup": "0::/../other\n", **group("sys/fs/cgroup", "", "1000", 900, 0)})
    assert group_limit(tmp_path).left == 100


def test_groups_differ_by_their_place(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        root = tmp_path / name
        files(root, {"proc/self/cgroup": f"0::/{name}\n", **group("sys/fs/cgroup", name, "1000", 1, 0)})
        keys.add(group_limit(root).key)
    assert len(keys) == 2


@pytest.mark.parametrize("precision", ["full", "bfloat16"])
@pytest.mark.parametrize("strategy", ["sharded_optimizer", "sharded_gradients", "sharded"])
def test_state_in_a_file_is_no_need_of_memory(strategy: str, precision: str) -> None:
    words = f"--strategy {strategy} --precision {precision} --optimizer adam --hidden 100,100".split()
    model, size = perceptron((64, 100, 100, 10), np.float32), 4
    in_memory = parse(words)
    in_file = parse([*words, "--offload", "folder"])
    state = 2 * 4 * model.parameter_count / size  # two vectors of float32
    saved = state_nbytes(in_memory, model, size) - state_nbytes(in_file, model, size)
    assert saved == offloaded_nbytes(in_file, model, size)
    assert state <= saved < 1.01 * state
    assert offloaded_nbytes(in_memory, model, size) == 0
