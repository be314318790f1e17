"""The Tab key: the script of each shell, and what it asks for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from cleave_dask.cli.completing import INSTALL
from tests.cli.calling import run


@pytest.mark.parametrize("shell", INSTALL)
def test_every_shell_has_its_script(shell: str) -> None:
    shown = run("completion", shell)
    assert shown.exit_code == 0, shown.stderr
    assert f"_CLEAVE_COMPLETE={shell}_complete" in shown.stdout
    printed = json.loads(run("completion", shell, "--json").stdout)
    assert printed["script"] == shown.stdout.removesuffix("\n")
    assert f"cleave completion {shell}" in printed["install"]
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=shown.stdout, text=True, check=True)  # it parses


def test_a_shell_without_completion_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/tcsh")
    result = run("completion")
    assert result.exit_code == 2
    assert "name one of bash, zsh, fish" in result.stderr
    monkeypatch.setenv("SHELL", "/bin/fish")
    assert "fish_complete" in run("completion").stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cleave do", "doctor"),
        ("cleave train tiny-l", "tiny-llama"),
        ("cleave plan opt-1.3b --fleet lab", "lab-8"),
        ("cleave export run --recipe tiny-o", "tiny-opt"),
        ("cleave completion f", "fish"),
        ("cleave devices --w", "--watch"),
    ],
)
def test_what_could_come_next(words: str, expected: str) -> None:
    asked = {"_CLEAVE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "from cleave_dask.cli import main; main()"
    answer = subprocess.check_output([sys.executable, "-c", code], text=True, env={**os.environ, **asked})
    assert f"plain,{expected}" in answer.splitlines()
