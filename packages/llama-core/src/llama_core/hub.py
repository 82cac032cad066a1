"""Models by their name on a hub, `org/name`: downloaded once per host, then read as the folder they are.

Needs the extra `hub`. Where and how the hub is reached (endpoint, token, cache, offline mode) is huggingface_hub's own
configuration; nothing of it is repeated here.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from .errors import CheckpointError

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?P<file>/[\w./-]+\.gguf)?(@(?P<revision>[\w./-]+))?")
# Weights once, as safetensors; not the .bin, .pth or GGUF copies that many repositories hold besides.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
)
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
"""Those of them that a tokenizer does without."""
ATTEMPTS = 5


def local_path(
    source: str | Path, cache_dir: str | Path | None = None, endpoint: str | None = None, *, weights: bool = True
) -> Path:
    """A path on this machine: `source` itself if it exists or is no hub name, else where it was downloaded to.

    Of several processes on one host one downloads; the others wait and then find it there.

    Args:
        source: a path, or `org/name`, `org/name@revision`, `org/name/file.gguf`.
        cache_dir, endpoint: huggingface_hub's own by default.
        weights: False where only the tokenizer is wanted.

    Raises:
        CheckpointError: there is no such path, and the hub has no such model, refuses it or cannot be reached.
    """
    path = Path(source)
    match = _ID.fullmatch(str(source))
    if path.exists() or match is None:
        return path
    try:
        from filelock import FileLock, Timeout
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        raise CheckpointError(
            f"{source} does not exist; to have it downloaded from a hub, install llama-core[hub]"
        ) from None
    cache = Path(cache_dir or HF_HUB_CACHE)
    # Whoever waits for weights must not take a folder for ready that was fetched without.
    lock = FileLock(_lock_path(cache, match["repo"] + ("" if weights else "--tokenizer")))
    try:
        lock.acquire(blocking=False)
        waited = False
    except Timeout:
        lock.acquire()
        waited = True  # somebody else has just downloaded it
    try:
        folder = _download(match, cache, endpoint, local_only=waited, weights=weights)
    finally:
        lock.release()
    return folder / match["file"][1:] if match["file"] else folder


def _lock_path(cache: Path, repo: str) -> Path:
    folder = cache / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"llama-core--{repo.replace('/', '--')}.lock"


def _download(match: re.Match[str], cache: Path, endpoint: str | None, local_only: bool, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    wanted = [pattern for pattern in PATTERNS if weights or pattern not in WEIGHTS]
    patterns = [match["file"][1:]] if match["file"] else wanted
    for attempt in range(ATTEMPTS):
        try:
            return Path(
                snapshot_download(
                    match["repo"],
                    revision=match["revision"],
                    cache_dir=cache,
                    endpoint=endpoint,
                    allow_patterns=patterns,
                    local_files_only=local_only,
                )
            )
        except errors.LocalEntryNotFoundError as error:
            if not local_only:
                raise _fault(match, "cannot be reached, and the model is not in the cache", error) from None
            local_only = False  # whoever had the lock did not succeed
        except errors.GatedRepoError as error:
            raise _fault(match, "asks for a licence to be accepted and a token (`hf auth login`)", error) from None
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
            raise _fault(match, "has no such model or revision", error) from None
        except Exception as error:  # a connection that broke: what has arrived is kept, the next attempt goes on there
            if attempt == ATTEMPTS - 1:
                raise _fault(match, f"gave up after {ATTEMPTS} attempts", error) from None
            time.sleep(2.0**attempt)
    raise AssertionError("unreachable")


def _fault(match: re.Match[str], text: str, error: Exception) -> CheckpointError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return CheckpointError(f"{match[0]} is no path on this machine, and the hub {text}: {reason}")
