"""The decoder in graphs, step by step without graphs, in Triton's interpreter: the same rollouts.

On a GPU test_native_engine.py runs it in graphs; here its kernels, buckets and bookkeeping run on a
CPU, in a process of its own since Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from asymgrpo.rollout import NativeEngine, Sampling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreted process")


@pytest.mark.skipif(INTERPRETED, reason="this is the process")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert outcome.returncode == 0, outcome.stdout[-4000:] + outcome.stderr[-2000:]


def in_graphs(engine, monkeypatch, **settings):
    from asymgrpo.kernels.decode import decode_attention, fused_sampling
    from asymgrpo.rollout.native import graph_decode

    # The interpreter takes a good while for each program of a kernel.
    monkeypatch.setattr(decode_attention, "splits_for", lambda rows, heads, sms: 2)
    monkeypatch.setattr(fused_sampling, "PARTS", 2)
    for name, value in {"BUCKETS": (2, 4, 6), "POLL_EVERY": 3, **settings}.items():
        monkeypatch.setattr(graph_decode, name, value)
    decoder = graph_decode.GraphDecoder(
        engine.model, engine._forward, engine._vocab, print, fused=engine.decoder == "fused"
    )
    monkeypatch.setattr(engine, "_graph_decoder", lambda: decoder)
    monkeypatch.setattr(engine, "_rows_at_once", lambda groups: engine.most_rows)
    return decoder


def same(ours, theirs):
    assert [rollout.token_ids for rollout in ours] == [rollout.token_ids for rollout in theirs]
    assert [rollout.finished for rollout in ours] == [rollout.finished for rollout in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=1e-4)
        assert one.entropies == pytest.approx(other.entropies, abs=1e-4)


SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "initializer_range": 0.3,
}


@interpreted
@pytest.mark.parametrize(
    ("family", "adapter", "fused"),
    [
        ("qwen2", True, True),
        ("qwen3", False, True),
        ("smollm3", True, True),
        ("mistral", False, True),
        ("gemma2", True, False),
    ],
)
def test_the_same_rollouts_as_without(family, adapter, fused, tiny, lora, monkeypatch):
    model = tiny(family, **SMALL)
    if adapter:
        model = lora(model).eval()
    engine = NativeEngine(model, None, most_rows=3, stop_token_ids=range(2, 8))
    prompts = [[9, 8, 3, 20, 31], [9, 8, 3, 20, 31], [7], [5, 6, 4, 4, 30, 11, 12, 13]]
    sampling = Sampling(max_new_tokens=5)
    limits = [5, 2, 4, 5]
    expected = engine.generate(prompts, sampling, range(4), limits=limits)
    decoder = in_graphs(engine, monkeypatch)
    same(engine.generate(prompts, sampling, range(4), limits=limits), expected)
    assert (decoder._plan is not None) == fused
    assert len({len(rollout.token_ids) for rollout in expected}) > 1


@interpreted
@pytest.mark.parametrize("decoder", ["fused", "graph"])
def test_the_decoders_give_the_same_rollouts_as_eager(decoder, tiny, lora, monkeypatch):
    model = lora(tiny("qwen2", **SMALL)).eval()
    prompts = [[9, 8, 3, 20, 31], [9, 8, 3, 20, 31], [7]]
    sampling = Sampling(max_new_tokens=4)
    eager = NativeEngine(model, None, decoder="eager", stop_token_ids=[2])
    expected = eager.generate(prompts, sampling, range(3))
    engine = NativeEngine(model, None, decoder=decoder, stop_token_ids=[2])
    graphs = in_graphs(engine, monkeypatch)
    same(engine.generate(prompts, sampling, range(3)), expected)
    assert (graphs._plan is not None) == (decoder == "fused")


@interpreted
@pytest.mark.parametrize(
    "changes",
    [{"greedy": True}, {"top_p": 0.8, "top_k": 9}, {"repetition_penalty": 1.7}],
)
def test_other_ways_of_drawing(changes, tiny, ragged, monkeypatch):
    # Gemma runs by its own forward, which the interpreter leaves alone.
    engine = NativeEngine(tiny("gemma", **SMALL), None)
    prompts = [[token % 40 for token in prompt] for prompt in ragged(5, 6)]
    sampling = Sampling(max_new_tokens=8, **changes)
    limits = [1, 8, 3, 5, 8]
    expected = engine.generate(prompts, sampling, range(5), limits=limits)
    in_graphs(engine, monkeypatch)
    same(engine.generate(prompts, sampling, range(5), limits=limits), expected)
    same(engine.generate(prompts, sampling, range(5), limits=limits), expected)


@interpreted
def test_buffers_grow_and_stay(tiny, ragged, monkeypatch):
    engine = NativeEngine(tiny("gemma", **SMALL), None)
    decoder = in_graphs(engine, monkeypatch)
    prompts = [[token % 40 for token in prompt] for prompt in ragged(3, 6)]
    engine.generate(prompts, Sampling(max_new_tokens=2), range(3))
    held = decoder._buffers
    engine.generate(prompts, Sampling(max_new_tokens=2), range(3))
    assert decoder._buffers is held
    engine.generate(prompts, Sampling(max_new_tokens=4), range(3))
    assert decoder._buffers is not held
    engine.release()


@interpreted
def test_the_same_rollouts_as_one_by_one(tiny, monkeypatch):
    """Rows that end at all kinds of steps, by limits and stop tokens, move between buckets."""
    engine = NativeEngine(tiny("gemma", **SMALL), None, most_rows=6, stop_token_ids=[2, 31])
    prompts = [[9, 8, 3], [9, 8, 3], [9, 8, 3], [7], [5, 6, 4, 30], [5, 6, 4, 30]] * 2
    sampling = Sampling(max_new_tokens=17)
    limits = [17, 1, 4, 9, 3, 6, 2, 17, 12, 5, 17, 8]
    expected = [
        engine.generate([prompt], sampling, [seed], limits=[limit])[0]
        for prompt, seed, limit in zip(prompts, range(12), limits, strict=True)
    ]
    in_graphs(engine, monkeypatch)
    progress = []
    found = engine.generate(
        prompts, sampling, range(12), lambda done, _: progress.append(done), limits=limits
    )
    same(found, expected)
    lengths = [len(rollout.token_ids) for rollout in expected]
    assert len(set(lengths)) > 5
    assert {rollout.finished for rollout in expected} == {True, False}
    assert progress == sorted(set(progress))
    assert progress[-1] == 12


class Script:
    """Stands in for the device: every row stops at a step of its own, and steps are counted."""

    def __init__(self, decoder, stops_at, monkeypatch):
        self.stops_at = torch.tensor([*stops_at, *[0] * 8])
        self.steps = []
        self.events = []
        script = self

        class NotedCopy(graphs_module().HostCopy):
            def __init__(self, source):
                script.events.append("copy")
                super().__init__(source)

            def values(self):
                script.events.append("wait")
                return super().values()

        monkeypatch.setattr(graphs_module(), "HostCopy", NotedCopy)
        monkeypatch.setattr(
            decoder, "_step", lambda buffers, bucket, *rest: self.of(buffers, bucket)
        )

    def of(self, buffers, bucket):
        def step():
            self.steps.append(bucket)
            self.events.append("step")
            rows, _ = buffers.views(bucket)
            for row in rows.alive.nonzero()[:, 0].tolist():
                place, count = int(rows.place[row]), int(rows.count[row])
                for result in buffers.results:
                    result[place, count] = 100 * place + count
                rows.count[row] += 1
                rows.finished[row] = int(self.stops_at[place] == count + 1)
                rows.alive[row] = int(self.stops_at[place] > count + 1 < rows.limit[row])

        return step

    def decode(self, decoder, limits):
        from asymgrpo.kernels.decode.token_sampling import Filters
        from asymgrpo.models.module_state import decoding
        from asymgrpo.rollout.native.cache_attention import ATTENTION
        from asymgrpo.rollout.scheduler import PromptGroup, RolloutRequest

        rows = tuple(RolloutRequest(index, 0, limit) for index, limit in enumerate(limits))
        done = []
        with decoding(decoder.model, ATTENTION):
            found = decoder.decode(
                [PromptGroup((5,), rows)], Filters(), torch.tensor([2]), done.append
            )
        assert sum(done) == len(rows)
        assert min(done) > 0
        return found


def graphs_module():
    from asymgrpo.rollout.native import graph_decode

    return graph_decode


def steps_needed(limits, ends, every, ahead, buckets):
    """The bucket of each step: rows leave after their limit, or the look that sees their stop."""
    rows = list(zip(limits, ends, strict=True))
    bucket, done, steps = len(buckets) - 1, 0, []
    while rows:
        while bucket and len(rows) <= buckets[bucket - 1]:
            bucket -= 1
        most = max(limit for limit, _ in rows) - done
        steps += [buckets[bucket]] * min(every, most)
        done += min(every, most)
        rows = [(limit, end) for limit, end in rows if limit > done and end > done - ahead]
    return steps


@interpreted
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_step_more_than_needed(ahead, tiny, monkeypatch):
    draw = random.Random(ahead)
    engine = NativeEngine(tiny("gemma", **SMALL), None)
    buckets = (1, 2, 3, 4, 6, 8)
    decoder = in_graphs(engine, monkeypatch, BUCKETS=buckets, POLL_EVERY=3, POLL_AHEAD=ahead)
    for case in range(60):
        limits = [draw.randint(1, 20) for _ in range(draw.randint(1, 8))]
        never, early = [99] * len(limits), [draw.randint(1, 5) for _ in limits]
        mixed = [draw.randint(1, 30) for _ in limits]
        stops_at = (never, early, mixed)[case % 3]
        script = Script(decoder, stops_at, monkeypatch)
        found = script.decode(decoder, limits)
        lengths = [min(pair) for pair in zip(limits, stops_at, strict=True)]
        assert found.lengths.tolist() == lengths
        ended = [at <= limit for limit, at in zip(limits, stops_at, strict=True)]
        assert found.finished.tolist() == ended
        for row, length in enumerate(lengths):
            expected = [100 * row + count for count in range(length)]
            for result in (found.tokens, found.logps, found.entropies):
                assert result[row, :length].tolist() == expected
        assert script.steps == steps_needed(limits, lengths, 3, ahead, buckets)
        # Beyond the last token: at most what a row that stopped is not yet known to have stopped.
        extra = len(script.steps) - max(lengths)
        assert extra <= 0 if stops_at is never else extra < 3 + ahead


@interpreted
def test_the_device_has_steps_to_do_while_the_host_waits(tiny, monkeypatch):
    engine = NativeEngine(tiny("gemma", **SMALL), None)
    decoder = in_graphs(engine, monkeypatch, POLL_EVERY=4, POLL_AHEAD=2)
    script = Script(decoder, [99, 99, 6], monkeypatch)
    script.decode(decoder, [11, 2, 9])
    chunk = ["step", "step", "copy", "step", "step", "wait"]
    assert script.events == chunk * 2 + ["step"] * 3
    assert script.steps == [4] * 4 + [2] * 7


@interpreted
def test_wider_weights_than_activations(tiny, lora):
    """Weights in float32 under a half-precision forward, as mixed precision trains them."""
    from asymgrpo.kernels.decode.decode_attention import Contexts
    from asymgrpo.rollout.native.fused_decode import (
        AdapterCasts,
        RopeTable,
        build_plan,
        fused_logits,
    )
    from asymgrpo.rollout.native.kv_pool import KVPool, LayerShape

    model = lora(tiny("qwen2", **SMALL)).eval()
    shapes = {layer: LayerShape(1, 16, torch.float16) for layer in range(1)}
    column = torch.ones(2, dtype=torch.long)
    tokens = torch.tensor([5, 6])
    contexts = Contexts(0 * column, 0 * column, torch.tensor([1, 2]), column)
    casts = AdapterCasts()
    plan = build_plan(model, torch.float16, 2, casts, RopeTable())
    casts.refresh()
    pool = KVPool(shapes, 4, torch.device("cpu"))
    with torch.no_grad():
        own = model(input_ids=tokens[:, None]).logits[:, 0]
        found = fused_logits(plan, tokens, contexts, pool)
    assert (found - own).abs().max() / own.abs().max() < 0.03


@interpreted
def test_what_has_no_plan(tiny, lora):
    from asymgrpo.rollout.native.fused_decode import AdapterCasts, NotFusable, RopeTable
    from asymgrpo.rollout.native.fused_decode import build_plan as read

    def plan_of(model, dtype):
        return read(model, dtype, 8, AdapterCasts(), RopeTable())

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    for model, reason in [
        (tiny("gemma"), "not of a family"),
        (tiny("qwen2", hidden_act="gelu"), "activation is gelu"),
        (tiny("llama", rope_parameters=dynamic), "depend on the length"),
    ]:
        with pytest.raises(NotFusable, match=reason):
            plan_of(model, torch.float32)
    merged = lora(tiny("qwen2"))
    merged.merge_adapter()
    with pytest.raises(NotFusable, match="merged"):
        plan_of(merged, torch.float32)
    hooked = tiny("llama")
    hooked.model.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(NotFusable, match="hook"):
        plan_of(hooked, torch.float32)
    off = lora(tiny("qwen2"))
    with off.disable_adapter():
        assert plan_of(off, torch.float32).layers[0].gate.down is None
    assert plan_of(off, torch.float32).layers[0].gate.rank == 4


@interpreted
def test_rotations_are_those_of_the_model(tiny):
    from asymgrpo.rollout.native.fused_decode import RopeTable

    rotary = tiny("llama").model.rotary_emb
    rope_table, like = RopeTable(), torch.zeros(1, 8)
    cos, sin = rope_table.get(rotary, like, 5)
    own_cos, own_sin = rotary(like, torch.tensor([[0, 3, 700]]))
    assert torch.equal(cos[[0, 3, 700]], own_cos[0])
    assert torch.equal(sin[[0, 3, 700]], own_sin[0])
    assert rope_table.get(rotary, like, 1_024)[0] is cos
    assert len(rope_table.get(rotary, like, 1_025)[0]) == 2_048
    assert rope_table.get(rotary, like.half(), 5)[0].dtype == torch.float16


@interpreted
@pytest.mark.parametrize("calls", [0, 5], ids=["at once", "after some steps"])
def test_a_device_too_small_for_the_fused_kernels(tiny, monkeypatch, capsys, calls):
    from triton.runtime.errors import OutOfResources

    from asymgrpo.rollout.native import graph_decode

    engine = NativeEngine(tiny("qwen2", **SMALL), None, stop_token_ids=[2])
    prompts, seeds = [[5, 6], [5, 6], [7, 8, 9]], [1, 2, 3]
    sampling, limits = Sampling(max_new_tokens=7), [2, 7, 3]
    expected = engine.generate(prompts, sampling, seeds, limits=limits)
    in_graphs(engine, monkeypatch)
    whole, left = graph_decode.fused_logits, calls

    def no_room(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise OutOfResources(300_000, 100_000, "shared memory")
        return whole(*args)

    monkeypatch.setattr(graph_decode, "fused_logits", no_room)
    progress = []
    found = engine.generate(
        prompts, sampling, seeds, lambda done, _: progress.append(done), limits=limits
    )
    same(found, expected)
    assert progress[-1] == 3
    assert progress == sorted(set(progress))
    assert "own kernels: out of resource: shared memory" in capsys.readouterr().out


@interpreted
@pytest.mark.parametrize("wrong", [lambda x: x + 0.01 * x.abs().max(), lambda x: x * torch.nan])
def test_fused_kernels_that_are_wrong_on_a_device(tiny, monkeypatch, capsys, wrong):
    from asymgrpo.rollout.native import graph_decode

    engine = NativeEngine(tiny("qwen2", **SMALL), None, stop_token_ids=[2])
    prompts, seeds, sampling = [[5, 6], [7, 8, 9]], [1, 2], Sampling(max_new_tokens=4)
    expected = engine.generate(prompts, sampling, seeds)
    in_graphs(engine, monkeypatch)
    whole = graph_decode.fused_logits
    monkeypatch.setattr(graph_decode, "fused_logits", lambda *args: wrong(whole(*args)))
    same(engine.generate(prompts, sampling, seeds), expected)
    assert "own kernels: the fused ones are off by" in capsys.readouterr().out
