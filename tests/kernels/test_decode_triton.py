"""The decoding kernels against plain torch, in Triton's interpreter or on the GPU.

Triton decides at its import whether it interprets, so on a CPU this file runs itself in a process
of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_here = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="runs in the interpreted process"
)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-2000:]


def noise(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


# 16-bit types use several lanes. The interpreter's dot does not support bfloat16.
ATTENTION_TYPES = [
    (torch.float32, {"atol": 2e-5, "rtol": 1e-5}),
    (torch.float16, {"atol": 2e-3, "rtol": 2e-3}),
]


@runs_here
@pytest.mark.parametrize(("dtype", "close"), ATTENTION_TYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("fold", "width", "window", "softcap"),
    [(6, 16, None, None), (2, 24, 9, None), (1, 32, 40, 5.0), (3, 16, 1, 50.0)],
)
def test_attention_over_a_pool(fold, width, window, softcap, splits, dtype, close):
    from asymgrpo.kernels.decode.decode_attention import (
        Contexts,
        decode_attention,
        reference_attention,
    )

    torch.manual_seed(0)
    rows, heads, slots = 3, 2, 400
    pool_keys, pool_values = noise(2, slots, heads, width, dtype=dtype)
    query = noise(rows, heads * fold, width, dtype=dtype)
    places = [[0, 0, 70], [70, 70, 0], [150, 250, 399], [1, 90, 1]]
    contexts = Contexts(*[torch.tensor(column, device=DEVICE) for column in places])
    args = (query, pool_keys, pool_values, contexts, width**-0.5, window, softcap)
    expected = reference_attention(*[a.double() if torch.is_tensor(a) else a for a in args])
    torch.testing.assert_close(decode_attention(*args, splits=splits).double(), expected, **close)


def adapted(x, projection):
    """The definition, in float64."""
    y = x.double() @ projection.weight.double().T
    if projection.down is not None:
        low = x.double() @ projection.down.double().T
        y = y + low @ projection.up.double().T * projection.scaling
    return y


def projection(outputs, inputs, rank, dtype=torch.float32):
    from asymgrpo.kernels.decode.decode_projection import Projection

    if rank == 0:
        return Projection(noise(outputs, inputs, dtype=dtype))
    return Projection(
        noise(outputs, inputs, dtype=dtype),
        None,
        noise(rank, inputs),
        noise(outputs, rank),
        0.5,
    )


@runs_here
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "ranks"),
    [
        (5, 128, [48], [4]),
        (17, 80, [40, 16, 16], [3, 0, 3]),
        (33, 256, [64, 32, 32], [0, 0, 0]),
        (16, 64, [24, 8, 8], [20, 20, 20]),
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_projections_with_adapters(rows, inputs, outputs, ranks, splits):
    from asymgrpo.kernels.decode.decode_projection import Tiles, project

    torch.manual_seed(0)
    x = noise(rows, inputs)
    maps = [projection(n, inputs, rank) for n, rank in zip(outputs, ranks, strict=True)]
    parts = project(x, maps, Tiles(16, 16, 32, splits, 4, 2))
    expected = torch.cat([adapted(x, one) for one in maps], dim=1)
    torch.testing.assert_close(parts.double().sum(0), expected, atol=5e-4, rtol=1e-5)
    # Prefetching changes nothing, even of matrices with fewer rows or columns than it covers.
    prefetch = (noise(24, 40), noise(24, 40))
    again = project(x, maps, Tiles(16, 16, 32, splits, 4, 2), prefetch=prefetch)
    assert torch.equal(again, parts)


@runs_here
@pytest.mark.parametrize("ranks", [(0, 0), (4, 4), (0, 8), (40, 33)])
def test_the_gated_activation(ranks):
    from asymgrpo.kernels.decode.decode_projection import Tiles
    from asymgrpo.kernels.decode.decode_swiglu import swiglu

    torch.manual_seed(0)
    x = noise(19, 80, scale=0.2)
    gate, up = (projection(40, 80, rank) for rank in ranks)
    expected = torch.nn.functional.silu(adapted(x, gate)) * adapted(x, up)
    found = swiglu(x, gate, up, tiles=Tiles(16, 16, 32, 1, 4, 2))
    torch.testing.assert_close(found.double(), expected, atol=5e-4, rtol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU chooses the order itself")
@pytest.mark.parametrize("order", ["last first", "shuffled"])
def test_the_gated_activation_ends_in_any_order_of_blocks(order, monkeypatch):
    """Tiles that start before the LoRA down-projections would spin forever, were roles fixed."""
    from triton.runtime.interpreter import interpreter_builder

    from asymgrpo.kernels.decode.decode_projection import Tiles
    from asymgrpo.kernels.decode.decode_swiglu import swiglu

    torch.manual_seed(0)
    x = noise(39, 80, scale=0.2)
    gate, up = (projection(40, 80, rank) for rank in (4, 8))
    tiles = Tiles(16, 16, 32, 1, 4, 2)
    expected = swiglu(x, gate, up, tiles=tiles)
    start = interpreter_builder.set_grid_idx
    blocks = 3 * (3 + 2)  # strips of 16 rows; tiles of 16 columns and two down-projections
    places = list(range(blocks))[::-1]
    if order == "shuffled":
        places = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()
    started = []

    def permuted(index, y, z):
        started.append(places[index])
        start(places[index], y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", permuted)
    found = swiglu(x, gate, up, tiles=tiles)
    assert started == places
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no limit on shared memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_attention_fits_the_shared_memory(rows, width, dtype):
    from asymgrpo.kernels.decode.decode_attention import (
        Contexts,
        decode_attention,
        reference_attention,
    )

    torch.manual_seed(0)
    heads, slots = 2, 40 + 20 * rows
    pool_keys, pool_values = noise(2, slots, heads, width, dtype=dtype)
    query = noise(rows, heads * 6, width, dtype=dtype)
    starts = torch.arange(rows, device=DEVICE) * 20 + 40
    full = torch.full_like(starts, 20)
    contexts = Contexts(torch.zeros_like(starts), full * 2, starts, full)
    args = (query, pool_keys, pool_values, contexts, width**-0.5)
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    exact = (query.double(), pool_keys.double(), pool_values.double(), *args[3:])
    found = decode_attention(*args).double()
    torch.testing.assert_close(found, reference_attention(*exact).double(), **close)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="runs on the GPU")
@pytest.mark.parametrize("ranks", [(0, 0), (16, 16), (0, 8), (40, 33), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 64, 48), (16, 896, 4864), (64, 1536, 8960), (128, 1536, 8960), (512, 1536, 8960)],
)
def test_many_launches_of_the_gated_activation_end_and_agree(rows, inputs, outputs, dtype, ranks):
    """As in a step, behind its norm, on a GPU whose SMs another stream keeps busy."""
    from asymgrpo.kernels.decode.add_rmsnorm import add_rmsnorm
    from asymgrpo.kernels.decode.decode_swiglu import swiglu, swiglu_counters

    torch.manual_seed(0)
    launches = 300
    # Small, so that products of the two maps stay within what float16 holds.
    hidden, weight = noise(rows, inputs, dtype=dtype), noise(inputs, dtype=dtype, scale=0.05)
    gate, up = (projection(outputs, inputs, rank, dtype) for rank in ranks)
    width = -(-swiglu_counters(rows) // 32) * 32
    counters = torch.zeros(launches, width, dtype=torch.int32, device=DEVICE)
    busy, square = torch.cuda.Stream(), noise(4096, 4096, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(40):
            square = square @ square * 1e-4
    found = []
    for one in counters:
        normed = add_rmsnorm(hidden, None, None, weight, 1e-6)
        found.append(swiglu(normed, gate, up, one))
    torch.cuda.synchronize()
    assert all(torch.equal(one, found[0]) for one in found)
    if any(ranks):
        strips = swiglu_counters(rows) - 1
        assert (counters[:, 1 : 1 + strips] == 2).all()
    exact = torch.nn.functional.silu(adapted(normed, gate)) * adapted(normed, up)
    error = (found[0].double() - exact).abs().mean() / exact.abs().mean()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@runs_here
@pytest.mark.parametrize("rows", [19, 70, 130])
def test_the_gated_activation_by_bulk_copies(rows, monkeypatch):
    from asymgrpo.kernels.decode import decode_swiglu

    if INTERPRETED:
        monkeypatch.setattr(decode_swiglu, "_fits_tma", lambda *tensors: True)
    torch.manual_seed(0)
    # Not bfloat16, which the interpreter's dot does not support.
    x = noise(rows, 88, dtype=torch.float16, scale=0.2)
    gate, up = (projection(40, 88, 4, dtype=torch.float16) for _ in range(2))
    assert decode_swiglu._fits_tma(x, gate.weight, up.weight)
    # Rounded where the kernel rounds: the adapter and its input, each map, the activation.
    gates, ups = (
        (
            x.double() @ one.weight.double().T
            + (x.double() @ one.down.half().double().T).half().double()
            @ one.up.half().double().T
            * one.scaling
        )
        .half()
        .double()
        for one in (gate, up)
    )
    expected = (torch.nn.functional.silu(gates).half().double() * ups).half()
    found = decode_swiglu.swiglu(x, gate, up)
    # A float32 sum may round the other way: an ulp of each factor, and of the product.
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=2**-8)


@runs_here
@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_adding_and_norm(parts, bias):
    from asymgrpo.kernels.decode.add_rmsnorm import add_rmsnorm

    torch.manual_seed(0)
    hidden, weight = noise(3, 48), noise(48)
    added = None if parts is None else noise(parts, 3, 48)
    shift = noise(48) if bias and parts else None
    total = hidden.double()
    if added is not None:
        total = total + added.double().sum(0)
    if shift is not None:
        total = total + shift.double()
    expected = total * (total.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    normed = add_rmsnorm(hidden, added, shift, weight, 1e-6)
    torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden.double(), total, atol=1e-5, rtol=1e-5)


def new_tokens(rows, query_heads, heads, width, positions, *, bias, norm, rotate):
    """New tokens, and their queries, keys and values by the modules of transformers."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    from asymgrpo.kernels.decode.decode_qkv import NewTokens

    parts = noise(2, rows, (query_heads + 2 * heads) * width)
    sizes = [query_heads * width, heads * width, heads * width]
    biases = [noise(size) if bias else None for size in sizes]
    norms = [Qwen3RMSNorm(width).to(DEVICE) if norm else None for _ in range(2)]
    for one in norms:
        if one is not None:
            torch.nn.init.normal_(one.weight)
    table = noise(int(positions.max()) + 1, width)
    new = NewTokens(
        parts,
        tuple(biases),
        tuple(None if one is None else one.weight.detach() for one in norms),
        1e-6,
        (table.cos(), table.sin()) if rotate else None,
        query_heads,
    )
    pieces = list(parts.sum(0).split(sizes, dim=1))
    if bias:
        pieces = [piece + one for piece, one in zip(pieces, biases, strict=True)]
    q, k, v = (piece.view(rows, -1, width) for piece in pieces)
    if norm:
        q, k = norms[0](q), norms[1](k)
    if rotate:
        angles = table[positions]
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    return new, q.detach(), k.detach(), v


HEAD_KINDS = [
    {"bias": True, "norm": False, "rotate": True},
    {"bias": False, "norm": True, "rotate": True},
    {"bias": False, "norm": False, "rotate": False},
]


@runs_here
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_placing_queries_keys_and_values(kind):
    from asymgrpo.kernels.decode.decode_qkv import write_kv

    torch.manual_seed(0)
    positions = torch.tensor([3, 0, 4], device=DEVICE)
    new, q, k, v = new_tokens(3, 4, 2, 24, positions, **kind)
    keys, values = torch.zeros(2, 9, 2, 24, device=DEVICE)
    slots = torch.tensor([7, 2, 4], device=DEVICE)
    query = write_kv(new, positions, slots, keys, values)
    torch.testing.assert_close(query, q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(keys[slots], k, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values[slots], v, atol=1e-5, rtol=1e-5)
    assert int((keys != 0).any(-1).any(-1).sum()) == 3


@runs_here
@pytest.mark.parametrize(("dtype", "close"), ATTENTION_TYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("fold", "width", "window", "kind"),
    [
        (6, 16, None, HEAD_KINDS[0]),
        (2, 24, 9, HEAD_KINDS[1]),
        (3, 32, 1, HEAD_KINDS[2]),
        (1, 16, 75, HEAD_KINDS[1]),
    ],
)
def test_attention_of_new_tokens(fold, width, window, kind, splits, dtype, close):
    from asymgrpo.kernels.decode.decode_attention import (
        Contexts,
        decode_attention,
        reference_attention,
    )

    torch.manual_seed(0)
    rows, heads, slots = 4, 2, 400
    pool = noise(2, slots, heads, width, dtype=dtype)
    # A prompt and own tokens; a long one; no prompt; the new token alone.
    columns = [[0, 0, 0, 0], [70, 70, 0, 0], [150, 250, 330, 399], [4, 71, 66, 1]]
    contexts = Contexts(*[torch.tensor(column, device=DEVICE) for column in columns])
    last = contexts.own_start + contexts.own_count - 1
    positions = contexts.prompt_count + contexts.own_count - 1
    new, q, k, v = new_tokens(rows, heads * fold, heads, width, positions, **kind)
    expected_pool = pool.clone()
    expected_pool[0, last], expected_pool[1, last] = k.to(dtype), v.to(dtype)
    scaling = width**-0.5
    expected = reference_attention(q.double(), *expected_pool.double(), contexts, scaling, window)
    found = decode_attention(new, *pool, contexts, scaling, window, splits=splits)
    torch.testing.assert_close(found.double(), expected, **close)
    torch.testing.assert_close(pool, expected_pool, **close)


@runs_here
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("vocab", [11, 1_000, 20_000])  # the last by two blocks a part
def test_drawing_is_the_plain_draw(greedy, vocab):
    from asymgrpo.kernels.decode.fused_sampling import draw_unfiltered
    from asymgrpo.kernels.decode.token_sampling import Filters, draw, noise_keys

    torch.manual_seed(0)
    logits = noise(6, vocab, scale=4.0)
    logits[2, 3] = -torch.inf
    seeds = torch.tensor([0, 1, 2**62, -7, 5, 5], device=DEVICE)
    counts = torch.tensor([0, 3, 9, 1, 4, 5], device=DEVICE)
    expected = draw(logits, noise_keys(seeds, counts), Filters(temperature=0.7, greedy=greedy))
    found = draw_unfiltered(logits, seeds, counts, 0.7, greedy)
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], expected[2], atol=1e-5, rtol=1e-5)


@runs_here
def test_rows_advance_and_end():
    from asymgrpo.kernels.decode.fused_sampling import Rows, advance

    def column(*values):
        return torch.tensor(values, device=DEVICE)

    rows = Rows(
        token=column(1, 1, 1, 1),
        position=column(10, 20, 30, 40),
        seed=column(0, 0, 0, 0),
        count=column(2, 2, 4, 2),
        limit=column(5, 5, 5, 5),
        alive=column(1, 1, 1, 0),
        finished=column(0, 0, 0, 1),
        place=column(3, 0, 1, 2),
        slot=column(100, 200, 300, 400),
        own_count=column(3, 3, 5, 3),
    )
    results = (
        torch.zeros(4, 5, dtype=torch.int32, device=DEVICE),
        torch.zeros(4, 5, device=DEVICE),
        torch.zeros(4, 5, device=DEVICE),
    )
    drawn = (column(7, 9, 8, 6), noise(4), noise(4))
    advance(drawn, rows, results, column(9, 33))
    assert rows.alive.tolist() == [1, 0, 0, 0]
    assert rows.finished.tolist() == [0, 1, 0, 1]
    assert rows.count.tolist() == [3, 3, 5, 2]
    assert rows.token.tolist() == [7, 1, 1, 1]
    assert rows.position.tolist() == [11, 20, 30, 40]
    assert rows.slot.tolist() == [101, 200, 300, 400]
    assert rows.own_count.tolist() == [4, 1, 1, 1]
    assert results[0].tolist() == [[0, 0, 9, 0, 0], [0, 0, 0, 0, 8], [0] * 5, [0, 0, 7, 0, 0]]
    assert results[1][3, 2].item() == drawn[1][0].item()
    assert results[2][1, 4].item() == drawn[2][2].item()
