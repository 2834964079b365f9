"""`DominoConfig`: ranges, conventions, and what `for_target` makes of many kinds of target."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    ArceeConfig,
    BltConfig,
    CodeGenConfig,
    CpmAntConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RwkvConfig,
    Starcoder2Config,
    T5Config,
)

from hf_domino import DominoConfig, DominoDraftModel

pytestmark = pytest.mark.transformers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 1}, r"block_size must be in \[2, 1024\], got 1"),
        ({"num_hidden_layers": True}, r"num_hidden_layers must be a whole number, got True"),
        ({"draft_pool_size": True}, r"draft_pool_size must be a whole number, got True"),
        ({"draft_tree_size": 2.5}, r"draft_tree_size must be a whole number \(or 'adaptive', or None\), got 2.5"),
        ({"draft_tree_size": 0}, r"draft_tree_size must be in \[1, 1024\] \(or 'adaptive', or None\), got 0"),
        ({"pure_draft_prefix_len": 16}, r"pure_draft_prefix_len must be in \[0, 15\] \(num_draft_tokens=16\), got 16"),
        ({"pure_draft_prefix_len": -1}, r"pure_draft_prefix_len must be in \[0, 15\]"),
        ({"target_layer_ids": [1, 36]}, r"target_layer_ids must be unique and in \[0, 35\]"),
        ({"target_layer_ids": [1, 1]}, r"target_layer_ids must be unique"),
        ({"target_layer_ids": []}, r"target_layer_ids must be unique"),
        ({"mask_token_id": 151936}, r"mask_token_id must be in \[0, 151935\]"),
        (
            {"projector_type": "medusa"},
            r"projector_type must be one of \('domino', 'dflash', 'dspark', 'dflash2', 'dfly', .*\), got 'medusa'",
        ),
        ({"num_key_value_heads": 5}, r"num_attention_heads must be a multiple of num_key_value_heads=5, got 32"),
        ({"head_dim": 7}, r"head_dim must be even"),
        ({"num_target_layers": "36"}, r"num_target_layers must be a whole number \(or None\), got '36'"),
        ({"num_target_layers": float("nan")}, r"num_target_layers must be a whole number \(or None\), got nan"),
        ({"target_layer_ids": 3}, r"target_layer_ids must be unique and in \[0, 35\].* got 3"),
        ({"target_layer_ids": [1.0, 2.0]}, r"target_layer_ids must be unique and in .* got \[1.0, 2.0\]"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps must be a number, got '1e-6'"),
        ({"final_logit_softcapping": float("inf")}, r"final_logit_softcapping must be in \[1e-30, .*\], got inf"),
        ({"conv_group_size": 0}, r"conv_group_size must be in \[1, 1048576\], got 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            r"rope_parameters\['factor'\] must be a number, got '2'",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, r"rope_type.* got 'dynamic'"),
        (
            {"layer_types": ["sliding_attention"] * 4},
            r"layer_types must be one of .* for each layer \(num_hidden_layers=5",
        ),
        (
            {"layer_types": ["chunked_attention"] * 5},
            r"layer_types must be one of \('full_attention', 'sliding_attention",
        ),
        (
            {"layer_types": ["sliding_attention"] * 5},
            r"sliding_window must be a whole number \(block_size=16; .* got None",
        ),
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 15},
            r"sliding_window must be in \[16, 2147483647\] .* got 15",
        ),
        (
            {"sliding_window": 2048},
            r"sliding_window must be None where no layer_types are 'sliding_attention', got 2048",
        ),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        DominoConfig(**fields)


def test_conventions():
    assert DominoConfig(shift_label=True).num_draft_tokens == 16
    assert DominoConfig(shift_label=True).label_offset == 0
    assert DominoConfig(shift_label=False).num_draft_tokens == 15
    assert DominoConfig(shift_label=False).label_offset == 1


@pytest.mark.parametrize("num_layers", range(2, 100))
def test_captured_layers_are_unique_and_inside(num_layers):
    ids = DominoConfig().choose_layers(num_layers, 5)
    assert ids == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] <= num_layers - 2
    assert len(ids) == 5 or num_layers < 9


@pytest.mark.parametrize(
    "target",
    [
        Qwen3Config(),
        LlamaConfig(num_hidden_layers=16),
        GPT2Config(),
        Gemma3TextConfig(),
        Gemma3Config(),
        DeepseekV3Config(),
        FalconConfig(),
        Gemma4Config(),  # heads differ by layer
        CodeGenConfig(),  # without token ids, as the next two
        RwkvConfig(),
        CpmAntConfig(),
        ArceeConfig(),  # with token ids that its vocabulary does not have, as the next one
        Starcoder2Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_for_any_target(target):
    text = target.get_text_config(decoder=True)
    config = DominoConfig.for_target(target, block_size=8)
    assert (config.hidden_size, config.vocab_size) == (text.hidden_size, text.vocab_size)
    assert config.num_target_layers == text.num_hidden_layers
    assert config.target_model_type == text.model_type
    assert config.block_size == 8
    assert DominoConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_what_differs_by_layer_is_the_first_layers():
    target = Gemma4Config().get_text_config()
    assert DominoConfig.for_target(target).head_dim == target.per_layer_config[0].head_dim == 256
    assert DominoConfig.for_target(target, head_dim=64).head_dim == 64


def test_the_longest_text_follows_the_target():
    assert DominoConfig.for_target(MptConfig(max_seq_len=64)).max_position_embeddings == 64


def test_targets_without_a_width_are_refused():
    with pytest.raises(ValueError, match=r"target_config.hidden_size must be an integer, got None \(blt\)"):
        DominoConfig.for_target(BltConfig())


def tokenizer_of(tokens, added=(), template=None, **named):
    """A tokenizer of these tokens in a row, of which some are added ones."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)


ENDS = ["<unk>", "<s>", "</s>"]  # as Llama 2 has them
LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(3)), "<|eot_id|>"]
MISTRAL = [*ENDS, "[INST]", "[control_8]", "[control_9]"]


@pytest.mark.parametrize(
    ("tokens", "added", "options", "mask"),
    [
        (["a", "b", "</s>"], [], {"eos_token": "</s>", "mask_token": "<mask>"}, 3),
        (["a", "b", "</s>"], ["</s>"], {"eos_token": "</s>"}, 3),  # a spare row
        (["a", *LLAMA_3, "b"], LLAMA_3, {"eos_token": "<|eot_id|>"}, 3),
        (["a", *LLAMA_3, "b"], LLAMA_3, {"template": "<|reserved_special_token_0|>"}, 4),  # a turn's own
        ([*MISTRAL, "a"], MISTRAL, {"unk_token": "<unk>"}, 4),
        ([*ENDS, "a"], ENDS, {"unk_token": "<unk>"}, 0),  # Llama 2: bytes stand for what it has no token for
        (["<pad>", "<bos>", "<unused0>", "a"], ["<pad>", "<bos>", "<unused0>"], {}, 2),  # Gemma
        (["a", "unused1", "<pad>"], ["<pad>"], {"pad_token": "<pad>"}, 2),  # a word of texts is not reserved
    ],
)
def test_the_mask_token_is_one_that_no_text_holds(tokens, added, options, mask, caplog):
    tokenizer = tokenizer_of(tokens, added, **options)
    is_spare = mask == len(tokens)
    named = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    target = Qwen3Config(vocab_size=len(tokens) + is_spare, **named)
    assert DominoConfig.for_target(target, tokenizer).mask_token_id == mask
    assert not caplog.records


def test_a_spare_row_is_one_that_no_token_has():
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "z": 7}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert DominoConfig.for_target(Qwen3Config(vocab_size=12), tokenizer).mask_token_id == 8


@pytest.mark.parametrize("eos", [2, [2, 1]])
def test_a_mask_token_that_ends_texts_is_said_when_a_drafter_is_made(eos, caplog):
    target, tokenizer = Qwen3Config(vocab_size=3, eos_token_id=eos), tokenizer_of(["a", "b", "<|endoftext|>"])
    said = "mask_token_id is 2, '<|endoftext|>', which ends texts: no row of the vocabulary is known to be reserved"
    assert DominoConfig.for_target(target, tokenizer).mask_token_id == 2
    assert [record.message.startswith(said) for record in caplog.records] == [True]
    assert "--mask-token-id" in caplog.text
    caplog.clear()
    for others in ({"mask_token_id": 1}, {"mask_token_id": 2}, {"projector_type": "eagle3"}):  # the last reads none
        DominoConfig.for_target(target, tokenizer, **others)
    assert not caplog.records
    DominoConfig.for_target(target)
    assert "mask_token_id is 2, which ends texts: " in caplog.text
    assert "Pass the target's tokenizer, if it was not" in caplog.text


def test_the_mask_token_of_a_target_without_its_tokenizer(caplog):
    assert DominoConfig.for_target(Qwen3Config(vocab_size=100, eos_token_id=[7, 8])).mask_token_id == 7
    assert DominoConfig.for_target(Qwen3Config(vocab_size=100, eos_token_id=7, pad_token_id=5)).mask_token_id == 5


def test_encoder_decoder_targets_are_refused():
    with pytest.raises(ValueError, match=r"is_encoder_decoder must be False, got True \(t5\)"):
        DominoConfig.for_target(T5Config())


def test_windows_are_kept_and_are_none_where_a_file_has_none(tmp_path):
    windows = {"layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048}
    DominoConfig(**windows, sliding_window_non_causal=True).save_pretrained(tmp_path)
    config = DominoConfig.from_pretrained(tmp_path)
    assert [config.is_sliding(index) for index in range(5)] == [True] * 4 + [False]
    assert (config.sliding_window, config.sliding_window_non_causal) == (2048, True)
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in (*windows, "sliding_window_non_causal"):
        del fields[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    without = DominoConfig.from_pretrained(tmp_path)
    assert without.to_dict() == DominoConfig().to_dict() | {"transformers_version": without.transformers_version}
    assert not without.has_sliding_layers


def test_a_target_is_no_drafter(saved_pair):
    with pytest.raises(ValueError, match=r"model_type must be 'domino', got 'qwen3': this is no drafter"):
        DominoConfig.from_pretrained(saved_pair[0])


def test_fields_are_replaced_while_a_configuration_is_read(saved_pair):
    folder = saved_pair[1]
    config = DominoConfig.from_pretrained(folder, projector_type="dflash", block_size=4)
    assert (config.projector_type, config.block_size) == ("dflash", 4)
    assert not hasattr(config, "gru_hidden_dim")  # a field of the method in the file
    for replaced, message in (
        ({"block_size": 1}, r"block_size must be in \[2, 1024\], got 1"),
        ({"selector_rank": 8}, r"selector_rank of a Domino drafter must be left out, got 'given'"),
        (
            {"projector_type": "dflash", "gru_hidden_dim": 8},
            r"gru_hidden_dim of a DFlash drafter must be left out, got 'given'",
        ),
        ({"projector_type": "medusa"}, r"projector_type must be one of .* got 'medusa'"),
    ):
        for read in (DominoConfig.from_pretrained, DominoDraftModel.from_pretrained):
            with pytest.raises(ValueError, match=message):
                read(folder, **replaced)


def test_fields_are_checked_wherever_they_are_set(saved_pair):
    folder = saved_pair[1]
    with pytest.raises(ValueError, match=r"draft_length must be one of \('adaptive', 'full'\), got 'short'"):
        DominoDraftModel.from_pretrained(folder, draft_length="short")
    drafter = DominoDraftModel.from_pretrained(folder, draft_length="full")
    assert drafter.config.draft_length == "full"
    with pytest.raises(ValueError, match=r"draft_pool_size must be at least 1, got -3"):
        drafter.view(draft_pool_size=-3)
    with pytest.raises(ValueError, match=r"draft_lenght must be a field of DominoConfig"):
        drafter.view(draft_lenght="full")
