"""Log-probs and entropies from hidden states: time and memory beside TRL, Liger and torch.compile.

    python benchmarks/token_statistics.py [--tokens 32768] [--words 151936] [--width 1536] [--tiles]

Forward and backward with a frozen output embedding, as under LoRA. Rounds are interleaved, so that
all see the same machine; medians are printed, the ratio to the best of the others last. `--tiles`
times several tile shapes of ours instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from asymgrpo.kernels.token_statistics import token_statistics

Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
TILES = [(n, w) for n in (1024, 2048, 4096) for w in (4096, 8192, 16384, 32768)]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return token_statistics(hidden, weight, None, targets)


def with_tile(tile: tuple[int, int]) -> Function:
    def function(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return token_statistics(hidden, weight, None, targets, chunk=tile)

    return function


def trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    return ChunkedLogProbFunction.apply(
        *(hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0),
        ("log_probs", "entropy"),
    )[:2]


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Log-probs only: Liger computes no entropies."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return (_ChunkedSelectiveLogProbFunction.apply(hidden, weight, targets, None, 1.0, 4096),)


def _one_chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


_compiled_chunk = torch.compile(_one_chunk, dynamic=False)


def compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The definition, compiled, on chunks of 2,048 tokens that are recomputed in backward."""
    from torch.utils.checkpoint import checkpoint

    parts = [
        checkpoint(_compiled_chunk, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(2048), targets.split(2048), strict=True)
    ]
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(function: Function, inputs: tuple[Tensor, ...]) -> tuple[float, float, float]:
    """Seconds of a pass without gradient, seconds forward and backward, and its peak GiB."""
    hidden, weight, targets, upstream = inputs
    device = hidden.device.type
    synchronize(device)
    start = time.perf_counter()
    with torch.no_grad():
        function(hidden, weight, targets)
    synchronize(device)
    without = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    leaf = hidden.detach().requires_grad_(True)
    start = time.perf_counter()
    function(leaf, weight, targets)[0].backward(upstream)
    synchronize(device)
    seconds = time.perf_counter() - start
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device == "cuda" else 0.0
    return without, seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, device=device).to(dtype)
    weight = (torch.randn(options.words, options.width, device=device) * 0.05).to(dtype)
    targets = torch.randint(options.words, (options.tokens,), device=device)
    inputs = (hidden, weight, targets, torch.randn(options.tokens, device=device))
    functions: dict[str, Function] = {
        "ours": ours,
        "TRL": trl,
        "Liger (no entropy)": liger,
        "torch.compile": compiled,
    }
    if options.tiles:
        functions = {f"{n} x {w}": with_tile((n, w)) for n, w in TILES}
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in functions}
    for function in functions.values():
        timed(function, inputs)
    for _ in range(options.rounds):
        for name, function in functions.items():
            rows[name].append(timed(function, inputs))
    print(f"{options.tokens} tokens, {options.words} words, width {options.width}, {device}")
    print(f"{'':20}{'no gradient':>14}{'with gradient':>16}{'peak GiB':>11}")
    middle = {n: tuple(median(x) for x in zip(*r, strict=True)) for n, r in rows.items()}
    for name, (without, seconds, peak) in middle.items():
        print(f"{name:20}{without * 1e3:11.1f} ms{seconds * 1e3:13.1f} ms{peak:11.2f}")
    floor = 4 * options.tokens * options.words * options.width / 790e12
    print(f"floor of 4 N V D at 790 TFLOP/s: {floor * 1e3:.1f} ms")
    if not options.tiles:
        best = min((n for n in middle if n != "ours"), key=lambda n: middle[n][1])
        print(f"ours is {middle[best][1] / middle['ours'][1]:.2f} times as fast as {best}")


if __name__ == "__main__":
    main()
