"""Local stand-ins for the models, tokenizers and prompts that TRL's tests take from the hub.

Random weights at the hub models' shapes, one tokenizer whose ids are those that TRL's tests spell
out, and TRL's own prompts, read from its checkout. Written as folders under the hub's names, which
transformers and datasets prefer to the hub where they exist. The vocabulary is a tenth of the hub
models', so that the tests take minutes on a CPU; ids beyond it are moved within it, here and, by
`small_ids`, in the tests.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

OWNER = "trl-internal-testing"
SPECIAL = {
    151643: "<|endoftext|>",
    151644: "<|im_start|>",
    151645: "<|im_end|>",
    151657: "<tool_call>",
    151658: "</tool_call>",
    151665: "<tool_response>",
    151666: "</tool_response>",
    151667: "<think>",
    151668: "</think>",
}
PAD, END = SPECIAL[151643], SPECIAL[151645]
SPELLED = {  # the ids that the tests write completions in, and the texts beside them there
    314: " {",
    330: ' "',
    397: ">\n",
    293: " b",
    411: "out",
    450: "dec",
    497: '",',
    522: "</",
    606: "name",
    788: '":',
    894: " any",
    927: "sh",
    944: "'t",
    1318: "text",
    1414: " know",
    1513: " don",
    2765: " won",
    4913: '{"',
    5212: ' {"',
    5392: " tool",
    6023: "hi",
    6659: "call",
    7692: "async",
    9520: "step",
    11248: "}}\n",
    13477: "rement",
    14172: "tool",
    16252: " increment",
    16370: "arguments",
    17453: "Done",
    22785: "_tool",
    35744: "increment",
    64648: "multiply",
    93054: "_multiply",
    95642: '"}}\n',
}
VOCABULARY = 16384
_BEYOND = sorted(index for index in {**SPECIAL, **SPELLED} if index >= VOCABULARY - 128)
SMALL_ID = {index: VOCABULARY - 128 + place for place, index in enumerate(_BEYOND)}
"""Where an id beyond the small vocabulary lies in it; the special ones last, in their order."""
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2}
NEMOTRON = {
    "hidden_size": 16,
    "layers_block_type": ["mamba", "attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "mamba_n_groups": 1,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (class, chat template, sizes)
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2ForCausalLM", "qwen2_5", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    "tiny-Qwen3ForSequenceClassification": (
        "Qwen3ForSequenceClassification",
        "qwen3",
        {"head_dim": 16},
    ),
    "tiny-Qwen3MoeForCausalLM": (
        "Qwen3MoeForCausalLM",
        "qwen3",
        {"head_dim": 16, "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    ),
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", "qwen2_5", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", "qwen2_5", {}),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", "qwen2_5", {}),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", "qwen2_5", {"head_dim": 16}),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", "qwen2_5", {}),
    "tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "qwen2_5",
        {"num_local_experts": 4, **EXPERTS},
    ),
    "tiny-Glm4MoeForCausalLM": (
        "Glm4MoeForCausalLM",
        "qwen2_5",
        {"head_dim": 2, "n_routed_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
    ),
    "tiny-NemotronHForCausalLM-nano": ("NemotronHForCausalLM", "qwen2_5", NEMOTRON | EXPERTS),
}


def make_all(folder: Path, checkout: Path) -> None:
    """Everything under `folder`/trl-internal-testing, unless it is there already."""
    place = folder / OWNER
    if (place / "complete").is_file():
        return
    shutil.rmtree(place, ignore_errors=True)
    make_prompts(place / "zen", checkout)
    tokenizer = make_tokenizer()
    for name, (model, template, sizes) in MODELS.items():
        print(f"making {OWNER}/{name}", flush=True)
        make_model(place / name, model, sizes)
        tokenizer.chat_template = chat_template(template)
        tokenizer.save_pretrained(place / name)
    make_remote_model(place, checkout)
    (place / "complete").touch()


def small_ids(source: str) -> str:
    """TRL's tests with the ids of the completions that they spell out moved within the vocabulary.

    >>> small_ids("    [17453, 0, 151645],  # 'Done!'")
    "    [16257, 0, 16265],  # 'Done!'"
    """

    def moved(line: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda m: str(SMALL_ID.get(int(m[0]), int(m[0]))), line[0])

    return re.sub(r"^ *\[[\d, ]+\]", moved, source, flags=re.MULTILINE)


def make_prompts(folder: Path, checkout: Path) -> None:
    """TRL's prompts, from the script of its checkout that uploads them."""
    import datasets

    source = checkout / "scripts" / "generate_zen_dataset.py"
    spec = importlib.util.spec_from_file_location("generate_zen_dataset", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = ["---", "configs:"]

    def keep(splits: Any, repo_id: str, config_name: str) -> None:
        lines.append(f"- config_name: {config_name}\n  data_files:")
        for split, rows in splits.items():
            path = folder / config_name / f"{split}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(path)
            lines.append(f"  - split: {split}\n    path: {config_name}/{split}.parquet")

    upload = datasets.DatasetDict.push_to_hub
    datasets.DatasetDict.push_to_hub = keep
    try:
        module.main(test_size=0.1, push_to_hub=True, repo_id="zen")
    finally:
        datasets.DatasetDict.push_to_hub = upload
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]), encoding="utf-8")


def make_tokenizer() -> Any:
    """Bytes in Qwen's order, the spelled ids, and a text of its own for every other id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def written(text: str) -> str:
        return "".join(letters[byte] for byte in text.encode())

    spelled = {written(text): index for index, text in SPELLED.items()}
    spelled |= {letter: index for index, letter in enumerate(letters.values())}
    vocabulary = {text: SMALL_ID.get(index, index) for text, index in spelled.items()}
    first = min(SMALL_ID[index] for index in SPECIAL)
    taken = set(vocabulary.values())
    vocabulary |= {f"w{index}": index for index in range(first) if index not in taken}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    # Added tokens are numbered in turn, from where the vocabulary ends.
    core.add_tokens(
        [AddedToken(text, normalized=False, special="|" in text) for text in SPECIAL.values()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, padding_side="left"
    )


def make_model(folder: Path, name: str, sizes: dict[str, Any]) -> None:
    import torch
    import transformers

    architecture = getattr(transformers, name)
    ids = {text: SMALL_ID[index] for index, text in SPECIAL.items()}
    ends = {"eos_token_id": ids[END], "pad_token_id": ids[PAD], "bos_token_id": None}
    labels = {"num_labels": 1} if "Sequence" in name else {}
    config = architecture.config_class(**SIZES | sizes | ends | labels, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    model = architecture(config)
    with torch.no_grad():  # matrices that pass a signal on, so that every parameter has a gradient
        for parameter in model.parameters():
            if parameter.dim() == 2 and min(parameter.shape) > 1:
                torch.nn.init.xavier_uniform_(parameter)
    model.save_pretrained(folder)


def make_remote_model(place: Path, checkout: Path) -> None:
    """A model whose code lies beside its weights, TRL's own."""
    import transformers

    folder = place / "tiny-RemoteForCausalLM"
    shutil.copytree(place / "tiny-LlamaForCausalLM-3.2", folder)
    code = checkout / "scripts" / "generate_tiny_models" / "for_causal_lm" / "_remote_code"
    for path in code.glob("*_remote.py"):
        shutil.copy(path, folder)
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    config |= {
        "model_type": "remote",
        "architectures": ["RemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_remote.RemoteConfig",
            "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
        },
    }
    import json

    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")


def chat_template(name: str) -> str:
    """One of the templates that the installed TRL ships, which it recognises by their text."""
    import trl

    folder = Path(trl.__file__).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")
