"""Results as `hf-domino bench` writes them, made up, for tests of what is computed from results."""

from __future__ import annotations

from hf_domino.evaluation.results import Result

SETTINGS = {
    "target": "tiny",
    "batch_size": 1,
    "max_new_tokens": 8,
    "repeats": 3,
    "dtype": "float32",
    "device": "cpu",
    "seed": 0,
}
PROVENANCE = {
    "threads": 2,
    "hardware": "a CPU",
    "torch": "2",
    "transformers": "5",
    "commit": "0123456789abcdef",
    "date": "2026-01-01",
}
PHASES_MS = {"draft": 2.0, "correction": 1.0, "target_forward": 6.0, "verify": 0.75, "rest": 0.25}


def row(method, prompt, speeds, lengths=(), mode="greedy", equal=True, phases=None):
    """A measured row; `speeds` are tokens/s of each repeat, in increasing order."""
    depth, count = max(lengths, default=1) - 1, 1 + sum(lengths) if lengths else 8
    about = {
        "mode": mode,
        "prompt": prompt,
        "sources": [["module", 0, "hash"]],
        "temperature": 0.0 if mode == "greedy" else 0.7,
    }
    figures = {
        "tokens_per_second": speeds[len(speeds) // 2],
        "num_rounds": len(lengths),
        "num_drafted": len(lengths),
        "num_lookups": 0,
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
        "tokens_per_forward": sum(lengths) / len(lengths) if lengths else None,
        "distinct_4gram": 0.8,
        "equals_plain": equal,
        "new_tokens": count,
        "seconds_each": [count / speed for speed in speeds],
        "acceptance_rate_at": [sum(n > k + 1 for n in lengths) / len(lengths) for k in range(depth)] or None,
        "ms_per_round": phases,
    }
    return Result(method, SETTINGS | about, figures, PROVENANCE)


def rows(modes=("greedy", "sample")):
    """A run of three methods on two prompts; another one was not measured."""
    found = [Result("dflash", SETTINGS, {"skipped": "there is no DFlash baseline"}, PROVENANCE)]
    for mode in modes:
        for prompt in (0, 1):
            found += [
                row("plain", prompt, [90, 100, 110], mode=mode),
                row("prompt_lookup", prompt, [100, 120, 150], [1, 2], mode=mode),
                row("domino", prompt, [180, 200, 260], [4, 2, 3], mode=mode, phases=PHASES_MS),
            ]
    return found
