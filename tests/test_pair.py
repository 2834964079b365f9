from __future__ import annotations

import pytest
import torch

from hf_domino.pair import check_device, find_pair, load_pair, read_prompts


def test_load_pair(tiny_pair_folder):
    pair = load_pair(tiny_pair_folder)
    assert pair.name == "tiny"
    assert pair.drafter.has_correction_head
    assert not pair.twin.has_correction_head
    assert {parameter.dtype for parameter in pair.target.parameters()} == {torch.float32}


def test_missing_pair_names_the_way_out(tmp_path):
    with pytest.raises(FileNotFoundError, match="--pair PATH"):
        find_pair(tmp_path / "nothing")


def test_target_without_drafter_is_no_pair(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="-domino beside it"):
        find_pair(tmp_path)


def test_read_prompts(tiny_pair_folder):
    prompts = read_prompts(tiny_pair_folder / "prompts.jsonl")
    assert len(prompts) == 3
    assert set(prompts[0]) == {"module", "offset", "sha256", "text"}


def test_prompt_without_text_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n{"module": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused():
    check_device("cpu")
    with pytest.raises(ValueError, match=r"--device must be one that torch .* can use, got 'cuda:1'"):
        check_device("cuda:1")
