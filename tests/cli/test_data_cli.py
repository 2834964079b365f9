"""`hf-domino data`: flags become settings, shards meet, and what is wrong is said before anything is written."""

from __future__ import annotations

import json
import re

import pytest
from chats import chat_tokenizer, read_lines, write_lines
from families import build
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_domino.cli.main import main
from hf_domino.pair import read_prompts


@pytest.fixture(scope="module")
def chat_target(tiny_qwen3, tiny_tokenizer, tmp_path_factory):
    """Folder of a tiny chat model."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_qwen3.save_pretrained(folder)
    chat_tokenizer(tiny_tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def data(chat_target, tmp_path):
    """A function that runs the command on three prompts."""
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": word} for word in ("one", "two", "three")])
    lengths = ["--max-new-tokens", "6", "--max-prompt-tokens", "6", "--batch-size", "2", "--dtype", "float32"]
    whole = ["--keep-unended", "--min-distinct", "0", "--threads", "1", "--prompts", str(prompts)]

    def run(output, *flags):
        return main(
            ["data", "--target", str(chat_target), "--output", str(tmp_path / output), *lengths, *whole, *flags]
        )

    return run


def test_a_run_prints_its_report(data, tmp_path, capsys):
    assert data("data", "--num-eval-examples", "1", "--temperatures", "0", "1") == 0
    said = capsys.readouterr()
    assert re.search(r"tokens of each text of the batch: +\d+%.* \d/6 ", said.err)  # also within a batch
    report = json.loads(said.out)
    assert report == json.loads((tmp_path / "data/report.json").read_text())
    assert report["rows"] == {"train.jsonl": 2, "evaluation.jsonl": 1}
    assert {row["temperature"] for row in read_lines(tmp_path / "data/train.jsonl")} <= {0.0, 1.0}
    assert json.loads((tmp_path / "data/settings.json").read_text())["target"]["dtype"] == "float32"


def test_what_a_base_model_wrote_is_asked_by_check_and_bench(data, tmp_path):
    assert data("data", "--plain", "--num-eval-examples", "1") == 0
    path = tmp_path / "data/evaluation.jsonl"
    (asked,), (row,) = read_prompts(path), read_lines(path)
    assert asked["text"] in ("one", "two", "three")
    assert (row["prompt"], type(row["completion"])) == (asked["text"], str)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_a_hybrid_target_writes_texts_that_end_at_different_times(family, tiny_tokenizer, tmp_path, capsys):
    target = build(family, vocab_size=64)
    target.generation_config.update(eos_token_id=list(range(4, 8)), pad_token_id=0)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"text": "abcdefgh"[:count]} for count in range(1, 7)])
    flags = [
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "48",
        "--temperatures",
        "1",
        "--threads",
        "1",
        "--seed",
        "1",
    ]
    flags += ["--keep-unended", "--min-distinct", "0", "--output", str(tmp_path / "data")]
    assert main(["data", "--target", str(tmp_path / "target"), *flags]) == 0
    lengths = {sum(row["loss_mask"]) for row in read_lines(tmp_path / "data/train.jsonl")}
    assert min(lengths) <= 32 < max(lengths)  # some left the batch at the first check


def test_an_adapter_of_a_target_writes(saved_pair, tiny_tokenizer, tmp_path):
    """Its folder has no configuration of a model: it names the one that it changes."""
    target = AutoModelForCausalLM.from_pretrained(saved_pair[0])
    get_peft_model(target, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    tiny_tokenizer.save_pretrained(tmp_path / "adapter")
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"text": "one"}])
    flags = ["--prompts", str(prompts), "--max-new-tokens", "6", "--keep-unended", "--min-distinct", "0"]
    call = ["data", "--target", str(tmp_path / "adapter"), *flags, "--threads", "1", "--temperatures", "0"]
    assert main([*call, "--output", str(tmp_path / "data")]) == 0
    assert read_lines(tmp_path / "data/train.jsonl")


def test_processes_are_those_of_torchrun(data, tmp_path, monkeypatch, capsys):
    data("one")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    capsys.readouterr()
    data("two")
    assert capsys.readouterr().out == ""  # the first process speaks
    one, two = ((tmp_path / name / "train.jsonl").read_text() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompts nowhere.jsonl", "--prompts must be a file of records, got 'nowhere.jsonl': it does not exist"),
        ("--prompts .", "--prompts must be a file of records, got '.': it is a folder"),
        ("--exclude .", "--exclude must be a file of records, got '.': it is a folder"),
        ("--max-length 5", "max_length must be above 6"),
        ("--num-eval-examples 3 --num-examples 3", "eval_rows must be at least 0 and below rows=3, got 3"),
        ("--seed -1", "seed must be in [0, 4294967295], got -1. Choose another value (--seed)."),
        ("--threads 0", "--threads: must be a number in [1, 1024], got '0'"),
        ("--template-kwargs [1]", "chat_template_kwargs must be a JSON object, got [1]"),
        ("--max-new-tokens 300", "must be below 256, because the target reads no more, got 300. Choose a shorter one"),
        ("--max-new-tokens 5000", "got 4096. This is the default: choose another value (--max-length)."),
        ("--target nowhere/at-all", "--target must be a folder or a Hub name"),
        ("--template-kwargs {", "--template-kwargs: invalid"),
    ],
)
def test_wrong_input_is_said_before_anything_is_written(flags, message, data, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):  # as argparse does
        raise SystemExit(data("data", *flags.split()))
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_base_model_is_told_that_it_needs_prompts(saved_pair, tmp_path, capsys):
    assert main(["data", "--target", str(saved_pair[0]), "--output", str(tmp_path / "data")]) == 2
    said = capsys.readouterr().err
    assert "prompts must be given for a target without a chat template" in said
    assert "--prompts text takes bundled ones" in said
    assert not (tmp_path / "data").exists()


def test_chats_for_a_base_model_are_told_what_it_continues(saved_pair, tmp_path, capsys):
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    flags = ["--prompts", str(chats), "--output", str(tmp_path / "data"), "--max-new-tokens", "6"]
    assert main(["data", "--target", str(saved_pair[0]), *flags]) == 2
    said = capsys.readouterr().err
    assert "the target's chat template must be set for prompts with `messages`, got None. Give prompts with" in said
    assert not (tmp_path / "data").exists()


def test_the_target_limits_the_length_of_examples(saved_pair, tmp_path, caplog):
    flags = ["--prompts", "text", "--num-examples", "2", "--max-new-tokens", "6", "--threads", "1", "--keep-unended"]
    assert main(["data", "--target", str(saved_pair[0]), "--output", str(tmp_path / "data"), *flags]) == 0
    assert "examples are cut at 256 tokens, because the target reads no more" in caplog.text
    assert "4096" not in caplog.text
