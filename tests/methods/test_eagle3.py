"""EAGLE-3 alone: what it keeps of a text, what it is trained on, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from calls_of_methods import PROMPTS, generate
from formulas import OPTIONS, PATHS_TOL, Formula, build

from hf_domino import DominoConfig
from hf_domino._common.run_record import Run
from hf_domino.decoding.drafting import DraftSession
from hf_domino.formats.loading import interpret
from hf_domino.targets.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.drafter_training import DrafterTraining
from hf_domino.training.evidence.record import recorded_arguments
from hf_domino.training.resuming import check_resumable


@pytest.fixture(params=OPTIONS)
def drafter(wide, request):
    return build(wide, request.param)


@pytest.fixture
def whole(wide):
    return build(wide, "whole")


def test_nothing_is_made_up_of_what_was_missed_between_turns(wide, drafter, rounds):
    trees, reference = drafter.view(draft_tree_size=7), Formula(drafter, wide)
    first = generate(wide, trees, PROMPTS[0][None], max_new_tokens=9, return_dict_in_generate=True)
    num_made, cache = len(rounds[-1][1]) - 1, first.past_key_values
    length = cache.get_seq_length()
    wide(PROMPTS[2][None], past_key_values=cache)  # the drafter sees nothing of it
    ids = torch.cat((first.sequences[:, :length], PROMPTS[2][None], PROMPTS[1][None]), dim=1)
    rounds.clear()
    options = {"max_new_tokens": 9}
    assert torch.equal(
        generate(wide, trees, ids, past_key_values=cache, **options), generate(wide, None, ids, **options)
    )
    _, text, paths, alpha = rounds[0]
    entries, _ = reference.begin(text)
    entries = entries[:num_made] + entries[length + 9 :]  # of the last states the tokens behind them are not known
    expected = reference.likeliest(entries, reference.last(entries), alpha, None, 7)
    assert paths == {path: pytest.approx(chance, rel=PATHS_TOL) for path, chance in expected.items()}


def test_nothing_of_a_draft_is_left_in_the_cache(wide, whole, monkeypatch):
    lengths, propose = [], DraftSession.propose

    def noting(self, prefixes, *args, **kwargs):
        found = propose(self, prefixes, *args, **kwargs)
        lengths.append((self._cache.lengths, self._cache.entries.lengths, [each - 1 for each in prefixes.lengths]))
        return found

    monkeypatch.setattr(DraftSession, "propose", noting)
    generate(wide, whole.view(draft_tree_size=None), PROMPTS[0][None])
    assert lengths
    assert all(states == entries == expected for states, entries, expected in lengths)


def test_blocks_side_by_side_read_the_text(wide, drafter):
    """As in training: the text's tokens, and the drafter's own states."""
    ids = torch.randint(4, 64, (2, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[3, 12, 17, -1], [0, 1, 19, -1]])
    view, reference = TargetModel(wide), Formula(drafter, wide)
    outputs = wide(ids, output_hidden_states=True, use_cache=False)
    states = [outputs.hidden_states[layer + 1] for layer in (0, 2)]
    found = drafter.draft_blocks(view, ids, drafter.fuse_context(states), anchors)
    assert found.shape == (2, 4, 4, 32)
    for row, index in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2)):
        anchor = int(anchors[row, index])
        text = ids[row, : anchor + 1].tolist()
        entries, state = reference.begin(text)
        for depth in range(4):
            torch.testing.assert_close(found[row, index, depth], state, rtol=PATHS_TOL, atol=PATHS_TOL)
            if anchor + depth + 1 < 20:
                entries, state = reference.go_on(entries, state, int(ids[row, anchor + depth + 1]))
            else:
                break
    without = drafter.draft_blocks(view, ids, None, anchors)
    assert without.shape == found.shape
    # Before the first token there is none.
    torch.testing.assert_close(without[1, 0], found[1, 0], rtol=PATHS_TOL, atol=PATHS_TOL)
    assert (without[1, 1] - found[1, 1]).abs().max() > PATHS_TOL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_output": "false"}, "norm_output in the checkpoint's config.json must be bool, got 'false'"),
        ({"attention_bias": True}, "attention_bias must be False, got True. .* cannot run"),
    ],
)
def test_a_released_one_that_computes_otherwise_is_refused(change, message):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    stored = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "rms_norm_eps": 1e-6, **sizes}
    stored |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "draft_vocab_size": None}
    assert interpret(stored)[1].projector_type == "eagle3"
    with pytest.raises(ValueError, match=message):
        interpret(stored | change)


def test_a_run_goes_on_with_the_same_formula_only(wide, tmp_path):
    whole, normed = (build(wide, "plain", norm_output=flag).config for flag in (False, True))
    args = DominoTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    whole.save_pretrained(tmp_path)
    Run(steps=1).save(tmp_path)
    check_resumable(tmp_path, whole, recorded_arguments(args, whole))
    with pytest.raises(ValueError, match=r"norm_output must be False, with which .* was trained, got True"):
        check_resumable(tmp_path, normed, recorded_arguments(args, normed))


def test_what_it_lacks_is_refused_by_name(wide, whole):
    methods = "Domino or DFlash or DSpark or DFlash 2 or DFly or XPress"
    with pytest.raises(ValueError, match=f"with cache_implementation='static' must be {methods}, got"):
        generate(wide, whole, PROMPTS[0][None], cache_implementation="static")
    with pytest.raises(ValueError, match="norm_output of a Domino drafter must be left out"):
        DominoConfig(norm_output=True)
    with pytest.raises(ValueError, match="fc_norm must be False with norm_before_fc=True, got True"):
        build(wide, "normed", fc_norm=True)


def test_weights_of_the_loss_fall_by_a_fifth_with_each_draft(wide, whole, tmp_path):
    view, arguments = TargetModel(wide), DominoTrainingArguments(str(tmp_path), report_to="none")
    batch = {"input_ids": torch.arange(12)[None], "loss_mask": torch.ones(1, 12), "anchors": torch.tensor([[2]])}
    DrafterTraining(whole, view, arguments).label(batch)
    torch.testing.assert_close(batch["weights"][0, 0], 0.8 ** torch.arange(4.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shift_label": False}, "shift_label of an EAGLE-3 drafter must be True, got False"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 drafter must be 1, got 2"),
        ({"pure_draft_prefix_len": 1}, "pure_draft_prefix_len of an EAGLE-3 drafter must be 0, got 1"),
        ({"gru_hidden_dim": 8, "emb_dim": 8}, "gru_hidden_dim, emb_dim of an EAGLE-3 drafter must be left out"),
        ({"target_layer_ids": [4]}, r"target_layer_ids must be unique and in \[0, 3\].*after the final norm"),
        ({"num_target_layers": None, "target_layer_ids": [-1]}, r"in \[0, ...\] \(num_target_layers=None"),
    ],
)
def test_fields_that_say_nothing_of_it_are_refused(wide, fields, message):
    with pytest.raises(ValueError, match=message):
        DominoConfig.for_target(wide.config, projector_type="eagle3", **fields)


def test_no_view_has_other_weights(whole):
    with pytest.raises(ValueError, match=r"norm_before_fc, fc_norm of a view must be of the drafter's own weights"):
        whole.view(norm_before_fc=True, fc_norm=False)
