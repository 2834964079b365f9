"""A record is the same prompt to every command: a user's turn where the target has a chat template, else a text."""

from __future__ import annotations

import functools
import io
import json
import shutil

import pytest
from chats import TEMPLATE, chat_tokenizer, write_lines
from transformers import Qwen3ForCausalLM

from hf_domino.cli.main import main
from hf_domino.data.prompts import BUNDLED, QUESTIONS, bundled_prompts, read_prompts
from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.evaluation.results import read_results

COMMANDS = {
    "bench": "--drafter=recycling --methods=recycling --temperature=0 --max-new-tokens 2 --results {}.jsonl",
    "check": "--drafter {drafter} --max-new-tokens 4",
    "data": "--max-new-tokens 2 --keep-unended --min-distinct 0 --temperatures 0 --output {}",
    "generate": "--drafter recycling --max-new-tokens 2 abc",
    "explain": "--drafter recycling --max-new-tokens 2 --html {}.html abc",
    "chat": "--drafter recycling --max-new-tokens 2",
}
IN_FILES = ("bench", "check", "data")
AS_CHAT = "<mask>user: abc<eos><mask>assistant: "


@pytest.fixture
def asked(saved_pair, tiny_tokenizer, tmp_path, monkeypatch):
    """A function that runs a command, and returns what the target read at first in each of its texts."""

    def run(command, template, *flags, **record):
        folder = tmp_path / f"target-{template is None}"
        Qwen3ForCausalLM.from_pretrained(saved_pair[0]).save_pretrained(folder)
        chat_tokenizer(tiny_tokenizer, template).save_pretrained(folder)
        read = []
        forward = Qwen3ForCausalLM.forward

        @functools.wraps(forward)
        def watched(self, *args, **kwargs):
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is None or not cache.get_seq_length():
                read.append(tiny_tokenizer.decode(kwargs["input_ids"][0]))
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(Qwen3ForCausalLM, "forward", watched)
        monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
        words = COMMANDS[command].format(tmp_path / "out", drafter=saved_pair[1]).split()
        words += ["--target", str(folder), "--threads", "1", "--dtype", "float32", *flags]
        if record:
            words += ["--prompts", str(write_lines(tmp_path / "prompts.jsonl", [record]))]
        assert main([command, *words]) in (0, 1, 3)  # a random drafter does not fit
        return read

    return run


@pytest.mark.parametrize(
    ("command", "flag"), [*((command, "--chat-template-kwargs") for command in COMMANDS), ("data", "--template-kwargs")]
)
def test_every_command_passes_variables_to_the_chat_template(command, flag, asked):
    """As `enable_thinking`; the second name is the one that `data` had alone."""
    record = {"prompt": "abc"} if command in IN_FILES else {}
    read = asked(command, "{{ mood }}" + TEMPLATE, flag, '{"mood": "(calm)"}', **record)
    about_it = [text for text in read if "abc" in text]
    assert about_it
    assert all(text.startswith(f"(calm){AS_CHAT}") for text in about_it)


def test_variables_that_no_template_reads_are_refused(saved_pair, capsys):
    call = ["generate", "--target", str(saved_pair[0]), "--drafter", "recycling", "abc", "--chat-template-kwargs"]
    assert main([*call, '{"mood": "calm"}']) == 2
    assert "--chat-template-kwargs must be left out, got {'mood': 'calm'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*call, "[1]"])
    assert "--chat-template-kwargs: must be a JSON object, such as" in capsys.readouterr().err


@pytest.mark.parametrize(("template", "expected"), [(TEMPLATE, AS_CHAT), (None, "abc")])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_prompt_is_a_users_turn_to_every_command_if_the_target_chats(command, template, expected, asked):
    record = {"prompt": "abc"} if command in IN_FILES else {}
    read = asked(command, template, **record)
    assert [text for text in read if text.startswith(expected)] == [text for text in read if "abc" in text] != []


@pytest.mark.parametrize("record", [{"text": "abc"}, {"prompt": "abc", "completion": "d", "input_ids": [1, 2, 3]}])
@pytest.mark.parametrize("command", IN_FILES)
def test_a_text_is_continued_by_every_command(command, record, asked):
    read = [text for text in asked(command, TEMPLATE, **record) if "abc" in text]
    assert read
    assert all(text.startswith("abc") for text in read)


def test_a_chat_model_is_measured_with_bundled_questions_and_another_with_beginnings(asked, tmp_path, capsys):
    asked("bench", TEMPLATE, "--num-prompts", "6")
    rows = [row for row in read_results(tmp_path / "out.jsonl") if row["method"] == "plain"]
    questions = [json.loads((BUNDLED / f"{kind}.jsonl").read_text().splitlines()[0])["prompt"] for kind in QUESTIONS]
    turns = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    assert [row["sources"] for row in rows[:3]] == [[source(turn)] for turn in turns]
    assert {row["prompts"] for row in rows} == {"bundled"}
    assert "prompts: the bundled questions about everyday matters, code and maths" in capsys.readouterr().err
    asked("bench", None, "--num-prompts", "1", "--overwrite")
    (row, _) = read_results(tmp_path / "out.jsonl")
    assert row["sources"] == [source(bundled_prompts(is_chat=False)[0])]
    assert "prompts: the bundled beginnings of texts and code" in capsys.readouterr().err


def test_bundled_prompts_are_named_by_a_word(asked, tmp_path, monkeypatch):
    asked("bench", TEMPLATE, "--num-prompts", "2", "--prompts", "maths")
    rows = [row for row in read_results(tmp_path / "out.jsonl") if row["method"] == "plain"]
    assert [row["sources"] for row in rows] == [[source(prompt)] for prompt in read_prompts("maths", is_chat=True)[:2]]
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "maths", [{"text": "mine"}])  # a file of that name comes first
    assert read_prompts("maths") == [{"text": "mine"}]


def test_bundled_prompts_are_distinct_questions_of_each_kind_in_turn():
    prompts = [prompt["messages"][0]["content"] for prompt in bundled_prompts(is_chat=True)]
    assert len(set(prompts)) == len(prompts) == 72
    assert prompts[2::3] == [prompt["text"] for prompt in read_prompts("maths")]
    assert len({prompt["text"] for prompt in bundled_prompts(is_chat=False)}) == 24


CODE = """
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize(
    "command",
    [
        "generate --drafter recycling --max-new-tokens 2 --threads 1 abc",
        "data --max-new-tokens 2 --threads 1",
        "export --drafter DRAFTER --output OUT",
    ],
)
def test_code_that_comes_with_a_target_runs_if_it_is_trusted(command, saved_pair, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "own"
    shutil.copytree(saved_pair[0], folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    command = command.replace("DRAFTER", str(saved_pair[1])).replace("OUT", str(tmp_path / "exported"))
    words = [*command.split(), "--target", str(folder)]
    if command.startswith("data"):
        prompts = write_lines(tmp_path / "prompts.jsonl", [{"text": "abc"}])
        words += ["--prompts", str(prompts), "--keep-unended", "--min-distinct", "0", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert main(words) == 2
    assert "The option is --trust-remote-code." in capsys.readouterr().err
    assert main([*words, "--trust-remote-code"]) == 0
