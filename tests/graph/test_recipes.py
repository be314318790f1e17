"""Recipes as files; what torch makes of them is in test_building.py."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave_dask import resources
from cleave_dask.errors import CleaveError, RecipeError
from cleave_dask.graph.recipes import Architecture, Data, Optimizer, Recipe, Schedule, Train
from cleave_dask.resources import graphs_folder

SHIPPED = {
    *("tiny-llama", "tiny-opt"),
    *("opt-125m", "opt-1.3b", "opt-6.7b", "opt-13b", "opt-66b"),
    *("llama2-7b", "llama2-13b", "llama2-70b"),
}

MODEL = '[model]\nfamily = "llama"\nhidden = 16\nlayers = 1\nheads = 4\n'
DATA = '[data]\nkind = "python-stdlib"\nbatch = 2\nsequence = 8\n'


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_every_shipped_recipe_is_tested_and_explains_itself() -> None:
    paths = list(graphs_folder().glob("*.toml"))
    assert {path.stem for path in paths} == SHIPPED
    assert all(path.read_text().startswith("# ") for path in paths)


def test_an_installed_package_carries_its_recipes_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "cleave_dask"
    (package / "_graphs").mkdir(parents=True)
    (package.parent / "graphs").mkdir()  # somebody else's
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert graphs_folder() == package / "_graphs"
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "nowhere" / "cleave_dask")
    with pytest.raises(CleaveError, match="reinstall the package"):
        graphs_folder()


def test_a_recipe_is_read_whole(tmp_path: Path) -> None:
    text = (
        MODEL
        + "kv_heads = 2\nffn = 32\nvocab = 300\npositions = 64\ntie_embeddings = true\n"
        + DATA
        + '[optimizer]\nname = "SGD"\nlr = 1\nmomentum = 0.9\nnesterov = true\n'
        + '[schedule]\nname = "StepLR"\nstep_size = 3\nwarmup = 2\n'
        + '[train]\nsteps = 7\nseed = 5\naccumulate = 3\nclip_norm = 2\ndtype = "float64"\nwire = "bfloat16"\n'
    )
    recipe = Recipe.load(write(tmp_path, text))
    assert recipe == Recipe(
        name="mine",
        model=Architecture("llama", 16, 1, 4, 2, 32, 300, 64, tie_embeddings=True, dropout=0.0),
        data=Data(batch=2, sequence=8),
        optimizer=Optimizer("SGD", (("lr", 1), ("momentum", 0.9), ("nesterov", True))),
        schedule=Schedule("StepLR", (("step_size", 3),), warmup=2),
        train=Train(steps=7, seed=5, accumulate=3, clip_norm=2.0, dtype="float64", wire="bfloat16"),
    )
    assert recipe.tokens_per_step == 48
    assert str(recipe) == "mine: llama, 1 layers of 16; 2 x 8 tokens, SGD, 7 steps of float64, bfloat16 on the wire"
    assert hash(recipe) == hash(replace(recipe))


def test_what_is_left_out_has_defaults(tmp_path: Path) -> None:
    recipe = Recipe.load(write(tmp_path, MODEL + DATA))
    assert recipe.model == Architecture("llama", 16, 1, 4, 4, 256, 256, 8, tie_embeddings=False, dropout=0.0)
    assert (recipe.optimizer, recipe.schedule, recipe.train) == (Optimizer(), None, Train())
    for published in ("llama2-7b", "llama2-13b"):
        model = Recipe.load(published).model
        assert isinstance(model, Architecture)
        text = f'[model]\nfamily = "llama"\nhidden = {model.hidden}\nlayers = 1\nheads = {model.heads}\n' + DATA
        usual = Recipe.load(write(tmp_path, text)).model
        assert isinstance(usual, Architecture)
        assert usual.ffn == model.ffn


WRONG = [
    ("", r"there is no \[model\] table"),
    (MODEL, r"there is no \[data\] table"),
    ("model = 3\n" + DATA, r"write it as a \[model\] table"),
    (MODEL + DATA + "[optimiser]", "unknown table or key 'optimiser'; did you mean 'optimizer'"),
    (MODEL + "hiden = 3\n" + DATA, r"\[model\] has no key 'hiden'; did you mean 'hidden'"),
    (MODEL + DATA + "[train]\nstep = 3", "did you mean 'steps'"),
    (MODEL + DATA + "[train]\nsteps = 0", "steps is 0; give a whole number from 1"),
    (MODEL + DATA + "[train]\nsteps = 1.5", "steps is 1.5"),
    (MODEL + DATA + "[train]\nsteps = true", "steps is True"),
    (MODEL + DATA + "[train]\nclip_norm = nan", "clip_norm is nan"),
    (MODEL + DATA + "[train]\nclip_norm = 0", "clip_norm is 0; give a number above 0"),
    (MODEL + DATA + '[train]\nwire = "bf16"', "wire is 'bf16'; did you mean 'bfloat16'"),
    (MODEL + DATA + '[train]\ndtype = "fp32"', "dtype is 'fp32'; did you mean 'float32'"),
    (MODEL + DATA + "[optimizer]\nlr = 1", "has no 'name'"),
    (MODEL + DATA + '[optimizer]\nname = "SGD"\nlr = -1', "lr is -1"),
    (MODEL + DATA + '[optimizer]\nname = "SGD"\nmomentum = inf', "momentum is inf"),
    (MODEL + DATA + '[optimizer]\nname = "SGD"\nmomentum = {}', "momentum is {}"),
    (MODEL + DATA + "[schedule]", "is empty"),
    (MODEL + DATA + "[schedule]\ngamma = 1", r"\[schedule\] has no key 'gamma'"),
    (MODEL + DATA + "[schedule]\nwarmup = -1", "warmup is -1"),
    (MODEL.replace("hidden = 16", "hidden = 18") + DATA, "hidden is 18, not a multiple of heads, 4"),
    (MODEL.replace("hidden = 16", "hidden = 12") + DATA, "hidden / heads is 3; llama needs an even number"),
    (MODEL.replace("hidden = 16", "") + DATA, "has no 'hidden'; add it"),
    (MODEL.replace("hidden = 16", "hidden = " + "9" * 40) + DATA, "hidden is 9999"),
    (MODEL.replace("layers = 1", "layers = 1_000_000") + DATA, "from 1 to 10000"),
    (MODEL.replace("llama", "lama") + DATA, "family is 'lama'; did you mean 'llama'"),
    (MODEL + "kv_heads = 3\n" + DATA, "heads is 4, not a multiple of kv_heads, 3"),
    (MODEL + "dropout = 0.1\n" + DATA, "the llama family has none"),
    (MODEL + "dropout = 1\n" + DATA, "dropout is 1; give a number of 0 or more and below 1"),
    (MODEL.replace("llama", "opt") + "kv_heads = 2\n" + DATA, "opt has one per head"),
    (MODEL + "vocab = 100\n" + DATA, "byte-level text has 256 tokens"),
    (MODEL + "positions = 4\n" + DATA, "positions is 4, below 'sequence' of 8"),
    (MODEL + 'config = "c.json"\n' + DATA, "needs exactly one of 'family', 'config', 'weights'; it has 'family' and"),
    (DATA + "[model]\nhidden = 3", "it has none of them"),
    (DATA + '[model]\nconfig = "no.json"', r"config is 'no\.json', but there is no "),
    (DATA + '[model]\nconfig = "mine.toml"\nhidden = 3', "has 'hidden' beside 'config'"),
    (MODEL + DATA.replace("python-stdlib", "web"), "kind is 'web'; valid: 'python-stdlib'"),
    (
        MODEL + DATA.replace('kind = "python-stdlib"', 'files = ["*.txt"]'),
        r"files has '\*\.txt', which matches no file",
    ),
    (MODEL + DATA.replace('kind = "python-stdlib"', "files = []"), "give a list of patterns"),
    (MODEL + DATA.replace('kind = "python-stdlib"', 'tokens = "t.npy"'), "there is no "),
    (MODEL + DATA + 'tokenizer = "mine.toml"', "'tokenizer', which goes with 'files', not with 'kind'"),
    (MODEL + DATA.replace("sequence = 8", "sequence = 1"), "sequence is 1; give a whole number from 2"),
    (MODEL + 'vocab = "x"\n' + DATA, "vocab is 'x'"),
    ("not toml", "cannot be read"),
    (b"\xff", "cannot be read"),
    ("x = " + "[" * 5000, "nested too deeply"),
]


@pytest.mark.parametrize(("text", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_a_wrong_recipe_is_named_with_the_remedy(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        Recipe.load(write(tmp_path, text))
    assert str(tmp_path / "mine.toml") in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["no-such", "", "no/such.toml", "a\0b", "x" * 5000])
def test_a_missing_recipe_is_named(name: str) -> None:
    with pytest.raises(RecipeError):
        Recipe.load(name)


def test_a_misspelled_recipe_gets_a_hint() -> None:
    with pytest.raises(RecipeError, match=r"there is no file 'tiny-lama'.* did you mean 'tiny-llama'"):
        Recipe.load("tiny-lama")


HEADS = (MODEL, DATA, "[model]", "[data]", "[optimizer]", "[schedule]", "[train]", "[[model]]", "[x]")
KEYS = (
    *("family", "config", "weights", "hidden", "heads", "ffn", "dropout", "vocab", "kind", "files", "tokens"),
    *("tokenizer", "batch", "sequence", "name", "lr", "betas", "warmup", "steps", "seed", "clip_norm", "dtype"),
)
VALUES = (
    *('"llama"', '"opt"', '"float64"', '"mine.toml"', '"\\u0000"', '["\\u0000/*"]', '["*"]', '""', '"~"', "true", "{}"),
    *("1", "0", "-1", "16", "1e400", "nan", "9" * 40, "0x" + "f" * 5000, "1979-05-27", "[[1]]", "[1, 2]"),
)
LINES = st.one_of(st.sampled_from(HEADS), st.builds("{} = {}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.lists(LINES, max_size=12).map("\n".join).map(str.encode), st.binary(max_size=60)))
def test_fuzzed_recipes_give_a_recipe_or_a_recipe_error(tmp_path: Path, text: bytes) -> None:
    with suppress(RecipeError):
        assert Recipe.load(write(tmp_path, text)).tokens_per_step >= 1


def test_reading_a_recipe_needs_no_torch() -> None:
    code = (
        "import sys; from cleave_dask.graph.recipes import Recipe; Recipe.load('tiny-llama');"
        "print({'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "set()"
