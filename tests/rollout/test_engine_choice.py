"""The transformers engine, and how an engine is chosen."""

from __future__ import annotations

import pytest
import torch

from asymgrpo.errors import UserError
from asymgrpo.rollout import NativeEngine, Sampling, TransformersEngine, choose_engine


@pytest.mark.parametrize(
    "changes",
    [{}, {"greedy": True}, {"temperature": 0.6, "top_p": 0.9}, {"repetition_penalty": 1.5}],
)
def test_both_engines_give_the_same_rollouts(changes, tiny, ragged):
    model = tiny("qwen2")
    prompts = [prompt for prompt in ragged(8) for _ in range(2)]
    sampling = Sampling(max_new_tokens=12, **changes)
    limits = [12 - index % 3 for index in range(16)]
    native = NativeEngine(model, None).generate(prompts, sampling, range(16), limits=limits)
    plain = TransformersEngine(model, None, most_rows=5).generate(
        prompts, sampling, range(16), limits=limits
    )
    for ours, theirs in zip(native, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finished == theirs.finished
        assert ours.logps == pytest.approx(theirs.logps, abs=1e-4)
        assert ours.entropies == pytest.approx(theirs.entropies, abs=1e-4)


def test_the_named_engine_is_chosen(tiny):
    model = tiny("qwen2")
    assert choose_engine("native", model, None)[0].name == "native"
    assert choose_engine("transformers", model, None)[0].name == "transformers"
    engine, reason = choose_engine("vllm", model, None)
    assert engine.name == "transformers"
    assert "inside the trainer" in reason
    with pytest.raises(UserError, match="native, transformers, vllm"):
        choose_engine("nativ", model, None)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "smollm3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_families_run_natively(family, dtype, tiny, lora):
    assert choose_engine("native", lora(tiny(family, dtype=dtype)), None)[1] is None


def test_what_native_cannot_run_falls_back_and_says_why(tiny):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, eos_token_id=2)
    )
    engine, reason = choose_engine("native", model, None)
    assert engine.name == "transformers"
    assert reason == (
        "engine transformers, not native: bloom does not use transformers' attention interface"
    )
    rollouts = engine.generate([[3, 4], [5]], Sampling(max_new_tokens=4), [0, 1])
    assert all(1 <= len(rollout.token_ids) <= 4 for rollout in rollouts)


def test_a_model_with_other_logits_falls_back(tiny):
    """A layer that looks at its mask gets none from the engine, which the comparison finds out."""
    model = tiny("qwen2")
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def peculiar(hidden_states, **kwargs):
        output, weights = original(hidden_states, **kwargs)
        return output * (1 + hidden_states.shape[1]), weights

    attention.forward = peculiar
    engine, reason = choose_engine("native", model, None)
    assert engine.name == "transformers"
    assert "other logits" in reason


def test_prompt_learning_falls_back(tiny):
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(
        tiny("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    assert "virtual tokens" in choose_engine("native", model, None)[1]
