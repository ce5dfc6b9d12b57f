"""Publishing a saved model on the Hugging Face hub. The token is huggingface_hub's business and is never asked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from slideformer.errors import BadInput, RunFailed


def require_hub(repo_id: str) -> None:
    """Raise BadInput for what would make a push fail after a long run: the name, no token, offline. Asks no network."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise BadInput(f"hub_model_id is {repo_id!r}: {error}: write NAME or ORGANISATION/NAME") from None
    if constants.HF_HUB_OFFLINE:
        raise BadInput("push_to_hub is true, and so is HF_HUB_OFFLINE: unset one of the two")
    if get_token() is None:
        raise BadInput("push_to_hub needs a token of the hub: log in with `hf auth login`, or set HF_TOKEN")


def push(folder: Path, names: Iterable[str], repo_id: str, *, private: bool) -> str:
    """Upload these files of `folder` and nothing else in it; makes the repository if need be. Returns its address.

    Raises RunFailed with what the hub said.
    """
    api = HfApi()
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo.repo_id, folder_path=folder, allow_patterns=sorted(names), commit_message="Fine-tuned weights"
        )
    except Exception as error:  # whatever a network, a proxy or the hub makes the client raise
        reason, again = " ".join(str(error).split()), shlex.join([str(folder), f"{folder}-again"])
        raise RunFailed(
            f"the model is complete in {folder} but could not be pushed to {repo_id} ({reason}): try again with "
            f"slideformer export {again} --push-to-hub --hub-model-id {repo_id}"
        ) from error
    return str(repo)
