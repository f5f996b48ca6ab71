"""Packed scores and gradients against the padded batch through the model's own logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from asymgrpo.training import scorer as scorer_module
from asymgrpo.training.scorer import PackedScorer

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
GEMMA = {**COMMON, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, {**COMMON, "tie_word_embeddings": True}),
    "qwen2-sliding": (
        transformers.Qwen2Config,
        {**COMMON, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {**COMMON, "head_dim": 16, "tie_word_embeddings": False}),
    "llama": (transformers.LlamaConfig, {**COMMON, "tie_word_embeddings": False}),
    "mistral": (transformers.MistralConfig, {**COMMON, "sliding_window": 9}),
    "gemma": (transformers.GemmaConfig, {**COMMON, "head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {**GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "granite": (
        transformers.GraniteConfig,
        {**COMMON, "logits_scaling": 3.0, "attention_multiplier": 0.25},
    ),
}


def build(name, *, lora=False, dtype=torch.float32, device="cpu", seed=0):
    torch.manual_seed(seed)
    config_class, fields = ARCHITECTURES[name]
    config = config_class(**fields)
    # Of transformers' forms of attention only the eager one takes the soft-cap in every version.
    attention = "eager" if name == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if lora:
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device, dtype).train()


def rollouts(seed=0, *, groups=4, largest=5, device="cpu", prompt=9, completion=14):
    """Ragged groups in random order, left-padded prompts, right-padded completions."""
    random = np.random.default_rng(seed)
    rows = []
    for size in [1, *random.integers(1, largest + 1, groups - 1)]:
        tokens = random.integers(3, 97, random.integers(1, prompt + 1))
        for _ in range(size):
            rows.append((tokens, random.integers(3, 97, random.integers(1, completion + 1))))
    rows = [rows[i] for i in random.permutation(len(rows))]
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    ids = torch.zeros(len(rows), left + right, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, answer) in enumerate(rows):
        ids[row, left - len(tokens) : left] = torch.from_numpy(tokens)
        ids[row, left : left + len(answer)] = torch.from_numpy(answer)
        mask[row, left - len(tokens) : left + len(answer)] = 1
    return ids.to(device), mask.to(device), right


def padded_scores(model, ids, mask, width, temperature=1.0):
    """The model's own logits on the padded batch, as TRL calls it."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    log_p = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    kept = mask[:, -width:]
    logps = log_p.gather(2, ids[:, -width:, None])[..., 0]
    return logps * kept, -(log_p.exp() * log_p).sum(-1) * kept


def objective(logps, entropies, seed=5):
    """Some function of every log-prob and entropy, with a gradient that differs by token."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, *logps.shape, generator=generator).to(logps)
    return (weights[0] * logps).sum() + (weights[1] * entropies).sum()


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(model, scorer, batch, temperature=1.0, tolerance=1e-5):
    """Values within `tolerance`; each parameter's gradient within it of its own largest entry."""
    ids, mask, width = batch
    wanted = padded_scores(model, ids, mask, width, temperature)
    wanted_gradients = gradients(model, objective(*wanted))
    found = scorer.score(model, ids, mask, width)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours[mask[:, -width:] == 0] == 0).all()
        assert (ours - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max().item())
    assert_close_gradients(gradients(model, objective(*found)), wanted_gradients, tolerance)


def assert_close_gradients(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, theirs in wanted.items():
        error = (found[name] - theirs).abs().max()
        assert error <= tolerance * max(1.0, theirs.abs().max().item()), name


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_padded(name, lora, device):
    model = build(name, lora=lora, device=device)
    scorer = PackedScorer(temperature=0.8, compile_layers=False)
    assert scorer.supports(model) is None
    for seed in (1, 2):
        assert_same(model, scorer, rollouts(seed, device=device), 0.8)


@pytest.mark.gpu
def test_compiled_layers_equal_padded():
    model = build("qwen2", lora=True, device="cuda")
    scorer = PackedScorer()
    for seed in (1, 2, 3):
        assert_same(model, scorer, rollouts(seed, groups=8, device="cuda"))


@pytest.mark.gpu
def test_budget_is_measured_and_bounds_memory():
    model = build("llama", device="cuda")
    scorer = PackedScorer(compile_layers=False)
    batch = rollouts(1, groups=8, device="cuda")
    assert_same(model, scorer, batch)
    assert scorer.budget.tokens(True) > 1000


@pytest.mark.parametrize("budget", [5, 40, 90])
@pytest.mark.parametrize("lora", [False, True])
def test_recomputing_in_chunks_changes_nothing(lora, budget):
    model = build("qwen2", lora=lora)
    batch = rollouts(3)
    assert_same(model, PackedScorer(token_budget=budget), batch)
    with torch.no_grad():
        whole = PackedScorer().score(model, *batch)
        cut = PackedScorer(token_budget=budget).score(model, *batch)
    for ours, theirs in zip(cut, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_dropout_is_the_same_when_recomputed(monkeypatch):
    # The adapter's dropout draws again in the backward pass and must draw the same.
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(build("llama"), config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    batch = rollouts(3)

    def found():
        torch.manual_seed(11)
        return gradients(model, objective(*PackedScorer(token_budget=60).score(model, *batch)))

    def held(run, chunks, *_):
        parts = [run(chunk) for chunk in chunks]
        assert len(parts) > 1
        return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))

    recomputed = found()
    monkeypatch.setattr(scorer_module, "replay", held)
    assert_close_gradients(recomputed, found())


def test_out_of_memory_halves_the_budget_and_goes_on(monkeypatch):
    model = build("qwen2")
    batch = rollouts(4)
    lines = []
    scorer = PackedScorer(say=lines.append)
    limit = 45
    original = PackedScorer._pass

    def limited(self, causal, groups, device):
        if sum(g.fed for g in groups) > limit and sum(len(g.completions) for g in groups) > 1:
            raise torch.OutOfMemoryError("simulated")
        return original(self, causal, groups, device)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(PackedScorer, "_pass", limited)
    assert_same(model, scorer, batch)
    assert lines
    assert all("out of memory in the update; going on with" in line for line in lines)
    # Now memory shrinks between the forward and the backward pass.
    found = scorer.score(model, *batch)
    limit = 20
    before = len(lines)
    monkeypatch.setattr(PackedScorer, "_pass", limited)
    again = gradients(model, objective(*found))
    assert len(lines) > before
    monkeypatch.setattr(PackedScorer, "_pass", original)
    wanted = gradients(model, objective(*PackedScorer().score(model, *batch)))
    assert_close_gradients(again, wanted)


def test_adapter_switched_off_gives_the_reference():
    model = build("qwen2", lora=True)
    ids, mask, width = rollouts(6)
    scorer = PackedScorer()
    with torch.no_grad(), model.disable_adapter():
        found = scorer.score(model, ids, mask, width)
        wanted = padded_scores(model, ids, mask, width)
    with torch.no_grad():
        adapted = scorer.score(model, ids, mask, width)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-5)
    assert (adapted[0] - found[0]).abs().max() > 0.1


def test_fully_masked_rows_and_batches():
    model = build("qwen2")
    ids, mask, width = rollouts(7)
    mask[0, -width:] = 0
    assert_same(model, PackedScorer(), (ids, mask, width))
    mask[:, -width:] = 0
    logps, entropies = PackedScorer().score(model, ids, mask, width)
    assert (logps == 0).all()
    assert (entropies == 0).all()
    found = gradients(model, logps.sum())
    assert all((g == 0).all() for g in found.values())


def test_left_padding_and_ids_under_the_mask_leave_no_trace():
    model = build("llama", dtype=torch.float64)
    ids, mask, width = rollouts(8)
    scorer = PackedScorer()
    wanted = scorer.score(model, ids, mask, width)
    wider = torch.nn.functional.pad(ids, (5, 0), value=17)
    wider[:, 5:][mask == 0] = 23
    found = scorer.score(model, wider, torch.nn.functional.pad(mask, (5, 0)), width)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours == theirs).all()


def test_the_model_is_left_as_it_was():
    model = build("qwen2", lora=True)
    model.gradient_checkpointing_enable()
    causal = model.get_base_model()
    before = (causal.config._attn_implementation, causal.__dict__.get("forward"))
    layer = causal.model.layers[0]
    ids, mask, width = rollouts(1)
    PackedScorer().score(model, ids, mask, width)
    assert (causal.config._attn_implementation, causal.__dict__.get("forward")) == before
    assert layer.gradient_checkpointing is True
    broken = PackedScorer()
    broken._head = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        broken.score(model, ids, mask, width)
    assert (causal.config._attn_implementation, causal.__dict__.get("forward")) == before


def test_entropies_only_where_asked():
    model = build("qwen2")
    logps, entropies = PackedScorer().score(model, *rollouts(1), compute_entropy=False)
    assert entropies is None
    assert logps.requires_grad


def test_reasons_not_to_pack():
    scorer = PackedScorer()
    dropping = build("llama")
    dropping.config.attention_dropout = 0.1
    assert "attention_dropout" in scorer.supports(dropping)
    assert "causal language model" in scorer.supports(torch.nn.Linear(2, 2))
    covered = build("llama")
    covered = get_peft_model(covered, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    assert "output embedding" in scorer.supports(covered)


def test_a_model_that_packing_gets_wrong_is_found_out():
    model = build("llama", dtype=torch.float64)
    # Positions from the tokens' order, whatever it is told: what some models do.
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(
        x, torch.arange(x.shape[1])[None].expand(position_ids.shape)
    )
    assert "differ" in PackedScorer().supports(model)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bfloat16_within_its_rounding(device):
    # Both forms round to 8 bits at every layer; they differ from float64 by about as much.
    model = build("qwen2", lora=True, device=device)
    exact = build("qwen2", lora=True, dtype=torch.float64)
    model.to(torch.bfloat16)
    exact.load_state_dict({k: v.cpu().double() for k, v in model.state_dict().items()})
    ids, mask, width = rollouts(2, device=device)
    with torch.no_grad():
        rows = zip(ids.cpu().split(1), mask.cpu().split(1), strict=True)
        wanted = torch.cat([padded_scores(exact, *row, width)[0] for row in rows])
        padded = padded_scores(model, ids, mask, width)[0].cpu()
        packed = PackedScorer().score(model, ids, mask, width)[0].cpu()
    padded_error = (padded - wanted).abs().mean()
    assert (packed - wanted).abs().mean() <= 1.2 * padded_error
