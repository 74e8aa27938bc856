"""The command line: a whole session by subprocess, and every kind of bad input in one line with nothing left behind."""

from __future__ import annotations

import ast
import csv
import errno
import gzip
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pandas as pd
import pyarrow.parquet as pq
import pytest

from mtem.cli import main
from mtem.data import readers, writers
from tests.conftest import make_texts, write_jsonl
from tests.processes import LIMIT, content, interruptible, wait_for_begun

SMALL = {"max_length": 16, "batch_size": 10, "source_epochs": 1, "epochs": 1, "evaluations": 2, "frozen_layers": 0}
SMALL |= {"validation_share": 0.4}  # of 60 texts: enough for an estimate
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def adapt_arguments(reviews, encoder, output, **changes):
    given = {"--source": reviews["books"], "--target": reviews["kitchen"], "--output": output, "--model": encoder, **changes}
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    return ["adapt", *words, *(word for name, value in SMALL.items() for word in ("--set", f"{name}={value}"))]


def command(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    words = [sys.executable, "-m", "mtem.cli", *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT, **options)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, reviews, encoder):
    output = tmp_path_factory.mktemp("cli") / "run"
    done = command(*adapt_arguments(reviews, encoder, output), "--source", reviews["dvd"], "--seed", "3", "--tensorboard")
    assert done.returncode == 0, done.stderr
    return output, done


# ---------------------------------------------------------------------- a whole session


def test_adapt_says_what_came_of_it_in_plain_text(adapted):
    output, done = adapted
    assert "estimated accuracy on the target, without labels" in done.stdout and str(output / "model") in done.stdout
    assert re.search(r"before +0\.\d{3} +\(0\.\d{3} to \d\.\d{3}\)", done.stdout)
    assert "the interval covers the number of texts, not the step to a new domain" in done.stdout, (
        "two domains of 60 texts are too small"
    )
    for text in (done.stdout, done.stderr):
        assert "\x1b" not in text and "\r" not in text and "it/s" not in text
    record = json.loads((output / "run.json").read_text())
    assert record["seed"] == 3 and [entry["domain"] for entry in record["data"]["source"]] == ["books", "dvd"]


def test_predict_and_evaluate_agree(adapted, reviews, tmp_path):
    output, _ = adapted
    predicted = command("predict", output, reviews["test"], "--output", tmp_path / "out.csv", "--probabilities")
    assert predicted.returncode == 0, predicted.stderr
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table) == ["text", "label", "prediction", "confidence", "probability bad", "probability good"]
    assert "60 rows" in predicted.stdout and "\x1b" not in predicted.stdout + predicted.stderr
    evaluated = command("evaluate", output, reviews["test"], "--compare", "--json")
    figures = json.loads(evaluated.stdout)
    assert figures.keys() == {"before", "after"} and figures["after"]["n"] == 60
    assert figures["after"]["accuracy"] == pytest.approx((table["label"] == table["prediction"]).mean())
    classes = [one["name"] for one in figures["after"]["classes"]]
    assert classes == ["bad", "good"] and sum(map(sum, figures["after"]["confusion"])) == 60


def test_a_run_ends_with_a_report_that_can_be_made_again(adapted, reviews, mtem, tmp_path):
    output, done = adapted
    assert f"report: {output / 'report.html'}" in done.stdout and list((output / "tensorboard").iterdir())
    assert "labeled texts" not in re.search("<h1>(.*)</h1>", (output / "report.html").read_text())[1], "nothing was measured yet"
    assert mtem("evaluate", output, reviews["test"], "--compare")[0] == 0
    code, text, _ = mtem("report", output, "--output", tmp_path / "page.html")
    assert code == 0 and text.strip() == str(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "On 60 labeled texts" in page and 'id="feature-map-plot"' in page and 'id="reliability-plot"' in page
    assert mtem("report", output, output, "--output", tmp_path / "both.html")[0] == 0
    code, _, error = mtem("report", tmp_path)
    assert code == 2 and "holds no run" in error


def test_evaluate_for_people(adapted, reviews, mtem):
    output, _ = adapted
    code, text, _ = mtem("evaluate", output, reviews["test"], "--compare")
    assert code == 0 and "before the adaptation" in text and "after the adaptation" in text
    assert text.count("confusion: rows true, columns predicted") == 2 and "macro-F1" in text
    code, text, _ = mtem("evaluate", output, reviews["test"], "--json")
    assert code == 0 and json.loads(text)["n"] == 60


def test_lists(mtem):
    code, text, _ = mtem("methods")
    assert code == 0 and "mtem" in text and "source-only" in text and "IJCAI 2023" in text
    code, text, _ = mtem("settings")
    assert code == 0 and all(name in text for name in ("index_initial", "batch_size", "temperature_end"))
    assert re.search(r"max_length +None +256 ", text) and re.search(r"\bepochs +None +2\.0 ", text), "with --preset paper"
    assert mtem("settings", "source-only")[0] == 0
    code, _, error = mtem("settings", "dan")
    assert code == 2 and "unknown method 'dan'" in error


def test_every_command_shows_an_example(mtem):
    commands = [("adapt",), ("predict",), ("evaluate",), ("demo",), ("methods",), ("settings",), ("report",), ("data", "prepare")]
    for words in commands:
        code, text, _ = mtem(*words, "--help")
        assert code == 0 and "Example" in text and f"mtem {' '.join(words)}" in text, words
    code, text, _ = mtem("--help")
    assert code == 0 and all(words[0] in text for words in commands)


def test_help_does_not_wait_for_torch():
    code = "import sys; sys.argv = ['mtem', '--help']\nfrom mtem.cli import main\n"
    code += "try:\n    main.main()\nexcept SystemExit:\n    pass\n"
    code += "heavy = {'torch', 'transformers', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules); print('HEAVY', sorted(heavy))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "HEAVY []" in done.stdout and "Usage" in done.stdout


WAITING = "import os, runpy, sys; sys.argv = ['mtem', '--help']\ntry:\n    {start}\nexcept SystemExit:\n    pass\n"
WAITING += "print('WAITING', {{name: os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME')}})"
STARTS = {"script": "from mtem.cli.main import main; main()", "module": "runpy.run_module('mtem.cli', run_name='__main__')"}


def waiting(start, **given):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_", "KMP_"))}
    code = WAITING.format(start=STARTS[start])
    done = subprocess.run([sys.executable, "-c", code], env={**environment, **given}, capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout.partition("WAITING ")[2])
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("start", STARTS)
def test_threads_sleep_while_they_wait(start):
    assert waiting(start) == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("given", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "200"}])
def test_threads_wait_as_the_user_says(given):
    assert waiting("script", **given) == given


def test_a_process_that_has_torch_keeps_its_environment(monkeypatch):
    for name in main.WAITING:
        monkeypatch.delenv(name, raising=False)
    main.wait_without_spinning()
    assert not any(name in os.environ for name in main.WAITING)


def read_all(descriptor, process):
    seen = b""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.1)[0]:
            try:
                piece = os.read(descriptor, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            seen += piece
        elif process.poll() is not None:
            break
    return seen.decode("utf-8", "replace")


def test_a_terminal_of_80_columns_gets_a_bar_with_figures(reviews, encoder, tmp_path):
    master, slave = pty.openpty()
    arguments = [*adapt_arguments(reviews, encoder, tmp_path / "run"), "--set", "log_every=1", "--set", "epochs=2"]
    arguments += ["--preset", "learned", "--set", "threshold=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mtem.cli", *arguments], env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        raw = read_all(master, process)
    finally:
        process.kill()
        assert process.wait() == 0, "it was done before"
        os.close(master)
    text = " ".join(ESCAPES.sub("", raw).split())
    assert "\x1b" in raw and "━" in raw
    assert re.search(r"adapt ━+[╸╺]?━* *\d+/16", text) and re.search(r"source ━+", text)
    for figure in (r"source loss \d", r"target loss \d", r"meta loss", r"temperature \d", r"index \d\.\d\d/\d\.\d\d/\d\.\d\d"):
        assert re.search(figure, text), figure
    assert "estimated accuracy" in text


def test_an_interrupted_run_says_how_to_go_on(reviews, encoder, tmp_path):
    arguments = [*adapt_arguments(reviews, encoder, tmp_path / "run"), "--set", "epochs=1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mtem.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=interruptible,
    )  # fmt: skip
    history = tmp_path / "run" / "history.jsonl"
    try:
        wait_for_begun(process, lambda: '"stage": "adapt"' in content(history), "a line of the adaptation")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in errors
    assert errors.splitlines()[-1] == "mtem: interrupted; the same command with --resume continues"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"


def test_adapt_says_what_it_has_read(adapted, reviews, encoder, tmp_path, mtem):
    _, done = adapted
    assert "books.jsonl: 60 texts (column 'text'), labels (column 'label'): bad 30, good 30" in done.stderr.splitlines()
    assert "kitchen.jsonl: 80 texts (column 'text')" in done.stderr.splitlines()
    other = write(
        tmp_path / "other.csv", ROWS.replace("text,label", "review,stars").replace("good\n", "Good\n").replace("bad\n", "poor\n")
    )
    code, _, error = mtem(*adapt_arguments(reviews, encoder, tmp_path / "run"), "--source", other, "-q", "--set", "steps=1")
    assert code == 0 and "60 texts" not in error  # quiet: what looks unmeant is told all the same
    assert "books.jsonl uses 'text', other.csv uses 'review'" in error and "'Good' (other.csv) and 'good'" in error
    assert "the files have different labels (books.jsonl: 'bad', 'good'; other.csv: 'Good', 'poor'), 4 classes" in error


def test_an_estimate_may_be_withheld(adapted, capsys, monkeypatch):
    from mtem.cli.adapt import print_summary
    from mtem.models.text import TextModel
    from mtem.run.model_card import model_card

    record = json.loads((adapted[0] / "run.json").read_text())
    assert record["unit"] == "texts" and "Estimated accuracy on the target" in model_card(record, TextModel)
    record["texts"]["source_held_out"] = 7
    none = {"before": None, "after": None}
    for estimate in (none, None, {"before": record["estimate"]["before"], "after": None}):
        changed = {**record, "estimate": estimate, "unit": "threads"}
        print_summary(changed, adapted[0])
        shown = capsys.readouterr().out
        assert "No accuracy estimate: only 7 source threads were held out" in model_card(changed, TextModel)
        if estimate in (none, None):
            assert "no accuracy estimate: only 7 source threads were held out" in shown and "0.000" not in shown
            assert "estimated accuracy" not in shown
        else:
            assert re.search(r"before +0\.\d{3}", shown) and re.search(r"after +withheld", shown)
        assert "threads and indexes" in shown


def test_the_demo_does_without_an_estimate(encoder, capsys):
    import pyarrow as pa
    from rich.console import Console

    from mtem.cli import demo
    from mtem.models.text import TextModel
    from mtem.progress import Progress
    from mtem.run.result import Adapted

    row = {"row": 1, "text": "word1", "index": 2.0, "prediction": "negative", "confidence": 0.6, "source_prediction": "positive"}
    record = {"estimate": {"before": None, "after": None}, "selection": {"kept_source_model": True}}
    model = TextModel.create(encoder, ("negative", "positive"), max_length=8)
    demo.show(Adapted(model, record, pa.Table.from_pylist([row])), Console(soft_wrap=True), Progress(quiet=True))
    text = capsys.readouterr().out
    assert re.search(r"after +0\.\d{3} +no estimate without labels", text)
    assert "1 of 1 reviews got another label" in text and "positive -> negative (0.60)  word1" in text


def test_engines_are_all_named(mtem):
    engines = ("layerwise", "forward", "taylor", "second-order")
    for words in (("adapt", "--help"), ("cost", "--help"), ("settings",)):
        code, text, _ = mtem(*words)
        flat = " ".join(text.replace("│", " ").split())
        assert code == 0 and all(engine in flat for engine in engines), words
        default = {"adapt": "layerwise (exact; the default)", "settings": "engine layerwise"}
        assert default.get(words[0], "") in flat, words


# ---------------------------------------------------------------------- bad input


def refused(result, *words, code=2):
    """One line, the exit code, and every one of the words in it."""
    status, _, error = result
    assert status == code, error
    lines = error.splitlines()
    assert len([line for line in lines if line.startswith("mtem: ")]) == 1 and lines[-1].startswith("mtem: "), error
    assert "Traceback" not in error
    for word in words:
        assert str(word) in lines[-1], lines[-1]
    return lines


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


ROWS = "text,label\n" + "".join(f"word{i} good{i % 12},{('bad', 'good')[i % 2]}\n" for i in range(30))


def bad_sources(place):
    whole = gzip.compress(ROWS.encode())
    yield "missing", place / "nowhere.csv", ("nowhere.csv", "no such file"), {}
    yield "folder", place, ("folder",), {}
    yield "misspelt", place / "books.cvs", ("books.cvs", "'.cvs'"), {}
    yield "kind", write(place / "a.docx", "x"), ("a.docx", ".csv", ".parquet"), {}
    yield "no bytes", write(place / "b.csv", ""), ("b.csv", "empty"), {}
    yield "header only", write(place / "b2.csv", "text,label\n"), ("b2.csv", "no rows"), {}
    yield "text column", write(place / "c.csv", ROWS), ("c.csv", "'wording'", "'text'"), {"--text-column": "wording"}
    yield "label column", write(place / "d.csv", ROWS), ("d.csv", "'stars'", "'label'"), {"--label-column": "stars"}
    yield "no label column", write(place / "e.csv", "text\nword1\nword2\n"), ("e.csv", "label", "'text'"), {}
    yield "label seen once", write(place / "f.csv", ROWS + "word9,neutral\n"), ("f.csv", "row 32", "'label'", "neutral"), {}
    yield "one class", write(place / "g.csv", "text,label\nword1,good\nword2,good\n"), ("g.csv", "'label'", "'good'"), {}
    yield "all empty", write(place / "h.csv", "text,label\n  ,good\n,bad\n"), ("h.csv", "row 2", "'text'", "empty"), {}
    yield "nan label", write(place / "i.csv", ROWS + "word9,NaN\n"), ("i.csv", "row 32", "'label'", "missing"), {}
    yield "too many fields", write(place / "j.csv", ROWS + "a,b,c\n"), ("j.csv", "row 32", "fields"), {}
    yield "bad json", write(place / "k.jsonl", '{"text": "a", "label": "b"}\n{"text": \n'), ("k.jsonl", "row 2", "JSON"), {}
    (place / "l.csv").write_bytes(ROWS.encode() + b"caf\xe9,good\n")
    yield "broken UTF-8", place / "l.csv", ("l.csv", "row 32", "'text'", "0xE9", "UTF-8"), {}
    (place / "m.csv.gz").write_bytes(whole[: len(whole) // 2])
    yield "truncated gzip", place / "m.csv.gz", ("m.csv.gz", "truncated"), {}
    (place / "n.parquet").write_bytes(b"PAR1 no PAR1")
    yield "broken parquet", place / "n.parquet", ("n.parquet", "Parquet"), {}


KINDS = [
    "missing", "folder", "misspelt", "kind", "no bytes", "header only", "text column",
    "label column", "no label column", "label seen once", "one class", "all empty", "nan label", "too many fields",
    "bad json", "broken UTF-8", "truncated gzip", "broken parquet",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_source_file(mtem, reviews, encoder, tmp_path, kind):
    (tmp_path / "data").mkdir()
    cases = {name: rest for name, *rest in bad_sources(tmp_path / "data")}
    assert list(cases) == KINDS
    path, words, flags = cases[kind]
    output = tmp_path / "run"
    refused(mtem(*adapt_arguments(reviews, encoder, output, **{"--source": path, **flags})), *words)
    assert not output.exists()


def test_a_misspelt_target_is_no_text(mtem, reviews, encoder, tmp_path):
    refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "run", **{"--target": "kitchen"})), "kitchen", "file format")
    refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "run", **{"--target-labeled": "few"})), "few", "file format")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "words"), [(None, ["no such file"]), ("text\n  \n", ["row 2", "empty"]), ("text\nok\x00\n", ["row 2", "NUL"])]
)
def test_a_bad_target_file(mtem, reviews, encoder, tmp_path, content, words):
    path = tmp_path / "target.csv"
    if content is not None:
        write(path, content)
    refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "run", **{"--target": path})), "target.csv", *words)
    assert not (tmp_path / "run").exists()


def test_the_target_is_the_source(mtem, reviews, encoder, tmp_path):
    again = tmp_path / "again.jsonl"
    again.write_bytes(reviews["books"].read_bytes())
    for path, same in ((reviews["books"], "the same file as"), (again, "the same texts as")):
        refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "run", **{"--target": path})), path, same, "books.jsonl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "epochs"], "--set epochs: expected KEY=VALUE"),
        (["--set", "=3"], "KEY=VALUE"),
        (["--set", "epoch=3"], "unknown setting 'epoch': did you mean 'epochs'?"),
        (["--set", "epochs=many"], "epochs=many: expected a number"),
        (["--set", "learning_rate=nan"], "learning_rate=nan"),
        (["--set", "learning_rate=" + "9" * 400], "learning_rate=inf"),
        (["--set", "view_strength=2"], "between 0.0 and 1.0"),
        (["--set", "preset=paper"], "'preset' is an option, not a setting"),
        (["--set", "output=elsewhere"], "'output' is an option, not a setting"),
        (["--set", "index_low=3", "--set", "index_high=2"], "index_high=2.0: expected a value above index_low=3.0"),
        (["--set", "device=gpu"], "unknown device 'gpu'"),
        (["--set", "precision=fp16", "--set", "device=cpu"], "fp16 needs a GPU"),
        (["--set", "frozen_layers=9"], "the encoder has 3 layers"),
        (["--set", "attention=none-such"], "none-such"),
        (["--seed", "-1"], "seed=-1"),
        (["--seed", str(10**30)], "seed=1000"),
        (["--engine", "magic"], "forward, taylor, second-order"),
        (["--method", "dan"], "unknown method 'dan'"),
        (["--preset", "best"], "unknown preset 'best'"),
        (["--model", "nobody/nothing"], "encoder 'nobody/nothing' could not be loaded"),
        (["--model", "/no/such/folder"], "/no/such/folder: no such directory"),
        (["--target-labeled", "/no/such.csv"], "/no/such.csv: no such file"),
    ],
)
def test_bad_options(mtem, reviews, encoder, tmp_path, words, message):
    refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "run"), *words), message)
    assert not (tmp_path / "run").exists() and not (tmp_path / "elsewhere").exists()


def test_an_output_that_holds_something_else(mtem, adapted, reviews, encoder, tmp_path):
    output, _ = adapted
    before = (output / "run.json").read_bytes()
    refused(mtem(*adapt_arguments(reviews, encoder, output)), output, "holds another run")
    refused(mtem(*adapt_arguments(reviews, encoder, output), "--resume"), output, "cannot resume")
    assert (output / "run.json").read_bytes() == before
    file = write(tmp_path / "file", "mine")
    refused(mtem(*adapt_arguments(reviews, encoder, file)), file, "is a file")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "thesis.tex", "mine")
    refused(mtem(*adapt_arguments(reviews, encoder, tmp_path / "folder")), "not empty; give another --output")
    line = refused(mtem("demo", "--output", tmp_path / "folder"), "not empty")[-1]
    assert "--resume" not in line  # which the demo has not, and which would not help
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_usage_errors_are_typers(mtem, reviews, tmp_path):
    for words in (["adapt", "--target", "x.csv", "--output", "run"], ["nonsense"], ["predict"], ["adapt", "--seed", "x"]):
        code, _, error = mtem(*words)
        assert code == 2 and "Traceback" not in error and "help" in error


def test_evaluate_refuses(mtem, adapted, reviews, tmp_path):
    output, _ = adapted
    other = write_jsonl(tmp_path / "other.jsonl", [("word1", "good"), ("word2", "lukewarm")])
    refused(mtem("evaluate", output, other), "other.jsonl", "row 2", "lukewarm")
    refused(mtem("evaluate", output, reviews["kitchen"]), "kitchen.jsonl", "label")
    refused(mtem("evaluate", tmp_path / "nowhere", reviews["test"]), "nowhere", "no such folder")
    refused(mtem("evaluate", tmp_path, reviews["test"]), tmp_path, "run.json")
    refused(mtem("evaluate", output, reviews["test"], "--device", "gpu"), "unknown device 'gpu'")
    refused(mtem("evaluate", output / "model", reviews["test"], "--compare"), "--compare")
    write(tmp_path / "run.json", '{"status": "running"}')
    refused(mtem("evaluate", tmp_path, reviews["test"]), "not finished")


def test_data_prepare_refuses(mtem, tmp_path):
    refused(mtem("data", "prepare", "imdb", "--from", tmp_path, "--to", tmp_path / "out"), "unknown data set 'imdb'")
    refused(mtem("data", "prepare", "amazon", "--from", tmp_path / "nowhere", "--to", tmp_path / "out"), "nowhere")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- predict


RECORDS = [
    {"id": 7, "text": "good1 word1", "note": "a, b"},
    {"id": 5, "text": "", "note": 'say "x"'},
    {"id": 9, "text": "bad1\tword2", "note": ""},
    {"id": 1, "text": "   ", "note": "ü\nline"},
    {"id": 2, "text": "good3", "note": "end"},
]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "csv.gz", "tsv.gz", "jsonl.gz", "parquet.gz"])
def test_predict_keeps_columns_and_order(mtem, adapted, tmp_path, ending):
    output, _ = adapted
    source, target = tmp_path / f"in.{ending}", tmp_path / f"out.{ending}"
    with writers.Writer(source) as writer:
        for record in RECORDS:
            writer.write(record)
    code, text, error = mtem("predict", output, source, "--output", target)
    assert code == 0, error
    assert "5 rows" in text and "2 rows have no text" in text
    found = [record for _, record in readers.read_rows(target)]
    assert [list(record) for record in found] == [["id", "text", "note", "prediction", "confidence"]] * 5
    kept = [record for _, record in readers.read_rows(source)]
    assert [{name: record[name] for name in ("id", "text", "note")} for record in found] == kept
    for record in found:
        if str(record["text"]).strip():
            assert record["prediction"] in ("bad", "good") and 0.5 <= float(record["confidence"]) <= 1
        else:
            assert record["prediction"] in (None, "") and record["confidence"] in (None, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([source.name, target.name])


def test_predict_from_one_format_to_another_and_in_blocks(mtem, adapted, tmp_path, monkeypatch):
    from mtem import inference

    output, _ = adapted
    monkeypatch.setattr(inference, "ROWS_AT_ONCE", 7)
    rows = make_texts(30, 8)
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert mtem("predict", output, source, "--output", tmp_path / "out.parquet")[0] == 0
    table = pq.read_table(tmp_path / "out.parquet").to_pandas()
    assert list(table["text"]) == [text for text, _ in rows]
    import mtem as library

    assert list(table["prediction"]) == library.load(output).predict([text for text, _ in rows])


def test_predict_reads_odd_texts(mtem, adapted, tmp_path):
    output, _ = adapted
    odd = write(tmp_path / "odd.jsonl", '{"text": "good1 \\ud83d"}\n{"text": 12}\n{"text": null}\n{"text": "a\\u0000b"}\n')
    code, text, error = mtem("predict", output, odd, "--output", tmp_path / "out.csv")
    assert code == 0 and "4 rows" in text and "1 row has no text" in text, error
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        assert [bool(row["prediction"]) for row in csv.DictReader(stream)] == [True, True, False, True]


def test_predict_refuses(mtem, adapted, tmp_path):
    output, _ = adapted
    source = write(tmp_path / "in.csv", "text\ngood1\n")
    before = source.read_bytes()
    refused(mtem("predict", output, source, "--output", source), "in.csv", "overwrite their input")
    (tmp_path / "link.csv").symlink_to(source)
    refused(mtem("predict", output, source, "--output", tmp_path / "link.csv"), "overwrite their input")
    assert source.read_bytes() == before
    (tmp_path / "link.csv").unlink()
    taken = write(tmp_path / "taken.csv", "text,prediction\ngood1,x\n")
    later = write(tmp_path / "later.jsonl", '{"text": "good1"}\n{"text": "bad1", "confidence": 1}\n')
    place = tmp_path / "out.csv"
    refused(mtem("predict", output, taken, "--output", place), "taken.csv", "'prediction'")
    refused(mtem("predict", output, later, "--output", tmp_path / "out.jsonl"), "later.jsonl", "row 2", "'confidence'")
    refused(mtem("predict", output, tmp_path / "nowhere.csv", "--output", place), "nowhere.csv", "no such file")
    refused(mtem("predict", output, source, "--output", place, "--text-column", "body"), "in.csv", "'body'", "'text'")
    refused(mtem("predict", output, source, "--output", tmp_path / "out.docx"), "out.docx")
    refused(mtem("predict", output, source, "--output", tmp_path / "no" / "out.csv"), "does not exist")
    broken = tmp_path / "broken.csv"
    broken.write_bytes(b"text\ngood1\ncaf\xe9\n")
    refused(mtem("predict", output, broken, "--output", place), "broken.csv", "row 3", "'text'")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.csv", "in.csv", "later.jsonl", "taken.csv"]


@pytest.mark.parametrize("ending", ["csv", "jsonl.gz", "parquet"])
def test_a_full_disk_leaves_nothing(mtem, adapted, reviews, tmp_path, monkeypatch, ending):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    output, _ = adapted
    monkeypatch.setattr(writers.Writer, "_finish", full)
    place = tmp_path / f"out.{ending}"
    refused(mtem("predict", output, reviews["test"], "--output", place), place, "the disk is full", code=1)
    assert not list(tmp_path.iterdir())


def test_advice_after_a_full_disk_fits_the_command(mtem, adapted, reviews, encoder, tmp_path, monkeypatch):
    from mtem import atomic, tensors
    from mtem_paper import runner

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensors, "save_file", full)
    result = mtem(*adapt_arguments(reviews, encoder, tmp_path / "run"))
    assert refused(result, "the disk is full", code=1)[-1].endswith("make room and run again with --resume")
    monkeypatch.setattr(writers.Writer, "_finish", full)
    result = mtem("predict", adapted[0], reviews["test"], "--output", tmp_path / "out.csv")
    assert refused(result, "the disk is full", code=1)[-1].endswith("make room and run again")
    monkeypatch.setattr(json, "dump", full)
    monkeypatch.setattr(runner, "missing", lambda *_: atomic.write_json(tmp_path / "cell.json", {}))
    monkeypatch.setattr("mtem_paper.splits.read", lambda *_: None)
    words = ("--data", tmp_path, "--results", tmp_path / "results", "--model", encoder, "--variants", "out")
    result = mtem("reproduce", "general", *words)
    assert refused(result, "the disk is full", code=1)[-1].endswith("make room and run again")


def test_any_other_failure_of_the_system_is_one_line(mtem, adapted, reviews, tmp_path, monkeypatch):
    def failing(self, *_):
        raise OSError(errno.EIO, "Input/output error", "/dev/broken")

    output, _ = adapted
    monkeypatch.setattr(writers.Writer, "_finish", failing)
    result = mtem("predict", output, reviews["test"], "--output", tmp_path / "out.csv")
    refused(result, "/dev/broken: Input/output error", code=1)
    assert not list(tmp_path.iterdir())
