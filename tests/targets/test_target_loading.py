"""Targets load by their names, whichever auto class knows their type."""

from __future__ import annotations

import pytest
import torch
import transformers
from builders import build_drafter
from test_wrapped_targets import image_target

from hf_domino.cli.main import main
from hf_domino.targets.loading import AutoTarget

pytestmark = pytest.mark.transformers


def test_a_command_takes_a_target_that_reads_images(tmp_path, tiny_tokenizer, capsys):
    target, _ = image_target("PaliGemma")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    build_drafter(target).save_pretrained(tmp_path / "drafter")
    arguments = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--max-new-tokens", "4"]
    assert not main(["generate", "abc", *arguments])
    assert capsys.readouterr().out


def test_shapes_alone():
    config = image_target("PaliGemma")[0].config
    with torch.device("meta"):
        assert isinstance(AutoTarget.from_config(config), transformers.PaliGemmaForConditionalGeneration)


def test_what_is_no_language_model_is_refused_in_few_words():
    with pytest.raises(ValueError, match=r"the target must be a language model, got .*ViTConfig") as error:
        AutoTarget.from_config(transformers.ViTConfig())
    assert len(str(error.value)) < 300
