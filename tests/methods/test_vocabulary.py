"""A draft vocabulary: its columns and ids, lm_head's rows, restricted drafters, and maps that are refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from builders import TINY, VOCAB_SIZE, build_drafter
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.formats.draft_vocabulary import d2t_of, ids_of
from hf_domino.methods import vocabulary as vocabulary_module
from hf_domino.methods.vocabulary import DraftVocabulary, ReducedVocabulary
from hf_domino.targets.view import TargetModel

IDS = [0, 1, 5, 9, 33, 34, 63]
LOGITS_TOL = {"rtol": 1e-6, "atol": 1e-6}  # the same sums, perhaps in another order


def vocabulary(ids=IDS):
    return ReducedVocabulary(VOCAB_SIZE, d2t_of(ids, VOCAB_SIZE))


def test_columns_and_ids():
    reduced, whole = vocabulary([33, 0, 5, 63, 9, 34, 1]), DraftVocabulary()
    assert reduced.token_ids.tolist() == IDS
    columns = torch.tensor([[6, 0], [3, 3]])
    assert reduced.ids(columns).tolist() == [[63, 0], [9, 9]]
    assert reduced.columns(reduced.ids(columns)).tolist() == columns.tolist()
    assert reduced.columns(torch.tensor([2, 62, 32, 35])).tolist() == [-1] * 4
    assert reduced.total(7) == VOCAB_SIZE
    values = torch.randn(2, 3, VOCAB_SIZE)
    few = reduced.gather(values)
    assert torch.equal(few, values[..., IDS])
    spread = reduced.scatter(few)
    assert torch.equal(spread[..., IDS], few)
    assert torch.equal(spread.isfinite().sum(dim=-1), torch.full((2, 3), len(IDS)))
    for change in (whole.ids, whole.columns, whole.gather, whole.scatter):
        assert change(values) is values
    assert whole.total(7) == 7


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "token_ids must be"),
        (20, "token_ids must be a list of integers, got 20. For the most frequent ones"),
        ([5.5], "token_ids must be a list of integers"),
        ([3, 4, 3], r"token_ids must be of ascending ids, none twice, got \[3, 3\]. Give each token"),
        ([3, 64], r"token_ids must be of ids in \[0, 63\] \(vocab_size=64\), got 'ids from 3 to 64'"),
        ([-1, 3], r"token_ids must be of ids in \[0, 63\]"),
    ],
)
def test_ids_that_are_none(tiny_drafter, ids, message):
    with pytest.raises(ValueError, match=message):
        tiny_drafter.restricted(ids)


@pytest.mark.parametrize("size", [0, -1, 65])
def test_sizes_out_of_range(size):
    with pytest.raises(ValueError, match=r"draft_vocab_size must be in \[1, 64\] \(vocab_size=64\), got"):
        DominoConfig(vocab_size=64, mask_token_id=3, draft_vocab_size=size)


def test_the_whole_vocabulary_is_no_draft_vocabulary():
    config = DominoConfig(vocab_size=64, mask_token_id=3, draft_vocab_size=64)
    assert (config.draft_vocab_size, config.draft_width) == (None, 64)
    assert DominoConfig(vocab_size=64, mask_token_id=3, draft_vocab_size=8).draft_width == 8


def targets(tiny_qwen3, tiny_llama):
    """Targets whose lm_head is tied, their own, biased, and scaled or capped behind it."""
    biased = copy.deepcopy(tiny_llama)
    biased.lm_head = nn.Linear(32, VOCAB_SIZE)
    own = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8}
    scaled = CohereForCausalLM(CohereConfig(logit_scale=0.25, **TINY))
    return [tiny_qwen3, tiny_llama, biased, scaled, Gemma2ForCausalLM(Gemma2Config(**TINY, **own))]


@torch.no_grad()
def test_logits_are_the_targets(tiny_qwen3, tiny_llama):
    hidden = torch.randn(2, 3, 32)
    for target in targets(tiny_qwen3, tiny_llama):
        view = TargetModel(target)
        assert view.readable_head is target.get_output_embeddings()
        found = vocabulary().logits(view, hidden)
        torch.testing.assert_close(found, view.logits(hidden)[..., IDS], **LOGITS_TOL)


@torch.no_grad()
def test_scales_that_a_drafter_tells_are_in_place_of_the_targets(tiny_qwen3, tiny_llama):
    hidden, told = torch.randn(2, 3, 32), {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    for target in targets(tiny_qwen3, tiny_llama):
        drafter = build_drafter(target, **told)
        view, raw = TargetModel(target), target.lm_head(hidden)
        for own, logits in ((drafter, raw), (drafter.restricted(IDS), raw[..., IDS])):
            torch.testing.assert_close(own.logits(view, hidden), 2 * torch.tanh(logits / 4), **LOGITS_TOL)
        table = target.get_input_embeddings().weight
        torch.testing.assert_close(view.embed(torch.tensor(IDS), 3.0), 3.0 * table[IDS])


def hooked(target):
    target.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)


def wrapped(target):
    target.lm_head = nn.Sequential(target.lm_head)


def offloaded(target):
    from accelerate import cpu_offload

    cpu_offload(target.lm_head, torch.device("cpu"))


def quantised(target):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(target.lm_head, Int8WeightOnlyConfig())


def parametrised(target):
    nn.utils.parametrizations.weight_norm(target.lm_head)


@torch.no_grad()
@pytest.mark.parametrize("change", [hooked, wrapped, offloaded, quantised, parametrised], ids=lambda c: c.__name__)
def test_a_head_that_cannot_be_read_is_called(tiny_llama, tiny_drafter, change):
    target, hidden = copy.deepcopy(tiny_llama), torch.randn(2, 3, 32)
    change(target)
    view = TargetModel(target)
    assert view.readable_head is None
    assert torch.equal(vocabulary().logits(view, hidden), view.logits(hidden)[..., IDS])
    assert vocabulary().prepare(view) is None


@torch.no_grad()
def test_rows_are_copied_once_and_again_where_weights_changed(tiny_llama, tiny_drafter):
    drafter, target, hidden = tiny_drafter.restricted(IDS), copy.deepcopy(tiny_llama), torch.randn(2, 32)
    view = TargetModel(target)
    address = drafter.vocabulary.prepare(view)
    assert drafter.view(draft_length="adaptive").vocabulary.prepare(view) == address
    target.lm_head.weight.mul_(2.0)  # in place: a captured graph goes on to read the same rows
    assert drafter.vocabulary.prepare(view) == address
    torch.testing.assert_close(drafter.vocabulary.logits(view, hidden), view.logits(hidden)[..., IDS], **LOGITS_TOL)
    target.lm_head.weight.data += 1.0  # past autograd, as PEFT merges an adapter
    assert drafter.vocabulary.prepare(view) == address
    torch.testing.assert_close(drafter.vocabulary.logits(view, hidden), view.logits(hidden)[..., IDS], **LOGITS_TOL)
    drafter.d2t.copy_(d2t_of(range(7), VOCAB_SIZE))
    torch.testing.assert_close(drafter.vocabulary.logits(view, hidden), view.logits(hidden)[..., :7], **LOGITS_TOL)
    target.double()
    assert drafter.vocabulary.prepare(view) != address
    torch.testing.assert_close(drafter.vocabulary.logits(view, hidden), view.logits(hidden)[..., :7], **LOGITS_TOL)


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_call_copies_no_rows_that_are_there(tiny_llama, make_drafter, monkeypatch, cache):
    """Only a call after a change of the weights does, also after one that autograd does not see."""
    drafter, target, copied = make_drafter(tiny_llama).restricted(IDS), copy.deepcopy(tiny_llama), []
    copy_rows = vocabulary_module._copy_rows
    monkeypatch.setattr(vocabulary_module, "_copy_rows", lambda *args: copied.append(1) or copy_rows(*args))
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    for change, count in ((0.0, 1), (0.0, 1), (0.1, 2), (0.0, 2)):
        if change:
            target.lm_head.weight.data += change  # as PEFT merges an adapter
        target.generate(torch.arange(5, 12)[None], assistant_model=drafter, **options)
        assert len(copied) == count


def test_rows_keep_no_target_and_are_not_copied(tiny_llama, tiny_drafter):
    drafter, target = tiny_drafter.restricted(IDS), copy.deepcopy(tiny_llama)
    with torch.inference_mode():
        address = drafter.vocabulary.prepare(view := TargetModel(target))
    drafter.vocabulary.logits(view, torch.randn(1, 32, requires_grad=True)).sum().backward()  # of no inference mode
    for other in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other.vocabulary.prepare(view) != address
    gone = weakref.ref(target.lm_head)
    del target, view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("projector_type", ["domino", "dflash"])
def test_restricted(tiny_qwen3, tmp_path, projector_type):
    drafter = build_drafter(tiny_qwen3, projector_type=projector_type)
    small = drafter.restricted(torch.tensor(IDS).flip(0))
    assert small.config.draft_vocab_size == len(IDS)
    assert drafter.config.draft_vocab_size is None
    assert not small.training
    for name, tensor in small.state_dict().items():
        whole = drafter.state_dict().get(name, ids_of(torch.zeros(VOCAB_SIZE, dtype=torch.long)))
        assert torch.equal(
            tensor if name != "d2t" else small.vocabulary.token_ids, whole[IDS] if len(tensor) == 7 else whole
        )
        assert tensor.data_ptr() != whole.data_ptr()
    smaller = small.restricted([63, 5])
    assert smaller.vocabulary.token_ids.tolist() == [5, 63]
    if smaller.has_correction_head:
        assert torch.equal(smaller.embed_proj[2].weight, drafter.embed_proj[2].weight[[5, 63]])
    with pytest.raises(ValueError, match="token_ids must be among the tokens that the drafter proposes, got 6"):
        small.restricted([5, 6])
    assert drafter.restricted(range(VOCAB_SIZE)).config.draft_vocab_size is None
    small.save_pretrained(tmp_path)
    again = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (again.dtype, again.d2t.dtype, again.double().d2t.dtype) == (torch.bfloat16, torch.int64, torch.int64)
    assert again.vocabulary.token_ids.tolist() == IDS


def test_a_new_drafter_begins_with_the_first_tokens(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_vocab_size=5)
    assert drafter.vocabulary.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert drafter.embed_proj[2].weight.shape == (5, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d2t: None, "tensors must be complete .* got 'a file without d2t'"),
        (lambda d2t: d2t[1:].clone(), r"d2t must be of shape \(7,\) .*draft_vocab_size=7\), got \(6,\)"),
        (lambda d2t: d2t.flip(0).clone(), "the checkpoint's d2t must be of ascending ids, none twice, got"),
        (lambda d2t: d2t + 1, r"the checkpoint's d2t must be of ids in \[0, 63\] .* got 'ids from 1 to 64'."),
        (lambda d2t: d2t - 1, r"the checkpoint's d2t must be of ids in \[0, 63\]"),
    ],
)
def test_maps_that_are_refused(tiny_drafter, tmp_path, change, message):
    tiny_drafter.restricted(IDS).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = change(tensors.pop("d2t"))
    save_file(tensors | ({} if changed is None else {"d2t": changed}), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path)


def test_a_checkpoint_of_all_tokens_is_not_read_as_one_of_a_few(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a file without d2t"):
        DominoDraftModel.from_pretrained(tmp_path, draft_vocab_size=8)
    tiny_drafter.restricted(IDS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"embed_proj.2.weight must be of shape \(64, 16\)"):
        DominoDraftModel.from_pretrained(tmp_path, draft_vocab_size=None)


def test_adapters_must_be_merged_first(tiny_drafter):
    peft = pytest.importorskip("peft")
    peft.get_peft_model(tiny_drafter, peft.LoraConfig(r=2, target_modules=["fc"]))
    with pytest.raises(ValueError, match="Merge an adapter"):
        tiny_drafter.restricted(IDS)


def test_a_view_has_the_tokens_of_its_drafter(tiny_drafter):
    small = tiny_drafter.restricted(IDS)
    assert small.view(draft_length="full").vocabulary.token_ids.tolist() == IDS
    for drafter, size in ((tiny_drafter, 7), (small, 6), (small, None)):
        with pytest.raises(ValueError, match=r"draft_vocab_size must be .*drafter.restricted\(token_ids\)"):
            drafter.view(draft_vocab_size=size)


def test_one_drafter_serves_targets_with_different_padding_of_the_vocabulary(tiny_llama, make_drafter):
    """Even while another call runs: meeting a target changes nothing in the drafter's configuration."""
    padded = copy.deepcopy(tiny_llama)
    padded.resize_token_embeddings(VOCAB_SIZE + 8)
    drafter = make_drafter(tiny_llama).restricted(IDS)
    before = drafter.config.to_json_string(use_diff=False)
    options = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.3, "eos_token_id": -1}
    prompt = torch.arange(5, 12)[None]
    plain = {target: target.generate(prompt, **options) for target in (tiny_llama, padded)}

    class Nested:
        """Generates with the other target while the first one streams."""

        def put(self, value):
            if value.dim() == 1:
                assert torch.equal(padded.generate(prompt, assistant_model=drafter, **options), plain[padded])

        def end(self): ...

    text = tiny_llama.generate(prompt, assistant_model=drafter, streamer=Nested(), **options)
    assert torch.equal(text, plain[tiny_llama])
    assert drafter.config.to_json_string(use_diff=False) == before
