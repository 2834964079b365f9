"""Repositories of the loopback Hub: files by commit and branch, and what the Hub derives from a card."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from huggingface_hub import ModelCard


@dataclass
class Repo:
    """A repository: trees by commit, commits by branch."""

    private: bool = False
    gated: bool = False
    gone: bool = False  # still listed, but deleted since
    downloads: int = 0
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, changes: dict[str, bytes]) -> str:
        """Put files on the main branch and return the commit's hash."""
        tree = self.trees.get(self.branches.get("main", ""), {}) | changes
        told = json.dumps([len(self.trees), {path: oid_of(path, content) for path, content in tree.items()}])
        commit = hashlib.sha1(told.encode()).hexdigest()
        self.trees[commit], self.branches["main"] = tree, commit
        return commit

    @property
    def files(self) -> dict[str, bytes]:
        """What is on the main branch."""
        return self.trees[self.branches["main"]]

    def tags(self) -> set[str]:
        """What the Hub derives from the card."""
        data = ModelCard(self.files.get("README.md", b"").decode()).data
        return {*(data.tags or ()), f"base_model:{data.base_model}"}


def is_large(path: str) -> bool:
    """Whether a file is kept outside of git."""
    return path.endswith(".safetensors")


def oid_of(path: str, content: bytes) -> str:
    """The hash that the Hub knows a file by."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
