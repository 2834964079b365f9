"""Draft vocabularies as others store them, and what becomes of one that is exported."""

import json
import logging

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from released import IDS, PREFIXES, RELEASED, our_drafter, reduced, stored_tensors, write_checkpoint
from safetensors.torch import load_file
from test_released import FP32_TOL, draft_logits

from hf_domino import DominoDraftModel
from hf_domino.cli.main import main
from hf_domino.formats.exporting import stored_config

pytestmark = pytest.mark.transformers

SHAPE = {"projector_type": "dflash", "shift_label": False}


@pytest.mark.parametrize("name", ["speculators_dflash", "speculators_domino", "specforge_domino", "zlab"])
@pytest.mark.parametrize("has_t2d", [True, False])
def test_a_released_checkpoint_loads(tiny_qwen3, tmp_path, name, has_t2d):
    stored = reduced(RELEASED[name])
    ours = our_drafter(tiny_qwen3, stored).restricted(IDS)
    if has_t2d or "speculators" in name:  # else the map alone tells its size
        stored["draft_vocab_size"] = len(IDS)
    tensors = stored_tensors(ours, PREFIXES.get(name, {}))
    if has_t2d:
        tensors["t2d"] = torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor(IDS), 1) > 0
        tensors |= {"embed_tokens.weight": torch.zeros(64, 32), "lm_head.weight": torch.zeros(len(IDS), 32)}
    write_checkpoint(tmp_path / "theirs", stored, tensors)
    loaded, info = DominoDraftModel.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert info["unexpected_keys"] == set()
    assert (loaded.config.draft_vocab_size, loaded.vocabulary.token_ids.tolist()) == (len(IDS), IDS)
    torch.testing.assert_close(draft_logits(loaded, tiny_qwen3), draft_logits(ours, tiny_qwen3), **FP32_TOL)
    loaded.save_pretrained(tmp_path / "ours")
    again = DominoDraftModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in ours.state_dict().items())
    prompt, options = torch.arange(5, 12)[None], {"do_sample": False, "max_new_tokens": 12}
    plain = tiny_qwen3.generate(prompt, **options)
    assert torch.equal(tiny_qwen3.generate(prompt, assistant_model=again, **options), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_target", [True, False])
def test_speculators_holds_it(tiny_llama, tmp_path, dtype, has_target, caplog):
    drafter = build_drafter(tiny_llama, **SHAPE).restricted(IDS)
    written = drafter.export(tmp_path, "speculators", dtype=dtype, target=tiny_llama if has_target else None)
    tensors = load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == len(IDS)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert (torch.arange(len(IDS)) + tensors["d2t"]).tolist() == IDS == tensors["t2d"].nonzero().flatten().tolist()
    if has_target:
        assert written.notes == ()
        assert torch.equal(tensors["lm_head.weight"], tiny_llama.lm_head.weight[IDS].to(dtype))
    else:
        assert "lm_head.weight" not in tensors
        assert written.notes[0].startswith("Engines want the draft vocabulary's rows of the target's lm_head")
        assert written.notes[0] in caplog.text
    again, info = DominoDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["unexpected_keys"] == set()
    assert again.dtype == dtype
    expected = drafter.to(dtype).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text()) == stored_config(again.config, "speculators", dtype)


def test_no_engine_is_said_to_take_a_folder_without_lm_head(tiny_llama, tmp_path, capsys):
    drafter = build_drafter(tiny_llama, **SHAPE).restricted(IDS)
    assert str(drafter.export(tmp_path / "0", "speculators").refusals["vllm"][0]).startswith("lm_head.weight must be")
    with pytest.raises(
        ValueError, match=r"vLLM 0\.32 to 0\.33 will not take this drafter: lm_head\.weight must be stored"
    ):
        drafter.export(tmp_path / "1", "speculators", engine="vllm")
    assert not (tmp_path / "1").exists()
    assert drafter.export(tmp_path / "2", "speculators", engine="vllm", target=tiny_llama).refusals["vllm"] == ()
    drafter.save_pretrained(tmp_path / "ours")
    tiny_llama.save_pretrained(tmp_path / "target")
    command = ["export", "--format", "speculators", "--engine", "vllm", "--drafter", str(tmp_path / "ours")]
    assert main([*command, "--output", str(tmp_path / "3"), "--target", str(tmp_path / "target")]) == 0
    assert "vllm serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [SHAPE, {"pure_draft_prefix_len": 1}, {"projector_type": "dspark", "markov_rank": 8}],
    ids=["dflash", "domino", "dspark"],
)
def test_specforge_gets_the_whole_vocabulary(tiny_qwen3, tmp_path, overrides, caplog):
    whole = build_drafter(tiny_qwen3, **overrides)
    drafter = whole.restricted(IDS)
    with caplog.at_level(logging.WARNING):
        written = drafter.export(tmp_path / "0", dtype=torch.float32)
    rest = ", and W2 has the mean of their rows for the others." if whole.has_correction_head else "."
    note = f"in other engines the drafter proposes all {VOCAB_SIZE} tokens instead of {len(IDS)}{rest}"
    assert written.notes[0].endswith(note)
    assert note in caplog.text
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    # Engines pass over t2d; d2t, or a size of the draft vocabulary, they would take for their own.
    assert tensors.pop("t2d").nonzero().flatten().tolist() == IDS
    assert "draft_vocab_size" not in (tmp_path / "0" / "config.json").read_text()
    assert tensors.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        if name in ("embed_proj.2.weight", "markov_head.markov_w2.weight"):
            rows = tensor[IDS]
            tensor = rows.mean(dim=0).repeat(VOCAB_SIZE, 1).index_copy(0, torch.tensor(IDS), rows)
        assert torch.equal(tensors[name], tensor)
    again, info = DominoDraftModel.from_pretrained(tmp_path / "0", output_loading_info=True)
    assert (info["unexpected_keys"], again.name_or_path) == (set(), str(tmp_path / "0"))
    assert again.config.draft_vocab_size == len(IDS)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    if again.config.projector_type != "dspark":  # whose proposals are compared in test_dspark_files.py
        torch.testing.assert_close(draft_logits(again, tiny_qwen3), draft_logits(drafter, tiny_qwen3), **FP32_TOL)
    as_in_engines = DominoDraftModel.from_pretrained(tmp_path / "0", draft_vocab_size=None)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in as_in_engines.state_dict().items())


def test_whole_vocabularies_are_written_without_a_word(tiny_qwen3, tmp_path):
    written = build_drafter(tiny_qwen3, **SHAPE).export(tmp_path, "speculators")
    assert written.notes == ()
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
