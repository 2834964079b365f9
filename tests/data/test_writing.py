"""The whole way from a target, with prompts or without, to files of rows and a report."""

from __future__ import annotations

import json

import pytest
from builders import EOS
from chats import TEMPLATE, ScriptedWriter, chat_tokenizer, read_lines, write_lines

from hf_domino.data.rows import load_rows
from hf_domino.data.settings import WritingSettings
from hf_domino.data.writers import TargetWriter
from hf_domino.data.writing import write_data
from hf_domino.targets.identity import TargetIdentity

pytestmark = pytest.mark.transformers

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

    def run(name="data", say=None, settings=None, template=TEMPLATE, **options):
        tokenizer = chat_tokenizer(tiny_tokenizer, template)
        writer = ScriptedWriter(tokenizer, say) if say else TargetWriter(tiny_qwen3)
        chosen = WritingSettings(**(SETTINGS | (settings or {})))
        return write_data(writer, tokenizer, [EOS] if say else ENDS, tmp_path / name, chosen, progress=False, **options)

    return run


def texts(folder):
    return [(folder / name).read_text() for name in ("train.jsonl", "evaluation.jsonl")]


def word_of(row, seed):
    """Words that differ by row and seed."""
    return "".join(LETTERS[(seed * 7 + row * 11 + i * (row + 3)) % 26] for i in range(16))


def test_a_chat_model_writes_its_own_prompts_and_answers_them(write, tmp_path):
    report = write(settings={"eval_rows": 3})
    assert report == json.loads((tmp_path / "data/report.json").read_text())
    assert report["answers"] | {"unended": 0} == {"written": 12, "kept": 12, "dropped": {}, "unended": 0}
    assert report["rows"] == {"train.jsonl": 9, "evaluation.jsonl": 3}
    train, evaluation = (read_lines(tmp_path / "data" / name) for name in report["rows"])
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in train)
    assert len({row["messages"][0]["content"] for row in train + evaluation}) == 12  # they share no chat
    rows = load_rows(tmp_path / "data/train.jsonl", vocab_size=64)
    assert len(rows) == 9
    assert sum(sum(row["loss_mask"]) for row in rows) < report["supervised tokens"]


def test_any_number_of_processes_and_any_interruption_give_the_same_rows(write, tmp_path):
    write("whole")
    write("parts", shard=(1, 2))  # alone it does all, the other's share last
    assert texts(tmp_path / "parts") == texts(tmp_path / "whole")
    for unit in ("answers-000000", "prompts-1-000001"):
        (tmp_path / f"parts/units/{unit}.json").unlink()
    (tmp_path / "parts/train.jsonl").write_text("cut")
    write("parts", shard=(2, 3))
    assert texts(tmp_path / "parts") == texts(tmp_path / "whole")
    write("other", settings={"seed": 1})
    assert texts(tmp_path / "other") != texts(tmp_path / "whole")


def test_what_is_left_out_is_counted(write, tmp_path):
    """Of seven rows a batch: one copy, unended, empty, looping, excluded, and whose answer loops."""
    exclude = write_lines(tmp_path / "bench.jsonl", [{"text": "keep this out of it"}])

    def say(text, row, seed):
        if "assistant" in text:
            return "abcd" * 20 if "loop me" in text else "fine"
        own = word_of(row, seed)
        return [own, word_of(0, seed), own + "~", " .", "lala" * 20, "keep this out of it", f"loop me {own}"][row % 7]

    report = write(say=say, settings={"min_distinct": 0.5, "rows": 8, "keep_unended": False}, exclude=[exclude])
    dropped, answers = report["prompts"]["dropped"], report["answers"]
    assert dropped.keys() >= {"copy", "unended", "empty", "loops", "excluded"}
    assert answers["dropped"]["loops"] >= 1
    assert answers["kept"] + sum(answers["dropped"].values()) == answers["written"] <= 8


def test_a_target_that_repeats_itself_is_given_beginnings_and_too_few_prompts_are_said(write, caplog):
    def say(text, row, seed):
        return "same" if text.endswith("user: ") else word_of(row, seed) + ", please"

    assert write(say=say, settings={"rows": 8})["answers"]["kept"] == 8
    assert "Only 12% of the prompts that the target wrote are kept (7 copy)" in caplog.text
    report = write("few", say=lambda text, row, seed: word_of(row, seed) + "~" * (row > 0))
    assert report["prompts"]["kept, all distinct"] < 12
    assert "of 12 prompts were kept after 4 attempts" in caplog.text


def test_prompts_of_a_file(write, tmp_path):
    lines = [{"prompt": f"what is {word}"} for word in ("apple", "pear", "apple", "plum")]
    lines.append({"messages": [{"role": role, "content": "x"} for role in ("user", "tool", "user")]})
    prompts = [write_lines(tmp_path / "prompts.jsonl", lines)]
    assert write(prompts=prompts, settings={"rows": None})["prompts"]["dropped"] == {"copy": 1, "tool calls": 1}
    asked = [row["messages"][0]["content"] for row in read_lines(tmp_path / "data/train.jsonl")]
    assert sorted(asked) == ["what is apple", "what is pear", "what is plum"]
    assert write("few", prompts=prompts, settings={"rows": 2})["prompts"]["dropped"] == {"surplus": 3}


def test_chats_that_the_template_refuses_are_dropped_and_said(write, tmp_path, caplog):
    refuses = "{% for m in messages if m.content == 'no' %}{{ raise_exception('no such word') }}{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "ab"}]
    prompts = [write_lines(tmp_path / "prompts.jsonl", [{"messages": turns}, {"prompt": "ac"}])]
    report = write(say=lambda *_: "no", prompts=prompts, template=refuses + TEMPLATE)
    assert report["answers"]["dropped"] == {"refused by the chat template": 1}
    assert report["answers"]["first refusal"].endswith("the chat template rejects it: no such word")
    assert "1 chats are dropped, because the template rejects what the target wrote. prompt 1: " in caplog.text


def test_answers_that_do_not_end_are_kept_where_asked_for_or_said_to_be_lost(write, tmp_path, caplog):
    def say(text, row, seed):
        return word_of(row, seed) + "~" * ("two" not in text)

    prompts = [write_lines(tmp_path / "prompts.jsonl", [{"prompt": word} for word in ("a", "ab", "ac", "two")])]
    assert write(say=say, prompts=prompts)["answers"]["kept"] == 4
    assert "answers are kept" not in caplog.text
    lost = {"keep_unended": False}
    assert write(say=say, prompts=prompts, settings=lost)["answers"]["dropped"] == {"unended": 3}  # read anew
    assert "Only 1 of 4 answers are kept (dropped: 3 unended)" in caplog.text
    said = r"train.jsonl must hold an example, got none: 1 of 4 .* pass --keep-unended. .* --num-eval-examples"
    with pytest.raises(ValueError, match=said):
        write(say=say, prompts=prompts, settings=lost | {"eval_rows": 1})
    assert json.loads((tmp_path / "data/report.json").read_text())["answers"]["kept"] == 1


def test_a_folder_goes_on_only_as_it_was_begun(write, tmp_path):
    def begin(name="one", digest="a", **options):
        identity = TargetIdentity(name=name, weights_digest=digest)
        return write(say=lambda text, row, seed: word_of(row, seed), identity=identity, **options)

    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"output must be a folder without train\.jsonl"):
        begin()
    assert (tmp_path / "data/train.jsonl").read_text() == "mine"
    (tmp_path / "data/train.jsonl").unlink()
    begin()
    begin("copy", settings={"eval_rows": 2})
    with pytest.raises(ValueError, match=r"weights_digest must be 'a' .*another folder"):
        begin(digest="b")
    with pytest.raises(ValueError, match=r"max_new_tokens must be 12, .* got 9.*another folder"):
        begin(settings={"max_new_tokens": 9})
    recorded = json.loads((tmp_path / "data/settings.json").read_text())
    assert {"chat template", "chat_template_kwargs", "temperatures", "target", "versions"} <= set(recorded)
    assert str(tmp_path) not in json.dumps(recorded)
    for name in ("units/answers-000000.json", "settings.json"):  # as a crash of the machine can leave them
        path = tmp_path / "data" / name
        path.write_text(path.read_text()[:9])
        with pytest.raises(ValueError, match=rf"{name} must be a whole JSON file, .*elete"):
            begin()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 0), ("batch_size", 0), ("temperatures", (0.5, -1.0)), ("temperatures", ()), ("prompt_top_p", 0.0),
        ("min_distinct", 2.0), ("max_length", 512), ("eval_rows", -1), ("chat_template_kwargs", [1]),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(field, value):
    flag = {"rows": "num-examples", "eval_rows": "num-eval-examples"}.get(field, field.replace("_", "-"))
    with pytest.raises(ValueError, match=rf"^{field} must be .* \(--{flag}\)"):
        WritingSettings(**{field: value})
