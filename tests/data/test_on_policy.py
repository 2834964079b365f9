"""Text of the target itself: its own tokens, deterministic, resumable, readable by the trainer."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hf_domino.data.on_policy import generate_on_policy
from hf_domino.data.rows import load_rows

PROMPTS = [[4, 5, 6, 7], [8, 9], [10, 11, 12], [13, 14], [15, 16, 17, 18], [20, 21, 22]]


def generate(target, output, **overrides):
    fields = {"max_new_tokens": 8, "temperatures": (0.0, 1.0), "batch_size": 2, "progress": False}
    return generate_on_policy(target, PROMPTS, output, **(fields | overrides))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_greedy_rows_are_what_the_target_says_to_each_prompt_alone(target, tmp_path):
    rows = rows_of(generate(target, tmp_path / "text.jsonl", temperatures=(0.0,), batch_size=4))
    assert sorted(row["input_ids"][: row["prompt_length"]] for row in rows) == sorted(PROMPTS)
    for row in rows:
        prompt = torch.tensor([row["input_ids"][: row["prompt_length"]]])
        expected = target.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=2)[0].tolist()
        assert row["input_ids"] == expected


def test_temperatures_take_turns_and_equal_seeds_give_equal_files(target, tmp_path):
    first = generate(target, tmp_path / "a.jsonl")
    torch.manual_seed(99)
    again = generate(target, tmp_path / "b.jsonl")
    other = generate(target, tmp_path / "c.jsonl", seed=1)
    assert first.read_text() == again.read_text() != other.read_text()
    assert [row["temperature"] for row in rows_of(first)] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def test_batches_draw_differently(target, tmp_path):
    """With one seed for all, equal prompts would be answered alike in every batch."""
    output = tmp_path / "text.jsonl"
    generate_on_policy(
        target, [[4, 5, 6]] * 4, output, max_new_tokens=16, temperatures=(1.0,), batch_size=2, progress=False
    )
    rows = [row["input_ids"] for row in rows_of(output)]
    assert rows[:2] != rows[2:]


def test_sampled_text_follows_the_targets_own_law(target, tmp_path):
    """Whatever truncation its generation configuration asks for."""
    free = rows_of(generate(target, tmp_path / "free.jsonl", temperatures=(1.0,)))
    target.generation_config.update(top_k=1, top_p=0.01, min_p=0.9)
    assert rows_of(generate(target, tmp_path / "truncated.jsonl", temperatures=(1.0,))) == free


@pytest.mark.parametrize("kept_characters", [0, 150, 400])
def test_an_interrupted_run_ends_with_the_same_file(kept_characters, target, tmp_path):
    whole = generate(target, tmp_path / "text.jsonl").read_text()
    assert len(whole) > 400
    (tmp_path / "text.jsonl").write_text(whole[:kept_characters])
    assert generate(target, tmp_path / "text.jsonl").read_text() == whole


def test_text_outlives_a_run_that_cannot_write(target, no_file_beyond, tmp_path):
    output = generate(target, tmp_path / "text.jsonl")
    whole = output.read_text()
    output.write_text(whole[:-9])  # a batch that was broken off
    with no_file_beyond(10), pytest.raises(OSError, match=r"text.jsonl could not be written: File too large"):
        generate(target, output)
    assert len(rows_of(output)) == 4
    assert generate(target, output).read_text() == whole


def test_processes_share_the_prompts(target, tmp_path):
    whole = rows_of(generate(target, tmp_path / "whole.jsonl"))
    shards = [rows_of(generate(target, tmp_path / f"{rank}.jsonl", shard=(rank, 2))) for rank in (0, 1)]
    assert [len(shard) for shard in shards] == [4, 2]
    assert shards[0][:2] + shards[1] + shards[0][2:] == whole


def test_rows_end_with_the_end_of_text_token(target, tmp_path):
    free = rows_of(generate(target, tmp_path / "free.jsonl", temperatures=(0.0,)))
    end = free[0]["input_ids"][free[0]["prompt_length"] + 2]
    target.generation_config.eos_token_id = end
    row = rows_of(generate(target, tmp_path / "cut.jsonl", temperatures=(0.0,)))[0]
    generated = row["input_ids"][row["prompt_length"] :]
    assert generated[-1] == end
    assert generated.count(end) == 1
    target.generation_config.eos_token_id = None


def test_the_trainer_reads_the_rows(target, tmp_path):
    row = load_rows(generate(target, tmp_path / "text.jsonl"))[0]
    assert row["loss_mask"] == [0, 0] + [1] * 8


def test_bf16(target, tmp_path):
    assert len(rows_of(generate(target, tmp_path / "text.jsonl", bf16=True))) == len(PROMPTS)


def test_other_settings_are_refused(target, tmp_path):
    generate(target, tmp_path / "text.jsonl")
    with pytest.raises(ValueError, match=r"max_new_tokens must be 8, with which .* got 9. Delete"):
        generate(target, tmp_path / "text.jsonl", max_new_tokens=9)


def test_text_of_another_target_is_refused(target, tmp_path):
    before = generate(target, tmp_path / "text.jsonl").read_text()
    generate(copy.deepcopy(target).to(torch.bfloat16), tmp_path / "text.jsonl")  # a copy of it
    other = copy.deepcopy(target)
    other.model.layers[0].mlp.up_proj.weight.data.normal_()
    with pytest.raises(
        ValueError, match=r"weights_digest must be .* with which .*text.jsonl was made.*Delete the file"
    ):
        generate(other, tmp_path / "text.jsonl")
    assert (tmp_path / "text.jsonl").read_text() == before
    settings = json.loads((tmp_path / "text.jsonl.settings.json").read_text())
    assert str(tmp_path) not in json.dumps(settings)
    settings.pop("target")  # as of a version that did not write it
    (tmp_path / "text.jsonl.settings.json").write_text(json.dumps(settings))
    generate(other, tmp_path / "text.jsonl")
    assert "target" not in json.loads((tmp_path / "text.jsonl.settings.json").read_text())
    assert generate(other, tmp_path / "text.jsonl", seed=1, overwrite=True).read_text() != before


def test_empty_prompts_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="prompts must be non-empty"):
        generate_on_policy(target, [[4], []], tmp_path / "text.jsonl")
