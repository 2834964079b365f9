"""`hf-domino export` writes what engines take, and says what they will not."""

from __future__ import annotations

import pytest
import torch
from builders import build_drafter

from hf_domino import DominoDraftModel
from hf_domino.cli import main as cli


def test_command_line(tiny_qwen3, tmp_path, capsys):
    build_drafter(tiny_qwen3, projector_type="dflash", shift_label=False).save_pretrained(tmp_path / "drafter")
    output = tmp_path / "out"
    call = ["export", "--drafter", str(tmp_path / "drafter"), "--output", str(output), "--engine", "vllm"]
    assert cli.main(call) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{output}: config.json, model.safetensors (specforge)\n\nvllm serve TARGET")
    assert "sglang" not in text
    assert f'"model": "{output}", "num_speculative_tokens": 5' in text
    assert DominoDraftModel.from_pretrained(output).dtype == torch.bfloat16
    assert cli.main(call) == cli.USER_ERROR
    assert "must be empty" in capsys.readouterr().err
    assert cli.main([*call, "--overwrite", "--format", "speculators", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{output}: config.json, model.safetensors (speculators)\n\nvllm serve TARGET")
    assert "sglang" not in text
    assert DominoDraftModel.from_pretrained(output).dtype == torch.float32
    assert cli.main([*call, "--drafter", str(tmp_path / "drafte")]) == cli.USER_ERROR
    assert "Did you mean" in capsys.readouterr().err


def test_every_engine_is_listed_if_none_is_named(tiny_qwen3, tmp_path, capsys):
    build_drafter(tiny_qwen3, projector_type="dflash", shift_label=False).save_pretrained(tmp_path / "drafter")
    assert cli.main(["export", "--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "sglang serve --model-path TARGET" in text
    assert "vllm serve TARGET" in text


@pytest.mark.parametrize("method", ["domino", "dflash"])
def test_a_drafter_of_gemma_is_not_promised_to_vllm(method, tiny_qwen3, tmp_path, capsys):
    drafter = build_drafter(tiny_qwen3, projector_type=method, shift_label=False, target_model_type="gemma3_text")
    drafter.save_pretrained(tmp_path / "drafter")
    call = ["export", "--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "out")]
    assert cli.main([*call, "--engine", "vllm"]) == cli.USER_ERROR
    assert "target_model_type must be another than Gemma's, got 'gemma3_text'" in capsys.readouterr().err
    assert cli.main(call) == 0
    assert "vllm serve" not in capsys.readouterr().out


def test_a_full_disk_is_said_in_one_sentence(tiny_drafter, no_file_beyond, tmp_path, capsys):
    tiny_drafter.save_pretrained(tmp_path / "drafter")
    with no_file_beyond(10_000):
        assert cli.main(["export", "--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hf-domino export: {tmp_path / 'out'} could not be written")
    assert line.endswith("Make room and run the same command again.")


@pytest.mark.parametrize(
    ("fields", "method", "number"),
    [
        ({"projector_type": "dspark", "markov_rank": 8}, "dspark", 6),
        ({"projector_type": "dspark", "markov_rank": 8, "shift_label": False}, "dspark", 5),
        ({"projector_type": "dflash2", "selector_rank": 8, "conv_group_size": 8, "shift_label": False}, "dflash", 5),
    ],
)
def test_heads_that_engines_know_are_started_by_their_method(tiny_qwen3, tmp_path, capsys, fields, method, number):
    drafter = build_drafter(tiny_qwen3, conv_kernel_size=2 if method == "dflash" else None, **fields)
    drafter.save_pretrained(tmp_path / "drafter")
    assert cli.main(["export", "--drafter", str(tmp_path / "drafter"), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    output = tmp_path / "out"
    assert f'"method": "{method}", "model": "{output}", "num_speculative_tokens": {number}' in text
    is_taken = method == "dflash" or number == 6  # by SGLang
    assert (f"--speculative-algorithm {method.upper()} " in text) == is_taken
