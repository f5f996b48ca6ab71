"""Two processes that accumulate micro-batches of unlike lengths, and all that they measured.

Run under torchrun: `sign_metrics_run.py OUT`. Each process writes the advantage, the sum of
entropies and the count of tokens of each of its rollouts, and the lines that were logged.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from asymgrpo.training.trl import AsymGRPOConfig
from packed_run import FixedRollouts, make_model, make_tokenizer, reward


class Watched(FixedRollouts):
    seen: list[list[float]]

    def _record_metrics(self, batch: Any, out: Any) -> None:
        for row, keep in enumerate(batch.mask.bool()):
            entropies = batch.entropies[row][keep].double()
            self.seen.append(
                [batch.advantages[row].item(), entropies.sum().item(), float(keep.sum())]
            )
        super()._record_metrics(batch, out)


def main(out: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = AsymGRPOConfig(
            folder,
            max_steps=2,
            logging_steps=2,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            scorer="padded",
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Watched(
            model=make_model(),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["EFG", "HI", "JKLM", "N"] * 4}),
            processing_class=make_tokenizer(),
        )
        trainer.seen = []
        trainer.train()
    record = {"seen": trainer.seen, "logged": trainer.state.log_history}
    Path(f"{out}.{torch.distributed.get_rank()}").write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1])
