"""Rollouts: the native engine beside TRL's own paths, on the same model and prompts.

    python benchmarks/rollout.py [--shape 1.5b|demo] [--rounds 5] [--trl-rounds 1] [--no-lengths]
    python benchmarks/rollout.py --ablation [--shape 1.5b|demo] [--rounds 5]

`--ablation` compares the native engine's decoders on a GPU instead: fused kernels in a captured
graph, the model's own forward in a captured graph, and that forward alone.

`subjects.py` says what the shapes are. TRL's side is `GRPOTrainer._generate_single_turn` of a
trainer as a user makes it: by `generate`, and by vLLM in the same process where vllm is importable,
its synchronisation counted. The second setting of `1.5b` gives each rollout a length of its own,
from 32 to 1,024 tokens; `generate` has no such thing and runs all rows to the longest, as it does
when one row does not stop.

The floor is the time to read the weights and each row's keys and values once per token, at
4.3 TB/s.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from subjects import Subject, now, subject
from trl import GRPOConfig, GRPOTrainer
from update import SHAPES

from asymgrpo.rollout import NativeEngine, Sampling
from asymgrpo.rollout.select_engine import DECODERS

BANDWIDTH = 4.3e12  # bytes a second of a large copy on an H200


@dataclass(frozen=True)
class Setting:
    """What every engine is asked for."""

    name: str
    prompts: list[list[int]]
    limits: list[int]


@dataclass(frozen=True)
class Outcome:
    """What an engine needed for it."""

    first: float
    seconds: float
    tokens: int
    peak: float


def settings(what: Subject, lengths: bool) -> list[Setting]:
    generator = random.Random(0)
    group = what.arguments["num_generations"]
    texts = what.data["prompt"][: what.prompts]
    prompts = [ids for ids in what.tokenizer(texts)["input_ids"] for _ in range(group)]
    most = what.arguments["max_completion_length"]
    found = [Setting(f"up to {most} tokens", prompts, [most] * len(prompts))]
    if lengths:
        drawn = [generator.randint(32, 1_024) for _ in prompts]
        found.append(Setting("32 to 1,024 tokens", prompts, drawn))
    return found


def build_trainer(what: Subject, folder: str, **options: Any) -> Any:
    trainer = GRPOTrainer(
        model=what.model(),
        reward_funcs=what.reward,
        args=GRPOConfig(output_dir=folder, report_to="none", **what.arguments, **options),
        train_dataset=what.data,
        processing_class=what.tokenizer,
        peft_config=what.peft_config,
    )
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return trainer


def measure(run: Callable[[int], list[int]], rounds: int) -> Outcome:
    """Seconds of the first call and the median of the others; `run` returns tokens by rollout."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(rounds + 1):
        start = now()
        counts = run(number)
        seconds.append(now() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return Outcome(seconds[0], median(seconds[1:] or seconds), sum(counts), peak)


def native(trainer: Any, setting: Setting, decoder: str = "fused") -> Callable[[int], list[int]]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    engine = NativeEngine(model, trainer.processing_class, decoder=decoder)
    count = len(setting.prompts)

    def run(number: int) -> list[int]:
        rollouts = engine.generate(
            setting.prompts,
            Sampling(max_new_tokens=max(setting.limits)),
            range(number * count, (number + 1) * count),
            limits=setting.limits,
        )
        return [len(rollout.token_ids) for rollout in rollouts]

    return run


def by_generate(trainer: Any, setting: Setting) -> Callable[[int], list[int]]:
    trainer.generation_config.max_new_tokens = max(setting.limits)

    def run(number: int) -> list[int]:
        ids, _ = trainer._generate_single_turn(setting.prompts, None, {}, trainer.num_generations)
        return [min(len(one), limit) for one, limit in zip(ids, setting.limits, strict=True)]

    return run


def by_vllm(trainer: Any, setting: Setting) -> Callable[[int], list[int]]:
    generation = trainer.vllm_generation
    generate = type(generation.llm).generate

    def with_limits(prompts: Any, sampling_params: Any, **options: Any) -> Any:
        """TRL asks for all rollouts alike; here each has a length of its own."""
        each = [sampling_params.clone() for _ in prompts]
        for one, limit in zip(each, setting.limits, strict=True):
            one.max_tokens = limit
        return generate(generation.llm, prompts, sampling_params=each, **options)

    generation.llm.generate = with_limits

    def run(number: int) -> list[int]:
        trainer._last_loaded_step = -1  # as after a training step: the weights are sent again
        ids, _ = trainer._generate_single_turn(setting.prompts, None, {}, trainer.num_generations)
        return [len(one) for one in ids]

    return run


def floor(setting: Setting, model: Any) -> float:
    """Seconds that reading weights, keys and values takes, with rows leaving as they end."""
    parameters = list(model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * width
    token *= parameters[0].element_size()
    lengths = [len(prompt) for prompt in setting.prompts]
    read = sum(
        limit * length + limit * (limit + 1) // 2
        for limit, length in zip(setting.limits, lengths, strict=True)
    )
    return float(max(setting.limits) * weights + read * token) / BANDWIDTH


def report(setting: Setting, outcomes: dict[str, Outcome], least: float | None) -> None:
    on_gpu = "" if least is None else f", floor {least:.3f} s"
    print(f"\n{setting.name}, {len(setting.prompts)} rollouts{on_gpu}")
    for name, one in outcomes.items():
        line = f"  {name:16}{one.seconds:9.3f} s {one.tokens / one.seconds:11,.0f} tokens a second"
        if least is not None:
            line += f"  {least / one.seconds:6.1%} of the floor's speed  peak {one.peak:5.1f} GiB"
        print(f"{line}  first call {one.first - one.seconds:+.1f} s", flush=True)


def ablation(what: Subject, folder: str, rounds: int) -> None:
    """The native engine with each of its decoders; the ratios to the fastest come last."""
    trainer = build_trainer(what, folder)
    (setting,) = settings(what, lengths=False)
    least = floor(setting, trainer.model) if torch.cuda.is_available() else None
    if not torch.cuda.is_available():
        print("no GPU: every decoder is the eager one here")
    outcomes = {}
    for decoder in DECODERS:
        run = native(trainer, setting, decoder)
        outcomes[decoder] = measure(run, rounds)
        del run  # and its graphs, before the next decoder's memory is measured
        gc.collect()
    report(setting, outcomes, least)
    for decoder in DECODERS[1:]:
        ratio = outcomes[decoder].seconds / outcomes[DECODERS[0]].seconds
        print(f"{setting.name}: {DECODERS[0]} is {ratio:.1f} times as fast as {decoder}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="1.5b" if torch.cuda.is_available() else "demo"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trl-rounds", type=int, default=1)
    parser.add_argument("--lengths", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    demo = options.shape == "demo"
    with tempfile.TemporaryDirectory() as weights, tempfile.TemporaryDirectory() as folder:
        what = subject(options.shape, Path(weights))
        if options.ablation:
            ablation(what, folder, options.rounds)
            return
        asked = settings(what, options.lengths and not demo)
        outcomes: dict[str, dict[str, Outcome]] = {setting.name: {} for setting in asked}
        trainer = build_trainer(what, folder)
        least = {one.name: None if demo else floor(one, trainer.model) for one in asked}
        for setting in asked:
            found = outcomes[setting.name]
            found["native"] = measure(native(trainer, setting), options.rounds)
            report(setting, found, least[setting.name])
        if not demo and importlib.util.find_spec("vllm") is not None:
            other = build_trainer(what, folder, use_vllm=True, vllm_mode="colocate")
            for setting in asked:
                found = outcomes[setting.name]
                found["TRL, vLLM"] = measure(by_vllm(other, setting), options.rounds)
                report(setting, found, least[setting.name])
            del other
            gc.collect()
        elif not demo:
            print("vllm is not importable here, so TRL with vLLM takes no part")
        for setting in asked:
            # A thousand steps of `generate` take over a minute, and it is warm by then.
            rounds = options.trl_rounds if setting is asked[0] else 0
            found = outcomes[setting.name]
            found["TRL, generate"] = measure(by_generate(trainer, setting), rounds)
            report(setting, found, least[setting.name])
    for setting in asked:
        ours, *others = outcomes[setting.name].items()
        for name, one in others:
            ratio = one.seconds / ours[1].seconds
            print(f"{setting.name}: native is {ratio:.1f} times as fast as {name}")


if __name__ == "__main__":
    main()
