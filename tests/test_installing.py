"""Wheel and sdist in an environment that has nothing but what they ask for: as a device, and to train.

No network: the environment gets links to the packages that the wheel's metadata names, theirs included, and no others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parent.parent


def build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", REPOSITORY, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_from_the_sdist_is_the_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", REPOSITORY, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", source, tmp_path / "wheel")
    assert sorted(ZipFile(again).namelist()) == sorted(ZipFile(wheel).namelist())


def wanted(lines: list[str], extra: str) -> Iterator[Requirement]:
    """Those of a package's requirements that apply here."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def closure(lines: list[str], extra: str) -> set[str]:
    """Names of all packages that these requirements bring."""
    found: set[str] = set()
    open_ends = list(wanted(lines, extra))
    while open_ends:
        requirement = open_ends.pop()
        try:
            has = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # not on this machine, such as CUDA's for a CPU build: whoever needs it would fail
        for part in ("", *requirement.extras):
            name = f"{canonicalize_name(requirement.name)}[{part}]"
            if name not in found:
                found.add(name)
                open_ends += wanted(has.requires or [], part)
    return {name.partition("[")[0] for name in found}


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """An interpreter that has the wheel and what it asks for."""
    venv.create(folder, with_pip=False)
    (python,) = [path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists()]
    (packages,) = (
        folder.glob("lib/python*/site-packages") if sys.platform != "win32" else [folder / "Lib/site-packages"]
    )
    with ZipFile(wheel) as archive:
        archive.extractall(packages)
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])
    for name in closure(lines, extra):
        has = distribution(name)
        tops = {Path(file).parts[0] for file in has.files or () if Path(file).parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            link = packages / top
            if not link.exists() and not link.is_symlink():
                link.symlink_to(Path(str(has.locate_file(top))))
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", *arguments]
    return subprocess.run(command, cwd=python.parent, capture_output=True, text=True, timeout=200, check=False)


def test_a_device_has_all_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", wheel, "")
    assert "No module named 'torch'" in run(python, "-c", "import torch").stderr
    doctor = run(python, "-m", "cleave_dask", "doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert found["packages"]["state"] == "good", found["packages"]
    assert found["training"]["state"] == "note"
    loaded = run(python, "-m", "dask", "worker", "--help")
    assert loaded.returncode == 0, loaded.stderr
    preload = run(python, "-c", "import cleave_dask.runtime.device, cleave_dask.cli.joining; print('ready')")
    assert preload.stdout == "ready\n", preload.stderr
    training = run(python, "-m", "cleave_dask", "plan", "tiny-llama", "--fleet", "lab-8")
    assert training.returncode == 1
    assert "pip install 'cleave-dask[train]'" in training.stderr


def test_the_machine_that_trains_has_all_that_it_needs(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env", wheel, "train")
    planned = run(python, "-m", "cleave_dask", "plan", "tiny-llama", "--fleet", "lab-8", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["devices_used"] > 0
    loaded = run(
        python, "-c", "import cleave_dask as cd; [getattr(cd, name) for name in cd.__all__]; print(cd.__file__)"
    )
    assert loaded.returncode == 0, loaded.stderr
    assert str(tmp_path) in loaded.stdout
