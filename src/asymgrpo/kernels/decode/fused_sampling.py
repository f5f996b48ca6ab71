"""Samples a token from each row's logits in one pass, with its log-prob and the entropy.

The same as `token_sampling.draw` without filters, with the same Gumbel noise. `advance` then
updates the rows' state on the device, so that a captured graph can be replayed without the host.

Letters: `B` rows, `V` vocabulary.
"""

# Triton kernels carry no types for mypy to check.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..hardware import is_nvidia
from .pdl import launch, launch_dependents, wait
from .token_sampling import LARGEST

PARTS = 16
"""Blocks per row, each for a share of the vocabulary."""
FIELDS = 5
"""Of a part: largest logit, softmax denominator, entropy's sum, best score, best token."""

_FINEST = tl.constexpr(LARGEST)


@dataclass(frozen=True)
class Rows:
    """The state of a batch's rows, on the device; int64 `[B]` each."""

    token: Tensor
    """The next input."""
    position: Tensor
    """Of that token in its context."""
    seed: Tensor
    count: Tensor
    """Tokens sampled so far."""
    limit: Tensor
    alive: Tensor
    finished: Tensor
    """1 once a stop token was sampled."""
    place: Tensor
    """The row of the results that this row writes to."""
    slot: Tensor
    """The KV pool's slot for that token."""
    own_count: Tensor
    """The pool slots of the row's own tokens so far, that token's included."""


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log(x, NVIDIA: tl.constexpr):
    """The hardware's logarithm: an eighth of the instructions, an error of 2^-22 near 1.

    It flushes subnormals (below 2^-126) to zero; there are none here.
    """
    if NVIDIA:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def _exp(x, NVIDIA: tl.constexpr):
    """The hardware's exponential; results below 2^-126 are flushed to zero."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(x)


@triton.jit
def _to_float(bits, NVIDIA: tl.constexpr):
    """Converts 32 bits; the compiler would use the slow conversion of the 64 they came from."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "cvt.rn.f32.u32 $0, $1;", "=f,r", [bits], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return bits.to(tl.float32)


@triton.jit
def _exponential(uniform, NVIDIA: tl.constexpr):
    """-log(1 - uniform), by its series where the subtraction would cancel."""
    series = 0.25 + uniform * (0.2 + uniform * (1.0 / 6 + uniform * (1.0 / 7)))
    series = uniform * (1 + uniform * (0.5 + uniform * (1.0 / 3 + uniform * series)))
    return tl.where(uniform < 0.06, series, -_log(1 - uniform, NVIDIA))


@triton.jit
def _sample_partials(
    logits,
    seeds,
    counts,
    parts,
    V,
    share,
    temperature,
    N_PARTS: tl.constexpr,
    N_FIELDS: tl.constexpr,
    GREEDY: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    step = tl.load(counts + row).to(tl.uint64, bitcast=True)
    key = _mixed(_mixed(seed + golden) + step * golden)
    # The tokens of a thread share one running maximum, so sums are rescaled once per block.
    LANES: tl.constexpr = BLOCK // EACH
    lane, within = tl.arange(0, LANES), tl.arange(0, EACH)
    steps = within.to(tl.uint64) * golden
    top = tl.full((LANES,), -1e30, tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    spread = tl.zeros((LANES,), tl.float32)
    best = tl.full((LANES, EACH), -float("inf"), tl.float32)
    chosen = tl.zeros((LANES, EACH), tl.int32)
    begin = part * share
    end = tl.minimum(begin + share, V)
    for start in range(begin, end, BLOCK):
        token = start + lane[:, None] * EACH + within[None, :]
        at = logits + row.to(tl.int64) * V + token
        x = tl.load(at, mask=token < end, other=-float("inf")).to(tl.float32)
        if not UNIT:
            x = x / temperature
        # Below any maximum: tokens past the end and masked ones get no weight.
        x = tl.maximum(x, -2e30)
        higher = tl.maximum(top, tl.max(x, 1))
        decay = _exp(top - higher, NVIDIA)
        rise = x - higher[:, None]
        weight = _exp(rise, NVIDIA)
        # The sum of (x - top) exp(x - top), rescaled when the maximum changes.
        spread = decay * (spread + (top - higher) * mass) + tl.sum(rise * weight, 1)
        mass = mass * decay + tl.sum(weight, 1)
        top = higher
        score = x
        if not GREEDY:
            # key + (token + 1) * golden, with one multiplication per thread.
            base = key + (start + lane * EACH + 1).to(tl.uint64) * golden
            bits = (_mixed(base[:, None] + steps[None, :]) >> 32).to(tl.uint32)
            uniform = (_to_float(bits, NVIDIA) + 0.5) * 2.3283064365386963e-10
            uniform = tl.minimum(uniform, _FINEST)
            score = x - _log(_exponential(uniform, NVIDIA), NVIDIA)
        better = score > best
        best = tl.where(better, score, best)
        chosen = tl.where(better, token, chosen)
    launch_dependents(PDL)
    highest = tl.max(top, 0)
    decay = tl.exp(top - highest)
    spread = tl.sum(decay * (spread + (top - highest) * mass), 0)
    mass = tl.sum(mass * decay, 0)
    winner = tl.max(tl.max(best, 1), 0)
    # The first of equal scores wins, as with argmax.
    first = tl.min(tl.min(tl.where(best == winner, chosen, 2147483647), 1), 0)
    at = parts + (row * N_PARTS + part) * N_FIELDS
    tl.store(at, highest)
    tl.store(at + 1, mass)
    tl.store(at + 2, spread)
    tl.store(at + 3, winner)
    tl.store(at + 4, first.to(tl.float32, bitcast=True))


@triton.jit
def _sample_reduce(
    logits,
    parts,
    tokens,
    logps,
    entropies,
    V,
    temperature,
    N_PARTS: tl.constexpr,
    N_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0)
    at = parts + (row * N_PARTS + tl.arange(0, N_PARTS)) * N_FIELDS
    top = tl.load(at)
    highest = tl.max(top, 0)
    decay = tl.exp(top - highest)
    masses = tl.load(at + 1)
    mass = tl.sum(masses * decay, 0)
    spread = tl.sum(decay * (tl.load(at + 2) + (top - highest) * masses), 0)
    scores = tl.load(at + 3)
    candidates = tl.load(at + 4).to(tl.int32, bitcast=True)
    token = tl.min(tl.where(scores == tl.max(scores, 0), candidates, 2147483647), 0)
    x = tl.load(logits + row.to(tl.int64) * V + token).to(tl.float32) / temperature
    log_mass = tl.log(mass)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logps + row, x - highest - log_mass)
    tl.store(entropies + row, log_mass - spread / mass)


def draw_unfiltered(
    logits: Tensor, seeds: Tensor, counts: Tensor, temperature: float, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[B, V]` to tokens, log-probs and entropies `[B]`, as `token_sampling.draw`."""
    rows, vocab = logits.shape
    temperature = 1.0 if greedy else temperature
    parts = torch.empty(rows, PARTS, FIELDS, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
    logps, entropies = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    block = min(1024, triton.next_power_of_2(triton.cdiv(vocab, PARTS)))
    share = triton.cdiv(triton.cdiv(vocab, PARTS), block) * block
    launch(
        _sample_partials,
        (rows, PARTS),
        logits.device,
        logits,
        seeds,
        counts,
        parts,
        vocab,
        share,
        temperature,
        N_PARTS=PARTS,
        N_FIELDS=FIELDS,
        GREEDY=greedy,
        UNIT=temperature == 1,
        BLOCK=block,
        EACH=min(8, block),
        NVIDIA=is_nvidia(logits.device),
        num_warps=4,
    )
    launch(
        _sample_reduce,
        (rows,),
        logits.device,
        logits,
        parts,
        tokens,
        logps,
        entropies,
        vocab,
        temperature,
        N_PARTS=PARTS,
        N_FIELDS=FIELDS,
        num_warps=1,
    )
    return tokens, logps, entropies


@triton.jit
def _advance(
    tokens, logps, entropies,
    token, position, count, limit, alive, finished, place, slot, own_count,
    out_tokens, out_logps, out_entropies,
    stops,
    rows,
    width,
    N_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    active = (tl.load(alive + row, mask=inside, other=0) != 0) & inside
    drawn = tl.load(tokens + row, mask=inside, other=0)
    done = tl.load(count + row, mask=inside, other=0)
    at = tl.load(place + row, mask=inside, other=0) * width + done
    tl.store(out_tokens + at, drawn.to(tl.int32), mask=active)
    tl.store(out_logps + at, tl.load(logps + row, mask=inside, other=0.0), mask=active)
    tl.store(out_entropies + at, tl.load(entropies + row, mask=inside, other=0.0), mask=active)
    stopped = row < 0
    for index in tl.static_range(N_STOPS):
        stopped = stopped | (drawn == tl.load(stops + index))
    done = done + 1
    most = tl.load(limit + row, mask=inside, other=0)
    going = active & (~stopped) & (done < most)
    tl.store(count + row, done, mask=active)
    tl.store(finished + row, stopped.to(tl.int64), mask=active)
    tl.store(alive + row, going.to(tl.int64), mask=inside)
    tl.store(token + row, drawn, mask=going)
    # A finished row keeps its slot until compaction and attends to its prompt alone. What it still
    # writes to its own slots is read by no other row.
    tl.store(position + row, tl.load(position + row, mask=going, other=0) + 1, mask=going)
    tl.store(slot + row, tl.load(slot + row, mask=going, other=0) + 1, mask=going)
    tl.store(own_count + row, tl.load(own_count + row, mask=going, other=0) + 1, mask=inside)


def advance(
    drawn: tuple[Tensor, Tensor, Tensor],
    rows: Rows,
    results: tuple[Tensor, Tensor, Tensor],
    stops: Tensor,
) -> None:
    """Writes sampled tokens, log-probs and entropies `[B]` to the results, and advances the rows.

    `results` are `[places, steps]` each; `stops` holds the stop tokens.
    """
    count = len(rows.token)
    block = min(128, triton.next_power_of_2(count))
    launch(
        _advance,
        (triton.cdiv(count, block),),
        rows.token.device,
        *drawn,
        rows.token,
        rows.position,
        rows.count,
        rows.limit,
        rows.alive,
        rows.finished,
        rows.place,
        rows.slot,
        rows.own_count,
        *results,
        stops,
        count,
        results[0].shape[1],
        N_STOPS=len(stops),
        BLOCK=block,
        num_warps=4,
    )
