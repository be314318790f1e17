"""The Tab key: the script of each shell, and what it asks for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


ASKING = {
    "bash": 'source "$0"; COMP_WORDS=(cleave train tiny-); COMP_CWORD=2; _cleave_completion cleave; '
    'printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]; complete -C "cleave train tiny-"',
}
"""For each shell that can be asked without a terminal, how."""


@pytest.mark.parametrize("shell", ASKING)
def test_the_shell_itself_knows_what_could_come_next(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    script, folder = tmp_path / "completion", Path(sys.executable).parent
    script.write_text(run("completion", shell).stdout)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = [shell, "-c", ASKING[shell], str(script)]
    answer = subprocess.check_output(command, text=True, timeout=60, env={**os.environ, "PATH": path})
    assert answer.split() == ["tiny-llama", "tiny-opt"]
