"""The model and the batches of a measurement: a small Llama of stated sizes, the same every time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Llama:
    """What is trained, and on how many tokens."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"Llama, hidden {self.hidden}, {self.layers} layers, {self.batch} x {self.length} tokens"

    def module(self) -> torch.nn.Module:
        """With the same weights every time."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
            use_cache=False,
        )
        module: torch.nn.Module = LlamaForCausalLM(config)
        return module.train()

    def tokens(self, seed: int) -> dict[str, torch.Tensor]:
        """One batch of random tokens."""
        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocabulary, (self.batch, self.length), generator=chance)
        return {"input_ids": ids, "labels": ids}
