"""Padded rollouts laid out without padding, those of a prompt behind one copy of it.

TRL hands over [B, L] tensors: prompts padded on the left, completions of width T on the right.
Rows with the same prompt become one group; each of its completions is scored as if it stood
alone. The last token of a completion is predicted but predicts nothing, so it is not fed.

B rollouts, L columns, T completion columns, N packed tokens, M scored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asymgrpo.kernels.packed_attention import Segments

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Completion:
    """The completion of one row: its tokens, their positions, and their places in [B, T]."""

    tokens: Array
    positions: Array
    slots: Array


@dataclass(frozen=True)
class Group:
    """A prompt and the completions in the batch that answer it."""

    tokens: Array
    positions: Array
    completions: tuple[Completion, ...]

    @property
    def fed(self) -> int:
        """How many packed tokens the group takes."""
        return len(self.tokens) + sum(len(x.tokens) - 1 for x in self.completions)


@dataclass(frozen=True)
class PackedBatch:
    """Packed tokens with what is to be predicted from them."""

    tokens: Tensor  # [N] ids
    positions: Tensor  # [N] as if each rollout stood alone behind its prompt
    segments: Segments
    sources: Tensor  # [M] the packed token whose hidden state predicts the target
    targets: Tensor  # [M] ids
    slots: Tensor  # [M] flat index into [B, T]

    def __post_init__(self) -> None:
        if self.tokens.shape != self.positions.shape or self.segments.tokens != len(self.tokens):
            raise ValueError("tokens, positions and segments disagree")
        if not self.sources.shape == self.targets.shape == self.slots.shape:
            raise ValueError("sources, targets and slots disagree")


def group_rollouts(input_ids: Tensor, attention_mask: Tensor, width: int) -> list[Group]:
    """Groups of the rows of `input_ids` [B, L] by equal prompt; the last `width` columns answer.

    Rows with no unmasked completion token take no part. Where that leaves nothing, one prompt
    stands alone, so that a score of nothing still depends on the model.

    >>> ids = torch.tensor([[0, 5, 6, 7, 8], [0, 5, 6, 9, 0], [3, 4, 1, 2, 0]])
    >>> mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    >>> [(g.tokens.tolist(), [c.tokens.tolist() for c in g.completions])
    ...  for g in group_rollouts(ids, mask, 2)]
    [([5, 6], [[7, 8], [9]]), ([3, 4, 1], [[2]])]
    """
    ids, kept = input_ids.cpu().numpy(), attention_mask.cpu().numpy() != 0
    split = ids.shape[1] - width
    found: dict[tuple[bytes, bytes], tuple[Array, Array, list[Completion]]] = {}
    for row, (row_ids, row_kept) in enumerate(zip(ids, kept, strict=True)):
        prompt = np.flatnonzero(row_kept[:split])
        answer = split + np.flatnonzero(row_kept[split:])
        if not len(answer) and (found or row < len(ids) - 1):
            continue
        if not len(prompt):
            raise ValueError(f"row {row} has a completion and no prompt")
        # Columns count from the first token, so that left padding leaves no trace.
        positions = prompt - prompt[0]
        key = (row_ids[prompt].tobytes(), positions.tobytes())
        _, _, completions = found.setdefault(key, (row_ids[prompt], positions, []))
        if len(answer):
            slots = row * width + answer - split
            completions.append(Completion(row_ids[answer], answer - prompt[0], slots))
    return [Group(tokens, positions, tuple(rest)) for tokens, positions, rest in found.values()]


def cut(groups: Sequence[Group], budget: int | None) -> list[list[Group]]:
    """Groups in lists of at most `budget` packed tokens each; a large group is split.

    A prompt with a single completion is never split, so a list may exceed the budget by itself.

    >>> one = Completion(np.arange(4), np.arange(4), np.arange(4))
    >>> group = Group(np.arange(3), np.arange(3), (one,) * 4)
    >>> [[len(g.completions) for g in chunk] for chunk in cut([group, group], 12)]
    [[3], [1, 1], [3]]
    """
    if budget is None:
        return [list(groups)]
    chunks: list[list[Group]] = [[]]
    left = budget
    for group in groups:
        taken: list[Completion] = []
        for completion in group.completions:
            cost = len(completion.tokens) - 1 + (0 if taken else len(group.tokens))
            if cost > left and (taken or chunks[-1]):
                if taken:
                    chunks[-1].append(Group(group.tokens, group.positions, tuple(taken)))
                    taken = []
                chunks.append([])
                left, cost = budget, len(completion.tokens) - 1 + len(group.tokens)
            taken.append(completion)
            left -= cost
        chunks[-1].append(Group(group.tokens, group.positions, tuple(taken)))
    return chunks


def pack(groups: Sequence[Group], device: torch.device, multiple: int = 1) -> PackedBatch:
    """Lay groups out one after the other; filler of its own fills up to a `multiple` of tokens.

    >>> one = Completion(np.array([7, 8]), np.array([2, 3]), np.array([0, 1]))
    >>> two = Completion(np.array([9]), np.array([2]), np.array([2]))
    >>> batch = pack([Group(np.array([5, 6]), np.array([0, 1]), (one, two))], torch.device("cpu"))
    >>> batch.tokens.tolist(), batch.sources.tolist(), batch.targets.tolist()
    ([5, 6, 7], [1, 2, 1], [7, 8, 9])
    """
    tokens: list[Array] = []
    positions: list[Array] = []
    segments: list[tuple[int, int, int, int]] = []
    sources: list[Array] = []
    end = 0

    def append(new_tokens: Array, new_positions: Array, prompt: tuple[int, int]) -> None:
        nonlocal end
        tokens.append(new_tokens)
        positions.append(new_positions)
        segments.append((end, end + len(new_tokens), *prompt))
        end += len(new_tokens)

    completions = [x for group in groups for x in group.completions]
    for group in groups:
        prompt = (end, end + len(group.tokens))
        append(group.tokens, group.positions, (end, end))
        for completion in group.completions:
            # Each token is predicted from the one before it, the first from the prompt's last.
            before = np.arange(end - 1, end - 1 + len(completion.tokens))
            before[0] = prompt[1] - 1
            sources.append(before)
            append(completion.tokens[:-1], completion.positions[:-1], prompt)
    filler = -end % multiple
    if filler:
        append(np.zeros(filler, np.int64), np.arange(filler), (end, end))
    nothing = np.zeros(0, np.int64)

    def joined(parts: list[Array]) -> Tensor:
        whole = np.concatenate([nothing, *parts]).astype(np.int64)
        return torch.from_numpy(whole).to(device, non_blocking=True)

    return PackedBatch(
        tokens=joined(tokens),
        positions=joined(positions),
        segments=Segments(np.concatenate(positions), *np.array(segments, np.int64).T),
        sources=joined(sources),
        targets=joined([x.tokens for x in completions]),
        slots=joined([x.slots for x in completions]),
    )
