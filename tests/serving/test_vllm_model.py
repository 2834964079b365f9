"""Our model of a drafter over a stand-in for vLLM's: rows, logits, weights, refusals."""

import importlib
import logging
import sys

import pytest
import torch
from builders import MASK, VOCAB_SIZE, build_drafter
from drafts import chain_of
from safetensors.torch import load_file
from stand_in import install, server
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.formats.exporting import stored_config
from hf_domino.targets.view import TargetModel

IDS = [0, 3, 4, 9, 11, 40, 62]
COUNT, REQUESTS = 5, 3


@pytest.fixture
def served(monkeypatch):
    """The class, over the stand-in."""
    install(monkeypatch)
    return importlib.import_module("hf_domino.serving.vllm_model").ServedDrafter


def loaded(served, target, drafter, folder, **settings):
    drafter.export(folder, dtype=torch.float32, overwrite=True)
    model = served(vllm_config=server(target, stored_config(drafter.config, dtype="float32"), **settings))
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model


def drafts(model, hidden, anchors):
    """Proposals `[B, P]` as the server takes them: of draft hidden states `[B, 1 + P, H]`, three rows of padding."""
    rows = torch.full((REQUESTS, COUNT + 1), MASK)
    rows[:, 0] = anchors
    model.model.hidden = torch.cat((hidden.flatten(end_dim=1), torch.randn(3, hidden.shape[2])))
    states = model(torch.cat((rows.flatten(), torch.zeros(3, dtype=torch.long))), None)
    asked = torch.arange(REQUESTS * (COUNT + 1)).view(REQUESTS, -1)[:, 1:].flatten()
    return model.compute_logits(states[asked]).argmax(dim=-1).view(REQUESTS, COUNT)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "prefix_len"), [("domino", 0), ("domino", 1), ("domino", 3), ("dflash", 0)])
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "reduced"])
def test_the_server_takes_our_proposals(served, tiny_llama, tmp_path, kind, prefix_len, shift_label, ids):
    shape = {"projector_type": kind, "shift_label": shift_label, "draft_pool_size": None}
    drafter = build_drafter(tiny_llama, **shape, **({"pure_draft_prefix_len": prefix_len} if kind == "domino" else {}))
    if drafter.has_correction_head:
        torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    if ids is not None:
        drafter = drafter.restricted(ids)
    model = loaded(served, tiny_llama, drafter, tmp_path)
    hidden, text = torch.randn(REQUESTS, COUNT + 1, 32), torch.randint(4, VOCAB_SIZE, (REQUESTS, 3))
    own = hidden[:, :-1] if shift_label else hidden[:, 1:]
    prefixes = Prefixes(text, [3] * REQUESTS, [0, 1, 2])
    expected = chain_of(drafter, TargetModel(tiny_llama), own, prefixes, TokenDistribution([]))
    if kind == "dflash" and not shift_label and ids is not None:
        assert model.drafter_config is None  # vLLM's own, which knows no t2d
        return
    assert torch.equal(drafts(model, hidden, text[:, -1]), expected)
    base = tiny_llama.lm_head(own).argmax(dim=-1)
    assert kind == "dflash" or not torch.equal(expected, base)
    if ids is None:
        assert torch.equal(expected[:, :prefix_len], base[:, :prefix_len])


def test_weights_that_vllm_knows_are_handed_on(served, tiny_llama, tmp_path):
    drafter = build_drafter(tiny_llama)
    model = loaded(served, tiny_llama, drafter, tmp_path)
    heads = {name for name in drafter.state_dict() if name.split(".")[0] in ("prefix_gru", "embed_proj")}
    assert model.loaded.keys() == drafter.state_dict().keys() - heads
    assert {f"head.{name}" for name in heads} <= model.state_dict().keys()


@pytest.mark.parametrize(("kind", "shift_label"), [("domino", True), ("dflash", True), ("dflash", False)])
def test_convolutions_are_run_by_the_layers_of_vllms_dflash2(served, tiny_llama, tmp_path, kind, shift_label):
    shape = {"projector_type": kind, "shift_label": shift_label}
    plain = loaded(served, tiny_llama, build_drafter(tiny_llama, projector_type=kind), tmp_path)
    convolved = build_drafter(tiny_llama, conv_kernel_size=2, conv_group_size=8, **shape)
    model = loaded(served, tiny_llama, convolved, tmp_path)
    assert (plain.model.decoder_layer_cls, model.model.decoder_layer_cls) == ("of DFlash", "of DFlash 2")
    assert {name for name in convolved.state_dict() if "_conv." in name} <= model.loaded.keys()


@pytest.mark.parametrize("has_norms", [True, False])
def test_plain_dflash_is_untouched(served, tiny_llama, monkeypatch, has_norms):
    if not has_norms:  # of another version
        monkeypatch.delattr("stand_in.Backbone._normalize_context_k")
    stored = stored_config(build_drafter(tiny_llama, projector_type="dflash", shift_label=False).config)
    model = served(vllm_config=server(tiny_llama, stored, draft_sample_method="probabilistic"))
    weights = {"anything": torch.ones(1), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}
    model.load_weights(weights.items())
    assert model.loaded == weights
    model.model.hidden = torch.randn(12, 32)
    assert model(torch.arange(12), None) is model.model.hidden
    assert torch.equal(model.compute_logits(model.model.hidden), tiny_llama.lm_head(model.model.hidden))


def test_a_truncated_folder_is_refused(served, tiny_llama, tmp_path):
    drafter = build_drafter(tiny_llama)
    model = served(vllm_config=server(tiny_llama, stored_config(drafter.config)))
    tensors = {name: t for name, t in drafter.state_dict().items() if name != "embed_proj.2.weight"}
    with pytest.raises(ValueError, match=r"a file without embed_proj\.2\.weight"):
        model.load_weights(tensors.items())
    with pytest.raises(ValueError, match=r"embed_proj\.2\.weight must be of shape \(64, 16\)"):
        model.load_weights((tensors | {"embed_proj.2.weight": torch.zeros(60, 16)}).items())


def test_settings_are_refused_before_anything_is_built(served, tiny_llama):
    stored = stored_config(build_drafter(tiny_llama).config)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        served(vllm_config=server(tiny_llama, stored, num_speculative_tokens=6))


@pytest.mark.parametrize(("version", "is_v2", "said"), [("0.40.0", False, "0.40.0"), ("0.32.0", True, "V2_MODEL_RUN")])
def test_what_was_not_run_is_said(monkeypatch, tiny_llama, caplog, version, is_v2, said):
    install(monkeypatch, version)
    served = importlib.import_module("hf_domino.serving.vllm_model").ServedDrafter
    with caplog.at_level(logging.WARNING, "vllm.hf_domino"):
        served(vllm_config=server(tiny_llama, stored_config(build_drafter(tiny_llama).config), is_v2=is_v2))
    assert said in caplog.text


def test_context_keys_get_the_norm_of_their_layer(served, tiny_llama, tmp_path):
    norms, keys = torch.rand(3, 8) + 0.5, torch.randn(3, 4, 2, 8)
    model = loaded(served, tiny_llama, build_drafter(tiny_llama), tmp_path, k_norms=norms).model
    expected = torch.stack([torch.nn.functional.rms_norm(k, (8,), w, 1e-6) for k, w in zip(keys, norms, strict=True)])
    torch.testing.assert_close(model._normalize_context_k(keys), expected)
    right = loaded(served, tiny_llama, build_drafter(tiny_llama), tmp_path, k_norms=torch.ones(3, 8)).model
    assert "_normalize_context_k" not in vars(right)  # left alone


def test_each_proposal_gets_the_temperature_of_its_request(served, tiny_llama, tmp_path):
    loaded(served, tiny_llama, build_drafter(tiny_llama), tmp_path)
    expand = sys.modules["vllm.v1.sample.rejection_sampler"].expand_batch_to_tokens
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    temperatures = expand(torch.tensor([0.7, 0.0, 1.5]), ends, 6, replace_from=0, replace_to=1)
    torch.testing.assert_close(temperatures, torch.tensor([0.7, 0.7, 1.0, 1.5, 1.5, 1.5]))
    assert expand(torch.tensor([50, 0, 9], dtype=torch.int32), ends, 6).tolist() == [50, 50, 0, 9, 9, 9]


def test_an_expansion_that_is_right_is_left_alone(served, tiny_llama, tmp_path):
    def right(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        return x[torch.bucketize(torch.arange(num_tokens), cu_num_tokens, right=True)]

    module = sys.modules["vllm.v1.sample.rejection_sampler"]
    module.expand_batch_to_tokens = right
    loaded(served, tiny_llama, build_drafter(tiny_llama), tmp_path)
    assert module.expand_batch_to_tokens is right


def test_a_matrix_of_onednn_is_freed_in_the_middle_of_a_trace(served, tiny_llama, tmp_path):
    freed = []

    class Handler:
        handler_tensor = torch.tensor(7)

        def __del__(self):
            freed.append(self.handler_tensor.item())

    sys.modules["vllm._custom_ops"].CPUDNNLGEMMHandler = Handler
    loaded(served, tiny_llama, build_drafter(tiny_llama), tmp_path)
    release = Handler.__del__
    sys.modules["hf_domino.serving.vllm_faults"].fix_release()
    assert Handler.__del__ is release
    matrix = Handler()
    with FakeTensorMode():
        del matrix
    assert freed == [7]
