"""The supervisor starts a job again as often as that helps, on fewer ranks if need be, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mpicoll.train import supervise

LAUNCHER = f"""#!{sys.executable}
import os, subprocess, sys, time
from pathlib import Path
ranks, arguments = int(sys.argv[2]), sys.argv[3:]
folder = Path(arguments[arguments.index("--checkpoint") + 1])
folder.mkdir(exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(" ".join([str(ranks), *arguments]) + "\\n")
starts = len((folder / "starts").read_text().splitlines())
def save(step):
    (folder / f"step-{{step:08d}}").mkdir(exist_ok=True)
"""


class Program:
    """A launcher of our own that does what `body` says, and the starts that it has seen."""

    def __init__(self, folder: Path, body: str) -> None:
        self.path, self.folder = folder / "launcher", folder / "run"
        self.path.write_text(LAUNCHER + body)
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        self.report = folder / "report.json"

    def command(self, *options: str, ranks: int = 4, more: tuple[str, ...] = ()) -> list[str]:
        job = [str(self.path), "-n", str(ranks), "--checkpoint", str(self.folder), *more]
        return ["--backoff", "0.01", "--json", str(self.report), *options, "--", *job]

    def begin(self, *options: str, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "mpicoll.train.supervise", *self.command(*options, more=more)]
        return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def begin_and_save(self) -> subprocess.Popen[str]:
        """Start it, and wait for its first checkpoint."""
        job, until = self.begin(), time.monotonic() + 20
        while not list(self.folder.glob("step-*")):
            assert time.monotonic() < until
            time.sleep(0.01)
        return job

    def run(self, *options: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
        job = self.begin(*options, more=more)
        text = job.communicate(timeout=30)[1]
        return job.returncode, text

    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().splitlines()

    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.report.read_text())
        return found


def test_a_job_that_fails_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    program = Program(tmp_path, "save(10 * starts)\nsys.exit(0 if starts == 6 else 7)\n")
    status, text = program.run("--restarts", "1")
    assert status == 0, text
    assert len(program.starts()) == 6  # each of them had a new checkpoint
    assert "--resume" not in program.starts()[0]
    assert all(line.endswith("--resume fallback") for line in program.starts()[1:])
    assert [attempt["resumed_from"] for attempt in program.attempts()] == [None, 10, 20, 30, 40, 50]
    assert "it ended with status 7; restart 1 of 1 from step 10 in 0.01 s" in text


@pytest.mark.parametrize("resume", [("--resume",), ("--resume", "yes"), ("--resume=yes",), ("--resume", "fallback")])
def test_restarts_pass_over_damaged_checkpoints_whatever_the_first_start_does(
    tmp_path: Path, resume: tuple[str, ...]
) -> None:
    program = Program(tmp_path, "sys.exit(0 if starts == 3 else 7)\n")
    (program.folder / "step-00000003").mkdir(parents=True)
    status, text = program.run(more=(*resume, "--lr", "1"))
    assert status == 0, text
    begin = f"4 --checkpoint {program.folder}"
    assert program.starts() == [f"{begin} {' '.join(resume)} --lr 1", *[f"{begin} --lr 1 --resume fallback"] * 2]


def test_a_restart_without_a_checkpoint_is_the_first_start_again(tmp_path: Path) -> None:
    program = Program(tmp_path, "sys.exit(0 if starts == 2 else 7)\n")
    status, text = program.run(more=("--resume",))
    assert status == 0, text
    assert program.starts() == [f"4 --checkpoint {program.folder} --resume"] * 2


def test_a_job_that_saves_nothing_new_is_given_up(tmp_path: Path) -> None:
    program = Program(tmp_path, "save(5)\nsys.exit(9)\n")
    status, text = program.run("--restarts", "2")
    assert status == 9
    assert len(program.starts()) == 3
    assert "given up with status 9: 3 starts in a row have failed without a new checkpoint" in text


@pytest.mark.parametrize("more", [(), ("-m", "mpicoll.train")])
@pytest.mark.parametrize("said", ["running", "failed", "ended", None])
def test_a_launcher_that_ends_well_though_its_ranks_were_killed_is_not_believed(
    tmp_path: Path, said: str | None, more: tuple[str, ...]
) -> None:
    """As Open MPI's with ULFM. A program of the user's own may write no status, or catch a failure and end well."""
    body = f"said = {said!r} if starts == 1 else 'ended'\nif said: (folder / '.run-status').write_text(said)\n"
    program = Program(tmp_path, f"{body}save(starts)\n")
    status, text = program.run(more=more)
    assert status == 0, text
    believed = said == "ended" or (said != "running" and not more)
    assert len(program.starts()) == (1 if believed else 2), text
    assert believed == ("though its launcher ended with status 0; restart 1 of 3 from step 1" not in text)
    assert [attempt["status"] for attempt in program.attempts()] == ([0] if believed else [1, 0])


def test_the_end_of_an_earlier_run_is_not_that_of_this_one(tmp_path: Path) -> None:
    program = Program(tmp_path, "")
    program.folder.mkdir()
    (program.folder / ".run-status").write_text("ended\n")
    status, text = program.run("--restarts", "1", more=("-m", "mpicoll.train"))
    assert status == 1, text
    assert "given up with status 1: 2 starts in a row have failed without a new checkpoint" in text


def test_wrong_options_are_not_tried_again(tmp_path: Path) -> None:
    program = Program(tmp_path, "sys.exit(2)\n")
    status, text = program.run()
    assert (status, len(program.starts())) == (2, 1)
    assert "its options are wrong" in text


def test_ranks_are_left_out_where_a_number_of_them_fails_again_and_again(tmp_path: Path) -> None:
    program = Program(tmp_path, "sys.exit(0 if ranks == 2 else 1)\n")
    status, text = program.run("--restarts", "9", "--min-ranks", "2")
    assert status == 0, text
    assert [int(line.split()[0]) for line in program.starts()] == [4, 4, 3, 3, 2]
    assert "on 3 ranks" in text


def test_a_number_of_ranks_that_the_options_refuse_is_passed_over(tmp_path: Path) -> None:
    """Three ranks are this supervisor's choice, and are no multiple of two."""
    program = Program(tmp_path, "sys.exit(2 if ranks == 3 else 0 if ranks == 2 else 1)\n")
    status, text = program.run("--restarts", "3", "--min-ranks", "2")
    assert status == 0, text
    assert [int(line.split()[0]) for line in program.starts()] == [4, 4, 3, 2]
    (tmp_path / "again").mkdir()
    program = Program(tmp_path / "again", "sys.exit(2 if ranks == 3 else 1)\n")
    status, text = program.run("--restarts", "2", "--min-ranks", "3")
    assert status == 2, text
    assert "its options are wrong" in text


def test_a_report_that_cannot_be_written_does_not_change_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(tmp_path, "sys.exit(0)\n")
    command = ["--json", str(tmp_path / "gone" / "report.json"), *program.command()[4:]]
    with pytest.raises(SystemExit):
        supervise.main(command)
    assert "cannot write this file" in capsys.readouterr().err
    assert not program.folder.exists()
    monkeypatch.setattr(supervise, "check_writable", lambda paths: None)
    assert supervise.main(command) == 0
    assert "gone" in capsys.readouterr().err


def test_a_job_without_progress_is_killed_with_all_it_started(tmp_path: Path) -> None:
    body = """
if starts == 1:
    save(1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    (folder / "child").write_text(str(child.pid))
    time.sleep(60)
"""
    program = Program(tmp_path, body)
    status, text = program.run("--stall", "1")
    assert status == 0, text
    assert "it wrote no checkpoint for 1 s; restart 1 of 3 from step 1" in text
    assert program.attempts()[0]["reason"] == "it wrote no checkpoint for 1 s"
    child = Path("/proc") / (program.folder / "child").read_text()
    assert not child.exists() or (child / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_starts_nothing(tmp_path: Path, number: int) -> None:
    body = """
import signal
def end(*_):
    save(77)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
save(1)
time.sleep(60)
"""
    program = Program(tmp_path, body)
    job = program.begin_and_save()
    job.send_signal(number)
    text = job.communicate(timeout=20)[1]
    assert job.returncode == 0, text
    assert len(program.starts()) == 1
    assert program.attempts()[0]["newest_step"] == 77


PROGRAM = """
import signal, subprocess, sys, time
from pathlib import Path
def end(*_):
    (folder / "step-00000077").mkdir()
    sys.exit(0)
folder = Path(sys.argv[1])
signal.signal(signal.SIGTERM, end)
helper = subprocess.Popen(["sleep", "60"])
try:
    (folder / "step-00000001").mkdir()
    time.sleep(60)
finally:
    helper.kill()
"""


@pytest.mark.parametrize("wrapper", ["true; $0 $1 $2; exit $?", "exec $0 $1 $2"])
def test_a_rank_in_a_shell_is_told_to_stop(tmp_path: Path, wrapper: str) -> None:
    """A shell ends at SIGTERM without a word to the program that it has started."""
    (tmp_path / "program.py").write_text(PROGRAM)
    body = f"""
words = ["bash", "-c", {wrapper!r}, sys.executable, {str(tmp_path / "program.py")!r}, str(folder)]
sys.exit(subprocess.call(words, env={{**os.environ, "PMI_RANK": "0"}}))
"""
    program = Program(tmp_path, body)
    job = program.begin_and_save()
    job.terminate()
    text = job.communicate(timeout=20)[1]
    assert job.returncode == 0, text
    assert program.attempts()[0]["newest_step"] == 77


def test_a_job_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    body = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsave(1)\ntime.sleep(60)\n"
    program = Program(tmp_path, body)
    job = program.begin("--grace", "0.5")
    while not list(program.folder.glob("step-*")):
        time.sleep(0.01)
    job.terminate()
    text = job.communicate(timeout=20)[1]
    assert job.returncode == 128 + signal.SIGKILL, text
    assert program.attempts()[0]["reason"] == "it did not stop within 0.5 s"


def test_what_cannot_be_supervised_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(tmp_path, "")
    (program.folder / "step-00000003").mkdir(parents=True)
    for words, says in (
        ([], "a command is missing"),
        (["--", "mpirun", "-n", "2", "python", "-m", "mpicoll.train"], "the command has no --checkpoint FOLDER"),
        (program.command(), "holds checkpoints already: add --resume"),
        (program.command("--min-ranks", "5", more=("--resume",)), "--min-ranks 5: the command starts 4 ranks"),
        (["--restarts", "-1", *program.command()], "'-1' is not a whole number from 0 on"),
        (["--backoff", "nan", *program.command()], "backoff"),
    ):
        with pytest.raises(SystemExit) as caught:
            supervise.main(words)
        assert caught.value.code == 2
        assert says in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert supervise.main(["--", str(tmp_path / "nothing"), "--checkpoint", str(tmp_path)]) == 1
    assert "the command cannot be started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("mpirun -n 8 python -m mpicoll.train --checkpoint run", 2),
        ("nice -n 10 mpirun -np 4 .venv/bin/python -m mpicoll.train --checkpoint run", 5),
        ("srun --n 3 prog.py -n 7 --checkpoint run", 2),
        ("srun python prog.py -n 7 --checkpoint run", None),
        ("mpirun program --checkpoint run -n 7", None),
    ],
)
def test_the_number_of_ranks_is_the_launchers(command: str, place: int | None) -> None:
    assert supervise._place_of_ranks(command.split()) == place
