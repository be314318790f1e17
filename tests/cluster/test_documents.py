"""What people read runs as it stands: the code of the README, and every notebook."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.timeout(600)
def test_the_readme_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        losses = [float(line) for line in done.stdout.split()]
        assert len(losses) == 5
        assert losses[-1] < losses[0]


DOCUMENTED = [path for path in sorted((ROOT / "docs").glob("*.md")) if "```python" in path.read_text()]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("document", DOCUMENTED, ids=lambda path: path.stem)
def test_the_code_of_the_documents_runs(document: Path, tmp_path: Path) -> None:
    script = tmp_path / "document.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr


SHOWN = {
    "1_first_step": (
        "<caption.*gemms on .* levels",
        "<caption.*Plan:.*a step",
        "torch 5[.].*, on devices 5[.]",
        "Trace:",
    ),
    "2_train_a_language_model": ("happened: .*'leave': 1", "differs from plain torch", "resumed at step 24", "Trace:"),
    "3_a_thousand_devices": ("<caption.*1,024 devices", "on devices: Plan", "dtfm +infeasible", "<svg", "a100"),
    "4_your_own_model": ("WithLoss", "loss on devices 1[.]", "% of new images", "loss after reloading", "config.json"),
}
"""What the outputs of each notebook must show, as patterns."""


@pytest.mark.timeout(600)  # a minute on an idle machine
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(content, timeout=500, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    shown = "\n".join(str(output) for cell in content.cells for output in cell.get("outputs", []))
    missing = [pattern for pattern in SHOWN[notebook.stem] if not re.search(pattern, shown)]
    assert not missing, shown
