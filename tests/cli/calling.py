"""The command line in this process, and a recipe to give it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from cleave_dask.cli import cleave

RECIPE = """
[model]
family = "llama"
hidden = 32
layers = 1
heads = 2

[data]
kind = "python-stdlib"
batch = 8
sequence = 32
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cleave, list(arguments))
