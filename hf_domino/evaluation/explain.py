"""One round, opened: what the drafter proposed and why, and what the target makes of it.

For looking at and for drawing. The block is drafted by the code of a round and chosen from the laws of a call to
`generate`, the processors of the target's generation configuration included.

Shapes: T tokens so far, P proposals, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import leading_run
from hf_domino.drafter.blocks import draft_hidden_states
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.compatibility import check_drafter, check_target
from hf_domino.target.view import TargetModel


@dataclass(frozen=True)
class Round:
    """What happened inside one greedy round, on the CPU; distributions are in fp32, after `generate`'s processors.

    Args:
        anchor (`int`): The token the block starts from.
        proposals (`torch.Tensor`): Token ids `[P]` that the drafter proposed.
        base_probs (`torch.Tensor`): `[P, V]` of the backbone alone, which chose no token and knows none but the anchor.
        corrected_probs (`torch.Tensor`): `[P, V]` after the correction head has read the anchor and the proposals
            before; `base_probs` itself where nothing is corrected.
        target_probs (`torch.Tensor`): The target's `[P + 1, V]`, each position behind the proposals before it.
    """

    anchor: int
    proposals: torch.Tensor
    base_probs: torch.Tensor
    corrected_probs: torch.Tensor
    target_probs: torch.Tensor

    @property
    def choices(self) -> torch.Tensor:
        """The target's own tokens `[P + 1]`, each behind the proposals before it."""
        return self.target_probs.argmax(dim=-1)

    @property
    def num_accepted(self) -> int:
        """How many proposals, from the first on, are the target's own tokens."""
        return int(leading_run((self.proposals == self.choices[:-1])[None]))

    @property
    def committed(self) -> torch.Tensor:
        """What the round adds to the text: accepted proposals and the bonus token, `[num_accepted + 1]`."""
        return self.choices[: self.num_accepted + 1]


def explain_round(
    drafter: DominoDraftModel, target: PreTrainedModel, input_ids: torch.Tensor, **generate_kwargs: Any
) -> Round:
    """Draft and verify one whole block behind a text, greedily, and return everything that decides it.

    Nothing is changed, and nothing is kept between calls: the text is read twice, which takes longer than a round.

    Args:
        drafter (`DominoDraftModel`): The drafter. `drafter.view(projector_type="dflash")` leaves its head out.
        target (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): The tokens so far, the anchor last, `[1, T]` with T at least 2.
        generate_kwargs: Arguments of `generate` that change the law of the next token, such as `repetition_penalty`.

    Returns:
        [`Round`]: Proposals, the distributions they were chosen from, and the target's.

    Raises:
        ValueError: If the drafter does not fit the target, or `input_ids` is not one text of at least two tokens.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> from hf_domino import DominoConfig, DominoDraftModel, explain_round
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=8))
    >>> opened = explain_round(drafter, target, torch.tensor([[5, 9, 33]]))
    >>> opened.anchor, opened.base_probs.shape, len(opened.committed) == opened.num_accepted + 1
    (33, torch.Size([8, 64]), True)

    ```
    """
    check_drafter(drafter)
    check_target(drafter.config, target)
    if input_ids.dim() != 2 or len(input_ids) != 1 or input_ids.shape[1] < 2:
        remedy = "Give one text and the token that its block starts from."
        raise refusal("the shape of input_ids", "[1, T] with T at least 2", list(input_ids.shape), remedy)
    found: list[Round] = []

    def look(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        found.append(_explain(drafter, TargetModel(model, drafter.config), input_ids, TokenLaw(logits_processor)))
        return input_ids

    fixed = {
        "do_sample": False,
        "num_beams": 1,
        "num_return_sequences": 1,
        "attention_mask": torch.ones_like(input_ids),
    }
    fixed["max_new_tokens"] = drafter.config.num_draft_tokens + 1
    # Prepares the processors as ever, whether or not the patch is installed.
    target.generate(input_ids, custom_generate=look, **(generate_kwargs | fixed))
    return found[0]


@torch.no_grad()
def _explain(drafter: DominoDraftModel, target: TargetModel, input_ids: torch.Tensor, law: TokenLaw) -> Round:
    count, prefixes = drafter.config.num_draft_tokens, Prefixes.of(input_ids)
    draft_law = law.without_state().over(drafter.vocabulary)
    draft_hidden = _draft(drafter, target, input_ids)
    proposals = rollout(drafter, target, draft_hidden, prefixes, draft_law)
    base_logits = drafter.vocabulary.logits(target, draft_hidden.to(input_ids.device))
    corrected_logits = _corrected(drafter, target, draft_hidden, base_logits, input_ids[:, -1], proposals)
    text = torch.cat((input_ids, proposals), dim=1)
    logits = target.model(input_ids=text, use_cache=False, logits_to_keep=count + 1).logits[:, -count - 1 :]
    return Round(
        anchor=int(input_ids[0, -1]),
        proposals=proposals[0].cpu(),
        base_probs=_probs(draft_law, prefixes, base_logits, proposals[:, :-1]),
        corrected_probs=_probs(draft_law, prefixes, corrected_logits, proposals[:, :-1]),
        target_probs=_probs(law, prefixes, logits, proposals),
    )


def _draft(drafter: DominoDraftModel, target: TargetModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Draft hidden states `[1, P, H]` of the positions that predict, in the block at the last token."""
    outputs = target.model(input_ids=input_ids[:, :-1], use_cache=False, logits_to_keep=1, **target.capture_kwargs())
    context = drafter.fuse_context([states.to(drafter.device) for states in target.captured(outputs)])
    anchors = torch.tensor([[input_ids.shape[1] - 1]], device=input_ids.device)
    block = draft_hidden_states(drafter, target, input_ids, context, anchors)[:, 0]  # [1, K, H]
    first = drafter.config.label_offset
    return block[:, first : first + drafter.config.num_draft_tokens]


def _corrected(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    proposals: torch.Tensor,
) -> torch.Tensor:
    """Corrected logits `[1, P, V]`, each with the proposals before it read."""
    if not drafter.has_correction_head:
        return base_logits
    corrections = Corrections(drafter, target, draft_hidden, anchors)
    for index in range(proposals.shape[1] - 1):
        corrections.read(proposals[:, index])
    return corrections.apply_to_all(base_logits)


def _probs(law: TokenLaw, prefixes: Prefixes, logits: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
    """Probabilities `[N, V]` of successive positions of one text, on the CPU."""
    return law.vocabulary.scatter(law.scores(prefixes, logits, continuation)).softmax(dim=-1)[0].cpu()
