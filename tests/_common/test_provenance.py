"""Where rows say that they come from."""

import json
import subprocess

import pytest

from hf_domino._common import provenance

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FROM_GIT = {"url": "https://example.org/hf_domino", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
FROM_FOLDER = {"url": "file:///home/me/hf_domino", "dir_info": {}}


@pytest.mark.parametrize("has_git", [True, False])
@pytest.mark.parametrize(
    ("source", "expected"), [(FROM_GIT, COMMIT), (FROM_FOLDER, "not recorded"), (None, "not recorded")]
)
def test_an_installed_package_names_the_commit_that_pip_fetched(source, expected, has_git, tmp_path, monkeypatch):
    package = tmp_path / "project" / "site-packages" / "hf_domino" / "_common"  # in somebody else's repository
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "project", check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, "commit", "-qm", "theirs", "--allow-empty"], cwd=package, check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    if not has_git:
        monkeypatch.setenv("PATH", str(tmp_path))
    if source:
        record = package.parents[1] / "hf_domino-0.1.0.dist-info" / "direct_url.json"
        record.parent.mkdir()
        record.write_text(json.dumps(source))
    assert provenance.provenance()["commit"] == expected
