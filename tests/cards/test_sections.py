"""Cards: metadata that huggingface_hub reads, sections that are merged, and numbers that are found wrong."""

from __future__ import annotations

import re

import pytest
from huggingface_hub import EvalResult, ModelCard, metadata_load

from hf_domino import DominoConfig
from hf_domino._common.run_record import Run
from hf_domino.cards.render import render_card
from hf_domino.cards.sections import mark, merge_card, read_sections

RESULTS = "## Results\n\n| | speed-up |\n|---|---:|\n| plain | 1.00 x |\n| **Domino** | 2.00 x |"
MINE = """---
# a comment
license: mit
base_model: org/name
pipeline_tag: text-generation
library_name: transformers
tags:
- mine
- domino
my_key:
  inner: 1
model-index:
- name: mine
  results:
  - task: {type: text-generation}
    dataset: {name: d, type: d}
    metrics:
    - {type: accuracy, value: 0.5}
---
# Mine

My words, <!-- a comment --> and more.
"""


def card(**fields):
    return render_card(DominoConfig(), **({"name": "me/drafter", "target": "Qwen/Qwen3-8B"} | fields))


def test_metadata_is_what_the_hub_reads(tmp_path):
    given = {"license": "mit", "datasets": ["me/data"], "language": "en", "tags": ["mine"]}
    path = tmp_path / "README.md"
    path.write_text(card(metadata=given, results=RESULTS))
    assert metadata_load(path) == {
        "base_model": "Qwen/Qwen3-8B",
        "datasets": ["me/data"],
        "language": "en",
        "library_name": "hf_domino",  # not in huggingface.js, so no snippet of another library is shown
        "license": "mit",
        "tags": ["speculative-decoding", "draft-model", "domino", "mine"],
    }  # no pipeline_tag, and without rows no model-index
    assert ModelCard.load(path).data.eval_results is None


@pytest.mark.parametrize(
    ("target", "base_model", "shown"),
    [("org/name-1.7B", "org/name-1.7B", '"org/name-1.7B"'), ("/some/folder/name", None, '"name"')],
)
def test_only_a_name_on_the_hub_is_a_base_model(target, base_model, shown):
    text = card(target=target)
    assert ModelCard(text).data.base_model == base_model
    assert f"from_pretrained({shown}, dtype" in text
    assert "/some/folder" not in text


def test_the_card_says_what_the_configuration_does():
    fields = {"block_size": 8, "shift_label": False, "projector_type": "dflash", "target_revision": "abc123"}
    text = render_card(DominoConfig(**fields), name="mine", target=None)
    assert "proposes up to 7 tokens" in text
    assert "GRU" not in text
    assert "at commit `abc123` (36 layers, hidden size 4,096" in text
    assert re.search(r"^- SGLang [\d. to]+ accepts its export\.$", text, re.MULTILINE)
    domino = render_card(DominoConfig(pure_draft_prefix_len=0), name="mine", target=None)
    assert re.search(r"^- SGLang .* does not accept it: pure_draft_prefix_len must be 1\.$", domino, re.MULTILINE)
    assert ModelCard(text).data.tags[-1] == "dflash"
    assert list(read_sections(text)) == ["usage", "serving", "limits", "citation"]


@pytest.mark.parametrize(
    ("fields", "is_by_plugin"),
    [
        ({"projector_type": "dspark"}, False),
        ({"projector_type": "dflash2", "conv_kernel_size": 2, "shift_label": False}, False),
        ({"projector_type": "dflash"}, True),
        ({}, True),
    ],
)
def test_the_card_says_who_needs_the_plugin(fields, is_by_plugin):
    text = render_card(DominoConfig(**fields), name="mine", target=None)
    verdict = "accepts its export with hf_domino's plugin" if is_by_plugin else "accepts its export"
    assert re.search(rf"^- vLLM [\d. to]+ {verdict}\.$", text, re.MULTILINE)


def test_a_kind_without_export_says_so():
    fields = {"num_hidden_layers": 1, "shift_label": True, "pure_draft_prefix_len": 0}
    text = render_card(DominoConfig(projector_type="eagle3", **fields), name="mine", target=None)
    assert "\n`hf-domino export` is not available for this drafter. " in text


def test_the_users_text_and_keys_stay():
    merged = merge_card(MINE, card(run=Run(steps=7), metadata={"license": "apache-2.0"}))
    data = ModelCard(merged).data
    assert (data.license, data.base_model, data.pipeline_tag) == ("mit", "org/name", "text-generation")
    assert data["my_key"] == {"inner": 1}
    assert data.eval_results[0].metric_value == 0.5
    assert data.tags == ["mine", "domino", "speculative-decoding", "draft-model"]
    assert data.library_name == "hf_domino"
    assert "# Mine\n\nMy words, <!-- a comment --> and more.\n" in merged
    assert "# drafter" not in merged
    again = merge_card(merged, card(results=RESULTS, metadata={"license": "apache-2.0"}), wins=["license"])
    assert ModelCard(again).data.license == "apache-2.0"
    assert list(read_sections(again)) == ["usage", "serving", "results", "training", "limits", "citation"]
    assert merge_card(again, again) == again


def test_a_card_of_another_drafter_says_nothing_of_the_first():
    measured = EvalResult("text-generation", "hf-domino bench", "prompts", "speed_up", 2.0)
    metadata = {"tags": ["mine"], "model_name": "drafter", "eval_results": [measured]}
    first = card(results=RESULTS, metadata=metadata)
    other = render_card(DominoConfig(projector_type="dflash"), name="me/drafter", target="Qwen/Qwen3-8B")
    merged = ModelCard(merge_card(first, other))
    assert merged.data.tags == ["speculative-decoding", "draft-model", "mine", "dflash"]
    assert merged.data.eval_results is None
    assert "model_name" not in str(merged.data)
    assert merged.text == ModelCard(other).text


def test_text_between_sections_stays_where_it_is():
    text = card(results=RESULTS).replace("<!-- hf_domino:begin limits", "Between.\n\n<!-- hf_domino:begin limits")
    merged = merge_card(text.replace("\n", "\r\n"), card(results=RESULTS.replace("2.00", "3.00")))
    assert merged == text.replace("2.00 x", "3.00 x")


def test_a_card_of_metadata_alone_gets_the_whole_text():
    merged = merge_card("---\nlicense: mit\n---\n", card())
    assert ModelCard(merged).text == ModelCard(card()).text
    assert ModelCard(merged).data.license == "mit"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- hf_domino:begin results -->\nopen",
        "<!-- hf_domino:end results -->",
        f"{mark('results', 'once')}\n{mark('results', 'twice')}",
        "<!-- hf_domino:begin results -->\n<!-- hf_domino:end limits -->",
    ],
)
def test_broken_markers_are_refused(text):
    with pytest.raises(ValueError, match=r"markers must be .* got '<!-- hf_domino:.* results"):
        merge_card(f"# Mine\n\n{text}\n", card())


def test_metadata_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match=r"the card's metadata must be YAML between two lines of ---, got .*line 2"):
        merge_card("---\nlicense: mit\ntags: [a\n---\n# Mine\n", card())
