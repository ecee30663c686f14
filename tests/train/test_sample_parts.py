"""Data sets of several files, and tables."""

from __future__ import annotations

import builtins
import contextlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.data.datasets import Dataset, load
from mpicoll.errors import DataError
from mpicoll.train.config import is_parts
from mpicoll.train.options import parse


def open_set(*options: str) -> Dataset:
    return load(parse(["--test-fraction=0", *options]), MPI.COMM_SELF)


def everything(found: Dataset) -> tuple[np.ndarray, np.ndarray]:
    x, y = found.train.batch(np.arange(found.train.count))
    return x.copy(), y.copy()


def parquet(path: Path, **columns: Any) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet as files

    files.write_table(arrow.table(columns), path)


def idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.mark.parametrize("header", ["a, b ,y\n", ""])
def test_csv(tmp_path: Path, header: str) -> None:
    (tmp_path / "d.csv").write_text(header + "1,2.5,0\n-3,1e2,1\n0,0,3\n")
    found = open_set("--dataset", str(tmp_path / "d.csv"))
    x, y = everything(found)
    np.testing.assert_array_equal(x, [[1, 2.5], [-3, 100], [0, 0]])
    np.testing.assert_array_equal(y, [0, 1, 3])
    assert (found.feature_count, found.class_count, x.dtype) == (2, 4, np.float32)


def test_csv_with_a_byte_order_mark(tmp_path: Path) -> None:
    for text, target in (("price,area\n1,0\n2,1\n", "area"), ("1,0\n2,1\n", "1")):
        (tmp_path / "d.csv").write_text(text, encoding="utf-8-sig")
        x, y = everything(open_set("--dataset", str(tmp_path / "d.csv"), "--target", target))
        np.testing.assert_array_equal(x, [[1], [2]])
        np.testing.assert_array_equal(y, [0, 1])


def test_a_parquet_file_that_claims_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    parquet(tmp_path / "d.parquet", a=np.zeros(3000, np.float32), y=np.zeros(3000, np.int64))
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.get)
    with pytest.raises(DataError, match=r"d.parquet: says 3000 rows of 2 columns, about 0 MB; 0 MB are free"):
        open_set("--dataset", str(tmp_path / "d.parquet"))


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(DataError, match=r"~nosuchuser/x.npz: "):
        open_set("--dataset", "~nosuchuser/x.npz")


def test_targets_by_name(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("price,size,rent\n1,2,3.5\n4,5,6\n")
    words = ["--dataset", str(tmp_path / "d.csv"), "--task=regression", "--dtype=float64"]
    x, y = everything(open_set(*words, "--target=rent,price"))
    np.testing.assert_array_equal(x, [[2], [5]])
    np.testing.assert_array_equal(y, [[3.5, 1], [6, 4]])


def test_whole_targets_of_a_regression_are_numbers_in_all_parts(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("1,2\n3,4\n")
    (tmp_path / "1.csv").write_text("5,6.5\n")
    _, y = everything(open_set("--dataset", str(tmp_path / "*.csv"), "--task=regression"))
    np.testing.assert_array_equal(y, [[2], [4], [6.5]])


def test_parquet_parts_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        rows = np.arange(3) + 10 * number
        parquet(tmp_path / f"part-{number}.parquet", a=rows.astype(np.float32), b=rows * 2, y=rows % 4)
    x, y = everything(open_set("--dataset", str(tmp_path / "part-*.parquet")))
    rows = np.array([0, 1, 2, 10, 11, 12, 20, 21, 22])
    np.testing.assert_array_equal(x, np.column_stack([rows, rows * 2]))
    np.testing.assert_array_equal(y, rows % 4)


def test_parquet_bytes_are_scaled_as_images_are(tmp_path: Path) -> None:
    parquet(tmp_path / "d.parquet", a=np.array([0, 255], np.uint8), y=np.array([0, 1], np.uint8))
    x, _ = everything(open_set("--dataset", str(tmp_path / "d.parquet")))
    np.testing.assert_array_equal(x, [[0], [1]])


def test_parts_of_npz_npy_and_idx(tmp_path: Path) -> None:
    x, y = np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.arange(6) % 3
    for number, rows in enumerate((slice(0, 4), slice(4, 6))):
        np.savez(tmp_path / f"p{number}.npz", x=x[rows], y=y[rows])
        np.save(tmp_path / f"x{number}.npy", x[rows])
        np.save(tmp_path / f"y{number}.npy", y[rows])
        idx(tmp_path / f"i{number}-idx3-ubyte", x[rows])
        idx(tmp_path / f"l{number}-idx1-ubyte", y[rows])
    npz = everything(open_set("--dataset", str(tmp_path / "p*.npz")))
    npy = everything(open_set("--dataset", str(tmp_path / "x*.npy"), "--labels", str(tmp_path / "y*.npy")))
    images = everything(open_set("--dataset", str(tmp_path / "i*ubyte"), "--labels", str(tmp_path / "l*ubyte")))
    one = everything(
        open_set("--dataset", str(tmp_path / "i1-idx3-ubyte"), "--labels", str(tmp_path / "l1-idx1-ubyte"))
    )
    np.testing.assert_allclose(npz[0], x.reshape(6, 4) / 255, rtol=1e-6)
    for found in (npy, images):
        np.testing.assert_array_equal(found[0], npz[0])
        np.testing.assert_array_equal(found[1], y)
    np.testing.assert_array_equal(one[0], npz[0][4:])


BAD_CSV = {
    "text": ("a,y\n1,red\n", "could not convert string 'red'"),
    "holes": ("a,y\n1,\n", "could not convert string ''"),
    "ragged": ("1,2\n1,2,3\n", "d.csv: line 2 has 3 columns, those before 2$"),
    "ragged after names and an empty line": ("a,y\n1,2\n\n3,4\n5\n", "d.csv: line 5 has 1 column, those before 2$"),
    "empty": ("", "d.csv: has no rows$"),
    "only names": ("a,y\n", "d.csv: has no rows$"),
    "one column": ("1\n2\n", "has 1 column; features and a target are needed"),
    "names twice": ("a,a\n1,2\n", "two columns have the same name"),
    "names and numbers": ("a,2\n1,2\n", "the first line has numbers and names: a, 2"),
    "fewer names": ("a,y\n1,2,3\n", "has 2 names and 3 columns"),
    "not finite": ("a,b,y\n1,nan,0\n", "column 'b' has a number that is not finite"),
    "too large": ("a,b,y\n1,1e300,0\n", "column 'b' has a number that is not finite in float32"),
    "fraction as label": ("a,y\n1,0.5\n", "labels are integers, not float64"),
    "negative label": ("a,y\n1,-1\n", "label -1 is not in"),
    "not text": (b"\xff\xfe\x00", "decode"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", BAD_CSV)
def test_bad_csv_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    content, message = BAD_CSV[kind]
    (tmp_path / "d.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        open_set("--dataset", str(tmp_path / "d.csv"))
    assert str(caught.value).startswith(f"--dataset {tmp_path / 'd.csv'}: ")


def test_bad_labels_are_refused_with_option_and_file(tmp_path: Path) -> None:
    for name, array in {"x": np.zeros((4, 2)), "short": [0, 1, 2], "below": [0, 1, 2, -1]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 2)), y=[0, 1, 2, -1])
    (tmp_path / "bad.npy").write_text("not an array")
    x = ["--dataset", str(tmp_path / "x.npy"), "--labels"]
    pattern = ["--dataset", str(tmp_path / "[x].npy"), "--labels"]
    for words, option, file, reason in (
        ([*x, f"{tmp_path}/short.npy"], "--labels", "short.npy", "y: shape (3,) does not give one label to each of 4"),
        ([*x, f"{tmp_path}/below.npy"], "--labels", "below.npy", "y: label -1 is not in 0..65535"),
        ([*x, f"{tmp_path}/bad.npy"], "--labels", "bad.npy", "the magic string is not correct"),
        ([*pattern, f"{tmp_path}/[b]elow.npy"], "--labels", "below.npy", "y: label -1 is not in 0..65535"),
        (["--dataset", f"{tmp_path}/d.npz"], "--dataset", "d.npz", "y: label -1 is not in 0..65535"),
        (["--dataset", f"{tmp_path}/[d].npz"], "--dataset", "d.npz", "y: label -1 is not in 0..65535"),
    ):
        with pytest.raises(DataError) as caught:
            open_set(*words)
        assert str(caught.value).startswith(f"{option} {tmp_path / file}: {reason}")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": ["x", "y"], "y": [0, 1]}, "column 'a' holds string, not numbers"),
        ({"a": [1, None], "y": [0, 1]}, "column 'a' has 1 missing values"),
        ({"a": [1.0, float("nan")], "y": [0, 1]}, "column 'a' has a number that is not finite"),
        ({"a": [[1], [2]], "y": [0, 1]}, "column 'a' holds list<.*>, not numbers"),
        ({"a": [True, False], "y": [0, 1]}, "column 'a' holds bool, not numbers"),
        ({"a": [1, 2], "y": np.array([2**64 - 1, 0], np.uint64)}, "target 18446744073709551615 is too large"),
        ({"y": [1, 2]}, "has 1 column; features and a target are needed"),
        ({"a": np.empty(0), "y": np.empty(0, int)}, "has no rows"),
    ],
    ids=str,
)
def test_bad_parquet_is_refused_by_name(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    parquet(tmp_path / "d.parquet", **columns)
    with pytest.raises(DataError, match=message) as caught:
        open_set("--dataset", str(tmp_path / "d.parquet"))
    assert "d.parquet" in str(caught.value)


@pytest.mark.parametrize("position", range(0, 900, 23))
def test_any_flipped_byte_of_parquet_is_harmless(tmp_path: Path, position: int) -> None:
    path = tmp_path / "d.parquet"
    parquet(path, a=np.arange(20.0), y=np.arange(20) % 3)
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0xFF
    path.write_bytes(data)
    with contextlib.suppress(DataError):  # and no other error
        everything(open_set("--dataset", str(path)))


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet(path, a=np.arange(20.0), y=np.arange(20) % 3)
    for kept in (0, 3, 100, path.stat().st_size - 1):
        (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:kept])
        with pytest.raises(DataError, match=r"cut.parquet: is not a Parquet file"):
            open_set("--dataset", str(tmp_path / "cut.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'mpicoll\[parquet\]'"):
        open_set("--dataset", str(tmp_path / "d.parquet"))


def test_unequal_parts_are_refused_by_name(tmp_path: Path) -> None:
    first, words = tmp_path / "0.csv", ["--dataset", str(tmp_path / "?.csv")]
    first.write_text("a,b,y\n1,2,0\n")
    for content, message in (("a,c,y\n1,2,0\n", "1.csv: has columns a, c, y, .*0.csv has a, b, y"),
                             ("a,b,y\n1,2,0.5\n", "labels are integers")):  # fmt: skip
        (tmp_path / "1.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            open_set(*words)
    np.savez(tmp_path / "0.npz", x=np.zeros((2, 3)), y=[0, 1])
    for array, message in ((np.zeros((4, 2)), r"1.npz: x is float64 of shape \(4, 2\), in .*float64 of .*\(2, 3\)"),
                           (np.zeros((4, 3), np.float32), "x is float32 of shape")):  # fmt: skip
        np.savez(tmp_path / "1.npz", x=array, y=[0, 1, 0, 1])
        with pytest.raises(DataError, match=message):
            open_set("--dataset", str(tmp_path / "*.npz"))
    np.savez(tmp_path / "1.npz", x_train=array, y_train=[0] * 4, x_test=array, y_test=[0] * 4)
    with pytest.raises(DataError, match=r"1.npz: has a test part"):
        open_set("--dataset", str(tmp_path / "*.npz"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset=none-*.csv"], "--dataset none-.*no file matches this pattern"),
        (["--dataset=none.csv"], "--dataset none.csv: there is no such file"),
        (["--dataset=FOLDER/*.txt"], r"a.txt: not a file .csv, .parquet or .npz"),
        (["--dataset=FOLDER/x*.npy", "--labels=FOLDER/y0.npy"], "1 file for 2 of --dataset"),
        (["--dataset=FOLDER/d.csv", "--target=z"], "has no column 'z'; the columns are a, y"),
        (["--dataset=FOLDER/d.csv", "--target=a,y"], "has columns of targets only"),
    ],
    ids=str,
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "d.csv").write_text("a,y\n1,2\n")
    for name in ("x0", "x1", "y0"):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match=message):
        open_set(*(word.replace("FOLDER", str(tmp_path)) for word in words))


@pytest.mark.parametrize(
    ("name", "parts"),
    [("digits", False), ("synthetic:10", False), ("synthetic.csv", True), ("text:a*", False), ("a/b.npz", False),
     ("mnist_idx", False), ("t10k-images-idx3-ubyte.gz", True), ("a.idx", True), ("p[0-9].npz", True)],
)  # fmt: skip
def test_which_names_are_parts(name: str, parts: bool) -> None:
    assert is_parts(name) is parts
