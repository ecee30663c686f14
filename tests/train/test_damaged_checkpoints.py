"""Files that are not what was written, by accident or on purpose: refused with the file and the reason."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from mpicoll.checkpoint import (
    CheckpointStore,
    PerRank,
    Piece,
    Whole,
    durable_files,
    manifest,
    open_checkpoint,
    tensor_file,
)
from mpicoll.data.sampler import part
from mpicoll.errors import CheckpointError, CheckpointFailed
from tests.threads import on_ranks, results

SIZE, TOTAL = 2, 4000


def tensors(comm, step):
    start, stop = part(TOTAL, SIZE, comm.Get_rank())
    return {
        "weights": Whole(np.arange(8000, dtype=np.float64) + step),
        "velocity": Piece(np.arange(start, stop, dtype=np.float32), start, TOTAL),
        "residual": PerRank(np.ones((2, 3), np.float16)),
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine") / "run"

    def work(comm):
        with CheckpointStore(folder, comm, patience=0) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, tensors(comm, step), {"seed": 1, "schedule": {"lr": 0.125}})

    results(SIZE, work)
    return folder


@pytest.fixture
def run(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def refusal(folder, size=SIZE):
    """Open the newest, which must fail alike on all ranks, and then the one before; return the reason."""
    found = on_ranks(size, lambda comm: open_checkpoint(folder, comm, patience=0))
    assert all(isinstance(error, CheckpointError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert "\n" not in str(found[0])
    for checkpoint in results(size, lambda comm: open_checkpoint(folder, comm, patience=0, fallback=True)):
        assert checkpoint.step == 1
        assert [(rejected.step, rejected.reason) for rejected in checkpoint.rejected] == [(2, str(found[0]))]
    return str(found[0])


FILES = ["rank-0000.safetensors", "rank-0001.safetensors", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_page_is_refused(run, name):
    path = run / "step-00000002" / name
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 4096), 1, 7, 8, 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(run)
    path.write_bytes(whole + b"\0")
    assert str(path) in refusal(run)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_refused(run, name):
    path = run / "step-00000002" / name
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name != "manifest.json" else 0
    places = {*range(8), header - 1, header, len(whole) - 1, *range(8, len(whole), len(whole) // 25)}
    for number, place in enumerate(sorted(places)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        assert str(path) in refusal(run, 1)


def test_every_bit_of_the_manifest_counts(pristine):
    whole = (pristine / "step-00000002" / "manifest.json").read_bytes()
    assert manifest.encode(manifest.decode(whole, 2)) == whole
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with pytest.raises(ValueError):
                manifest.decode(bytes(damaged), 2)


# ---- damage on the way to the disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["a bit", "the end", "a header"])
def test_what_is_damaged_on_its_way_to_the_file_is_not_certified(run, monkeypatch, name, damage):
    """The file is not what left the memory, but is read back the same each time."""
    fsync, before = os.fsync, sorted(run.rglob("*"))

    def damaging(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == name:
            with path.open("r+b") as stream:
                data = bytearray(stream.read())
                if damage == "the end":
                    stream.truncate(len(data) - 8)
                else:
                    data[20 if damage == "a header" else len(data) // 2] ^= 1
                    stream.seek(0)
                    stream.write(data)
        fsync(descriptor)

    def work(comm):
        with CheckpointStore(run, comm, patience=0) as checkpoints:
            checkpoints.save(3, tensors(comm, 3), {})

    monkeypatch.setattr(os, "fsync", damaging)
    found = on_ranks(SIZE, work)
    assert all(isinstance(error, CheckpointError) for error in found), found
    assert len({str(error) for error in found}) == 1
    assert f"{name}: is not what was written: read back" in str(found[0])
    monkeypatch.undo()
    assert sorted(run.rglob("*")) == before
    assert results(SIZE, lambda comm: open_checkpoint(run, comm, patience=0).step) == [2] * SIZE
    assert results(SIZE, work) == [None] * SIZE


# ---- folders that are not as they were left -------------------------------------------------------------------------


def missing(folder):
    (folder / FILES[1]).unlink()
    return FILES[1], "No such file"


def no_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json", "No such file"


def extra(folder):
    shutil.copy(folder / FILES[1], folder / "rank-0002.safetensors")
    return "rank-0002.safetensors", "does not belong there"


def of_another_step(folder):
    shutil.copy(folder.with_name("step-00000001") / FILES[0], folder / FILES[0])
    return FILES[0], "SHA-256"


def of_another_rank(folder):
    shutil.copy(folder / FILES[0], folder / FILES[1])
    return FILES[1], "bytes instead of|SHA-256"


def manifest_of_another_step(folder):
    shutil.copy(folder.with_name("step-00000001") / FILES[2], folder / FILES[2])
    return "manifest.json", "is of step 1, not of step 2"


def link(folder):
    (folder / FILES[1]).rename(folder.parent / "elsewhere")
    (folder / FILES[1]).symlink_to(folder.parent / "elsewhere")
    return FILES[1], "symbolic link"


def linked_manifest(folder):
    (folder / FILES[2]).rename(folder.parent / "elsewhere")
    (folder / FILES[2]).symlink_to(folder.parent / "elsewhere")
    return "manifest.json", "symbolic link"


def linked_folder(folder):
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")
    return "step-00000002", "is not a folder"


def pipe(folder):
    (folder / FILES[0]).unlink()
    os.mkfifo(folder / FILES[0])
    return FILES[0], "plain file"


def folder_in_place(folder):
    (folder / FILES[0]).unlink()
    (folder / FILES[0]).mkdir()
    return FILES[0], "plain file"


def file_in_place(folder):
    shutil.rmtree(folder)
    folder.write_text("")
    return "step-00000002", "is not a folder"


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return "manifest.json", "No such file"


def pickled(folder):
    (folder / FILES[0]).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    return FILES[0], "bytes instead of"


def huge_manifest(folder):
    os.truncate(folder / "manifest.json", manifest.MAX_BYTES + 1)
    return "manifest.json", "more than a manifest can have"


CHANGES = [missing, no_manifest, extra, of_another_step, of_another_rank, manifest_of_another_step, link, pipe,
           linked_manifest, linked_folder, folder_in_place, file_in_place, empty, pickled, huge_manifest]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1, 3])
def test_a_changed_folder_is_refused(run, change, size):
    name, message = change(run / "step-00000002")
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointFailed(reason := refusal(run, size))
    assert name in reason


def test_where_none_is_good_the_newest_is_named(run):
    for step in (1, 2):
        missing(run / f"step-0000000{step}")
    with pytest.raises(CheckpointError, match=r"step-00000002.*nor can the older one be used"):
        results(2, lambda comm: open_checkpoint(run, comm, patience=0, fallback=True))


def test_a_damaged_one_gives_way_to_the_next_save(run):
    missing(run / "step-00000002")

    def work(comm):
        with CheckpointStore(run, comm, patience=0) as checkpoints:
            assert checkpoints.open(fallback=True).step == 1
            checkpoints.save(2, tensors(comm, 2), {})
            return checkpoints.steps(), checkpoints.open().step

    assert results(SIZE, work) == [([1, 2], 2)] * SIZE


def test_a_file_that_shrinks_after_it_was_verified_ends_no_process(run):
    def work(comm):
        found = open_checkpoint(run, comm, patience=0)
        os.truncate(run / "step-00000002" / FILES[1], 5000)
        with pytest.raises(CheckpointError, match=r"rank-0001\.safetensors: "):
            found.read("velocity")

    results(1, work)


# ---- forged on purpose, hashes and all ------------------------------------------------------------------------------


def reseal(folder, change=lambda said: None, data=None):
    """Change the manifest, put new contents into the file of rank 0, and make all hashes right again."""
    path = folder / "manifest.json"
    said = json.loads(path.read_text())
    if data is not None:
        (folder / FILES[0]).write_bytes(data)
        said["files"][FILES[0]] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(said)
    said.pop("sha256")
    said["sha256"] = hashlib.sha256(manifest._canonical(said)).hexdigest()
    path.write_bytes(manifest._canonical(said))


def test_resealing_alone_is_accepted(run):
    reseal(run / "step-00000002", data=(run / "step-00000002" / FILES[0]).read_bytes())
    assert results(1, lambda comm: open_checkpoint(run, comm).step) == [2]


def at(*keys, value):
    def change(said):
        for key in keys[:-1]:
            said = said[key]
        said[keys[-1]] = value

    return change


def rename_file(name):
    return lambda said: said["files"].__setitem__(name, said["files"].pop(FILES[0]))


PIECES = ("tensors", "velocity", "pieces")
FORGED = {
    "newer": (at("version", value=2), "newer version of mpicoll"),
    "older": (at("version", value=0), "unknown"),
    "true": (at("version", value=True), "unknown"),
    "format": (at("format", value="zip"), "format"),
    "field": (at("more", value=1), "form"),
    "step": (at("step", value=3), "is of step 3"),
    "step-type": (at("step", value=2.0), "is of step 2.0"),
    "size": (at("size", value=3), "files of 3 ranks"),
    "no-size": (at("size", value=0), "size 0"),
    "huge-size": (at("size", value=10**12), "size 10"),
    "facts": (at("facts", value=[]), "which are not an object"),
    "path": (rename_file("../rank-0000.safetensors"), "files of 2 ranks"),
    "absolute": (rename_file("/etc/passwd"), "files of 2 ranks"),
    "negative-length": (at("files", FILES[0], "nbytes", value=-5), "length"),
    "hash": (at("files", FILES[0], "sha256", value="0"), "SHA-256 for rank-0000"),
    "length": (at("files", FILES[0], "nbytes", value=2**50), "bytes instead of"),
    "name": (at("tensors", "../x", value={}), "no tensor under the name"),
    "kind": (at("tensors", "velocity", "kind", value="object"), "no tensor under the name"),
    "dtype": (at("tensors", "velocity", "dtype", value="O"), "no tensor under the name"),
    "dtype-list": (at("tensors", "velocity", "dtype", value=[]), "no tensor under the name"),
    "other-dtype": (at("tensors", "velocity", "dtype", value="int32"), "not in it as the manifest says"),
    "table": (at("tensors", value=[]), "no table"),
    "shape": (at("tensors", "velocity", "shape", value=[2**40]), "end at element 4000 of"),
    "negative-shape": (at("tensors", "velocity", "shape", value=[-1, -4000]), "shape or pieces"),
    "overflow": (at("tensors", "velocity", "shape", value=[2**32, 2**32]), "shape or pieces"),
    "overflow-0": (at("tensors", "velocity", "shape", value=[2**40, 0, 2**40]), "shape or pieces"),
    "gap": (at(*PIECES, 1, 0, value=2001), "gap"),
    "overlap": (at(*PIECES, 1, 0, value=1999), "overlap"),
    "backward": (at(*PIECES, 0, value=[0, -5, 0]), "shape or pieces"),
    "empty-piece": (at(*PIECES, value=[[0, 0, 0]]), "overlap"),
    "unknown-rank": (at(*PIECES, 0, 2, value=2), "shape or pieces"),
    "other-rank": (at(*PIECES, 0, 2, value=1), "not in it"),
    "float": (at(*PIECES, 0, 1, value=2000.0), "shape or pieces"),
    "1-TiB": (at(*PIECES, value=[[0, 2**38, 0]]), "end at element"),
    "per-rank-twice": (at("tensors", "residual", "shapes", value=[[0, [2, 3]], [0, [2, 3]]]), "ranks or shapes"),
    "per-rank-shape": (at("tensors", "residual", "shapes", 0, value=[0, [2**40, 3]]), "not in it"),
    "per-rank-junk": (at("tensors", "residual", "shapes", value=[1, 2]), "ranks or shapes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_manifest_is_refused(run, kind):
    change, message = FORGED[kind]
    reseal(run / "step-00000002", change)
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointFailed(refusal(run))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**6, b'{"a":' * 10**5, b"1" * 10**6, b'{"x": NaN}'],
    ids=range(9),
)  # fmt: skip
def test_what_is_no_manifest_at_all_is_refused(run, data):
    (run / "step-00000002" / "manifest.json").write_bytes(data)
    assert "manifest.json" in refusal(run, 1)


@pytest.mark.parametrize("text", ['{"format": "x", ', '{"step": 2, '])
def test_a_name_that_comes_twice_in_the_manifest_is_refused(run, text):
    path = run / "step-00000002" / "manifest.json"
    path.write_bytes(text.encode() + path.read_bytes()[1:])
    assert "not in the form" in refusal(run, 1)


def shard(text, data=b"", length=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def said(dtype="F32", shape=(2,), begin=0, end=8, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


EIGHT = bytes(8)
HEADERS = {
    "empty": b"",
    "short": b"\x01\0\0",
    "no-header": shard(b""),
    "1-TiB-header": shard({"x": said()}, EIGHT, 2**40),
    "all-ones": shard({"x": said()}, EIGHT, 2**64 - 1),
    "beyond": shard({"x": said()}, b"", 100),
    "junk": shard(b"\xff" * 20),
    "list": shard([1, 2]),
    "null": shard(b"null"),
    "deep": shard(b'{"a":' * 100_000),
    "1-TiB": shard({"x": said(shape=(2**38,), end=2**40)}, EIGHT),
    "forged-shape": shard({"x": said(shape=(2**38,))}, EIGHT),
    "overflow": shard({"x": said(shape=(2**33, 2**33), end=2**68 - 2**64)}, EIGHT),
    "overflow-to-8": shard({"x": said(shape=(2**63, 2**63))}, EIGHT),
    "negative": shard({"x": said(shape=(-1, -2))}, EIGHT),
    "negative-offset": shard({"x": said(begin=-8, end=0)}, EIGHT),
    "backward": shard({"x": said(begin=8, end=0)}, EIGHT),
    "float": shard({"x": said(end=8.0)}, EIGHT),
    "true": shard({"x": said(shape=(True, 2))}, EIGHT),
    "many-dimensions": shard({"x": said(shape=(1,) * 40 + (2,))}, EIGHT),
    "overlap": shard({"x": said(), "y": said()}, EIGHT),
    "half-overlap": shard({"x": said(), "y": said(begin=4, end=12)}, bytes(12)),
    "gap": shard({"x": said(), "y": said(begin=12, end=20)}, bytes(20)),
    "hidden-data": shard({"x": said()}, bytes(16)),
    "twice": shard(b'{"x":%s,"x":%s}' % ((json.dumps(said()).encode(),) * 2), EIGHT),
    "key-twice": shard(b'{"x":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    "dtype": shard({"x": said("OBJECT")}, EIGHT),
    "dtype-list": shard({"x": said([])}, EIGHT),
    "more": shard({"x": said(pickle="...")}, EIGHT),
    "metadata": shard({"__metadata__": {"a": "b"}, "x": said()}, EIGHT),
    "no-tensor": shard({"x": 5}, EIGHT),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_forged_header_is_refused_before_memory_is_taken(tmp_path, kind):
    path = tmp_path / "x.safetensors"
    path.write_bytes(HEADERS[kind])
    with pytest.raises(CheckpointError, match=r"x\.safetensors: ") as caught, durable_files.opened(path) as descriptor:
        tensor_file.read_header(descriptor, path)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_good_header_of_another_model_is_refused(run):
    path = run / "step-00000002" / "x"
    path.write_bytes(data := shard({"x": said()}, EIGHT))
    with durable_files.opened(path) as descriptor:
        assert tensor_file.read_header(descriptor, path)["x"].shape == (2,)
    path.unlink()
    reseal(run / "step-00000002", data=data)
    assert "not in it as the manifest says" in refusal(run)


def test_a_forged_header_is_refused_even_where_all_hashes_are_right(run):
    for data in HEADERS.values():
        reseal(run / "step-00000002", data=data)
        assert FILES[0] in refusal(run, 1)
