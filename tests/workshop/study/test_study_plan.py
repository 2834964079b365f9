"""The study's file: what it compares, and what is wrong in one of one's own."""

from __future__ import annotations

import pytest
import study_rows
import yaml
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

from hf_domino import DominoConfig
from hf_domino.pair import find_pair
from recipes.smollm2 import RECIPE
from study.plan import STUDY_FILE, Run, load_study
from study.run import ALWAYS, GROUPS

KINDS = STUDY_FILE.with_name("kinds.yaml")


def shapes_of(study, output):
    """The configuration of each variant's drafter for the bundled target."""
    folder, shapes = find_pair(), {}
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for name, variant in study.variants.items():
        fields = study.base | variant.changes | ALWAYS | {"output_dir": str(output)}
        _, shape, _, args = HfArgumentParser(GROUPS).parse_dict(fields)  # refuses a field that it does not know
        shapes[name] = DominoConfig.for_target(config, tokenizer, **shape.overrides())
        assert args.walk_rows == 0
    return shapes


def test_every_variant_is_a_training_of_the_bundled_target(tmp_path):
    study = load_study()
    shapes = shapes_of(study, tmp_path)
    assert (shapes["block_16"].num_draft_tokens, shapes["domino"].num_draft_tokens) == (16, 8)
    assert shapes["captured_1"].target_layer_ids == [9]
    for name, twin in (("domino", "dflash"), ("block_16", "dflash_16")):
        own, other = (study.base | study.variants[each].changes for each in (name, twin))
        assert {field for field in own if own[field] != other[field]} == {"projector_type"}


def test_every_kind_is_a_training_of_the_bundled_target(tmp_path):
    for name, shape in shapes_of(load_study(KINDS), tmp_path).items():
        assert shape.projector_type == name.split("_")[0]


def test_the_study_of_smollm2_is_its_recipe_but_for_what_it_varies(tmp_path):
    study, recipe = load_study(RECIPE.with_name("smollm2_study.yaml")), yaml.safe_load(RECIPE.read_text())
    varied = {field for variant in study.variants.values() for field in variant.changes}
    assert {field for field, value in study.base.items() if recipe.get(field) != value} <= {*varied, "use_cpu"}
    for variant in study.variants.values():
        fields = study.base | variant.changes | ALWAYS | {"output_dir": str(tmp_path)}
        _, shape, _, args = HfArgumentParser(GROUPS).parse_dict(fields)
        assert args.per_device_train_batch_size * args.num_anchors == 192
        assert shape.overrides()["draft_vocab_size"] == recipe["draft_vocab_size"]


def test_the_core_has_three_seeds_and_the_rest_one():
    study = load_study()
    several = [name for name, variant in study.variants.items() if variant.seeds > 1]
    assert {study.variants[name].seeds for name in several} == {3}
    assert len(study.runs()) == 3 * len(several) + len(study.variants) - len(several)
    assert several == list(study.variants)[: len(several)], "the core is trained first"


def test_each_variant_changes_something_and_says_what_it_asks():
    variants = load_study().variants
    assert not variants.pop("domino").described()
    assert all(variant.described() and variant.question for variant in variants.values())


def test_runs_are_chosen_by_name_and_seed(tmp_path):
    study = study_rows.study(tmp_path)
    assert study.runs(["layers_1", "dflash"], [4]) == [Run("dflash", 4), Run("layers_1", 4)]
    assert [run.name for run in study.runs(["layers_1"])] == ["layers_1-0"]
    with pytest.raises(ValueError, match=r"--only must be among domino, dflash.* got 'layers_2'"):
        study.runs(["layers_2"])
    with pytest.raises(ValueError, match="--budget must be among small, large, got 'huge'"):
        study.budget("huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("variants:", "variant:"), "must hold base, budgets, variants"),
        (("texts: 3}", "texts: 3, rows: 0}"), "rows of budget small must be a whole number .* got 0. Leave"),
        (("steps: 2, ", ""), "steps of budget small must be a whole number above 0, got None"),
        (("steps: 2, ", "steps: 2, seeds: 1, "), "of budget small must be among steps, texts, rows, got 'seeds'"),
        (("text: greedy", "text: mine"), "text of greedy_text must be among mixed, greedy, sampled, plain, got 'mine'"),
        (("text: greedy", "effort: 0"), "effort of greedy_text must be above 0, got 0"),
        (("backbone_of: dflash", "backbone_of: layers_1"), "backbone_of of head_only must be a variant that"),
        (("against: dflash", "against: nothing"), "against of head_only must be a variant"),
    ],
)
def test_a_study_that_is_not_one(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        study_rows.study(tmp_path, study_rows.STUDY.replace(*change))
