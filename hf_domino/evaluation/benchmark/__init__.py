"""`hf-domino bench`: every way to generate, measured on one's own model in one process.

`methods` are what is compared, `measure` runs them in turn and checks that their texts are equal, `rows` keeps what was
measured, `summary` and `report` say what came of it.
"""
