"""A plan holds the tensors that the model has at that moment, whatever happened since the last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from asymgrpo.rollout.native.fused_decode import AdapterCasts, NotFusable, RopeTable, build_plan

MAPS = {
    "self_attn.q_proj": lambda layer: layer.queries_keys_values[0],
    "self_attn.k_proj": lambda layer: layer.queries_keys_values[1],
    "self_attn.v_proj": lambda layer: layer.queries_keys_values[2],
    "self_attn.o_proj": lambda layer: layer.output,
    "mlp.gate_proj": lambda layer: layer.gate,
    "mlp.up_proj": lambda layer: layer.up,
    "mlp.down_proj": lambda layer: layer.down,
}


class Reader:
    """Plans of one model after another, with what a decoder keeps between them."""

    def __init__(self, model, dtype=torch.float32):
        self.model, self.dtype = model, dtype
        self.casts, self.rope_table = AdapterCasts(), RopeTable()

    def plan(self):
        plan = build_plan(self.model, self.dtype, 8, self.casts, self.rope_table)
        with torch.no_grad():
            self.casts.refresh()
        return plan

    def fingerprint(self):
        return self.plan().fingerprint()


@pytest.fixture
def adapted(tiny, lora):
    return lora(tiny("qwen2"))


def decoder_of(model):
    return model.get_base_model().model


def check(plan, model, adapter="default"):
    """Every tensor of the plan against the parameter of that name."""
    named = dict(model.named_parameters(remove_duplicate=False))
    prefix = "base_model.model." if adapter else ""

    def is_at(tensor, name):
        if tensor is None:
            assert name not in named
        else:
            assert tensor.data_ptr() == named[name].data_ptr()
            assert tensor.shape == named[name].shape

    for index, layer in enumerate(plan.layers):
        own = f"{prefix}model.layers.{index}."
        for name, of in MAPS.items():
            base = own + name + (".base_layer" if adapter else "")
            is_at(of(layer).weight, f"{base}.weight")
            is_at(of(layer).bias, f"{base}.bias")
            if adapter:
                is_at(of(layer).down, f"{own}{name}.lora_A.{adapter}.weight")
                is_at(of(layer).up, f"{own}{name}.lora_B.{adapter}.weight")
        is_at(layer.first_norm, f"{own}input_layernorm.weight")
        is_at(layer.second_norm, f"{own}post_attention_layernorm.weight")
        is_at(layer.head_norms[0], f"{own}self_attn.q_norm.weight")
        is_at(layer.head_norms[1], f"{own}self_attn.k_norm.weight")
    is_at(plan.norm, f"{prefix}model.norm.weight")
    is_at(plan.head.weight, f"{prefix}lm_head.weight")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "smollm3"])
@pytest.mark.parametrize("adapter", ["default", None])
def test_the_tensors_are_the_models_own(family, adapter, tiny, lora):
    model = lora(tiny(family)) if adapter else tiny(family)
    check(Reader(model).plan(), model, adapter)


def test_nothing_has_changed(adapted):
    for dtype in (torch.float32, torch.float16):
        reader = Reader(adapted, dtype)
        assert reader.fingerprint() == reader.fingerprint()


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(
    "path",
    [
        "",
        "lm_head",
        "model",
        "model.embed_tokens",
        "model.norm",
        "model.layers.2",
        "model.layers.1.mlp.act_fn",
        "model.layers.2.self_attn.q_proj",
        "model.layers.2.self_attn.q_proj.base_layer",
        "model.layers.2.self_attn.q_proj.lora_A.default",
        "model.layers.2.self_attn.q_proj.lora_dropout.default",
    ],
)
def test_a_hook(kind, path, adapted):
    reader = Reader(adapted)
    before = reader.fingerprint()
    module = adapted.get_base_model().get_submodule(path)
    handle = getattr(module, kind)(lambda *args: None)
    with pytest.raises(NotFusable, match="hook"):
        reader.plan()
    handle.remove()
    assert reader.fingerprint() == before


def test_an_adapter_is_merged(adapted):
    reader = Reader(adapted)
    reader.plan()
    decoder_of(adapted).layers[2].mlp.down_proj.merge()
    with pytest.raises(NotFusable, match="merged"):
        reader.plan()
    decoder_of(adapted).layers[2].mlp.down_proj.unmerge()
    check(reader.plan(), adapted)


def test_adapters_are_disabled(adapted):
    reader = Reader(adapted)
    before = reader.fingerprint()
    with adapted.disable_adapter():
        plan = reader.plan()
        assert all(of(layer).down is None for layer in plan.layers for of in MAPS.values())
        assert plan.fingerprint() != before
    assert reader.fingerprint() == before
    decoder_of(adapted).layers[1].mlp.up_proj.enable_adapters(False)
    plan = reader.plan()
    assert [layer.up.rank for layer in plan.layers] == [4, 0, 4]
    assert plan.fingerprint() != before


def test_another_adapter_is_set(adapted):
    from peft import LoraConfig

    reader = Reader(adapted)
    before = reader.fingerprint()
    targets = [name.split(".")[1] for name in MAPS]
    adapted.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=targets))
    assert reader.fingerprint() == before
    adapted.set_adapter("other")
    plan = reader.plan()
    check(plan, adapted, "other")
    assert (plan.layers[0].up.rank, plan.layers[0].up.scaling) == (2, 1.5)
    assert plan.fingerprint() != before
    adapted.base_model.set_adapter(["default", "other"])
    with pytest.raises(NotFusable, match="single plain LoRA"):
        reader.plan()
    adapted.set_adapter("default")
    assert reader.fingerprint() == before
    adapted.delete_adapter("default")
    adapted.set_adapter("other")
    check(reader.plan(), adapted, "other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_move_to_other_storage(dtype, adapted):
    reader = Reader(adapted, dtype)
    base = "base_model.model.model."
    for name in [
        f"{base}embed_tokens.weight",
        f"{base}norm.weight",
        f"{base}layers.1.input_layernorm.weight",
        f"{base}layers.1.post_attention_layernorm.weight",
        f"{base}layers.2.self_attn.k_proj.base_layer.weight",
        f"{base}layers.2.self_attn.k_proj.base_layer.bias",
        f"{base}layers.2.mlp.down_proj.base_layer.weight",
        f"{base}layers.0.mlp.gate_proj.lora_A.default.weight",
        f"{base}layers.0.mlp.gate_proj.lora_B.default.weight",
        "base_model.model.lm_head.weight",
    ]:
        before = reader.fingerprint()
        parameter = adapted.get_parameter(name)
        held = parameter.data
        parameter.data = held.clone()
        plan = reader.plan()
        assert plan.fingerprint() != before, name
        if dtype == torch.float32:
            check(plan, adapted)


def test_head_norms_move_and_attention_changes(tiny):
    model = tiny("qwen3")
    reader = Reader(model)
    attention = model.model.layers[1].self_attn
    seen = [reader.fingerprint()]
    for norm in (attention.q_norm, attention.k_norm):
        held = norm.weight.data
        norm.weight.data = held.clone()
        seen.append(reader.fingerprint())
    attention.scaling *= 2
    seen.append(reader.fingerprint())
    attention.sliding_window = 5
    seen.append(reader.fingerprint())
    assert len(set(seen)) == 5
    check(reader.plan(), model, None)


def test_an_adapter_of_another_shape(adapted):
    """What was copied before does not follow the module, which would not fit the copy."""
    reader = Reader(adapted, torch.float16)
    reader.plan()
    module = decoder_of(adapted).layers[0].mlp.gate_proj
    for part, dim in (module.lora_A, 0), (module.lora_B, 1):
        weight = part["default"].weight
        weight.data = torch.cat((weight.data, weight.data), dim)
    gate = reader.plan().layers[0].gate
    assert gate.rank == 8
    assert torch.equal(gate.down, module.lora_A["default"].weight.half())
    assert torch.equal(gate.up, module.lora_B["default"].weight.half())


def test_scaling(adapted):
    reader = Reader(adapted)
    before = reader.plan()
    module = decoder_of(adapted).layers[1].self_attn.v_proj
    module.set_scale("default", 0.25)
    after = reader.plan()
    assert after.layers[1].queries_keys_values[2].scaling == module.scaling["default"]
    assert after.fingerprint() != before.fingerprint()
    module.set_scale("default", 1)
    assert reader.fingerprint() == before.fingerprint()


def test_a_projection_is_replaced(adapted, tiny, lora):
    reader = Reader(adapted)
    before = reader.fingerprint()
    mlp = decoder_of(adapted).layers[1].mlp
    own, other = mlp.up_proj, decoder_of(lora(tiny("qwen2"))).layers[1].mlp.up_proj
    mlp.up_proj = other
    plan = reader.plan()
    check(plan, adapted)
    assert plan.fingerprint() != before
    mlp.up_proj = nn.Linear(32, 48, bias=False)
    plan = reader.plan()
    assert plan.layers[1].up.weight.data_ptr() == mlp.up_proj.weight.data_ptr()
    assert plan.layers[1].up.rank == 0
    assert plan.fingerprint() != before
    mlp.up_proj = nn.Linear(32, 48)
    with pytest.raises(NotFusable, match="gate has a bias"):
        reader.plan()
    for strange in (nn.Sequential(own), nn.Bilinear(2, 2, 2), type("Mine", (nn.Linear,), {})(2, 2)):
        mlp.up_proj = strange
        with pytest.raises(NotFusable, match=f"a projection is a {type(strange).__name__}"):
            reader.plan()
    mlp.up_proj = own
    assert reader.fingerprint() == before


def test_a_weight_that_is_no_parameter(tiny):
    model = tiny("qwen2")
    linear, weight = model.model.layers[0].mlp.up_proj, torch.zeros(48, 32)
    del linear.weight
    linear.weight = weight
    assert Reader(model).plan().layers[0].up.weight.data_ptr() == weight.data_ptr()


def test_types_change(adapted):
    reader = Reader(adapted, torch.float16)
    before = reader.plan()
    assert before.layers[0].gate.down.dtype == torch.float16
    assert before.layers[0].gate.weight.dtype == torch.float32
    adapted.half()
    after = reader.plan()
    check(after, adapted)
    assert after.layers[0].gate.weight.dtype == torch.float16
    assert after.fingerprint() != before.fingerprint()
    reader.dtype = torch.float32
    wider = reader.plan()
    assert wider.layers[0].gate.down.dtype == torch.float32
    assert wider.fingerprint() != after.fingerprint()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_in_place(dtype, adapted):
    """All weights take a step: the same graphs, and the values of now."""
    reader = Reader(adapted, dtype)
    before = reader.fingerprint()
    adapted.requires_grad_(True)
    tokens = torch.arange(3, 9)[None]
    optimizer = torch.optim.SGD(adapted.parameters(), 0.1)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    plan = reader.plan()
    assert plan.fingerprint() == before
    module = decoder_of(adapted).layers[1].mlp.down_proj
    down = plan.layers[1].down
    assert torch.equal(down.weight, module.base_layer.weight)
    assert torch.equal(down.down, module.lora_A["default"].weight.to(dtype))
    assert torch.equal(down.up, module.lora_B["default"].weight.to(dtype))


def test_modules_once_each():
    from asymgrpo.models.module_state import has_hook, submodules

    shared = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    model = nn.Sequential(shared, nn.ModuleDict({"a": shared, "b": nn.Sequential(shared[1])}))
    model.register_module("nothing", None)
    found = submodules(model)
    assert len(found) == len({id(module) for module in found})
    assert {id(module) for module in found} == {id(module) for module in model.modules()}
    assert not has_hook(model)
    shared[1].register_forward_pre_hook(lambda *args: None)
    assert has_hook(model)
