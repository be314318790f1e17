"""The documents as a site, the commands that they name, and what is under deploy/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
import yaml

from cleave_dask.cli import cleave

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [ROOT / "README.md", *PAGES, *sorted((ROOT / "deploy").iterdir())]


def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        built = tmp_path / ("" if page.stem == "index" else page.stem) / "index.html"
        assert built.is_file()
    assert "only_when_idle" in (tmp_path / "settings" / "index.html").read_text()
    outside = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css)[^"]*)"', (tmp_path / "index.html").read_text())
    assert outside == [], "a page asks another site for something"


def commands() -> list[tuple[str, str]]:
    """Every `cleave ...` line of a console block, with the page that it is on."""
    found = []
    for path in TEXTS:
        for block in re.findall(r"```console\n(.*?)```", path.read_text(), flags=re.DOTALL):
            lines = re.findall(r"^\$ (?:[A-Z_]+=(?:\"[^\"]*\"|\S+) )*(cleave [^#\n]*)", block, flags=re.MULTILINE)
            found += [(path.name, line.strip()) for line in lines]
    return found


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value)
def test_commands_of_the_documents_are_understood(page: str, line: str) -> None:
    """Parsed with all checks of click's, not run."""
    _, name, *arguments = shlex.split(line)
    command = cleave.commands[name]
    with command.make_context(name, arguments, parent=click.Context(cleave)):
        pass


def test_the_unit_starts_a_device_that_yields_to_its_owner() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (ROOT / "deploy" / "cleave-device.service").read_text()
    unit.read_string(text)
    program = unit["Service"]["ExecStart"].replace("${CLEAVE_URL}", "https://192.0.2.10:8788")
    _, _, name, *arguments = shlex.split(program)
    with cleave.commands[name].make_context(name, arguments, parent=click.Context(cleave)) as context:
        assert context.params["token"] in (None, "--memory-limit")
    settings = yaml.safe_load((ROOT / "cleave_dask" / "cleave.yaml").read_text())["cleave"]
    for variable in re.findall(r"DASK_CLEAVE__(\w+)=", text + (ROOT / "deploy" / "Containerfile").read_text()):
        place = settings
        for key in variable.lower().split("__"):
            place = place[key]
