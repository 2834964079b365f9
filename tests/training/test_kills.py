"""A training that is killed, at any moment and in any process, ends with the same bytes when it is started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Forked from one process that has imported everything and has trained nothing.
SCRIPT = """
import json, os, random, signal, socket, sys, time, torch
import transformers.modeling_utils
from transformers import TrainerCallback
from pathlib import Path
from hf_domino.cli.main import main
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)
work, world, num_kills, flags = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]

def start(folder, before=lambda: None, *more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if pids[-1]:
            continue
        if world > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                           "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        try:
            before()
            os._exit(main(["train", *flags, *more, f"--output_dir={folder}"]))
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(99)
    return pids

def wait(pids, seconds=120):
    codes, until = {}, time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            if (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
        if time.monotonic() > until:
            [os.kill(pid, signal.SIGKILL) for pid in set(pids) - set(codes)]
        time.sleep(0.005)
    return [codes[pid] for pid in pids]

def die_inside_a_save():
    cls = transformers.modeling_utils.PreTrainedModel
    save = cls.save_pretrained
    def dying(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        if "checkpoint-4" in str(folder):
            path = Path(folder) / "model.safetensors"
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
    cls.save_pretrained = dying

class Asked(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3.5)  # for which Transformers waits before it saves

def ask_to_stop():
    original = DominoTrainer.__init__
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(Asked())
    DominoTrainer.__init__ = init

def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("checkpoint-*"))

def newest(folder):
    return max([int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")], default=0)

def is_alive(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

moments = random.Random(int(time.time()))
report = {"whole": wait(start(work / "whole")), "deaths": []}
if not num_kills:
    report["deaths"].append([wait(start(work / "killed", die_inside_a_save)), left(work / "killed")])
    if world == 1:
        report["asked"] = wait(start(work / "asked", ask_to_stop)), left(work / "asked")
        report["asked again"] = wait(start(work / "asked"))
for _ in range(num_kills):
    pids = start(work / "killed")
    victim, until = moments.choice(pids), newest(work / "killed") + moments.randint(0, 5)
    while is_alive(victim) and newest(work / "killed") < until:
        time.sleep(0.002)
    time.sleep(moments.uniform(0, 0.2))
    if is_alive(victim):
        os.kill(victim, signal.SIGKILL)  # the others find their peer gone
    report["deaths"].append([wait(pids, 20), left(work / "killed")])
report["again"] = wait(start(work / "killed"))
(work / "report.json").write_text(json.dumps(report))
"""


def run(saved_pair, work: Path, num_processes: int, num_kills: int) -> dict:
    """Train whole, and killed a number of times (0: once, inside a save) and then to the end; compare the bytes."""
    (work / "train.jsonl").write_text('{"input_ids": [4, 5, 6, 7, 8, 9, 10, 11]}\n{"input_ids": [9, 8, 7, 6, 5]}\n' * 8)
    fields = {
        "target": saved_pair[0], "train_file": work / "train.jsonl", "num_hidden_layers": 1, "block_size": 4,
        "max_steps": 30 if num_kills else 5, "save_steps": 1 if num_kills else 2, "save_total_limit": 2,
        "per_device_train_batch_size": 2, "num_anchors": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in fields.items()]
    flags += ["--ddp_backend=gloo"] if num_processes > 1 else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels/torch-ext")] + sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(work), str(num_processes), str(num_kills), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((work / "report.json").read_text())
    assert report["whole"] == report["again"] == [0] * num_processes, done.stderr[-3000:]
    whole, killed, asked = (work / name / "model.safetensors" for name in ("whole", "killed", "asked"))
    assert whole.read_bytes() == killed.read_bytes()
    assert not asked.exists() or whole.read_bytes() == asked.read_bytes()
    return report


@pytest.mark.slow
def test_a_run_is_killed_inside_a_save_and_one_is_asked_to_stop(saved_pair, tmp_path):
    report = run(saved_pair, tmp_path, num_processes=1, num_kills=0)
    assert report["deaths"] == [[[-9], ["checkpoint-2", "checkpoint-4"]]]
    codes, left = report["asked"]
    assert (codes, report["asked again"]) == ([130], [0])
    assert "checkpoint-3" in left  # which `save_steps` would not save


@pytest.mark.slow
def test_one_of_two_processes_is_killed_inside_a_save(saved_pair, tmp_path):
    report = run(saved_pair, tmp_path, num_processes=2, num_kills=0)
    ((first, other), left), *_ = report["deaths"]
    assert first == -9
    assert other not in (0, -9)  # it found its peer gone, and did not wait for it
    assert left == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_kills_at_random_moments(num_processes, saved_pair, tmp_path):
    deaths = run(saved_pair, tmp_path, num_processes, num_kills=8)["deaths"]
    print(deaths)
    assert sum(-9 in codes and bool(left) for codes, left in deaths) >= 3  # the others came before or after training
