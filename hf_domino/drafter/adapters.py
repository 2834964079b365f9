"""PEFT's adapters on a drafter: which drafter a saved one belongs to, and the drafter that one was put into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from hf_domino.compatibility import refusal
from hf_domino.formats.source import check_source
from hf_domino.formats.stored import read_object

_FIELD = "base_model_name_or_path in adapter_config.json"


def base_of(name: Any, download: Mapping[str, Any]) -> str | None:
    """The drafter that a saved adapter was made for; None of what is no adapter, or holds a whole model too.

    Args:
        name (`str` or `Path`): A folder or a Hub name that is there.
        download (`Mapping`): What `from_pretrained` takes for the Hub.

    Raises:
        ValueError: If the adapter's configuration does not say, or names itself or what is not there.
    """
    is_name = isinstance(name, (str, os.PathLike))
    if not is_name or not is_peft_available() or (Path(name) / "config.json").is_file():
        return None
    file = find_adapter_config_file(os.fspath(name), **download)
    if file is None:
        return None
    base = read_object(Path(file)).get("base_model_name_or_path")
    is_itself = isinstance(base, str) and Path(base).is_dir() and Path(base).samefile(Path(file).parent)
    if not base or not isinstance(base, str) or is_itself or base == os.fspath(name):
        remedy = f"Load the drafter, and then drafter.load_adapter({os.fspath(name)!r})."
        raise refusal(_FIELD, "the drafter's folder or Hub name", base, remedy)
    check_source(base, _FIELD, **base_download(download))
    return base


def base_download(download: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `from_pretrained` takes for the Hub, what is not the adapter's alone."""
    return {key: download[key] for key in ("cache_dir", "force_download", "proxies", "token") if key in download}


def without_wrapper(drafter: Any) -> Any:
    """The drafter inside of a `PeftModel`, its adapters included; any other as it is."""
    is_wrapped = hasattr(drafter, "peft_config") and hasattr(drafter, "get_base_model")
    return drafter.get_base_model() if is_wrapped else drafter
