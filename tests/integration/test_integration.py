"""Entering Transformers: the patch comes and goes, and what comes out of `generate` is what the target alone says."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import inspect
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from builders import PAD
from oracle import oracle, proposed
from peft import LoraConfig, get_peft_model
from recorder import Recorder
from test_architecture import LAZY_ONLY
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    pipelines,
)
from transformers.pipelines import base as pipelines_base

import hf_domino
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.targets.compatibility import check_drafter, check_target
from hf_domino.targets.identity import recognise

pytestmark = pytest.mark.transformers

ROOT = Path(__file__).parents[2]
PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
NEW_TOKENS = 24


@pytest.fixture
def uninstalled():
    """No patch while the test runs."""
    hf_domino.uninstall()
    yield
    hf_domino.install()


@pytest.fixture(params=["qwen3", "llama"])
def target(request):
    return request.getfixturevalue(f"tiny_{request.param}")


def greedy(target, prompt=PROMPT, **kwargs):
    return target.generate(prompt, **({"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1} | kwargs))


@functools.cache
def text_of(target):
    """The greedy text behind the prompt, which most tests here start from."""
    return greedy(target)


# --- the same text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("projector_type", "shift_label", "accuracy"),
    [("domino", True, 0.6), ("domino", False, 1.0), ("dflash", True, 0.9), ("dflash", False, 0.0)],
)
def test_greedy_is_lossless(target, make_drafter, projector_type, shift_label, accuracy):
    drafter = make_drafter(target, shift_label=shift_label, projector_type=projector_type)
    with oracle(target, PROMPT, accuracy, text_of(target)):
        assisted = greedy(target, assistant_model=drafter)
    assert torch.equal(assisted, text_of(target))
    if accuracy == 1.0:
        assert drafter.stats.acceptance_lengths[0] == drafter.config.num_draft_tokens + 1


@pytest.mark.parametrize("draft_length", ["full", "adaptive"])
def test_num_assistant_tokens_is_the_most_that_a_round_drafts(tiny_qwen3, make_drafter, draft_length):
    drafter, plain = make_drafter(tiny_qwen3, draft_length=draft_length), text_of(tiny_qwen3)
    with oracle(tiny_qwen3, PROMPT, 0.9, text_of(tiny_qwen3)):
        for wanted, found in ((1, 1), (3, 3), (50, drafter.config.num_draft_tokens)):
            for options in ({}, {"cache_implementation": "static"}):
                assisted = greedy(tiny_qwen3, assistant_model=drafter, num_assistant_tokens=wanted, **options)
                assert torch.equal(assisted, plain)
                assert max(drafter.stats.proposed[0]) == found
                assert len(drafter.stats.acceptance_rate_at) == found
    rows = PROMPT.expand(2, -1)
    assert torch.equal(greedy(tiny_qwen3, rows, assistant_model=drafter, num_assistant_tokens=2)[1], plain[0])
    assert max(drafter.stats.proposed[1]) == 2


def test_the_default_of_num_assistant_tokens_is_nobodys_wish(tiny_qwen3, make_drafter, monkeypatch):
    drafter = make_drafter(tiny_qwen3, block_size=26)  # more than that default
    for wanted, found in ((None, drafter.config.num_draft_tokens), (20, 20), (4, 4)):
        monkeypatch.setattr(tiny_qwen3.generation_config, "num_assistant_tokens", wanted)
        greedy(tiny_qwen3, assistant_model=drafter)
        assert max(drafter.stats.proposed[0]) == found
    monkeypatch.setattr(tiny_qwen3.generation_config, "num_assistant_tokens", None)
    greedy(tiny_qwen3, assistant_model=drafter, generation_config=GenerationConfig(num_assistant_tokens=7))
    assert max(drafter.stats.proposed[0]) == 7


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (PROMPT[:, :1], {}),
        (PROMPT.int(), {}),
        (PROMPT, {"eos_token_id": int(PROMPT[0, -1])}),
        (torch.full((1, 1), PAD), {}),  # as where the pad token is also the first token of every text
        (torch.full((3, 1), PAD), {}),
    ],
    ids=["one token", "32 bits", "end of text", "padding", "padding in a batch"],
)
def test_unusual_prompts(tiny_qwen3, tiny_drafter, prompt, options):
    plain = greedy(tiny_qwen3, prompt, **options)
    assisted = greedy(tiny_qwen3, prompt, assistant_model=tiny_drafter, **options)
    assert torch.equal(assisted, plain)
    assert assisted.dtype == plain.dtype


def test_left_padding(target, make_drafter):
    padded = torch.cat((torch.full((1, 5), 2), PROMPT), dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    plain = greedy(target, padded, attention_mask=mask)
    drafter, rounds = make_drafter(target), []
    with oracle(target, padded, 0.8, plain):
        assisted = greedy(target, padded, attention_mask=mask, assistant_model=drafter)
    assert torch.equal(assisted, plain)
    assert torch.equal(plain[:, 5:], text_of(target))  # the padding itself changes nothing
    for options in ({}, {"prompt": padded, "attention_mask": mask}):
        greedy(target, assistant_model=drafter, **options)
        rounds.append(drafter.stats.acceptance_lengths)
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("with_ids", "options", "padding"),
    [(True, {"repetition_penalty": 1.3}, 6), (False, {"repetition_penalty": 1.3}, 0), (False, {}, 6)],
)
def test_prompt_of_embeddings(target, make_drafter, with_ids, options, padding):
    """Without ids `generate` returns the new tokens only, and its processors see those only."""
    ids = torch.cat((torch.nn.functional.pad(PROMPT[:, padding:], (padding, 0)), PROMPT))
    prompt = {"inputs_embeds": target.get_input_embeddings()(ids).detach()} | ({"input_ids": ids} if with_ids else {})
    options = {"attention_mask": (torch.arange(ids.shape[1]) >= torch.tensor([[padding], [0]])).long()} | options
    arguments = prompt | options | {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    plain = target.generate(**arguments)
    assert torch.equal(target.generate(**arguments, assistant_model=make_drafter(target)), plain)


@pytest.mark.parametrize("position", [3, 8, 14])
def test_stop_string_inside_a_block(tiny_qwen3, tiny_drafter, tiny_tokenizer, position):
    start = PROMPT.shape[1] + position
    text = tiny_tokenizer.decode(text_of(tiny_qwen3)[0, start : start + 3])
    options = {"stop_strings": [text], "tokenizer": tiny_tokenizer}
    plain, streamer = greedy(tiny_qwen3, **options), Recorder()
    with oracle(tiny_qwen3, PROMPT, 0.95, text_of(tiny_qwen3)):
        assisted = greedy(tiny_qwen3, assistant_model=tiny_drafter, streamer=streamer, **options)
    assert torch.equal(assisted, plain)
    assert streamer.tokens == [*plain[0].tolist(), "end"]


def test_threads_keep_their_own_rounds(tiny_qwen3, tiny_drafter):
    prompts = [PROMPT.roll(shift, 1) for shift in range(4)]
    plain = [greedy(tiny_qwen3, prompt, max_new_tokens=9 + index) for index, prompt in enumerate(prompts)]
    results, counted, done = {}, [], threading.Barrier(4)

    def work(index):
        results[index] = greedy(tiny_qwen3, prompts[index], assistant_model=tiny_drafter, max_new_tokens=9 + index)
        done.wait(60)
        assert tiny_drafter.stats.num_new_tokens == 9 + index
        counted.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert all(torch.equal(results[index], plain[index]) for index in range(4))
    assert sorted(counted) == [0, 1, 2, 3]


# --- the patch --------------------------------------------------------------------------------------------------


def functions():
    names = {
        GenerationMixin: ("_validate_generation_mode", "_assisted_decoding", "_sample"),
        pipelines_base: ("load_assistant_model",),
        pipelines: ("pipeline",),
    }
    return [getattr(owner, name) for owner, names in names.items() for name in names]


def test_install_is_idempotent_and_undoable(uninstalled):
    originals = functions()
    assert not hf_domino.is_installed()
    hf_domino.install()
    hf_domino.install()
    assert hf_domino.is_installed()
    assert all(installed is not original for installed, original in zip(functions(), originals, strict=True))
    assert [inspect.signature(f) for f in functions()] == [inspect.signature(f) for f in originals]
    hf_domino.uninstall()
    hf_domino.uninstall()
    assert functions() == originals


def test_somebody_elses_patch_survives(uninstalled, monkeypatch):
    hf_domino.install()
    ours = GenerationMixin._assisted_decoding
    theirs = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    GenerationMixin._assisted_decoding = theirs
    hf_domino.install()
    hf_domino.uninstall()
    assert GenerationMixin._assisted_decoding is theirs
    GenerationMixin._assisted_decoding = ours


def test_missing_private_name(uninstalled, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(GenerationMixin, "_sample")
        with pytest.warns(UserWarning, match=r"needs _sample, which .* does not have.*custom_generate"):
            hf_domino.install()
        assert not hf_domino.is_installed()
        assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")


def test_auto_classes(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DominoConfig)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, DominoDraftModel)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in tiny_drafter.state_dict().items())
    assert isinstance(AutoModel.from_config(tiny_drafter.config), DominoDraftModel)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), DominoDraftModel)


# --- everybody else ---------------------------------------------------------------------------------------------


def other_assistants(target):
    config = LlamaConfig(**(target.config.to_dict() | {"num_hidden_layers": 1}))
    torch.manual_seed(3)
    assistant = LlamaForCausalLM(config).eval()
    return {"assistant": {"assistant_model": assistant}, "lookup": {"prompt_lookup_num_tokens": 3}}


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_other_assistants_are_untouched(tiny_llama, kind, do_sample):
    texts = []
    for change in (hf_domino.uninstall, hf_domino.install):
        change()
        torch.manual_seed(0)
        texts.append(greedy(tiny_llama, do_sample=do_sample, **other_assistants(tiny_llama)[kind]))
    assert torch.equal(*texts)


def test_other_assistants_are_still_refused_batches(tiny_llama):
    with pytest.raises(ValueError, match=r"assisted generate is only supported for batch_size = 1"):
        greedy(tiny_llama, PROMPT.repeat(2, 1), **other_assistants(tiny_llama)["assistant"])


# --- any order of imports ---------------------------------------------------------------------------------------

ORDERS = {
    "alone": [
        "import sys, hf_domino, transformers.modeling_utils",  # which imports torch._dynamo, and that Triton
        "before = set(sys.modules)",
        "from hf_domino import *",
        f"assert not {LAZY_ONLY} & set(sys.modules) - before, 'what need not be there at the first use'",
        "from transformers import AutoConfig, AutoModel, pipeline",
        "assert type(AutoModel.from_pretrained(DRAFTER).config) is type(AutoConfig.from_pretrained(DRAFTER))",
    ],
    "after pipelines": ["from transformers import pipeline", "import transformers.pipelines.base", "import hf_domino"],
    "after models": ["from transformers import Qwen3Model", "import hf_domino", "from transformers import pipeline"],
    "replaced module": [
        "import hf_domino",
        "from transformers.utils.import_utils import direct_transformers_import as again",
        "import os, transformers; again(os.path.dirname(transformers.__file__))",
        "from transformers import pipeline",
    ],
}
ASK = """
options = {"do_sample": False, "max_new_tokens": 24}
plain = pipeline("text-generation", model=TARGET)("def f(a):", **options)
piped = pipeline("text-generation", model=TARGET, assistant_model=DRAFTER)
assert piped("def f(a):", **options) == plain
print(type(piped.assistant_model).__name__, piped.assistant_model.stats.num_new_tokens)
"""


@pytest.mark.parametrize(
    "order", ["alone", *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS if order != "alone")]
)
def test_import_orders(saved_pair, order):
    target, drafter = saved_pair
    lines = [f"TARGET, DRAFTER = {str(target)!r}, {str(drafter)!r}", *ORDERS[order], ASK]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "DominoMethodModel"


@pytest.mark.parametrize("value", ["1", "0"])
def test_no_patch_on_request(uninstalled, monkeypatch, value):
    monkeypatch.setenv("HF_DOMINO_NO_PATCH", value)
    importlib.reload(hf_domino)
    assert hf_domino.is_installed() == hasattr(GenerationMixin._assisted_decoding, "__wrapped__") == (value == "0")
    assert isinstance(AutoConfig.for_model("domino"), hf_domino.DominoConfig)


# --- what is passed as assistant_model --------------------------------------------------------------------------


@pytest.mark.parametrize("as_path", [str, Path])
def test_the_name_of_a_drafter(tiny_qwen3, saved_pair, as_path, monkeypatch):
    """Loaded as by a pipeline, once for a target where it is and as it computes."""
    loaded, load = [], DominoDraftModel.from_pretrained
    monkeypatch.setattr(
        DominoDraftModel, "from_pretrained", lambda *args, **kwargs: loaded.append(load(*args, **kwargs)) or loaded[-1]
    )
    target, name = copy.deepcopy(tiny_qwen3), as_path(saved_pair[1])
    for dtype in (torch.float32, torch.float64):
        target.to(dtype)
        for _ in range(2):
            assert torch.equal(greedy(target, assistant_model=name), greedy(target))
    assert [drafter.dtype for drafter in loaded] == [torch.float32, torch.float64]
    assert loaded[0].stats.num_rounds > 0


def test_a_folder_that_was_saved_anew_is_read_anew(tiny_qwen3, saved_pair, tmp_path, monkeypatch):
    folder = tmp_path / "drafter"
    shutil.copytree(saved_pair[1], folder)
    greedy(tiny_qwen3, assistant_model=str(folder))
    loaded, load = [], DominoDraftModel.from_pretrained
    monkeypatch.setattr(
        DominoDraftModel, "from_pretrained", lambda *args, **kwargs: loaded.append(1) or load(*args, **kwargs)
    )
    greedy(tiny_qwen3, assistant_model=str(folder))
    assert not loaded
    load(folder).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "drafter"):
        greedy(tiny_qwen3, assistant_model=name)
        assert len(loaded) == 1


@pytest.fixture
def drafts_of(tiny_qwen3):
    """A function that returns the first proposals of a call whose drafter is named, and the number of rounds."""
    target = copy.deepcopy(tiny_qwen3)

    def call(name):
        with proposed() as rounds:
            assert torch.equal(greedy(target, assistant_model=str(name), max_new_tokens=6), text_of(tiny_qwen3)[:, :12])
        return rounds[0]

    return call


def test_weights_that_were_replaced_alone_draft_from_then_on(make_drafter, tiny_qwen3, tmp_path, drafts_of):
    """As a download or a copy of a training does it: config.json stays as it is."""
    make_drafter(tiny_qwen3).save_pretrained(tmp_path)
    before, weights = drafts_of(tmp_path), tmp_path / "model.safetensors"
    other = make_drafter(tiny_qwen3)
    torch.nn.init.normal_(other.layers[0].mlp.down_proj.weight, std=0.5)
    other.save_pretrained(tmp_path / "other")
    expected = drafts_of(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(weights)
    assert drafts_of(tmp_path) == expected != before


def test_an_adapter_is_read_anew_with_the_drafter_that_it_belongs_to(make_drafter, tiny_qwen3, tmp_path, drafts_of):
    make_drafter(tiny_qwen3).save_pretrained(tmp_path / "drafter")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(DominoDraftModel.from_pretrained(tmp_path / "drafter"), config).save_pretrained(tmp_path / "adapter")
    before = drafts_of(tmp_path / "adapter")
    other = make_drafter(tiny_qwen3)
    torch.nn.init.normal_(other.layers[0].mlp.down_proj.weight, std=0.5)
    other.save_pretrained(tmp_path / "drafter")
    assert drafts_of(tmp_path / "adapter") != before


def test_drafters_that_were_replaced_leave_memory(make_drafter, tiny_qwen3, tmp_path, monkeypatch):
    """A folder is saved to again and again, as beside a training, and the target moves."""
    loaded, load = [], DominoDraftModel.from_pretrained

    def remember(*args, **kwargs):
        drafter = load(*args, **kwargs)
        loaded.append(weakref.ref(drafter))
        return drafter

    monkeypatch.setattr(DominoDraftModel, "from_pretrained", remember)
    target = copy.deepcopy(tiny_qwen3)
    for dtype in (torch.float32, torch.float32, torch.float64):
        make_drafter(tiny_qwen3).save_pretrained(tmp_path)
        greedy(target.to(dtype), assistant_model=str(tmp_path), max_new_tokens=4)
    gc.collect()
    assert len(loaded) == 3
    assert [reference() is None for reference in loaded] == [True, True, False]
    hf_domino.release_workspaces()
    gc.collect()
    assert [reference() is None for reference in loaded] == [True, True, True]


def test_threads_that_begin_together_load_a_named_drafter_once(tiny_qwen3, saved_pair, monkeypatch):
    loaded, load, ready = [], DominoDraftModel.from_pretrained, threading.Barrier(4)
    monkeypatch.setattr(
        DominoDraftModel, "from_pretrained", lambda *args, **kwargs: loaded.append(1) or load(*args, **kwargs)
    )
    target = copy.deepcopy(tiny_qwen3)

    def work():
        ready.wait(60)
        greedy(target, assistant_model=str(saved_pair[1]), max_new_tokens=4)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(loaded) == 1


def test_a_name_that_is_being_loaded_delays_no_other_name(tiny_qwen3, saved_pair, monkeypatch):
    load, loading, may_go_on = DominoDraftModel.from_pretrained, threading.Event(), threading.Event()

    def wait(*args, **kwargs):
        loading.set()
        assert may_go_on.wait(60)
        return load(*args, **kwargs)

    monkeypatch.setattr(DominoDraftModel, "from_pretrained", wait)
    target = copy.deepcopy(tiny_qwen3)
    texts = []
    thread = threading.Thread(target=lambda: texts.append(greedy(target, assistant_model=str(saved_pair[1]))))
    thread.start()
    assert loading.wait(60)
    texts.append(greedy(target, assistant_model="recycling"))
    may_go_on.set()
    thread.join()
    assert torch.equal(*texts)


def test_a_name_of_no_drafter(tiny_qwen3, saved_pair, tmp_path):
    for name, message in (
        (
            saved_pair[0],
            "the name of a drafter must be that of a drafter, got '/.*hf-domino find TARGET",
        ),
        ("recyling", "got 'recyling'.* Did you mean 'recycling'"),
        (tmp_path / "nothing", r"assistant_model must be a folder or a Hub name, got '/.*nothing'"),
    ):
        with pytest.raises(ValueError, match=message):
            greedy(tiny_qwen3, assistant_model=name)


def test_a_drafter_does_not_generate(tiny_drafter):
    assert not tiny_drafter.can_generate()
    with pytest.raises(
        ValueError, match=r"must be the target, .* Call target.generate\(..., assistant_model=drafter\)"
    ):
        tiny_drafter.generate(PROMPT, max_new_tokens=4)


def test_a_drafter_with_adapters(tiny_qwen3, make_drafter):
    alone = make_drafter(tiny_qwen3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(make_drafter(tiny_qwen3), config).eval()
    plain, drafts = greedy(tiny_qwen3, max_new_tokens=8), []
    for choose in (lambda: alone, lambda: adapted, adapted.merge_and_unload):
        with proposed() as rounds:
            assert torch.equal(greedy(tiny_qwen3, assistant_model=choose(), max_new_tokens=8), plain)
        drafts.append(rounds[0])
    assert drafts[0] != drafts[1] == drafts[2]
    assert adapted.stats.num_new_tokens == 8


def test_a_call_validates_its_pair_once(tiny_qwen3, tiny_drafter):
    checks = {check.__code__: check.__name__ for check in (check_drafter, check_target, recognise)}
    counts = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code in checks:
            counts[checks[frame.f_code]] += 1

    sys.setprofile(note)
    try:
        tiny_qwen3.generate(torch.arange(7, 15)[None], assistant_model=tiny_drafter, max_new_tokens=4, do_sample=False)
    finally:
        sys.setprofile(None)
    assert counts == {"check_drafter": 1, "check_target": 1, "recognise": 1}
