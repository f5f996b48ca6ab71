"""The state of a decoding batch, at fixed addresses that captured graphs can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...kernels.decode.decode_attention import Contexts
from ...kernels.decode.fused_sampling import Rows
from ..scheduler import PromptGroup
from .kv_pool import KVPool

ROW_FIELDS = tuple(field.name for field in fields(Rows))
CONTEXT_FIELDS = ("prompt_start", "prompt_count", "own_start")


@dataclass
class Buffers:
    """The tensors that the graphs read and write."""

    pool: KVPool
    state: Tensor
    """`[fields, rows]`: the fields of `Rows`, then those of `Contexts`."""
    results: tuple[Tensor, Tensor, Tensor]
    seen: Tensor | None

    def views(self, bucket: int) -> tuple[Rows, Contexts]:
        """The state of the first `bucket` rows, and where their contexts are."""
        view = self.state[:, :bucket]
        rows = Rows(*view[: len(ROW_FIELDS)])
        prompt_start, prompt_count, own_start = view[len(ROW_FIELDS) :]
        return rows, Contexts(prompt_start, prompt_count, own_start, rows.own_count)

    def alive(self, count: int) -> Tensor:
        """For each of the first `count` rows, 1 while it is active."""
        return self.state[ROW_FIELDS.index("alive"), :count]

    def store_ends(self, bucket: int, ends: Tensor) -> None:
        """Writes the length and `finished` of the first `bucket` rows to `ends` `[2, places]`.

        A finished row keeps both until compaction gives its place to another row.
        """
        rows, _ = self.views(bucket)
        ends[0, rows.place] = rows.count
        ends[1, rows.place] = rows.finished

    def start(self, groups: Sequence[PromptGroup], steps: int, first_own: int) -> None:
        """Sets the initial state; the rows' own slots begin at `first_own`, `steps` per row."""
        self.state.copy_(_first_state(groups, steps, first_own, self.state.shape[1]))
        if self.seen is not None:
            self.seen.zero_()
            place = 0
            for group in groups:
                tokens = torch.tensor(group.prompt, device=self.seen.device)
                self.seen[place : place + len(group.rows), tokens] = True
                place += len(group.rows)

    def compact(self, left: Tensor, bucket: int, smaller: int) -> None:
        """Moves the rows `left`, of the first `bucket`, to the front of the first `smaller`."""
        dead = torch.tensor(sorted(set(range(bucket)) - set(left.tolist())), dtype=torch.long)
        order = torch.cat((left, dead))[:smaller]
        if self.state.device.type == "cuda":
            # A copy from pageable memory would wait for all pending work of the device.
            order = order.pin_memory()
        order = order.to(self.state.device, non_blocking=True)
        self.state[:, :smaller] = self.state[:, order]
        if self.seen is not None:
            self.seen[:smaller] = self.seen[order]


def _first_state(groups: Sequence[PromptGroup], steps: int, first_own: int, size: int) -> Tensor:
    """The table `[fields, size]` before the first step; prompts start at slot 1."""
    columns: dict[str, list[int]] = {name: [] for name in ROW_FIELDS + CONTEXT_FIELDS}
    own, prompt_start = first_own, 1
    for group in groups:
        count = len(group.prompt) - 1
        for row in group.rows:
            first = {
                "token": group.prompt[-1],
                "position": count,
                "seed": row.seed,
                "limit": row.limit,
                "alive": 1,
                "place": len(columns["place"]),
                "slot": own,
                "own_count": 1,
                "prompt_start": prompt_start,
                "prompt_count": count,
                "own_start": own,
            }
            for name, column in columns.items():
                column.append(first.get(name, 0))
            own += steps
        prompt_start += count
    # An empty place attends to slot 0, which no row uses, and writes to a spare row of results.
    empty = {"own_count": 1, "place": size}
    rows = len(columns["token"])
    return torch.tensor([columns[name] + [empty.get(name, 0)] * (size - rows) for name in columns])
