"""The decoding loop. In each round, the `policy` plans, a drafter or prompt lookup proposes, and the target verifies.

`loop` runs one round after another, with the parts that a `call` creates once; `static` has the parts for fixed shapes.
`candidate_generator` makes the proposals, which have the form of a `tree`, by `drafting` or by `prompt_lookup`, which
reads a `lookup_memory`, a `token_ring` with an `ngram_index`. Drafts grow along `branches`, as a chain or (`growing`)
as a tree, and are chosen among `candidates`. `runner` runs the target on one of its `caches`, `verification` accepts
proposals, and `output` collects the committed tokens. `support` says whether rounds can propose trees. `sampling` has
the distribution of the next token, which the target and the drafter share. It is computed from `prefixes` by logits
`processors`. Tokens are drawn with `noise`, and `stopping` says where texts end. `round` has the records that the loop,
the policy and the statistics exchange, and `estimates` has what the policy learns from them.
"""
