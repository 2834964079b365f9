"""What Python's help and a command's help say of an option is one text."""

import argparse

import pytest

from hf_domino._common.options import add_flags
from hf_domino.cli.train import OWNERS
from hf_domino.data.settings import WritingSettings
from hf_domino.evaluation.benchmark.options import MEASURED, TEXTS, BenchOptions
from hf_domino.training import DominoTrainingArguments
from hf_domino.training.fields import TrainingFields


def parser_of(options, title=None):
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, options, title)
    return parser


@pytest.mark.parametrize(
    ("documented", "options"), [(WritingSettings, WritingSettings), (DominoTrainingArguments, TrainingFields)]
)
def test_the_docstring_and_the_flags_say_the_same(documented, options):
    flags = parser_of(options)._actions
    assert len(flags) > 10
    arguments, raised = documented.__doc__.partition("Args:")[2].partition("Raises:")[::2]
    assert [flag.dest for flag in flags if f"    {flag.dest} (`" not in arguments] == []
    assert [flag.dest for flag in flags if f"): {flag.help}" not in arguments] == []
    assert (documented is DominoTrainingArguments) is bool(raised)
    assert "max_length (`int`, *optional*, defaults to `" in arguments


def test_flags_are_read_as_their_fields_types():
    given = ["--num-examples", "7", "--temperatures", "0", "0.5", "--min-distinct", "0", "--plain", "--system", "S"]
    read = parser_of(WritingSettings).parse_args([*given, "--chat-template-kwargs", '{"a": 1}'])
    settings = WritingSettings(**vars(read))
    assert (settings.rows, settings.temperatures, settings.min_distinct) == (7, [0.0, 0.5], 0.0)
    assert (settings.plain, settings.keep_unended, settings.system) == (True, False, "S")
    assert settings.chat_template_kwargs == {"a": 1}
    assert WritingSettings(**vars(parser_of(WritingSettings).parse_args([]))) == WritingSettings()


def test_a_group_has_its_own_flags():
    groups = [{flag.dest for flag in parser_of(BenchOptions, title)._actions} for title in (TEXTS, MEASURED)]
    assert "prompts" in groups[0] - groups[1]
    assert "methods" in groups[1] - groups[0]


def test_help_of_a_training_lists_every_field_of_ours():
    shown = {flag.dest for owners in OWNERS.values() for owner in owners for flag in parser_of(owner)._actions}
    assert {"target", "train_file", "block_size", "muon_learning_rate"} <= shown
