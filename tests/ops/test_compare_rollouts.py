"""The comparison of rollouts runs, and all that choose from the whole vocabulary choose the same in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_dry_run(tmp_path):
    script = ROOT / "kernels" / "benchmarks" / "compare_rollouts.py"
    arguments = ["--dry-run", "--blocks", "2", "--dtypes", "float32", "--rows", tmp_path / "rows.jsonl"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, *arguments], check=True, env=environment)
    rows = {row["scheme"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert list(rows) == ["whole_block", "stepwise", "exact", "pool"]
    assert [rows[name]["blocks_equal_to_whole_block"] for name in ("whole_block", "stepwise", "exact")] == [2, 2, 2]
    assert all(row["ms_per_block"] > 0 and row["commit"] for row in rows.values())
