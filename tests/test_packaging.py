"""What an installed package brings: the wheel's contents, its dependencies, its settings, the time to import it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from email.parser import Parser
from functools import partial
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import dask.config
import pytest

import cleave_dask
from cleave_dask import config

REPOSITORY = Path(__file__).parent.parent
IMPORT_SECONDS = 0.3


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """The wheel, built by hatchling itself: no isolated environment, so no network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return ZipFile(path)


def test_wheel_carries_settings_and_recipes(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    assert "cleave_dask/cleave.yaml" in names
    recipes = {path.relative_to(REPOSITORY / "graphs").as_posix() for path in (REPOSITORY / "graphs").rglob("*.toml")}
    assert recipes, "graphs/ holds no recipe"
    assert {f"cleave_dask/_graphs/{recipe}" for recipe in recipes} <= names


def test_wheel_carries_nothing_else(wheel: ZipFile) -> None:
    assert {name.partition("/")[0] for name in wheel.namelist()} == {
        "cleave_dask",
        f"cleave_dask-{cleave_dask.__version__}.dist-info",
    }


def test_a_device_install_needs_nothing_heavy(wheel: ZipFile) -> None:
    text = wheel.read(f"cleave_dask-{cleave_dask.__version__}.dist-info/METADATA").decode()
    required = Parser().parsestr(text).get_all("Requires-Dist", [])
    base = {line.partition(">")[0] for line in required if "extra ==" not in line}
    wanted = {"click", "cryptography", "dask", "distributed", "numpy", "psutil", "pyyaml", "rich", "threadpoolctl"}
    assert base == wanted


def test_the_version_has_one_source() -> None:
    assert version("cleave-dask") == cleave_dask.__version__


def test_every_dependency_is_constrained() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["dev"]]
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    assert {requirement.partition(">")[0].partition("[")[0] for requirement in wanted} <= pinned


def test_importing_the_package_is_quick() -> None:
    code = "import time; start = time.perf_counter(); import cleave_dask; print(time.perf_counter() - start)"
    seconds = [float(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for _ in range(3)]
    print(f"import cleave_dask: {min(seconds):.3f} s")
    assert min(seconds) <= IMPORT_SECONDS


def test_every_setting_is_explained() -> None:
    lines = (REPOSITORY / "cleave_dask" / "cleave.yaml").read_text().splitlines()
    settings = [line for line in lines if ": " in line and not line.startswith("#")]
    assert settings
    assert not [line for line in settings if " # " not in line]


def test_settings_are_read_in_base_units() -> None:
    with dask.config.set({"cleave.device.cache": "2 kB", "cleave.timeouts.server": "500ms"}):
        assert config.nbytes("device.cache") == 2000
        assert config.seconds("timeouts.server") == 0.5
    assert config.get("device.window") == 3


def test_a_setting_made_before_the_import_wins() -> None:
    code = """
import dask
dask.config.set({"cleave.device.window": 7})
from cleave_dask import config
print(config.get("device.window"), config.get("checkpoint.keep"))
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split() == ["7", "3"]


@pytest.mark.parametrize(
    ("read", "key", "value", "message"),
    [
        (config.get, "device.windows", None, "no setting 'cleave.device.windows'"),
        (config.nbytes, "device.cache", "lots", "'cleave.device.cache' is 'lots'"),
        (config.seconds, "timeouts.server", "soon", "'cleave.timeouts.server' is 'soon'"),
        (config.seconds, "timeouts.server", [], "such as 10s"),
        (config.whole, "server.processes", 1.5, "give a whole number, 1 or more"),
        (config.whole, "server.shared_cores", None, "is None; give a whole number"),
        (config.whole_or_none, "server.shared_cores", 0, "give a whole number, 1 or more"),
        (
            partial(config.number, least=0.01),
            "server.pace",
            "slow",
            "'cleave.server.pace' is 'slow'; give a number, 0.01",
        ),
        (partial(config.number, least=0.01), "server.pace", 0.001, "give a number, 0.01 or more"),
    ],
)
def test_a_bad_setting_names_the_remedy(read: Callable[[str], object], key: str, value: object, message: str) -> None:
    changed = {} if value is None else {f"cleave.{key}": value}
    with dask.config.set(changed), pytest.raises(cleave_dask.InputError, match=message):
        read(key)
