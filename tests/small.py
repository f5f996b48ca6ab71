"""A small tokenizer and model, made here."""

from __future__ import annotations

from typing import Any


def make_tokenizer() -> Any:
    """A character tokenizer of some 40 symbols with separate pad and end tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<eos>", "<unk>", *"0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz?"]
    core = Tokenizer(
        models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A random Qwen2 of two layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(make_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(settings | changes)))
