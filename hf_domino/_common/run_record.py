"""`Run`: how a drafter was trained, in one file beside it. Its card is made from it, and a resumed run must fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.errors import invalid_argument

RUN_FILE = "run.json"
VERSION = 1
NOT_READ = "Another version of hf_domino or another program wrote it: delete it, or train into another folder."


@dataclass(frozen=True)
class Text:
    """The examples of a training or an evaluation.

    Args:
        examples (`int`, *optional*): How many there are; None for a stream.
        tokens (`int`, *optional*): Tokens of all examples; None if they were not counted.
        left_out (`int`, *optional*, defaults to 0): Examples of the same text that nothing can be learned from.
        dataset (`str`, *optional*): Name of the data set on the Hub; None for files and lists.
        digest (`str`, *optional*): Digest of some of the examples; None for a stream.
    """

    examples: int | None = None
    tokens: int | None = None
    left_out: int = 0
    dataset: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Run:
    """How a drafter was trained so far.

    Args:
        steps (`int`): Steps of the optimizer.
        tokens (`int`, *optional*): Tokens that were read in all steps, or None if they were not counted.
        arguments (`Mapping`, *optional*): The arguments of the training and the sizes of the drafter that change the
            result, in the order in which a card lists them.
        texts (`Mapping`, *optional*): The [`Text`] that it learned (`"train"`) and the held-out one (`"eval"`).
        log (`Sequence[Mapping]`, *optional*): What was logged, as in `log_history` of Transformers' `TrainerState`.
        provenance (`Mapping`, *optional*): Hardware, versions, commit and date.
        base_digest (`str`, *optional*): Digest of the drafter under the adapter, if one was trained.
        version (`int`, *optional*, defaults to 1): Version of this record.

    Example:
    ```python
    >>> from tempfile import TemporaryDirectory
    >>> from hf_domino.training import Run
    >>> run = Run(steps=2, log=[{"step": 2, "base_loss": 3.5}, {"step": 2, "eval_loss": 4.0}])
    >>> with TemporaryDirectory() as folder:
    ...     run.save(folder)
    ...     Run.load(folder).evaluations
    [{'step': 2, 'eval_loss': 4.0}]

    ```
    """

    steps: int
    tokens: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, Text] = field(default_factory=dict)
    log: Sequence[Mapping[str, Any]] = field(default_factory=list)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    base_digest: str | None = None
    version: int = VERSION

    @property
    def training_log(self) -> list[Mapping[str, Any]]:
        """The entries of the log about training steps."""
        return [entry for entry in self.log if "base_loss" in entry]

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The entries of the log about evaluations, at most one for each step."""
        # The last step can be evaluated twice: at the end of its interval, and at the end of the training.
        return list({entry["step"]: entry for entry in self.log if "eval_loss" in entry}.values())

    def save(self, folder: str | Path) -> None:
        """Write the record into the folder of a drafter or a checkpoint."""
        write_atomic(Path(folder, RUN_FILE), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Run | None:
        """Read the record of a folder; None if it has none.

        Raises:
            ValueError: If the file is damaged, or has another version.
        """
        path = Path(folder, RUN_FILE)
        if not path.is_file():
            return None
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']}")
            texts = {use: Text(**text) for use, text in values.pop("texts").items()}
            return cls(texts=texts, **values)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            expected = f"the record of a training, version {VERSION}"
            raise invalid_argument(str(path), expected, str(error), NOT_READ) from error
