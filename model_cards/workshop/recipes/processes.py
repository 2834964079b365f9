"""Commands of `hf-domino` and modules of ours, in processes of their own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from hf_domino._common.provenance import provenance
from hf_domino.evaluation.results import Result, append_results

# glibc takes large pieces of memory in huge pages, and keeps them: without, a training step had 25 times the page
# faults and took a third longer on two cores. Other systems do not look at these variables.
HUGE_PAGES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}
HF_DOMINO = "hf_domino.cli"
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))}


def torchrun(processes: int, module: str, *arguments: str) -> None:
    """Run a module in several processes by torchrun, each on one thread and with huge pages."""
    launch = ("--standalone", "--nproc-per-node", str(processes), "-m", module)
    memory = {name: value for name, value in HUGE_PAGES.items() if name not in os.environ}
    run_command("torch.distributed.run", *launch, *arguments, environment={"OMP_NUM_THREADS": "1"} | memory)


def kind_flags(projector_type: str) -> tuple[str, str]:
    """Flags of `train` for a Domino drafter, or for its DFlash baseline, with the labels that engines expect of one."""
    return f"--projector_type={projector_type}", f"--shift_label={str(projector_type == 'domino').lower()}"


def run_command(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    """Run what `python -m` would, in a process of its own with some more variables."""
    found = os.environ | PATH | dict(environment or {})
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=found)


def run_stages(stages: Mapping[str, Callable[[], Path]], last: str | None = None, record: Path | None = None) -> None:
    """Run the stages of a recipe, or those up to `last`; `record` gets a line with the CPU time of each that ran."""
    if last is not None and last not in stages:
        raise ValueError(f"--stage must be one of {', '.join(stages)}, got {last!r}.")
    for name, make in stages.items():
        before = _cpu_seconds()
        try:
            result = make()
        finally:  # what was broken off took time, too
            minutes = round((_cpu_seconds() - before) / 60, 2)
            if record is not None and minutes:
                append_results(record, [Result(name, figures={"cpu_minutes": minutes}, provenance=provenance())])
        print(f"[{name}] {result}, after {minutes} CPU-minutes", flush=True)
        if name == last:
            break


def _cpu_seconds() -> float:
    """CPU time of this process and of those that it waited for."""
    spent = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in spent)
