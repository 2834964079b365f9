"""One round: `drafting` and its `rollout`, the target's forward by `runner`, `verification`, `output`; and the `loop`.

`sampling` is the law of the next token for both sides, `prefixes` what it looks at, `stopping` where texts end. The
stages' parts: `processors` (of the law), `correcting` (of the rollout), `caches` (of the runner), `static` (the same
stages in fixed shapes). How a round proposes is chosen by the `policy`, which `estimates` what each way brings and
costs; `copies` are what the text itself offers, and `round` is what all of them speak of.
"""
