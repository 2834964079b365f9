"""One round: the `policy` plans, `drafting` or `copies` propose, the `runner` runs the target.

The `loop` goes from round to round. What is proposed is a `tree`; what `verification` accepts goes to the `output` and
stays in the `caches`. `sampling` is the distribution of the next token for both sides, `prefixes` what it looks at,
`processors` its steps, `stopping` where texts end, `noise` what it draws with. Drafts come along `branches`, in a chain
or, by `growing`, in a tree, from `candidates`. `parts` are chosen once a call: `static` has those of fixed shape.
`round` is what policy, statistics and loop tell each other, and `estimates` is what the policy knows.
"""
