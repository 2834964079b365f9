"""`hf-domino bench`: measure every way to generate on your own model, in one process.

`methods` defines the methods to compare, `measure` runs them in turn and checks that their texts are equal, `rows`
keeps the results, and `summary` and `report` summarize them.
"""
