"""Going on as the worker's program."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BECOME = """
import sys
from cleave_dask.cli.joining import become
become([sys.executable, "-c", "import sys; sys.exit(7)"], replaces={replaces})
"""


@pytest.mark.parametrize("replaces", [True, False])
def test_who_becomes_another_program_ends_as_it_does(replaces: bool) -> None:
    done = subprocess.run([sys.executable, "-c", _BECOME.format(replaces=replaces)], check=False, timeout=60)
    assert done.returncode == 7
