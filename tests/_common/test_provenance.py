"""Where rows say that they come from."""

import subprocess

from hf_domino._common import provenance


def test_commit_is_unknown_outside_a_checkout(monkeypatch):
    refused = subprocess.CompletedProcess([], returncode=128, stdout="")
    monkeypatch.setattr(provenance.subprocess, "run", lambda *args, **kwargs: refused)
    assert provenance.provenance()["commit"] == "unknown"
