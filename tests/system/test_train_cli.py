"""The trainer under mpirun, in fresh processes."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from bench import launch as mpirun
from tests import extent
from tests.mpirun import run

MODULE = ("-m", "mpicoll.train")
SEEDS = int(os.environ.get("MPICOLL_TEST_SEEDS", "1"))
"""Seeds with which the defaults have to reach their accuracy."""
OWN = "tests.train.test_model_outputs"
"""Module with models of layers."""
TRAIN = "import sys; from mpicoll.train.__main__ import main; sys.exit(main({arguments!r}))"


def launch(size, *arguments, timeout=120):
    done = run(size, arguments, timeout=timeout)
    assert not done.hung, done.text
    return done


def train(size, *options):
    done = launch(size, *MODULE, "--quiet", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done


def only_line(done):
    """The single line of ours; what a launcher adds when a job ends is not counted."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    return line


@pytest.mark.parametrize(
    "options",
    extent.first(
        3,
        [
            "--batch 5 --model logistic",
            "--algorithm ring --bucket-bytes 10K",
            "--optimizer lars --scale-lr sqrt --batch 100",
            "--batch 64",
            "--model conv --batch 50",
            "--optimizer lamb",
        ],
    ),
)
def test_loss_curve_is_the_same_on_any_number_of_ranks(tmp_path, options):
    curves = {}
    sizes = (1, 3, 6) if extent.ALL else (1, 5)
    for size in sizes:
        path = tmp_path / f"{size}.csv"
        train(size, *options.split(), "--steps", "50", "--log-steps", str(path))
        curves[size] = np.loadtxt(path, delimiter=",", skiprows=1)[:, 3:]
        assert len(curves[size]) == 50
    for size in sizes[1:]:
        np.testing.assert_allclose(curves[size], curves[1], rtol=1e-5, err_msg=f"{size} ranks")
    assert curves[1][-1, 0] < curves[1][0, 0]


def test_ranks_share_a_model_and_follow_the_same_loss_curve(tmp_path):
    curves = []
    for size, options in (
        (1, ""),
        (8, "--tensor 2 --pipeline 2 --accumulate 2"),
        *extent.first(0, [(8, "--tensor 2 --pipeline 2")]),
    ):
        path, result = tmp_path / "curve.csv", tmp_path / "r.json"
        batch = "32" if "accumulate" in options else "64"
        files = ("--log-steps", str(path), "--json", str(result))
        train(size, *options.split(), "--batch", batch, "--steps", "50", *files)
        curves.append(np.loadtxt(path, delimiter=",", skiprows=1)[:, 3])
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-5)
    assert json.loads(result.read_text())["test_accuracy"] > 0.8


@pytest.mark.parametrize("seed", range(SEEDS))
def test_defaults_reach_97_percent_on_digits_with_eight_ranks(tmp_path, seed):
    path = tmp_path / "r.json"
    train(8, "--seed", str(seed), "--json", str(path))
    result = json.loads(path.read_text())
    assert result["test_accuracy"] >= 0.97
    assert result["ranks"] == 8


def test_compression_learns_and_sends_less(tmp_path):
    path = tmp_path / "r.json"
    train(3, *["--compression", "sign", "--warmup-dense", "20", "--epochs", "12"], "--json", str(path))
    result = json.loads(path.read_text())
    assert result["test_accuracy"] > 0.94
    assert result["error_feedback"]
    assert 5 < result["compression_ratio"] < 30
    train(3, *["--compression", "sign", "--error-feedback", "off", "--epochs", "1"], "--json", str(path))
    assert not json.loads(path.read_text())["error_feedback"]


def test_ranks_without_samples_take_part(tmp_path):
    path = tmp_path / "r.json"
    options = "--dataset synthetic:9x4x2 --batch 3 --epochs 3"
    train(5, *options.split(), "--json", str(path))
    assert json.loads(path.read_text())["steps"] == 9


def test_mapped_files_are_read_by_every_rank(tmp_path):
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 200)
    np.save(tmp_path / "x.npy", random.standard_normal((200, 4)) + 5 * np.eye(4)[y])
    np.save(tmp_path / "y.npy", y)
    files = ("--dataset", str(tmp_path / "x.npy"), "--labels", str(tmp_path / "y.npy"))
    train(3, *files, "--epochs", "20", "--json", str(tmp_path / "r"))
    assert json.loads((tmp_path / "r").read_text())["test_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ("--hidden 3 --model conv", 2, "--hidden is for"),
        ("--algorithm nonsense", 2, "nonsense"),
        ("--compression nonsense", 2, "is not one of "),
        ("--dataset nowhere.npz", 1, "no such file"),
        ("--lr 1e30", 1, "the loss became"),
        ("--tensor 2", 2, "--tensor 2 --pipeline 1: the number of ranks, 3, is not a multiple of 2"),
        ("--tensor 3 --hidden 2", 2, "--tensor 3: a layer of width 2 cannot be shared by 3 ranks"),
        ("--pipeline 3 --hidden 9", 2, "--pipeline 3 needs a layer for each stage; --hidden gives 2"),
        (f"--model {OWN}:few --dataset synthetic:400x20x10", 2, "outputs of shape (3,); --task classification on"),
        (f"--model {OWN}:few --dataset synthetic_text:900", 2, "few has the loss of classification"),
        (f"--model {OWN}:few --dataset synthetic:400x20x10 --task regression", 2, "few has the loss of classification"),
    ],
)
def test_errors_are_one_line_and_one_status(options, status, message):
    done = launch(3, *MODULE, "--no-progress", *options.split())
    assert done.returncode == status
    assert message in only_line(done)


def test_help_is_printed_once():
    done = launch(3, *MODULE, "--help")
    assert done.returncode == 0
    assert done.stdout.count("examples:") == 1


def test_ranks_with_different_options_are_named():
    code = "from mpi4py import MPI; arguments = ['--lr', str(MPI.COMM_WORLD.rank // 2 + 1)];"
    done = launch(3, "-c", code + "import sys; from mpicoll.train.__main__ import main; sys.exit(main(arguments))")
    assert done.returncode == 2
    assert "options of rank 2 differ from those of the other ranks: lr" in only_line(done)


PATCH_STEP = """
from mpi4py import MPI
from mpicoll.train.loop import Loop
take_step = Loop.take_step
def patched(self, share):
    take_step(self, share)
    if MPI.COMM_WORLD.rank == 1 and share.step == 5:
        {action}
Loop.take_step = patched
"""


def launch_patched(action, size=3):
    code = PATCH_STEP.format(action=action) + TRAIN.format(arguments=["--no-progress", "--timeout", "20"])
    return launch(size, "-c", code, timeout=90)


def test_exception_on_one_rank_ends_the_job_with_its_traceback():
    done = launch_patched("raise LookupError('lost it')")
    assert done.returncode != 0
    assert "rank 1:\n" in done.stderr
    assert "LookupError: lost it" in done.stderr
    assert done.stdout.count("test accuracy") == 0


def test_replica_that_went_astray_is_named():
    done = launch_patched("self.strategy.tensors()['parameters'].array[7] += 1e-3")
    assert done.returncode == 1
    assert "parameters of rank 1 differ" in only_line(done)


def test_interrupt_ends_the_job():
    command = mpirun.command(2, [*MODULE, "--epochs", "100000", "--no-progress"])
    environment = mpirun.clean_environment()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    time.sleep(5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0


GRADIENTS = """
import numpy as np
from mpi4py import MPI
from mpicoll import GradientSynchronizer, Intracomm
from mpicoll.errors import MismatchError, RemoteError
world = MPI.COMM_WORLD
rank = world.rank
comm = Intracomm(world)
for dtype in ("float32", "float64"):
    sync = GradientSynchronizer([(3, 5), (), (2,)], comm=comm, bucket_bytes=20, dtype=dtype)
    for weights in ([1, 1, 1], [3, 0, 1], [0, 0, 0]):
        for place, gradient in enumerate(sync.gradients):
            gradient[...] = place + rank
        if weights[rank] == 0:
            sync.flat[:] = np.nan
        sync.synchronize(weights[rank])
        total = sum(weights)
        for place, gradient in enumerate(sync.gradients):
            mean = sum(w * (place + r) for r, w in enumerate(weights)) / total if total else 0
            np.testing.assert_allclose(gradient, mean, rtol=1e-6)
added = GradientSynchronizer([(7,)], comm=comm, average=False)
added.flat[:] = rank
added.synchronize()
assert (added.flat == 3).all()

def refused(kind, message, **changed):
    options = {"comm": comm, "dtype": "float32", "bucket_bytes": 64} | (changed if rank == 1 else {})
    try:
        GradientSynchronizer([(4,)], **options)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{changed} was accepted")

refused(MismatchError, "rank 1 differs", bucket_bytes=32)
refused(MismatchError, "rank 1 differs", dtype="float64")
refused(MismatchError, "rank 1 differs", compression="int8")
refused((RemoteError, ValueError), "compression" if rank == 1 else "rank 1 refused", compression="int9")
world.Barrier()
print("fine", flush=True)
"""


def test_gradient_synchronizer_weighs_and_refuses_on_all_ranks():
    done = launch(3, "-c", GRADIENTS)
    assert done.stderr == ""
    assert done.stdout.count("fine") == 3


@pytest.mark.parametrize("shard", extent.first(1, ["parameters", "optimizer", "gradients"]))
def test_sharing_gives_the_same_curve_and_takes_less_memory(tmp_path, shard):
    curves, results = {}, {}
    for kind in ("none", shard):
        log, path = tmp_path / f"{kind}.csv", tmp_path / f"{kind}.json"
        options = (
            f"--shard {kind} --epochs 2 --hidden 96,96,96,96 --bucket-bytes 20K --clip 1 --accumulate 2 --dtype float64"
        )
        train(3, *options.split(), "--log-steps", str(log), "--json", str(path))
        curves[kind] = np.loadtxt(log, delimiter=",", skiprows=1)[:, 3:]
        results[kind] = json.loads(path.read_text())
    np.testing.assert_allclose(curves[shard], curves["none"], rtol=1e-6)
    assert results[shard]["test_accuracy"] == results["none"]["test_accuracy"] > 0.8
    held = {kind: sum(result["nbytes"].values()) for kind, result in results.items()}
    assert held[shard] < 0.8 * held["none"]


def test_a_run_goes_on_with_another_sharing_on_other_ranks(tmp_path):
    options = ["--dtype", "float64", "--bucket-bytes", "20K", "--schedule", "constant", "--json", str(tmp_path / "r")]
    train(2, *options, "--steps", "30")
    expected = json.loads((tmp_path / "r").read_text())
    for size, kind, steps in [(2, "none", 10), (3, "parameters", 20), (1, "gradients", 25), (2, "optimizer", 30)]:
        kept = ["--checkpoint", str(tmp_path / "run"), "--resume", "--steps", str(steps), "--shard", kind]
        train(size, *options, *kept)
    found = json.loads((tmp_path / "r").read_text())
    assert found["resumed_after"] == 25
    assert found["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-9)
