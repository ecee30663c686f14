"""Files as they should be, damaged ones, and forged ones."""

import gzip
import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest

from mpicoll.data import sample_files, sample_tables
from mpicoll.errors import DataError


def idx_bytes(array, code=0x08):
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def npy_bytes(array, allow_pickle=False):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def npy_header(shape, descr="'|u1'", order="False"):
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def write(path, data):
    path.write_bytes(data)
    return path


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)


# ---- IDX ----


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_is_read(tmp_path, suffix):
    data = idx_bytes(IMAGES)
    path = write(tmp_path / f"images{suffix}", gzip.compress(data) if suffix else data)
    np.testing.assert_array_equal(sample_files.read_idx(path), IMAGES)


def test_idx_of_big_endian_integers_comes_out_native(tmp_path):
    found = sample_files.read_idx(write(tmp_path / "x", idx_bytes(np.array([1, 70000], ">i4"), 0x0C)))
    assert found.dtype.isnative
    assert found.tolist() == [1, 70000]


HUGE = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)


DAMAGED_IDX = {
    "empty": b"",
    "short-magic": b"\0\0",
    "short-extents": b"\0\0\x08\x03\0\0",
    "truncated": idx_bytes(IMAGES)[:-1],
    "too-long": idx_bytes(IMAGES) + b"\0",
    "magic": b"\x01" + idx_bytes(IMAGES)[1:],
    "type": b"\0\0\x07\x01\0\0\0\x01\0",
    "no-dimension": b"\0\0\x08\x00\0",
    "255-dimensions": b"\0\0\x08\xff" + bytes(2000),
    "overflow": HUGE,
    "overflow-with-data": HUGE + bytes(100),
}


@pytest.mark.parametrize("kind", DAMAGED_IDX)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx_is_refused_by_name(tmp_path, kind, suffix):
    data = DAMAGED_IDX[kind]
    path = write(tmp_path / f"images{suffix}", gzip.compress(data) if suffix else data)
    with pytest.raises(DataError, match="images") as caught:
        sample_files.read_idx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("claimed", [100_000, 2**31, 2**40])
def test_idx_that_claims_too_much_is_refused_before_memory_is_taken(tmp_path, suffix, claimed):
    data = bytes([0, 0, 8, 2]) + struct.pack(">2I", 1000, claimed // 1000)
    path = write(tmp_path / f"images{suffix}", gzip.compress(data) if suffix else data)
    with pytest.raises(DataError, match="more than the file can hold"):
        sample_files.read_idx(path)


@pytest.mark.parametrize("cut", [5, 20, -9, -4])
def test_truncated_gzip_is_refused(tmp_path, cut):
    path = write(tmp_path / "images.gz", gzip.compress(idx_bytes(IMAGES))[:cut])
    with pytest.raises(DataError, match=r"images\.gz"):
        sample_files.read_idx(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="gone: no such file"):
        sample_files.read_idx(tmp_path / "gone")


def test_idx_folder_takes_either_spelling_and_names_what_is_missing(tmp_path):
    write(tmp_path / "train-images-idx3-ubyte", idx_bytes(IMAGES))
    write(tmp_path / "train-labels.idx1-ubyte", idx_bytes(np.zeros(4, np.uint8)))
    write(tmp_path / "t10k-images-idx3-ubyte.gz", gzip.compress(idx_bytes(IMAGES)))
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        sample_files.read_idx_folder(tmp_path)
    write(tmp_path / "t10k-labels-idx1-ubyte", idx_bytes(np.zeros(4, np.uint8)))
    assert set(sample_files.read_idx_folder(tmp_path)) == set(sample_files.IDX_NAMES)


# ---- .npy ----


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "<f4", ">f8", "<i2", "?"])
def test_npy_is_mapped_read_only(tmp_path, order, dtype):
    array = np.asarray(IMAGES.astype(dtype), order=order)
    mapped = sample_files.map_npy(write(tmp_path / "x.npy", npy_bytes(array)))
    np.testing.assert_array_equal(mapped, array)
    assert isinstance(mapped, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 0


HOSTILE_NPY = {
    "empty": b"",
    "no-magic": b"hello",
    "future-version": b"\x93NUMPY\x09\x00" + bytes(100),
    "no-header": b"\x93NUMPY\x01\x00\xff\xff",
    "code": npy_header("(__import__('os').abort(),)") + bytes(8),
    "not-a-dict": b"\x93NUMPY\x01\x00\x04\x00[1]\n",
    "truncated": npy_bytes(IMAGES)[:-1],
    "too-long": npy_bytes(IMAGES) + b"\0",
    "huge": npy_header(f"({2**62},)"),
    "overflow": npy_header(f"({2**33}, {2**33})"),
    "negative": npy_header("(-1, -8)") + bytes(8),
    "many-dimensions": npy_header("(1,) * 40") + bytes(8),
    "endless": npy_header("(60, 5, "),
    "deep": npy_header("(" * 5000 + ")" * 5000),
    "object": npy_bytes(np.array([Bomb()], object), allow_pickle=True),
    "object-header": npy_header("(1,)", "'|O'") + pickle.dumps(Bomb()),
    "structured": npy_header("(1,)", "[('a', '<i4'), ('b', '|O')]") + bytes(12),
    "strings": npy_bytes(np.array(["a"])),
    "complex": npy_bytes(np.array([1j])),
    "dates": npy_bytes(np.array(["2020-01-01"], "M8[D]")),
}


@pytest.mark.parametrize("kind", HOSTILE_NPY)
def test_hostile_npy_is_refused_by_name(tmp_path, kind):
    path = write(tmp_path / "x.npy", HOSTILE_NPY[kind])
    with pytest.raises(DataError, match=r"x\.npy") as caught:
        sample_files.map_npy(path)
    assert "\n" not in str(caught.value)


# ---- .npz ----


def npz_bytes(members, compression=zipfile.ZIP_DEFLATED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("names", [("x", "y"), ("x_train", "y_train", "x_test", "y_test")])
def test_npz_is_read(tmp_path, save, names):
    arrays = {name: np.asfortranarray(IMAGES) if name[0] == "x" else np.arange(4) for name in names}
    save(tmp_path / "d.npz", **arrays)
    found = sample_files.read_npz(tmp_path / "d.npz")
    assert tuple(found) == names
    for name in names:
        np.testing.assert_array_equal(found[name], arrays[name])


@pytest.mark.parametrize("kind", HOSTILE_NPY)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_hostile_member_is_refused_by_name(tmp_path, kind, compression):
    path = write(tmp_path / "d.npz", npz_bytes({"x": HOSTILE_NPY[kind], "y": npy_bytes(np.arange(4))}, compression))
    with pytest.raises(DataError, match=r"d\.npz"):
        sample_files.read_npz(path)


def test_other_members_are_never_looked_at(tmp_path):
    members = {"x": npy_bytes(IMAGES), "y": npy_bytes(np.arange(4)), "evil": HOSTILE_NPY["object"]}
    assert set(sample_files.read_npz(write(tmp_path / "d.npz", npz_bytes(members)))) == {"x", "y"}


@pytest.mark.parametrize(
    "data", [b"", b"PK\x05\x06" + bytes(18), b"not a zip file", npz_bytes({"x": npy_bytes(IMAGES)})]
)
def test_what_is_no_data_set_is_refused(tmp_path, data):
    with pytest.raises(DataError, match=r"d\.npz"):
        sample_files.read_npz(write(tmp_path / "d.npz", data))


def test_size_forged_in_the_directory_is_refused(tmp_path):
    data = bytearray(npz_bytes({"x": npy_header("(4000000000,)"), "y": npy_bytes(np.arange(4))}))
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = struct.pack("<I", 4_000_000_128)
    with pytest.raises(DataError, match="more than the file can hold"):
        sample_files.read_npz(write(tmp_path / "d.npz", bytes(data)))


@pytest.mark.parametrize("position", range(0, 700, 7))
def test_any_flipped_byte_is_harmless(tmp_path, position):
    data = bytearray(npz_bytes({"x": npy_bytes(IMAGES), "y": npy_bytes(np.arange(4))}))
    data[position % len(data)] ^= 0xFF
    try:
        found = sample_files.read_npz(write(tmp_path / "d.npz", bytes(data)))
    except DataError:
        return
    assert all(array.dtype.kind in "biuf" for array in found.values())


@pytest.mark.parametrize("read", [sample_files.map_npy, sample_files.read_npz, sample_files.read_idx])
def test_a_pipe_is_refused(tmp_path, read):
    """Opening it would wait for somebody who writes."""
    path = tmp_path / "data"
    os.mkfifo(path)
    with pytest.raises(DataError, match="data: not a regular file"):
        read(path)


def test_a_line_that_is_too_long_is_refused_by_name(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a" * 200_000)
    with pytest.raises(DataError, match=r"x\.csv: field larger"):
        sample_tables.read_table(path, (), "float32", reals=False)
