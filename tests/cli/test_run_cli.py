"""Programs that `hf-domino run` starts: the drafter's target drafts in them, whoever calls `generate`."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import build_drafter
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_domino import DominoDraftModel, LookupMemory
from hf_domino.cli import main as cli
from hf_domino.pair import BUNDLED
from hf_domino.targets.identity import identify

STARTED = Path(__file__).with_name("started.py")
RUN = [sys.executable, "-m", "hf_domino.cli", "run"]
TRANSFORMERS = str(Path(sys.executable).with_name("transformers"))
CARDS = Path(__file__).parents[2] / "model_cards"


@pytest.fixture(scope="module")
def models(tiny_qwen3, tiny_tokenizer, tmp_path_factory):
    """Folders of a target, a copy of it, another model, and the drafter of the first."""
    place = tmp_path_factory.mktemp("models")
    folders = [place / name for name in ("target", "copied", "other", "drafter")]
    other = copy.deepcopy(tiny_qwen3)
    other.model.layers[0].mlp.up_proj.weight.data.neg_()
    for folder, model in zip(folders, (tiny_qwen3, tiny_qwen3, other), strict=False):
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
    drafter = build_drafter(tiny_qwen3)
    identify(type(tiny_qwen3).from_pretrained(folders[0])).record_in(drafter.config)
    drafter.save_pretrained(folders[3])
    return folders


@pytest.mark.slow
def test_a_program_drafts_by_an_adapter(models, tmp_path):
    """Its target is that of its training."""
    target, _, other, drafter = models
    adapted = get_peft_model(DominoDraftModel.from_pretrained(drafter), LoraConfig(r=2, target_modules=["fc"]))
    adapted.save_pretrained(tmp_path)
    identity = identify(AutoModelForCausalLM.from_pretrained(other)).to_dict()
    (tmp_path / "target.json").write_text(json.dumps(identity))
    script = "import sys, torch; from transformers import AutoModelForCausalLM as A; words = torch.tensor([[5, 6]])\n"
    script += "for name in sys.argv[1:]: A.from_pretrained(name).generate(words, max_new_tokens=2)"
    command = [*RUN, "--drafter", tmp_path, "python", "-c", script, target, other]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots()))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"hf_domino: {target} generates without a drafter: " in done.stderr
    assert f"hf_domino: {tmp_path} drafts for {other}." in done.stderr


def test_a_program_drafts_where_the_target_is_the_drafters(models, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('that of the user')")
    searched = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""), *map(str, roots())))
    *targets, drafter = models
    command = [*RUN, "--drafter", drafter.name, "--log-calls", "python", STARTED, *targets]
    environment = os.environ | {"PYTHONPATH": searched}
    done = subprocess.run(command, cwd=drafter.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith("that of the user\nall as it should be\n")
    said = [line for line in done.stderr.splitlines() if line.startswith("hf_domino: ")]
    assert [line for line in said if "drafts for" in line] == [
        f"hf_domino: {drafter} drafts for {folder}." for folder in targets[:2]
    ]
    (refused,) = [line for line in said if "without a drafter" in line]
    assert f"{targets[2]} generates without a drafter: the target must be target, for which the drafter" in refused
    assert len([line for line in said if line.startswith("hf_domino: 24 tokens in ")]) == 7


def test_with_recycling_every_model_drafts_and_a_later_program_remembers_what_it_wrote(models, tmp_path):
    target, _, other, drafter = models
    script = "import sys, torch, hf_domino; from transformers import AutoModelForCausalLM as A\n"
    script += "for name in sys.argv[1:]:\n"
    script += "  words, model = torch.tensor([[5, 6]]), A.from_pretrained(name)\n"
    script += "  model.generate(words, max_new_tokens=30, do_sample=False)\n"
    script += "print('rounds', hf_domino.attached(model).drafter.stats.num_rounds)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots()))}
    saved = tmp_path / "texts.safetensors"
    sizes = []
    for name, folders in (("recycling", (other, target)), (str(drafter), (target,))):
        command = [*RUN, "--drafter", name, "--memory", saved.name, "python", "-c", script, *folders]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for folder in folders:
            assert f"hf_domino: {name} drafts for {folder}." in done.stderr
        sizes.append(len(LookupMemory.load(saved)))
    assert sizes == [64, 96]
    assert int(done.stdout.split()[-1]) < 10, "without the memory, a random drafter needs more rounds"


def roots():
    """Where the packages lie, for a process of another folder."""
    return CARDS.parent, CARDS.parent / "kernels" / "torch-ext"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafter", "nowhere", "ls"], "--drafter must be a folder or a Hub name, got 'nowhere'"),
        (["--drafter", "{target}", "ls"], "this is no drafter of hf_domino"),
        (["--drafter", "{drafter}", "no-such", "-x"], "COMMAND must be a program and its arguments, got 'no-such -x'"),
        (
            ["--drafter", "{drafter}", "--memory", __file__, "ls"],
            "the file of a lookup memory must be a whole safetensors",
        ),
        (
            ["--drafter", "{drafter}", "--memory", f"{__file__}/m", "ls"],
            "--memory must be a folder that can be written",
        ),
        (["--drafter", "{drafter}"], "COMMAND must be a program and its arguments, got ''"),
        (["--drafter", "{drafter}", "--"], "COMMAND must be a program and its arguments, got ''"),
        (
            ["--drafter", "{drafter}", "python", "-I", "script.py"],
            "flags in COMMAND must be none of ('-I', '-E', '-S')",
        ),
        (["--drafter", "{drafter}", "--", "python", "-uE", "-m", "this"], "got '-E'. With it, Python imports nothing"),
        (["--drafter", "{drafter}", "python", "-W", "ignore", "-X", "dev", "-Sc", "pass"], "got '-S'"),
        (["--drafter", "{drafter}", "env", "A=1", "python3", "-I"], "got '-I'"),
    ],
)
def test_what_cannot_run_is_said_before_it_starts(words, said, models, capsys):
    names = {"target": models[0], "drafter": models[3]}
    assert cli.main(["run", *(word.format(**names) for word in words)]) == cli.USER_ERROR
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--", "python", "-c", "import sys; print(sys.argv[1:])", "-I"],
        ["python", "-u", "-W", "ignore", "-c", "import sys; print(sys.argv[1:])", "-I"],
    ],
)
def test_the_programs_own_flags_are_its_own(words, models, monkeypatch):
    """Also behind `--`."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    assert cli.main(["run", "--drafter", str(models[3]), *words]) == 0
    ((_, arguments, environment),) = started
    assert arguments == [word for word in words if word != "--"]
    assert environment["HF_DOMINO_DRAFTER"] == str(models[3])


def test_on_windows_the_command_waits_for_the_program(models, monkeypatch, capfd):
    """Where `execve` starts another process and ends this one."""
    windows = SimpleNamespace(platform="win32", executable=sys.executable)
    monkeypatch.setattr("hf_domino.cli.run.sys", windows)
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("the process was replaced"))
    code = "import os, sys; print(os.environ['HF_DOMINO_DRAFTER']); sys.exit(5)"
    assert cli.main(["run", "--drafter", str(models[3]), "python", "-c", code]) == 5
    assert capfd.readouterr().out.strip() == str(models[3])


def test_a_script_whose_first_line_isolates_python_is_refused(models, tmp_path, capsys):
    script = tmp_path / "script"
    for line, said in (("#!/usr/bin/python3 -sI", "got '-I'"), ("#!/usr/bin/env -S python -E", "got '-E'")):
        script.write_text(f"{line}\nprint(1)\n")
        script.chmod(0o755)
        assert cli.main(["run", "--drafter", str(models[3]), str(script)]) == cli.USER_ERROR
        assert said in capsys.readouterr().err


# --- a server ---------------------------------------------------------------------------------------------------


@contextmanager
def serving(log, *started_by):
    """Run `transformers serve` on loopback, and give a client; it ends with the block, and leaves nothing behind."""
    from openai import OpenAI

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots())), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as said:
        command = [*started_by, TRANSFORMERS, "serve", "--port", str(port), "--dtype", "float32"]
        server = subprocess.Popen(
            command, stdout=said, stderr=said, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
        )
    try:
        while server.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/health").close()
                break
            time.sleep(0.2)
        assert server.returncode is None, log.read_text()
        with OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def answers(client, target, other):
    """What a server answers, to requests of every form."""
    ask = {"model": str(target), "prompt": "def median(values):\n", "max_tokens": 32}
    asked = [{"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 4, "stop": ["return"]}]
    found = []
    for options in asked:
        found.append(client.completions.create(**ask, **options).choices[0].text)
        pieces = client.completions.create(**ask, **options, stream=True)
        found.append("".join(piece.choices[0].text for piece in pieces if piece.choices))
    told = {"model": str(target), "messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 24}
    found.append(client.chat.completions.create(**told).choices[0].message.content)
    pieces = client.chat.completions.create(**told, stream=True)
    found.append("".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices))
    found.append(client.completions.create(**ask | {"model": str(other), "prompt": "abc"}).choices[0].text)
    return found


CLIENT = """
import json, sys, urllib.request
data = json.dumps({"model": sys.argv[2], "prompt": "def ", "max_tokens": 400, "temperature": 1.0, "stream": True})
request = urllib.request.Request(sys.argv[1] + "completions", data.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request).readline(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("fastapi") is None, reason="no part of an environment made earlier")
@pytest.mark.skipif(not (CARDS / f"{BUNDLED}-domino").exists(), reason="the bundled pair is not in this checkout")
def test_transformers_serve_says_the_same_with_the_drafter(models, tmp_path):
    from openai import APIStatusError

    target, other = tmp_path / BUNDLED, models[2]
    shutil.copytree(CARDS / BUNDLED, target)
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}\n")
    with serving(tmp_path / "plain.log") as client:
        plain = answers(client, target, other)
    log = tmp_path / "drafted.log"
    with serving(log, *RUN, "--drafter", str(CARDS / f"{BUNDLED}-domino"), "--log-calls") as client:
        assert answers(client, target, other) == plain
        drafted = [line for line in log.read_text().splitlines() if "tokens a forward" in line]
        assert len(drafted) == len(plain) - 1
        arguments = [str(client.base_url), str(target)]
        killed = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdin=-1, stdout=-1)
        assert b"data: " in killed.stdout.readline()
        killed.kill()
        killed.wait()
        with pytest.raises(APIStatusError) as refused:
            client.completions.create(model=str(target), prompt="x", extra_body={"assistant_model": str(other)})
        assert "'assistant_model'" in refused.value.response.text
        chat = [TRANSFORMERS, "chat", str(target), str(client.base_url.copy_with(path="")), "max_new_tokens=24"]
        talk = {"input": "def f(x):\nn\n!exit\n", "env": {**os.environ, "HF_HUB_OFFLINE": "0"}}
        said = subprocess.run([*chat, "do_sample=False"], **talk, capture_output=True, text=True)
        assert [word for word in plain[6].split() if word.isalpha() and word not in said.stdout] == [], said
        assert answers(client, target, other) == plain
    text = log.read_text()
    assert text.count("drafts for") == text.count("generates without a drafter") == 1
    assert text.count("tokens a forward") == 2 * len(drafted) + 1  # the request that was cancelled ended early
