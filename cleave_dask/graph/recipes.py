"""A recipe: what to train, on what, and how, as one TOML file that a person edits.

    [model]                       # one of `family`, `config` and `weights`
    family = "llama"              # "llama", "opt" or "gpt2", with dimensions:
    hidden = 256                  #   hidden, layers, heads; and, if the usual ones will not do,
    layers = 2                    #   kv_heads, ffn, vocab, positions, tie_embeddings, dropout
    heads = 8
    # config = "config.json"      # a local Hugging Face configuration: any architecture, fresh weights
    # weights = "my-model"        # a local Hugging Face folder: its architecture and its safetensors

    [data]                        # one of `kind`, `files` and `tokens`
    kind = "python-stdlib"        # bytes of the standard library's own source: always there, nothing to download
    # files = ["*.txt"]           # your own text, byte by byte, or by `tokenizer = "tokenizer.json"`
    # tokens = "tokens.npy"       # or .bin: raw numbers of `token_dtype`, "uint16" unless said
    batch = 16                    # sequences in one forward and backward pass
    sequence = 128                # tokens in each

    [optimizer]                   # AdamW at 3e-4 if left out
    name = "AdamW"                # a class of torch.optim; every other key is a keyword of it
    lr = 2e-3

    [schedule]                    # may be left out: a constant learning rate
    name = "CosineAnnealingLR"    # a class of torch.optim.lr_scheduler; other keys are its keywords
    warmup = 5                    # steps of linear warm-up before it; may also stand alone

    [train]                       # may be left out
    steps = 100                   # optimizer updates
    seed = 0                      # decides initial weights and data
    accumulate = 1                # batches whose gradients make one update
    clip_norm = 1.0               # no clipping if left out
    dtype = "float32"             # of weights and gemms: "float32", "bfloat16" or "float64"
    wire = "bfloat16"             # numbers of gemms are rounded to it on their way; as they are if left out

Paths are relative to the recipe. Nothing here imports torch: `cleave_dask.graph.building` makes modules, optimizers
and batches out of a recipe.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any, Literal, Self, get_args

from cleave_dask.errors import RecipeError
from cleave_dask.graph.corpora import BYTES
from cleave_dask.graph.ir import WIRES
from cleave_dask.resources import graphs_folder, nearest, read_toml, shown

Family = Literal["llama", "opt", "gpt2"]
Dtype = Literal["float32", "bfloat16", "float64"]
TokenDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
Keywords = tuple[tuple[str, Any], ...]
"""Keyword arguments as a value: (name, value) pairs."""

_LARGEST = 10**9  # for any count or dimension
_HUGE = 1e300  # beyond it a number is a slip, and arithmetic overflows
_DIMENSIONS = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "positions", "tie_embeddings", "dropout")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of a known family, by its dimensions."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int  # fewer than heads: groups of heads share keys and values
    ffn: int  # inner width of the feed-forward part
    vocab: int
    positions: int  # longest sequence
    tie_embeddings: bool  # input and output embeddings are one weight
    dropout: float


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine's disk, as Hugging Face tools write it."""

    path: Path  # config.json, or the folder that holds it
    pretrained: bool  # start from the folder's safetensors, not from fresh weights


@dataclass(frozen=True, slots=True)
class Data:
    """Where the tokens come from, and how many make a batch."""

    batch: int  # sequences
    sequence: int  # tokens of each
    files: tuple[Path, ...] = ()  # text; empty, and no tokens: the standard library's source
    tokenizer: Path | None = None  # None: byte by byte
    tokens: Path | None = None
    token_dtype: TokenDtype = "uint16"  # of raw token files

    @property
    def byte_level(self) -> bool:
        """Whether each token is a byte of text."""
        return self.tokenizer is None and self.tokens is None


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A class of torch.optim and its keywords."""

    name: str = "AdamW"
    keywords: Keywords = (("lr", 3e-4),)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A class of torch.optim.lr_scheduler and its keywords, after a linear warm-up."""

    name: str | None = None  # None: constant after the warm-up
    keywords: Keywords = ()
    warmup: int = 0  # steps


@dataclass(frozen=True, slots=True)
class Train:
    """How long, from which seed, and in which precision."""

    steps: int = 100
    seed: int = 0
    accumulate: int = 1  # batches whose gradients make one update
    clip_norm: float | None = None
    dtype: Dtype = "float32"
    wire: str | None = None  # what numbers of gemms are rounded to on their way; None: nothing


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to train, on what, and how."""

    name: str
    model: Architecture | LocalModel
    data: Data
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule | None = None
    train: Train = field(default_factory=Train)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a recipe file; a bare name such as "tiny-llama" is one that ships with the package."""
        file, tables = read_toml(path, shipped=graphs_folder(), error=RecipeError)
        readers = _readers(file, tables)
        data = _read_data(readers["data"])
        return cls(
            name=file.stem,
            model=_read_model(readers["model"], data),
            data=data,
            optimizer=_read_optimizer(readers["optimizer"]) if "optimizer" in tables else Optimizer(),
            schedule=_read_schedule(readers["schedule"]) if "schedule" in tables else None,
            train=_read_train(readers["train"]),
        )

    def over(self, wire: str | None) -> Self:
        """The same recipe with numbers that travel as `wire`; None leaves it as it is."""
        return self if wire is None else replace(self, train=replace(self.train, wire=wire))

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer update has seen."""
        return self.data.batch * self.data.sequence * self.train.accumulate

    def __str__(self) -> str:
        model = self.model
        what = (
            f"{model.family}, {model.layers} layers of {model.hidden}"
            if isinstance(model, Architecture)
            else str(model.path)
        )
        size = f"{self.data.batch} x {self.data.sequence} tokens"
        precision = self.train.dtype + (f", {self.train.wire} on the wire" if self.train.wire else "")
        return f"{self.name}: {what}; {size}, {self.optimizer.name}, {self.train.steps} steps of {precision}"


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of a recipe file, read key by key; every complaint names file, table and key."""

    file: Path
    name: str
    values: dict[str, Any]

    def complain(self, text: str) -> RecipeError:
        return RecipeError(f"{self.file}: [{self.name}] {text}")

    def check_keys(self, *known: str) -> None:
        for key in self.values:
            if key not in known:
                raise self.complain(f"has no key {shown(key)}; {nearest(key, known)}")

    def one_of(self, *keys: str) -> str:
        """The only one of these keys that is given."""
        given = [key for key in keys if key in self.values]
        if len(given) != 1:
            count = f"has {' and '.join(map(repr, given))}" if given else "has none of them"
            raise self.complain(f"needs exactly one of {', '.join(map(repr, keys))}; it {count}")
        return given[0]

    def get(self, key: str, default: Any) -> Any:
        """The value of a key; no default (`...`) means that it must be given."""
        if key not in self.values and default is ...:
            raise self.complain(f"has no {key!r}; add it")
        return self.values.get(key, default)

    def integer(self, key: str, default: Any = ..., *, least: int = 1, most: int = _LARGEST) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.complain(f"{key} is {shown(value)}; give a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: Any = ..., *, below: float = _HUGE, zero: bool = False) -> float:
        value = self.get(key, default)
        if not _is_number(value) or not 0 <= value < below or (value == 0 and not zero):
            least = "of 0 or more" if zero else "above 0"
            raise self.complain(f"{key} is {shown(value)}; give a number {least} and below {below:g}")
        return float(value)

    def text(self, key: str, default: Any = ...) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.complain(f"{key} is {shown(value)}; give a text in quotes")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Any = ...) -> Any:
        value = self.text(key, default)
        if value not in choices:
            raise self.complain(f"{key} is {shown(value)}; {nearest(value, choices)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.complain(f"{key} is {shown(value)}; give true or false")
        return value

    def path(self, key: str) -> Path:
        """An existing file or folder, relative to the recipe."""
        path = os.path.join(self.file.parent, os.path.expanduser(self.text(key)))
        if not os.path.exists(path):
            raise self.complain(f"{key} is {shown(self.values[key])}, but there is no {path}; correct the path")
        return Path(path)

    def keywords(self, *other: str) -> Keywords:
        """Every key but those in `other`, as keyword arguments for a class of torch."""
        self.number("lr", 1.0)
        return tuple((key, self._keyword(key, value)) for key, value in self.values.items() if key not in other)

    def _keyword(self, key: str, value: Any) -> Any:
        if isinstance(value, bool | str) or _is_number(value):
            return value
        if isinstance(value, list) and all(_is_number(item) for item in value):
            return tuple(value)
        raise self.complain(
            f"{key} is {shown(value)}; give a finite number, a text, true or false, or a list of numbers"
        )


def _is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold: no bool, nan or infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _HUGE


def _readers(file: Path, tables: dict[str, Any]) -> dict[str, _Table]:
    """A reader for each table of a recipe; empty for those that are left out."""
    known = ("model", "data", "optimizer", "schedule", "train")
    for name, table in tables.items():
        if name not in known:
            raise RecipeError(f"{file}: unknown table or key {shown(name)}; {nearest(name, known)}")
        if not isinstance(table, dict):
            raise RecipeError(f"{file}: {name} is {shown(table)}; write it as a [{name}] table")
    for name in ("model", "data"):
        if name not in tables:
            raise RecipeError(f"{file}: there is no [{name}] table; add it")
    return {name: _Table(file, name, tables.get(name, {})) for name in known}


def _read_model(table: _Table, data: Data) -> Architecture | LocalModel:
    table.check_keys("family", "config", "weights", *_DIMENSIONS)
    source = table.one_of("family", "config", "weights")
    if source == "family":
        return _read_architecture(table, data)
    for key in _DIMENSIONS:
        if key in table.values:
            raise table.complain(f"has {key!r} beside {source!r}, which says it already; remove {key!r}")
    return LocalModel(path=table.path(source), pretrained=source == "weights")


def _read_architecture(table: _Table, data: Data) -> Architecture:
    family: Family = table.choice("family", get_args(Family))
    hidden, heads = table.integer("hidden"), table.integer("heads")
    # Llama's width is 8/3 of hidden, in multiples of 256: 11008 for 4096, 13824 for 5120.
    usual_ffn = -(-8 * hidden // (3 * 256)) * 256 if family == "llama" else 4 * hidden
    model = Architecture(
        family=family,
        hidden=hidden,
        layers=table.integer("layers", most=10_000),
        heads=heads,
        kv_heads=table.integer("kv_heads", heads),
        ffn=table.integer("ffn", min(usual_ffn, _LARGEST)),
        vocab=table.integer("vocab", BYTES if data.byte_level else ...),
        positions=table.integer("positions", data.sequence),
        tie_embeddings=table.boolean("tie_embeddings", family != "llama"),
        dropout=table.number("dropout", 0.0, below=1.0, zero=True),
    )
    _check_architecture(table, model, data)
    return model


def _check_architecture(table: _Table, model: Architecture, data: Data) -> None:
    """Dimensions that cannot go together, each with the remedy."""
    if model.hidden % model.heads:
        raise table.complain(f"hidden is {model.hidden}, not a multiple of heads, {model.heads}; change one of them")
    if model.heads % model.kv_heads:
        raise table.complain(
            f"heads is {model.heads}, not a multiple of kv_heads, {model.kv_heads}; change one of them"
        )
    if model.family == "llama" and model.hidden // model.heads % 2:
        raise table.complain(f"hidden / heads is {model.hidden // model.heads}; llama needs an even number")
    if model.family == "llama" and model.dropout:
        raise table.complain(f"dropout is {model.dropout}, but the llama family has none; remove it")
    if model.family != "llama" and model.kv_heads != model.heads:
        raise table.complain(f"kv_heads is {model.kv_heads}, but {model.family} has one per head; remove it")
    if data.byte_level and model.vocab < BYTES:
        raise table.complain(f"vocab is {model.vocab}, but byte-level text has {BYTES} tokens; raise it or remove it")
    if model.positions < data.sequence:
        raise table.complain(
            f"positions is {model.positions}, below 'sequence' of {data.sequence}; raise it or remove it"
        )


def _read_data(table: _Table) -> Data:
    table.check_keys("kind", "files", "tokens", "tokenizer", "token_dtype", "batch", "sequence")
    source = table.one_of("kind", "files", "tokens")
    for key, owner in (("tokenizer", "files"), ("token_dtype", "tokens")):
        if key in table.values and source != owner:
            raise table.complain(f"has {key!r}, which goes with {owner!r}, not with {source!r}; remove it")
    if source == "kind":
        table.choice("kind", ("python-stdlib",))
    return Data(
        batch=table.integer("batch"),
        sequence=table.integer("sequence", least=2),
        files=_read_files(table) if source == "files" else (),
        tokenizer=table.path("tokenizer") if "tokenizer" in table.values else None,
        tokens=table.path("tokens") if source == "tokens" else None,
        token_dtype=table.choice("token_dtype", get_args(TokenDtype), "uint16"),
    )


def _read_files(table: _Table) -> tuple[Path, ...]:
    """The files that the patterns name, each once, in the order of their paths."""
    patterns = table.values["files"]
    if not isinstance(patterns, list) or not patterns or not all(isinstance(item, str) for item in patterns):
        raise table.complain(f'files is {shown(patterns)}; give a list of patterns such as ["*.txt"]')
    root = table.file.parent
    found: set[Path] = set()
    for pattern in patterns:
        matches = [root / name for name in glob(os.path.expanduser(pattern), root_dir=root, recursive=True)]
        files = [path for path in matches if path.is_file()]
        if not files:
            raise table.complain(f"files has {shown(pattern)}, which matches no file under {root}; correct it")
        found.update(files)
    return tuple(sorted(found))


def _read_optimizer(table: _Table) -> Optimizer:
    return Optimizer(name=table.text("name"), keywords=table.keywords("name"))


def _read_schedule(table: _Table) -> Schedule:
    if not table.values:
        raise table.complain("is empty; give it a 'name', or 'warmup', or remove it")
    schedule = Schedule(
        name=table.text("name") if "name" in table.values else None,
        keywords=table.keywords("name", "warmup"),
        warmup=table.integer("warmup", 0, least=0),
    )
    if schedule.name is None:
        table.check_keys("name", "warmup")
    return schedule


def _read_train(table: _Table) -> Train:
    table.check_keys("steps", "seed", "accumulate", "clip_norm", "dtype", "wire")
    return Train(
        steps=table.integer("steps", 100),
        seed=table.integer("seed", 0, least=0, most=2**63 - 1),
        accumulate=table.integer("accumulate", 1),
        clip_norm=table.number("clip_norm") if "clip_norm" in table.values else None,
        dtype=table.choice("dtype", get_args(Dtype), "float32"),
        wire=table.choice("wire", WIRES, WIRES[0]) if "wire" in table.values else None,
    )
