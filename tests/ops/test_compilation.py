"""The kernels compile for a GPU that is not there, and read their weights sixteen bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# In a process of its own: here Triton may interpret. Integers whose value at the sizes of Qwen3-8B is a multiple of 16
# are declared as such, which a launch finds out by itself.
SCRIPT = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from domino_kernels import triton_choose, triton_gru, triton_branches

WEIGHTS = {"low_rank", "weight", "embedding", "state", "weight_ih", "weight_hh", "next_state"}
WEIGHTS |= {"products", "block_part", "state_part"}
IDS = {"candidates", "best_id", "chosen", "inputs", "owners"}
FLOATS = {"base", "best_score", "noise", "scores"}
COUNTS = {"num_rows", "num_branches", "num_branches_of_all"}

def compile(kernel, warps=4, **constants):
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in WEIGHTS or name in IDS or name in FLOATS:
            types[name] = "*bf16" if name in WEIGHTS else "*i64" if name in IDS else "*fp32"
        else:
            types[name] = "fp32" if name == "temperature" else "i32"
    multiples = [name for name, kind in types.items() if kind[0] == "*" or kind == "i32" and name not in COUNTS]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    wide = r"ld\\.global\\S*\\.v4\\.b32|cp\\.async\\.cg\\.shared\\.global \\[.*?\\], \\[.*?\\], 0x10"
    return len(re.findall(wide, built.asm["ptx"]))

choose, warps = triton_choose._choose_in_tile, triton_choose.NUM_WARPS
print(json.dumps({
    "vocabulary": compile(choose, warps, POOL=False, SAMPLE=False, TILE=64, RANK=256),
    "sampled pool": compile(choose, warps, POOL=True, SAMPLE=True, TILE=128, RANK=256),
    "second stage": compile(triton_choose._choose_among_tiles, TILES=4096),
    "gru": compile(triton_gru._gru_units, GATHER=True, UNITS=4, INPUT_CHUNK=1024, STATE_CHUNK=1024),
    "branches": compile(triton_branches._advance, BRANCHES=16, UNITS=16, CHUNK=128),
    "their corrections": compile(triton_branches._correct, BRANCHES=16, TILE=32, CHUNK=128),
}))
"""
# Per thread: 64 x 256, 128 x 256 elements among 8 warps; 2 x 3 x 4 x 1024 among 4; 8 elements a load. Where tensor
# cores multiply, two turns of a loop are read ahead: 3 x (16 + 3 x 16) x 128, 3 x (16 + 32) x 128.
EXPECTED = {"vocabulary": 8, "sampled pool": 16, "second stage": 0, "gru": 24, "branches": 24, "their corrections": 18}


def test_kernels_compile_with_wide_loads(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert {name: count for name, count in counts.items() if count < EXPECTED[name]} == {}
