"""The whole way from a target, with prompts or without, to files of rows and a report."""

from __future__ import annotations

import json

import pytest
from builders import EOS
from chats import ScriptedWriter, chat_tokenizer, read_lines, write_lines

from hf_domino.data.rows import load_rows
from hf_domino.data.settings import WritingSettings
from hf_domino.data.writers import TargetWriter
from hf_domino.data.writing import write_data
from hf_domino.target.identity import TargetIdentity

SETTINGS = {
    "rows": 12,
    "batch_size": 8,
    "max_new_tokens": 12,
    "max_prompt_tokens": 24,
    "temperatures": (0.0, 1.0),
    "min_distinct": 0.0,
    "keep_unended": True,
}
ENDS = [EOS, *range(4, 12)]  # a random target hardly ever says one token of its own
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def write(tiny_qwen3, tiny_tokenizer, tmp_path):
    """A function that lets the tiny target, or a scripted one, write to a folder."""

    def run(name="data", say=None, settings=None, **options):
        tokenizer = chat_tokenizer(tiny_tokenizer)
        writer = ScriptedWriter(tokenizer, say) if say else TargetWriter(tiny_qwen3)
        chosen = WritingSettings(**(SETTINGS | (settings or {})))
        return write_data(writer, tokenizer, [EOS] if say else ENDS, tmp_path / name, chosen, progress=False, **options)

    return run


def texts(folder):
    return {name: (folder / name).read_text() for name in ("train.jsonl", "evaluation.jsonl")}


def word_of(row, seed):
    """Words that differ by row and seed."""
    return "".join(LETTERS[(seed * 7 + row * 11 + i * (row + 3)) % 26] for i in range(16))


def test_a_chat_model_writes_its_own_prompts_and_answers_them(write, tmp_path):
    report = write(settings={"eval_rows": 3})
    assert report["answers"] == {"written": 12, "kept": 12, "dropped": {}, "unended": report["answers"]["unended"]}
    assert report["rows"] == {"train.jsonl": 9, "evaluation.jsonl": 3}
    rows = load_rows(tmp_path / "data/train.jsonl", vocab_size=64)
    assert len(rows) == 9
    assert sum(sum(row["loss_mask"]) for row in rows) < report["tokens"]["supervised"] < report["tokens"]["written"]
    for row in read_lines(tmp_path / "data/train.jsonl"):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert json.loads((tmp_path / "data/report.json").read_text()) == report


def test_any_number_of_processes_and_any_interruption_give_the_same_rows(write, tmp_path):
    write("whole")
    expected = texts(tmp_path / "whole")
    write("parts", shard=(1, 2))  # alone it does all, the other's share last
    assert texts(tmp_path / "parts") == expected
    for unit in sorted((tmp_path / "parts/units").glob("answers-*"))[:1] + [
        tmp_path / "parts/units/prompts-1-000001.json"
    ]:
        unit.unlink()
    (tmp_path / "parts/train.jsonl").write_text("cut")
    write("parts", shard=(2, 3))
    assert texts(tmp_path / "parts") == expected
    write("other", settings={"seed": 1})
    assert texts(tmp_path / "other") != expected


def test_train_and_evaluation_share_no_chat(write, tmp_path):
    write(say=lambda text, row, seed: word_of(row, seed), settings={"eval_rows": 4})
    train, evaluation = (
        {row["messages"][0]["content"] for row in read_lines(tmp_path / "data" / name)}
        for name in ("train.jsonl", "evaluation.jsonl")
    )
    assert len(evaluation) == 4
    assert not train & evaluation


def test_what_is_left_out_is_counted(write, tmp_path):
    """Of eight rows a batch: a copy, one unended, one empty, one that loops, one that is excluded."""
    exclude = write_lines(tmp_path / "bench.jsonl", [{"text": "keep this out of it"}])

    def say(text, row, seed):
        if "assistant" in text:
            return "abcd" * 20 if "loop me" in text else "fine"
        own = word_of(row, seed)
        said = [own, word_of(0, seed), own + "~", " .", "lala" * 20, "keep this out of it", own, f"loop me {own}"]
        return said[row]

    settings = {"min_distinct": 0.5, "rows": 8, "keep_unended": False}
    report = write(say=say, settings=settings, exclude=[exclude])
    dropped = report["prompts"]["dropped"]
    assert all(dropped[name] for name in ("copy", "unended", "empty", "loops", "excluded"))
    assert report["answers"]["dropped"]["loops"] >= 1
    assert report["answers"]["kept"] + sum(report["answers"]["dropped"].values()) == report["answers"]["written"] <= 8


def test_a_target_that_repeats_itself_is_given_beginnings(write, caplog):
    def say(text, row, seed):
        if text.endswith("user: "):
            return "same"
        return word_of(row, seed) + ", please"

    report = write(say=say, settings={"rows": 8})
    assert report["answers"]["kept"] == 8
    assert "Only 12% of the prompts that the target wrote are kept (7 copy)" in caplog.text


def test_too_few_prompts_are_said(write, caplog):
    def say(text, row, seed):
        return "ok" if text.endswith("assistant: ") else word_of(row, seed) + ("~" if row else "")

    report = write(say=say, settings={"rows": 8})
    assert report["prompts"]["kept, all distinct"] < 8
    assert "of 8 prompts after 4 rounds" in caplog.text


def test_prompts_of_a_file(write, tmp_path):
    lines = [{"prompt": f"what is {word}"} for word in ("apple", "pear", "apple", "plum")]
    lines.append(
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "tool", "content": "y"},
                {"role": "user", "content": "z"},
            ]
        }
    )
    prompts = [write_lines(tmp_path / "prompts.jsonl", lines)]
    report = write(prompts=prompts, settings={"rows": None})
    assert report["prompts"]["dropped"] == {"copy": 1, "tool calls": 1}
    asked = {row["messages"][0]["content"] for row in read_lines(tmp_path / "data/train.jsonl")}
    assert asked == {"what is apple", "what is pear", "what is plum"}
    assert write("few", prompts=prompts, settings={"rows": 2})["prompts"]["dropped"] == {"surplus": 3}


def test_answers_that_do_not_end_are_kept_where_asked_for(write, tmp_path):
    prompts = [write_lines(tmp_path / "prompts.jsonl", [{"prompt": "a few words"}, {"prompt": "two others"}])]

    def say(text, row, seed):
        return "on and on~" if "few" in text else "end"

    assert write(say=say, prompts=prompts, settings={"keep_unended": False})["answers"]["dropped"] == {"unended": 1}
    assert write(say=say, prompts=prompts)["answers"]["kept"] == 2  # the same text, read anew


def test_a_folder_goes_on_only_as_it_was_begun(write, tmp_path):
    def say(text, row, seed):
        return word_of(row, seed)

    write(say=say, identity=TargetIdentity(name="one", weights_digest="a"))
    write(say=say, identity=TargetIdentity(name="copy", weights_digest="a"), settings={"eval_rows": 2})
    with pytest.raises(ValueError, match=r"weights_digest must be 'a' .*--overwrite"):
        write(say=say, identity=TargetIdentity(name="one", weights_digest="b"))
    with pytest.raises(ValueError, match=r"max_new_tokens must be 12, with which .* was begun, got 9"):
        write(say=say, settings={"max_new_tokens": 9})
    before = texts(tmp_path / "data")
    write(say=lambda text, row, seed: "b" + word_of(row, seed), settings={"max_new_tokens": 9}, overwrite=True)
    assert texts(tmp_path / "data") != before
    recorded = json.loads((tmp_path / "data/settings.json").read_text())
    assert {"chat template", "template_kwargs", "temperatures", "target", "versions"} <= set(recorded)
    assert str(tmp_path) not in json.dumps(recorded)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "batch_size must be at least 1, got 0"),
        ("temperatures", (0.5, -1.0), "temperatures must be one or more numbers, at least 0"),
        ("temperatures", (), "temperatures must be one or more numbers"),
        ("prompt_top_p", 0.0, r"prompt_top_p must be in \(0, 1\]"),
        ("min_distinct", 2.0, r"min_distinct must be in \[0, 1\]"),
        ("max_length", 512, r"max_length must be above 512 .*--max-length"),
        ("eval_rows", -1, "eval_rows must be at least 0"),
        ("template_kwargs", [1], "template_kwargs must be a JSON object"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        WritingSettings(**{field: value})


def test_a_target_without_a_chat_template_needs_prompts(tiny_qwen3, tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="chat template must be set"):
        write_data(TargetWriter(tiny_qwen3), tiny_tokenizer, [EOS], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_answers_that_are_lost_are_said_with_the_way_out(write, tmp_path, caplog, monkeypatch):
    lost = {"keep_unended": False, "max_new_tokens": 2}
    said = "train.jsonl has no row: 0 of 12 answers are kept .dropped: 12 unended.; .* raise it, or pass --keep-unended"
    with pytest.raises(ValueError, match=said):
        write(settings=lost)
    assert json.loads((tmp_path / "data/report.json").read_text())["answers"]["kept"] == 0
    write(settings=lost | {"keep_unended": True})
    assert "answers are kept" not in caplog.text
    monkeypatch.setattr("hf_domino.data.writing.LEAST_KEPT", 1.1)
    write(settings=lost | {"keep_unended": True})
    assert "Only 12 of 12 answers are kept." in caplog.text
