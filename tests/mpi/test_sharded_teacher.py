"""Teachers whose parameters are divided among the ranks: the bits of whole ones, in a part of the memory."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from safetensors.numpy import save_file

from mpicoll import Intracomm
from mpicoll.checkpoint import tensor_file
from mpicoll.consensus import all_succeed, share
from mpicoll.deploy import model_sources
from mpicoll.deploy.deploy_options import parse_deploy
from mpicoll.deploy.deploy_run import run
from mpicoll.deploy.deployed_file import stored, stored_nbytes, write_model
from mpicoll.deploy.deployed_model import ActivationCode, DeployedLayer, DeployedModel
from mpicoll.deploy.evaluation import accuracy
from mpicoll.deploy.model_sources import load_data, load_model
from mpicoll.deploy.sharded_model import ShardedModel, ShardedRuntime, runtime_of, sharded_nbytes, whole_nbytes
from mpicoll.deploy.teacher_placement import load_teacher
from mpicoll.errors import CheckpointFailed, DataError, ModelTooLarge
from mpicoll.train import memory_check
from mpicoll.train.available_memory import MemoryLimit
from mpicoll.train.options import parse
from mpicoll.train.training_run import run as train
from tests.deployed_models import convolution, dense, quantised

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
DATA: dict[str, Any] = {"dataset": "synthetic:600x16x4", "labels": None, "test_fraction": 0.2, "seed": 1}
QUIET = ["--quiet", "--no-progress", "--timeout", "20"]


@pytest.fixture
def folder(comm: Intracomm, tmp_path: Path) -> Path:
    """Return a folder that all ranks share."""
    return Path(share(comm, {"path": str(tmp_path)} if comm.rank == 0 else None)["path"])


LAYERS = (dense(67, 45), dense(45, 131), dense(131, 3, relu=False))
SPARSE = (dense(67, 45, zeros=0.9), dense(45, 3, relu=False, zeros=0.95))
IMAGES = (convolution(7), dense(28, 3, relu=False))
CODE = ActivationCode(0.25, 7)
MODELS = {
    "real": LAYERS,
    "one layer": (dense(5, 3, relu=False),),
    "few inputs": (dense(1, 3), dense(3, 2, relu=False)),
    "sparse": SPARSE,
    "convolution": IMAGES,
    "int8": quantised(LAYERS, 8, None),
    "int8 activations": quantised(LAYERS, 8, CODE),
    "int8 convolution": quantised(IMAGES, 8, CODE),
    "mixed": (*quantised(LAYERS[:1], 8, CODE), LAYERS[1], *quantised(LAYERS[2:], 4, CODE)),
    "int4": quantised(LAYERS, 4, None),
    "sparse int4": quantised(SPARSE, 4, None),
    "sparse int8": quantised(SPARSE, 8, CODE),
}


def written(comm: Intracomm, path: Path, write: Callable[[Path], object]) -> Path:
    """Return `path` after rank 0 has written the file."""
    all_succeed(comm, lambda: write(path) if comm.rank == 0 else None)
    return path


def check_equal(comm: Intracomm, path: Path) -> None:
    """Compare a sharded model with the whole one; ranks have different numbers of samples, some of them none."""
    whole, sharded = load_model(str(path), {}, comm), load_teacher(str(path), {}, comm, "always")
    assert isinstance(sharded, ShardedModel)
    assert (sharded.data, sharded.history, sharded.forms) == (whole.data, whole.history, whole.forms)
    assert (sharded.operations, stored_nbytes(sharded)) == (whole.operations, stored_nbytes(whole))
    assert sharded.nbytes == sharded_nbytes(whole.forms, comm.size)
    one, other = runtime_of(whole), runtime_of(sharded)
    random = np.random.default_rng(comm.rank)
    for rows in (0, 1, (7 + comm.rank) % (comm.size + 6), 0 if comm.rank == comm.size - 1 else 64):
        x = random.standard_normal((rows, whole.input_count)).astype(np.float32)
        found, wanted = other.logits(x), one.logits(x)
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_bits_of_the_whole_model(comm: Intracomm, folder: Path, name: str) -> None:
    model = DeployedModel(MODELS[name], dict(DATA), ("made",))
    check_equal(comm, written(comm, folder / "m.safetensors", lambda path: write_model(path, model)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_layers_of_other_programs_have_the_bits_of_whole_ones(comm: Intracomm, folder: Path, dtype: type) -> None:
    random = np.random.default_rng(5)
    arrays = {
        "net.10.weight": random.standard_normal((3, 41)).astype(dtype),
        "net.10.bias": random.standard_normal(3).astype(dtype),
        "net.2.weight": random.standard_normal((41, 67)).astype(dtype),
    }
    check_equal(comm, written(comm, folder / "other.safetensors", lambda path: save_file(arrays, path)))


@pytest.mark.parametrize("model", [["--hidden", "24,17", "--batch-norm", "local"], ["--model", "conv"]])
def test_checkpoints_have_the_bits_of_whole_models(comm: Intracomm, folder: Path, model: list[str]) -> None:
    data = ["--dataset", "synthetic:600x16x4" if "--hidden" in model else "digits", "--seed", "1"]
    train(parse([*data, *model, "--steps", "4", "--quiet", "--checkpoint", str(folder / "runs")]), comm)
    check_equal(comm, folder / "runs")


def teacher(comm: Intracomm, folder: Path, layers: tuple[DeployedLayer, ...]) -> Path:
    """Return the file of a model for the synthetic samples."""
    model = DeployedModel(layers, dict(DATA), ("made",))
    return written(comm, folder / "teacher.safetensors", lambda path: write_model(path, model))


FIT = (dense(16, 40), dense(40, 4, relu=False))


@pytest.mark.parametrize("options", [["--batch", "479"], ["--batch", "50", "--labeled", "60"]])
@pytest.mark.parametrize("layers", [FIT, quantised(FIT, 8, CODE)], ids=["real", "int8"])
def test_a_student_is_the_same_with_either_teacher(
    comm: Intracomm, folder: Path, layers: tuple[DeployedLayer, ...], options: list[str]
) -> None:
    """A batch of 479 of the 480 samples leaves one sample for the next one, and none for all ranks but one."""
    path, made, rows = teacher(comm, folder, layers), {}, {}
    for choice in ("never", "always"):
        words = ["distill", "--teacher", str(path), "--hidden", "6", "--epochs", "3", *options, *QUIET]
        output = folder / f"{choice}.safetensors"
        rows[choice] = run(parse_deploy([*words, "--shard-teacher", choice, "-o", str(output)]), comm)
        made[choice] = output.read_bytes()
    assert made["never"] == made["always"]
    assert [row[1:5] for row in rows["never"]] == [row[1:5] for row in rows["always"]]
    assert rows["always"][0].latency is None
    assert rows["always"][1].latency is not None


def test_accuracy_is_counted_with_fewer_samples_than_ranks(comm: Intracomm, folder: Path) -> None:
    path = str(teacher(comm, folder, FIT))
    given = {"dataset": "synthetic:60x16x4", "test_fraction": 1 / 60}
    whole, sharded = load_teacher(path, {}, comm, "never"), load_teacher(path, {}, comm, "always")
    data = load_data(whole, given, comm)
    assert data.test.count == 1
    assert accuracy(runtime_of(sharded), data, comm) == accuracy(runtime_of(whole), data, comm)


# ---- memory ---------------------------------------------------------------------------------------------------------

WIDTH, DEPTH = 512, 16


def dense_file(path: Path) -> None:
    arrays = {f"{n}.weight": np.full((WIDTH, WIDTH), n / 1000, np.float32) for n in range(DEPTH)}
    save_file(arrays, path)


def sparse_file(path: Path) -> None:
    layer = dense(WIDTH, WIDTH, zeros=0.5)
    write_model(path, DeployedModel((layer,) * (DEPTH - 1) + (dataclasses.replace(layer, relu=False),)))


@pytest.mark.skipif(WORLD.size == 1, reason="needs several ranks")
@pytest.mark.parametrize("write", [dense_file, sparse_file])
def test_no_rank_holds_the_whole_model(comm: Intracomm, folder: Path, write: Callable[[Path], None]) -> None:
    path = written(comm, folder / "large.safetensors", write)
    tracemalloc.start()
    try:
        model = load_teacher(str(path), {}, comm, "always")
        assert isinstance(model, ShardedModel)
        ShardedRuntime(model).logits(np.ones((3, WIDTH), np.float32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    assert whole_nbytes(model.forms) == DEPTH * layer
    assert model.nbytes <= DEPTH * layer // comm.size + layer + 4 * DEPTH * comm.size
    # Beside what it says that it holds, which may be in shared memory: copies of a chunk, and code and objects.
    assert peak <= model.nbytes + 2 * layer
    assert model.nbytes + 2 * layer < 0.75 * DEPTH * layer


# ---- the choice -----------------------------------------------------------------------------------------------------


def limited(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    for name in ("machine_limit", "group_limit"):
        monkeypatch.setattr(memory_check, name, lambda: MemoryLimit("the node", WORLD.rank, left))


@pytest.mark.parametrize("fits", [True, False])
def test_ranks_decide_alike_if_one_of_them_has_too_little(
    comm: Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    path = teacher(comm, folder, FIT)
    needed = 2 * whole_nbytes(load_model(str(path), {}, comm).forms)
    limited(monkeypatch, needed if fits or comm.rank != comm.size - 1 else needed - 1)
    model = load_teacher(str(path), {}, comm, "auto")
    assert isinstance(model, ShardedModel) is (not fits and comm.size > 1)


def test_a_teacher_that_does_not_fit_in_parts_is_refused(
    comm: Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = teacher(comm, folder, FIT)
    limited(monkeypatch, 100 if comm.rank == comm.size - 1 else 1 << 40)
    with pytest.raises(
        ModelTooLarge, match=rf"teacher\.safetensors: a part .* on rank {comm.size - 1}, and the memory"
    ):
        load_teacher(str(path), {}, comm, "always")


# ---- wrong files ----------------------------------------------------------------------------------------------------


def changed(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], kind: str) -> None:
    """Write a model's file with one of its tensors changed."""
    arrays, layers = stored(DeployedModel(MODELS[kind]))
    said = {"layers": layers, "data": {}, "history": []}
    arrays[name] = np.ascontiguousarray(change(arrays[name]))
    tensor_file.write(path, arrays, {"format": "mpicoll.deploy", "version": "1", "model": json.dumps(said)})


def last_is(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.append(array[:-1], np.array(value, array.dtype))


WRONG: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "weights or biases are not finite": ("1.weight", last_is(np.nan), "real"),
    "layer 1: weights or biases are not finite": ("1.bias", last_is(np.inf), "real"),
    "scales are not finite and above 0": ("2.scales", last_is(0), "int8"),
    "a code is below -127": ("0.weight", last_is(-128), "int8"),
    "weight: .* elements for .* weights": ("0.weight", lambda array: array[:-1], "int4"),
    "values: .* elements for": ("0.values", lambda array: array[:-1], "sparse"),
    "'0.mask' has dtype": ("0.mask", lambda array: array[:-1], "sparse"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_part_is_refused_on_all_ranks(comm: Intracomm, folder: Path, reason: str) -> None:
    name, change, kind = WRONG[reason]
    path = written(comm, folder / "wrong.safetensors", lambda path: changed(path, name, change, kind))
    with pytest.raises(CheckpointFailed, match=rf"wrong\.safetensors: wrong model: .*{reason}"):
        load_teacher(str(path), {}, comm, "always")
    comm.Barrier()


def test_a_part_of_another_program_that_is_not_finite_is_refused(comm: Intracomm, folder: Path) -> None:
    weight = np.ones((41, 67), np.float32)
    weight[-1, -1] = np.inf
    path = written(comm, folder / "other.safetensors", lambda path: save_file({"a.weight": weight}, path))
    with pytest.raises(CheckpointFailed, match=r"other\.safetensors: tensor 'a\.weight' is not finite in float32"):
        load_teacher(str(path), {}, comm, "always")


@pytest.mark.skipif(WORLD.size == 1, reason="needs several ranks")
def test_files_that_differ_between_nodes_are_refused(
    comm: Intracomm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources, "node_ids", lambda comm: np.arange(comm.size))
    path, last = tmp_path / f"rank-{comm.rank}.safetensors", comm.size - 1
    layer = dense(16, 4, relu=False)
    bias = layer.bias + np.float32(comm.rank == last)
    write_model(path, DeployedModel((dataclasses.replace(layer, bias=bias),), dict(DATA)))
    with pytest.raises(DataError, match=rf"rank-{comm.rank}\.safetensors: on rank {last} the file differs"):
        load_teacher(str(path), {}, comm, "always")
