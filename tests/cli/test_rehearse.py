"""`mtem rehearse`, and `mtem adapt` with --rehearsal and --rehearse."""

from __future__ import annotations

import json

import pytest

from mtem import processes
from mtem.cli.rehearse import default_jobs, print_rehearsal
from tests.conftest import make_texts, write_jsonl
from tests.rehearsed import SMALL, read, write_domains

QUICK = {**SMALL, "epochs": 1, "source_epochs": 0.5}


def words_of(command, source, encoder, output, settings=QUICK, **options):
    words = [command, *(word for path in source for word in ("--source", path)), "--model", encoder, "--output", output]
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    return [*words, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}"))]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Of these domains only `toys` can stand for the target."""
    return write_domains(tmp_path_factory.mktemp("single"), books=98, dvd=98, toys=110)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("target") / "kitchen.jsonl", make_texts(60, 30, 0.6), labeled=False)


# ---------------------------------------------------------------------- mtem rehearse


def test_a_rehearsal_says_what_it_found(single, encoder, rehearsed, tmp_path, mtem):
    method, output = rehearsed["compared"]["method"][0], tmp_path / "out"
    options = {"method": f"{method}, fixmatch", "learning_rates": "1e-3,2e-3", "metric": "macro-f1"}
    words = words_of("rehearse", single, encoder, output, **options)
    code, text, error = mtem(*words, "--seed", "3")
    assert code == 0, error
    record = read(output)
    assert (
        record["methods"] == [method, "fixmatch"] and record["learning_rates"] == [1e-3, 2e-3] and record["metric"] == "macro-f1"
    )
    assert record["settings"]["seed"] == 3 and record["jobs"] == 1
    lines = text.splitlines()
    assert lines[0] == "gain in macro-f1 by adaptation, in source domains that stood for the target"
    assert lines[1].split() == ["method", "toys", "mean", "95", "%", "interval", "rate", "passes", "prior"]
    advice = record["advice"]["fixmatch"]
    rate = advice["settings"]["learning_rate"]
    last = [t["last"] - t["before"] for t in record["trials"] if (t["method"], t["learning_rate"]) == ("fixmatch", rate)]
    gain = advice["mean"] if advice["adapt"] else sum(last) / len(last)
    assert next(line for line in lines if line.startswith("fixmatch")).split()[1:3] == [f"{gain:+.3f}"] * 2
    assert f"recommended: {record['recommended']}. {record['why']}." in lines
    assert "books does not stand for the target: it has 98 texts, at least 100 are needed" in lines
    assert lines[-1] == f"record: {output / 'rehearsal.json'}   use it: mtem adapt ... --rehearsal {output}"
    assert "\x1b" not in text + error
    before = (output / "rehearsal.json").read_bytes()
    code, again, _ = mtem(*words, "--seed", "3", "--resume")
    assert code == 0 and again.splitlines() == lines and (output / "rehearsal.json").read_bytes() == before


def test_the_table_of_several_domains(rehearsed, capsys):
    from rich.console import Console

    print_rehearsal(rehearsed["rehearsal"], Console(width=40, soft_wrap=True))  # too narrow: no figure is cut off
    text = capsys.readouterr().out
    method, advice = rehearsed["rehearsal"].method, rehearsed["rehearsal"].advice(rehearsed["rehearsal"].method)
    row = next(line for line in text.splitlines() if line.startswith(method)).split()
    gains = [f"{advice.gains[name]:+.3f}" for name in ("books", "dvd", "toys")]
    assert row[1:] == [
        *gains, f"{advice.mean:+.3f}", f"{advice.low:+.3f}", "to", f"{advice.high:+.3f}", "0.003",
        f"{advice.settings['stop_epochs']:g}", "of", "2", "none",
    ]  # fmt: skip
    assert f"accuracy of {method}, estimated without labels (true): books " in text.replace("\n", "")
    own = [trial for trial in rehearsed["rehearsal"].record["trials"] if trial["method"] == method and trial["after"] is not None]
    row = [line for line in text.splitlines() if line.startswith(method)][1].split()
    names = ("before", "after", "last", "by_infomax", "best")
    assert row[1:] == [f"{sum(trial[name] for trial in own) / len(own):.3f}" for name in names]


def test_a_rehearsal_that_advises_against_adapting_says_so(worse, capsys):
    from rich.console import Console

    print_rehearsal(worse["rehearsal"], Console(width=300))
    text = capsys.readouterr().out
    assert (
        "recommended: source-only. no gain was larger than the noise from pass to pass in the mean of 2 rehearsed domains."
        in text
    )
    row = next(line for line in text.splitlines() if line.startswith(worse["method"]))
    own = {trial["domain"]: trial["last"] - trial["before"] for trial in worse["rehearsal"].record["trials"]}
    gains = [f"{own[name]:+.3f}" for name in worse["rehearsal"].record["rehearsed"]]
    assert row.split()[1:-4] == gains and row.split()[-2:] == ["none*", "none"], "what adapting would have given"
    assert "* adapting is not advised; the gains are those of the last pass" in text


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"method": "wind"}, {}, "--method wind: needs labeled target texts"),
        ({"method": "source-only"}, {}, "--method source-only: every rehearsal compares"),
        ({"method": "dan"}, {}, "unknown method 'dan'"),
        ({"method": ","}, {}, "--method: expected at least one method"),
        ({"metric": "auc"}, {}, "--metric auc: expected accuracy"),
        ({"learning_rates": "1e-3;1e-4"}, {}, "--learning-rates 1e-3;1e-4: expected numbers separated by commas"),
        ({"learning_rates": "-1e-3"}, {}, "--learning-rates -0.001: expected a positive number"),
        ({"learning_rates": ","}, {}, "--learning-rates: expected at least one"),
        ({"class_priors": "even"}, {}, "--class-priors even: expected some of"),
        ({"preset": "best"}, {}, "unknown preset 'best'"),
        ({}, {"steps": 3}, "--set steps: a rehearsal sets this itself"),
        ({}, {"criterion": "last"}, "--set criterion: a rehearsal sets this itself"),
        ({}, {"jobs": 3}, "--set jobs=3: 'jobs' is an option, not a setting; see 'mtem rehearse --help'"),
        ({}, {"epoch": 3}, "did you mean 'epochs'"),
        ({"budget": "-1"}, {}, "--budget"),
        ({"jobs": "0"}, {}, "--jobs"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_behind(single, encoder, tmp_path, mtem, options, settings, words):
    code, text, error = mtem(*words_of("rehearse", single, encoder, tmp_path / "out", settings, **options))
    assert code == 2 and words in " ".join(error.replace("│", " ").split()) and "Traceback" not in error and not text
    assert not (tmp_path / "out").exists()


def test_too_few_texts(encoder, tmp_path, mtem):
    source = write_domains(tmp_path, books=140, dvd=140)
    code, text, error = mtem(*words_of("rehearse", source, encoder, tmp_path / "out"))
    assert code == 2 and not text and not (tmp_path / "out").exists()
    assert "a rehearsal needs at least 300 labeled texts, got 280; give more labeled texts, or adapt without a rehearsal" in error


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"budget": "0"}, "--budget 0: expected a positive number of minutes"),
        ({"jobs": "0"}, "--jobs 0: expected at least one process"),
    ],
)
def test_no_time_and_no_process_are_refused(single, encoder, rehearsed, tmp_path, mtem, option, words):
    words_ = words_of("rehearse", single, encoder, tmp_path / "out", method=rehearsed["compared"]["method"][0], **option)
    code, _, error = mtem(*words_)
    assert code == 2 and words in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"steps": 4}, {}, "--set steps=4: --rehearse chooses the number of passes"),
        ({}, {"target": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({}, {"source_model": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_what_the_run_would_refuse_is_refused_before_the_rehearsal(
    single, encoder, target, tmp_path, mtem, settings, changes, words
):
    given = {"target": target, **changes}
    code, _, error = mtem(*words_of("adapt", single, encoder, tmp_path / "run", settings, **given), "--rehearse")
    assert code == 2 and words in error and not (tmp_path / "run").exists()


def test_processes_by_default(monkeypatch):
    for cores, wanted in ((1, 1), (2, 1), (3, 1), (8, 4), (32, 16)):
        monkeypatch.setattr(processes, "cores", lambda cores=cores: cores)
        assert default_jobs({"device": "cpu"}) == wanted


def test_help_has_examples(mtem):
    code, text, _ = mtem("rehearse", "--help")
    assert code == 0 and "mtem rehearse --source" in text and "--class-priors" in text and "--budget" in text
    code, text, _ = mtem("adapt", "--help")
    assert code == 0 and all(option in text for option in ("--rehearsal", "--rehearse", "--budget"))


# ---------------------------------------------------------------------- mtem adapt


def test_adapt_uses_a_rehearsal(rehearsed, target, tmp_path, mtem):
    settings = {name: value for name, value in SMALL.items() if name != "epochs"}
    words = words_of("adapt", rehearsed["request"]["source"], rehearsed["request"]["model"], tmp_path / "run", settings,
                     target=target, method="auto", rehearsal=rehearsed["path"])  # fmt: skip
    code, text, error = mtem(*words)
    assert code == 0, error
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["choices"]["method"] == record["choices"]["learning_rate"] == "rehearsal"
    assert (
        "learning rate as rehearsed" in text and "the accuracy in 3 rehearsed domains; there such estimates were off by" in text
    )
    assert f"method {rehearsed['rehearsal'].method}: {rehearsed['rehearsal'].why}" in error


def test_adapt_rehearses_first(single, encoder, target, rehearsed, tmp_path, mtem):
    method, output = rehearsed["compared"]["method"][0], tmp_path / "run"
    words = words_of("adapt", single, encoder, output, target=target, method=f"{method},fixmatch")
    code, text, error = mtem(*words, "--rehearse", "--set", "learning_rate=2e-3")
    assert code == 0, error
    record, made = json.loads((output / "run.json").read_text()), read(output / "rehearsal")
    assert made["status"] == "done" and made["methods"] == [method, "fixmatch"] and made["learning_rates"] == [2e-3]
    assert record["method"] == made["recommended"] and record["choices"]["method"] == "rehearsal"
    assert record["choices"]["learning_rate"] == "given" and record["rehearsal"]["same_texts"] is True
    assert "recommended: " in error and "recommended: " not in text
    before = (output / "rehearsal" / "rehearsal.json").read_bytes()
    code, _, error = mtem(*words, "--rehearse", "--set", "learning_rate=2e-3", "--resume")
    assert code == 0 and "this run is finished already" in error
    assert (output / "rehearsal" / "rehearsal.json").read_bytes() == before


def test_auto_compares_methods(single, encoder, target, tmp_path, mtem, monkeypatch):
    from mtem.errors import RequestError
    from mtem.rehearsal import rehearse

    asked = []

    def refused(source, **given):
        asked.append(given)
        raise RequestError("enough")

    monkeypatch.setattr(rehearse, "rehearse", refused)
    words = words_of(
        "adapt", single, encoder, tmp_path / "run", {"left_out_models": 0, "seed": 5}, target=target, method="auto", budget="7"
    )
    assert mtem(*words, "--rehearse")[0] == 2
    (given,) = asked
    assert given["method"] == ["mtem", "biat"] and given["budget"] == 7 and given["output"] == tmp_path / "run" / "rehearsal"
    assert "left_out_models" not in given and given["seed"] == "5" and given["resume"] is False and given["jobs"] == 1


def test_with_too_few_texts_adapt_goes_on_with_the_defaults_and_says_so(reviews, encoder, tmp_path, mtem):
    settings = {**QUICK, "left_out_models": 0}
    words = words_of(
        "adapt", [reviews["books"]], encoder, tmp_path / "run", settings, target=reviews["kitchen"], method="fixmatch,mtem"
    )
    code, _, error = mtem(*words, "--rehearse", "-q")
    assert (
        code == 0
        and "no rehearsal, the documented defaults are used: books.jsonl: a rehearsal needs at least 300 labeled texts, got 60"
        in error
    )
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["method"] == "fixmatch" and record["rehearsal"] is None and record["choices"]["learning_rate"] == "default"
    assert not (tmp_path / "run" / "rehearsal").exists()


def test_options_that_do_not_go_together(single, encoder, target, tmp_path, mtem, rehearsed):
    words = words_of("adapt", single, encoder, tmp_path / "run", target=target)
    for more, wanted in (
        (("--rehearse", "--rehearsal", rehearsed["path"]), "--rehearse and --rehearsal: give one of them"),
        (("--budget", "3"), "--budget: only with --rehearse"),
        (("--method", "auto"), "--method auto: needs a rehearsal"),
        (("--rehearsal", tmp_path / "none"), "holds no rehearsal"),
        (("--rehearse", "--method", "wind"), "--method wind: needs labeled target texts"),
    ):
        code, _, error = mtem(*words, *more)
        assert code == 2 and wanted in error and not (tmp_path / "run").exists(), wanted
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.doc").write_text("mine")
    code, _, error = mtem(*words, "--rehearse")
    assert code == 2 and "is not empty" in error and [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.doc"]
