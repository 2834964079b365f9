"""EAGLE-3's proposals against its formulas (arXiv 2503.01840), written out beside the package and without any cache."""

from __future__ import annotations

import copy
import heapq

import pytest
import torch
from builders import build_drafter
from calls_of_kinds import NEW_TOKENS, PROMPTS, TEMPERATURE, calls, generate, noise_of
from oracle import faults

from hf_domino import DominoConfig, DominoDraftModel, check_fit, shadow
from hf_domino.decoding.drafting import DraftSession
from hf_domino.formats.loading import interpret
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.runs.resuming import check_resumable

OPTIONS = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "whole": {"own_embeddings": True, "own_lm_head": True, "fc_norm": True},
}
PATHS_TOL = 1e-5  # rotary tables and chances are fp32


def build(target, name, **fields):
    """A drafter of one of the options, whose norms are not all alike."""
    fields = {"draft_pool_size": None, "block_size": 4, "target_layer_ids": [0, 2]} | OPTIONS[name] | fields
    drafter = build_drafter(target, projector_type="eagle3", **fields).double()
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return drafter


@pytest.fixture(params=OPTIONS)
def drafter(wide, request):
    return build(wide, request.param)


@pytest.fixture
def whole(wide):
    return build(wide, "whole")


class Reference:
    """What a drafter makes of a text, entry by entry, all of it anew each time."""

    def __init__(self, drafter, target):
        self.weights, self.config, self.target = drafter.state_dict(), drafter.config, target

    def norm(self, x, name):
        return self.weights[f"{name}.weight"] * x / (x.pow(2).mean() + self.config.rms_norm_eps).sqrt()

    def fused(self, hidden_states, position):
        captured = [hidden_states[layer + 1][0, position] for layer in self.config.target_layer_ids]
        if self.config.fc_norm:
            captured = [self.norm(x, f"fc_norm.{index}") for index, x in enumerate(captured)]
        joined = torch.cat(captured)
        return self.weights["fc.weight"] @ (self.norm(joined, "input_norm") if self.config.norm_before_fc else joined)

    def rotated(self, x, position):
        size = self.config.head_dim
        frequencies = self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        cosines, sines = (position * frequencies).cos(), (position * frequencies).sin()
        first, second = x.view(-1, 2, size // 2).unbind(dim=1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=1).flatten()

    def read(self, state, token):
        own = self.weights.get("embed_tokens.weight")
        embedding = (self.target.get_input_embeddings().weight if own is None else own)[token]
        return torch.cat((self.norm(embedding, "layers.0.input_layernorm"), self.norm(state, "layers.0.hidden_norm")))

    def last(self, entries):
        """The state that goes on behind the last of some entries: states, tokens and positions."""
        weight = {name: self.weights[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkvo"}
        reads = [self.read(state, token) for state, token, _ in entries]
        keys = [self.rotated(weight["k"] @ x, place) for x, (_, _, place) in zip(reads, entries, strict=True)]
        values, query = [weight["v"] @ x for x in reads], self.rotated(weight["q"] @ reads[-1], entries[-1][2])
        size, shared = self.config.head_dim, self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head in range(self.config.num_attention_heads):
            own, kept = slice(head * size, (head + 1) * size), head // shared
            theirs = slice(kept * size, (kept + 1) * size)
            scores = torch.stack([query[own] @ key[theirs] / size**0.5 for key in keys]).softmax(dim=0)
            heads.append(sum(score * value[theirs] for score, value in zip(scores, values, strict=True)))
        state = entries[-1][0]
        state = self.norm(state, "layers.0.hidden_norm") if self.config.norm_before_residual else state
        state = state + weight["o"] @ torch.cat(heads)
        gate, up, down = (self.weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = self.norm(state, "layers.0.post_attention_layernorm")
        state = state + down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
        return self.norm(state, "norm") if self.config.norm_output else state

    @torch.no_grad()
    def begin(self, text):
        """All entries of a text, and the state behind it."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        entries = [(self.fused(states, place), text[place + 1], place) for place in range(len(text) - 1)]
        return entries, self.last(entries)

    @torch.no_grad()
    def logits(self, state):
        own = self.weights.get("lm_head.weight")
        normed = state if self.config.norm_output else self.norm(state, "norm")
        rows = own if own is not None else self.target.lm_head.weight
        if (d2t := self.weights.get("d2t")) is None:
            return rows @ normed
        ids = d2t + torch.arange(len(d2t))
        logits = (rows @ normed) if own is not None else rows[ids] @ normed
        return torch.full((self.config.vocab_size,), -torch.inf, dtype=torch.float64).index_copy(0, ids, logits)

    @torch.no_grad()
    def go_on(self, entries, state, token):
        entries = [*entries, (state, token, entries[-1][2] + 1)]
        return entries, self.last(entries)

    def chain(self, text, noise=None, count=4):
        """Proposals one by one."""
        entries, state = self.begin(text)
        found = []
        for index in range(count):
            scores = self.logits(state)
            scores = scores if noise is None else (scores / TEMPERATURE).softmax(dim=0) / noise[index]
            found.append(int(scores.argmax()))
            entries, state = self.go_on(entries, state, found[-1])
        return found


def steps_of(noise, row, text, count=4):
    if noise is None:
        return None
    first = len(text) - len(PROMPTS[row])
    return noise[first : first + count, row]


def drawing(do_sample, target, batch_size):
    """Options of a call, and what plain generation draws with."""
    if not do_sample:
        return {}, None
    return {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}, noise_of(batch_size, target.config.vocab_size)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_chain_reads_its_own_drafts(wide, drafter, rounds, batch_size, do_sample):
    ids, options = calls(batch_size)
    more, noise = drawing(do_sample, wide, batch_size)
    plain = generate(wide, None, ids, **options, **more)
    with faults(plain.tolist(), wide.config.vocab_size):
        assert torch.equal(generate(wide, drafter.view(draft_tree_size=None), ids, **options, **more), plain)
    reference = Reference(drafter, wide)
    for row, text, proposals, _ in rounds[:: 1 + batch_size]:
        count = len(proposals)
        assert proposals == reference.chain(text, steps_of(noise, row, text), count)
    assert len(rounds) > 8


def likeliest(reference, entries, state, alpha, noise, count):
    """The likeliest paths, each with its chance, by a law that has read each path."""
    found, ahead, tie = {}, [(-1.0, 0, (), entries, state)], 0
    while len(found) <= count:
        chance, _, path, entries, state = heapq.heappop(ahead)
        found[path] = -chance
        if path:
            entries, state = reference.go_on(entries, state, path[-1])
        if len(path) < reference.config.block_size:
            scores = alpha * reference.logits(state) / (1 if noise is None else TEMPERATURE)
            scores = scores if noise is None else scores - noise[len(path)].log()
            for token, value in enumerate(scores.softmax(dim=0).tolist()):
                tie += 1
                heapq.heappush(ahead, (chance * value, tie, (*path, token), entries, state))
    found.pop(())
    return found


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_tree_is_the_likeliest_paths(wide, drafter, rounds, batch_size, do_sample):
    ids, options = calls(batch_size)
    more, noise = drawing(do_sample, wide, batch_size)
    trees = drafter.view(draft_tree_size=7)
    assert torch.equal(generate(wide, trees, ids, **options, **more), generate(wide, None, ids, **options, **more))
    assert trees.stats.chain is None
    reference, num_whole = Reference(drafter, wide), 0
    for row, text, paths, alpha in rounds[:: 2 + batch_size]:
        if len(paths) < 7 or max(map(len, paths)) > 4 or len(text) + 4 > len(PROMPTS[row]) + NEW_TOKENS:
            continue  # near its end a row has fewer nodes, as has one whose branches would not pay
        expected = likeliest(reference, *reference.begin(text), alpha, steps_of(noise, row, text), 7)
        assert paths.keys() == expected.keys()
        assert paths == {path: pytest.approx(chance, rel=PATHS_TOL) for path, chance in expected.items()}
        num_whole += 1
    assert num_whole > 3


def test_the_context_is_right_in_a_second_turn_and_behind_a_rewind(wide, drafter, rounds):
    chains = drafter.view(draft_tree_size=None)
    first = generate(wide, chains, PROMPTS[0][None], return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    kept.crop(-9)
    reference = Reference(drafter, wide)
    for cache, length in ((first.past_key_values, 100), (kept, kept.get_seq_length())):
        ids = torch.cat((first.sequences[:, :length], PROMPTS[1][None]), dim=1)
        rounds.clear()
        assert torch.equal(generate(wide, chains, ids, past_key_values=cache), generate(wide, None, ids))
        for _, text, proposals, _ in rounds[::3]:
            assert proposals == reference.chain(text, None, len(proposals))


def test_nothing_is_made_up_of_what_was_missed_between_turns(wide, drafter, rounds):
    trees, reference = drafter.view(draft_tree_size=7), Reference(drafter, wide)
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
    expected = likeliest(reference, entries, reference.last(entries), alpha, None, 7)
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


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"acceptance_rule": "residual"}, {}),
        ({"draft_length": "adaptive"}, {}),
        ({"draft_length": "adaptive", "draft_tree_size": None}, {"repetition_penalty": 1.3}),
        ({"draft_tree_size": 7}, {"no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": 5}),
        ({}, {"prefill_chunk_size": 2}),
        ({}, {"prompt_lookup_num_tokens": 3}),
    ],
)
def test_other_ways_to_draft_write_plain_text(wide, whole, fields, options):
    for ids, more in (calls(1), calls(3)):
        if "prefill_chunk_size" in options and len(ids) > 1:
            continue
        alone = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"} | more
        found = generate(wide, whole.view(**fields), ids, **options, **more)
        assert torch.equal(found, generate(wide, None, ids, **alone))


def test_a_draft_vocabulary(wide, rounds, tmp_path):
    for name in ("plain", "whole"):
        small = build(wide, name).restricted(range(3, 40)).view(draft_tree_size=None)
        rounds.clear()
        assert torch.equal(generate(wide, small, PROMPTS[0][None]), generate(wide, None, PROMPTS[0][None]))
        for _, text, proposals, _ in rounds[::4]:
            assert proposals == Reference(small, wide).chain(text, None, len(proposals))
        small.save_pretrained(tmp_path / name, standalone=True)
        loaded = DominoDraftModel.from_pretrained(tmp_path / name)
        assert {key: value.tolist() for key, value in loaded.state_dict().items()} == {
            key: value.tolist() for key, value in small.state_dict().items()
        }
        options = {"custom_generate": str(tmp_path / name), "trust_remote_code": True}
        ids = PROMPTS[0][None]
        assert torch.equal(generate(wide, None, ids, **options), generate(wide, None, ids))


def test_blocks_side_by_side_read_the_text(wide, drafter):
    """As in training: the text's tokens, and the drafter's own states."""
    ids = torch.randint(4, 64, (2, 20), generator=torch.Generator().manual_seed(2))
    places = torch.tensor([[*range(12), *range(8)], [*range(20)]])  # two texts in the first row
    anchors = torch.tensor([[3, 12, 17], [1, 19, -1]])
    view, reference = TargetModel(wide, drafter.config), Reference(drafter, wide)
    outputs = wide(ids, position_ids=places, output_hidden_states=True, use_cache=False)
    states = [outputs.hidden_states[layer + 1] for layer in (0, 2)]
    found = drafter.kind.draft_blocks(view, ids, drafter.fuse_context(states), anchors, places)
    assert found.shape == (2, 3, 4, 32)
    for row, index in ((0, 0), (0, 2), (1, 0), (1, 1)):
        anchor = int(anchors[row, index])
        start = anchor - int(places[row, anchor])
        text = ids[row, start : anchor + 1].tolist()
        entries, state = reference.begin(text)
        for depth in range(4):
            torch.testing.assert_close(found[row, index, depth], state, rtol=PATHS_TOL, atol=PATHS_TOL)
            if anchor + depth + 1 < 20:
                entries, state = reference.go_on(entries, state, int(ids[row, anchor + depth + 1]))
            else:
                break
    without = drafter.kind.draft_blocks(view, ids, None, anchors)
    assert without.shape == found.shape
    assert not torch.equal(without, found)


def test_other_parts_take_it(wide, whole, word_tokenizer):
    ids = PROMPTS[0][None]
    with shadow(share=1.0) as report:
        generate(wide, whole, ids)
    assert (report.num_calls, report.mismatches) == (1, [])
    assert check_fit(whole, wide, word_tokenizer, ["t7 t8 t9"], max_new_tokens=24).modes


def test_what_the_command_trains_is_used_as_others_are(recipe, train, target, tmp_path, capsys):
    fields = {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")}
    fields["projector_type"] = "eagle3"
    assert train(fields, "--cache-hidden-states", str(tmp_path / "states"), "--distillation-weight", "1") == 0
    assert "eval_walked_acceptance_length" in capsys.readouterr().out
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    card = (tmp_path / "run" / "README.md").read_text()
    assert "An [EAGLE-3](https://arxiv.org/abs/2503.01840) drafter" in card
    assert "tokens in turn (one layer, which reads what it has drafted), and" in card
    assert "@misc{eagle32025" in card
    ids = PROMPTS[0][None]
    assert torch.equal(generate(target, drafter, ids), generate(target, None, ids))
    again = fields | {"drafter": str(tmp_path / "run"), "output_dir": str(tmp_path / "again")}
    for name in ("projector_type", "block_size"):
        again.pop(name)
    assert train(again, "--lora-rank", "2") == 2
    assert "the drafter's kind with lora_rank must be Domino or DFlash, got 'EAGLE-3'" in capsys.readouterr().err
    assert train(again, "--block-size", "3", "--max-steps", "1") == 0
    assert DominoDraftModel.from_pretrained(tmp_path / "again").config.num_draft_tokens == 3


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
    (tmp_path / "run.json").write_text("{}")
    check_resumable(tmp_path, whole, args)
    with pytest.raises(ValueError, match=r"norm_output must be False, with which .* was trained, got True"):
        check_resumable(tmp_path, normed, args)


def test_what_it_lacks_is_refused_by_name(wide, whole):
    with pytest.raises(ValueError, match=r"kind with cache_implementation='static' must be Domino or DFlash or Medusa"):
        generate(wide, whole, PROMPTS[0][None], cache_implementation="static")
    with pytest.raises(ValueError, match="norm_output of a Domino drafter must be False, got True"):
        DominoConfig(norm_output=True)
    with pytest.raises(ValueError, match="fc_norm must be False with norm_before_fc=True, got True"):
        build(wide, "normed", fc_norm=True)
