"""`hf-domino explain`: a page with the text of plain generation, by who wrote each token, that needs nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

from hf_domino.cli import main as cli
from hf_domino.evaluation.benchmark.prompts import inputs_of
from hf_domino.evaluation.trace import LOOKUP, RECYCLING, TARGET, trace
from hf_domino.pair import load_pair

LINES = "def f(x):\n    return x < 1 & x\n\n\n" * 3
WRITERS = {"drafter", "recycling", "lookup", "target"}
VOID = {"meta"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """The answer's tokens with their writers, the notes, the tables, and all attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tokens, self.notes, self.attributes = [], [], [], []
        self.bars, self.unclosed = [], []
        self.prompt = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, found.get("class")))
        if found.get("class") == "note":
            self.notes.append("")
        if "style" in found:
            self.bars.append(float(re.fullmatch(r"width: (\d+\.\d)%", found["style"])[1]))

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.open.pop()
        else:
            self.unclosed.append(tag)

    def handle_data(self, data):
        classes = [name for _, name in self.open]
        if "note" in classes:
            self.notes[-1] += data
        elif "text" in classes and classes[-1] in WRITERS:
            self.tokens.append((data, classes[-1]))
        elif classes[-1:] == ["prompt"]:
            self.prompt += data


@pytest.fixture(scope="module")
def explained(tiny_pair_folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    flags = ["--target", str(tiny_pair_folder), "--threads", "1", "--max-new-tokens", "40", "--lookup-tokens", "8"]
    assert cli.main(["explain", LINES, "--html", str(file), *flags]) == 0
    return file


def test_the_page_holds_the_text_of_plain_generation(explained, tiny_pair_folder):
    pair = load_pair(tiny_pair_folder)
    inputs = pair.tokenizer(LINES, return_tensors="pt")
    output = pair.target.generate(**inputs, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    page = Page(explained.read_text(encoding="utf-8"))
    assert "".join(text for text, _ in page.tokens) == pair.tokenizer.decode(output, skip_special_tokens=True)
    assert page.prompt == "\n" + LINES  # browsers drop a newline that follows <pre>
    assert page.unclosed == []
    assert [tag for tag, _ in page.open] == []
    writers = {writer for _, writer in page.tokens}
    assert {"target", "lookup"} <= writers


def test_each_round_says_what_was_proposed_and_bars_stay_inside(explained):
    page = Page(explained.read_text(encoding="utf-8"))
    assert page.notes[0].startswith("The prompt was read")
    assert len(page.notes) > 2
    for number, note in enumerate(page.notes[1:], start=1):
        assert note.startswith(f"Round {number}: ")
        found = re.search(r"proposed (\d+), (\d+) accepted", note)
        assert found or "without proposals" in note
        if found:
            assert (int(found[1]) > int(found[2])) == ("Not accepted: " in note)
    assert all(0 <= width <= 100 for width in page.bars)
    assert page.bars.count(100.0) >= 2  # the longest bar of the speeds, and of the phases


def test_it_loads_nothing_and_can_be_read_without_colours(explained):
    text = explained.read_text(encoding="utf-8")
    assert {name for name, _ in Page(text).attributes} & {"src", "href", "srcset", "onclick"} == set()
    assert not re.search(r"url\(|@import|https?:|<script", text)
    styles = re.findall(r"\.(\w+) \{[^}]*text-decoration-style: (\w+)", text)
    assert len({style for _, style in styles}) == len(styles) == 3
    assert {name for name, _ in styles} == WRITERS - {"target"}
    assert "prefers-color-scheme: dark" in text


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_answer(explained, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    shown = subprocess.run([BROWSER, *flags, explained.as_uri()], capture_output=True, text=True, timeout=60).stdout
    assert Page(shown).tokens == Page(explained.read_text(encoding="utf-8")).tokens


@pytest.mark.parametrize("kind", ["drafter", "recycling"])
def test_a_trace_accounts_for_every_token(tiny_pair_folder, kind):
    pair = load_pair(tiny_pair_folder)
    if kind == RECYCLING:
        pair = pair.recycled()
    inputs = inputs_of(pair, [{"text": LINES}])
    arguments = {"max_new_tokens": 40, "do_sample": False}
    output = pair.target.generate(**inputs, **arguments)[0, inputs["input_ids"].shape[1] :].tolist()
    found = trace(pair, inputs, arguments | {"prompt_lookup_num_tokens": 6})
    assert [token for each in found.rounds for token in each.tokens] == output
    assert sum(map(found.count, WRITERS)) == len(output)
    assert kind == RECYCLING or found.count(LOOKUP) > 0
    assert {each.proposer for each in found.rounds} <= {kind, LOOKUP, TARGET}
    lengths = [len(each.tokens) for each in found.rounds[1:]]
    assert lengths == found.stats.rows[0]
    assert [each.num_proposed for each in found.rounds[1:]] == found.stats.proposed[0]
    for each in found.rounds[:-1]:
        assert each.num_accepted == len(each.tokens) - 1
    assert found.stats.phases["target_forward"] > 0


def test_sampled_calls_are_traced_with_their_seed(tiny_pair_folder):
    pair = load_pair(tiny_pair_folder)
    inputs = inputs_of(pair, [{"text": LINES}])
    arguments = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8}
    torch.manual_seed(3)
    output = pair.target.generate(**inputs, **arguments)[0, inputs["input_ids"].shape[1] :].tolist()
    found = trace(pair, inputs, arguments, seed=3)
    assert [token for each in found.rounds for token in each.tokens] == output


def test_a_page_that_cannot_be_written_is_named_before_any_work(tiny_pair_folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    flags = ["--target", str(tiny_pair_folder), "--html", str(tmp_path / "file" / "page.html")]
    assert cli.main(["explain", *flags]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert "--html" in said
    assert "loading" not in said
    assert cli.main(["explain", *flags[:2], "--html", str(tmp_path)]) == cli.USER_ERROR
    assert f"--html must be a file, got '{tmp_path}'. Name one in it, such as page.html." in capsys.readouterr().err


def test_a_page_in_a_new_folder_is_written_and_its_place_said(tiny_pair_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--target", str(tiny_pair_folder), "--threads", "1", "--max-new-tokens", "4"]
    assert cli.main(["explain", LINES, "--html", "new/folder/page.html", *flags]) == 0
    file = tmp_path / "new/folder/page.html"
    assert file.is_file()
    assert f"page: {file} (open it in a browser)" in capsys.readouterr().err
