"""Where rows say that they come from."""

import subprocess

import pytest

from hf_domino._common import provenance


@pytest.mark.parametrize("has_git", [True, False])
def test_the_commit_of_another_repository_is_not_ours(has_git, tmp_path, monkeypatch):
    package = tmp_path / "project" / "site-packages" / "hf_domino" / "_common"  # in somebody else's repository
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "project", check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, "commit", "-qm", "theirs", "--allow-empty"], cwd=package, check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    provenance._commit.cache_clear()
    assert provenance.provenance()["commit"] == "not recorded"
    provenance._commit.cache_clear()
