"""The pretrained encoder of a target: rehearsals on its sources and cells with it share one.

It is trained on the source texts and the unlabeled target texts, once for each pool, target and seed. In the semi-supervised
setting the labeled target texts are not among them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtem import models
from mtem.atomic import write_json
from mtem.data.corpus import Corpus
from mtem.methods.source_only import SourceOnly
from mtem.progress import Progress
from mtem.run.adapt import AdaptSettings, Corpora, create_model, find_settings
from mtem.run.pretrained import SETTINGS, write_pretrained
from mtem.run.record import machine, versions
from mtem.training.devices import find_device
from mtem.training.pretraining import pretrain_model

FOLDER = "pretrained"  # below the folder of source models


@dataclasses.dataclass(frozen=True)
class Store:
    """The encoders that were pretrained for some results.

    Parameters
    ----------
    folder
        Where they are.
    model, device
        As for ``mtem adapt``.
    """

    folder: Path
    model: str
    device: str

    def find(self, place: tuple[str, ...], source: Corpus, target: Corpus, given: Mapping[str, Any]) -> Path | None:
        """Return the file of an encoder, pretrained first if it is missing; None if the settings ask for no pretraining.

        Parameters
        ----------
        place
            Data set, model, pool, target and seed: the names of folders and of the file.
        source, target
            The texts.
        given
            The settings of the source training, with the seed, the length of the texts and the passes of the pretraining.
        """
        chosen = find_settings(self.model, SourceOnly.name, "recommended", {**given, "device": self.device})
        if not chosen.training.pretrain_epochs:
            return None
        defining = [getattr(chosen.training, name) for name in SETTINGS]
        digest = hashlib.sha256(json.dumps(defining).encode()).hexdigest()[:8]
        path = self.folder.joinpath(*place[:-2], f"{'-'.join(place[-2:])}-{digest}.safetensors")
        with locked(path.with_suffix(".lock")):  # of several processes the first one trains, and the others wait
            if not path.is_file():
                self._train(path, source, target, chosen)
        return path

    def _train(self, path: Path, source: Corpus, target: Corpus, chosen: AdaptSettings) -> None:
        started = time.monotonic()
        device = find_device(self.device)
        name = models.find(self.model, chosen.model)
        network = create_model(name, Corpora(source, target, None), chosen, SourceOnly, None, device)
        pretrain_model(network, [source, target], chosen.training, Progress(quiet=True))
        write_pretrained(path, network)
        record = {
            "texts": len(source) + len(target), "settings": {name: getattr(chosen.training, name) for name in SETTINGS},
            "seconds": round(time.monotonic() - started, 1), "machine": machine(str(device)), "versions": versions(),
        }  # fmt: skip
        write_json(path.with_suffix(".json"), record)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the processes of one machine share, where the system has such locks; it ends with the process."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
