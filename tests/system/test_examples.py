"""Every example runs on three ranks, checks its own result and ends with the ratio of the two times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import REPOSITORY, Outcome, run

FOLDER = REPOSITORY / "examples"
HELPER = "timing"
TORCH = {"torch_ddp": "accuracy 0.", "torch_fsdp": "loss ", "torch_horovod_style": "mean error 0.0"}
"""Examples for PyTorch, and what they say at the end."""
JAX = "jax_data_parallel"
LONGEST = 79
RATIO = re.compile(r".+: mpi4py \d+\.\d\d ms, mpicoll \d+\.\d\d ms, ratio \d+\.\d\d( \(mpicoll is not faster here\))?")
SMALL = {
    "compressed_allreduce": [["--size", "20000"]],
    "conjugate_gradients": [["--size", "16"]],
    "histogram": [["--size", "500", "--bins", "64"]],
    "kmeans": [["--size", "320"]],
    "nonblocking_overlap": [["--size", "20000"]],
    "own_model": [["--size", "16"]],
    "parameter_server": [["--size", "64"], ["--size", "64", "--push", "mailbox"]],
    "pca": [["--size", "32"]],
    "search": [["--size", "600"], ["--size", "600", "--group", "3", "--trials", "16"]],
    "sharded_optimizer": [["--size", "24"]],
    "trainer": [["--size", "640"], ["--size", "640", "--strategy", "sharded"]],
}
"""Options of each example, once for each launch."""
LAUNCHES = [(name, options) for name, launches in SMALL.items() for options in launches]


def launch(program: Path, options: list[str], size: int = 3) -> Outcome:
    # Python finds timing.py beside a program that it runs itself; here tests/bootstrap.py runs it.
    return run(size, [str(program), *options], timeout=60, environment={"PYTHONPATH": str(FOLDER)})


def check(outcome: Outcome) -> None:
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert RATIO.fullmatch(outcome.stdout.splitlines()[-1]), outcome.text


@pytest.mark.parametrize(("name", "options"), LAUNCHES, ids=[" ".join([name, *options]) for name, options in LAUNCHES])
def test_it_is_right_and_reports_the_ratio(name: str, options: list[str]) -> None:
    check(launch(FOLDER / f"{name}.py", options))


def test_one_that_adds_up_wrongly_fails(tmp_path) -> None:
    text = (FOLDER / "kmeans.py").read_text()
    line = "    comm.Allreduce(MPI.IN_PLACE, totals)\n"
    assert text.count(line) == 1
    broken = tmp_path / "kmeans.py"
    broken.write_text(text.replace(line, f"{line}    totals[0, 0] *= 1.5\n"))
    outcome = launch(broken, *SMALL["kmeans"])
    assert not outcome.hung, outcome.report
    assert outcome.returncode != 0
    assert "AssertionError" in outcome.text


def test_all_of_them_are_run_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {HELPER, JAX, *TORCH, *SMALL}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, []) for name in TORCH] + [(name, ["--compression", "topk:0.1"]) for name in TORCH if name != "torch_fsdp"],
)
def test_those_for_pytorch(name: str, options: list[str]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
    outcome = launch(FOLDER / f"{name}.py", ["--steps", "150", *options])
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert f"3 ranks, {TORCH[name]}" in outcome.stdout


def test_the_one_for_jax() -> None:
    pytest.importorskip("jax", reason="JAX is not installed: make test-jax")
    outcome = run(2, [str(FOLDER / f"{JAX}.py"), "--steps", "50"], timeout=120)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert "2 ranks, loss 0." in outcome.stdout


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (REPOSITORY / page).read_text(), re.MULTILINE | re.DOTALL)


BLOCKS = programs("docs/guides/pytorch.md")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_programs_of_the_page_on_pytorch(number: int, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: make test-torch")
    (tmp_path / "example.py").write_text(BLOCKS[number])
    outcome = run(2, [str(tmp_path / "example.py")], timeout=60, folder=tmp_path)
    assert outcome.returncode == 0, outcome.text


def test_the_programs_of_the_page_on_jax_run_one_after_the_other(tmp_path: Path) -> None:
    """In one launch, since importing JAX takes longer than all of them."""
    pytest.importorskip("jax", reason="JAX is not installed: make test-jax")
    (tmp_path / "examples.py").write_text("\n".join(programs("docs/guides/jax.md")))
    outcome = run(2, [str(tmp_path / "examples.py")], timeout=120, folder=tmp_path)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text


@pytest.mark.parametrize("name", [JAX, *TORCH, *SMALL])
def test_it_is_short_and_in_the_table(name: str) -> None:
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= LONGEST
    assert f"mpirun -n 4 python examples/{name}.py" in "\n".join(lines)
    readme = (FOLDER / "README.md").read_text()
    assert f"| [{name}.py]({name}.py) |" in readme
    assert f"`mpirun -n 4 python examples/{name}.py` |" in readme
