"""One round: the `policy` plans, `drafting` or `copies` propose, the `runner` runs the target, a rule verifies.

The `loop` goes from round to round. What is proposed is a `tree`; the rules are in `verification` and `residual`; what
is accepted goes to the `output` and stays in the `caches`. `sampling` is the law of the next token for both sides,
`prefixes` what it looks at, `processors` its steps, `stopping` where texts end, `noise` what it draws with. Drafts come
from the `rollout` of a chain, or from `growing` a tree, along `lanes` and from `candidates`. `parts` are chosen once a
call: `static` has those of fixed shape. `round` is what policy, statistics and loop tell each other, and `estimates` is
what the policy knows.
"""
