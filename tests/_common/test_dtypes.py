import pytest
import torch

from hf_domino._common.dtypes import dtype_name, dtype_of, fast_dtype
from hf_domino.training.fields import ModelArguments


def test_the_dtype_is_one_that_the_hardware_is_fast_in(monkeypatch):
    for known, expected in (({"avx512_bf16": True}, torch.bfloat16), ({"avx512_bf16": False}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
        assert fast_dtype("cpu") == expected
    assert fast_dtype("cuda") == torch.bfloat16


@pytest.mark.parametrize(
    ("written", "name"),
    [("bf16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("fp16", "float16"), ("half", "float16")]
    + [("torch.bfloat16", "bfloat16"), ("float16", "float16"), ("auto", "auto")],
)
def test_a_dtype_may_be_written_as_people_write_it(written, name):
    assert dtype_name(written) == name
    arguments = ModelArguments(target_dtype=written, cache_dtype=written)
    assert arguments.target_dtype == arguments.cache_dtype == name


@pytest.mark.parametrize("written", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_python_takes_short_names_where_it_takes_a_dtype(written, tiny_drafter, tmp_path):
    tiny_drafter.export(tmp_path, dtype=written)
    assert type(tiny_drafter).from_pretrained(tmp_path).dtype == dtype_of(written) == torch.bfloat16


@pytest.mark.parametrize("field", ["target_dtype", "cache_dtype"])
def test_a_wrong_dtype_of_a_training_is_named_with_the_right_ones(field, recipe, train, capsys):
    assert train(recipe | {field: "bfloat61"}) == 2
    said = f"{field} must be one of bfloat16, float16, float32, got 'bfloat61'. Choose one of them, or auto."
    assert said in capsys.readouterr().err
