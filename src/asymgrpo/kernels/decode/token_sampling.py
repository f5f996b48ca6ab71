"""Sampling tokens from logits: filters, counter-based Gumbel noise, log-prob and entropy.

Shapes: `B` rows, `V` vocabulary. A token's noise is a pure function of (seed, position, token), so
a rollout's tokens depend neither on its batch nor on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """The part of a sampling request that shapes the distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False

    @property
    def unfiltered(self) -> bool:
        """Whether tokens are sampled from the plain softmax of the scaled logits."""
        return (
            self.top_p >= 1 and self.top_k == 0 and self.min_p <= 0 and self.repetition_penalty == 1
        )


# The finaliser and increment of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
LARGEST = 1 - 2.0**-24
"""The largest float32 below 1: noise stays finite."""


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; `>>` on int64 tensors is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser in place: allocating would cost more than the arithmetic."""
    x.bitwise_xor_(_shifted(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shifted(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shifted(x, 31))


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Seeds `[B]` and completion positions `[B]`, int64, to the key of each row's noise, `[B]`.

    >>> keys = noise_keys(torch.tensor([7, 7]), torch.tensor([0, 1]))
    >>> bool(keys[0] != keys[1])
    True
    """
    return _mix(_mix(seeds + GOLDEN) + positions * GOLDEN)


def gumbel_noise(keys: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise `[B, vocab]` in float32 from keys `[B]`.

    >>> noise = gumbel_noise(noise_keys(torch.arange(4), torch.zeros(4).long()), 50_000)
    >>> abs(noise.mean() - 0.5772).item() < 0.01
    True
    """
    tokens = torch.arange(1, vocab + 1, device=keys.device)
    bits = _shifted(_mix(keys[:, None] + tokens * GOLDEN), 32)
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST)
    # Small values of -log(1 - u) decide when unlikely tokens win, and 1 - u would cancel there:
    # u + u^2 / 2 + u^3 / 3 + u^4 / 4.
    series = (uniform * 0.25).add_(1 / 3).mul_(uniform).add_(0.5).mul_(uniform)
    series.add_(1).mul_(uniform)
    exponential = torch.where(uniform < 0.01, series, (1 - uniform).log_().neg_())
    return exponential.log_().neg_()


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits `[B, V]` with the repetition penalty on tokens in `seen` `[B, V]` (Keskar 2019)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def kept_logits(scaled: Tensor, filters: Filters) -> Tensor:
    """Scaled logits `[B, V]` with `-inf` on tokens removed by top-k, top-p and min-p.

    >>> kept_logits(torch.tensor([[3.0, 2.0, 1.0]]), Filters(top_k=2))
    tensor([[3., 2., -inf]])
    """
    kept = scaled
    if 0 < filters.top_k < kept.shape[-1]:
        smallest = kept.topk(filters.top_k, dim=-1).values[:, -1:]
        kept = kept.masked_fill(kept < smallest, -torch.inf)
    if filters.top_p < 1:
        ascending, order = kept.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - filters.top_p
        tail[:, -1] = False
        kept = kept.masked_fill(torch.zeros_like(tail).scatter(1, order, tail), -torch.inf)
    if filters.min_p > 0:
        probabilities = kept.softmax(dim=-1)
        least = probabilities.amax(dim=-1, keepdim=True) * filters.min_p
        kept = kept.masked_fill(probabilities < least, -torch.inf)
    return kept


def draw(
    logits: Tensor, keys: Tensor, filters: Filters, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[B, V]` to tokens, log-probs and entropies, each `[B]`.

    The log-prob is under the distribution sampled from; greedy decoding reports the softmax at
    temperature 1. The entropy, in nats, is that of the temperature-scaled logits before filters.

    >>> tokens, logps, entropies = draw(
    ...     torch.tensor([[0.0, 50.0]]), torch.tensor([5]), Filters(temperature=0.5))
    >>> tokens.tolist(), logps.tolist(), round(entropies.item(), 6)
    ([1], [0.0], 0.0)
    """
    logits = logits.float()
    if seen is not None:
        logits = penalised(logits, seen, filters.repetition_penalty)
    scaled = logits if filters.greedy else logits / filters.temperature
    log_probabilities = scaled.log_softmax(dim=-1)
    # A masked token has log-prob -inf and adds nothing, but 0 * -inf is not a number.
    entropies = -(log_probabilities.exp() * log_probabilities.clamp(min=-1e30)).sum(dim=-1)
    if filters.greedy:
        tokens = scaled.argmax(dim=-1)
    else:
        if filters.top_k or filters.top_p < 1 or filters.min_p > 0:
            log_probabilities = kept_logits(scaled, filters).log_softmax(dim=-1)
        tokens = (log_probabilities + gumbel_noise(keys, logits.shape[-1])).argmax(dim=-1)
    logps = log_probabilities.gather(1, tokens[:, None])[:, 0]
    return tokens, logps, entropies
