"""Structured output: a grammar as `generate`'s `prefix_allowed_tokens_fn`, which constrains drafts, too.

A logits processor that advances a grammar with each call only works on committed tokens, one position after the other
and one sequence at a time, and it cannot constrain drafts. But which tokens a grammar allows next is a function of the
text so far. In this form, drafts follow the grammar, all positions of a block are verified at once, and the sequences
of a batch advance at their own pace. Between two calls, the parser rolls back to where their texts diverge, and
continues from there.

Shapes: T tokens of a text, N tokens that are allowed, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_domino._common.errors import invalid_argument

if TYPE_CHECKING:
    import xgrammar


class AllowedByGrammar:
    """A `prefix_allowed_tokens_fn` that allows the tokens of a grammar, with or without a drafter.

    Args:
        grammar (`xgrammar.CompiledGrammar`): What the new text of every sequence must match: a JSON schema, a regular
            expression or a grammar, compiled for the target's tokenizer and its vocabulary.
        prompt_length (`int`): Number of tokens before the new text, padding included: `input_ids.shape[1]`, or 0 if
            `generate` gets only `inputs_embeds`.
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, prompt_length: int):
        if prompt_length < 0:
            remedy = 'Give inputs["input_ids"].shape[1].'
            raise invalid_argument("prompt_length", "the number of tokens in the prompt", prompt_length, remedy)
        self._grammar = grammar
        self._prompt_length = prompt_length
        self._ends = torch.tensor(grammar.tokenizer_info.stop_token_ids)
        self._parses: dict[int, _Parse] = {}

    def __call__(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are allowed next.

        Args:
            row (`int`): Index of the sequence in the batch.
            ids (`torch.Tensor`): The sequence so far, `[T]`, including the prompt.

        Returns:
            `torch.Tensor`: The allowed ids `[N]`. If nothing can follow, because a draft breaks the grammar or the text
            has ended, only the tokens that end a text.
        """
        if row not in self._parses:
            self._parses[row] = _Parse(self._grammar)
        allowed = self._parses[row].allowed_after(ids[self._prompt_length :].tolist())
        return (allowed if len(allowed) else self._ends).to(ids.device)


class _Parse:
    """Incremental parser for the text of one sequence."""

    def __init__(self, grammar: xgrammar.CompiledGrammar):
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocab_size = grammar.tokenizer_info.vocab_size
        self._bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)  # 32 tokens per integer
        self._tokens: list[int] = []

    def allowed_after(self, tokens: list[int]) -> torch.Tensor:
        """Return the ids `[N]` that may follow `tokens`; none if the text cannot continue."""
        if not self._move_to(tokens) or self._matcher.is_terminated():
            return torch.empty(0, dtype=torch.long)
        self._matcher.fill_next_token_bitmask(self._bitmask)
        is_allowed = (self._bitmask[0][:, None] >> torch.arange(32)) & 1
        return is_allowed.flatten()[: self._vocab_size].nonzero()[:, 0]

    def _move_to(self, tokens: list[int]) -> bool:
        """Move the parser from the last tokens to these; return whether the grammar accepts all of them."""
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        num_equal = next((index for index, (a, b) in pairs if a != b), min(len(self._tokens), len(tokens)))
        self._matcher.rollback(len(self._tokens) - num_equal)
        del self._tokens[num_equal:]
        for token in tokens[num_equal:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._tokens.append(token)
        return True
