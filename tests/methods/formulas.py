"""Formulas of EAGLE-3 (arXiv 2503.01840), beside the package and without any cache."""

from __future__ import annotations

import heapq

import torch
from builders import build_drafter
from calls_of_methods import PROMPTS, TEMPERATURE

OPTIONS = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "window": {"draft_window_size": 5},
    "whole": {"own_embeddings": True, "own_lm_head": True, "fc_norm": True},
}
PATHS_TOL = 1e-5  # rotary tables and chances are fp32


def build(target, name, **fields):
    """A drafter of EAGLE-3 with one of the options, whose norms are not all alike."""
    kind = {"projector_type": "eagle3", "target_layer_ids": [0, 2]} | OPTIONS[name]
    drafter = build_drafter(target, **({"draft_pool_size": None, "block_size": 4} | kind | fields)).double()
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return drafter


class Formula:
    """What a drafter makes of a text, all of it anew each time: `begin`, then `go_on` with each draft.

    A state goes on behind entries: states, the tokens behind them, and positions.
    """

    def __init__(self, drafter, target):
        self.weights, self.config, self.target = drafter.state_dict(), drafter.config, target

    def of_drafted(self, state, rows, are_own=False):
        """Logits of a state by rows of lm_head, of tokens that are drafted alone."""
        if (d2t := self.weights.get("d2t")) is None:
            return rows @ state
        ids = d2t + torch.arange(len(d2t))
        logits = (rows if are_own else rows[ids]) @ state
        return torch.full((self.config.vocab_size,), -torch.inf, dtype=torch.float64).index_copy(0, ids, logits)

    def chain(self, text, noise=None, count=4):
        """Proposals one by one."""
        entries, state = self.begin(text)
        found = []
        for index in range(count):
            if found:
                entries, state = self.go_on(entries, state, found[-1])
            scores = self.logits(state)
            scores = scores if noise is None else (scores / TEMPERATURE).softmax(dim=0) / noise[index]
            found.append(int(scores.argmax()))
        return found

    def likeliest(self, entries, state, alpha, noise, count):
        """The likeliest paths, each with its chance, by a distribution that has read each path."""
        found, ahead, tie = {}, [(-1.0, 0, (), entries, state)], 0
        while len(found) <= count:
            chance, _, path, entries, state = heapq.heappop(ahead)
            found[path] = -chance
            if path:
                entries, state = self.go_on(entries, state, path[-1])
            if len(path) < self.config.block_size:
                scores = alpha * self.logits(state) / (1 if noise is None else TEMPERATURE)
                scores = scores if noise is None else scores - noise[len(path)].log()
                for token, value in enumerate(scores.softmax(dim=0).tolist()):
                    tie += 1
                    heapq.heappush(ahead, (chance * value, tie, (*path, token), entries, state))
        found.pop(())
        return found

    def norm(self, x, name):
        return self.weights[f"{name}.weight"] * x / (x.pow(2).mean() + self.config.rms_norm_eps).sqrt()

    def fused(self, hidden_states, position):
        captured = [hidden_states[layer + 1][0, position] for layer in self.config.target_layer_ids]
        if self.config.fc_norm:
            captured = [self.norm(x, f"fc_norm.{index}") for index, x in enumerate(captured)]
        joined = torch.cat(captured)
        return self.weights["fc.weight"] @ (self.norm(joined, "input_norm") if self.config.norm_before_fc else joined)

    def normed(self, x, kind):
        """Heads of queries or keys, normed where there are such norms."""
        name = f"layers.0.self_attn.{kind}_norm"
        if f"{name}.weight" not in self.weights:
            return x
        return torch.cat([self.norm(head, name) for head in x.view(-1, self.config.head_dim)])

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
        keys = [
            self.rotated(self.normed(weight["k"] @ x, "k"), place)
            for x, (_, _, place) in zip(reads, entries, strict=True)
        ]
        values = [weight["v"] @ x for x in reads]
        query = self.rotated(self.normed(weight["q"] @ reads[-1], "q"), entries[-1][2])
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
        """The entries of a text, those of the window where there is one, and the state behind it."""
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        entries = [(self.fused(states, place), text[place + 1], place) for place in range(len(text) - 1)]
        entries = entries[-(self.config.draft_window_size or len(entries)) :]
        return entries, self.last(entries)

    @torch.no_grad()
    def logits(self, state):
        own = self.weights.get("lm_head.weight")
        normed = state if self.config.norm_output else self.norm(state, "norm")
        return self.of_drafted(normed, self.target.lm_head.weight if own is None else own, own is not None)

    @torch.no_grad()
    def go_on(self, entries, state, token):
        entries = [*entries, (state, token, entries[-1][2] + 1)]
        return entries, self.last(entries)


def steps_of(noise, row, text, count=4):
    if noise is None:
        return None
    first = len(text) - len(PROMPTS[row])
    return noise[first : first + count, row]
