"""Shared fixtures: tiny random models in fp32. Random weights accept little; losslessness must not depend on it."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import os
import string
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import garbage_collection  # noqa: F401, it must come before what follows
import pytest
import torch
import transformers
import triton_interpreter  # noqa: F401, it must come before what follows
import yaml
from builders import EOS, MASK, PAD, SEED, TINY, build_drafter
from quick_tier import QUICK
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

# Rows that tests read are cached apart from yours. No fixture: `datasets` reads this when it is imported.
ROWS_CACHE = tempfile.TemporaryDirectory(prefix="hf_domino-rows-")
os.environ["HF_DATASETS_CACHE"] = ROWS_CACHE.name
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
torch.set_num_threads(1)  # tiny models run faster on one thread, and tests run in two processes


def pytest_report_header() -> str:
    """Say which ends of the supported versions a run is about."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `pytest -m quick`."""
    files = {Path(__file__).parent / name for name in QUICK.values()}
    for item in items:
        is_long = any(item.get_closest_marker(name) for name in ("slow", "gpu", "vllm"))
        if item.path in files and not is_long:
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported by now out of garbage collections, of which every training begins with one."""
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, on one thread: a command may have asked for more."""
    if torch.cuda.is_available():
        torch.manual_seed(SEED)
    else:
        torch.default_generator.manual_seed(SEED)  # without notes for a later CUDA, which take milliseconds
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch) -> None:
    """Let verdicts say the same on a busy machine as on an idle one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def forward_clock(monkeypatch) -> Iterator[None]:
    """A clock that models' forwards advance, by a second each: what a test times does not depend on the machine."""
    seconds = [0]

    def count(module, *_) -> None:
        seconds[0] += isinstance(module, GenerationMixin)

    hook = torch.nn.modules.module.register_module_forward_hook(count)
    monkeypatch.setattr(time, "perf_counter", lambda: float(seconds[0]))
    yield
    hook.remove()


@pytest.fixture(scope="session")
def tiny_qwen3() -> PreTrainedModel:
    """A random Qwen3 target with tied embeddings, in fp32 and evaluation mode. Shared: do not modify it."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **TINY)).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    """A random Llama target with an lm_head of its own, in fp32 and evaluation mode. Shared: do not modify it."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **TINY)).eval()


@pytest.fixture
def tiny_drafter(tiny_qwen3: PreTrainedModel) -> PreTrainedModel:
    """A random Domino drafter of two layers and block size 6 for `tiny_qwen3`; see `make_drafter`."""
    return build_drafter(tiny_qwen3)


@pytest.fixture
def make_drafter():
    """The function `build_drafter(target, **overrides)`, for another target, block size or convention."""
    return build_drafter


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny vocabulary: four special tokens and sixty single characters."""
    special = ["<unk>", "<eos>", "<pad>", "<mask>"]
    tokens = special + list(string.ascii_letters + " ._,:()=")
    characters = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    characters.pre_tokenizer = Split(Regex("."), "isolated")
    characters.decoder = Fuse()
    names = {"unk_token": special[0], "eos_token": special[EOS], "pad_token": special[PAD], "mask_token": special[MASK]}
    return PreTrainedTokenizerFast(tokenizer_object=characters, **names)


@pytest.fixture(scope="session")
def saved_pair(tiny_qwen3, tiny_tokenizer, tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a saved target with its tokenizer and of a saved drafter, which has no tokenizer files."""
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    tiny_qwen3.save_pretrained(folders[0])
    tiny_tokenizer.save_pretrained(folders[0])
    build_drafter(tiny_qwen3).save_pretrained(folders[1])
    return folders


@pytest.fixture(scope="session")
def pair():
    """The bundled pair in fp32. Shared: do not modify it."""
    from hf_domino.pair import BUNDLED, load_pair

    folder = Path(__file__).parents[1] / "model_cards" / BUNDLED
    if not folder.with_name(f"{BUNDLED}-domino").exists():
        pytest.skip("the bundled pair is not in this checkout")
    return load_pair(folder)


@pytest.fixture(scope="session")
def baseline(pair):
    """The DFlash drafter of the bundled target in fp32. Shared: do not modify it."""
    from hf_domino import DominoDraftModel

    return DominoDraftModel.from_pretrained(pair.folder.with_name(f"{pair.name}-dflash"), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tiny_pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random target with tokenizer and prompts, with a random Domino drafter and DFlash baseline."""
    from recipes.corpus import MASK as MASK_TOKEN
    from recipes.corpus import train_tokenizer

    # A file that stays as it is: the tokenizer, and with it what the tiny models write, depend on every character.
    text = Path(__file__).with_name("tiny_pair_text.txt").read_text()
    folder = tmp_path_factory.mktemp("pair") / "tiny"
    tokenizer = train_tokenizer([text], vocab_size=400, model_max_length=256)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(SEED)
    target = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **(TINY | {"vocab_size": 400} | tokens)))
    mask = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for kind in ("domino", "dflash"):
        drafter = build_drafter(target, projector_type=kind, mask_token_id=mask)
        drafter.save_pretrained(folder.with_name(f"tiny-{kind}"))
    pieces = [text[start : start + 80] for start in (0, 200, 400)]
    rows = [
        {"module": "conftest", "offset": 200 * i, "sha256": hashlib.sha256(piece.encode()).hexdigest(), "text": piece}
        for i, piece in enumerate(pieces)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def no_file_beyond():
    """A context in which no file grows beyond so many bytes: writers meet what they meet on a full disk."""
    import resource  # of Unix

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def recipe(saved_pair, tmp_path):
    """Fields of a tiny training, with files that exist."""
    lines = [{"prompt": f"t{4 + i} t5 t6", "completion": "t7 t8 t9 t10 t11 t12 t13 t14"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "target": str(saved_pair[0]),
        "output_dir": str(tmp_path / "run"),
        "train_file": str(tmp_path / "train.jsonl"),
        "eval_file": str(tmp_path / "train.jsonl"),
        "num_hidden_layers": 1,
        "block_size": 4,
        "shift_label": False,
        "max_steps": 4,
        "save_steps": 2,
        "num_anchors": 4,
        "learning_rate": "1e-3",
        "muon_learning_rate": 0,
        "distillation_weight": 0,
        "lr_scheduler_kwargs": {"num_cycles": 0.5},
        "use_cpu": True,
        "report_to": "none",
    }


@pytest.fixture
def train(tmp_path):
    """A function that writes the fields to a YAML file and runs the command with it and further flags."""
    from hf_domino.cli.main import main

    def run(fields, *flags) -> int:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(fields))
        return main(["train", str(path), *flags])

    return run


@pytest.fixture
def target(tiny_qwen3):
    """A private copy of the tiny Qwen3 target that never stops early."""
    target = copy.deepcopy(tiny_qwen3)
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words `t4` to `t63`, separated by spaces; `end` (1) ends a text."""
    names = ["unknown", "end", "pad", "mask", *(f"t{index}" for index in range(4, 64))]
    words = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="unknown"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad", unk_token="unknown")
