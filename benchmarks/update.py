"""The update: forward and backward over a batch of rollouts, beside TRL's own.

    python benchmarks/update.py [--shape 1.5b|demo] [--rounds 3] [--table]

`1.5b` has the shape of Qwen2.5-1.5B with LoRA r=16 on every linear layer, 16 prompts of about 100
tokens with 8 rollouts of 256 tokens, bfloat16, random weights; `demo` the shape of the built-in
model on 128 short rollouts. TRL's side runs its own `_get_per_token_logps_and_entropies` on its
fused head; `packed` takes the same micro-batches in the order that TRL shuffles them into, and the
same loss. `one micro-batch` is what a user gets by leaving the cutting to the scorer's budget.
Rounds are interleaved; medians are printed, ratios last. `--table` adds how cost grows with
completion length and group size.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from asymgrpo import Objective, TokenBatch, algorithm
from asymgrpo.training.scorer import PackedScorer

FLOPS = 790e12  # a large bf16 product on an H200
Scores = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    config: dict[str, Any]
    dtype: torch.dtype
    prompts: int
    group: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    micro_batches: int


SHAPES = {
    "1.5b": Shape(
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32_768,
        },
        torch.bfloat16,
        *(16, 8, (90, 110), (256, 256), 4),
    ),
    "demo": Shape(
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 323,
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
        },
        torch.float32,
        *(16, 8, (16, 24), (15, 45), 1),
    ),
}


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    mask: Tensor
    width: int
    advantages: Tensor

    def rows(self, chosen: Tensor) -> Batch:
        return Batch(self.ids[chosen], self.mask[chosen], self.width, self.advantages[chosen])


def build(shape: Shape, device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.Qwen2Config(**shape.config), dtype=shape.dtype
        )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def rollouts(shape: Shape, device: str) -> Batch:
    """Rows by group, prompts padded on the left and completions on the right."""
    generator = torch.Generator().manual_seed(0)
    words = shape.config["vocab_size"]

    def draw(bounds: tuple[int, int]) -> Tensor:
        length = int(torch.randint(bounds[0], bounds[1] + 1, (1,), generator=generator))
        return torch.randint(3, words, (length,), generator=generator)

    rows = []
    for _ in range(shape.prompts):
        prompt = draw(shape.prompt_tokens)
        rows += [(prompt, draw(shape.completion_tokens)) for _ in range(shape.group)]
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    ids = torch.zeros(len(rows), left + right, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, (prompt, completion) in enumerate(rows):
        ids[index, left - len(prompt) : left + len(completion)] = torch.cat([prompt, completion])
        mask[index, left - len(prompt) : left + len(completion)] = 1
    advantages = torch.randn(len(rows), generator=generator)
    return Batch(ids.to(device), mask.to(device), right, advantages.to(device))


def trl_scores(model: Any, checkpointing: bool) -> Callable[[Any, Batch], Scores]:
    """TRL's own method, on a stand-in for the trainer."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    causal = model.get_base_model()
    add_fused_lm_head(causal, temperature=1.0, outputs=("log_probs", "entropy"))
    method = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__  # below the profiler
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=lambda: autocast(model)))

    def score(model: Any, batch: Batch) -> Scores:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        logps, entropies, _ = method(
            trainer, model, batch.ids, batch.mask, batch.width, compute_entropy=True
        )
        return logps, entropies

    return score


def autocast(model: Any) -> contextlib.AbstractContextManager[Any]:
    """What the trainer runs its forward passes under: bfloat16 on a GPU, nothing on a CPU."""
    if model.device.type == "cuda":
        return torch.autocast("cuda", torch.bfloat16)
    return contextlib.nullcontext()


def packed_scores(scorer: PackedScorer) -> Callable[[Any, Batch], Scores]:
    def score(model: Any, batch: Batch) -> Scores:
        with autocast(model):
            logps, entropies = scorer.score(model, batch.ids, batch.mask, batch.width)
        assert entropies is not None
        return logps, entropies

    return score


def update(
    model: Any,
    batches: list[Batch],
    score: Callable[[Any, Batch], Scores],
    objective: Objective,
    words: int,
) -> tuple[float, float]:
    """Seconds and peak GiB of forward and backward over all micro-batches."""
    device = batches[0].ids.device.type
    model.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for batch in batches:
        logps, entropies = score(model, batch)
        out = objective(
            TokenBatch(
                logps=logps,
                old_logps=None,
                mask=batch.mask[:, -batch.width :],
                advantages=batch.advantages,
                entropies=entropies,
                vocab_size=words,
            )
        )
        out.loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def micro_batches(batch: Batch, count: int, shuffled: bool) -> list[Batch]:
    size = len(batch.ids)
    order = torch.arange(size)
    if shuffled:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    return [batch.rows(rows) for rows in order.to(batch.ids.device).chunk(count)]


def floor_seconds(model: Any, batch: Batch, shape: Shape) -> float:
    """4 FLOP a parameter of the layers a packed token, and a word of the head a scored token."""
    causal = model.get_base_model()
    parameters = sum(
        p.numel() for n, p in causal.model.layers.named_parameters() if "lora" not in n
    )
    scored = int(batch.mask[:, -batch.width :].sum())
    prompts = int(batch.mask[:: shape.group, : -batch.width].sum())
    head = shape.config["vocab_size"] * shape.config["hidden_size"]
    return 4 * (parameters * (scored + prompts) + head * scored) / FLOPS


def side_by_side(model: Any, scorer: PackedScorer, shape: Shape, rounds: int) -> list[str]:
    """Prints the table; the lines that compare come back."""
    device = model.device.type
    batch = rollouts(shape, device)
    words = shape.config["vocab_size"]
    shuffled = micro_batches(batch, shape.micro_batches, True)
    kept = micro_batches(batch, shape.micro_batches, False)
    packed = packed_scores(scorer)
    grpo, sided = Objective(algorithm("grpo")), Objective(algorithm("sa-ah-grpo"))
    sides: dict[str, Any] = {
        "TRL, checkpointing (its default)": (trl_scores(model, True), shuffled, grpo),
        "TRL, no checkpointing": (trl_scores(model, False), shuffled, grpo),
        "packed": (packed, shuffled, grpo),
        "packed, sa-ah-grpo": (packed, shuffled, sided),
        "packed, groups kept whole": (packed, kept, grpo),
        "packed, one micro-batch": (packed, [batch], grpo),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for index in range(-1, rounds):
        for name, (score, batches, objective) in sides.items():
            measured = update(model, batches, score, objective, words)
            if index >= 0:
                times[name].append(measured)
    print(f"\n{'':36}{'seconds':>9}{'peak GiB':>10}{'of the floor':>14}")
    floor = floor_seconds(model, batch, shape)
    middle = {name: median(x[0] for x in rows) for name, rows in times.items()}
    for name, rows in times.items():
        share = f"{floor / middle[name]:13.0%}" if device == "cuda" else ""
        print(f"{name:36}{middle[name]:9.3f}{max(x[1] for x in rows):10.1f}{share}")
    if device == "cuda":
        print(f"floor, every prompt computed once: {floor:.3f} s")
    change = middle["packed, sa-ah-grpo"] / middle["packed"] - 1
    lines = [f"sa-ah-grpo costs {change:+.1%} over grpo"]
    for name in list(sides)[:2]:
        for form in ("packed", "packed, one micro-batch"):
            lines.append(f"{form} is {middle[name] / middle[form]:.2f} times as fast as {name}")
    return lines


def table(model: Any, scorer: PackedScorer, shape: Shape) -> None:
    """One group a cell: seconds, milliseconds a 1,000 packed tokens, and the share of the floor."""
    device = model.device.type
    print(f"\n{'completion':>10}{'group':>7}{'tokens':>9}{'seconds':>9}{'ms/1k':>8}{'floor':>7}")
    for length in (256, 1024, 4096, 8192):
        for group in (4, 16, 64):
            cell = dataclasses.replace(
                shape, prompts=1, group=group, completion_tokens=(length, length)
            )
            batch = rollouts(cell, device)
            objective = Objective(algorithm("grpo"))
            call = (model, [batch], packed_scores(scorer), objective, shape.config["vocab_size"])
            update(*call)  # compiles for new shapes
            seconds, _ = update(*call)
            tokens = int(batch.mask[0, : -batch.width].sum()) + group * length
            share = floor_seconds(model, batch, cell) / seconds
            print(
                f"{length:10}{group:7}{tokens:9}{seconds:9.3f}{seconds / tokens * 1e6:8.1f}"
                f"{share:7.0%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="1.5b" if torch.cuda.is_available() else "demo"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPES[options.shape]
    model, scorer = build(shape, device), PackedScorer()
    lines = side_by_side(model, scorer, shape, options.rounds)
    if options.table:
        table(model, scorer, shape)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
