"""A progress bar is not wanted in a file, whether a rank writes there itself or by way of a launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = "from mpicoll.train.output_destination import reaches_a_reader; print(reaches_a_reader())"
LAUNCHER = f"""#!{sys.executable}
import subprocess, sys
if int(sys.argv[1]) == 0:
    command = [sys.executable, "-c", sys.argv[2]]
else:
    command = [sys.argv[0], str(int(sys.argv[1]) - 1), sys.argv[2]]
out, err = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True).communicate()
sys.stdout.write(out)
sys.stderr.write(err)
"""


def ask(tmp_path: Path, launchers: int, output: int, error: int, name: str = "mpirun") -> None:
    """Run the child behind so many launchers, which copy what arrives in their pipes."""
    command = [sys.executable, "-c", CHILD]
    if launchers:
        path = tmp_path / name
        path.write_text(LAUNCHER)
        path.chmod(0o755)
        command = [str(path), str(launchers - 1), CHILD]
    subprocess.run(command, stdout=output, stderr=error, check=True, timeout=60)


@pytest.mark.parametrize("launchers", range(3))
def test_a_file(tmp_path: Path, launchers: int) -> None:
    with (tmp_path / "log").open("w") as log:
        ask(tmp_path, launchers, log.fileno(), log.fileno())
    assert (tmp_path / "log").read_text() == "False\n"


@pytest.mark.parametrize("launchers", range(3))
@pytest.mark.parametrize(("apart", "expected"), [(True, "True\n"), (False, "False\n")])
def test_a_pipe_for_both_streams_or_for_each(tmp_path: Path, launchers: int, apart: bool, expected: str) -> None:
    (read, write), (read_error, write_error) = os.pipe(), os.pipe()
    with os.fdopen(read) as output, os.fdopen(read_error):
        try:
            ask(tmp_path, launchers, write, write_error if apart else write)
        finally:
            os.close(write)
            os.close(write_error)
        assert output.read() == expected


@pytest.mark.parametrize("launchers", range(3))
def test_a_terminal(tmp_path: Path, launchers: int) -> None:
    terminal, end = os.openpty()
    with (tmp_path / "log").open("w") as log:
        ask(tmp_path, launchers, log.fileno(), end)
    os.close(terminal)
    os.close(end)
    assert (tmp_path / "log").read_text() == "True\n"


def test_a_program_that_reads_a_pipe_is_no_launcher(tmp_path: Path) -> None:
    """It may show what arrives, wherever its own errors go."""
    with (tmp_path / "log").open("w") as log:
        ask(tmp_path, 1, log.fileno(), log.fileno(), "notebook")
    assert (tmp_path / "log").read_text() == "True\n"
