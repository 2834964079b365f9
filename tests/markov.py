"""Formulas of DSpark (arXiv 2607.05147), DFlash 2, DFly and XPress: what heads make of a block, beside the package."""

from __future__ import annotations

import heapq
import math

import torch
from builders import build_drafter
from rederived import Rederived

HEADS = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "vanilla behind the anchor": {"markov_head_type": "vanilla", "shift_label": False},
    "gated behind the anchor": {"markov_head_type": "gated", "shift_label": False},
}
SELECTOR = {
    "projector_type": "dflash2",
    "selector_rank": 8,
    "selector_top_k": 5,
    "conv_kernel_size": 3,
    "conv_group_size": 8,
}
HEADS |= {"selector": SELECTOR, "selector behind the anchor": SELECTOR | {"shift_label": False}}
DFLY = {"projector_type": "dfly", "hidden_correction_intermediate_size": 24}
XPRESS = {"projector_type": "xpress", "xpress_rank": 8, "xpress_mlp_ratio": 3, "num_jacobi_passes": 6}
# After one pass, all but the first token may differ from those that are chosen one by one.
HEADS |= {"xpress": XPRESS, "xpress behind the anchor": XPRESS | {"shift_label": False, "num_jacobi_passes": 1}}
HEADS |= {"dfly": DFLY, "dfly behind the anchor": DFLY | {"shift_label": False}}
RANK = 8
TEMPERATURE = 0.8
REFINER = ("token_embed", "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
STD = {
    "markov_head": 0.7,
    "confidence_head": 0.7,
    "candidate_selector": 0.4,
    "hidden_correction": 0.2,
    "refiner_head": 0.15,
}


def build(target, name="vanilla", **fields):
    """A drafter whose head decides on what is proposed, and none of whose tensors are zero."""
    fields = {"block_size": 4, "draft_pool_size": None, "markov_rank": RANK} | HEADS[name] | fields
    drafter = build_drafter(target, **({"projector_type": "dspark"} | fields)).double()
    for name, parameter in drafter.named_parameters():
        if name == "layer_fusion_weights":
            torch.nn.init.normal_(parameter)
        elif name.split(".")[0] in STD and "norm" not in name:
            torch.nn.init.normal_(parameter, std=STD[name.split(".")[0]])
        elif "base_kernel" in name:
            torch.nn.init.normal_(parameter, mean=0.3, std=0.2)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return drafter


class Markov(Rederived):
    """The formulas, with the tensors of a file under DeepSpec's names, or those of a drafter."""

    def __init__(self, drafter, target, tensors=None):
        super().__init__(drafter, target)
        self.weights = self.weights if tensors is None else dict(tensors)
        self.first = 0 if drafter.config.shift_label else 1
        d2t = self.weights.get("d2t")
        self.ids = torch.arange(len(self.head)) if d2t is None else d2t + torch.arange(len(d2t))

    def correct(self, hidden, anchor, chosen=None):
        self.block = hidden
        return hidden[self.first :], None

    def part(self, name):
        return self.weights[f"markov_head.{name}"]

    def selected(self, h, token):
        """Of the candidates of a position, behind a token."""
        config, row = self.config, self.head[self.ids] @ h * (self.config.output_multiplier or 1.0)
        if (cap := config.final_logit_softcapping) is not None:
            row = cap * torch.tanh(row / cap)
        before, after, projection = (
            self.weights[f"candidate_selector.{name}.weight"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection")
        )
        likely = row >= row.sort().values[-config.selector_top_k]
        row = row + after @ (before[token] * (projection @ h))
        return row.masked_fill(~likely, -math.inf)

    def corrected_state(self, h, token):
        """What lm_head reads of a position behind a token."""
        gate, up, down = (self.weights[f"hidden_correction.{name}_proj.weight"] for name in ("gate", "up", "down"))
        e = self.table[token] * (self.config.input_embedding_scale or 1.0)
        read = torch.cat([self.norm(x, f"hidden_correction.{name}_norm") for name, x in (("hidden", h), ("embed", e))])
        opened = gate @ read
        return h + down @ (opened / (1 + torch.exp(-opened)) * (up @ read))

    def refined(self, path):
        """What XPress adds behind a path, of the whole block; the anchor stands in for what is before it."""
        weight = {name: self.weights[f"refiner_head.{name}.weight"] for name in REFINER}
        mean, xs = self.block.mean(0), []
        for h, token in zip(self.block, [path[0]] * self.first + list(path), strict=False):
            read = (weight["down_h"] @ h, weight["down_g"] @ mean, weight["token_embed"][token])
            xs.append(weight["in_proj"] @ torch.cat(read))
        last = len(xs) - 1
        shares = self.weights["refiner_head.mix_l"][:, last]
        c = xs[last] + sum(shares[:, j] * x for j, x in enumerate(xs))
        gate = weight["mlp_gate"] @ c
        return weight["readout"] @ (c + weight["mlp_down"] @ (gate / (1 + torch.exp(-gate)) * (weight["mlp_up"] @ c)))

    def passes(self, hidden, anchor, noise, count):
        """XPress's chain: chosen from base logits, then anew behind the tokens of the pass before."""
        tokens = None
        for _ in range(1 + self.config.num_jacobi_passes):
            rows = []
            for index in range(count):
                row = self.head[self.ids] @ hidden[index]
                if tokens is not None:
                    row = row + self.refined([anchor, *tokens[:index]])
                if noise is not None:
                    row = (row / TEMPERATURE).softmax(dim=0) / noise[index][self.ids]
                rows.append(int(self.ids[row.argmax()]))
            tokens = rows
        return tokens

    def logits(self, hidden, path):
        """Of all tokens, behind a path that begins with the anchor."""
        if self.config.projector_type == "xpress":
            row = self.head[self.ids] @ hidden[len(path) - 1] + self.refined(path)
            return torch.full((len(self.head),), -math.inf, dtype=row.dtype).index_copy(0, self.ids, row)
        if self.config.projector_type == "dfly":
            row = self.head[self.ids] @ self.corrected_state(hidden[len(path) - 1], path[-1])
            return torch.full((len(self.head),), -math.inf, dtype=row.dtype).index_copy(0, self.ids, row)
        if self.config.projector_type == "dflash2":
            row = self.selected(hidden[len(path) - 1], path[-1])
            return torch.full((len(self.head),), -math.inf, dtype=row.dtype).index_copy(0, self.ids, row)
        state = torch.zeros(RANK, dtype=hidden.dtype)
        for h, token in zip(hidden, path, strict=False):
            e = self.part("markov_w1.weight")[token]
            if "markov_head.gate_proj.weight" in self.weights:
                gate = self.part("gate_proj.weight") @ torch.cat((h, e)) + self.part("gate_proj.bias")
                e = e / (1 + torch.exp(-gate))
            if "markov_head.joint_proj.weight" in self.weights:
                joint = self.part("joint_proj.weight") @ torch.cat((state, e, h)) + self.part("joint_proj.bias")
                kept = 1 / (1 + torch.exp(-joint[:RANK]))
                e = torch.tanh(joint[2 * RANK :])
                state = kept * state + (1 - kept) * torch.tanh(joint[RANK : 2 * RANK])
        row = self.head[self.ids] @ h + self.part("markov_w2.weight") @ e
        return torch.full((len(self.head),), -math.inf, dtype=row.dtype).index_copy(0, self.ids, row)

    def chain(self, text, noise=None, count=None):
        hidden, _ = self.draft(torch.tensor(text))
        path = [text[-1]]
        if self.config.projector_type == "xpress":
            return self.passes(hidden, text[-1], noise, len(hidden) if count is None else count)
        for index in range(len(hidden) if count is None else count):
            scores = self.logits(hidden, path)
            scores = scores if noise is None else (scores / TEMPERATURE).softmax(dim=0) / noise[index]
            path.append(int(scores.argmax()))
        return path[1:]

    def likeliest(self, text, alpha, noise, count):
        """The likeliest paths, each with its chance."""
        hidden, _ = self.draft(torch.tensor(text))
        found, ahead = {}, [(-1.0, ())]
        while len(found) <= count:
            chance, path = heapq.heappop(ahead)
            found[path] = -chance
            if len(path) < len(hidden):
                scores = alpha * self.logits(hidden, [text[-1], *path]) / (1 if noise is None else TEMPERATURE)
                scores = scores if noise is None else scores - noise[len(path)].log()
                for token, value in enumerate(scores.softmax(dim=0).tolist()):
                    heapq.heappush(ahead, (chance * value, (*path, token)))
        found.pop(())
        return found
