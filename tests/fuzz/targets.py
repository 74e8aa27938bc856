"""What is fuzzed, by name: each target writes hostile files into a folder, reads them as a command would, and checks the answer.

A target raises `RequestError` or `RunError` for what it refuses. Whatever else it raises is a failure.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

import mtem
from mtem import inference, methods, settings
from mtem.cli.tables import print_metrics
from mtem.data import readers
from mtem.data.loading import load_corpus
from mtem.data.writers import Writer
from mtem.datasets import registry
from mtem.errors import RequestError, RunError
from mtem.models.registry import get_class
from mtem.report.page import write_report
from mtem.run.result import Adapted
from mtem.terminal import Terminal
from mtem.training.settings import TrainingSettings
from tests.fuzz import hostile
from tests.fuzz.hostile import Random
from tests.fuzz.workshop import Workshop

Target = Callable[[Path, Random, Workshop], None]
TEXT_FILES = {".csv": lambda draw: hostile.table_bytes(draw, b","), ".tsv": lambda draw: hostile.table_bytes(draw, b"\t")}
FILES = {**TEXT_FILES, ".jsonl": hostile.lines_bytes, ".parquet": hostile.parquet_bytes}


def attempt(function: Callable[[], Any]) -> Any:
    """The result, None if it is refused in one line."""
    try:
        return function()
    except (RequestError, RunError) as error:
        check_message(error)
        return None


def check_message(error: Exception) -> None:
    message = str(error)
    assert message and "\n" not in message and len(message) < 3000, f"not one short line: {message[:3000]!r}"


def put_table(folder: Path, draw: Random, ending: str) -> tuple[Path, bytes]:
    """Write a table, right or damaged, plain or gzipped; return its path, and its bytes if they are not damaged gzip."""
    data = FILES[ending](draw)
    if draw.random() < 0.4:
        data = hostile.mutate_bytes(draw, data)
    stored, plain = data, data
    path = folder / f"{hostile_name(draw)}{ending}"
    if draw.random() < 0.25:
        path = path.with_name(path.name + ".gz")
        stored = hostile.compressed(draw, data)
        if draw.random() < 0.5:
            stored = hostile.mutate_bytes(draw, stored)
            plain = b""
    path.write_bytes(stored)
    return path, plain


def hostile_name(draw: Random) -> str:
    return draw.choice(("data", "data", "a b", "...", "\x1b[31m", "é", "-x", "=1"))


def table(ending: str) -> Target:
    def run(folder: Path, draw: Random, shop: Workshop) -> None:
        path, data = put_table(folder, draw, ending)
        rows = attempt(lambda: list(readers.read_rows(path)))
        if rows is not None and data:
            check_rows(ending, data, rows)
        corpus = attempt(lambda: load_corpus(str(path), labeled=draw.random() < 0.5, cache=folder / "cache"))
        if corpus is not None:
            assert all(text.strip() for text in corpus.texts()) or corpus.threaded
            assert not corpus.labeled or all(corpus.labels())

    return run


def check_rows(ending: str, data: bytes, rows: list[tuple[int, dict[str, Any]]]) -> None:
    """Compare what was read with a second, simple way to read it."""
    numbers = [number for number, _ in rows]
    assert numbers == sorted(set(numbers)), "row numbers do not rise"
    if ending == ".parquet":
        try:
            read = pq.read_table(io.BytesIO(data)).to_pylist()
            expected = [{name: None if value is pd.NaT else value for name, value in record.items()} for record in read]
        except Exception:  # a value that Python does not have: the reader gives it as text
            return
    elif ending == ".jsonl":
        lines = data.decode("utf-8-sig").split("\n")
        expected = [json.loads(line) for line in lines if line.strip("\r \t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u2028\u2029\u3000")]
    else:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        filled = [fields for fields in csv.reader(text, delimiter="\t" if ending == ".tsv" else ",", strict=True) if fields]
        expected = [dict(zip(filled[0], fields, strict=True)) for fields in filled[1:]]
    assert repr([record for _, record in rows]) == repr(expected), "another reader gives other rows"


def predict(folder: Path, draw: Random, shop: Workshop) -> None:
    path, _ = put_table(folder, draw, draw.choice(list(FILES)))
    output = folder / f"out{draw.choice(['.csv', '.tsv', '.jsonl', '.parquet', '.csv.gz'])}"
    raw, every = draw.random() < 0.5, draw.random() < 0.5
    done = attempt(lambda: inference.predict_file(shop.model, path, output, raw=raw, all_probabilities=every))
    assert output.exists() == (done is not None), "an output of a refused request"
    assert {entry.name for entry in folder.iterdir()} <= {path.name, output.name}, "files beside the output"
    if done is None or (not raw and hostile_header(path)):
        return
    rows = [record for _, record in readers.read_rows(output)] if done.rows else []
    assert len(rows) == done.rows and sum(done.counts.values()) == done.rows - done.empty
    assert all(record["prediction"] in (*shop.model.classes, None, "") for record in rows)


def hostile_header(path: Path) -> bool:
    """Whether columns would have the same name with an apostrophe in front, as in =a and '=a."""
    return any(name.startswith("'") for name in readers.columns(path))


def threads(folder: Path, draw: Random, shop: Workshop) -> None:
    path = folder / "threads.jsonl"
    path.write_bytes(b"\n".join(hostile.dump_json(hostile.draw_thread(draw)) for _ in range(draw.choice((1, 4)))))
    corpus = attempt(lambda: load_corpus(str(path), labeled=draw.random() < 0.5, cache=folder / "cache"))
    for thread in corpus.threads() if corpus is not None else ():
        assert all(parent < place for place, parent in enumerate(thread.parents))
    attempt(lambda: inference.predict_file(shop.model, path, folder / "out.jsonl"))


# ---------------------------------------------------------------------- archives


REVIEW = b"<review>\n<rating>4.0</rating>\n<title>fine</title>\n<review_text>good %d</review_text>\n</review>\n"


def archive(folder: Path, draw: Random, shop: Workshop) -> None:
    dataset = draw.choice(("amazon", "pheme"))
    files = (amazon_files if dataset == "amazon" else pheme_files)(draw)
    data, ending = zip_bytes(draw, files) if draw.random() < 0.3 else tar_bytes(draw, files)
    if draw.random() < 0.5:
        data = hostile.mutate_bytes(draw, data)
    source, to = folder / f"archive{ending}", folder / "to"
    source.write_bytes(data)
    lines = attempt(lambda: registry.get(dataset).prepare(source, to))
    assert {entry.name for entry in folder.iterdir()} <= {source.name, "to"}, "files outside the folder"
    if lines is None:
        assert not to.exists() or not any(to.iterdir()), "files of a refused request"
        return
    for path in to.iterdir():
        attempt(lambda path=path: list(readers.read_rows(path)))  # type: ignore[misc]


def amazon_files(draw: Random) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for domain in ("books", draw.choice(("dvd", "../dvd", "a\nb", "x" * 300, "\x1b[2J", "..", "=1"))):
        for part in ("positive", "negative", "unlabeled"):
            reviews = b"".join(REVIEW % k for k in range(draw.randrange(1, 4)))
            files[f"data/{domain}/{part}.review"] = hostile.mutate_bytes(draw, reviews) if draw.random() < 0.3 else reviews
    if draw.random() < 0.3:
        lines = b"\n".join(hostile.dump_json({"text": hostile.draw_value(draw), "label": "positive"}) for _ in range(3))
        files["data/toys.labeled.jsonl"] = lines
    return files


def pheme_files(draw: Random) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for number in range(draw.randrange(1, 3)):
        event, label = draw.choice(("ottawa-all-rnr-threads", "x", "..", "\x1b")), draw.choice(("rumours", "non-rumours"))
        place = f"pheme/{event}/{label}/{number}"
        for reply in range(3):
            tweet: Any = {"id": 10 * number + reply, "text": "so", "created_at": "Wed Jan 07 11:06:08 +0000 2015"}
            tweet |= {"in_reply_to_status_id": 10 * number if reply else None}
            tweet = hostile.mutate_json(draw, tweet) if draw.random() < 0.4 else tweet
            files[f"{place}/{'reactions' if reply else 'source-tweets'}/{reply}.json"] = hostile.dump_json(tweet)
        files[f"{place}/annotation.json"] = hostile.dump_json(hostile.mutate_json(draw, {"is_rumour": "rumour"}))
        files[f"{place}/structure.json"] = hostile.dump_json(hostile.mutate_json(draw, {str(10 * number): {"1": []}}))
    if draw.random() < 0.3:
        files["pheme/ferguson.jsonl"] = b"\n".join(hostile.dump_json(hostile.draw_thread(draw)) for _ in range(2))
    return files


def tar_bytes(draw: Random, files: dict[str, bytes]) -> tuple[bytes, str]:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=draw.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            if draw.random() < 0.03:
                entry.type = draw.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE))
                entry.linkname, entry.size, data = "../../outside", 0, b""
            tar.addfile(entry, io.BytesIO(data))
    return hostile.packed(draw, stream.getvalue())


def zip_bytes(draw: Random, files: dict[str, bytes]) -> tuple[bytes, str]:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return stream.getvalue(), ".zip"


# ---------------------------------------------------------------------- run directories and models


def damaged(shop_folder: str, *names: str, read: Callable[[Path, Random, Workshop], Any]) -> Target:
    """Copy a folder of the workshop, damage one of the files, and read it."""

    def run(folder: Path, draw: Random, shop: Workshop) -> None:
        copy = folder / "copy"
        # Links are enough: what is damaged is written anew, and all that mtem writes replaces files.
        shutil.copytree(shop.folder / shop_folder, copy, copy_function=os.link)
        path = draw.choice(sorted(path for name in names for path in copy.glob(name)))
        data = path.read_bytes()
        if path.suffix == ".json" and draw.random() < 0.8:
            data = hostile.dump_json(hostile.mutate_json(draw, json.loads(data)))
        elif path.suffix == ".safetensors" and draw.random() < 0.5:
            data = damaged_safetensors(draw, data)
        else:
            data = hostile.mutate_bytes(draw, data)
        path.unlink()
        if draw.random() < 0.97:
            path.write_bytes(data)
        read(copy, draw, shop)

    return run


def damaged_safetensors(draw: Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    way = draw.randrange(4)
    if way == 0:  # other numbers
        values = np.frombuffer(rest[: len(rest) // 4 * 4], np.float32).copy()
        values[draw.randrange(len(values))] = draw.choice((np.nan, np.inf, 3e38))
        return data[: 8 + size] + values.tobytes() + rest[len(rest) // 4 * 4 :]
    if way == 1:
        return draw.choice((0, 1, 2**63, 2**64 - 1, size + 1)).to_bytes(8, "little") + data[8:]
    changed = hostile.dump_json(hostile.mutate_json(draw, header))
    return len(changed).to_bytes(8, "little") + changed + rest


def use_model(copy: Path, draw: Random, shop: Workshop) -> None:
    """Load a run, or a model, and predict."""
    loaded = attempt(lambda: mtem.load(copy))
    if loaded is None:
        return
    texts: list[Any] = ["word1 good2", "bad3 word5"]
    probabilities = attempt(lambda: loaded.predict_proba(texts))
    if probabilities is not None:
        assert probabilities.shape == (2, len(loaded.classes)) and np.isfinite(probabilities).all()
        assert np.allclose(probabilities.sum(axis=1), 1)
    attempt(lambda: loaded.source_model())
    attempt(lambda: loaded.left_out())


def use_report(copy: Path, draw: Random, shop: Workshop) -> None:
    use_model(copy, draw, shop)
    page = attempt(lambda: write_report(copy))
    assert page is None or "<script>alert(1)</script>" not in Path(page).read_text(encoding="utf-8")


def resume(copy: Path, draw: Random, shop: Workshop) -> None:
    """Go on with an unfinished run."""
    own = copy.with_name("own")
    shutil.copytree(copy, own)  # history.jsonl grows in place, so no links
    result = attempt(lambda: shop.adapt(own, resume=True))
    assert result is None or isinstance(result, Adapted)


# ---------------------------------------------------------------------- what is not a file


def setting_values(folder: Path, draw: Random, shop: Workshop) -> None:
    classes = {"training": TrainingSettings, "method": methods.get(draw.choice(list(METHODS))).Settings}
    classes["model"] = get_class(draw.choice(("minilm", "bigcn"))).Settings
    names = settings.names(*classes.values())
    for _ in range(20):
        value = draw.choice((hostile.draw_value(draw), str(draw.choice(hostile.NUMBERS[:15])), hostile.draw_text(draw)))
        built = attempt(lambda value=value: settings.build(classes, {draw.choice(names): value}))  # type: ignore[misc]
        for number in settings.record(*built.values()).values() if built else ():
            assert not isinstance(number, (int, float)) or abs(number) <= 1e15


METHODS = ("mtem", "dann", "fixmatch", "cst", "mme", "biat", "wind", "source-only")


def console(folder: Path, draw: Random, shop: Workshop) -> None:
    """Figures of classes of any name, on a console of any width: nothing in them is obeyed."""
    from mtem.metrics import evaluate

    names = list(dict.fromkeys([hostile.draw_text(draw) for _ in range(draw.choice((2, 8, 60)))] + ["a", "b"]))
    truth = np.array([draw.randrange(len(names)) for _ in range(50)])
    weights = np.array([[draw.random() for _ in names] for _ in truth])
    stream = io.StringIO()
    metrics = evaluate(truth, weights.argmax(axis=1), names, weights / weights.sum(axis=1, keepdims=True))
    print_metrics(metrics, Terminal(file=stream, width=draw.choice((20, 80, 200))))
    printed = stream.getvalue()
    assert not any(ord(character) < 32 and character not in "\n\t" for character in printed), "control characters"
    printed.encode()


def round_trip(folder: Path, draw: Random, shop: Workshop) -> None:
    """What is written is read again, as text if the format has only texts."""
    ending = draw.choice((".csv", ".tsv", ".jsonl", ".csv.gz", ".jsonl.gz", ".parquet"))
    records = [{name: hostile.draw_text(draw).replace("\0", "").replace("\ud800", "") for name in ("a", "b=")} for _ in range(5)]
    path = folder / f"x{ending}"
    with Writer(path) as out:
        for record in records:
            out.write(record)
    assert [record for _, record in readers.read_rows(path)] == records
    if ending.endswith(".gz"):
        gzip.decompress(path.read_bytes())


MODEL_FILES = ("model/config.json", "model/tokenizer.json", "model/tokenizer_config.json")
REPORT_FILES = ("history.jsonl", "indexes.parquet", "map.parquet", "words.parquet", "evaluation.json")
BIGCN_FILES = ("model/config.json", "model/vocabulary.json", "model/model.safetensors", "model/vocabulary.safetensors")

TARGETS: dict[str, Target] = {
    "csv": table(".csv"),
    "tsv": table(".tsv"),
    "jsonl": table(".jsonl"),
    "parquet": table(".parquet"),
    "predict": predict,
    "threads": threads,
    "archive": archive,
    "settings": setting_values,
    "console": console,
    "round-trip": round_trip,
    "model": damaged("run", *MODEL_FILES, read=use_model),
    "safetensors": damaged("run", "model/model.safetensors", "checkpoints/source.safetensors", read=use_model),
    "bigcn": damaged("bigcn", *BIGCN_FILES, read=use_model),
    "run.json": damaged("run", "run.json", read=use_report),
    "report": damaged("run", *REPORT_FILES, read=use_report),
    "checkpoint": damaged("half", "run.json", "checkpoints/*.safetensors", "checkpoints/step-*/*", read=resume),
}
# Of 100 cases, so many are of the targets that take longest; the others share the rest.
SHARES = {"checkpoint": 1, "model": 8, "safetensors": 6, "run.json": 3, "report": 3}
