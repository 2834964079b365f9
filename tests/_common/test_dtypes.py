import pytest
import torch

from hf_domino._common.dtypes import dtype_name, fast_dtype
from hf_domino.training.fields import ModelArguments


def test_the_dtype_is_one_that_the_hardware_is_fast_in(monkeypatch):
    for known, expected in (({"avx512_bf16": True}, torch.bfloat16), ({"avx512_bf16": False}, torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
        assert fast_dtype("cpu") == expected
    assert fast_dtype("cuda") == torch.bfloat16


@pytest.mark.parametrize(
    ("written", "name"),
    [("bf16", "bfloat16"), ("fp32", "float32"), ("float", "float32"), ("fp16", "float16"), ("half", "float16")]
    + [("torch.bfloat16", "bfloat16"), ("float16", "float16"), ("int4", "int4")],
)
def test_a_dtype_may_be_written_as_people_write_it(written, name):
    assert dtype_name(written) == name
    arguments = ModelArguments(target_dtype=written, cache_dtype=written)
    assert arguments.target_dtype == arguments.cache_dtype == name
