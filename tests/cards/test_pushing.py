"""A drafter that is pushed by Transformers' own means takes its card along, not the generic one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import build_drafter
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import modeling_utils
from transformers.utils import hub

from hf_domino import DominoDraftModel
from hf_domino.cards.render import render_card
from hf_domino.cards.sections import read_sections


class FakeHub:
    """What Transformers asks of the Hub to push: keeps the text of the card that is committed."""

    card = None

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, operations, **kwargs):
        self.files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
        self.card = Path(self.files["README.md"]).read_text()
        assert {"config.json", "model.safetensors"} <= set(self.files)

    def load_card(self, repo_id, **kwargs):
        if self.card is None:
            raise EntryNotFoundError("there is no card")
        return ModelCard(self.card)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeHub()
    for module in (hub, modeling_utils):
        monkeypatch.setattr(module, "hf_api", lambda: fake)
    monkeypatch.setattr(hub.ModelCard, "load", fake.load_card)
    return fake


@pytest.fixture
def folder(tiny_qwen3, tmp_path):
    """A drafter's folder, with a card that tells results."""
    drafter = build_drafter(tiny_qwen3)
    drafter.save_pretrained(tmp_path)
    text = render_card(drafter.config, name="mine", target="org/target", results="## Results\n\n2.00 x")
    (tmp_path / "README.md").write_text(f"{text}\nMy words.\n")
    return tmp_path


def test_a_new_drafter_gets_our_card_without_results(fake, tiny_qwen3, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("Of whatever lies in the working folder.")
    monkeypatch.chdir(tmp_path)
    build_drafter(tiny_qwen3).push_to_hub("me/drafter", tags=["mine"])
    data = ModelCard(fake.card).data
    assert data.library_name == "hf_domino"
    assert data.tags == ["mine", "speculative-decoding", "draft-model", "domino"]
    assert "automatically generated" not in fake.card
    assert "working folder" not in fake.card
    assert 'DominoDraftModel.from_pretrained("me/drafter"' in fake.card
    assert "results" not in read_sections(fake.card)


@pytest.mark.parametrize("save", [False, True])
def test_the_card_beside_the_weights_is_merged_with_the_repositorys(fake, folder, save):
    drafter = DominoDraftModel.from_pretrained(folder)
    fake.card = "---\nlicense: mit\nlibrary_name: transformers\n---\n# Theirs\n\nTheir words.\n"
    if save:
        drafter.save_pretrained(folder, push_to_hub=True, repo_id="me/drafter")
        assert (folder / "README.md").read_text() == fake.card
    else:
        drafter.push_to_hub("me/drafter")
    data = ModelCard(fake.card).data
    assert (data.license, data.base_model, data.library_name) == ("mit", "org/target", "hf_domino")
    assert read_sections(fake.card)["results"] == "## Results\n\n2.00 x"
    assert 'DominoDraftModel.from_pretrained("me/drafter"' in fake.card
    assert "Their words." in fake.card


@pytest.mark.parametrize("standalone", [True, False])
def test_a_bundle_goes_where_it_is_asked_for(fake, tiny_qwen3, standalone):
    build_drafter(tiny_qwen3).push_to_hub("me/drafter", standalone=standalone)
    assert ("custom_generate/generate.py" in fake.files) is standalone


def test_results_of_other_weights_do_not_stay(fake, folder, tiny_qwen3):
    DominoDraftModel.from_pretrained(folder).push_to_hub("me/drafter")
    assert "results" in read_sections(fake.card)
    assert "My words." in fake.card
    build_drafter(tiny_qwen3).push_to_hub("me/drafter")
    assert "results" not in read_sections(fake.card)
    assert "My words." in fake.card
