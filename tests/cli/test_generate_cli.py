from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import sys

import pytest
import torch
from rich.console import Console
from rich.control import strip_control_codes
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_domino._common.errors import invalid_argument
from hf_domino.cli import main as cli
from hf_domino.cli.answers import RoundPrinter
from hf_domino.cli.chat import Conversation
from hf_domino.cli.explain import pieces_of
from hf_domino.pair import domino_folder, load_pair

PROMPT = "def f(x):"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def flags(tiny_pair_folder):
    return ["--target", str(tiny_pair_folder), "--threads", "1"]


@pytest.fixture
def pair(tiny_pair_folder):
    return load_pair(tiny_pair_folder)


def plain_text(pair, prompt, **options):
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    output = pair.target.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    return pair.tokenizer.decode(output, skip_special_tokens=True)


LINES = "def f(x):\n    return x\n\n\n" * 3


@pytest.mark.parametrize(
    ("prompt", "choice", "arguments"),
    [
        (LINES, "--temperature 0 --lookup-tokens 8", {"do_sample": False}),
        (PROMPT, "--temperature 0.8 --seed 5", {"do_sample": True, "temperature": 0.8}),
        (PROMPT, "--top-k 3 --top-p 0.5 --seed 5", {"do_sample": True, "top_k": 3, "top_p": 0.5}),
    ],
)
def test_generate_writes_plain_generations_text(prompt, choice, arguments, pair, flags, capsys, monkeypatch):
    torch.manual_seed(5)
    text = plain_text(pair, prompt, max_new_tokens=40, **arguments)
    call = [*choice.split(), "--max-new-tokens", "40", *flags]
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    assert cli.main(["generate", "-", *call]) == 0
    shown = capsys.readouterr()
    assert shown.out == text + "\n"
    assert re.search(r"40 tokens in .* tokens/s, .* tokens a forward", shown.err)


def test_rounds_are_marked_where_they_end(pair):
    shown = io.StringIO()
    printer = RoundPrinter(pair.tokenizer, Console(file=shown, no_color=True, width=40), shows_rounds=True)
    inputs = pair.tokenizer(PROMPT, return_tensors="pt")
    output = pair.target.generate(**inputs, assistant_model=pair.drafter, streamer=printer, max_new_tokens=50)
    assert printer.tokens == output[0, inputs["input_ids"].shape[1] :].tolist()
    assert shown.getvalue().replace("|", "").removesuffix("\n") == strip_control_codes(printer.text).replace("|", "")
    rounds = len(pair.drafter.stats.rows[0])
    marks = shown.getvalue().count("|") - printer.text.count("|")
    assert marks in (rounds - 1, rounds)  # the last is cut where the text reaches its limit


def byte_fallback_tokenizer():
    """A tokenizer like that of Llama 2: words, and bytes for what is in no word."""
    words = ["<unk>", "<s>", "</s>", "▁", "a", "▁b", "é"]
    vocabulary = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["bytes for lack of words", "byte-level"])
def test_a_stream_shows_the_text_that_the_tokenizer_decodes(kind, pair):
    """Whatever a model writes: also characters in pieces, broken ones and special tokens between."""
    tokenizer = byte_fallback_tokenizer() if kind == "bytes for lack of words" else pair.tokenizer
    end_of_bytes = 7 + 256
    characters = [7 + byte for byte in "€é\n".encode()]
    for seed in range(200):
        chance = random.Random(seed)
        tokens = [chance.choice([chance.randrange(7), chance.randrange(end_of_bytes), *characters]) for _ in range(12)]
        shown = io.StringIO()
        printer = RoundPrinter(tokenizer, Console(file=shown), shows_rounds=False)
        printer.put(torch.tensor([[1]]))  # the prompt
        for token in tokens:
            printer.put(torch.tensor([token]))
        printer.end()
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert shown.getvalue() == f"{text}\n"
        assert "".join(pieces_of(tokenizer, tokens)) == text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([""], "PROMPT must be a text, got an empty one"),
        ([PROMPT, "--temperature", "-1"], "--temperature: must be a number of at least 0, got '-1'"),
        ([PROMPT, "--temperature", "nan"], "--temperature: must be a number of at least 0, got 'nan'"),
        ([PROMPT, "--top-p", "1.5"], "--top-p: must be a number in [0, 1], got '1.5'"),
        ([PROMPT, "--top-k", "5", "--temperature", "0"], "--top-k and --top-p must be left out with --temperature 0"),
        ([PROMPT, "--device", "toaster"], "--device must be one that torch"),
        ([PROMPT, "--max-new-tokens", "0"], "--max-new-tokens: must be a number of at least 1, got '0'"),
        ([PROMPT, "--max-new-tokens", "ten"], "--max-new-tokens: must be a number of at least 1, got 'ten'"),
        ([PROMPT, "--seed", str(2**70)], f"--seed: must be a number in [0, {2**32 - 1}], got '{2**70}'"),
        ([PROMPT, "--threads", "1000000000"], "--threads: must be a number in [1, 1024], got '1000000000'"),
    ],
)
def test_bad_flags_are_named(flags, given, message, capsys):
    with pytest.raises(SystemExit) as exit_:  # as argparse does
        sys.exit(cli.main(["generate", *flags, *given]))
    assert exit_.value.code == cli.USER_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "device", "saved", "loaded"),
    [
        ("", "cpu", "bfloat16", "float32"),
        ("--dtype bf16", "cpu", "float16", "bfloat16"),
        ("", "cuda", "float16", "float16"),
        ("", "cuda", "float32", "float32"),
        ("", "cuda", "bfloat16", "bfloat16"),
        ("", "old cuda", "bfloat16", "float16"),
        ("--dtype bf16", "old cuda", "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("command", ["generate x", "chat", "check", "bench"])
def test_every_command_loads_in_the_same_dtype(
    command, given, device, saved, loaded, tiny_pair_folder, tmp_path, monkeypatch
):
    folder = shutil.copytree(tiny_pair_folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": saved}))
    found = []

    def load(*args, dtype, **kwargs):
        found.append(dtype)
        raise invalid_argument("the pair", "loaded", "nothing", "This is a test.")

    monkeypatch.setattr("hf_domino.evaluation.benchmark.run.load_pair", load)
    monkeypatch.setattr("hf_domino.pair.load_pair", load)
    monkeypatch.setattr("hf_domino.pair.check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: device == "cuda")
    monkeypatch.chdir(tmp_path)
    flags = ["--target", str(folder), "--device", device.split()[-1], *given.split()]
    assert cli.main([*command.split(), *flags]) == cli.USER_ERROR
    assert found == [getattr(torch, loaded)]


@pytest.fixture
def lonely(tiny_pair_folder, tmp_path):
    """Folder of a target without a drafter beside it."""
    return shutil.copytree(tiny_pair_folder, tmp_path / "lonely")


@pytest.mark.parametrize("given", ["", "--lookup-tokens 8", "--drafter recycling"])
def test_a_target_without_a_drafter_generates(given, pair, lonely, capsys):
    call = ["--target", str(lonely), "--threads", "1", "--temperature", "0", *given.split()]
    assert cli.main(["generate", LINES, "--max-new-tokens", "40", *call]) == 0
    shown = capsys.readouterr()
    assert shown.out == plain_text(pair, LINES, max_new_tokens=40, do_sample=False) + "\n"
    said = "no drafter given, and none beside the target: token recycling drafts" in shown.err
    assert said == ("--drafter" not in given)
    assert re.search(r"40 tokens in .*, \d\.\d\d tokens a forward", shown.err)


def test_a_target_without_a_drafter_talks_and_compares(lonely, capsys, monkeypatch):
    flags = ["--target", str(lonely), "--threads", "1", "--max-new-tokens", "8"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n"))
    assert cli.main(["chat", *flags]) == 0
    assert "lonely with recycling." in capsys.readouterr().err
    assert cli.main(["generate", "--compare", *flags, PROMPT]) == 0
    assert "outputs: identical, token for token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("drafter", "message"),
    [(None, "--drafter must be given: there is no"), ("recycling", "--drafter must be a drafter that was trained")],
)
def test_check_needs_a_drafter_with_weights(drafter, message, lonely, capsys):
    given = ["--drafter", drafter] if drafter else []
    assert cli.main(["check", "--target", str(lonely), *given]) == cli.USER_ERROR
    assert message in capsys.readouterr().err


def test_without_a_pair_a_target_is_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("hf_domino.pair.BUNDLED", "nowhere")
    for command in (["generate", PROMPT], ["chat"], ["check"]):
        assert cli.main(command) == cli.USER_ERROR
        assert "Give a --target with its --drafter, or run from a checkout" in capsys.readouterr().err


def test_a_chat_is_one_conversation(flags, capsys, monkeypatch):
    said = io.StringIO("def f(x):\n/what\n    y\n/new\n/quit\nnever read\n")
    monkeypatch.setattr(sys, "stdin", said)
    assert cli.main(["chat", "--max-new-tokens", "8", "--temperature", "0", *flags]) == 0
    shown = capsys.readouterr().err
    assert "has no chat template: it continues the text that you write" in shown
    assert shown.count("8 tokens in") == 2
    assert shown.count("/new: forget the conversation") == 2  # at the start, and for what it does not know
    assert said.read() == "never read\n"
    assert cli.main(["chat", "--system", "Be brief.", *flags]) == cli.USER_ERROR
    assert "--system must be left out: tiny has no chat template" in capsys.readouterr().err


def opening_whose_answer_is_read_as_it_was_written(pair, wanted):
    """A prompt whose answer's text has the same tokens again, or, with half characters in it, others."""
    for opening in ("x", PROMPT, "import a", "for i in", "y = 1", "class A:", "return", "if a:", "print(", "while"):
        ids = pair.tokenizer(opening, return_tensors="pt")["input_ids"]
        written = pair.target.generate(ids, max_new_tokens=6, do_sample=False)[0]
        text = pair.tokenizer.decode(written, skip_special_tokens=True)
        if (pair.tokenizer(f"{text}y")["input_ids"][: len(written)] == written.tolist()) == wanted:
            return opening
    raise AssertionError("none of them")


@pytest.mark.parametrize(("template", "goes_on"), [(None, True), (TEMPLATE, True), (None, False)])
def test_a_second_turn_goes_on_from_the_cache_where_it_can(pair, template, goes_on, monkeypatch):
    opening = opening_whose_answer_is_read_as_it_was_written(pair, goes_on)
    pair.tokenizer.chat_template = template
    conversation, widths, forward = Conversation(pair), [], type(pair.target).forward

    def noting(*args, **kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(pair.target), "forward", noting)
    answers, prefills = [], []
    for said in (opening, "y"):
        printer = RoundPrinter(pair.tokenizer, Console(file=io.StringIO()), shows_rounds=False)
        widths.clear()
        conversation.answer(said, printer, {"max_new_tokens": 6, "do_sample": False})
        prefills.append(widths[0])
        answers.append(printer.text)
    whole = f"{opening}{answers[0]}y"
    assert answers[1] == plain_text(pair, whole, max_new_tokens=6, do_sample=False)
    num_read = len(pair.tokenizer(opening)["input_ids"]) + 6 - 1 if goes_on else 0  # the last token is not in the cache
    assert prefills[1] == len(pair.tokenizer(whole)["input_ids"]) - num_read


def test_each_conversation_has_a_memory_of_its_own(pair):
    """A later answer looks up what earlier messages and answers say, but nothing of another conversation."""
    first = Conversation(pair)
    memory = pair.drafter.memory
    token = pair.tokenizer("f")["input_ids"][0]
    repeats = {"max_new_tokens": 12, "do_sample": False, "prefix_allowed_tokens_fn": lambda row, ids: [token]}
    for said in (PROMPT, f"\n{PROMPT}"):
        printer = RoundPrinter(pair.tokenizer, Console(file=io.StringIO()), shows_rounds=False)
        first.answer(said, printer, repeats)
    assert pair.drafter.stats.num_lookups
    assert len(memory) > len(pair.tokenizer(PROMPT)["input_ids"]) + 12
    Conversation(pair)
    assert pair.drafter.memory is not memory
    assert len(pair.drafter.memory) == 0


def test_an_answers_special_tokens_stay_in_the_conversation(pair, monkeypatch):
    """As those around reasoning, which are not shown; the end of the answer is the template's to write."""
    special = next(token for token in pair.tokenizer.all_special_ids if token != pair.tokenizer.eos_token_id)
    letters = pair.tokenizer("ab")["input_ids"]
    answer = [special, *letters, pair.tokenizer.eos_token_id]
    conversation = Conversation(pair)
    printer = RoundPrinter(pair.tokenizer, Console(file=io.StringIO()), shows_rounds=False)

    def generate(input_ids, streamer, **arguments):
        streamer.put(input_ids)
        for token in answer:
            streamer.put(torch.tensor([token]))
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.target, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        conversation.answer("x", printer, {})
    assert conversation.messages[-1]["content"] == pair.tokenizer.convert_ids_to_tokens(special) + "ab"
    assert printer.text == "ab"


@pytest.mark.parametrize(
    ("written", "goes_back"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>well", "well"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("<|channel|>analysis<|message|>h", ""),
        ("<think>hm</think>well", "<think>hm</think>well"),
    ],
)
def test_only_the_final_part_of_an_answer_in_channels_goes_back(written, goes_back, pair, monkeypatch):
    """As gpt-oss writes; its template refuses a message with the markers of channels."""
    pair.tokenizer.chat_template = (
        "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('markers') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    conversation = Conversation(pair)

    def generate(input_ids, streamer, **arguments):
        streamer.put(input_ids)
        streamer.put(torch.tensor(pair.tokenizer(written)["input_ids"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.target, "generate", generate)
    for _ in range(2):
        printer = RoundPrinter(pair.tokenizer, Console(file=io.StringIO()), shows_rounds=False)
        with pytest.raises(KeyboardInterrupt):
            conversation.answer("x", printer, {})
        assert conversation.messages[-1] == {"role": "assistant", "content": goes_back}


def test_what_was_written_before_an_interrupt_is_kept(pair, monkeypatch):
    printer = RoundPrinter(pair.tokenizer, Console(file=io.StringIO()), shows_rounds=False)
    put = printer.put

    def broken_off(value):
        put(value)
        if len(printer.tokens) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(printer, "put", broken_off)
    conversation = Conversation(pair)
    with pytest.raises(KeyboardInterrupt):
        conversation.answer(PROMPT, printer, {"max_new_tokens": 12, "do_sample": False})
    assert conversation.messages[-1]["content"] == plain_text(pair, PROMPT, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("command", ["generate x", "explain x", "chat", "check", "data"])
def test_a_busy_machine_is_told_of_one_thread(command, lonely, tiny_pair_folder, monkeypatch, tmp_path, capsys):
    def stop(*args, **options):
        raise invalid_argument("the work", "done", "nothing", "This is a test.")

    monkeypatch.setattr("os.getloadavg", lambda: (4.0 * os.cpu_count(), 0, 0))
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    monkeypatch.chdir(tmp_path)
    for work in (
        "cli.answers.inputs_of",
        "cli.answers.RoundPrinter",
        "evaluation.check.check_fit",
        "data.writing.write_data",
    ):
        monkeypatch.setattr(f"hf_domino.{work}", stop)
    words = [*command.split(), "--target", str(lonely)]
    if command == "check":
        words += ["--drafter", str(domino_folder(tiny_pair_folder))]
    assert (
        cli.main(words + ["--prompts", "text", "--output", "data", "--max-new-tokens", "6"] * (command == "data"))
        == cli.USER_ERROR
    )
    hint = "other programs keep the machine busy (load 4.0 per core): --threads 1 can be many times as fast now"
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate x", "check"])
def test_an_unfinished_training_is_called_so(command, tiny_pair_folder, tmp_path, flags, capsys):
    for step in (2, 6):
        shutil.copytree(domino_folder(tiny_pair_folder), tmp_path / "mine" / f"checkpoint-{step}")
        os.utime(tmp_path / "mine" / f"checkpoint-{step}", (step, step))
    assert cli.main([*command.split(), *flags, "--drafter", str(tmp_path / "mine")]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert f"the training in {tmp_path / 'mine'} must be finished, got 'one that was interrupted'." in said
    assert f"or name {tmp_path / 'mine' / 'checkpoint-6'}." in said


def test_check_prints_json(flags, tiny_pair_folder, capsys, tmp_path):
    folder = shutil.copytree(domino_folder(tiny_pair_folder), tmp_path / "drafter")
    stored = json.loads((folder / "config.json").read_text()) | {"clever_trick": False}  # which no drafter of ours has
    (folder / "config.json").write_text(json.dumps(stored))
    cli.main(["check", "--json", "--num-prompts", "2", "--max-new-tokens", "8", *flags, "--drafter", str(folder)])
    found = json.loads(capsys.readouterr().out)
    assert found["not_read"] == ["clever_trick"]
    assert found["verdict"] in ("fits", "does not fit", "too few to say")
    assert found["modes"][0]["acceptance_length"]["mean"] >= 1
    assert (found["speed_up"] is None) == (found["verdict"] == "does not fit")
