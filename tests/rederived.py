"""Drafts re-derived: plain tensor arithmetic on the checkpoint's tensors, which shares no code with the package."""

from __future__ import annotations

import math

import torch


class Rederived:
    """Sections 3.1 to 3.3 of arXiv 2605.29707 and 2602.06036, written out from the formulas."""

    def __init__(self, drafter, target):
        self.weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
        self.config, self.target = drafter.config, target
        self.table = target.get_input_embeddings().weight.detach()
        self.head = target.get_output_embeddings().weight.detach()

    def norm(self, x, name):
        return (
            x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]
        )

    def rope(self, x, positions):  # [T, heads, D]
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def heads(self, x, name):
        return (x @ self.weights[f"{name}.weight"].T).view(len(x), -1, self.config.head_dim)

    def convolved(self, x, normed, name, side):
        """States of one block, each with those before it, by kernels that its own normed input changes."""
        if (base := self.weights.get(f"{name}.base_kernel")) is None:
            return x
        changes = normed @ self.weights[f"{name}.kernel_projection.weight"].T
        groups = self.config.hidden_size // self.config.conv_group_size
        changes = changes.view(len(x), 2, base.shape[1], groups)[:, side].repeat_interleave(
            self.config.conv_group_size, -1
        )
        rows = [
            sum(
                (base[side, tap] + changes[place, tap]) * x[place - tap] for tap in range(min(place + 1, base.shape[1]))
            )
            for place in range(len(x))
        ]
        return torch.stack(rows)

    def layer(self, block, context, index, anchor):
        name, conv = f"layers.{index}.self_attn", f"layers.{index}.attention_conv"
        before = self.norm(block, f"layers.{index}.input_layernorm")
        normed = self.convolved(before, before, conv, 0)
        both = torch.cat((context, normed))
        positions = torch.arange(len(both))
        queries = self.rope(self.norm(self.heads(normed, f"{name}.q_proj"), f"{name}.q_norm"), positions[anchor:])
        keys = self.rope(self.norm(self.heads(both, f"{name}.k_proj"), f"{name}.k_norm"), positions)
        values = self.heads(both, f"{name}.v_proj")
        group = queries.shape[1] // keys.shape[1]
        outputs = []
        for head in range(queries.shape[1]):
            scores = queries[:, head] @ keys[:, head // group].T / math.sqrt(self.config.head_dim)
            outputs.append(scores.softmax(-1) @ values[:, head // group])
        made = torch.cat(outputs, -1) @ self.weights[f"{name}.o_proj.weight"].T
        block = block + self.convolved(made, before, conv, 1)
        before, conv = self.norm(block, f"layers.{index}.post_attention_layernorm"), f"layers.{index}.mlp_conv"
        normed = self.convolved(before, before, conv, 0)
        gate, up = (normed @ self.weights[f"layers.{index}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        made = (gate * gate.sigmoid() * up) @ self.weights[f"layers.{index}.mlp.down_proj.weight"].T
        return block + self.convolved(made, before, conv, 1)

    def gru(self, x, state):
        size = len(state)
        inputs, states = self.weights["prefix_gru.weight_ih_l0"] @ x, self.weights["prefix_gru.weight_hh_l0"] @ state
        reset, update = (inputs[: 2 * size] + states[: 2 * size]).sigmoid().split(size)
        candidate = torch.tanh(inputs[2 * size :] + reset * states[2 * size :])
        return (1 - update) * candidate + update * state

    def mean_of_layers(self, captured, index):
        """The mean of captured layers that a layer of the drafter adds to the context, if it does."""
        if (logits := self.weights.get("layer_fusion_weights")) is None:
            return 0.0
        shares = logits[index].exp() / logits[index].exp().sum()
        return sum(share * states for share, states in zip(shares, captured, strict=True))

    def draft(self, ids):
        """Tokens and corrected logits proposed after `ids`, whose last is the anchor."""
        config, anchor = self.config, len(ids) - 1
        with torch.no_grad():
            states = self.target(ids[None, :-1], output_hidden_states=True).hidden_states
        captured = [states[layer + 1][0] for layer in config.target_layer_ids]
        fused = torch.cat(captured, -1) @ self.weights["fc.weight"].T
        noise = torch.tensor([ids[-1].item()] + [config.mask_token_id] * (config.block_size - 1))
        block = self.table[noise] * (config.input_embedding_scale or 1.0)
        for index in range(config.num_hidden_layers):
            context = self.norm(fused + self.mean_of_layers(captured, index), "hidden_norm")
            block = self.layer(block, context, index, anchor)
        hidden = self.norm(block, "norm")
        return self.correct(hidden, ids[-1])

    def correct(self, hidden, anchor, chosen=None):
        """Tokens and corrected logits behind `anchor`, from a block's draft hidden states; others may be `chosen`."""
        config, tokens, logits = self.config, [], []
        state, token = torch.zeros(config.gru_hidden_dim), anchor
        first = 0 if config.shift_label else 1
        for k in range(first, config.block_size):
            state = self.gru(self.table[token], state)
            row = self.head @ hidden[k]
            if config.draft_pool_size:
                unlikely = row < row.sort().values[-config.draft_pool_size]
                row = row.masked_fill(unlikely, -math.inf)
            if k >= first + config.pure_draft_prefix_len:
                low = self.weights["embed_proj.0.weight"] @ torch.cat((hidden[k], state))
                row = row + self.weights["embed_proj.2.weight"] @ (low * low.sigmoid())
            token = row.argmax() if chosen is None else chosen[k - first]
            tokens.append(token)
            logits.append(row)
        return torch.stack(tokens), torch.stack(logits)
