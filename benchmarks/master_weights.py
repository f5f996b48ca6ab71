"""Full fine-tuning in bfloat16: what keeps small updates, at what cost, beside float32.

    python benchmarks/master_weights.py [--model smollm2-135m] [--steps 200] [--rate 1e-6]

Every way trains the same model on the same batches (the arithmetic task's worked answers,
next-token loss). Printed: the share of weights that changed, the distance to the float32 run
relative to the distance that the float32 run went, milliseconds of an optimiser step, and bytes per
weight of weights, gradients and optimiser state. torchao (stochastic rounding) and optimi (Kahan
summation) take part where they are installed. The ratio of our distance to pure bfloat16's comes
last.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from asymgrpo.models import load_policy
from asymgrpo.tasks import load_task, render_prompt
from asymgrpo.training.master_weights import MasterWeights

Step = Callable[[], None]


def adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True)


def with_masters(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    optimizer = adamw(parameters, rate)
    MasterWeights(optimizer)
    return optimizer


def stochastic_rounding(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    from torchao.optim import _AdamW

    return _AdamW(parameters, lr=rate, weight_decay=0.0, bf16_stochastic_round=True)


def kahan(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    from optimi import AdamW

    return AdamW(parameters, lr=rate, weight_decay=0.0, kahan_sum=True)


WAYS: dict[str, tuple[torch.dtype, Callable[..., torch.optim.Optimizer], str | None]] = {
    "float32": (torch.float32, adamw, None),
    "bfloat16": (torch.bfloat16, adamw, None),
    "bfloat16, float32 masters": (torch.bfloat16, with_masters, None),
    "bfloat16, stochastic rounding": (torch.bfloat16, stochastic_rounding, "torchao"),
    "bfloat16, Kahan summation": (torch.bfloat16, kahan, "optimi"),
}


def batches(tokenizer: Any, count: int, size: int, device: torch.device) -> list[Tensor]:
    """Token ids [size, L] of questions with their answers."""
    task = load_task("arithmetic")
    rows = task.examples("train")
    texts = []
    for index in range(count * size):
        row = rows[index]
        prompt = render_prompt(task, row, None)
        texts.append(f"{prompt} {row.get('solution', row.get('answer'))}")
    tokenizer.padding_side = "right"
    ids = [
        tokenizer(texts[i * size : (i + 1) * size], return_tensors="pt", padding=True)["input_ids"]
        for i in range(count)
    ]
    return [part.to(device) for part in ids]


def state_bytes(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Weights, gradients and what the optimiser keeps, masters included."""
    held: dict[int, Tensor] = {}
    for parameter in model.parameters():
        held[parameter.data_ptr()] = parameter
        if parameter.grad is not None:
            held[parameter.grad.data_ptr()] = parameter.grad
    for group in optimizer.param_groups:
        held |= {p.data_ptr(): p for p in group["params"]}
    for state in optimizer.state.values():
        held |= {v.data_ptr(): v for v in state.values() if isinstance(v, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


def train(spec: str, way: str, steps: int, rate: float, device: torch.device) -> dict[str, Any]:
    dtype, make, _ = WAYS[way]
    torch.manual_seed(0)
    # From the same start: what float32 holds beyond bfloat16 would count as distance.
    policy = load_policy(spec, dtype="float32", device=device)
    model: Any = policy.model.to(torch.bfloat16).to(dtype).train()
    start = [p.detach().float().clone() for p in model.parameters()]
    optimizer = make(list(model.parameters()), rate)
    seconds: list[float] = []
    used = 0
    for ids in batches(policy.tokenizer, steps, 16, device):
        model(input_ids=ids, labels=ids).loss.backward()
        used = max(used, state_bytes(optimizer, model))
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    ends = [p.detach().float() for p in masters]
    count = sum(p.numel() for p in start)
    return {
        "start": start,
        "ends": ends,
        "changed": sum(int((e != s).sum()) for e, s in zip(ends, start, strict=True)) / count,
        "milliseconds": 1e3 * median(seconds[len(seconds) // 2 :]),
        "bytes": used / count,
    }


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return (
        sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-6)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact: dict[str, Any] = {}
    off: dict[str, float] = {}
    print(f"{'':32}{'changed':>9}{'distance':>10}{'ms a step':>11}{'bytes a weight':>16}")
    for way, (_, _, library) in WAYS.items():
        if library is not None and importlib.util.find_spec(library) is None:
            print(f"{way:32} needs {library}")
            continue
        found = train(options.model, way, options.steps, options.rate, device)
        exact = exact or found
        went = distance(exact["ends"], exact["start"])
        off[way] = distance(found["ends"], exact["ends"]) / went
        print(
            f"{way:32}{found['changed']:9.1%}{off[way]:10.3f}{found['milliseconds']:11.2f}"
            f"{found['bytes']:16.1f}",
            flush=True,
        )
    ratio = off["bfloat16"] / off["bfloat16, float32 masters"]
    print(f"float32 masters end {ratio:.1f} times as close to float32 as pure bfloat16")


if __name__ == "__main__":
    main()
