"""An exported folder on the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]  # whichever its library has
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from cache_store.errors import ConfigError, EncodeOnceError
from trainer.model.language.pretrained import first_line


def refuse_unpushable(repo: str) -> None:
    """Raise ConfigError, before anything is written, where nothing can be pushed to `repo`."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"push-to-hub: {first_line(error)}") from None
    if is_offline_mode():
        raise ConfigError("push-to-hub: HF_HUB_OFFLINE is set; unset it where there is a network")
    if get_token() is None:
        raise ConfigError("push-to-hub: nobody is logged in to the Hub here; run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repo: str, steps: int, *, private: bool) -> str:
    """Upload the folder, into a new repository if there is none; return its address."""
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=f"Projector after {steps:,} steps")
    except (HTTPError, OSError) as error:
        raise EncodeOnceError(
            f"{folder} is whole, and was not pushed to {repo}: {first_line(error)}; run `hf upload {repo} {folder}`"
        ) from None
    return str(made)
