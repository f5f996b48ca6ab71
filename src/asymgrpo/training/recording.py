"""What the trainer writes down of a step: metrics under TRL's names and ours, and token traces.

Mixed into the TRL trainer; knows its attributes, and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asymgrpo.objective.batch import TokenBatch
from asymgrpo.objective.objective import LossOutput, Objective
from asymgrpo.objective.trace import MetricSums
from asymgrpo.training.traces import trace_rows

ALIASES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "length/mean": "completions/mean_length",
    "length/truncated": "completions/clipped_ratio",
}
"""Our names for what TRL measures under its own; both are logged."""

RolloutSink = Callable[[int, list[dict[str, Any]]], object]


class Recording:
    """Metrics and traces of training batches."""

    objective: Objective
    accelerator: Any
    args: Any
    model: Any
    state: Any
    eos_token_ids: Sequence[int]
    num_generations: int
    num_iterations: int
    _metrics: dict[str, Any]
    _step: int
    _tokenizer: Any
    _rollout_batches: int

    def _start_recording(
        self, rollout_sink: RolloutSink | None, sample_every: int, sampled_groups: int
    ) -> None:
        self._rollout_sink = rollout_sink
        self._sample_every, self._sampled_groups = sample_every, sampled_groups
        self._sampled_rows: list[dict[str, Any]] = []
        self._seconds = {"rollout": 0.0, "score": 0.0}
        self._sampled_tokens = 0
        self._metric_sums: dict[str, tuple[Tensor, Tensor]] = {}

    def _record(self, **values: float) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    def _record_metrics(self, batch: TokenBatch, out: LossOutput) -> None:
        sums = replace(
            out.sums,
            totals=self.accelerator.reduce(out.sums.totals, reduction="sum"),
            largest_ratio=self.accelerator.gather(out.sums.largest_ratio).max(),
        )
        self._add_sums(sums)
        self._record(**self._trl_metrics(sums.means(), batch, out))

    def _add_sums(self, sums: MetricSums) -> None:
        """Sums until the next line is logged: a mean of means would weigh tokens unequally."""
        mode = "train" if self.model.training else "eval"
        if mode in self._metric_sums:
            sums = sums + MetricSums(*self._metric_sums[mode])
        self._metric_sums[mode] = (sums.totals, sums.largest_ratio)

    def _trl_metrics(
        self, means: dict[str, float], batch: TokenBatch, out: LossOutput
    ) -> dict[str, float]:
        """The same facts under TRL's names; low and high are the sides of 1 that were clipped."""
        mask, trace = batch.mask.bool(), out.tokens
        clipped = trace.clipped & (batch.advantages != 0).unsqueeze(1)  # else there is no gradient
        low, high = clipped & (trace.ratio < 1), clipped & (trace.ratio > 1)
        capped = clipped & (batch.advantages > 0).unsqueeze(1)
        if self.objective.config.ratio.level == "sequence":  # one ratio, so one count, a rollout
            low, high, capped, mask = (
                tokens.any(1, keepdim=True) for tokens in (low, high, capped, mask)
            )
        counts = torch.stack([low.sum(), high.sum(), capped.sum(), mask.sum()]).double()
        low_count, high_count, capped_count, tokens = self.accelerator.reduce(
            counts, reduction="sum"
        ).tolist()
        lengths = mask.sum(1)
        shares = torch.stack([low.sum(1) / lengths, high.sum(1) / lengths], 1)  # [B, 2]
        shares = self.accelerator.gather(shares)
        shares = shares[~shares.isnan().any(1)]
        tokens = max(tokens, 1.0)
        metrics = {
            "clip_ratio/low_mean": low_count / tokens,
            "clip_ratio/high_mean": high_count / tokens,
            "clip_ratio/region_mean": (low_count + high_count) / tokens,
        }
        if self.objective.config.ratio.clip == "cispo":
            metrics["cispo_clip_ratio"] = capped_count / tokens
        if len(shares):
            metrics["clip_ratio/low_min"] = shares[:, 0].min().item()
            metrics["clip_ratio/high_max"] = shares[:, 1].max().item()
        renamed = {"entropy": "entropy/mean", "kl": "kl/mean"}
        metrics |= {name: means[ours] for name, ours in renamed.items() if ours in means}
        return metrics

    def _finish_metrics(self, logs: dict[str, float]) -> None:
        """Before a line is logged: our names for what TRL measures, and where the time went."""
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if mode in self._metric_sums:
            sums = MetricSums(*self._metric_sums.pop(mode))
            metrics |= {name: [value] for name, value in sums.means().items()}
        for ours, theirs in ALIASES.items():
            if theirs in metrics:
                metrics[ours] = list(metrics[theirs])
        if mode == "train" and metrics.get("step_time"):
            steps, seconds = len(metrics["step_time"]), sum(metrics["step_time"])
            metrics["time/update"] = [(seconds - self._seconds["score"]) / steps]
            if self._sampled_tokens:
                metrics["time/rollout"] = [self._seconds["rollout"] / steps]
                metrics["tokens_per_second"] = [self._sampled_tokens / seconds]
            self._seconds, self._sampled_tokens = {"rollout": 0.0, "score": 0.0}, 0
        if "grad_norm" in logs:
            logs["gradient/norm"] = logs["grad_norm"]

    def _sample_rollouts(self, inputs: dict[str, Any], batch: TokenBatch, out: LossOutput) -> None:
        if self._rollout_sink is None or not self.model.training:
            return
        if (self._rollout_batches - 1) % self._sample_every or not self.accelerator.is_main_process:
            return
        slices = self.args.steps_per_generation
        every = slices * self.num_iterations
        position = self._step % every
        if position < every - slices:  # the last pass over a rollout batch is the most off-policy
            return
        index = inputs["rollout_index"]
        chosen = (index < self._sampled_groups * self.num_generations).nonzero().flatten()
        self._sampled_rows += self._rows(inputs, batch, out, chosen)
        if position == every - 1:
            step = self.state.global_step + 1
            rows = sorted(self._sampled_rows, key=lambda row: row["rollout"])
            self._rollout_sink(step, [{"step": step, **row} for row in rows])
            self._sampled_rows = []

    def _rows(
        self, inputs: dict[str, Any], batch: TokenBatch, out: LossOutput, chosen: Tensor
    ) -> Sequence[dict[str, Any]]:
        if not len(chosen):
            return []
        tokenizer = self._tokenizer
        prompts = [
            tokenizer.decode(ids[kept.bool()].tolist(), skip_special_tokens=False)
            for ids, kept in zip(
                inputs["prompt_ids"][chosen], inputs["prompt_mask"][chosen], strict=True
            )
        ]
        picked, picked_out = _pick(batch, out, chosen)
        rows = trace_rows(
            picked,
            picked_out,
            prompts,
            inputs["completion_ids"][chosen],
            lambda token: tokenizer.decode([token]),
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )
        ends = {*self.eos_token_ids, tokenizer.pad_token_id}
        indices, rewards = (inputs[key][chosen].tolist() for key in ("rollout_index", "rewards"))
        for row, index, reward in zip(rows, indices, rewards, strict=True):
            row["group"], row["rollout"] = index // self.num_generations, index
            row["reward"] = reward
            row["truncated"] = bool(row["token_ids"]) and row["token_ids"][-1] not in ends
        return rows


def _pick(batch: TokenBatch, out: LossOutput, rows: Tensor) -> tuple[TokenBatch, LossOutput]:
    """The batch and its trace, reduced to some of its rollouts."""
    size = len(batch.logps)

    def pick(value: Any) -> Any:
        whole = isinstance(value, Tensor) and value.dim() > 0 and len(value) == size
        return value[rows] if whole else value

    picked = replace(batch, **{name: pick(value) for name, value in vars(batch).items()})
    tokens = replace(out.tokens, **{name: pick(value) for name, value in vars(out.tokens).items()})
    return picked, LossOutput(out.loss, lambda: out.sums, lambda: tokens)
