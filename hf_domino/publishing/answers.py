"""What the Hub, the connection to it and its client say, as one error with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from hf_domino._common.refusal import refusal

LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to a token of https://huggingface.co/settings/tokens."
RESUME = "What the Hub has received it keeps: the same command sends the rest."
WAIT = "Wait a few minutes and try again."
# By status; what a repository that is missing, gated or hidden answers has classes of its own.
REMEDIES = {
    401: f"It does not accept the token. {LOG_IN}",
    403: "The token may not do this: it needs the right to write there, or, to propose it, --create-pr.",
    409: "Somebody else changed the repository meanwhile: run the command again.",
    412: "Somebody else changed the repository meanwhile: run the command again.",
    429: f"{WAIT} Who is logged in may ask more often.",
}


def check_name(name: str, field: str) -> None:
    """Refuse what is no full name of a repository.

    Raises:
        ValueError: If it is not OWNER/NAME in the characters that the Hub allows.
    """
    try:
        validate_repo_id(name)
        reason = "" if "/" in name else "there is no owner in it"
    except HFValidationError as error:
        reason = " ".join(str(error).split())
    if reason:
        raise refusal(field, f"OWNER/NAME on the Hub ({reason.rstrip('.')})", name, "Example: my-name/my-drafter.")


@contextmanager
def explained(name: str, doing: str) -> Iterator[None]:
    """Raise what the Hub or the connection says as a `ValueError`, with what was being done, such as `"pushing to"`.

    Raises:
        ValueError: In place of every error of huggingface_hub and of the connection.
    """
    try:
        yield
    except RuntimeError as error:  # an upload's, with what happened as its cause
        if not isinstance(error.__cause__, (HTTPError, OSError)):
            raise
        raise ValueError(f"{doing} {name} broke off: {error} {_reason(error.__cause__)} {RESUME}") from error
    except (HTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"{doing} {name} failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "Offline mode is on: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to reach the Hub."
    if isinstance(error, GatedRepoError):
        return "Access is granted on request: ask for it on the repository's page, and log in (`hf auth login`)."
    if isinstance(error, RepositoryNotFoundError):
        return "The Hub does not know it, or not for you: check the name; what is private wants `hf auth login`."
    if isinstance(error, RevisionNotFoundError):
        return "There is no such revision: give a branch, a tag or a commit of it."
    said = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        remedy = REMEDIES.get(status, f"It has a problem. {WAIT}" if status >= 500 else "")
        return f"The Hub answers {status} ({(error.server_message or said).rstrip('.')}). {remedy}".strip()
    if isinstance(error, HTTPError):
        return f"The Hub does not answer ({said or type(error).__name__}): check the connection, or HF_ENDPOINT if set."
    return said
