"""Log notices for the user, once for all processes of a run."""

from __future__ import annotations

import os

from transformers.utils import logging

logger = logging.get_logger(__name__)


def notice(message: str) -> None:
    """Log a warning, on the first process only."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message)


def notice_once(message: str) -> None:
    """Log a warning like [`notice`], unless this process has logged it before."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning_once(message)
