"""More small models than tests/models.py has, and the one question asked of all: is the captured step plain torch's?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from cleave_dask.graph.capture import capture, flatten_batch
from cleave_dask.graph.ir import StepGraph
from cleave_dask.runtime.interpreter import execute


class Encoder(nn.Module):
    """A plain nn.TransformerEncoder with a loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.encoder(x).mean(1)), y)


class Perceptron(nn.Module):
    """An MLP with batch norm, dropout in place, two constants and a frozen layer; its loss is in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2, inplace=True), nn.Linear(12, 5)
        )
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.shift = torch.linspace(-1, 1, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.frozen(self.layers(x)) + self.shift + torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
        return {"loss": functional.cross_entropy(out, y)}


class Checkpointed(nn.Module):
    """Blocks with dropout whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return functional.cross_entropy(x, y)


class Autocast(nn.Module):
    """A model that runs in bfloat16 where torch thinks that safe."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(**batch).loss
        return loss


class Layer(nn.Module):
    """A linear layer whose loss each test makes in its own way."""

    seen: torch.Tensor

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.count = torch.zeros(())
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.loss(self, *args, **kwargs)


def square(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of a Layer."""
    loss: torch.Tensor = self.linear(x).square().mean()
    return loss


def sized(config: Callable[..., Any], **settings: Any) -> Any:
    """One layer of a Hugging Face architecture."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    return config(**sizes, num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)


def qwen2() -> nn.Module:
    """Qwen2: biases in QKV, grouped heads."""
    return nn.Module.train(Qwen2ForCausalLM(sized(Qwen2Config, num_key_value_heads=2)))


def mistral() -> nn.Module:
    """Mistral: attention within a window."""
    return nn.Module.train(MistralForCausalLM(sized(MistralConfig, num_key_value_heads=2, sliding_window=4)))


def bert(attention_dropout: float = 0.0) -> nn.Module:
    """BERT: not causal, dropout between layers, the residual is the input of QKV."""
    return nn.Module.train(BertForMaskedLM(sized(BertConfig, attention_probs_dropout_prob=attention_dropout)))


def classes(*shape: int) -> dict[str, torch.Tensor]:
    """Six random tensors, each of one of five classes."""
    generator = torch.Generator().manual_seed(2)
    return {"x": torch.randn(6, *shape, generator=generator), "y": torch.randint(5, (6,), generator=generator)}


def assert_same_step(
    build: Callable[[], nn.Module],
    batch: Mapping[str, torch.Tensor],
    *,
    atol: float = 1e-6,
    rtol: float = 1e-5,
    through: Callable[[StepGraph], StepGraph] = lambda graph: graph,
) -> StepGraph:
    """Capture and execute a step; compare loss, gradients, buffers and random stream with plain torch; the graph."""
    torch.manual_seed(0)
    module = build()
    params = {name: param.detach().clone() for name, param in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    graph = through(capture(module, **batch))

    torch.manual_seed(3)
    output = module(**batch)
    eager: torch.Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    eager.backward()
    stream = torch.get_rng_state()

    torch.manual_seed(3)
    loss, grads, after = execute(graph, params, buffers, flatten_batch(graph, (), batch))
    assert torch.equal(torch.get_rng_state(), stream), "the random stream went another way"
    torch.testing.assert_close(loss, eager.detach(), atol=1e-6, rtol=0)
    expected = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    assert_close(grads, expected, atol=atol, rtol=rtol)
    assert_close(buffers | after, dict(module.named_buffers()), atol=1e-6, rtol=1e-6)
    return graph


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], *, atol: float, rtol: float) -> None:
    """Compare tensors by name, and say which differ."""
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=rtol, msg=_named(name))


def _named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"
