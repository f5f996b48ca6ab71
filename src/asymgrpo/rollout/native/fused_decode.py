"""A decoding step of Llama-like models by fused kernels, on the modules' own tensors.

Qwen2, Qwen3, Llama, Mistral and SmolLM3 layers are the same sequence of RMSNorm, QKV projections,
RoPE, attention, output projection, RMSNorm and SwiGLU. `build_plan` collects their tensors, LoRA
adapters included, without copying weights. All other models decode by their own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.decode.add_rmsnorm import add_rmsnorm
from ...kernels.decode.decode_attention import Contexts, decode_attention
from ...kernels.decode.decode_projection import MOST_RANK, Projection, project
from ...kernels.decode.decode_qkv import NewTokens, write_kv
from ...kernels.decode.decode_swiglu import prefetch_helps, swiglu, swiglu_counters
from ...models.description import causal_model
from ...models.module_state import has_hook
from .kv_pool import KVPool

LAYERS = {
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "SmolLM3DecoderLayer",
}
"""Decoder layers that the kernels cover."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of RoPE whose angles depend on the length, so that no table can hold them."""


class NotFusable(Exception):
    """Why a model cannot be decoded by the fused kernels."""


class AdapterCasts:
    """LoRA matrices cast to the activations' dtype, at fixed addresses.

    Adapters are often in float32, which the kernels' inner loop cannot stream. They are a hundredth
    of the weights; the weights themselves are never copied.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}

    def get(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself if it has this dtype, otherwise its buffer."""
        if source.dtype == dtype:
            return source
        key = (source.data_ptr(), source.shape)
        held = self._held.get(key)
        if held is None or held[1].dtype != dtype:
            # Detached, so that the source keeps its storage, and the key stays unique, when the
            # module's parameter moves to other storage.
            held = self._held[key] = (source.detach(), torch.empty_like(source, dtype=dtype))
        return held[1]

    def refresh(self) -> None:
        """Copies the current values into the buffers."""
        if self._held:
            sources, buffers = zip(*self._held.values(), strict=True)
            torch._foreach_copy_(buffers, sources)

    def clear(self) -> None:
        self._held.clear()


class RopeTable:
    """Cosines and sines by position, `[P, D]`, at fixed addresses until more are needed."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def get(self, rotary: nn.Module, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """The table for at least `positions`, with the dtype and device of `like`."""
        held = self._held
        if held is None or len(held[0]) < positions or held[0].dtype != like.dtype:
            count = max(1_024, 1 << (positions - 1).bit_length())
            cos, sin = rotary(like, torch.arange(count, device=like.device)[None])
            held = self._held = cos[0].contiguous(), sin[0].contiguous()
        return held

    def clear(self) -> None:
        self._held = None


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer."""

    first_norm: Tensor
    queries_keys_values: tuple[Projection, Projection, Projection]
    head_norms: tuple[Tensor | None, Tensor | None]
    output: Projection
    second_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection
    rope: bool
    window: int | None
    scaling: float


@dataclass(frozen=True)
class DecodePlan:
    """A model's tensors, in order of use."""

    embedding: nn.Module
    rope: tuple[Tensor, Tensor]
    layers: tuple[LayerTensors, ...]
    norm: Tensor
    head: Projection
    epsilon: float
    query_heads: int
    dtype: torch.dtype
    """Of the activations; weights may be wider."""

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two plans that the same captured graph serves."""
        maps = [self.head]
        tensors: list[Tensor | None] = [self.norm, *self.rope, *self.embedding.parameters()]
        for layer in self.layers:
            maps += [*layer.queries_keys_values, layer.output, layer.gate, layer.up, layer.down]
            tensors += [layer.first_norm, layer.second_norm, *layer.head_norms]
        for m in maps:
            tensors += [m.weight, m.bias, m.down, m.up]
        return (
            tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors]),
            tuple([m.scaling for m in maps]),
            tuple([(layer.rope, layer.window, layer.scaling) for layer in self.layers]),
            self.epsilon,
            self.dtype,
        )


def build_plan(
    model: nn.Module,
    dtype: torch.dtype,
    positions: int,
    casts: AdapterCasts,
    rope_table: RopeTable,
) -> DecodePlan:
    """The plan for activations of `dtype` and contexts of up to `positions` tokens.

    Raises NotFusable if the kernels do not cover the model.
    """
    base: Any = causal_model(model)
    decoder = getattr(base, "model", None)
    layers = getattr(decoder, "layers", None)
    if layers is None or {type(layer).__name__ for layer in layers} - LAYERS:
        raise NotFusable(f"{type(base).__name__} is not of a family with fused kernels")
    if has_hook(base):
        raise NotFusable("a module has a hook")
    config = base.config
    if config.hidden_act != "silu":
        raise NotFusable(f"the activation is {config.hidden_act}")
    decoder = base.model
    if getattr(decoder.rotary_emb, "rope_type", "default") in LENGTH_DEPENDENT:
        raise NotFusable("its rotary positions depend on the length of the context")
    like = next(decoder.embed_tokens.parameters()).detach()[:1]
    return DecodePlan(
        embedding=decoder.embed_tokens,
        rope=rope_table.get(decoder.rotary_emb, like, positions),
        layers=tuple(_layer(layer, dtype, casts) for layer in layers),
        norm=decoder.norm.weight.detach(),
        head=_projection(base.lm_head, dtype, casts),
        epsilon=float(config.rms_norm_eps),
        query_heads=int(config.num_attention_heads),
        dtype=dtype,
    )


# The plan is rebuilt for every batch, since anything in the model may have changed. Modules are
# read through their dictionaries and tensors are not detached: either would cost a millisecond.


def _child(module: Any, name: str) -> Any:
    """A child module by name."""
    return module.__dict__["_modules"][name]


def _tensor(module: Any, name: str) -> Any:
    """A module's tensor by name, usually a parameter."""
    parameters = module.__dict__["_parameters"]
    return parameters[name] if name in parameters else getattr(module, name)


def _layer(layer: Any, dtype: torch.dtype, casts: AdapterCasts) -> LayerTensors:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")

    def read(owner: Any, name: str) -> Projection:
        return _projection(_child(owner, name), dtype, casts)

    norms = [
        _tensor(_child(attention, name), "weight")
        if name in attention.__dict__["_modules"]
        else None
        for name in ("q_norm", "k_norm")
    ]
    three = read(attention, "q_proj"), read(attention, "k_proj"), read(attention, "v_proj")
    if len({projection.bias is None for projection in three}) > 1:
        raise NotFusable("only some of queries, keys and values have a bias")
    gate, up = read(mlp, "gate_proj"), read(mlp, "up_proj")
    if gate.bias is not None or up.bias is not None:
        raise NotFusable("the gate has a bias")
    window = getattr(attention, "sliding_window", None)
    if type(layer).__name__ == "MistralDecoderLayer":
        window = attention.config.sliding_window
    return LayerTensors(
        first_norm=_tensor(_child(layer, "input_layernorm"), "weight"),
        queries_keys_values=three,
        head_norms=(norms[0], norms[1]),
        output=read(attention, "o_proj"),
        second_norm=_tensor(_child(layer, "post_attention_layernorm"), "weight"),
        gate=gate,
        up=up,
        down=read(mlp, "down_proj"),
        rope=bool(getattr(attention, "use_rope", True)),
        window=window,
        scaling=float(attention.scaling),
    )


def _projection(module: Any, dtype: torch.dtype, casts: AdapterCasts) -> Projection:
    """The tensors of a linear layer, with or without a LoRA adapter around it."""
    if type(module) is nn.Linear:
        return Projection(_tensor(module, "weight"), _tensor(module, "bias"))
    children = module.__dict__["_modules"]
    base = children.get("base_layer")
    if type(base) is not nn.Linear or "lora_A" not in children:
        raise NotFusable(f"a projection is a {type(module).__name__}")
    if module.merged:
        raise NotFusable("an adapter is merged")
    weight, bias = _tensor(base, "weight"), _tensor(base, "bias")
    downs = children["lora_A"].__dict__["_modules"]
    active = [name for name in module.active_adapters if name in downs]
    if module.disable_adapters or not active:
        return Projection(weight, bias)
    name = active[0]
    down, up = downs[name], _child(children["lora_B"], name)
    down_weight = _tensor(down, "weight")
    special = getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(name)
    if down_weight.shape[0] > MOST_RANK:
        raise NotFusable(f"an adapter has a rank above {MOST_RANK}")
    if len(active) > 1 or special or _tensor(up, "bias") is not None or type(down) is not nn.Linear:
        raise NotFusable("an adapter is not a single plain LoRA")
    return Projection(
        weight,
        bias,
        casts.get(down_weight, dtype),
        casts.get(_tensor(up, "weight"), dtype),
        float(module.scaling[name]),
    )


def fused_logits(plan: DecodePlan, tokens: Tensor, contexts: Contexts, pool: KVPool) -> Tensor:
    """Logits `[B, V]` after new tokens `[B]`, each the last of its context.

    Their keys and values are written to the pool.
    """
    normed = fused_hidden(plan, tokens, contexts, pool)
    head = plan.head
    if head.weight.dtype == plan.dtype and head.down is None:
        return nn.functional.linear(normed, head.weight, head.bias)
    logits = project(normed, [head]).sum(0)
    return logits if head.bias is None else logits + head.bias


def fused_hidden(
    plan: DecodePlan,
    tokens: Tensor,
    contexts: Contexts,
    pool: KVPool,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The hidden states after the last norm, `[B, N]`.

    Tokens of a prompt attend to each other. Given their positions and slots as `places`, a layer
    stores the keys of all tokens before any of them attends.
    """
    counters = _Counters(plan, len(tokens), pool)
    hidden = plan.embedding(tokens)
    parts: Tensor | None = None
    bias: Tensor | None = None
    for index, layer in enumerate(plan.layers):
        normed = add_rmsnorm(hidden, parts, bias, layer.first_norm, plan.epsilon, plan.dtype)
        keys, values = pool.keys[index], pool.values[index]
        new = _new_tokens(plan, layer, normed)
        attended = decode_attention(
            new if places is None else write_kv(new, *places, keys, values),
            keys,
            values,
            contexts,
            layer.scaling,
            layer.window,
            arrived=counters.arrived[index],
        )
        ahead = (layer.gate.weight, layer.up.weight) if prefetch_helps(len(tokens)) else None
        parts = project(attended.flatten(1), [layer.output], prefetch=ahead)
        normed = add_rmsnorm(
            hidden, parts, layer.output.bias, layer.second_norm, plan.epsilon, plan.dtype
        )
        active = swiglu(normed, layer.gate, layer.up, counters.swiglu[index])
        parts, bias = project(active, [layer.down]), layer.down.bias
    return add_rmsnorm(hidden, parts, bias, plan.norm, plan.epsilon, plan.dtype)


class _Counters:
    """Zeroed counters for the kernels of a step, one row per layer, with a single fill."""

    def __init__(self, plan: DecodePlan, rows: int, pool: KVPool) -> None:
        heads = max(keys.shape[1] for keys in pool.keys.values())
        # Rounded up: kernels are specialised on the alignment of addresses.
        widths = [-(-n // 32) * 32 for n in (rows * heads, swiglu_counters(rows))]
        shape = (len(plan.layers), sum(widths))
        counts = torch.zeros(shape, dtype=torch.int32, device=plan.norm.device)
        self.arrived, self.swiglu = torch.split(counts, widths, dim=1)


def _new_tokens(plan: DecodePlan, layer: LayerTensors, normed: Tensor) -> NewTokens:
    queries, keys, values = layer.queries_keys_values
    return NewTokens(
        parts=project(normed, layer.queries_keys_values),
        biases=(queries.bias, keys.bias, values.bias),
        norms=layer.head_norms,
        epsilon=plan.epsilon,
        rope=plan.rope if layer.rope else None,
        query_heads=plan.query_heads,
    )
