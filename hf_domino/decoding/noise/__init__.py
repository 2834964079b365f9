"""The noise of sampling, shared by drafts and target: drawn as plain `generate` draws it, and given back."""
