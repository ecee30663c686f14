"""Compressors by name: when their modules are imported, and which names are taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpicoll.compression import compressor_specs, names


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_programs_that_do_not_compress_import_no_compressor() -> None:
    code = "import sys, mpicoll.comm; print(*(name for name in sys.modules if name.startswith('mpicoll.compression.')))"
    loaded = {name.removeprefix("mpicoll.compression.") for name in python(code).split()}
    assert not loaded & set(compressor_specs.MODULES)


@pytest.mark.parametrize("module", compressor_specs.MODULES)
def test_any_module_may_be_the_first_one(module: str) -> None:
    code = f"import mpicoll.compression.{module}, mpicoll.compression as all; print(*all.names())"
    assert python(code).split() == list(names())


@pytest.mark.parametrize("module", compressor_specs.MODULES)
def test_modules_are_attributes(module: str) -> None:
    code = f"import mpicoll.compression as all; print('{module}' in dir(all), all.{module}.__name__)"
    assert python(code).split() == ["True", f"mpicoll.compression.{module}"]


def test_a_name_of_mpicolls_own_is_taken() -> None:
    """Also if nothing has asked for a compressor before."""
    code = "from mpicoll.compression import register\ntry:\n    register('int8')(int)\nexcept ValueError as e: print(e)"
    assert python(code) == "name: 'int8' is taken by QuantizedIntegers\n"
