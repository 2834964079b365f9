"""The bundled pair's corpus, tokenizer and prompts, on small made-up modules."""

import hashlib

import numpy as np

from recipes import corpus
from recipes.corpus import Module, clean, pinned_packages, reads_like_code
from recipes.prompts import held_out_prompts, training_prompts
from recipes.tokenizer import train_tokenizer

WORDS = [
    "river",
    "mountain",
    "valley",
    "forest",
    "meadow",
    "island",
    "glacier",
    "desert",
    "canyon",
    "harbour",
    "lagoon",
    "prairie",
    "cliff",
    "dune",
]
CODE = "\n\n".join(
    f"class {word.title()}:\n    '''Hold the {word}.'''\n\n    def {word}(self, other):\n        return other.{word}\n"
    for word in WORDS
)


def held_out_module(text, source="stdlib"):
    name = next(name for name in map(str, range(1000)) if Module(source, name, "").held_out)
    return Module(source, name, text)


def test_clean_drops_the_licence_header_and_blank_runs():
    text = "# Copyright\n# Licence\n\nimport os\t\n\n\n\n\nx = 1   \n"
    assert clean(text) == "import os\n\n\nx = 1\n"


def test_tables_and_short_modules_are_left_out():
    assert reads_like_code(CODE)
    assert not reads_like_code("import os\n")
    assert not reads_like_code("TABLE = [\n" + "    0x12, 0x34, 0x56,\n" * 500 + "]\n")
    assert not reads_like_code("value = compute(value)\n" * 500)


def test_copies_are_dropped_whatever_their_indentation(monkeypatch):
    vendored = "\n".join("    " + line for line in CODE.splitlines())
    modules = [Module("stdlib", "a.py", CODE), Module("other", "vendored.py", vendored)]
    monkeypatch.setattr(corpus, "_read_all", lambda packages: iter(modules))
    assert [module.name for module in corpus.collect_modules(None)] == ["a.py"]


def test_the_split_is_by_name_and_about_one_in_sixteen():
    held_out = [Module("stdlib", f"{index}.py", "").held_out for index in range(4000)]
    assert 0.05 < np.mean(held_out) < 0.075
    assert Module("stdlib", "7.py", "one text").held_out == Module("stdlib", "7.py", "another").held_out


def test_every_source_names_its_licence():
    lines = corpus.REQUIREMENTS.read_text().splitlines()[2:]
    assert len(lines) == len(pinned_packages())
    assert all("==" in line.split("  # ")[0] and line.split("  # ")[1] for line in lines)


def test_prompts_are_whole_lines_and_name_their_source():
    module = held_out_module(CODE * 3)
    for prompt in held_out_prompts([module, Module("other", module.name, CODE)], num_prompts=4, seed=0):
        assert module.text[prompt["offset"] :].startswith(prompt["text"])
        assert hashlib.sha256(prompt["text"].encode()).hexdigest() == prompt["sha256"]
        assert module.text[prompt["offset"] + len(prompt["text"])] == "\n"


def test_training_prompts_stay_inside_a_document():
    stream = np.array([5, 6, 7, 8, 0] * 50, dtype=np.uint16)
    prompts = training_prompts(stream, 20, lengths=(2, 4), end_of_text=0, seed=0)
    assert [len(prompt) for prompt in prompts] == [2, 4] * 10
    assert all(0 not in prompt for prompt in prompts)


def test_the_tokenizer_is_reversible_and_keeps_line_starts_whole():
    tokenizer = train_tokenizer([CODE], vocab_size=400, model_max_length=64)
    text = CODE[:150] + "\tπ = 'ünïcode'\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert 256 < len(tokenizer) <= 400
    assert "\n    " in [tokenizer.decode(token) for token in ids]
    assert tokenizer.mask_token_id is not None
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
