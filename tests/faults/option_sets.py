"""Sets of options under which a run must survive every cut: each keeps something between steps."""

from __future__ import annotations

from typing import Any

OPTION_SETS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": 4},
    "synced-reference": {
        "trainer": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
    },
    "logging-steps": {"trainer": {"logging_steps": 3}},
    "accumulation": {
        "trainer": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "logging_steps": 2,
        }
    },
    "two-iterations": {"trainer": {"num_iterations": 2}},
    "bf16-masters": {
        "model": "tiny-bfloat16",
        "trainer": {"bf16": True, "use_cpu": True, "logging_steps": 2},
    },
    "bf16-autocast": {"trainer": {"bf16": True, "use_cpu": True}},
    "reference": {"trainer": {"beta": 0.1}},
    "lora-reference": {"lora": 4, "trainer": {"beta": 0.1, "logging_steps": 2}},
    "entropy-control": {
        "trainer": {"use_adaptive_entropy": True, "entropy_target": 9.0, "logging_steps": 2}
    },
    "padded": {"scorer": "padded"},
    "transformers-engine": {
        "engine": "transformers",
        "scorer": "padded",
        "trainer": {"top_p": 0.9, "logging_steps": 2},
    },
    "held-out": {"eval_every": 2, "eval_problems": 4, "eval_samples": 2},
    "cosine": {
        "trainer": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_first_step": True}
    },
    "truncated": {
        "trainer": {
            "mask_truncated_completions": True,
            "max_completion_length": 40,
            "loss_type": "dr_grpo",
            "logging_steps": 2,
        },
        "algorithm": "grpo",
    },
}
"""By name, the changes to a small run. `tiny-bfloat16` is the built-in model in bfloat16."""
