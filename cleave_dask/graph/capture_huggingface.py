"""Hugging Face models, unchanged: attention in one piece and no copies for a cache, only while a step is captured.

Transformers builds a (batch, 1, length, length) mask when it cannot look at tensors, as in a trace. What is known of a
tensor can be looked at: then plain causal and plain full attention need no mask, and stay one op forward and one
backward, with as many key and value heads as the model has. Any other mask (sliding windows, packed sequences, a
mask that the module computes) is built and obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cleave_dask.errors import CaptureError

WHOLE = "sdpa"  # transformers' name for torch's scaled_dot_product_attention


def pretrained_models(module: Any) -> list[Any]:
    """The transformers models inside a module. Never imports transformers: where it is not loaded there are none."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    return [part for part in module.modules() if isinstance(part, library.PreTrainedModel)]


@contextmanager
def adapted(module: Any, *, knows: Callable[[Any], bool]) -> Iterator[None]:
    """Within this context the transformers models of a module can be traced; afterwards they are as before."""
    models = pretrained_models(module)
    with ExitStack() as stack:

        def swap(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        if models:
            masks = _library("masking_utils", "is_tracing")
            swap(masks, "is_tracing", lambda tensor=None: tensor is not None and not knows(tensor))
            caches = _library("cache_utils", "DynamicLayer", "DynamicSlidingWindowLayer")
            for layer in (caches.DynamicLayer, caches.DynamicSlidingWindowLayer):
                swap(layer, "update", _without_copies(layer.update))
        for model in models:
            # "eager" stays: it was chosen, or the model knows nothing else.
            if model.config._attn_implementation not in ("eager", WHOLE) and model._supports_sdpa:
                swap(model.config, "_attn_implementation_internal", WHOLE)
        yield


def _library(name: str, *attributes: str) -> Any:
    """A module of transformers that has these attributes."""
    library: Any = sys.modules.get(f"transformers.{name}")
    for attribute in attributes:
        if not hasattr(library, attribute):
            version = sys.modules["transformers"].__version__
            raise CaptureError(f"transformers {version} has no {name}.{attribute}: install transformers 5.22")
    return library


def _without_copies(update: Callable[..., Any]) -> Callable[..., Any]:
    """How a layer of a cache takes its first keys and values: as they are. A training step never adds others."""

    def take(layer: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.is_initialized:
            return update(layer, key_states, value_states, *args, **kwargs)
        layer.dtype, layer.device = key_states.dtype, key_states.device
        layer.keys, layer.values, layer.is_initialized = key_states, value_states, True
        return key_states, value_states

    return take
