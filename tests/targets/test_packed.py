"""Packed linear layers on a CPU: the same results, never those of old weights, and nothing stays changed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from builders import build_drafter, left_padded
from families import build
from oracle import oracle, tree_faults
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import hf_domino
from hf_domino.targets.digest import digest_of
from hf_domino.targets.packed import linear_bits

PROMPTS = [torch.arange(7, 27), torch.arange(30, 35), torch.arange(40, 49)]
PROMPT = PROMPTS[0][None]
SAMPLED = {"do_sample": True, "top_k": 20}
# Sums of 48 products of about one in another order.
TOLERANCE = 1e-5

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture(autouse=True)
def forced(monkeypatch):
    """Pack weights of any size, and none from an earlier test."""
    monkeypatch.setenv("HF_DOMINO_PACKED", "1")
    hf_domino.release_workspaces()
    yield
    hf_domino.release_workspaces()


@pytest.fixture
def products(monkeypatch):
    """How many products had packed weights, and of what widths, and how many had ordinary ones."""
    with torch.no_grad(), hf_domino.packed_linears(layer_of()):
        pass  # the first time, it finds out what oneDNN supports
    hf_domino.release_workspaces()
    counts = {"packed": 0, "plain": 0, "copies": 0, "widths": set()}
    reorder = torch.ops.mkldnn._reorder_linear_weight
    plain = F.linear
    packed = torch.ops.mkldnn._linear_pointwise.default

    class Counted:
        @staticmethod
        def default(*arguments):
            found = packed(*arguments)
            counts["packed"] += 1
            counts["widths"].add(found.shape[-1])
            return found

    def count_plain(*arguments, **named):
        counts["plain"] += 1
        return plain(*arguments, **named)

    def count_copy(*arguments):
        counts["copies"] += 1
        return reorder(*arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Counted)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", count_copy)
    monkeypatch.setattr(F, "linear", count_plain)
    return counts


def layer_of(dtype=torch.float32, bias=True):
    torch.manual_seed(3)
    return nn.Linear(48, 32, bias=bias, dtype=dtype)


def product(layer, values=None):
    if values is None:
        values = torch.linspace(-1, 1, 5 * 48).reshape(1, 5, 48).to(next(layer.parameters()).dtype)
    with torch.no_grad(), hf_domino.packed_linears(layer):
        return layer(values)


def text_of(target, drafter=None, ids=PROMPT, mask=None, **options):
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False} | options
    return target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48), (2, 9, 48), (1, 200, 48)])
def test_products_are_those_of_the_layer(shape, bias, products):
    layer = layer_of(bias=bias)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = values @ layer.weight.T + (layer.bias if bias else 0)
    found = product(layer, values)
    assert (products["packed"], products["plain"]) == (1, 0)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < TOLERANCE


def test_an_empty_input_and_another_dtype_take_the_ordinary_way(products):
    layer = layer_of()
    with torch.no_grad(), hf_domino.packed_linears(layer):
        assert layer(torch.empty(1, 0, 48)).shape == (1, 0, 32)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(torch.ones(1, 48, dtype=torch.float64))
    assert products["packed"] == 0


@pytest.mark.parametrize("options", [{}, SAMPLED, {"repetition_penalty": 1.3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma3_text", "gpt_neox"])
def test_texts_of_a_batch_are_plain_text(model_type, options, products):
    target = build(model_type)
    drafter = build_drafter(target)
    ids, mask = left_padded(PROMPTS)
    of_plain = {name: value for name, value in options.items() if name != "cache_implementation"}
    plain = text_of(target, None, ids, mask, **of_plain)
    products["plain"] = 0
    with oracle(target, ids, 0.7, plain):
        assert torch.equal(text_of(target, drafter, ids, mask, **options), plain)
    assert products["packed"] > 100
    assert {target.config.vocab_size, target.config.intermediate_size} <= products["widths"]


@pytest.mark.parametrize("options", [{}, SAMPLED, {"cache_implementation": "static"}])
def test_texts_by_trees_are_plain_text(options, products):
    target = build("qwen3")
    drafter = build_drafter(target, draft_tree_size=12)
    plain = text_of(target, **{name: options[name] for name in options if name in SAMPLED})
    with tree_faults(plain.tolist(), target.config.vocab_size, 12):
        assert torch.equal(text_of(target, drafter, **options), plain)
    assert products["packed"]


def test_a_call_of_one_token_reads_no_weights(products):
    target = build("qwen3")
    assert torch.equal(text_of(target, build_drafter(target), max_new_tokens=1), text_of(target, max_new_tokens=1))
    assert products["copies"] == 0


def test_a_draft_vocabulary_uses_packed_rows_of_the_lm_head(products):
    target = build("qwen3")
    drafter = build_drafter(target).restricted(list(range(5, 60)))
    plain = text_of(target)
    assert torch.equal(text_of(target, drafter), plain)
    assert 55 in products["widths"]


def written_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def written_past_autograd(layer):
    layer.weight.data[3, 4] += 0.5  # as PEFT's merge and many scripts do, which changes no version counter


def loaded_anew(layer):
    layer.load_state_dict({name: tensor * 3 for name, tensor in layer.state_dict().items()})


def swapped(layer):
    layer.weight.data = layer.weight.data.flip(0).contiguous()


def replaced(layer):
    layer.weight = nn.Parameter(torch.ones_like(layer.weight))


def trained(layer):
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 48)).sum().backward()
    optimizer.step()


def moved(layer):
    layer.to(torch.bfloat16).to(torch.float32)


def negated(layer):
    layer.weight.data.neg_()


def with_columns_reversed(layer):
    layer.weight.data = layer.weight.data.flip(1)


CHANGES = [
    written_in_place,
    written_past_autograd,
    loaded_anew,
    swapped,
    replaced,
    trained,
    moved,
    negated,
    with_columns_reversed,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_weight_that_has_changed_is_packed_again(change, products):
    layer = layer_of()
    before = product(layer)
    change(layer)
    found = product(layer)
    expected = layer(torch.linspace(-1, 1, 5 * 48).reshape(1, 5, 48))
    assert (found - expected).abs().max() < TOLERANCE < (found - before).abs().max()
    assert products["copies"] == 2
    product(layer)
    assert products["copies"] == 2


def test_a_weight_of_the_same_bits_in_another_shape_is_seen(products):
    layer = nn.Linear(48, 32, bias=False)
    product(layer, torch.ones(2, 48))
    layer.weight.data = layer.weight.data.view(48, 32)
    assert product(layer, torch.ones(2, 32)).shape == (2, 48)
    assert products["copies"] == 2


def test_a_hidden_axis_that_is_permuted_between_calls_changes_no_text():
    """Plain text stays the same, so only old copies could change that of an assisted call."""
    target = build("qwen3")
    drafter = build_drafter(target)
    plain = text_of(target)
    assert torch.equal(text_of(target, drafter), plain)
    size = target.config.hidden_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    for name, weight in target.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            continue
        axis = 0 if weight.dim() == 1 or name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        weight.data = weight.data.index_select(axis, order)
    assert torch.equal(text_of(target), plain)
    assert torch.equal(text_of(target, drafter), plain)


def test_a_narrow_weight_may_begin_anywhere_in_its_storage():
    layer = layer_of(torch.bfloat16)
    expected = product(layer)
    elements = torch.zeros(1 + layer.weight.numel(), dtype=torch.bfloat16)
    elements[1:] = layer.weight.detach().flatten()
    layer.weight = nn.Parameter(elements[1:].view_as(layer.weight))
    assert torch.equal(product(layer), expected)


def test_merged_adapters_are_seen():
    peft = pytest.importorskip("peft")
    target = build("qwen3")
    drafter = build_drafter(target)
    adapted = peft.get_peft_model(
        target, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    text_of(adapted, drafter)
    for change in (adapted.merge_adapter, adapted.unmerge_adapter):
        change()
        plain = text_of(adapted)
        assert torch.equal(text_of(adapted, drafter), plain)


def test_tied_weights_are_packed_once(products):
    layers = nn.Sequential(layer_of(), layer_of())
    layers[1].weight = layers[0].weight
    with torch.no_grad(), hf_domino.packed_linears(layers):
        same = layers[0](torch.ones(2, 48)) - layers[0].bias == layers[1](torch.ones(2, 48)) - layers[1].bias
    assert same.all()
    assert (products["packed"], products["copies"]) == (2, 1)


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, values):
        """Compute twice the product."""
        return 2 * super().forward(values)


def test_layers_with_a_forward_of_their_own_are_left_alone(products):
    layers = [Doubled(48, 32), layer_of(), torch.nn.utils.parametrizations.weight_norm(layer_of())]
    layers[1].forward = layers[1].forward  # as accelerate replaces it
    for layer in layers:
        with torch.no_grad():
            expected = layer(torch.ones(2, 48))
        assert torch.equal(product(layer, torch.ones(2, 48)), expected)
    assert products["packed"] == 0


def test_compiled_models_are_left_alone(products):
    for layer in (layer_of(), nn.Sequential(layer_of())):
        layer.compile(backend="eager")
        product(layer, torch.ones(2, 48))
    assert products["packed"] == 0


def test_gradients_and_autocast_take_the_ordinary_way(products):
    layer = layer_of()
    with hf_domino.packed_linears(layer):
        layer(torch.ones(2, 48)).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.ones(2, 48)).dtype is torch.bfloat16
    assert layer.weight.grad is not None
    assert products["packed"] == 0


def test_products_are_ordinary_where_onednn_is_turned_off(products):
    layer = layer_of()
    with torch.no_grad(), hf_domino.packed_linears(layer), torch.backends.mkldnn.flags(enabled=False):
        layer(torch.ones(2, 48))
    with torch.backends.mkldnn.flags(enabled=False):
        product(layer)
    assert products["packed"] == 0


def test_flops_are_counted_as_in_plain_generation(products):
    target = build("qwen3")
    with FlopCounterMode(display=False) as plain:
        text_of(target)
    with FlopCounterMode(display=False) as counted, hf_domino.packed_linears(target):
        text_of(target)
    assert products["packed"] == 0
    assert counted.get_total_flops() == plain.get_total_flops() > 0


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 1536), (192, 576), (31, 47), (8, 5000)])
def test_a_row_has_the_same_bits_alone_and_in_a_block(shape, dtype, has_bias, products):
    layer = nn.Linear(shape[1], shape[0], bias=has_bias, dtype=dtype)
    values = torch.randn(64, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([product(layer, row[None]) for row in values])
    if not products["packed"]:
        pytest.skip(f"this processor has no products in {dtype}")
    for width in (2, 3, 9, 17, 32, 64):
        found = torch.cat([product(layer, rows[None])[0] for rows in values.split(width)])
        assert torch.equal(found, alone), width


@pytest.mark.parametrize("setting", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_said_about_rows_holds(dtype, setting, monkeypatch):
    """For each shape: whether its rows are equal bit for bit, alone and in a block, and equal to ordinary ones."""
    monkeypatch.setenv("HF_DOMINO_PACKED", setting)
    layers = nn.ModuleList(nn.Linear(size, 96, bias=False, dtype=dtype) for size in (64, 1536, 1536))
    bits = linear_bits(layers)
    assert [each.shape for each in bits] == [(96, 64), (96, 1536)]
    for each, layer in zip(bits, layers, strict=False):
        assert each.is_packed == (setting == "1") or dtype is not torch.float32
        values = torch.randn(64, each.shape[1], generator=torch.Generator().manual_seed(4)).to(dtype)
        alone = torch.cat([product(layer, row[None]) for row in values])
        blocks = [torch.cat([product(layer, rows) for rows in values.split(width)]) for width in (2, 9, 32)]
        if each.are_equal:
            assert all(torch.equal(found, alone) for found in blocks)
        elif dtype is torch.float32:
            assert not all(torch.equal(found, alone) for found in blocks)
        with torch.no_grad():
            plain = torch.cat([layer(row[None]) for row in values])
        if dtype is torch.float32 or each.is_plain:
            assert torch.equal(alone, plain) == each.is_plain


def test_a_model_of_small_and_large_weights_is_packed_as_a_whole(monkeypatch, products):
    """Otherwise some of its products would have other bits in a block than in a plain decode step."""
    monkeypatch.setenv("HF_DOMINO_PACKED", "auto")
    monkeypatch.setattr("hf_domino.targets.packed.LEAST_OF_MODEL", 0)
    monkeypatch.setattr("hf_domino.targets.packed.LEAST_GAIN", 0.0)
    layers = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 8))
    product(layers, torch.ones(1, 64))
    for width in (1, 5):
        products["packed"] = products["plain"] = 0
        product(layers, torch.ones(width, 64))
        assert (products["packed"], products["plain"]) == (2, 0)


def test_a_call_does_not_wait_while_another_reads_its_weights(monkeypatch):
    layers = [layer_of(), layer_of()]
    for layer in layers:
        product(layer)
    is_over = Event()

    def read(weight):
        if weight is layers[0].weight:
            assert is_over.wait(60)
        return digest_of(weight)

    monkeypatch.setattr("hf_domino.targets.packed.digest_of", read)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(product, layers[0])
        product(layers[1])
        is_over.set()
        first.result()


def test_nothing_stays_changed():
    forward = nn.Linear.forward
    layer = layer_of()

    def fail():
        assert nn.Linear.forward is not forward
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), hf_domino.packed_linears(layer), hf_domino.packed_linears(layer):
        fail()
    assert nn.Linear.forward is forward
    target = build("qwen3")
    before = vars(target).copy()
    text_of(target, build_drafter(target))
    assert vars(target).keys() == before.keys()
    assert nn.Linear.forward is forward
    assert torch.equal(text_of(copy.deepcopy(target)), text_of(target))
    product(layer)
    same = pickle.loads(pickle.dumps(layer))
    assert vars(same).keys() == vars(layer).keys() == vars(layer_of()).keys()
    assert torch.equal(same.weight, layer.weight)


def test_other_threads_keep_ordinary_products(products):
    layer = layer_of()

    def in_another_thread():
        with torch.no_grad():
            layer(torch.ones(2, 48))
        return products["packed"], products["plain"]

    with hf_domino.packed_linears(layer), ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_another_thread).result() == (0, 1)


def test_threads_that_generate_at_once_write_plain_text():
    target = build("qwen3")
    drafter = build_drafter(target)
    plain = text_of(target)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: text_of(target, drafter), range(8)))
    assert all(torch.equal(text, plain) for text in texts)


def test_copies_are_kept_for_later_calls_and_freed_with_the_weight_or_on_request(products):
    layer = layer_of()
    for expected in (1, 1):
        product(layer)
        assert products["copies"] == expected
    hf_domino.release_workspaces()
    product(layer)
    assert products["copies"] == 2
    kept = [weakref.ref(layer.weight)]
    del layer
    gc.collect()
    assert kept[0]() is None, "the copy does not keep its weight alive"


def test_it_can_be_turned_off(monkeypatch, products):
    monkeypatch.setenv("HF_DOMINO_PACKED", "0")
    product(layer_of())
    assert (products["packed"], products["plain"]) == (0, 1)


def test_another_setting_is_an_error(monkeypatch):
    monkeypatch.setenv("HF_DOMINO_PACKED", "yes")
    with pytest.raises(ValueError, match=r"HF_DOMINO_PACKED must be .* got 'yes'.*Unset it"):
        product(layer_of())


def test_copies_take_half_of_the_free_memory_at_most(monkeypatch, products, caplog):
    monkeypatch.setenv("HF_DOMINO_PACKED", "auto")
    # Where packing gains differs by machine, so every product seems to.
    for name in ("LEAST_GAIN", "LEAST_WEIGHT", "LEAST_OF_MODEL"):
        monkeypatch.setattr(f"hf_domino.targets.packed.{name}", 0.0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    size = layers[0].weight.nbytes
    free = [4 * size, 2 * size]
    monkeypatch.setattr("hf_domino.targets.packed.available_memory", lambda: free.pop(0))
    with caplog.at_level("WARNING"):
        product(layers, torch.ones(2, 64))
    assert "are not packed, to leave half of the free memory" in caplog.text
    products["packed"] = products["plain"] = 0
    caplog.clear()
    with caplog.at_level("WARNING"):
        product(layers, torch.ones(2, 64))
    assert (products["packed"], products["plain"]) == (2, 1)
    assert not caplog.text


def test_small_models_are_left_alone(monkeypatch, products):
    monkeypatch.setenv("HF_DOMINO_PACKED", "auto")
    forward = nn.Linear.forward
    with hf_domino.packed_linears(build("qwen3")):
        assert nn.Linear.forward is forward
    assert products["copies"] == 0


@pytest.mark.parametrize(("factor", "num_products"), [(2.0, 4), (1.2, 8)])
def test_a_clear_gain_is_timed_twice_and_a_doubtful_one_four_times(monkeypatch, products, factor, num_products):
    """Each width of a new shape is timed while somebody waits for a text."""
    monkeypatch.setenv("HF_DOMINO_PACKED", "auto")
    for name in ("LEAST_WEIGHT", "LEAST_OF_MODEL"):
        monkeypatch.setattr(f"hf_domino.targets.packed.{name}", 0.0)

    def seconds():
        return products["packed"] + factor * products["plain"]

    monkeypatch.setattr("hf_domino.targets.packed.time", SimpleNamespace(perf_counter=seconds))
    layer = nn.Linear(56, 64 + num_products)  # a shape of its own, because each is timed once in a process
    with torch.no_grad(), hf_domino.packed_linears(layer):
        assert products["plain"] == 3 * num_products // 2
        before = products["packed"]
        layer(torch.ones(1, 5, 56))
    assert products["packed"] == before + 1
