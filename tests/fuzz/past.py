"""Inputs that once gave a traceback, a hang, too much memory or a wrong message, each with what the command must answer now."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from mtem.cli import main
from mtem.data import parquet, readers
from tests.fuzz.workshop import SMALL, Workshop

Failure = Callable[[Path, Workshop], None]
FAILURES: dict[str, Failure] = {}
MANY = 10**400  # beyond the range of floats


def failure(function: Failure) -> Failure:
    FAILURES[function.__name__] = function
    return function


def run(name: str, folder: Path, shop: Workshop) -> None:
    """Run one of them."""
    FAILURES[name](folder, shop)


def command(*arguments: Any) -> tuple[int, str, str]:
    """The command line in this process: (exit code, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    argv = mock.patch.object(sys, "argv", ["mtem", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


def refused(*arguments: Any, words: str, code: int = 2) -> str:
    """Check that a request is refused in one line with these words."""
    got, _, err = command(*arguments)
    message = err.strip().splitlines()[-1] if err.strip() else ""
    assert got == code and words in message and "unexpected error" not in message, (got, err[-2000:])
    assert "Traceback" not in err and not any(ord(character) < 32 for character in message), err[-2000:]
    return message


def accepted(*arguments: Any) -> str:
    code, out, err = command(*arguments)
    assert code == 0, (code, err[-2000:])
    return out


def predicted(shop: Workshop, path: Path, ending: str = ".jsonl") -> list[dict[str, Any]]:
    output = path.with_name(f"predictions{ending}")
    accepted("predict", shop.folder / "run", path, "--output", output, "--quiet")
    return [record for _, record in readers.read_rows(output)]


def no_prediction(shop: Workshop, path: Path, words: str) -> None:
    output = path.parent / "predictions.csv"
    refused("predict", shop.folder / "run", path, "--output", output, "--quiet", words=words)
    assert not output.exists()


def adapt_arguments(shop: Workshop, output: Path, **changes: Any) -> list[Any]:
    given = {
        "--source": shop.folder / "books.jsonl",
        "--target": shop.folder / "kitchen.jsonl",
        "--model": shop.folder / "encoder",
    }
    given |= {"--output": output, **changes}
    pairs = [word for pair in given.items() for word in pair]
    return ["adapt", *pairs, "--quiet", *(word for item in SMALL.items() for word in ("--set", "{}={}".format(*item)))]


def put(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def lines(path: Path, *records: Any) -> Path:
    return put(path, "".join(json.dumps(record) + "\n" for record in records))


# ---------------------------------------------------------------------- numbers


@failure
def a_whole_number_beyond_floats_as_text(folder: Path, shop: Workshop) -> None:
    path = lines(folder / "a.jsonl", {"text": MANY}, {"text": "word1"})
    assert [row["prediction"] in shop.model.classes for row in predicted(shop, path)] == [True, True]


@failure
def a_whole_number_beyond_floats_as_label(folder: Path, shop: Workshop) -> None:
    path = lines(folder / "a.jsonl", {"text": "word1", "label": MANY})
    refused("evaluate", shop.folder / "run", path, words="is unknown; the classes are 'bad', 'good'")


@failure
def a_whole_number_beyond_floats_as_node_id(folder: Path, shop: Workshop) -> None:
    nodes = [{"id": MANY, "parent": None, "text": "word1"}, {"id": 1, "parent": MANY, "text": "word2"}]
    assert len(predicted(shop, lines(folder / "a.jsonl", {"nodes": nodes}))) == 1


@failure
def labels_of_5000_digits(folder: Path, shop: Workshop) -> None:
    path = put(folder / "a.csv", f"text,label\nword1,{'9' * 5000}\nword2,1\n")
    refused("evaluate", shop.folder / "run", path, words="a label of 5000 characters")


@failure
def a_json_number_of_5000_digits(folder: Path, shop: Workshop) -> None:
    no_prediction(shop, put(folder / "a.jsonl", '{"text": %s}\n' % ("9" * 5000)), words="row 1: not usable JSON")


@failure
def settings_beyond_all_use(folder: Path, shop: Workshop) -> None:
    expected = {
        "steps=" + "9" * 400: "expected a value of at most 1e+15", "steps=" + "9" * 5000: "expected a whole number",
        "learning_rate=" + "9" * 400: "expected a value of at most 1e+15", "index_high=1e300": "a value between 1.0 and 1000.0",
        "epochs=inf": "expected a value of at most 1e+15", "epochs=nan": "expected a value of at least 0.0",
    }  # fmt: skip
    for setting, words in expected.items():
        message = refused(*adapt_arguments(shop, folder / "run"), "--set", setting, words=words)
        assert len(message) < 300
    assert not (folder / "run").exists()


@failure
def parquet_dates_outside_the_range_of_python(folder: Path, shop: Workshop) -> None:
    when = {
        "date": pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32()), "time": pa.array([2**53, 0], pa.timestamp("ms")),
        "zone": pa.array([0, 1], pa.timestamp("us", tz="Nowhere/Land")), "long": pa.array([2**62, 0], pa.duration("s")),
    }  # fmt: skip
    pq.write_table(pa.table({"text": ["word1", "word2"], **when}), folder / "a.parquet")
    rows = predicted(shop, folder / "a.parquet")
    assert "2147483647" in rows[0]["date"] and rows[1]["date"] == "1970-01-01" and rows[0]["zone"].startswith("1970-01-01")


@failure
def a_time_that_is_none(folder: Path, shop: Workshop) -> None:
    when = pa.Array.from_buffers(pa.timestamp("ns"), 2, [None, pa.py_buffer(bytes(7) + b"\x80" + bytes(8))])
    pq.write_table(pa.table({"text": ["word1", "word2"], "when": when}), folder / "a.parquet")
    for ending in (".parquet", ".csv"):
        rows = predicted(shop, folder / "a.parquet", ending)
        assert rows[0]["when"] in (None, "") and str(rows[1]["when"]).startswith("1970-01-01")


@failure
def weights_that_overflow(folder: Path, shop: Workshop) -> None:
    model = changed_model(shop, folder / "model", "config.json", {})
    weights = load_file(model / "model.safetensors")
    weights["classifier.weight"][:] = 3e38
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, _, err = command("predict", model, shop.folder / "test.jsonl", "--output", folder / "a.csv", "--quiet")
    assert code in (1, 2) and "not finite" in err and not (folder / "a.csv").exists(), err


@failure
def one_distinct_text_for_each_class(folder: Path, shop: Workshop) -> None:
    rows = [{"text": ("word1 bad1", "word2 good1")[k % 2], "label": ("bad", "good")[k % 2]} for k in range(40)]
    source = lines(folder / "a.jsonl", *rows)
    words = "could be held out for validation, there are too few different ones"
    refused(*adapt_arguments(shop, folder / "run", **{"--source": source}), words=words)


@failure
def cost_of_an_unknown_precision(folder: Path, shop: Workshop) -> None:
    refused("cost", "--precision", "x", words="unknown precision 'x': choose one of fp32, bf16, fp16 or auto")


@failure
def a_model_larger_than_its_weights(folder: Path, shop: Workshop) -> None:
    expected = {
        "hidden_size": (10**9, "but the files of weights have"), "vocab_size": (10**12, "but the files of weights have"),
        "num_hidden_layers": (10**6, "num_hidden_layers is 1e+06, expected at most 1000"),
        "max_position_embeddings": (10**11, "but the files of weights have"),
    }  # fmt: skip
    for key, (value, words) in expected.items():
        model = changed_model(shop, folder / key, "config.json", {key: value})
        refused("predict", model, shop.folder / "test.jsonl", "--output", folder / "a.csv", words=words)
        encoder = folder / f"encoder-{key}"
        shutil.copytree(shop.folder / "encoder", encoder)
        shutil.copy(model / "config.json", encoder / "config.json")
        refused(*adapt_arguments(shop, folder / "run", **{"--model": encoder}), words=words)


def changed_model(shop: Workshop, place: Path, file: str, changes: dict[str, Any], run: str = "run") -> Path:
    shutil.copytree(shop.folder / run / "model", place)
    content = json.loads((place / file).read_text())
    (place / file).write_text(json.dumps({**content, **changes}))
    return place


@failure
def odd_values_in_the_configuration_of_a_model(folder: Path, shop: Workshop) -> None:
    data = shop.folder / "test.jsonl"
    for number, (run, file, changes, words) in enumerate(
        [
            ("bigcn", "config.json", {"cosine_temperature": []}, "expected a positive number, got []"),
            ("bigcn", "config.json", {"cosine_temperature": MANY}, "expected a positive number"),
            ("bigcn", "config.json", {"head_dropout": "x"}, "head_dropout: expected a number between 0 and 1"),
            ("run", "config.json", {"num_attention_heads": -2}, "the model could not be loaded"),
            ("run", "config.json", {"mtem_cosine_temperature": ["x"]}, "expected a positive number, got ['x']"),
            ("run", "tokenizer_config.json", {"model_max_length": "x"}, "model_max_length: expected a positive number"),
        ]
    ):
        model = changed_model(shop, folder / str(number), file, changes, run)
        refused("predict", model, data, "--output", folder / "a.csv", words=words)


@failure
def a_tokenizer_that_panics(folder: Path, shop: Workshop) -> None:
    model = changed_model(shop, folder / "model", "tokenizer.json", {})
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"]["special_tokens"] = {}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("predict", model, shop.folder / "test.jsonl", "--output", folder / "a.csv", words=str(model))


# ---------------------------------------------------------------------- hangs


@failure
def many_columns(folder: Path, shop: Workshop) -> None:
    names = ",".join(f"c{k}" for k in range(100_000))
    path = put(folder / "a.csv", f"text,label,{names}\n" + f"word1,good{',1' * 100_000}\n")
    rows = predicted(shop, path, ".csv")
    assert len(rows) == 1 and len(rows[0]) == 100_004
    accepted("evaluate", shop.folder / "run", path)
    table = pa.table({"text": ["word1"], **{f"c{k}": [1] for k in range(3000)}})
    pq.write_table(table, folder / "b.parquet")
    assert len(predicted(shop, folder / "b.parquet", ".csv")[0]) == 3003


@failure
def many_columns_of_one_name(folder: Path, shop: Workshop) -> None:
    no_prediction(shop, put(folder / "a.csv", "text" + ",b" * 100_000 + "\n"), words="column 'b' occurs twice")


@failure
def many_keys_into_csv(folder: Path, shop: Workshop) -> None:
    path = lines(folder / "a.jsonl", {"text": "word1", **{f"k{k}": k for k in range(100_000)}}, {"text": "word2"})
    assert len(predicted(shop, path, ".csv")[0]) == 100_003


@failure
def files_that_are_none(folder: Path, shop: Workshop) -> None:
    os.mkfifo(folder / "pipe.csv")
    os.symlink("/dev/zero", folder / "zero.csv")
    os.symlink(folder / "loop.csv", folder / "loop.csv")
    for name, words in {"pipe.csv": "is a named pipe", "zero.csv": "is a device", "loop.csv": "cannot be"}.items():
        no_prediction(shop, folder / name, words=words)
        refused(*adapt_arguments(shop, folder / "run", **{"--source": folder / name}), words=words)
        refused("predict", shop.folder / "run", shop.folder / "test.jsonl", "--output", folder / name, words=words)
        refused("data", "prepare", "amazon", "--from", folder / name, "--to", folder / "to", words="")
    refused("cost", "--json", folder / "pipe.csv", "--model", "minilm", "--precision", "x", words="precision")
    refused(*adapt_arguments(shop, folder / "pipe.csv"), words="is a file; --output expects a folder")
    refused(*adapt_arguments(shop, folder / "run", **{"--method": folder / "pipe.py"}), words="no such file")
    assert sorted(path.name for path in folder.iterdir()) == ["loop.csv", "pipe.csv", "zero.csv"]
    assert (folder / "pipe.csv").is_fifo() and os.readlink(folder / "zero.csv") == "/dev/zero"


@failure
def runs_with_files_that_are_none(folder: Path, shop: Workshop) -> None:
    for number, name in enumerate(
        ("run.json", "model/config.json", "model/model.safetensors", "indexes.parquet", "history.jsonl")
    ):
        run = folder / str(number)
        shutil.copytree(shop.folder / "run", run)
        (run / name).unlink()
        if number % 2:
            os.symlink("/dev/zero", run / name)
        else:
            os.mkfifo(run / name)
        words = f"{name}: is {'a device' if number % 2 else 'a named pipe'}"
        refused("predict", run, shop.folder / "test.jsonl", "--output", folder / "a.csv", words=words)
        refused("report", run, words=words)
        refused(*adapt_arguments(shop, run), "--resume", words="" if name == "run.json" else words)
    refused(*adapt_arguments(shop, folder / "run", **{"--model": folder / "1" / "model"}), words="config.json: is a device")


@failure
def newlines_without_end(folder: Path, shop: Workshop) -> None:
    for name, line in (("a.csv.gz", b"\n"), ("a.jsonl.gz", b"   \n")):
        first = b"text\nword1\n" if "csv" in name else b'{"text": "word1"}\n'
        path = put(folder / name, gzip.compress(first) + gzip.compress(line * (1 << 23)) * 50)
        no_prediction(shop, path, words="blank rows one after the other")


@failure
def long_texts(folder: Path, shop: Workshop) -> None:
    words = " ".join(f"word{k % 40}" for k in range(150_000))
    path = lines(folder / "a.jsonl", *({"text": f"good{k % 12} {words}"} for k in range(60)))
    assert len(predicted(shop, path)) == 60


@failure
def a_hundred_thousand_brackets(folder: Path, shop: Workshop) -> None:
    for text in ("[" * 100_000, '{"text":' * 100_000, '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"):
        no_prediction(shop, put(folder / "a.jsonl", text + "\n"), words="row 1")
    model = changed_model(shop, folder / "model", "config.json", {})
    put(model / "config.json", '{"a":' * 100_000)
    refused("predict", model, shop.folder / "test.jsonl", "--output", folder / "a.csv", words="config.json cannot be read")


# ---------------------------------------------------------------------- memory


@failure
def gzip_bombs(folder: Path, shop: Workshop) -> None:
    # Members one after the other are one stream: a gigabyte and more in a file of a megabyte.
    for name, begin, byte in (
        ("line.jsonl.gz", b'{"text": "', b"x"), ("nul.csv.gz", b"text\n", b"\0"),
        ("quote.csv.gz", b'text\n"', b"x" * 63 + b"\n"), ("spaces.jsonl.gz", b"", b" "),
    ):  # fmt: skip
        path = put(folder / name, gzip.compress(begin) + gzip.compress(byte * ((1 << 24) // len(byte)), 1) * 64)
        no_prediction(shop, path, words=": row ")
    path = put(folder / "bomb.parquet.gz", gzip.compress(b"\0" * (1 << 25), 1) * 30)
    no_prediction(shop, path, words="expands to more than")


@failure
def parquet_bombs(folder: Path, shop: Workshop) -> None:
    text = "word1 " * 150_000
    notes = pa.DictionaryArray.from_arrays(pa.array([0] * 50_000, pa.int32()), [text])
    pq.write_table(pa.table({"text": ["word1"] * 50_000, "note": notes}), folder / "repeated.parquet")
    assert sum(len(record["note"]) for _, record in readers.read_rows(folder / "repeated.parquet")) == 50_000 * len(text)
    big = pa.table({"text": pa.array([text] * 30, pa.large_string())})
    pq.write_table(big, folder / "page.parquet", compression="zstd", use_dictionary=False)
    with mock.patch.object(parquet, "BOMB_BYTES", 1 << 24):
        no_prediction(shop, folder / "page.parquet", words="such files are refused")


@failure
def one_cell_of_30_megabytes(folder: Path, shop: Workshop) -> None:
    for word in ("word1 ", "x"):
        text = (word * (30_000_000 // len(word))).strip()
        rows = predicted(shop, put(folder / "a.csv", f"text,label\nword1,good\n{text},bad\n"), ".csv")
        assert len(rows) == 2 and rows[1]["text"] == text and rows[1]["prediction"] in shop.model.classes


@failure
def archives_that_expand(folder: Path, shop: Workshop) -> None:
    zeros = b"\0" * (1 << 26)
    with tarfile.open(folder / "a.tar.gz", "w:gz", compresslevel=1) as tar:
        for number in range(6):
            entry = tarfile.TarInfo(f"data/books/{number}.review")
            entry.size = len(zeros)
            tar.addfile(entry, io.BytesIO(zeros))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(6):
            archive.writestr(f"data/books/{number}.review", zeros)
    put(folder / "end.tar.gz", gzip.compress(bytes(1024)) + gzip.compress(zeros, 1) * 8)
    with tarfile.open(folder / "review.tar", "w") as tar:
        entry = tarfile.TarInfo("data/books/positive.review")
        entry.size = len(zeros)
        tar.addfile(entry, io.BytesIO(b"<review>" + zeros[8:]))
    for name in ("a.tar.gz", "a.zip", "end.tar.gz"):
        refused("data", "prepare", "amazon", "--from", folder / name, "--to", folder / "to", words="such archives are refused")
    refused("data", "prepare", "amazon", "--from", folder / "review.tar", "--to", folder / "to", words="no negative.review")


# ---------------------------------------------------------------------- code


@failure
def models_with_code(folder: Path, shop: Workshop) -> None:
    data = shop.folder / "test.jsonl"
    for file in ("config.json", "tokenizer_config.json"):
        model = changed_model(shop, folder / file, file, {"auto_map": {"AutoConfig": "own.Own"}})
        put(model / "own.py", f"open({str(folder / 'ran')!r}, 'w')")
        refused("predict", model, data, "--output", folder / "a.csv", words="names code to run (own.Own)")
    model = changed_model(shop, folder / "pickled", "config.json", {})
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    refused("predict", model, data, "--output", folder / "a.csv", words="no safetensors weights")
    put(model / "model.safetensors.index.json", json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    refused("predict", model, data, "--output", folder / "a.csv", words="only .safetensors files in the directory itself")
    assert not (folder / "ran").exists() and not (folder / "a.csv").exists()


METHOD = """
import dataclasses
from mtem.methods import Method
@dataclasses.dataclass(frozen=True)
class Own: pass
class Mine(Method):
    name = "mine"
    {settings}
    def step(self, number, source, target, update):
        {step}
{end}
"""


@failure
def method_files(folder: Path, shop: Workshop) -> None:
    right = {"settings": "Settings = Own", "step": "return {}", "end": ""}
    cases = {
        "settings": [("pass", "has no 'Settings'", 2), ("Settings = 3", "Settings is not a dataclass", 2)],
        "step": [
            ("1 / 0", "line 10: step 1 failed: ZeroDivisionError", 1), ("pass", "step 1 returned nothing", 1),
            ("return {'loss': 'x'}", "step 1 returned a dict", 1), ("exit(3)", "step 1 calls exit(3)", 1),
        ],
        "end": [("exit(3)", "cannot be imported: it calls exit(3)", 2), ("1 / 0", "cannot be imported: ZeroDivisionError", 2)],
    }  # fmt: skip
    for part, entries in cases.items():
        for number, (line, words, code) in enumerate(entries):
            method = put(folder / f"{part}{number}.py", METHOD.format(**{**right, part: line}))
            refused(*adapt_arguments(shop, folder / f"run-{part}{number}", **{"--method": method}), words=words, code=code)


# ---------------------------------------------------------------------- what is written, and where


@failure
def formulas(folder: Path, shop: Workshop) -> None:
    texts = ["=1+1", "-5.2", "@user hello", "+x", " =2", "fine", "\t=3"]
    path = lines(folder / "a.jsonl", *({"text": text, "=column": 1} for text in texts))
    rows = predicted(shop, path, ".csv")
    assert [row["text"] for row in rows] == ["'=1+1", "-5.2", "'@user hello", "'+x", "' =2", "fine", "'\t=3"]
    assert "'=column" in rows[0]
    accepted("predict", shop.folder / "run", path, "--output", folder / "raw.tsv", "--raw", "--quiet")
    assert [row["text"] for _, row in readers.read_rows(folder / "raw.tsv")] == texts
    assert [row["text"] for row in predicted(shop, path)] == texts


@failure
def names_that_lead_outside(folder: Path, shop: Workshop) -> None:
    inner = folder / "inner"
    inner.mkdir()
    labels = ("../../outside", "\x1b[2J/etc/x")
    words = (("bad1", "bad2"), ("good1", "good2"))
    for name, domain in (("...jsonl", 0), ("\x1b]0;x\x07.jsonl", 1)):
        rows = [{"text": f"{words[k % 2][domain]} word{k}", "label": labels[k % 2]} for k in range(30)]
        lines(inner / name, *rows)
    arguments = adapt_arguments(shop, inner / "run", **{"--source": inner / "...jsonl"})
    code, out, err = command(*arguments, "--source", inner / "\x1b]0;x\x07.jsonl")
    assert code == 0, err[-2000:]
    code, printed, errors = command("evaluate", inner / "run", inner / "...jsonl")
    assert code == 0 and "\\x1b[2J" in printed, errors
    assert not any(ord(character) < 32 and character not in "\n\t" for character in out + err + printed + errors)
    assert [path.name for path in folder.iterdir()] == ["inner"]
    assert sorted(path.name for path in inner.iterdir()) == ["\x1b]0;x\x07.jsonl", "...jsonl", "run"]
