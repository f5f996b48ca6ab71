"""Every kind of spec leads to a policy, and every mistake to one line that says what to do."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asymgrpo.errors import UserError
from asymgrpo.models import load_policy, lora_config
from asymgrpo.models.model_sources import BUILT_IN
from asymgrpo.models.tokenizer import align_model, fix_tokenizer

TINY = BUILT_IN["tiny"]
IDS = torch.tensor([[11, 25, 33, 40, 52, 61]])


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A saved adapter that changes the model, and the logits of the adapted model."""
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(load_policy("tiny").model, lora_config(4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    path = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(path)
    model.eval()
    return path, logits_of(model)


def test_name_and_folder_give_the_same_policy(folder):
    named, from_folder = load_policy("tiny"), load_policy(str(folder))
    assert (named.spec, from_folder.source) == ("tiny", str(folder))
    assert torch.equal(logits_of(named.model), logits_of(from_folder.model))
    assert not named.model.training


def test_dtype_and_device():
    policy = load_policy("tiny", dtype="bfloat16", device="cpu")
    assert policy.model.dtype == torch.bfloat16


def test_a_run_folder_gives_its_final_model(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    shutil.move(folder, run / "final")
    assert load_policy(str(run)).source == str(run / "final")


def test_an_adapter_folder_loads_on_its_base(adapter):
    path, expected = adapter
    policy = load_policy(str(path))
    assert torch.equal(logits_of(policy.model), expected)
    assert not torch.allclose(expected, logits_of(load_policy("tiny").model), atol=1e-2)
    assert not any(p.requires_grad for p in policy.model.parameters())
    trainable = load_policy(str(path), trainable=True).model
    names = [name for name, p in trainable.named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)


def test_a_trained_adapter_keeps_its_own_tokenizer(adapter, tmp_path):
    """Trainers save the tokenizer beside the adapter, and no config.json."""
    shutil.copytree(adapter[0], tmp_path / "final")
    tokenizer = load_policy("tiny").tokenizer
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "final")
    policy = load_policy(str(tmp_path))
    assert policy.tokenizer.chat_template == "{{ messages }}"
    assert policy.tokenizer.tokenize("Mia has 47") == ["Mia ", "has ", "4", "7"]
    assert torch.equal(logits_of(policy.model), adapter[1])


def test_an_adapter_from_another_machine_finds_the_built_in_base(adapter, tmp_path):
    path, expected = adapter
    moved = tmp_path / "moved"
    shutil.copytree(path, moved)
    config = json.loads((moved / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/elsewhere/site-packages/asymgrpo/models/tiny"
    (moved / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(load_policy(str(moved)).model), expected)


def test_lora_config_reaches_every_linear_layer():
    from peft import get_peft_model

    model = get_peft_model(load_policy("tiny").model, lora_config(8))
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    with pytest.raises(UserError, match="at least 1"):
        lora_config(0)


# --- tokenizers that need mending


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_a_missing_or_shared_pad_token_is_mended(folder, pad):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": pad}))
    policy = load_policy(str(folder))
    assert policy.tokenizer.pad_token == "<pad>"
    assert policy.model.config.pad_token_id == policy.tokenizer.pad_token_id == 0


def test_a_pad_token_is_added_where_the_vocabulary_has_none():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"eos_token": "<pad>"})
    tokenizer.pad_token = "<pad>"  # now the only special token with "pad" in it is the end token
    fix_tokenizer(tokenizer, "it")
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|pad|>", 323)
    model = load_policy("tiny").model
    before = logits_of(model)
    align_model(model, tokenizer)
    assert model.get_input_embeddings().num_embeddings == 324
    assert torch.equal(logits_of(model)[..., :323], before)


def test_a_missing_end_token_is_an_error(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(UserError, match="has no end token; set eos_token"):
        load_policy(str(folder))


# --- GGUF


def write_gguf(path: Path, model: LlamaForCausalLM, pieces: list[str], merges: list[str]) -> None:
    """A float32 GGUF file of a Llama, as llama.cpp's converter lays it out."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if p.startswith("<|") else normal for p in pieces])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if (projection := name.split(".")[-2]) in heads:
            # llama.cpp rotates neighbouring pairs, transformers the two halves of a head
            halves = array.reshape(heads[projection], 2, -1, array.shape[1])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    pytest.importorskip("gguf")
    from tokenizers import pre_tokenizers

    # The merge of 1 and 2 cannot happen in a vocabulary that was trained on single digits; it
    # shows here whether digits are split before merging.
    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pieces += sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += ["12", "Ġi", "Ġis"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, model, pieces, ["1 2", "Ġ i", "Ġi s"])
    return path, model


def test_gguf_round_trip(gguf_model, tmp_path):
    path, original = gguf_model
    policy = load_policy(str(path))
    torch.testing.assert_close(logits_of(policy.model), logits_of(original))
    tokenizer = policy.tokenizer
    assert tokenizer.tokenize("12 is 121") == ["1", "2", "Ġis", "Ġ", "1", "2", "1"]
    assert tokenizer.decode(tokenizer("It is 12 .")["input_ids"]) == "It is 12 ."
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert policy.model.generation_config.eos_token_id == 2
    assert policy.model.generation_config.pad_token_id == policy.model.config.pad_token_id == 0

    # What was a GGUF file trains and saves like any model, and loads again as a plain folder.
    policy.model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_policy(str(tmp_path))
    torch.testing.assert_close(logits_of(again.model), logits_of(original))
    assert again.tokenizer.tokenize("12 is") == ["1", "2", "Ġis"]
    assert again.tokenizer.pad_token == "<|endoftext|>"


def test_an_adapter_on_a_gguf_file(gguf_model, tmp_path):
    from peft import get_peft_model

    path, _ = gguf_model
    base = load_policy(str(path.parent))  # a folder with one GGUF file in it
    assert base.source == str(path)
    get_peft_model(base.model, lora_config(2)).save_pretrained(tmp_path)
    adapted = load_policy(str(tmp_path))
    torch.testing.assert_close(logits_of(adapted.model), logits_of(base.model))


def test_a_gguf_model_does_not_count_as_quantized(gguf_model):
    model = load_policy(str(gguf_model[0])).model
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)
    assert "quantization_config" not in model.config.to_dict()
    assert all(p.requires_grad for p in model.parameters())


def test_damaged_gguf_files_are_explained(tmp_path, gguf_model):
    no_gguf, cut = tmp_path / "text.gguf", tmp_path / "cut.gguf"
    no_gguf.write_text("hello")
    cut.write_bytes(gguf_model[0].read_bytes()[:300])
    with pytest.raises(UserError, match="is no GGUF file"):
        load_policy(str(no_gguf))
    with pytest.raises(UserError, match="is damaged"):
        load_policy(str(cut))


# --- mistakes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tinny", "did you mean tiny"),
        ("smollm-135m", "did you mean smollm2-135m"),
        ("./no/such/folder", "Give tiny, smollm2-135m, a hub id"),
        ("missing.gguf", "no model 'missing.gguf'"),
        ("", "Give tiny"),
    ],
)
def test_unknown_specs_offer_what_there_is(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        load_policy(spec)
    assert "\n" not in str(raised.value)


def test_folders_that_hold_no_model(folder, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"holds no model: there is no config\.json"):
        load_policy(str(empty))
    with pytest.raises(UserError, match=r"is a file, but no \.gguf"):
        load_policy(str(folder / "config.json"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        load_policy(str(folder))


def test_damaged_weights_are_one_line(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot load .*damaged") as raised:
        load_policy(str(folder))
    assert "\n" not in str(raised.value)


class Intruder:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_pickled_code_in_weights_never_runs(folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Intruder(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load"):
        load_policy(str(folder))
    assert not mark.exists()
    pickle.loads(pickle.dumps(Intruder(mark)))  # the intruder does work where pickles are trusted
    assert mark.exists()


def test_an_unreachable_hub_is_one_line():
    code = (
        "from asymgrpo.models import load_policy; from asymgrpo.errors import UserError\n"
        "try: load_policy('Qwen/Qwen2.5-0.5B')\n"
        "except UserError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("cannot load Qwen/Qwen2.5-0.5B: it is not in the local cache")
    assert run.stdout.count("\n") == 1


def test_importing_the_room_is_cheap():
    code = (
        "import sys, asymgrpo.models;"
        "assert not {'torch', 'transformers', 'peft', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
