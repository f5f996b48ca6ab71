"""Rollouts of a training batch as rows for the run store, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asymgrpo.objective.batch import TokenBatch
from asymgrpo.objective.kl import kl_divergence
from asymgrpo.objective.masked import masked_mean
from asymgrpo.objective.objective import LossOutput, Objective
from asymgrpo.objective.presets import algorithm


@torch.no_grad()
def trace_rows(
    batch: TokenBatch,
    out: LossOutput,
    prompts: list[str],
    completion_ids: Tensor,
    decode_token: Any,
    decode_text: Any,
) -> list[dict[str, Any]]:
    """One row a rollout of `batch`, with the per-token columns of the run store.

    `prompts` has B texts and `completion_ids` is [B, T]; a token's text is `decode_token(id)`, a
    completion's `decode_text(ids)`. `kl` is the mean k3 estimate to the reference, or to the policy
    that sampled where there is no reference.
    """
    batch = batch.cleaned().detached()
    baseline = Objective(algorithm("grpo"))(batch).tokens
    anchor = batch.ref_logps if batch.ref_logps is not None else batch.old_logps
    anchor = batch.logps if anchor is None else anchor
    kl = masked_mean(kl_divergence(batch.logps, anchor, "k3"), batch.mask, dim=1)
    columns = {
        "logps": batch.logps,
        "entropies": batch.entropies,
        "discount": out.tokens.discount,
        "ratio": out.tokens.ratio,
        "weight": out.tokens.weight,
        "grpo_weight": baseline.weight,
        "quadrant": out.tokens.quadrant,
        "clipped": out.tokens.clipped,
    }
    rows = []
    for index, prompt in enumerate(prompts):
        keep = batch.mask[index]
        ids = completion_ids[index][keep].tolist()
        row: dict[str, Any] = {
            "prompt": prompt,
            "completion": decode_text(ids),
            "advantage": batch.advantages[index].item(),
            "kl": kl[index].item(),
            "token_ids": ids,
            "tokens": [decode_token(token) for token in ids],
        }
        row |= {k: v[index][keep].tolist() for k, v in columns.items() if v is not None}
        rows.append(row)
    return rows
