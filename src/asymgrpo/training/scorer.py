"""Log-probs and entropies of rollouts from a packed forward pass.

Equal to scoring the padded batch, but without padding, with each prompt computed once, and without
materialising the logits. The pass goes through the trainer's model, wrappers included, so that
data-parallel training synchronises gradients as usual: during a call, the causal model's forward is
replaced by the packed one.

B rollouts, T completion columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from asymgrpo.kernels.packed_attention import BLOCK, NAME, PackedPlan
from asymgrpo.kernels.token_statistics import token_statistics
from asymgrpo.models.description import causal_model, logit_scale, text_config, unsupported
from asymgrpo.models.module_state import decoding
from asymgrpo.models.self_test import (
    PREFIX,
    compute_types,
    disagreement,
    own_logits,
    probe_tokens,
)
from asymgrpo.training.budget import TokenBudget
from asymgrpo.training.packing import Group, cut, group_rollouts, pack
from asymgrpo.training.replay import replay

Scores = tuple[Tensor, Tensor]


class PackedScorer:
    """Scores rollouts in packed form.

    `temperature` divides the logits. `float32_head` computes the output embedding's product in
    float32. `compile_layers` compiles each decoder layer; by default on a GPU. `token_budget`
    caps the packed tokens whose activations are held at once; by default it is measured on a GPU
    and unlimited elsewhere. `say` receives a line when something changes that a user should know.
    `free_memory` is called when memory is short, before anything is cut, and says whether it
    freed some.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        float32_head: bool = False,
        compile_layers: bool | None = None,
        token_budget: int | None = None,
        say: Callable[[str], None] = print,
        free_memory: Callable[[], bool] = lambda: False,
    ) -> None:
        self.temperature = temperature
        self.float32_head = float32_head
        self.compile_layers = compile_layers
        self.budget = TokenBudget(token_budget, say, free_memory)
        self._flex: bool | None = None
        self._compiled: dict[int, Callable[..., Any]] = {}

    def supports(self, model: nn.Module) -> str | None:
        """Why `model` cannot be scored in packed form, or None where it can."""
        reason = unsupported(model, "score")
        return reason if reason is not None else self._self_test(model)

    def score(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *,
        compute_entropy: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies [B, T] of the last T = `logits_to_keep` columns; 0 where masked.

        `input_ids` and `attention_mask` are [B, L], prompts padded on the left and completions on
        the right. The gradient reaches the model through both.
        """
        if input_ids.ndim != 2 or input_ids.shape != attention_mask.shape:
            raise ValueError(
                f"input_ids {tuple(input_ids.shape)} and attention_mask "
                f"{tuple(attention_mask.shape)} must both be [B, L]"
            )
        groups = group_rollouts(input_ids, attention_mask, logits_to_keep)
        causal = causal_model(model)

        def forward(*_: Any, **__: Any) -> Scores:
            return self._within_budget(causal, groups, input_ids.device)

        with _forward_replaced(causal, forward):
            logps, entropies = model(input_ids=input_ids)
        slots = _slots(groups, input_ids.device)
        shape = (len(input_ids), logits_to_keep)
        logps = _placed(logps, slots, shape)
        return logps, _placed(entropies, slots, shape) if compute_entropy else None

    def _within_budget(
        self, causal: nn.Module, groups: list[Group], device: torch.device
    ) -> Scores:
        """Score groups in as few passes as memory allows, in their order."""
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in causal.parameters())
        tokens = sum(group.fed for group in groups)

        def run(chunk: list[Group]) -> Scores:
            return self._pass(causal, chunk, device)

        self.budget.measure(run, groups, causal, device, trains)
        while True:
            chunks = cut(groups, self.budget.tokens(trains))
            # The exception holds on to the pass's tensors, so memory is freed only past its block.
            with contextlib.suppress(torch.OutOfMemoryError):
                if len(chunks) == 1:
                    return run(groups)
                if trains:
                    return replay(run, chunks, causal, self.budget)
                parts = [run(chunk) for chunk in chunks]
                return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
            self.budget.halve(trains, tokens)

    def _pass(self, causal: nn.Module, groups: list[Group], device: torch.device) -> Scores:
        flex = device.type == "cuda" if self._flex is None else self._flex
        batch = pack(groups, device, BLOCK if flex else 1)
        backbone: Any = causal.base_model
        plan = PackedPlan(batch.segments, device, flex).prepare(_windows(backbone.config))
        with self._packed_layers(backbone, flex):
            hidden = backbone(
                input_ids=batch.tokens[None],
                position_ids=batch.positions[None],
                use_cache=False,
                packed=plan,
            ).last_hidden_state[0]
        return self._head(causal, hidden.index_select(0, batch.sources), batch.targets)

    def _head(self, causal: Any, hidden: Tensor, targets: Tensor) -> Scores:
        head = causal.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        config = text_config(causal)
        widened: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.float32_head:
            hidden, weight = hidden.float(), weight.float()
            widened = torch.autocast(hidden.device.type, enabled=False)
        with widened:
            return token_statistics(
                hidden.to(weight.device),
                weight,
                bias,
                targets.to(weight.device),
                temperature=self.temperature,
                soft_cap=getattr(config, "final_logit_softcapping", None),
                logit_scale=logit_scale(config),
            )

    @contextlib.contextmanager
    def _packed_layers(self, backbone: Any, flex: bool) -> Iterator[None]:
        """Let the layers attend in packed form, compiled where asked, and hold their activations.

        Layers that the trainer set to recompute do so only where the budget asks for it, which
        `replay` sees to.
        """
        config, layers = backbone.config, list(getattr(backbone, "layers", ()))
        before = config._attn_implementation
        checkpointed = [layer for layer in layers if getattr(layer, "gradient_checkpointing", 0)]
        compile_layers = flex if self.compile_layers is None else self.compile_layers
        config._attn_implementation = NAME
        for layer in checkpointed:
            layer.gradient_checkpointing = False
        if compile_layers:
            for layer in layers:
                layer._compiled_call_impl = self._compiled_layer(layer)
        try:
            # Every layer type, adapter state and gradient mode is a graph of its own.
            with torch._dynamo.config.patch(recompile_limit=64):
                yield
        finally:
            config._attn_implementation = before
            for layer in checkpointed:
                layer.gradient_checkpointing = True
            if compile_layers:
                for layer in layers:
                    layer._compiled_call_impl = None

    def _compiled_layer(self, layer: nn.Module) -> Callable[..., Any]:
        if id(layer) not in self._compiled:
            self._compiled[id(layer)] = torch.compile(layer._call_impl)
        return self._compiled[id(layer)]

    def _self_test(self, model: nn.Module) -> str | None:
        """Scores three short rollouts both ways; what packing gets wrong about the model, if so."""
        causal = causal_model(model)
        tokens = probe_tokens(causal)
        # Compiling for a few tokens would take longer than it is worth.
        plain = PackedScorer(
            temperature=self.temperature, float32_head=self.float32_head, compile_layers=False
        )
        plain._flex = False
        own = own_logits(causal, tokens)[:, PREFIX - 1 : -1] / self.temperature
        own = own.log_softmax(-1).gather(2, tokens[:, PREFIX:, None])[..., 0]
        with decoding(causal, None):
            mask = torch.ones_like(tokens)
            packed, _ = plain.score(causal, tokens, mask, tokens.shape[1] - PREFIX)
        error = disagreement(packed - own, own, packed.dtype, *compute_types(causal))
        return None if error is None else f"its packed log-probs differ from its own by {error:.1%}"


def _windows(config: Any) -> set[int | None]:
    """Sliding windows that a model's layers may ask for; None is full attention."""
    return {None, getattr(config, "sliding_window", None)}


@contextlib.contextmanager
def _forward_replaced(causal: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = causal.__dict__.get("forward")
    causal.forward = forward
    try:
        yield
    finally:
        if own is None:
            del causal.forward
        else:
            causal.forward = own


def _slots(groups: list[Group], device: torch.device) -> Tensor:
    slots = [torch.from_numpy(x.slots) for group in groups for x in group.completions]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *slots]).to(device)


def _placed(values: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    flat = values.new_zeros(shape[0] * shape[1])
    return flat.index_copy(0, slots.to(values.device), values).view(shape)
