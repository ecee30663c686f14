"""Checkpoints as they should be: what was saved comes back, on any number of ranks; arguments that cannot be saved."""

import errno
import hashlib
import os
import random
import re
import sys
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from mpicoll.checkpoint import CheckpointStore, PerRank, Piece, Whole, open_checkpoint, tensor_file, writer
from mpicoll.data.sampler import part
from mpicoll.errors import CheckpointError, CheckpointFailed, MpicollError, TrainingError
from tests.threads import on_ranks, results

TOTAL = 103
DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ml_dtypes.bfloat16]


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def state(comm, step, *, total=TOTAL):
    """Tensors of a rank that depend on nothing but its number, the number of ranks and the step."""
    size, rank = comm.Get_size(), comm.Get_rank()
    vector = np.arange(total, dtype=np.float64) + 1000 * step
    start, stop = part(total, size, rank)
    scattered = [Piece(vector[i : i + 10].astype("i4"), i, total) for i in range(10 * rank, total, 10 * size)]
    return {
        "replica": Whole(np.arange(60_000, dtype=np.float32).reshape(200, 300) + step),
        "scalar": Whole(np.array(step)),
        "velocity": Piece(vector[start:stop], start, total),
        "scattered": scattered,
        "residual": PerRank(np.full((2, 3), 10.0 * step + rank, np.float32)),
    }


def save(folder, size, *steps, keep=2):
    def work(comm):
        with CheckpointStore(folder, comm, keep=keep, patience=0) as checkpoints:
            for step in steps:
                checkpoints.save(step, state(comm, step), {"step": step})
            return checkpoints.steps()

    return results(size, work)[0]


def check_restored(comm, found):
    """Compare with `state`, as far as that does not depend on the number of ranks."""
    expected, mine = state(comm, found.step), state(comm, 0)
    found.restore(mine)
    for name in ("replica", "scalar", "velocity"):
        np.testing.assert_array_equal(mine[name].array, expected[name].array)
    for piece, other in zip(mine["scattered"], expected["scattered"], strict=True):
        np.testing.assert_array_equal(piece.array, other.array)
    taken = [rank for rank in range(found.size) if rank % comm.Get_size() == comm.Get_rank()]
    arrays = found.per_rank("residual")
    assert [array.tolist() for array in arrays] == [np.full((2, 3), 10.0 * found.step + r).tolist() for r in taken]
    assert found.facts == {"step": found.step}
    return found.step


def load(folder, size, **options):
    return results(size, lambda comm: check_restored(comm, open_checkpoint(folder, comm, patience=0, **options)))


@pytest.mark.parametrize("old", [1, 2, 3, 4])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 7])
def test_what_was_saved_comes_back_on_any_number_of_ranks(tmp_path, old, new):
    save(tmp_path / "run", old, 5)
    assert load(tmp_path / "run", new) == [5] * new


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    size = np.dtype(dtype).itemsize
    data = np.frombuffer(np.random.default_rng(0).bytes(24 * size), dtype)
    data = data.view("u1") % 2 == 1 if dtype == "bool" else data  # NaNs with payloads among the others

    def work(comm):
        tensors = {"w": Whole(data.reshape(2, 3, -1)), "p": PerRank(data), "e": Piece(data[:0], 0, 0)}
        with CheckpointStore(tmp_path, comm) as checkpoints:
            checkpoints.save(0, tensors, {})
            found = checkpoints.open()
        assert found.read("w").tobytes() == data.tobytes() == found.per_rank("p")[0].tobytes()
        assert found.read("e").size == 0
        assert found.read("w").dtype == data.dtype

    results(1, work)


def test_other_memory_layouts_are_saved_by_value_and_filled_in_place(tmp_path):
    values = np.arange(12.0).reshape(3, 4)
    layouts = [values.astype(">f8"), np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]]

    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints:
            for step, array in enumerate(layouts):
                checkpoints.save(step, {"x": Whole(array)}, {})
                target = np.zeros_like(array)
                checkpoints.open().restore({"x": Whole(target)})
                np.testing.assert_array_equal(target, values)

    results(1, work)


def test_only_the_wanted_range_is_read(tmp_path, monkeypatch):
    save(tmp_path, 4, 1)
    read = []
    monkeypatch.setattr(tensor_file.os, "preadv", lambda *a: read.append(sum(map(len, a[1]))) or preadv(*a))
    (found,) = results(1, lambda comm: open_checkpoint(tmp_path, comm))
    read.clear()
    np.testing.assert_array_equal(found.read("velocity", 20, 60), np.arange(20.0, 60) + 1000)
    assert sum(read) == 320
    for bad in ((-1, 5), (5, 104), (9, 8)):
        with pytest.raises(ValueError, match="velocity"):
            found.read("velocity", *bad)
    with pytest.raises(CheckpointError, match="residual"):
        found.read("residual")


preadv = os.preadv


def test_files_are_plain_safetensors_and_the_work_is_shared(tmp_path):
    save(tmp_path, 3, 1)
    folder = tmp_path / "step-00000001"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", *(f"rank-000{rank}.safetensors" for rank in range(3))]
    parts = [load_file(folder / name) for name in names[1:]]
    assert sum(len(p[key]) for p in parts for key in p if key.startswith("replica@")) == 60_000
    assert max(path.stat().st_size for path in folder.iterdir()) < 1.2 * 60_000 * 4 / 3


def test_the_last_ones_are_kept(tmp_path):
    assert save(tmp_path, 2, 1, 2, 3, 10) == [3, 10]
    assert save(tmp_path, 2, 11, keep=1) == [11]
    assert load(tmp_path, 1) == [11]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000011"]


def test_random_states_come_back_through_facts(tmp_path):
    generator = np.random.default_rng(7)
    generator.standard_normal(5)
    plain = random.Random(3)
    facts = {"numpy": generator.bit_generator.state, "python": plain.getstate(), 1: [0.1, 1e300, None, True, "ü\0"]}

    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints:
            checkpoints.save(1, {}, facts)
            return checkpoints.open().facts

    (found,) = results(1, work)
    other = np.random.default_rng(0)
    other.bit_generator.state = found["numpy"]
    assert other.random() == generator.random()
    assert found["1"] == facts[1]


# ---- a run that goes back -------------------------------------------------------------------------------------------


def test_a_fresh_run_does_not_overwrite_checkpoints(tmp_path):
    save(tmp_path, 1, 7, 8)
    for step in (3, 8):
        with pytest.raises(CheckpointError, match=f"step 8, step {step} cannot come after it; resume"):
            save(tmp_path, 2, step)
    assert load(tmp_path, 1) == [8]


def test_going_back_replaces_the_course_that_was_given_up(tmp_path):
    save(tmp_path, 2, 4, 6, 8, keep=3)

    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints:
            assert checkpoints.open(4).step == 4
            checkpoints.save(4, {}, {})  # is there already
            assert checkpoints.steps() == [4, 6, 8]
            checkpoints.save(6, state(comm, 6), {"step": 6})
            checkpoints.save(6, {}, {})
            with pytest.raises(CheckpointError, match="cannot come after"):
                checkpoints.save(5, {}, {})
            return checkpoints.steps()

    assert results(2, work) == [[4, 6]] * 2
    assert load(tmp_path, 3) == [6] * 3


# ---- one owner ------------------------------------------------------------------------------------------------------


def test_a_second_run_on_the_folder_is_refused_until_the_first_is_done(tmp_path):
    def work(comm):
        with CheckpointStore(tmp_path, comm) as first:
            first.save(1, state(comm, 1), {"step": 1})
            with pytest.raises(CheckpointError, match=f"another run .*process {os.getpid()} on"):
                CheckpointStore(tmp_path, comm)
            assert open_checkpoint(tmp_path, comm).step == 1  # looking is no offence
            first.save(2, state(comm, 2), {"step": 2})
        CheckpointStore(tmp_path, comm).close()

    results(2, work)


def test_only_left_overs_of_ours_are_removed(tmp_path):
    ours = tmp_path / ".step-00000004.0123456789abcdef"
    ours.mkdir()
    (ours / "rank-0000.safetensors").write_bytes(b"half")
    (ours / "deeper").mkdir()
    outside = tmp_path.with_name("outside")
    outside.mkdir()
    (outside / "precious").touch()
    (ours / "link").symlink_to(outside)
    (tmp_path / ".step-00000005.0123456789abcdef").symlink_to(outside)
    others = [".step-4.tmp", ".step-00000004.0123", "step-4", "notes", ".step-00000004.0123456789ABCDEF"]
    for name in others:
        (tmp_path / name).mkdir()
    results(1, lambda comm: CheckpointStore(tmp_path, comm).close())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", *others])
    assert (outside / "precious").exists()


@pytest.mark.parametrize("kind", ["missing", "file", "lock-link"])
def test_a_folder_that_cannot_be_used_is_refused_on_all_ranks(tmp_path, kind):
    folder = {"missing": tmp_path / "no" / "such", "file": tmp_path / "file", "lock-link": tmp_path}[kind]
    (tmp_path / "file").touch()
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    found = on_ranks(3, lambda comm: CheckpointStore(folder, comm))
    assert len({str(error) for error in found}) == 1
    assert all(isinstance(error, CheckpointError) and str(folder) in str(error) for error in found)
    assert not (tmp_path / "elsewhere").exists()


# ---- what fails while saving ----------------------------------------------------------------------------------------


def failing(real, error, when):
    def replaced(path, *rest):
        if when(path):
            raise error
        return real(path, *rest)

    return replaced


FAILURES = {
    "full disk on rank 1": (
        tensor_file,
        "write",
        "rank-0001",
        OSError(errno.ENOSPC, "No space", "x"),
        "rank 1: x: No space",
    ),
    "writing on rank 2": (tensor_file, "write", "rank-0002", CheckpointFailed("f: too large"), "rank 2: f: too large"),
    "fsync on rank 2": (tensor_file, "write_durably", "rank-0002", OSError(errno.EIO, "I/O", "f"), "rank 2: f: I/O"),
    "no memory on rank 1": (tensor_file, "write", "rank-0001", MemoryError(), "rank 1: not enough memory"),
    "manifest": (
        writer.durable_files,
        "write_durably",
        "manifest",
        OSError(errno.EDQUOT, "quota", "m"),
        "rank 0: m: quota",
    ),
    "fsync of the folder": (
        writer.durable_files,
        "sync",
        r"\.step",
        OSError(errno.EIO, "I/O error", "d"),
        "rank 0: d: I/O",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_on_one_rank_is_one_on_all_and_changes_nothing(tmp_path, monkeypatch, kind):
    module, function, where, error, message = FAILURES[kind]
    save(tmp_path, 1, 1)

    def work(comm):
        tensors = state(comm, 2)
        before = tensors["velocity"].array.tobytes()
        with CheckpointStore(tmp_path, comm, patience=0) as checkpoints:
            if comm.Get_rank() == 0:
                broken = failing(getattr(module, function), error, lambda path: re.search(where, path.name))
                monkeypatch.setattr(module, function, broken)
            with pytest.raises(CheckpointError, match=message) as caught:
                checkpoints.save(2, tensors, {"step": 2})
            assert isinstance(caught.value, TrainingError)
            assert isinstance(caught.value, MpicollError)
            comm.Ibarrier().Test()
            if comm.Get_rank() == 0:
                assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
                monkeypatch.undo()
            comm.Ibarrier().Test()
            assert tensors["velocity"].array.tobytes() == before
            checkpoints.save(2, tensors, {"step": 2})
            return str(caught.value)

    assert len(set(results(3, work))) == 1
    assert load(tmp_path, 2) == [2, 2]


X = np.zeros(4)
WRONG = {
    "gap": (lambda r: {"x": Piece(X, 5 * r, 14)}, "x: its pieces leave a gap before elements 5 to 9 of rank 1"),
    "overlap": (lambda r: {"x": Piece(X, 3 * r, 10)}, "x: its pieces overlap elements 3 to 7 of rank 1"),
    "short": (lambda r: {"x": Piece(X, 4 * r, 13)}, "x: its pieces end at element 12 of 13"),
    "outside": (lambda r: {"x": Piece(X, 4 * r, 11)}, "rank 2: tensor x: 4 elements from 8 do not fit into 11"),
    "negative": (lambda r: {"x": Piece(X, -1, 12)}, "4 elements from -1"),
    "dtype": (lambda r: {"x": Whole(X.astype("f4" if r == 2 else "f8"))}, "x: rank 2 has whole float32.*rank 0 whole"),
    "shape": (lambda r: {"x": Whole(X.reshape(2, 2) if r == 1 else X)}, r"rank 1 has whole float64 \(2, 2\)"),
    "kind": (lambda r: {"x": PerRank(X) if r else Whole(X)}, "rank 1 has per_rank"),
    "absent": (lambda r: {"x": Whole(X)} if r != 1 else {}, "x: rank 1 has none, though others do"),
    "object": (lambda r: {"x": PerRank(np.array([{}]))}, "rank 0: tensor x: dtype object cannot be saved"),
    "structured": (lambda r: {"x": PerRank(np.zeros(2, "i4,f4"))}, "cannot be saved"),
    "list": (lambda r: {"x": Whole([1.0])}, "needs a NumPy array, not list"),
    "bare": (lambda r: {"x": X}, "tensor x"),
    "matrix": (lambda r: {"x": Piece(X.reshape(2, 2), 4 * r, 12)}, "vectors of one dtype"),
    **{name: (lambda r, name=name: {name: Whole(X)}, "tensor name")
       for name in ("../x", "a/b", "", ".", "..", "a@0", "a..b", "x" * 201, "ä", "a\n", "__metadata__.")},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG, ids=repr)
def test_what_cannot_be_saved_is_refused_on_all_ranks_before_writing(tmp_path, kind):
    make, message = WRONG[kind]

    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints, pytest.raises(CheckpointError, match=message) as caught:
            checkpoints.save(1, make(comm.Get_rank()), {})
        return str(caught.value)

    assert len(set(results(3, work))) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("step", [-1, 10**18, "rank", 1.5, None])
def test_a_wrong_step_is_refused(tmp_path, step):
    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints, pytest.raises(CheckpointError):
            checkpoints.save(comm.Get_rank() if step == "rank" else step, {}, {})

    results(2, work)


@pytest.mark.parametrize("facts", [{"x": float("nan")}, {"x": {1, 2}}, {"x": X}, {("a",): 1}], ids=str)
def test_facts_that_json_cannot_hold_are_refused(tmp_path, facts):
    def work(comm):
        with CheckpointStore(tmp_path, comm) as checkpoints, pytest.raises(CheckpointError, match="rank 0"):
            checkpoints.save(1, {}, facts)

    results(2, work)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# ---- another model --------------------------------------------------------------------------------------------------


def test_differences_are_listed_together_and_nothing_is_filled(tmp_path):
    save(tmp_path, 2, 1)

    def work(comm):
        tensors = state(comm, 0)
        del tensors["scalar"]
        velocity = tensors["velocity"].array
        tensors["replica"] = Whole(np.zeros((200, 301), np.float32))
        tensors["scattered"] = [Piece(p.array.astype("f4"), p.start, p.total) for p in tensors["scattered"]]
        if comm.Get_rank() == 2:
            tensors["residual"] = PerRank(np.zeros(1))
        tensors["extra"] = Whole(X)
        before = velocity.copy()
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path, comm).restore(tensors)
        np.testing.assert_array_equal(velocity, before)
        return str(caught.value)

    first, *others = results(3, work)
    assert others == [first] * 2
    assert "\n" not in first
    for text in (
        "scalar: in the checkpoint, but not wanted",
        "replica: vector float32 (200, 300) in the checkpoint, vector float32 (200, 301) wanted",
        "scattered: vector int32 (103,) in the checkpoint, vector float32 (103,) wanted",
        "residual: per_rank float32 in the checkpoint, per_rank float64 wanted",
        "extra: not in the checkpoint",
    ):
        assert text in first


def test_what_ranks_had_need_not_be_wanted(tmp_path):
    save(tmp_path, 2, 1)

    def work(comm):
        found = open_checkpoint(tmp_path, comm)
        tensors = state(comm, 0)
        del tensors["residual"]
        found.restore(tensors)
        assert found.per_rank_names == ["residual"]
        assert found.vectors == ["replica", "scalar", "scattered", "velocity"]
        return len(found.per_rank("residual"))

    assert results(3, work) == [1, 1, 0]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    for options, message in (({}, "has no checkpoint"), ({"step": 3}, "has no checkpoint of step 3")):
        for error in on_ranks(2, lambda comm, options=options: open_checkpoint(tmp_path, comm, patience=0, **options)):
            assert isinstance(error, CheckpointError)
            assert message in str(error)
    save(tmp_path, 1, 1)
    with pytest.raises(CheckpointError, match="of step 3"):
        load(tmp_path, 1, step=3)
    assert load(tmp_path, 1, step=3, fallback=True) == [1]


def test_a_file_that_shows_up_late_is_waited_for(tmp_path, monkeypatch):
    save(tmp_path, 2, 1)
    path = tmp_path / "step-00000001" / "rank-0001.safetensors"
    path.rename(path.with_name(".hidden"))
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            path.with_name(".hidden").rename(path)

    monkeypatch.setattr(writer.durable_files, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    assert results(3, lambda comm: open_checkpoint(tmp_path, comm, patience=20).step) == [1] * 3
    assert len(naps) == 3


def test_the_library_of_the_format_is_not_needed(tmp_path, monkeypatch):
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    save(tmp_path, 2, 1)
    assert load(tmp_path, 1) == [1]


def test_the_library_of_the_format_reads_what_is_written(tmp_path):
    kinds = ["bool", "uint8", "int16", "int64", "float16", ml_dtypes.bfloat16, "float32", "float64"]
    arrays = {f"x.{number}@{number}": np.arange(number, dtype=kind) for number, kind in enumerate(kinds)}
    arrays |= {"scalar": np.array(2.5), "two": np.eye(3, 2), "none": np.empty((0, 3), np.float32)}
    nbytes, digest = tensor_file.write(tmp_path / "x", arrays)
    data = (tmp_path / "x").read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (nbytes, digest)
    found = load_file(tmp_path / "x")
    assert sorted(found) == sorted(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
