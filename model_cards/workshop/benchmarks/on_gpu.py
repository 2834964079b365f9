"""Everything that needs a GPU, in one command: tests, kernels, the whole head, whole rounds, the bundled pair.

    python model_cards/workshop/benchmarks/on_gpu.py --output rows            # about 10 minutes on an H100
    python model_cards/workshop/benchmarks/on_gpu.py --output rows --dry-run  # tiny sizes, on a CPU too
    python model_cards/workshop/benchmarks/on_gpu.py --steps pair pair_4 pair_8 --target work/smollm2-135m-instruct
    python model_cards/workshop/benchmarks/on_gpu.py --steps recycling recycling_8 recycling_pair --target Qwen/Qwen3-8B

`pair_4` and `pair_8` generate for so many prompts at once. The steps of token recycling need no drafter: `recycling`
and `recycling_8` have Qwen3-8B's sizes and random weights, and `recycling_pair` has the target of the pairs. Rows are
written to the folder, one file a step; what a step prints goes to the terminal. A step that fails, or runs past its
limit, does not keep the others from running, and makes the command fail at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).parent
ROOT = BENCHMARKS.parents[2]
KERNELS = ("correct_and_choose", "gru_step", "head", "branches")
PAIRS = {"pair": 1, "pair_4": 4, "pair_8": 8, "recycling_pair": 1}  # prompts at once
RECYCLING = {"recycling": 1, "recycling_8": 8}  # sequences at once
STEPS = ("tests", *KERNELS, "round", "trees", *RECYCLING, *PAIRS)


def steps(output: Path, is_dry: bool, target: str | None = None) -> dict[str, list[str]]:
    """Name and command of every step.

    Args:
        output (`Path`): Folder for rows.
        is_dry (`bool`): Whether to run at tiny sizes.
        target (`str`, *optional*): Folder or Hub name of the target of the pairs, whose drafter is found by it;
            defaults to the bundled one.
    """
    tests = ["-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
    commands = {"tests": [*tests, "--collect-only"] if is_dry else tests}
    for kernel in KERNELS:
        commands[kernel] = [str(BENCHMARKS / f"{kernel}.py"), "--results", str(output / f"{kernel}.jsonl")]
        commands[kernel] += ["--dry-run"] * is_dry
    tiny = ["--shapes", "tiny", "--context", "16", "--rounds", "16", "--repeats", "1"] * is_dry
    rounds = [str(BENCHMARKS / "rounds.py"), *tiny]
    commands["round"] = [*rounds, "--results", str(output / "rounds.jsonl")]
    commands["trees"] = [*rounds, "--tree-size", "16", "--results", str(output / "trees.jsonl")]
    for name, at_once in RECYCLING.items():
        recycling = [*rounds, "--drafter", "recycling", "--tree-size", "32", "--batch-size", str(at_once)]
        recycling += [] if is_dry else ["--rounds", "32", "--repeats", "3"]
        commands[name] = [*recycling, "--results", str(output / f"{name}.jsonl")]
    few = ["--max-new-tokens", "8", "--without", "drafter, static, full blocks"]
    # Each call that compiles takes a minute with a large target.
    main_ones = ["--num-prompts", "4", "--seconds", "90", "--without", "drafter, static, full blocks"]
    main_ones += ["Transformers' prompt lookup, static", "drafter, Transformers' loop, static"]
    for name, at_once in PAIRS.items():
        pairs = [str(BENCHMARKS / "pairs.py"), "--results", str(output / f"{name}.jsonl"), "--batch-size", str(at_once)]
        pairs += ["--num-prompts", str(at_once), *few] if is_dry else ["--dtype", "bfloat16"]
        if name.startswith("recycling"):
            pairs += ["--drafter", "recycling", *([] if is_dry else main_ones)]
        commands[name] = pairs if target is None else [*pairs, "--target", target]
    return commands


def main() -> int:
    """Run all steps; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-rows"), help="folder for rows")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="only these steps (default: all)")
    parser.add_argument("--target", help="target of the pairs (default: the bundled one)")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a step is broken off")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "kernels" / "torch-ext"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    failed = []
    for name, command in steps(output, options.dry_run, options.target).items():
        if name not in options.steps:
            continue
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            code = subprocess.run(
                [sys.executable, *command], env=environment, cwd=ROOT, timeout=options.limit
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"broken off after {options.limit:.0f} s", flush=True)
            code = 1
        failed += [name] if code else []
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    print("All steps passed." if not failed else f"Failed: {', '.join(failed)}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
