from __future__ import annotations

import itertools
import re
import shutil
import sys

import pytest
from chats import chat_tokenizer
from transformers import AutoModelForCausalLM

from hf_domino import DominoDraftModel
from hf_domino.cli import main as cli
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.decoding import policy
from hf_domino.evaluation.benchmark.options import MEASURABLE, keeps_seed
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.benchmark.report import caption
from hf_domino.evaluation.results import measured, read_results
from hf_domino.stats.phases import PHASES

FLAGS = ["--num-prompts", "2", "--max-new-tokens", "8", "--repeats", "2", "--threads", "1", "--device", "cpu"]
DIGITS = 1e-5  # of what is written of a figure
GREEDY = ["--temperature", "0", "--repeats", "1", "--methods", "domino"]


@pytest.fixture
def bench(tiny_pair_folder, tmp_path, capsys):
    """A function that runs `hf-domino bench`, and returns its exit code, the rows, and what it printed and said."""

    def run(*words, rows="rows.jsonl"):
        call = ["bench", "--target", str(tiny_pair_folder), "--results", str(tmp_path / rows), *FLAGS, *words]
        code = cli.main(call)
        return code, read_results(tmp_path / rows) if code != cli.USER_ERROR else [], *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def rows_file(tiny_pair_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    flags = ["--methods", "all", "--assistant", str(tiny_pair_folder), "--tree-size", "9", "--results", str(path)]
    flags += ["--max-new-tokens", "4"]
    assert cli.main(["bench", "--target", str(tiny_pair_folder), *FLAGS, *flags]) == 0
    return path


def test_one_row_per_prompt_method_and_mode_with_its_origin(rows_file):
    skipped, *rows = read_results(rows_file)
    assert (skipped["method"], skipped["skipped"]) == ("mtp", "the target has no such layers")
    methods = [name for name in MEASURABLE if name != "mtp"]
    assert [(row["mode"], row["prompt"], row["method"]) for row in rows] == [
        *itertools.product(("greedy", "sample"), range(2), (*methods, "Domino, chains", "Domino, trees"))
    ]
    asked = {"target": "tiny", "threads": 1, "device": "cpu", "assistant": "tiny", "batch_size": 1, "tree_size": 9}
    for row in rows:
        assert row.items() >= asked.items()
        assert None not in {row[field] for field in ("hardware", "cores", "torch", "transformers", "commit", "date")}


def test_outputs_are_equal_and_rounds_are_counted_and_timed(rows_file):
    for row in measured(read_results(rows_file)):
        assert row["new_tokens"] <= 8
        assert row["equals_plain"] is True or (row["mode"] == "sample" and not keeps_seed(row["method"]))
        if row["method"] in ("plain", "packed"):
            assert (row["num_rounds"], row["acceptance_length"], row["acceptance_rate_at"]) == (0, None, None)
        else:
            if row["num_drafted"]:
                assert row["acceptance_length"] == pytest.approx(1 + sum(row["acceptance_rate_at"] or [0]), rel=DIGITS)
            num_lookups = row["num_lookups"] or 0
            tokens = row["num_rounds"] - row["num_drafted"] - num_lookups + num_lookups * (row["lookup_length"] or 0)
            tokens += row["num_drafted"] * (row["acceptance_length"] or 0)
            assert row["tokens_per_forward"] * row["num_rounds"] == pytest.approx(tokens, rel=DIGITS)
        if row["method"] == "assistant" and row["mode"] == "greedy":
            assert row["acceptance_length"] > 1.5  # it is the target itself
        assert len(row["seconds_each"]) == row["repeats"] == 2
        assert row["seconds"] == pytest.approx(sum(row["seconds_each"]) / 2, rel=DIGITS)
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"], rel=DIGITS)
        has_phases = row["method"].startswith(("domino", "recycling", "Domino"))
        assert list(row["ms_per_round"] or ()) == list(PHASES) * has_phases


def test_chains_and_trees_of_a_drafter_are_compared_on_request(bench, monkeypatch):
    monkeypatch.setattr(policy, "NOMINAL_PROPOSAL", 0.0)
    code, rows, out, _ = bench("--methods", "domino", "--tree-size", "30")
    assert code == 0
    lines = re.findall(r"^(greedy|T = 0\.7): Domino, trees over .* 2 equal prompts\.$", out, re.M)
    assert lines == ["greedy", "T = 0.7"]
    drafted = [row for row in rows if row["num_drafted"]]
    assert {row["tree_size"] for row in drafted} == {30}
    # Blocks have at most 6 proposals.
    assert {row["method"] for row in drafted if row["proposal_length"] > 6} == {"Domino, trees"}


def test_what_needs_no_drafter_is_measured_without_one(bench, tiny_pair_folder, tmp_path):
    target = shutil.copytree(tiny_pair_folder, tmp_path / "alone")
    flags = "--target", str(target), "--temperature", "0", "--prompts", str(tiny_pair_folder / "prompts.jsonl")
    code, _, _, err = bench("--methods", "recycling,domino", *flags)
    assert (code, f"--drafter must be given: there is no {target}-domino beside" in err) == (cli.USER_ERROR, True)
    _, rows, _, _ = bench("--methods", "prompt_lookup,recycling", *flags)
    methods = ["plain", "prompt_lookup", "recycling"]
    assert [(row["method"], row["drafter_commit"], row["equals_plain"]) for row in measured(rows)] == [
        (method, None, True) for _ in range(2) for method in methods
    ]


def test_a_drafter_of_another_kind_has_its_own_name(bench, tiny_pair_folder, tmp_path, make_drafter):
    target = AutoModelForCausalLM.from_pretrained(tiny_pair_folder)
    make_drafter(target, projector_type="eagle3", block_size=3).save_pretrained(tmp_path / "heads")
    flags = "--drafter", str(tmp_path / "heads"), "--temperature", "0", "--methods", "plain,domino"
    _, rows, out, _ = bench(*flags, "--num-prompts", "1")
    assert {row["method"] for row in measured(rows)} == {"plain", "heads (EAGLE-3)"}
    assert "Domino, full blocks (the drafter's method is EAGLE-3)" in out


def test_batches(bench):
    _, rows, out, _ = bench("--temperature", "0", "--batch-size", "2", "--methods", "all")
    assert [row["method"] for row in measured(rows)] == [
        *("plain", "packed", "recycling", "recycling_lookup", "domino", "domino_adaptive", "domino_lookup"),
    ]
    assert all(len(row["sources"]) == 2 and row["new_tokens"] <= 16 for row in measured(rows))
    assert "prompt lookup (Transformers decodes it one sequence at a time)" in out


def test_by_default_few_methods_run_and_a_sentence_says_what_came_of_it(bench, tiny_pair_folder, forward_clock):
    _, rows, out, err = bench("--assistant", str(tiny_pair_folder))
    assert {row["method"] for row in rows} == {
        "plain",
        "packed",
        "prompt_lookup",
        "assistant",
        "domino_adaptive",
        "domino_lookup",
    }
    assert re.match(
        r"methods: plain generate, plain, packed, prompt lookup, [^\n]*; texts of each: 4, repeats: 2\n", err
    )
    assert re.search(r"[\r\n]greedy 1: plain generate [\d.e+-]+; plain, packed [\d.e+-]+; .* tokens/s\n", err)
    assert "48/48" in err  # runs: 2 texts in 2 modes, 6 methods, twice
    last = out.splitlines()[-1]
    assert out.split()[0] == "greedy,"
    assert "|" not in out
    assert max(map(len, out.partition("\n\ntiny,")[0].splitlines())) <= 80
    assert re.fullmatch(r"Inconclusive: \d+ forwards with Domino.* are too few to time; generate more tokens.", last)
    again = bench("--assistant", str(tiny_pair_folder))
    assert again[1:3] == (rows, out)


def test_a_second_look_leaves_the_rows_of_the_first(tiny_pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call = ["bench", "--target", str(tiny_pair_folder), *FLAGS, *GREEDY, "--num-prompts", "1", "--seed"]
    assert cli.main([*call, "0"]) == 0
    assert "results: results.jsonl\n" in capsys.readouterr().err
    assert cli.main([*call, "1"]) == cli.USER_ERROR
    assert "seed must be as in results.jsonl, 0, got 1. Write to another --results" in capsys.readouterr().err
    assert [read_results(path)[0]["seed"] for path in tmp_path.glob("*")] == [0]


def test_a_run_that_was_broken_off_goes_on_or_is_replaced(bench, tmp_path):
    path = tmp_path / "rows.jsonl"
    bench(*GREEDY)
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:3]))
    _, rows, _, _ = bench(*GREEDY)
    assert path.read_text().splitlines(keepends=True)[:2] == whole[:2]
    assert [(row["prompt"], row["method"]) for row in rows] == [*itertools.product(range(2), ("plain", "domino"))]
    path.write_text(path.read_text().replace('"num_rounds":0', '"num_rounds":9'))
    assert [row["num_rounds"] == 9 for row in bench(*GREEDY)[1]] == [True, False] * 2
    assert [row["num_rounds"] == 9 for row in bench(*GREEDY, "--overwrite")[1]] == [False] * 4


def test_a_run_goes_on_only_with_the_same_models_whatever_they_are_called(
    tiny_pair_folder, make_drafter, tmp_path, capsys
):
    pair = tmp_path / "pair"
    shutil.copytree(tiny_pair_folder.parent, pair)
    results = tmp_path / "rows.jsonl"
    call = ["bench", "--target", str(pair / "tiny"), "--results", str(results), *FLAGS, *GREEDY, "--num-prompts", "1"]
    assert cli.main(call) == 0
    rows = results.read_bytes()
    capsys.readouterr()

    def refused() -> str:
        assert cli.main(call) == cli.USER_ERROR
        assert results.read_bytes() == rows
        return capsys.readouterr().err

    def change(folder, model_class, model_change):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        model = model_class.from_pretrained(folder)
        model_change(model)
        model.save_pretrained(folder)
        said = refused()
        for path, content in before.items():
            path.write_bytes(content)
        return said

    domino = pair / "tiny-domino"
    said = change(domino, DominoDraftModel, lambda drafter: drafter.fc.weight.data.mul_(2))
    assert "the drafter tiny-domino (Domino)'s weights_digest must be" in said
    assert "Write to another --results, or give --overwrite." in said
    said = change(domino, DominoDraftModel, lambda drafter: setattr(drafter.config, "rms_norm_eps", 1e-3))
    assert "the drafter tiny-domino (Domino)'s config_digest must be" in said
    said = change(pair / "tiny", AutoModelForCausalLM, lambda target: target.model.norm.weight.data.normal_())
    assert "the target's weights_digest must be" in said
    assert cli.main(call) == 0


@pytest.mark.parametrize(
    ("dtype", "code", "said"),
    [
        ("float32", FAILED_CHECK, "0 of them diverge at a tie."),
        ("bfloat16", 0, "In bfloat16 blocks and single tokens round differently"),
    ],
)
def test_bench_fails_where_outputs_differ(dtype, code, said, bench, monkeypatch):
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.torch.equal", lambda first, second: False)
    returned, rows, _, err = bench(*GREEDY, "--dtype", dtype)
    assert (returned, rows[0]["equals_plain"]) == (code, False)
    assert "greedy output of Domino, full blocks is not plain generate's for 2 prompt(s), first prompt 0" in err
    assert said in err


@pytest.mark.parametrize(("margin", "code"), [(1e-6, 0), (0.1, FAILED_CHECK), (None, FAILED_CHECK)])
def test_rows_say_how_near_to_a_tie_a_text_parts(margin, code, bench, monkeypatch):
    parting = {"row": 0, "position": 5, "margin": margin, "tie": 1e-5}
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.torch.equal", lambda first, second: first is second)
    monkeypatch.setattr("hf_domino.evaluation.benchmark.measure.find_divergences", lambda *inputs, **plain: [parting])
    returned, rows, _, _ = bench(*GREEDY)
    assert returned == code
    assert [row.get("divergences") for row in rows] == [None, [parting]] * 2
    assert f"Of hf_domino's differences examined, {2 * (code == 0)} of 2 are at a tie" in caption(rows)


@pytest.mark.parametrize(
    ("given", "methods"),
    [
        ("", ["plain", "packed", "prompt_lookup", "recycling", "recycling_lookup"]),
        ("--drafter recycling", ["plain", "packed", "prompt_lookup", "recycling", "recycling_lookup"]),
        ("--methods prompt_lookup", ["plain", "prompt_lookup"]),
        ("--methods recycling", ["plain", "recycling"]),
    ],
)
def test_a_target_without_a_drafter_is_measured(given, methods, bench, tiny_pair_folder, tmp_path):
    target = shutil.copytree(tiny_pair_folder, tmp_path / "lonely")
    code, rows, shown, err = bench("--target", str(target), *given.split(), "--temperature", "0", "--repeats", "1")
    assert code == 0
    assert [row["method"] for row in rows if row["prompt"] == 0] == methods
    assert all(row["equals_plain"] for row in rows)
    assert ("token recycling" in shown) == ("recycling" in methods)
    assert ("no drafter given" in err) == (not given)
    assert "2 held-out prompts x" in " ".join(shown.split())


def test_bundled_prompts_are_not_called_the_targets_own(bench, tiny_pair_folder, tmp_path):
    target = shutil.copytree(tiny_pair_folder, tmp_path / "lonely")
    (target / "prompts.jsonl").unlink()
    _, rows, shown, err = bench("--target", str(target), "--temperature", "0", "--methods", "recycling")
    assert {row["prompts"] for row in rows} == {"bundled"}
    assert "2 bundled prompts x" in " ".join(shown.split())
    assert "prompts: the bundled beginnings of texts and code, as the target's folder has none" in err


def test_further_columns_and_figures_are_made_if_asked_for(bench, tmp_path, forward_clock):
    folder = tmp_path / "pictures"
    flags = [*GREEDY, "--columns", "time_to_first_token", "--figures", str(folder)]
    code, rows, out, err = bench(*flags)
    assert code == 0
    assert [row["time_to_first_token"] for row in rows] == [1] * 4  # of a clock that counts forwards
    assert "first token" in out
    assert " 1000.00 " in out
    assert err.splitlines()[-1] == f"figures: {folder / 'speed.svg'} {folder / 'acceptance.svg'}"
    assert all("<svg" in path.read_text() for path in folder.iterdir())
    bench(*GREEDY, rows="without.jsonl")
    code, *_, err = bench(*flags, rows="without.jsonl")
    assert (code, "columns must be as in" in err) == (cli.USER_ERROR, True)
    code, *_, err = bench(*GREEDY, "--columns", "peak_memory")
    assert (code, "--columns must be without peak_memory on this device, got 'cpu'" in err) == (cli.USER_ERROR, True)


def test_figures_without_matplotlib_are_refused_before_any_work(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, *_, err = bench("--figures", str(tmp_path / "pictures"))
    assert (code, "pip install 'hf-domino[figures]'" in err) == (cli.USER_ERROR, True)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.gpu
def test_peak_memory_on_a_gpu(bench):
    _, rows, out, _ = bench(*GREEDY, "--device", "cuda", "--columns", "peak_memory")
    assert all(row["peak_memory"] > 2**20 for row in rows)
    assert "peak" in out
    assert "GiB" in out


@pytest.mark.slow
def test_drafters_of_several_kinds_are_compared(bench, tiny_pair_folder):
    names = ["tiny-dflash", "tiny-domino"]
    flags = [f"--drafter={tiny_pair_folder.with_name(name)}" for name in names]
    few = ["--max-new-tokens", "120", "--num-prompts", "1"]
    _, rows, found, _ = bench(*flags, *few)
    named = ["tiny-dflash (DFlash)", "tiny-domino (Domino)"]
    assert [row["method"] for row in measured(rows)] == 2 * ["plain", "packed", "prompt_lookup", *named]
    drafted = [row for row in measured(rows) if row["method"] in named]
    assert all(row["equals_plain"] for row in drafted)
    compared = re.findall(r"^(.*): tiny-domino \(Domino\) over tiny-dflash .* 1 equal prompt\.$", found, re.M)
    assert compared == ["greedy", "T = 0.7"]
    shapes = ["--methods", "plain", "--tree-size", "6", "--temperature", "0"]
    methods = [
        row["method"] for row in bench(*flags, *few, *shapes, rows="shapes.jsonl")[1] if row["method"] != "plain"
    ]
    assert methods[:4] == [f"{name}, {shape}" for name in named for shape in ("chains", "trees")]
    code, *_, err = bench(flags[0], flags[0], rows="twice.jsonl")
    assert (code, "each --drafter must be of another name, got 'tiny-dflash'" in err) == (cli.USER_ERROR, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--methods plain,magic", "--methods must be all or some of plain, packed, prompt_lookup, .*, got 'magic'"),
        ("--methods assistant", "--methods assistant must be given with --assistant"),
        ("--methods lean", "--methods must be all or some of plain, packed, prompt_lookup, .*, got 'lean'"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--columns speed", "--columns must be some of time_to_first_token, peak_memory, got 'speed'"),
        ("--seed -1", r"--seed must be in \[0, 4294967295\], got -1"),
        ("--temperature -1", "--temperature must be at least 0 and finite, got -1.0"),
        ("--assistant {}", "--assistant's vocabulary must be the target's of 400 tokens, got 64"),
    ],
)
def test_errors_name_the_flag(flags, message, bench, saved_pair, tmp_path):
    code, *_, err = bench(*flags.format(saved_pair[0]).split())
    assert code == cli.USER_ERROR
    assert re.search(message, err)
    assert not (tmp_path / "rows.jsonl").exists()


def test_models_named_one_by_one_and_prompts_of_a_file(bench, tiny_pair_folder, tmp_path):
    drafter = f"--drafter={tiny_pair_folder.with_name('tiny-domino')}"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(a):"}\n')
    _, rows, _, _ = bench(drafter, "--methods", "domino", "--prompts", str(prompts), "--temperature", "0")
    assert [row["method"] for row in rows] == ["plain", "domino"]
    assert rows[0]["sources"][0][:2] == [None, None]


def test_chats_are_rendered_by_the_template(tiny_tokenizer):
    batch = [{"messages": [{"role": "user", "content": "abc"}]}, {"text": "a"}]
    with pytest.raises(ValueError, match="chat template"):
        encode(tiny_tokenizer, batch)
    tokenizer = chat_tokenizer(tiny_tokenizer, "{% for message in messages %}{{ message.content }}{% endfor %}:")
    encoded = encode(tokenizer, batch)
    assert tokenizer.batch_decode(encoded["input_ids"]) == ["abc:", "<pad><pad><pad>a"]
    assert encoded["attention_mask"].sum(dim=1).tolist() == [4, 1]
