"""Small models of many architectures, built the same way every time, with a batch for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from cleave_dask.runtime.lowering import JobSkeleton

Batch = dict[str, torch.Tensor]


def tokens(vocabulary: int = 96, batch: int = 3, length: int = 17, seed: int = 1) -> Batch:
    """Random tokens, with themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def opt(dropout: float = 0.0) -> nn.Module:
    """OPT with tied embeddings, two layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 72, "num_attention_heads": 4}
    config = OPTConfig(
        vocab_size=96, num_hidden_layers=2, max_position_embeddings=32, dropout=dropout, attention_dropout=0.0, **sizes
    )
    return _train(OPTForCausalLM(config))


def llama(tied: bool = True, layers: int = 2) -> nn.Module:
    """Llama with grouped queries: four heads, two heads of keys and values."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 56}
    config = LlamaConfig(
        vocab_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        **sizes,
    )
    return _train(LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    """GPT-2 without dropout, two layers."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return _train(GPT2LMHeadModel(config))


def _train(module: nn.Module) -> nn.Module:
    return nn.Module.train(module)


class NormedMLP(nn.Module):
    """Two linear layers with batch normalisation between them; returns the loss itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        between = (nn.BatchNorm1d(33), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else []))
        self.layers = nn.Sequential(nn.Linear(20, 33), *between, nn.Linear(33, 5))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), labels)


def mlp(dropout: float = 0.0) -> nn.Module:
    """A NormedMLP."""
    torch.manual_seed(0)
    return NormedMLP(dropout).train()


def points(count: int = 24, seed: int = 1) -> Batch:
    """Random points with random labels, for the MLP."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randn(count, 20, generator=generator),
        "labels": torch.randint(0, 5, (count,), generator=generator),
    }


def loss_of(module: nn.Module, batch: Batch) -> torch.Tensor:
    """What the module says of a batch, as plain torch computes it."""
    output = module(**batch)
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss


def many_parcels(count: int, device: str, after: tuple[int, ...] = ()) -> JobSkeleton:
    """A job of `count` parcels of one tile each, all for one device; good for submitting, not for computing."""
    cuts = np.arange(count * 7, dtype=np.int32).reshape(count, 7)
    ends, works = tuple(range(1, count + 1)), np.ones((count, 4))
    return JobSkeleton(
        "gemm", "float32", False, None, cuts, ends, (device,) * count, works, after, rank=0, filler=False
    )
