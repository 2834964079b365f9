"""What a drafter gives at every position of a batch, position by position: the reference of the losses' tests."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from hf_domino.targets.view import TargetModel


def naive_positions(drafter, target, batch, weight):
    """One block at a time, one position at a time, without masks: the context is simply cut before the anchor.

    Yields every block position whose label counts: block, place, base and corrected logits and the target's own, by the
    rows of lm_head `[D, H]` given, and label.
    """
    config, ids = drafter.config, batch["input_ids"]
    first = config.label_offset
    hidden = target(ids, output_hidden_states=True).hidden_states
    for row, anchors in enumerate(batch["anchors"].tolist()):
        for anchor in [anchor for anchor in anchors if anchor >= 0]:
            context = drafter.fuse_context([hidden[i + 1][row : row + 1, :anchor] for i in config.target_layer_ids])
            if config.projector_type == "eagle3":
                z = _along(drafter, target, ids[row : row + 1], context, anchor)
            else:
                block = torch.full((1, config.block_size), config.mask_token_id)
                block[0, 0] = ids[row, anchor]
                places = torch.arange(anchor, anchor + config.block_size)[None]
                z = drafter(target.model.embed_tokens(block), places, context, torch.arange(anchor)[None])[0]
            for k in range(first, config.block_size):
                position = anchor + k + (1 - first)
                if position >= ids.shape[1] or not batch["loss_mask"][row, position]:
                    continue
                base = corrected = (drafter.lm_head.weight if getattr(config, "own_lm_head", False) else weight) @ z[k]
                if drafter.has_correction_head and k >= first + config.pure_draft_prefix_len:
                    correction = CORRECTIONS.get(config.projector_type, _domino)
                    read = z if correction is _refined else z[first : k + 1]
                    corrected = base + correction(drafter, target, ids[row, anchor:position], read)
                distribution = weight @ hidden[-1][row, position - 1]
                yield (row, anchor), k, base, corrected, distribution, int(ids[row, position])


def _domino(drafter, target, tokens, z):
    """What Domino's head adds behind the tokens from the anchor on."""
    state = torch.zeros(1, drafter.config.gru_hidden_dim)
    for token in tokens:
        state = drafter.prefix_gru.step(target.model.embed_tokens(token)[None], state)
    return drafter.embed_proj(torch.cat((z[-1], state[0])))


def _markov(drafter, target, tokens, z):
    """What DSpark's head adds, of the draft hidden states of the positions so far `[T, H]`."""
    head, state = drafter.markov_head, torch.zeros(drafter.config.markov_rank)
    for token, h in zip(tokens, z, strict=True):
        read = head.markov_w1.weight[token]
        if hasattr(head, "gate_proj"):
            read = head.gate_proj(torch.cat((h, read))).sigmoid() * read
        if hasattr(head, "joint_proj"):
            gate, candidate, read = head.joint_proj(torch.cat((state, read, h))).chunk(3)
            state, read = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh(), read.tanh()
    return head.markov_w2(read)


def _selector(drafter, target, tokens, z):
    """What DFlash 2's selector adds, to the scores of all tokens."""
    of = drafter.candidate_selector
    return of.successor_codebook(of.predecessor_codebook.weight[tokens[-1]] * of.hidden_projection(z[-1]))


def _corrected_state(drafter, target, tokens, z):
    """What lm_head makes of what DFly's MLP adds to a state."""
    of, embedding = drafter.hidden_correction, target.model.embed_tokens(tokens[-1])
    read = torch.cat((of.hidden_norm(z[-1]), of.embed_norm(embedding)))
    added = of.down_proj(F.silu(of.gate_proj(read)) * of.up_proj(read))
    return target.lm_head.weight[drafter.vocabulary.ids(torch.arange(drafter.config.draft_width))] @ added


def _refined(drafter, target, tokens, z):
    """What XPress's head adds, of the draft hidden states of the whole block `[K, H]`."""
    head, first = drafter.refiner_head, drafter.config.label_offset
    tokens = torch.cat((tokens[:1],) * first + (tokens,))
    length = len(tokens)
    mean = z.mean(dim=0).expand_as(z)
    read = (head.down_h(z)[:length], head.down_g(mean)[:length], head.token_embed(tokens))
    x = head.in_proj(torch.cat(read, dim=-1))
    c = x[-1] + (head.mix_l[:, length - 1, :length] * x.mT).sum(dim=1)
    return head.readout(c + head.mlp_down(F.silu(head.mlp_gate(c)) * head.mlp_up(c)))


CORRECTIONS = {"dspark": _markov, "dflash2": _selector, "dfly": _corrected_state, "xpress": _refined}


def _along(drafter, target, ids, context, anchor):
    """What a drafter that reads its own drafts makes of a text, all entries anew for each token: `[K, H]`."""
    view, states = TargetModel(target), context
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    for k in range(drafter.config.block_size):
        places = torch.arange(anchor + k)[None]
        embeds = drafter.embed(view, ids[:, (places[0] + 1).clamp(max=ids.shape[1] - 1)])
        states = torch.cat((states, drafter(embeds, states, places, causal)[:, -1:]), dim=1)
    found = states[0, anchor:]
    return found if drafter.config.norm_output else drafter.norm(found)
