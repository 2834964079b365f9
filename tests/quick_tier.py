"""The files of `pytest -m quick`: one for each package, which together tell in three minutes whether it works."""

from __future__ import annotations

# Package, or module beside the packages -> its file, whose tests take at most about ten seconds.
QUICK = {
    "_common": "_common/test_atomic_writes.py",
    "cards": "cards/test_sections.py",
    "cli": "cli/test_cli.py",
    "configuration": "configuration/test_configuration.py",
    "data": "data/test_records.py",
    "decoding": "decoding/test_candidate_generator.py",
    "evaluation": "evaluation/benchmark/test_report.py",
    "formats": "formats/test_export.py",
    "integration": "integration/test_custom_generate.py",
    "methods": "methods/test_method_table.py",
    "pair": "pair/test_pair.py",
    "publishing": "publishing/test_folder.py",
    "serving": "serving/test_settings.py",
    "stats": "stats/test_stats.py",
    "targets": "targets/test_identity.py",
    "training": "training/test_parts.py",
    "trl": "test_trl.py",
    "kernels": "ops/test_choice.py",
    "workshop": "workshop/test_tables.py",
    "the tree": "test_architecture.py",
}
