"""Medusa's proposals against its formula (arXiv 2401.10774), written out beside the package; what it is trained on."""

from __future__ import annotations

import copy
import heapq

import pytest
import torch
from builders import build_drafter
from calls_of_kinds import PROMPTS, TEMPERATURE, calls, generate, noise_of
from oracle import faults

from hf_domino import DominoConfig, DominoDraftModel, check_fit, explain_round, shadow
from hf_domino.cli.main import main
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.objective.objective import Objective
from hf_domino.training.trainer import DominoTrainer

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}  # fp64 sums in another order


@pytest.fixture
def drafter(wide):
    return build_drafter(wide, projector_type="medusa", draft_pool_size=None, block_size=4).double()


@torch.no_grad()
def logits_behind(drafter, target, ids):
    """Of each head, behind a text whose last token is the anchor: `[K, V]`, from a forward without cache."""
    tokens = torch.tensor([ids[:-1]])
    x = target.model(tokens).last_hidden_state[0, -1]  # behind the final norm
    weights = [drafter.state_dict()[f"heads.{index}.weight"] for index in range(drafter.config.block_size)]
    states = [x + (weight @ x) * torch.sigmoid(weight @ x) for weight in weights]
    return torch.stack([target.lm_head.weight @ state for state in states])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("batch_size", "options"), [(1, {}), (3, {}), (1, {"cache_implementation": "static"})])
def test_a_chain_is_what_each_head_would_take(wide, drafter, rounds, batch_size, options, do_sample):
    ids, mask = calls(batch_size)
    options |= mask | ({"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if do_sample else {})
    plain = generate(
        wide, None, ids, **{name: value for name, value in options.items() if name != "cache_implementation"}
    )
    with faults(plain.tolist(), wide.config.vocab_size):
        assert torch.equal(generate(wide, drafter, ids, **options), plain)
    assert {length for row in drafter.stats.rows for length in row} == {1, 2, 3, 4, 5}
    noise = noise_of(batch_size, wide.config.vocab_size)
    for row, text, proposals, _ in rounds:
        logits = logits_behind(drafter, wide, text)
        if do_sample:
            step = len(text) - len(PROMPTS[row])
            logits = (logits / TEMPERATURE).softmax(dim=-1) / noise[step : step + len(logits), row]
        assert proposals == logits.argmax(dim=-1).tolist()[: len(proposals)]
    assert len(rounds) > 8


def test_proposals_in_a_second_turn_and_behind_a_rewound_cache(wide, drafter, rounds):
    first = generate(wide, drafter, PROMPTS[0][None], return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    kept.crop(-9)
    for cache, length in ((first.past_key_values, 100), (kept, kept.get_seq_length())):
        ids = torch.cat((first.sequences[:, :length], PROMPTS[1][None]), dim=1)
        rounds.clear()
        assert torch.equal(generate(wide, drafter, ids, past_key_values=cache), generate(wide, None, ids))
        assert rounds
        for _, text, proposals, _ in rounds:
            assert proposals == logits_behind(drafter, wide, text).argmax(dim=-1).tolist()[: len(proposals)]


def likeliest(chances, count):
    """The likeliest paths, each with its chance, where every depth has a law `[V]` of its own."""
    found, ahead = {}, [(-1.0, ())]
    while len(found) <= count:
        chance, path = heapq.heappop(ahead)
        found[path] = -chance
        if len(path) < len(chances):
            law = chances[len(path)].tolist()
            for behind in [(chance * value, (*path, token)) for token, value in enumerate(law)]:
                heapq.heappush(ahead, behind)
    found.pop(())
    return found


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_tree_is_the_likeliest_paths_of_the_heads_laws(wide, drafter, rounds, batch_size, do_sample):
    ids, options = calls(batch_size)
    options |= {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if do_sample else {}
    trees = drafter.view(draft_tree_size=7)
    assert torch.equal(generate(wide, trees, ids, **options), generate(wide, None, ids, **options))
    assert trees.stats.chain is None
    noise = noise_of(batch_size, wide.config.vocab_size)
    for row, text, paths, alpha in rounds:
        scores = alpha * logits_behind(drafter, wide, text)
        if do_sample:
            step = len(text) - len(PROMPTS[row])
            scores = scores / TEMPERATURE - noise[step : step + len(scores), row].log()
        expected = likeliest(scores.softmax(dim=-1), len(paths))
        if len(paths) == 7:  # rows near their end, and those whose branches would not pay, have fewer
            assert paths.keys() == expected.keys()
        for path, chance in paths.items():
            law = [scores[depth].softmax(dim=-1)[token].item() for depth, token in enumerate(path)]
            assert chance == pytest.approx(torch.tensor(law).double().prod().item(), rel=1e-5)  # chances are fp32
    assert sum(len(paths) == 7 for _, _, paths, _ in rounds) > 5


def test_a_new_drafter_proposes_what_stands_in_the_anchors_place(wide):
    drafter = DominoDraftModel(DominoConfig.for_target(wide.config, projector_type="medusa"))
    assert drafter.config.target_layer_ids == [3]
    assert (drafter.config.num_draft_tokens, drafter.has_correction_head) == (5, False)
    assert sum(weight.abs().sum() for weight in drafter.parameters()) == 0


def test_blocks_side_by_side_read_the_state_before_their_anchor(wide, drafter):
    ids = torch.randint(4, 64, (2, 20))
    places = torch.tensor([[*range(12), *range(8)], [*range(20)]])  # two texts in the first row
    anchors = torch.tensor([[3, 12, 17], [0, 19, -1]])
    states = torch.randn(2, 20, 32, dtype=torch.float64)
    view = TargetModel(wide, drafter.config)
    found = drafter.kind.draft_blocks(view, ids, drafter.fuse_context([states]), anchors, places)
    for row, index in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        anchor = int(anchors[row, index])
        x = torch.zeros(32).double() if places[row, anchor] == 0 else states[row, anchor - 1]
        for k, head in enumerate(drafter.heads):
            gate = head.weight @ x
            torch.testing.assert_close(found[row, index, k], x + gate * torch.sigmoid(gate), **TOLERANCE)
    assert not drafter.kind.draft_blocks(view, ids, None, anchors).any()


def test_other_ways_to_draft_write_plain_text(wide, drafter, tmp_path):
    ids = PROMPTS[0][None]
    plain = generate(wide, None, ids)
    for other in (drafter.view(acceptance_rule="residual"), drafter.restricted(range(3, 40))):
        assert torch.equal(generate(wide, other, ids), plain)
    drafter.restricted(range(3, 40)).save_pretrained(tmp_path, standalone=True)
    assert DominoDraftModel.from_pretrained(tmp_path).vocabulary.token_ids.tolist() == list(range(3, 40))
    options = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    assert torch.equal(generate(wide, None, ids, **options), plain)


def test_a_view_has_as_many_heads_or_fewer(wide, drafter):
    ids = PROMPTS[0][None]
    assert torch.equal(generate(wide, drafter.view(block_size=2), ids), generate(wide, None, ids))
    with pytest.raises(ValueError, match=r"block_size of a view must be of the drafter's own weights, got \{'block_s"):
        drafter.view(block_size=5)


def test_weights_of_the_loss_fall_by_a_fifth_with_each_head(wide, drafter, tmp_path):
    view, arguments = TargetModel(wide, drafter.config), DominoTrainingArguments(str(tmp_path), report_to="none")
    batch = {"input_ids": torch.arange(12)[None], "loss_mask": torch.ones(1, 12), "anchors": torch.tensor([[2]])}
    Objective(drafter, view, arguments, None).label(batch)
    torch.testing.assert_close(batch["weights"][0, 0], 0.8 ** torch.arange(4.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shift_label": False}, "shift_label of a Medusa drafter must be True, got False"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of a Medusa drafter must be 1, got 2"),
        ({"pure_draft_prefix_len": 1}, "pure_draft_prefix_len of a Medusa drafter must be 0, got 1"),
        ({"gru_hidden_dim": 8, "emb_dim": 8}, "gru_hidden_dim, emb_dim of a Medusa drafter must be left out"),
        (
            {"target_layer_ids": [2]},
            r"target_layer_ids must be unique and in \[3, 3\].*Medusa reads what lm_head reads",
        ),
        ({"projector_type": "dflash", "target_layer_ids": [4]}, r"in \[0, 3\].*after the final norm"),
        ({"num_target_layers": None, "target_layer_ids": [3]}, "target_layer_ids must be .*num_target_layers=None"),
    ],
)
def test_fields_that_say_nothing_of_it_are_refused(wide, fields, message):
    with pytest.raises(ValueError, match=message):
        DominoConfig.for_target(wide.config, **({"projector_type": "medusa"} | fields))


@pytest.fixture
def medusa(recipe):
    """Fields of a tiny training of Medusa heads."""
    return {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")} | {
        "projector_type": "medusa"
    }


@pytest.fixture
def folder(medusa, train, tmp_path, capsys):
    """A drafter that the command has trained from states on disk."""
    assert train(medusa, "--cache-hidden-states", str(tmp_path / "states")) == 0
    assert "eval_walked_acceptance_length" in capsys.readouterr().out
    return tmp_path / "run"


def test_what_the_command_trains_is_used_as_others_are(folder, saved_pair, target, word_tokenizer, capsys):
    drafter = DominoDraftModel.from_pretrained(folder)
    assert all(head.weight.any() for head in drafter.heads)
    card = (folder / "README.md").read_text()
    assert "A [Medusa](https://arxiv.org/abs/2401.10774) drafter" in card
    assert "@misc{medusa2024" in card
    assert "has nothing for engines to read. No engine reads such heads" in card
    ids = PROMPTS[0][None]
    assert torch.equal(generate(target, drafter, ids), generate(target, None, ids))
    assert len(explain_round(drafter, target, ids).base_probs) == drafter.config.num_draft_tokens
    assert check_fit(drafter, target, word_tokenizer, ["t7 t8 t9"], max_new_tokens=24).modes
    with shadow(share=1.0) as report:
        generate(target, drafter, ids)
    assert (report.num_calls, report.mismatches) == (1, [])
    pair = ["--target", str(saved_pair[0]), "--drafter", str(folder)]
    assert main(["generate", *pair, "--raw", "--max-new-tokens", "8", "t7 t8"]) == 0
    assert main(["export", "--drafter", str(folder), "--output", str(folder / "out")]) == 2
    assert "No engine reads such heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", "2"], "the drafter's kind with lora_rank must be Domino or DFlash, got 'Medusa'"),
        (["--block-size", "3"], "the drafter's kind with block_size must be Domino or DFlash"),
        (["--projector-type", "domino"], "the drafter of a new head must be plain DFlash, got 'Medusa'"),
        (["--train-only", "head"], "must be one with a correction head, got 'Medusa'. Leave train_only out"),
        (["--gradient-checkpointing", "true"], "the drafter's kind with gradient_checkpointing must be"),
    ],
)
def test_what_it_lacks_is_refused_by_name(folder, medusa, train, capsys, flags, message):
    fields = {name: value for name, value in medusa.items() if name not in ("projector_type", "block_size")}
    assert train(fields | {"drafter": str(folder), "output_dir": f"{folder}-2"}, *flags) == 2
    assert message in capsys.readouterr().err


def test_what_a_new_one_lacks_is_refused_by_name(medusa, train, capsys):
    assert train(medusa, "--start-from-target", "true") == 2
    assert "the drafter's kind with start_from_target must be" in capsys.readouterr().err


def test_it_is_not_sharded(wide, drafter, tmp_path):
    arguments = DominoTrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    arguments.fsdp = True
    with pytest.raises(ValueError, match="the drafter's kind with fsdp must be Domino or DFlash"):
        DominoTrainer(drafter, wide, arguments)
