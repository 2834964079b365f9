from __future__ import annotations

import json
import math
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_domino.cli import main as cli
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.decoding import policy
from hf_domino.drafter.phases import PHASES
from hf_domino.evaluation.benchmark.options import MEASURABLE, keeps_seed
from hf_domino.evaluation.benchmark.report import caption
from hf_domino.evaluation.benchmark.rows import measured, read_rows
from hf_domino.integration.shadow import Mismatch, ShadowReport

FLAGS = ["--num-prompts", "2", "--max-new-tokens", "8", "--repeats", "2", "--threads", "1", "--device", "cpu"]
DIGITS = 1e-5  # of what is written of a figure
GREEDY = ["--temperature", "0", "--repeats", "1", "--methods", "domino"]


def bench(pair, rows, *flags):
    """Run `hf-domino bench` on a pair; the exit code."""
    return cli.main(["bench", "--target", str(pair), "--rows", str(rows), *FLAGS, *flags])


@pytest.fixture(scope="module")
def rows_file(tiny_pair_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    flags = ["--methods", "all", "--assistant", str(tiny_pair_folder), "--tree-size", "9"]
    assert bench(tiny_pair_folder, path, *flags) == 0
    return path


def test_one_row_per_prompt_method_and_mode_with_its_origin(rows_file):
    rows = read_rows(rows_file)
    assert [(row["mode"], row["prompt"], row["method"]) for row in rows] == [
        (mode, prompt, method) for mode in ("greedy", "sample") for prompt in range(2) for method in MEASURABLE
    ]
    for row in rows:
        assert (row["pair"], row["threads"], row["device"], row["assistant"]) == ("tiny", 1, "cpu", "tiny")
        assert (row["batch_size"], row["max_new_tokens"], row["repeats"], row["tree_size"]) == (1, 8, 2, 9)
        for field in ("hardware", "cores", "torch", "transformers", "commit", "seed", "date"):
            assert row[field] is not None, field


def test_outputs_are_equal_and_rounds_are_counted(rows_file):
    for row in measured(read_rows(rows_file)):
        assert row["new_tokens"] <= 8
        assert row["equals_plain"] is True or (row["mode"] == "sample" and not keeps_seed(row["method"]))
        if row["method"] in ("plain", "lean"):
            assert (row["num_rounds"], row["acceptance_length"], row["acceptance_rate_at"]) == (0, None, None)
        else:
            if row["num_drafted"]:
                assert row["acceptance_length"] == pytest.approx(1 + sum(row["acceptance_rate_at"] or [0]), rel=DIGITS)
            num_copied = row["num_copied"] or 0
            num_steps = row["num_rounds"] - row["num_drafted"] - num_copied
            tokens = num_steps + num_copied * (row["copied_length"] or 0)
            tokens += row["num_drafted"] * (row["acceptance_length"] or 0)
            assert row["tokens_per_forward"] * row["num_rounds"] == pytest.approx(tokens, rel=DIGITS)
        if row["method"] == "assistant" and row["mode"] == "greedy":
            assert row["acceptance_length"] > 1.5  # it is the target itself


def test_rows_carry_times(rows_file):
    for row in measured(read_rows(rows_file)):
        assert len(row["seconds_each"]) == 2
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"], rel=DIGITS)
        assert row["ttft_seconds"] > 0
        assert row["peak_memory_bytes"] is None  # meaningless on a CPU
        if row["method"].startswith(("dflash", "domino", "recycling", "lookahead")):
            assert list(row["ms_per_round"]) == list(PHASES)
        else:
            assert row["ms_per_round"] is None


def test_chains_and_trees_of_a_drafter_are_compared_on_request(tiny_pair_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(policy, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(policy.Policy, "_judge", lambda self, pace: None)  # however busy the machine is
    path, methods = tmp_path / "rows.jsonl", "domino,domino_chain,domino_tree"
    assert bench(tiny_pair_folder, path, "--methods", methods) == cli.USER_ERROR
    assert "--methods domino_chain must be given with --tree-size, got 'none'" in capsys.readouterr().err
    assert bench(tiny_pair_folder, path, "--methods", methods, "--tree-size", "30") == 0
    lines = re.findall(r"^- (greedy|T = 0\.7): Domino, trees over .* 2 equal prompts\.$", capsys.readouterr().out, re.M)
    assert lines == ["greedy", "T = 0.7"]
    rows = [row for row in read_rows(path) if row["num_drafted"]]
    assert {row["tree_size"] for row in rows} == {30}
    branching = {row["method"] for row in rows if row["proposal_length"] > 6}  # of which blocks are at most
    assert branching == {"domino_tree"}


def test_what_needs_no_drafter_is_measured_without_one(tiny_pair_folder, tmp_path, capsys):
    target = shutil.copytree(tiny_pair_folder, tmp_path / "alone")
    flags = "--temperature", "0", "--prompts", str(tiny_pair_folder / "prompts.jsonl")
    assert bench(target, tmp_path / "rows.jsonl", "--methods", "recycling,domino", *flags) == cli.USER_ERROR
    assert f"--drafter must be given: there is no {target}-domino beside" in capsys.readouterr().err
    assert bench(target, tmp_path / "rows.jsonl", "--methods", "prompt_lookup,recycling,lookahead", *flags) == 0
    rows = measured(read_rows(tmp_path / "rows.jsonl"))
    assert {row["method"] for row in rows} == {"plain", "prompt_lookup", "recycling", "lookahead"}
    assert {(row["drafter_commit"], row["equals_plain"]) for row in rows} == {(None, True)}


def test_a_drafter_of_another_kind_has_its_own_name(tiny_pair_folder, tmp_path, make_drafter, capsys):
    target = AutoModelForCausalLM.from_pretrained(tiny_pair_folder)
    make_drafter(target, projector_type="medusa", block_size=3).save_pretrained(tmp_path / "heads")
    flags = "--drafter", str(tmp_path / "heads"), "--temperature", "0", "--methods", "plain,domino"
    assert bench(tiny_pair_folder, tmp_path / "rows.jsonl", *flags) == 0
    assert {row["method"] for row in measured(read_rows(tmp_path / "rows.jsonl"))} == {"plain", "heads (Medusa)"}
    assert "Domino, whole blocks (the drafter is of another kind: Medusa)" in capsys.readouterr().out


def test_batches(tiny_pair_folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, "--temperature", "0", "--batch-size", "2", "--methods", "all") == 0
    rows = read_rows(path)
    assert [row["method"] for row in measured(rows)] == [
        *("plain", "lean", "recycling", "lookahead"),
        *("dflash", "dflash_adaptive", "domino", "domino_adaptive", "domino_lookup"),
    ]
    assert all(len(row["sources"]) == 2 and row["new_tokens"] <= 16 for row in measured(rows))
    assert "prompt lookup (Transformers decodes it one sequence at a time)" in capsys.readouterr().out


def test_by_default_few_methods_run_and_a_sentence_says_what_came_of_it(tiny_pair_folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, "--assistant", str(tiny_pair_folder)) == 0
    said = capsys.readouterr()
    first, *_, last = said.out.splitlines()
    named = {"plain", "prompt_lookup", "assistant", "domino_adaptive", "domino_lookup"}
    assert {row["method"] for row in read_rows(path)} == named
    before, _, rest = said.err.partition("\nby the first prompt, about 0:00:")
    assert rest.index("(h:mm:ss)") < rest.index("methods: ")
    assert before.startswith("4 texts with each of plain generate, prompt lookup, ")
    assert first.split()[0] == "greedy"
    assert "|" not in said.out
    assert max(map(len, said.out.partition("\n\ntiny,")[0].splitlines())) <= 80
    assert re.match(
        r"(Faster than|Slower than|About as fast as) plain: \d+\.\d\d x with .*plain in [0-2] of 2 prompts", last
    )
    assert bench(tiny_pair_folder, path, "--resume", "--assistant", str(tiny_pair_folder), "--markdown") == 0
    assert capsys.readouterr().out.startswith("| | greedy, tokens/s |")


def test_readme_flag_only_writes_the_table(rows_file, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    before = rows_file.read_text()
    assert cli.main(["bench", "--rows", str(rows_file), "--readme", str(readme)]) == 0
    assert "| **Domino** |" in readme.read_text()
    assert rows_file.read_text() == before


def test_rows_are_never_lost_silently(tiny_pair_folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("precious\n")
    assert bench(tiny_pair_folder, path, *GREEDY) == cli.USER_ERROR
    assert "Go on with it (--resume), replace it (--overwrite)" in capsys.readouterr().err
    assert path.read_text() == "precious\n"
    assert bench(tiny_pair_folder, path, *GREEDY, "--overwrite") == 0
    assert len(read_rows(path)) == 4


def test_a_second_look_leaves_the_rows_of_the_first(tiny_pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("results.jsonl", "results-2.jsonl", "results-3.jsonl")):
        call = ["bench", "--target", str(tiny_pair_folder), *FLAGS, *GREEDY, "--num-prompts", "1", "--seed", str(seed)]
        assert cli.main(call) == 0
        assert f"rows: {name}\n" in capsys.readouterr().err
    assert [read_rows(path)[0]["seed"] for path in sorted(tmp_path.glob("*"))] == [1, 2, 0]
    assert cli.main([*call, "--resume"]) == cli.USER_ERROR  # the first, of another seed
    assert "seed with --resume must be as in results.jsonl" in capsys.readouterr().err


def test_a_run_that_was_broken_off_goes_on(tiny_pair_folder, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, *GREEDY) == 0
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:3]))
    assert bench(tiny_pair_folder, path, *GREEDY, "--resume") == 0
    assert path.read_text().splitlines()[:2] == whole.splitlines()[:2]
    assert [(row["prompt"], row["method"]) for row in read_rows(path)] == [
        (prompt, method) for prompt in range(2) for method in ("plain", "domino")
    ]
    assert bench(tiny_pair_folder, path, *GREEDY, "--resume", "--seed", "7") == cli.USER_ERROR
    assert "seed" in capsys.readouterr().err


def test_bench_fails_where_outputs_differ(tiny_pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.torch.equal", lambda first, second: False)
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, *GREEDY) == FAILED_CHECK
    assert not json.loads(path.read_text().splitlines()[0])["equals_plain"]
    assert (
        "DIFFERENT: greedy output of Domino, whole blocks is not plain generate's for 2 prompt(s), first prompt 0; "
        "0 of them part at a tie, 2 not when watched." in capsys.readouterr().err
    )


@pytest.mark.parametrize(("margin", "code"), [(1e-6, 0), (0.1, FAILED_CHECK), (math.inf, FAILED_CHECK)])
def test_rows_say_how_near_to_a_tie_a_text_parts(margin, code, tiny_pair_folder, tmp_path, monkeypatch):
    parting = Mismatch(call=0, row=0, position=5, token=1, expected=2, margin=margin, tie=1e-5)

    @contextmanager
    def shadow(share):
        yield ShadowReport(share, mismatches=[parting])

    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.torch.equal", lambda first, second: first is second)
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.shadow", shadow)
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, *GREEDY) == code
    rows = read_rows(path)
    written = {"row": 0, "position": 5, "margin": margin if math.isfinite(margin) else None, "tie": 1e-5}
    assert [row.get("partings") for row in rows] == [None, [written]] * 2
    assert f"Of ours that differ, {2 * (code == 0)} of 2 part from it at a tie within what float32 rounds" in caption(
        rows
    )


def test_differences_in_low_precision_are_explained(tiny_pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.torch.equal", lambda first, second: False)
    assert bench(tiny_pair_folder, tmp_path / "rows.jsonl", *GREEDY, "--dtype", "bfloat16") == 0
    errors = capsys.readouterr().err
    assert "for 2 prompt(s)" in errors
    assert "In bfloat16 a block and single tokens round differently" in errors


def test_models_named_one_by_one(tiny_pair_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = ["--target", str(tiny_pair_folder), "--drafter", str(tiny_pair_folder.with_name("tiny-domino"))]
    flags += ["--twin", str(tiny_pair_folder.with_name("tiny-dflash")), "--methods", "dflash"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(a):"}\n')
    arguments = ["bench", *flags, "--rows", str(path), "--prompts", str(prompts), *FLAGS, "--temperature", "0"]
    assert cli.main(arguments) == 0
    assert [row["method"] for row in read_rows(path)] == ["plain", "dflash"]
    assert read_rows(path)[0]["sources"][0][:2] == [None, None]


@pytest.mark.slow
def test_drafters_of_several_kinds_are_compared(tiny_pair_folder, tmp_path, capsys):
    path, drafters = tmp_path / "rows.jsonl", [f"tiny-{kind}" for kind in ("dflash", "domino")]
    flags = [flag for name in drafters for flag in ("--drafter", str(tiny_pair_folder.with_name(name)))]
    flags += ["--max-new-tokens", "120", "--num-prompts", "1", "--markdown"]
    assert bench(tiny_pair_folder, path, *flags) == 0
    named = ["tiny-dflash (DFlash)", "tiny-domino (Domino)"]
    rows = measured(read_rows(path))
    assert [row["method"] for row in rows] == 2 * ["plain", "prompt_lookup", *named]
    drafted = [row for row in rows if row["method"] in named]
    assert all(row["equals_plain"] for row in drafted)
    assert all(set(row["rounds_by_context"]) == {"128", "256"} for row in drafted)
    found = capsys.readouterr().out
    assert re.findall(r"^- (.*): tiny-domino \(Domino\) over tiny-dflash .* 1 equal prompt\.$", found, re.M) == [
        "greedy",
        "T = 0.7",
    ]
    assert found.count("acceptance length by tokens of context") == 2
    shapes = tmp_path / "shapes.jsonl"
    flags[-4:] = ["--methods", "plain", "--tree-size", "6", "--temperature", "0"]
    assert bench(tiny_pair_folder, shapes, *flags) == 0
    drafted = [row["method"] for row in read_rows(shapes) if row["method"] != "plain"]
    assert drafted[:4] == [f"{name}, {shape}" for name in named for shape in ("chains", "trees")]
    assert bench(tiny_pair_folder, tmp_path / "twice.jsonl", *flags[:2], *flags[:2]) == cli.USER_ERROR
    assert "each --drafter must be of another name, got 'tiny-dflash'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "plain,magic"], "--methods must be all or some of plain, lean, .*, got 'magic'"),
        (["--methods", "native_dflash"], "--methods must be all or some of plain, lean, .*, got 'native_dflash'"),
        (["--methods", "assistant"], "--methods assistant must be given with --assistant"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--resume", "--overwrite"], "--resume must be without --overwrite"),
        (["--temperature", "-1"], "--temperature must be at least 0 and finite, got -1.0"),
    ],
)
def test_errors_name_the_flag(tiny_pair_folder, tmp_path, capsys, flags, message):
    path = tmp_path / "rows.jsonl"
    assert bench(tiny_pair_folder, path, *flags) == cli.USER_ERROR
    assert re.search(message, capsys.readouterr().err)
    assert not path.exists()


def test_an_assistant_of_another_vocabulary_is_refused(tiny_pair_folder, tiny_qwen3, tmp_path, capsys):
    tiny_qwen3.save_pretrained(tmp_path / "other")
    assert bench(tiny_pair_folder, tmp_path / "rows.jsonl", "--assistant", str(tmp_path / "other")) == cli.USER_ERROR
    assert "--assistant's vocabulary must be the target's of 400 tokens, got 64." in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "ratio"), [([1, 2, 3], 1.0), ([1, 2, 3, 4, 5], 1.0), ([7] * 8, 0.2)])
def test_distinct_ngram_ratio(tokens, ratio):
    assert distinct_ngram_ratio(tokens) == ratio


def test_chats_are_rendered_by_the_template(tiny_tokenizer):
    from hf_domino.evaluation.benchmark.prompts import encode

    batch = [{"messages": [{"role": "user", "content": "abc"}]}, {"text": "a"}]
    with pytest.raises(ValueError, match="chat template"):
        encode(tiny_tokenizer, batch)
    tiny_tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}:"
    try:
        encoded = encode(tiny_tokenizer, batch)
    finally:
        tiny_tokenizer.chat_template = None
    pad, (a, b, c, colon) = tiny_tokenizer.pad_token_id, tiny_tokenizer.convert_tokens_to_ids(list("abc:"))
    assert torch.equal(encoded["input_ids"], torch.tensor([[a, b, c, colon], [pad, pad, pad, a]]))
    assert encoded["attention_mask"].sum(dim=1).tolist() == [4, 1]
