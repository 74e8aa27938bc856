"""A tiny real encoder, tiny real data, a cache that is not the user's, and no trace of one test in another."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: no test may depend on a network

import hypothesis
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

torch.set_num_threads(1)  # tiny tensors: threads only get in the way

# A shell's background jobs and nohup ignore these, and so would the programs that are interrupted here.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# `make test` tries the same examples everywhere; `make fuzz` draws others in every run, and says how to have one again.
# What it finds stays as an @example beside the property.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "fuzz",
    derandomize=False,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("MTEM_FUZZ_EXAMPLES", "2000")),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
PROFILE = os.environ.get("MTEM_HYPOTHESIS_PROFILE", "fixed")
hypothesis.settings.load_profile(PROFILE)


def examples(count: int, **more) -> hypothesis.settings:
    """So many examples of a property; in `make fuzz` as many as that has."""
    return hypothesis.settings(**more) if PROFILE == "fuzz" else hypothesis.settings(max_examples=count, **more)


# In two processes the longest files must not come last; the order inside a file is pytest-randomly's.
LONG = (
    "test_fuzz",
    "test_parallel",
    "test_ray_pool",
    "test_model",
    "test_search",
    "test_runner",
    "test_methods_learn",
    "test_adapt",
    "test_methods",
    "test_commands",
    "test_processes",
    "test_rehearse",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_terminal_summary(terminalreporter, config):
    """How to have this order again; pytest-randomly says it in a header that quiet runs do not have."""
    seed = config.getoption("randomly_seed", None)
    if seed not in (None, "default") and config.pluginmanager.hasplugin("randomly"):
        terminalreporter.write_line(f"in the order of --randomly-seed={seed}")


# What mtem and its tests look at; libraries write down others for themselves when they are first used.
VARIABLES = ("MTEM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "XDG_", "HOME", "PATH", "PYTHON", "COLUMNS", "TERM")


def _shared_state() -> dict[str, object]:
    return {
        "environment": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        "directory": os.getcwd(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def apart(request):
    """Every test begins with the same random state, whatever ran before it, and leaves the process as it found it."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    before = _shared_state()
    yield
    if "TOKENIZERS_PARALLELISM" not in before["environment"]:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)  # the pipelines of transformers leave it behind
    after = _shared_state()
    assert after == before, {name: (before[name], after[name]) for name in before if before[name] != after[name]}


GOOD = [f"good{i}" for i in range(12)]
BAD = [f"bad{i}" for i in range(12)]
PLAIN = [f"word{i}" for i in range(40)]
SHAPES = {
    "bert": {},
    "roberta": {"max_position_embeddings": 66},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48},
    "mpnet": {"max_position_embeddings": 66},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3},
}


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("MTEM_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *PLAIN]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    named = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **{f"{name}_token": token for name, token in named.items()}
    )


def make_encoder(directory: Path, shape: str = "bert", seed: int = 0) -> Path:
    """A randomly drawn encoder of that architecture, three layers of width 32, as a Hugging Face directory."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    base = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    base |= {"intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.1}
    config = AutoConfig.for_model(shape, **{**base, **SHAPES[shape]})
    AutoModel.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def make_texts(count: int, seed: int, shift: float = 0.0) -> list[tuple[str, str]]:
    """(text, label): a few class words among plain ones; `shift`: share of class words from the vocabulary's second half."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        label = ("bad", "good")[number % 2]
        words = [str(draw.choice(PLAIN)) for _ in range(int(draw.integers(3, 9)))]
        for _ in range(2):
            half = draw.integers(6) + (6 if draw.random() < shift else 0)
            words.insert(int(draw.integers(len(words) + 1)), (BAD, GOOD)[number % 2][int(half)])
        rows.append((" ".join(words), label))
    return rows


def write_jsonl(path: Path, rows: list[tuple[str, str]], labeled: bool = True) -> Path:
    lines = [{"text": text, "label": label} if labeled else {"text": text} for text, label in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def reviews(tmp_path_factory) -> dict[str, Path]:
    """Two labeled source files, an unlabeled target file, a labeled test file."""
    place = tmp_path_factory.mktemp("reviews")
    return {
        "books": write_jsonl(place / "books.jsonl", make_texts(60, 1)),
        "dvd": write_jsonl(place / "dvd.jsonl", make_texts(60, 2, 0.3)),
        "kitchen": write_jsonl(place / "kitchen.jsonl", make_texts(80, 3, 0.7), labeled=False),
        "test": write_jsonl(place / "test.jsonl", make_texts(60, 4, 0.7)),
    }


@pytest.fixture
def tiny(encoder, reviews) -> dict:
    """Arguments of a whole adaptation that takes a second or two."""
    return {
        "source": [str(reviews["books"]), str(reviews["dvd"])],
        "target": str(reviews["kitchen"]),
        "model": encoder,
        "max_length": 16,
        "batch_size": 10,
        "source_epochs": 2,
        "epochs": 1,
        "source_learning_rate": 3e-3,
        "learning_rate": 1e-3,
        "evaluations": 3,
        "frozen_layers": 0,
    }


@pytest.fixture(scope="session")
def rehearsed(encoder, tmp_path_factory) -> dict:
    """A finished rehearsal of three domains in which one of two learning rates is ruinous, and the request that it came from."""
    import mtem
    from tests import rehearsed

    place = tmp_path_factory.mktemp("rehearsed")
    request = {"source": rehearsed.write_domains(place, books=110, dvd=110, toys=110), "model": str(encoder), **rehearsed.SMALL}
    compared = {"method": [rehearsed.write_method(place, "further")]}
    compared["learning_rates"] = [rehearsed.RUINOUS_RATE, rehearsed.GOOD_RATE]
    result = mtem.rehearse(**request, **compared, output=place / "rehearsal")
    return {"rehearsal": result, "path": place / "rehearsal", "place": place, "request": request, "compared": compared}


@pytest.fixture(scope="session")
def worse(encoder, tmp_path_factory) -> dict:
    """A finished rehearsal of a method whose steps make the model worse."""
    import mtem
    from tests import rehearsed

    place = tmp_path_factory.mktemp("worse")
    request = {"source": rehearsed.write_domains(place, books=160, dvd=160), "model": str(encoder), **rehearsed.SMALL}
    request |= {"source_epochs": 4}
    method = rehearsed.write_method(place, "worse")
    result = mtem.rehearse(**request, method=method, learning_rates=[3e-3], output=place / "rehearsal")
    return {"rehearsal": result, "path": place / "rehearsal", "request": request, "method": method}


@pytest.fixture
def command(monkeypatch, capsys):
    """The command line in this process: (exit code, standard output, standard error)."""
    from mtem.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mtem", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
