"""The residual acceptance rule, for who wants more tokens a round and not plain generation's text."""
