"""Machine code of kernels on disk: loaded without Numba where it fits, and not at all where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numba import config

from mpicoll.kernels import atomics, decorators, executor, machine_code, object_file, optimizer_updates, reduce
from mpicoll.kernels.argument_types import kind_of, type_of

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="there is no machine code without a JIT")
loads = pytest.mark.skipif(machine_code.obstacle() != "", reason=machine_code.obstacle())
FLOAT32 = np.dtype(np.float32)
ADD = """
import sys
import numpy as np
from mpicoll.kernels import reduce
add = reduce.reducer("SUM", np.dtype(np.float32))
a, out = np.arange(1000, dtype=np.float32), np.empty(1000, np.float32)
add(out, a, a)
assert (out == 2 * a).all()
compiled = "mpicoll.kernels.compiler" in sys.modules
"""


def python(code: str, **environment: str) -> str:
    """Run `code` in a new interpreter, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


@loads
def test_this_numba_compiles_what_can_be_loaded() -> None:
    """With another version of Numba this may fail; kernels are Numba's then, and processes start more slowly."""
    for function in (*decorators.typed_kernels, *reduce.KERNELS.values()):
        signature = function.signature or reduce.signature_of(FLOAT32)
        if function.function.__module__.startswith("mpicoll.kernels.elementwise"):
            family = next(family for (_, family), each in reduce.KERNELS.items() if each is function)
            dtype = next(dtype for dtype, name in reduce._FAMILIES.items() if name == family)
            signature = reduce.signature_of(dtype)
        function.variant(signature)
        assert decorators.loaded(function, signature) is not None, function.__name__


@loads
def test_a_kernel_is_loaded_without_numba() -> None:
    reduce.reducer("SUM", FLOAT32)
    assert python(ADD + "print(compiled, 'numba' in sys.modules)").split() == ["False", "False"]


@loads
@pytest.mark.parametrize("order", ["{numba}{ours}", "{ours}{numba}"])
def test_numba_works_before_and_after(order: str) -> None:
    reduce.reducer("SUM", FLOAT32)
    numba = """
import numba, numpy
@numba.njit
def total(values):
    made = numpy.zeros(3)
    for value in values:
        made[0] += value
    return made
assert total(numpy.ones(7, numpy.float32))[0] == 7
try:
    numba.njit(lambda values: values.nothing)(numpy.ones(7, numpy.float32))
except numba.TypingError:
    pass
"""
    assert python(order.format(numba=numba, ours=ADD) + "print(compiled)").strip() == "False"


@loads
def test_an_entry_that_does_not_fit_is_made_anew(tmp_path: Path) -> None:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(ADD + "print(compiled)", **environment).strip() == "True"
    (path,) = entries(tmp_path)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-100] ^= 1
    others = good.replace(b"readonly float32[1C]", b"readonly float64[1C]")
    for bad in (b"", good[:10], good[: len(good) // 2], bytes(flipped), others):
        path.write_bytes(bad)
        assert machine_code._unpacked(bad, "") is None
    path.write_bytes(bytes(flipped))
    assert python(ADD + "print(compiled)", **environment).strip() == "True"
    assert python(ADD + "print(compiled)", **environment).strip() == "False"


@loads
def test_other_sources_types_and_machines_have_other_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    machine_code.folder_to_write.cache_clear()
    image = object_file.Image(b"\xc3" * 16, [], [], [], {"f": 0})
    entry = machine_code.Entry(image, "", "f")
    try:
        machine_code.write("f", "int64", [[1, 2]], entry)
        assert machine_code.read("f", "int64", [[1, 2]]) == entry
        assert machine_code.read("f", "int64", [[1, 3]]) is None
        assert machine_code.read("f", "float64", [[1, 2]]) is None
        path = machine_code.file_name("f", "int64")
        machine_code._origin.cache_clear()
        monkeypatch.setattr(machine_code, "_processor", lambda: ["another one"])
        assert machine_code.file_name("f", "int64") != path
        assert machine_code.read("f", "int64", [[1, 2]]) is None
    finally:
        machine_code._origin.cache_clear()
        machine_code.folder_to_write.cache_clear()


@loads
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert machine_code._is_trusted(tmp_path)
    tmp_path.chmod(0o777)
    assert not machine_code._is_trusted(tmp_path)


@loads
def test_where_nothing_can_be_written_kernels_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = """
import warnings
warnings.simplefilter("ignore")
"""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "folder")}
    assert python(code + ADD + "print(compiled)", **environment).strip() == "True"


@pytest.mark.parametrize("name", ["NUMBA_OPT", "NUMBA_CPU_NAME", "NUMBA_BOUNDSCHECK"])
def test_variables_that_change_code_leave_kernels_to_numba(name: str, tmp_path: Path) -> None:
    value = {"NUMBA_OPT": "1", "NUMBA_CPU_NAME": "generic", "NUMBA_BOUNDSCHECK": "1"}[name]
    environment = {name: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(ADD + "print(compiled)", **environment).strip() == "True"
    assert entries(tmp_path) == []
    assert len(list(tmp_path.rglob("*.nbc"))) == 1


def test_a_child_calls_what_its_parent_has_loaded() -> None:
    code = """
import os
pid = os.fork()
b = np.empty(1000, np.float32)
add(b, a, a)
assert (b == 2 * a).all()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    python(ADD + code)


def test_threads_may_need_the_same_kernel_at_once() -> None:
    kernel = decorators.Kernel(optimizer_updates.scaled_into.function)
    a, outs = np.arange(100, dtype=np.float32), [np.empty(100, np.float32) for _ in range(8)]
    threads = [threading.Thread(target=kernel, args=(out, a, np.float32(3))) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((out == 3 * a).all() for out in outs)
    assert len(kernel.made) == 1


@pytest.mark.parametrize(
    "value",
    [
        0, -1, 2**63, True, 1.5, 1j, np.bool_(True), np.float32(1), np.float64(1), np.int8(1), np.uint64(2**63),
        np.complex64(1), np.zeros(3), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int8, "F"), np.zeros(8)[::2],
        np.zeros(()), np.zeros(3, bool), np.broadcast_to(1.0, 5), np.frombuffer(b"12345678", np.uint32),
    ],
    ids=str,
)  # fmt: skip
def test_types_are_those_of_numba(value: object) -> None:
    from numba import typeof

    text = type_of(value)
    if text:
        assert decorators.compiler().numba_type(text) == typeof(value)
    else:
        assert value in (2**63, 1j)


def test_arrays_of_other_shapes_are_of_other_kinds() -> None:
    array = np.zeros((4, 6), np.float32)
    unaligned = np.zeros(4 * 8 + 1, np.uint8)[1:].view(np.float32)
    readonly = array.view()
    readonly.flags.writeable = False
    arrays = [array, array.T, array[::2, ::2], array[0], readonly, array.astype(">f4"), array.astype("i4"), unaligned]
    assert len({kind_of(each) for each in arrays}) == len(arrays)
    assert [type_of(each) for each in arrays[-3:]] == ["", "int32[2C]", ""]


@pytest.mark.parametrize(
    "wrong", [np.zeros(8, np.float64), np.zeros(16, np.float32)[::2], np.zeros((2, 4), np.float32), 1]
)
def test_a_kernel_for_some_types_refuses_others(wrong: object) -> None:
    add, a = reduce.reducer("SUM", FLOAT32), np.ones(8, np.float32)
    readonly = a.view()
    readonly.flags.writeable = False
    assert add is not None
    for arguments in ((wrong, a, a), (a, wrong, a), (readonly, a, a), (a, a)):
        with pytest.raises(TypeError, match=r"it takes \(float32\[1C\]"):
            add(*arguments)
    add(np.empty_like(a), readonly, a)


def test_calls_without_a_look_at_types_are_machine_code() -> None:
    room = np.zeros(64, np.int64)
    assert executor.begin.run(0) == executor.begin(0)
    assert atomics._single.run(room.ctypes.data)
    assert type(executor.begin.run).__name__ in ("builtin_function_or_method", "CPUDispatcher")


@pytest.mark.parametrize("file", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(200), b"MZ" * 100])
def test_what_is_no_object_file_is_refused(file: bytes) -> None:
    with pytest.raises(ValueError, match=r"no relocatable|damaged"):
        object_file.link([file], ["f"])
