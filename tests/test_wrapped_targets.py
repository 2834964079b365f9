"""Targets as users have them: wrapped, compiled, offloaded, in half precision, the text part of a larger model."""

from __future__ import annotations

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import SequentialHook
from builders import left_padded
from oracle import faults, oracle, tree_faults
from peft import LoraConfig, get_peft_model
from recorded_graphs import recorded_graphs
from test_families import build

import hf_domino
from hf_domino import check_fit
from hf_domino.targets.view import input_device
from hf_domino.training import DominoTrainer, DominoTrainingArguments

pytestmark = pytest.mark.transformers

PROMPTS = [torch.arange(7, 20), torch.arange(30, 38)]
OPTIONS = {"do_sample": False, "max_new_tokens": 16}


def check(target, drafter, generate=None, truth_of=None):
    """One prompt and a batch, plain and assisted."""
    generate = generate or target.generate
    for prompts in (PROMPTS[:1], PROMPTS):
        ids, mask = left_padded(prompts)
        plain = generate(input_ids=ids, attention_mask=mask, **OPTIONS)
        with oracle(truth_of or target, ids, 0.7, attention_mask=mask, **OPTIONS):
            assisted = generate(input_ids=ids, attention_mask=mask, assistant_model=drafter, **OPTIONS)
        assert torch.equal(assisted, plain)
    assert drafter.stats.acceptance_length > 1.5


def test_peft(make_drafter):
    target = build("Qwen2")
    drafter = make_drafter(target)
    adapted = get_peft_model(target, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    check(adapted.eval(), drafter)


def test_a_graph_is_of_the_adapters_as_they_were(make_drafter):
    """Frozen adapters: nothing about weights says which of them are at work."""
    target, texts = build("Qwen2").double(), []
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(target, config, "first").eval()
    adapted.add_adapter("second", config)
    drafter, layers = make_drafter(target, draft_tree_size=12), target.model.layers
    options = OPTIONS | {"input_ids": PROMPTS[0][None]}
    changes = [
        lambda: adapted.set_adapter("second"),
        adapted.base_model.disable_adapter_layers,
        adapted.base_model.enable_adapter_layers,
        lambda: [layer.self_attn.v_proj.scale_layer(5.0) for layer in layers],
        adapted.merge_adapter,
        adapted.unmerge_adapter,
    ]
    with recorded_graphs() as made:
        for change in (lambda: None, *changes):
            change()
            adapted.requires_grad_(False)
            texts.append(adapted.generate(**options).tolist())
            assisted = adapted.generate(**options, assistant_model=drafter, cache_implementation="static")
            assert assisted.tolist() == texts[-1]
        assert len(made) == len(texts)
    assert len({str(text) for text in texts}) == 4  # the second comes back, and merged it writes the same


def test_int8_weights(make_drafter, tmp_path):
    """Weights alone are quantised: a forward does not depend on how many positions it has."""
    quantization = pytest.importorskip("torchao.quantization")
    build("Qwen2").save_pretrained(tmp_path)
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    target = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config).eval()
    assert "Int8" in type(target.model.layers[0].mlp.up_proj.weight).__name__
    check(target, make_drafter(target))


@pytest.mark.slow
def test_compiled(make_drafter):
    target = build("Qwen2")
    drafter = make_drafter(target)
    target.forward = torch.compile(target.forward, backend="eager")
    check(target, drafter)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded(make_drafter, tmp_path, where):
    """Embeddings and lm_head have no weights at rest: only calling them loads these."""
    target = build("Qwen2")
    drafter = make_drafter(target)
    if where == "cpu":
        cpu_offload(target, torch.device("cpu"))
    else:
        disk_offload(target, str(tmp_path), torch.device("cpu"))
    assert target.device.type == "meta"
    check(target, drafter)
    assert check_fit(drafter, target, prompts=[[5, 6]], max_new_tokens=6).measured.num_rounds
    branching, ids = drafter.view(draft_tree_size=12), PROMPTS[0][None]
    assert torch.equal(target.generate(ids, assistant_model=branching, **OPTIONS), target.generate(ids, **OPTIONS))
    assert (branching.stats.tree_size, branching.stats.chain) == (12, None)


@pytest.mark.parametrize("sequence", [False, True])
def test_what_works_beside_an_offloaded_target_is_where_it_computes(sequence):
    target = build("Qwen2")
    cpu_offload(target, torch.device("cpu"))
    for module in target.modules():
        if getattr(getattr(module, "_hf_hook", None), "execution_device", None) is not None:
            module._hf_hook.execution_device = "cuda:1"  # only asked about
            module._hf_hook = SequentialHook(module._hf_hook) if sequence else module._hf_hook
    assert input_device(target) == torch.device("cuda:1")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_drafter_of_another_dtype(make_drafter, dtype):
    target = build("Qwen2").to(torch.float64)
    check(target, make_drafter(target).to(dtype))


TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": None}
TEXT |= {"bos_token_id": None}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
EYES = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
SIGLIP = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
MULTIMODAL = {
    "Gemma3": {
        "text_config": TEXT | {"sliding_window": 8},
        "vision_config": SIGLIP | {"image_size": 28, "patch_size": 14},
    },
    "Qwen2_5_VL": {"text_config": TEXT | MROPE, "vision_config": EYES},
    "Qwen3VL": {"text_config": TEXT | MROPE, "vision_config": EYES | {"deepstack_visual_indexes": []}},
}


@pytest.mark.parametrize("family", MULTIMODAL)
def test_text_of_a_multimodal_target(make_drafter, family):
    fields = MULTIMODAL[family] | {"image_token_id": 90, "video_token_id": 91, "image_token_index": 90}
    fields |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    target = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    check(target, make_drafter(target))
    ids, drafter = PROMPTS[0][None], make_drafter(target, draft_tree_size=11)
    plain = target.generate(ids, **OPTIONS)
    with tree_faults(plain.tolist(), 96, 11):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **OPTIONS), plain)
    assert drafter.stats.chain is None


def image_target(family):
    """A tiny target of this family whose text reads an image, with a prompt of one."""
    config_class = getattr(transformers, f"{family}Config")
    ids = torch.cat((torch.full((1, 4), 95), torch.arange(7, 27)[None]), dim=1)
    if family == "Idefics":
        eyes = {"embed_dim": 32, "image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
        fields = {**TEXT, "additional_vocab_size": 0, "cross_layer_interval": 2, "alpha_initializer": "ones"}
        config = config_class(**fields, use_resampler=False, vision_config=eyes | {"intermediate_size": 64})
        inputs = {"pixel_values": torch.randn(1, 2, 3, 28, 28), "image_attention_mask": torch.ones(1, 24, 2).long()}
        inputs["image_attention_mask"][:, -7:, 1] = 0  # what is written goes on like the last token
        model_class = transformers.IdeficsForVisionText2Text
    else:
        eyes = SIGLIP | {"image_size": 28, "patch_size": 14, "projection_dim": 32, "model_type": "siglip_vision_model"}
        text = TEXT | {"model_type": "gemma"}
        config = config_class(text_config=text, vision_config=eyes, projection_dim=32, image_token_index=95)
        inputs = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": torch.zeros_like(ids)}
        model_class = transformers.PaliGemmaForConditionalGeneration
    torch.manual_seed(0)
    target = model_class(config).eval()
    for weight in target.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return target, {"input_ids": ids, **inputs}


@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {}), ({"draft_tree_size": 11}, {}), ({}, {"cache_implementation": "static"})],
    ids=["chains", "trees", "static"],
)
@pytest.mark.parametrize("family", ["Idefics", "PaliGemma"])
def test_a_target_that_reads_an_image(make_drafter, family, fields, options):
    target, inputs = image_target(family)
    plain, drafter = target.generate(**inputs, **OPTIONS), make_drafter(target, **fields)
    with faults(plain.tolist(), 96):
        assert torch.equal(target.generate(**inputs, assistant_model=drafter, **OPTIONS, **options), plain)
    assert max(drafter.stats.acceptance_lengths) > 3


def test_images_of_a_batch_that_every_step_reads_are_refused(make_drafter):
    target, inputs = image_target("Idefics")
    inputs = {name: value.repeat(2, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    with pytest.raises(ValueError, match=r"image_attention_mask must be None, for a batch, .*one at a time"):
        target.generate(**inputs, assistant_model=make_drafter(target), **OPTIONS)


def test_no_drafter_is_trained_for_a_target_that_sees_ahead(make_drafter):
    target, _ = image_target("PaliGemma")
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="use_bidirectional_attention must be False, got True"):
        DominoTrainer(drafter, target, DominoTrainingArguments(report_to=[]))
    with pytest.raises(ValueError, match="use_bidirectional_attention must be False, got True"):
        hf_domino.check_fit(drafter, target, prompts=[[5, 9, 33]])


def handing_on(read):
    """A Qwen2 whose next step is handed what `read` takes of the outputs."""

    class Handing(transformers.Qwen2ForCausalLM):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
            model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
            read(outputs, model_kwargs)
            return model_kwargs

    target = build("Qwen2")
    target.__class__ = Handing
    return target


def test_a_step_that_may_hand_on_its_outputs_is_refused_before_any_forward(make_drafter):
    target, forwards = handing_on(lambda outputs, kwargs: kwargs.update(last=outputs.logits)), []
    target.register_forward_pre_hook(lambda *args: forwards.append(args))
    with pytest.raises(ValueError, match=r"Handing._update_model_kwargs_for_generation must be that of Transformers"):
        target.generate(PROMPTS[0][None], assistant_model=make_drafter(target), **OPTIONS)
    assert not forwards


def test_a_target_that_only_looks_at_its_outputs_is_probed():
    assert hf_domino.probe_width(handing_on(lambda outputs, kwargs: outputs.logits[:, -1].argmax())).agrees


@pytest.mark.parametrize("where", ["class", "instance"])
def test_a_wrapper_that_hides_positions_is_refused_in_a_batch_by_what_it_lacks(where, make_drafter):
    """A single sequence works, because its positions need not be passed."""
    target = build("Qwen2")
    original = target.forward
    if where == "class":
        forward = {"forward": lambda self, *args, **kwargs: super(type(self), self).forward(*args, **kwargs)}
        target.__class__ = type("Wrapped", (type(target),), forward)
    else:
        target.forward = lambda *args, **kwargs: original(*args, **kwargs)
    drafter = make_drafter(target)
    ids = PROMPTS[0][None]
    plain = target.generate(ids, **OPTIONS)
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).tolist() == plain.tolist()
    with pytest.raises(
        ValueError, match=r"forward of \w+ must be one that names position_ids, for a batch, .* add the arg"
    ):
        target.generate(ids.repeat(2, 1), assistant_model=drafter, **OPTIONS)
