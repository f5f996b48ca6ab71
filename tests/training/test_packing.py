"""The packed layout against a reading of it token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asymgrpo.kernels.packed_attention import (
    PackedPlan,
    Segments,
    gathered_attention,
    segment_attention,
)
from asymgrpo.training.packing import cut, group_rollouts, pack

CPU = torch.device("cpu")


def padded(prompts, completions, width_prompt=None, width=None):
    """Left-padded prompts and right-padded completions, as TRL lays them out."""
    width_prompt = width_prompt or max(map(len, prompts))
    width = width or max(map(len, completions))
    ids = torch.zeros(len(prompts), width_prompt + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, width_prompt - len(prompt) : width_prompt] = torch.tensor(prompt)
        mask[row, width_prompt - len(prompt) : width_prompt] = 1
        if completion:
            ids[row, width_prompt : width_prompt + len(completion)] = torch.tensor(completion)
            mask[row, width_prompt : width_prompt + len(completion)] = 1
    return ids, mask, width


def ragged(seed, groups=4, largest=5, prompt=12, completion=15, words=50):
    random = np.random.default_rng(seed)
    prompts, completions = [], []
    for _ in range(groups):
        tokens = random.integers(1, words, random.integers(1, prompt + 1)).tolist()
        for _ in range(random.integers(1, largest + 1)):
            prompts.append(tokens)
            completions.append(
                random.integers(1, words, random.integers(1, completion + 1)).tolist()
            )
    shuffled = random.permutation(len(prompts))
    return padded([prompts[i] for i in shuffled], [completions[i] for i in shuffled])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("multiple", [1, 64])
def test_every_scored_token_is_predicted_from_what_precedes_it(seed, multiple):
    ids, mask, width = ragged(seed)
    groups = group_rollouts(ids, mask, width)
    batch = pack(groups, CPU, multiple)
    assert len(batch.tokens) % multiple == 0
    assert len(groups) == len(
        {tuple(r[m == 1].tolist()) for r, m in zip(ids[:, :-width], mask[:, :-width], strict=True)}
    )
    context = visible(batch.segments)
    slots = []
    for source, target, slot in zip(batch.sources, batch.targets, batch.slots, strict=True):
        row, column = divmod(int(slot), width)
        slots.append(int(slot))
        column += ids.shape[1] - width
        assert mask[row, column] == 1
        assert target == ids[row, column]
        # What the source sees is exactly the row's tokens before the target, in their order.
        seen = np.flatnonzero(context[int(source)])
        before = ids[row, :column][mask[row, :column] == 1]
        assert batch.tokens[seen].tolist() == before.tolist()
        assert batch.positions[seen].tolist() == list(range(len(before)))
    scored = mask[:, -width:].reshape(-1).nonzero()[:, 0].tolist()
    assert sorted(slots) == scored


def visible(segments: Segments, window=None) -> np.ndarray:
    """Which tokens each token sees, by the definition."""
    seen = np.zeros((segments.tokens, segments.tokens), bool)
    for start, end, first, last in zip(
        segments.start, segments.end, segments.prompt_start, segments.prompt_end, strict=True
    ):
        for query in range(start, end):
            for key in [*range(first, last), *range(start, query + 1)]:
                distance = segments.positions[query] - segments.positions[key]
                seen[query, key] = window is None or distance < window
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 4, 9])
def test_block_mask_is_the_definition(monkeypatch, seed, window):
    # Small blocks, so that some are filled and some untouched.
    monkeypatch.setattr(segment_attention, "BLOCK", 4)
    ids, mask, width = ragged(seed)
    segments = pack(group_rollouts(ids, mask, width), CPU, 4).segments
    wanted = visible(segments, window)
    touched, filled = segment_attention._blocks(segments, window)
    blocks = wanted.reshape(len(touched), 4, len(touched), 4).transpose(0, 2, 1, 3)
    # No pair is lost; a filled block is wholly seen; the mask by tokens decides the rest.
    assert not (blocks.any((2, 3)) & ~touched).any()
    assert not (filled & ~blocks.all((2, 3))).any()
    mask_mod = PackedPlan(segments, CPU, True).prepare({window}).mask(window).mask_mod
    query, key = torch.meshgrid(
        torch.arange(segments.tokens), torch.arange(segments.tokens), indexing="ij"
    )
    assert (mask_mod(None, None, query, key).numpy() == wanted).all()
    if window is None:
        assert filled.any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("form", ["flex", "short rows", "single short rows", "long rows"])
def test_attention_is_the_definition(monkeypatch, window, softcap, form):
    flex = form == "flex"
    if form == "single short rows":
        monkeypatch.setattr(gathered_attention, "_MOST_SCORES", 1)
    if form == "long rows":
        monkeypatch.setattr(gathered_attention, "SHORT", 0)
    ids, mask, width = ragged(3)
    batch = pack(group_rollouts(ids, mask, width), CPU, 128 if flex else 1)
    tokens, heads, key_heads, size = len(batch.tokens), 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, h, tokens, size, dtype=torch.float64, generator=generator).requires_grad_()
        for h in (heads, key_heads, key_heads)
    )
    if form == "short rows":  # values need not be as wide as keys
        value = value.detach()[..., :5].requires_grad_()
    if flex:  # torch has no backward pass of flex attention on a CPU
        query, key, value = (x.detach() for x in (query, key, value))
    plan = PackedPlan(batch.segments, CPU, flex).prepare({window})
    found, _ = segment_attention.packed_attention(
        torch.nn.Identity(), query, key, value, None,
        packed=plan, scaling=0.3, sliding_window=window, softcap=softcap,
    )  # fmt: skip
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(2, 1)) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~torch.from_numpy(visible(batch.segments, window))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    wanted = torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(2, 1))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    if flex:
        return
    probe = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    for ours, theirs in zip(
        torch.autograd.grad((found * probe).sum(), (query, key, value)),
        torch.autograd.grad((wanted * probe).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_short_rows_of_similar_size_share_a_batch():
    lengths = np.array([10, 3, 9, 2, 10, 0, 1])
    context = lengths + 20
    rows = np.flatnonzero(lengths)
    together = gathered_attention._batched(rows, lengths, context)
    assert [part.tolist() for part in together] == [[0, 4, 2, 1, 3, 6]]
    lengths, context = lengths * 100, context * 100
    parts = gathered_attention._batched(rows, lengths, context)
    assert sorted(np.concatenate(parts)) == rows.tolist()
    assert len(parts) > 1
    for part in parts:
        scores = lengths[part].max() * context[part].max() * len(part)
        assert len(part) == 1 or scores <= gathered_attention._MOST_SCORES
        assert (np.diff(lengths[part]) <= 0).all()


def test_short_rows_have_a_batch_for_each_size_that_is_worth_one():
    lengths = np.repeat([10, 40], 200)
    parts = gathered_attention._batched(np.arange(400), lengths, lengths + 20)
    sizes = [set(lengths[part]) for part in parts]
    assert all(len(found) == 1 for found in sizes)
    # 40 queries and 60 keys are 2,400 scores, and 65,536 / 2,400 is 27 rows: 8 batches of 200.
    # 10 and 30 are 300 scores, and 218 rows fit.
    assert sizes == [{40}] * 8 + [{10}]


@pytest.mark.parametrize("budget", [1, 10, 30, 10_000])
def test_cut_keeps_every_completion_within_budget(budget):
    ids, mask, width = ragged(5)
    groups = group_rollouts(ids, mask, width)
    chunks = cut(groups, budget)
    kept = [c.slots.tolist() for chunk in chunks for g in chunk for c in g.completions]
    assert kept == [c.slots.tolist() for g in groups for c in g.completions]
    for chunk in chunks:
        fed = sum(group.fed for group in chunk)
        assert fed <= budget or sum(len(g.completions) for g in chunk) == 1
        assert fed == len(pack(chunk, CPU).tokens)


def test_masked_rows_take_no_part():
    ids, mask, width = padded([[1, 2], [1, 2], [3]], [[4, 5], [6], [7]])
    mask[1, -width:] = 0
    groups = group_rollouts(ids, mask, width)
    assert [len(g.completions) for g in groups] == [1, 1]
    mask[:, -width:] = 0
    groups = group_rollouts(ids, mask, width)
    assert [(g.tokens.tolist(), g.completions) for g in groups] == [([3], ())]
    batch = pack(groups, CPU)
    assert len(batch.tokens) == 1
    assert len(batch.sources) == 0


def test_completion_without_prompt_is_an_error():
    ids, mask, width = padded([[1]], [[2, 3]])
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="row 0 has a completion and no prompt"):
        group_rollouts(ids, mask, width)
