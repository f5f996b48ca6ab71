"""A decoding step of the Llama-like families on the modules' own tensors, by fused kernels.

Qwen2, Qwen3, Llama, Mistral and SmolLM3 layers are the same chain of norm, projections, rotary
positions, attention, projection, norm and gated projections. `plan_of` reads their tensors,
adapters included; nothing is copied. Any other model decodes by its own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.decode_attention import Contexts, decode_attention
from ..kernels.decode_gate import gains_ahead, gated, strips_of
from ..kernels.decode_heads import NewTokens, place
from ..kernels.decode_layer import add_norm
from ..kernels.decode_projection import MOST_RANK, Projection, project
from . import inspection
from .pool import Pool

LAYERS = {
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "SmolLM3DecoderLayer",
}


LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions of which no table can be made."""


class NotFusable(Exception):
    """Why a model has no plan."""


class AdapterCasts:
    """Adapters in the activations' type, at addresses that stay.

    An adapter is a hundredth of the weights and often held in float32, which the kernels' inner
    loop cannot stream; the weights themselves are never copied.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}

    def of(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor itself where its type fits, else the buffer for it."""
        if source.dtype == dtype:
            return source
        key = (source.data_ptr(), source.shape)
        held = self._held.get(key)
        if held is None or held[1].dtype != dtype:
            # Detached, the source stays what it is, and its address taken, if its module moves on.
            held = self._held[key] = (source.detach(), torch.empty_like(source, dtype=dtype))
        return held[1]

    def refresh(self) -> None:
        """The values of now."""
        if self._held:
            sources, buffers = zip(*self._held.values(), strict=True)
            torch._foreach_copy_(buffers, sources)

    def clear(self) -> None:
        self._held.clear()


class RopeTable:
    """Cosines and sines by position, `[P, D]`, at addresses that stay while they suffice."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor] | None = None

    def of(self, rotary: nn.Module, like: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """Those of at least so many positions, of the type and on the device of `like`."""
        held = self._held
        if held is None or len(held[0]) < positions or held[0].dtype != like.dtype:
            count = max(1_024, 1 << (positions - 1).bit_length())
            cos, sin = rotary(like, torch.arange(count, device=like.device)[None])
            held = self._held = cos[0].contiguous(), sin[0].contiguous()
        return held

    def clear(self) -> None:
        self._held = None


@dataclass(frozen=True)
class Layer:
    """One layer's tensors."""

    first_norm: Tensor
    queries_keys_values: tuple[Projection, Projection, Projection]
    head_norms: tuple[Tensor | None, Tensor | None]
    output: Projection
    second_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection
    rotates: bool
    window: int | None
    scaling: float


@dataclass(frozen=True)
class Plan:
    """A model's tensors in the order of use."""

    embedding: nn.Module
    rotation: tuple[Tensor, Tensor]
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Projection
    epsilon: float
    query_heads: int
    dtype: torch.dtype
    """Of the activations between kernels; weights may be wider."""

    def fingerprint(self) -> tuple[Any, ...]:
        """Equal for two plans that a captured graph cannot tell apart."""
        maps = [self.head]
        tensors: list[Tensor | None] = [self.norm, *self.rotation, *self.embedding.parameters()]
        for layer in self.layers:
            maps += [*layer.queries_keys_values, layer.output, layer.gate, layer.up, layer.down]
            tensors += [layer.first_norm, layer.second_norm, *layer.head_norms]
        for m in maps:
            tensors += [m.weight, m.bias, m.down, m.up]
        return (
            tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors]),
            tuple([m.scaling for m in maps]),
            tuple([(layer.rotates, layer.window, layer.scaling) for layer in self.layers]),
            self.epsilon,
            self.dtype,
        )


def plan_of(
    model: nn.Module,
    dtype: torch.dtype,
    positions: int,
    copies: AdapterCasts,
    rotations: RopeTable,
) -> Plan:
    """The model's plan for activations of that type, contexts of up to that many tokens.

    Raises NotFusable where there is none.
    """
    wrapped: Any = model
    base: Any = wrapped.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = getattr(base, "model", None)
    layers = getattr(decoder, "layers", None)
    if layers is None or {type(layer).__name__ for layer in layers} - LAYERS:
        raise NotFusable(f"{type(base).__name__} is not of a family with fused kernels")
    if inspection.has_hook(base):
        raise NotFusable("a module has a hook")
    config = base.config
    if config.hidden_act != "silu":
        raise NotFusable(f"the activation is {config.hidden_act}")
    decoder = base.model
    if getattr(decoder.rotary_emb, "rope_type", "default") in LENGTH_DEPENDENT:
        raise NotFusable("its rotary positions depend on the length of the context")
    like = next(decoder.embed_tokens.parameters()).detach()[:1]
    return Plan(
        embedding=decoder.embed_tokens,
        rotation=rotations.of(decoder.rotary_emb, like, positions),
        layers=tuple(_layer(layer, dtype, copies) for layer in layers),
        norm=decoder.norm.weight.detach(),
        head=_projection(base.lm_head, dtype, copies),
        epsilon=float(config.rms_norm_eps),
        query_heads=int(config.num_attention_heads),
        dtype=dtype,
    )


# A plan is made anew for every wave, since anything in a model may change between two. Modules are
# read by their dictionaries and tensors are not detached: each would take a millisecond or more.


def _child(module: Any, name: str) -> Any:
    """A module's own module of that name."""
    return module.__dict__["_modules"][name]


def _tensor(module: Any, name: str) -> Any:
    """A module's own tensor of that name, as a rule a parameter."""
    parameters = module.__dict__["_parameters"]
    return parameters[name] if name in parameters else getattr(module, name)


def _layer(layer: Any, dtype: torch.dtype, copies: AdapterCasts) -> Layer:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")

    def read(owner: Any, name: str) -> Projection:
        return _projection(_child(owner, name), dtype, copies)

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
    return Layer(
        first_norm=_tensor(_child(layer, "input_layernorm"), "weight"),
        queries_keys_values=three,
        head_norms=(norms[0], norms[1]),
        output=read(attention, "o_proj"),
        second_norm=_tensor(_child(layer, "post_attention_layernorm"), "weight"),
        gate=gate,
        up=up,
        down=read(mlp, "down_proj"),
        rotates=bool(getattr(attention, "use_rope", True)),
        window=window,
        scaling=float(attention.scaling),
    )


def _projection(module: Any, dtype: torch.dtype, copies: AdapterCasts) -> Projection:
    """A linear module's tensors, or those of a low-rank adapter around one."""
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
        copies.of(down_weight, dtype),
        copies.of(_tensor(up, "weight"), dtype),
        float(module.scaling[name]),
    )


def fused_logits(plan: Plan, tokens: Tensor, contexts: Contexts, pool: Pool) -> Tensor:
    """New tokens `[B]`, the last of their contexts, to logits `[B, V]`.

    Their keys and values go to the pool.
    """
    normed = fused_hidden(plan, tokens, contexts, pool)
    head = plan.head
    if head.weight.dtype == plan.dtype and head.down is None:
        return nn.functional.linear(normed, head.weight, head.bias)
    logits = project(normed, [head]).sum(0)
    return logits if head.bias is None else logits + head.bias


def fused_hidden(
    plan: Plan,
    tokens: Tensor,
    contexts: Contexts,
    pool: Pool,
    places: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The same up to the last norm, `[B, N]`.

    Tokens of prompts attend to each other: with their positions and slots as `places`, a layer
    stores the keys of all before any of them attends.
    """
    counters = _Counters(plan, len(tokens), pool)
    hidden = plan.embedding(tokens)
    parts: Tensor | None = None
    bias: Tensor | None = None
    for index, layer in enumerate(plan.layers):
        normed = add_norm(hidden, parts, bias, layer.first_norm, plan.epsilon, plan.dtype)
        keys, values = pool.keys[index], pool.values[index]
        new = _new_tokens(plan, layer, normed)
        attended = decode_attention(
            new if places is None else place(new, *places, keys, values),
            keys,
            values,
            contexts,
            layer.scaling,
            layer.window,
            arrived=counters.arrived[index],
        )
        later = (layer.gate.weight, layer.up.weight) if gains_ahead(len(tokens)) else None
        parts = project(attended.flatten(1), [layer.output], later=later)
        normed = add_norm(
            hidden, parts, layer.output.bias, layer.second_norm, plan.epsilon, plan.dtype
        )
        active = gated(normed, layer.gate, layer.up, counters.ready[index])
        parts, bias = project(active, [layer.down]), layer.down.bias
    return add_norm(hidden, parts, bias, plan.norm, plan.epsilon, plan.dtype)


class _Counters:
    """Zeros that a step's kernels count in, a row for each layer, by one fill."""

    def __init__(self, plan: Plan, rows: int, pool: Pool) -> None:
        heads = max(keys.shape[1] for keys in pool.keys.values())
        # Rounded up, since kernels are compiled anew for addresses of another alignment.
        widths = [-(-n // 32) * 32 for n in (rows * heads, strips_of(rows))]
        shape = (len(plan.layers), sum(widths))
        counts = torch.zeros(shape, dtype=torch.int32, device=plan.norm.device)
        self.arrived, self.ready = torch.split(counts, widths, dim=1)


def _new_tokens(plan: Plan, layer: Layer, normed: Tensor) -> NewTokens:
    queries, keys, values = layer.queries_keys_values
    return NewTokens(
        parts=project(normed, layer.queries_keys_values),
        biases=(queries.bias, keys.bias, values.bias),
        norms=layer.head_norms,
        epsilon=plan.epsilon,
        rotation=plan.rotation if layer.rotates else None,
        query_heads=plan.query_heads,
    )
