"""Structured output: a grammar as `generate`'s `prefix_allowed_tokens_fn`, which drafts are asked about, too.

A logits processor that advances a grammar call by call may be shown committed tokens only, one position after the
other and one row at a time, and drafts are made without it. What is allowed behind a text is a function of the text:
asked as such, drafts keep to the grammar, all positions of a block are verified at once and rows of a batch advance
at their own pace. Between two questions the parser goes back to where their texts part, and on from there.

Shapes: T tokens of a text, N tokens that are allowed, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_domino._common.errors import invalid_argument

if TYPE_CHECKING:
    import xgrammar


class AllowedByGrammar:
    """The tokens that a grammar allows behind a text; plain `generate` takes it, too.

    Args:
        grammar (`xgrammar.CompiledGrammar`): What the new text must be, for all rows alike: a JSON schema, a regular
            expression, a grammar. Compiled for the target's tokenizer and its vocabulary.
        prompt_length (`int`): Tokens before the new text, padding included, as in `input_ids.shape[1]`; 0 where
            `generate` is given `inputs_embeds` alone.
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
        """Tell what may come next.

        Args:
            row (`int`): Which row of the batch is asked about.
            ids (`torch.Tensor`): Its text so far, `[T]`, the prompt first.

        Returns:
            `torch.Tensor`: Ids `[N]`. Where nothing can follow, in a draft that breaks the grammar or behind the end of
            a text, only the end.
        """
        if row not in self._parses:
            self._parses[row] = _Parse(self._grammar)
        allowed = self._parses[row].behind(ids[self._prompt_length :].tolist())
        return (allowed if len(allowed) else self._ends).to(ids.device)


class _Parse:
    """Parse the text of one row, as far as it is known."""

    def __init__(self, grammar: xgrammar.CompiledGrammar):
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._vocab_size = grammar.tokenizer_info.vocab_size
        self._bitmask = xgrammar.allocate_token_bitmask(1, self._vocab_size)  # 32 tokens in each number
        self._tokens: list[int] = []

    def behind(self, tokens: list[int]) -> torch.Tensor:
        """Ids `[N]` that may follow; none where the text cannot go on."""
        if not self._go_to(tokens) or self._matcher.is_terminated():
            return torch.empty(0, dtype=torch.long)
        self._matcher.fill_next_token_bitmask(self._bitmask)
        is_allowed = (self._bitmask[0][:, None] >> torch.arange(32)) & 1
        return is_allowed.flatten()[: self._vocab_size].nonzero()[:, 0]

    def _go_to(self, tokens: list[int]) -> bool:
        """Parse other tokens than the last ones; whether the grammar takes them all."""
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        num_equal = next((index for index, (a, b) in pairs if a != b), min(len(self._tokens), len(tokens)))
        self._matcher.rollback(len(self._tokens) - num_equal)
        del self._tokens[num_equal:]
        for token in tokens[num_equal:]:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._tokens.append(token)
        return True
