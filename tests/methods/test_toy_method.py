"""A method that is one file of the tests and one registered line does all that the methods of the package do."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from calls_of_methods import SAMPLED, calls, generate
from toy_method import ToyConfig, ToyModel
from transformers import AutoConfig, AutoModel

import hf_domino
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.methods import METHODS, register
from hf_domino.training import DominoTrainer, DominoTrainingArguments

SIZES = {"projector_type": "toy", "block_size": 4, "draft_length": "full"}
SHAPES = {"chains": {"draft_tree_size": None}, "trees": {"draft_tree_size": 7}}


@pytest.fixture(autouse=True)
def toy():
    register(ToyModel)
    yield
    del METHODS["toy"]


@pytest.fixture
def drafter(target):
    return DominoDraftModel(DominoConfig.for_target(target.config, **SIZES)).eval()


def test_it_is_made_by_its_name(drafter):
    assert type(drafter) is ToyModel
    assert type(drafter.config) is ToyConfig
    assert isinstance(drafter, DominoDraftModel)
    assert isinstance(drafter.config, DominoConfig)
    assert drafter.config.num_draft_tokens == 4
    assert not {"emb_dim", "markov_rank", "conv_kernel_size"} & drafter.config.to_dict().keys()


def test_it_trains(target, drafter, tmp_path):
    ids = torch.arange(4, 28) % 7 + 4
    rows = [{"input_ids": ids.tolist(), "loss_mask": [1] * len(ids)}] * 4
    arguments = DominoTrainingArguments(
        str(tmp_path), max_steps=20, num_anchors=8, learning_rate=1e-2, report_to="none", use_cpu=True, walk_rows=0,
        logging_steps=1, save_strategy="no",
    )  # fmt: skip
    before = drafter.state_dict()["fc.weight"].clone()
    trainer = DominoTrainer(drafter, target, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(trainer.drafter.state_dict()["fc.weight"], before)


def test_it_is_saved_and_loaded(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is ToyConfig
    assert config.architectures == ["DominoDraftModel"]
    for loaded in (DominoDraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is ToyModel
        assert loaded.config.to_dict() == config.to_dict()
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_plain(target, drafter, shape, options, batch_size):
    ids, more = calls(batch_size)
    view = drafter.view(**SHAPES[shape])
    texts = generate(target, view, ids, **options, **more)
    assert torch.equal(texts, generate(target, None, ids, **options, **more))
    assert view.stats.num_drafted > 0


def test_texts_in_a_fixed_shape_are_plain(target, drafter):
    ids, _ = calls(1)
    lengths = []
    for cache in ({}, {"cache_implementation": "static"}):
        assert torch.equal(generate(target, drafter, ids, **cache), generate(target, None, ids))
        lengths.append(drafter.stats.acceptance_lengths)
    assert lengths[0] == lengths[1]


def test_a_draft_vocabulary(target, drafter):
    ids, _ = calls(1)
    assert torch.equal(generate(target, drafter.restricted(range(3, 40)), ids), generate(target, None, ids))


def test_what_it_lacks_is_refused_by_name(drafter, tmp_path):
    with pytest.raises(ValueError, match=r"the drafter's method with export must be .*got 'Toy'\. No other project"):
        drafter.export(tmp_path / "out")
    with pytest.raises(ValueError, match=r"toy_scale must be above 0, got 0"):
        drafter.view(toy_scale=0)
    with pytest.raises(ValueError, match=r"markov_head_type of a Toy drafter must be left out"):
        DominoConfig(**SIZES, num_hidden_layers=1, markov_head_type="gated")
    with pytest.raises(ValueError, match=r"toy_scale of a Domino drafter must be left out"):
        DominoConfig(toy_scale=2.0)


def test_defaults_that_a_factory_makes(target):
    domino = DominoConfig.for_target(target.config)
    configs = [domino.changed(projector_type="toy") for _ in range(2)]
    assert [config.toy_notes for config in configs] == [[], []]
    assert configs[0].toy_notes is not configs[1].toy_notes
    with pytest.raises(ValueError, match=r"toy_notes of a Domino drafter must be left out"):
        DominoConfig(toy_notes=["a"])


# Packages and modules that may name methods, and why.
MAY_NAME = {
    "methods": "the methods themselves",
    "formats": "layouts of other projects",
    "serving": "the plugin that brings Domino to vLLM",
    "cards/methods.py": "what cards say of each",
    "evaluation/benchmark": "names of rows that are published",
    "publishing/hub.py": "tags and names of other projects on the Hub",
    "integration/auto_classes.py": "the model type, which is the package's",
    "configuration/domino_config.py": "the model type, and the method of a configuration that names none",
    "evaluation/trace.py": "who wrote a token, as a page shows it",
    "pair.py": "the drafter that needs no files, by its name in commands",
    "cli/flags.py": "z-lab's engine, dflash",
    "__init__.py": "the public function of token recycling",
}


def test_nothing_else_names_a_method():
    root = Path(hf_domino.__file__).parent
    classes = {each.__name__ for model in METHODS.values() for each in (model, model.config_class)}
    named = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).as_posix()
        if any(place == each or place.startswith(f"{each}/") for each in MAY_NAME):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            words = {getattr(node, field, None) for field in ("id", "attr", "name", "value") if hasattr(node, field)}
            strings = {word for word in words if isinstance(word, str)}
            if strings & (classes | set(METHODS)) and not isinstance(node, ast.FunctionDef):
                named.append(f"{place}:{getattr(node, 'lineno', 0)} {sorted(strings)}")
    assert named == []
