"""A short training run, packed or padded, on rollouts that do not depend on the model.

Run as a program under torchrun for two processes, it does both: `packed_run.py OUT OPTIONS_JSON`.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig

from asymgrpo.training.trl import AsymGRPOConfig, AsymGRPOTrainer

WORDS = 64


class FixedRollouts(AsymGRPOTrainer):
    """Samples by a generator of its own, so that two runs see the very same rollouts."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
        process = self.accelerator.process_index
        generator = random.Random(f"{self.state.global_step} {process}")
        completions = []
        for _ in prompt_ids:
            length = generator.randint(1, self.max_completion_length)
            completion = [generator.randint(3, WORDS - 1) for _ in range(length)]
            if length < self.max_completion_length:
                completion[-1] = self.eos_token_ids[0]
            completions.append(completion)
        return completions, None


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {chr(61 + i): i for i in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return transformers.Qwen2ForCausalLM(config)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(c < "Z" for c in text) / max(len(text), 1) for text in completions]


def run(scorer: str, *, lora: bool = False, **options: Any) -> dict[str, Any]:
    """Train; every step's loss, gradient norm, entropy and kl, and the parameters at the end."""
    generator = random.Random(7)
    alphabet = [chr(61 + i) for i in range(3, WORDS)]
    texts = ["".join(generator.choices(alphabet, k=generator.randint(2, 9))) for _ in range(16)]
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 10,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        # Adam turns the rounding of a gradient near zero into a whole step.
        "optim": "sgd",
        "algorithm": "sa-ah-grpo",
        "bf16": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = AsymGRPOConfig(
            output_dir=folder,
            scorer=scorer,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **defaults | options,
        )
        trainer = FixedRollouts(
            model=make_model(),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            if lora
            else None,
        )
        packs = trainer._packs(trainer.model)
        trainer.train()
    names = ("loss", "grad_norm", "entropy", "kl", "ratio/max")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {
        "packs": packs,
        "history": [{name: row[name] for name in names if name in row} for row in logged],
        "parameters": {n: p.detach().flatten().tolist() for n, p in parameters if p.requires_grad},
    }


if __name__ == "__main__":
    results = {name: run(name, **json.loads(sys.argv[2])) for name in ("packed", "padded")}
    rank = torch.distributed.get_rank()
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(results))
