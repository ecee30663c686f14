"""`import mpicoll.torch` without PyTorch says what to install."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = None  # as if it were not installed
try:
    import mpicoll.torch
except ImportError as error:
    print(error.name, error)
"""


def test_the_error_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == 'torch mpicoll.torch: PyTorch is missing; pip install "mpicoll[torch]"\n', done.stderr
