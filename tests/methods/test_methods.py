"""What holds for every method alike: the list, the edges, the file of one's own, and that each of them learns."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import mtem
from mtem import methods, settings
from mtem.cli.main import app
from mtem.errors import RequestError
from mtem.methods.base import Batch
from mtem.training.settings import TrainingSettings
from tests.bench import Bench
from tests.conftest import make_texts, write_jsonl
from tests.memory import Peak
from tests.tolerance import assert_near, assert_weights_near

ALL = list(methods.METHODS)
GUIDE = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


@pytest.fixture(scope="module")
def target_labeled(tmp_path_factory):
    return str(write_jsonl(tmp_path_factory.mktemp("target_labeled") / "few.jsonl", make_texts(12, 21, 0.7)))


def labeled(name, target_labeled):
    return {"target_labeled": target_labeled} if methods.get(name).needs_target_labels else {}


def test_the_list_names_paper_and_labels():
    shown = CliRunner().invoke(app, ["methods"], terminal_width=300).output
    for name in ("mtem", "source-only", "dann", "fixmatch", "cst", "mme", "biat", "wind"):
        method_cls = methods.get(name)
        line = next(line for line in shown.splitlines() if line.split() and line.split()[0] == name)
        assert method_cls.paper.split()[0] in line and ("needed" in line) == method_cls.needs_target_labels
    assert [name for name in ALL if methods.get(name).needs_target_labels] == ["wind"]


@pytest.mark.parametrize("name", ALL)
def test_presets_are_settings_that_exist(name):
    method_cls = methods.get(name)
    for preset in ("recommended", "paper"):
        parts = settings.build({"training": TrainingSettings, "method": method_cls.Settings}, method_cls.presets[preset])
        assert isinstance(parts["method"], method_cls.Settings)


@pytest.mark.parametrize("name", [name for name in ALL if name != "mtem"])
def test_a_setting_of_another_method_is_refused_with_those_there_are(name, tiny, target_labeled):
    with pytest.raises(RequestError, match=r"unknown setting 'index_initial'.*there are.*batch_size"):
        mtem.adapt(**tiny, method=name, **labeled(name, target_labeled), index_initial=3.0)


def test_a_method_that_needs_target_labels_says_so(tiny):
    with pytest.raises(RequestError, match=r"'wind' needs labeled target texts.*--target-labeled"):
        mtem.adapt(**tiny, method="wind")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("frozen", [0, 1])
def test_every_method_takes_odd_batches(name, frozen, encoder):
    """One example, one class only, an empty text: the weights stay finite and change."""
    method_cls = methods.get(name)
    bench = Bench(method_cls, encoder, target_labeled=True, frozen=frozen)
    empty = bench.model.collate(bench.model.encode_texts(["", "good1"]), np.arange(2))
    good = np.flatnonzero(bench.labels[:40] == 1)[:4]
    cases = [
        (bench.source_batch([0]), bench.target_batch([0])),
        (bench.source_batch(good), bench.target_batch([1, 2, 3])),
        (bench.source_batch([4, 5, 44]), Batch(empty, None, torch.tensor([4, 5]))),
    ]
    before = bench.weights()
    for number, (source, target) in enumerate(cases):
        log = bench.step(number, source, target)
        assert all(np.isfinite(float(value)) for value in log.values()), (number, log)
    after = bench.weights()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ALL)
def test_every_method_adapts_with_three_classes_and_keeps_their_names(name, encoder, tmp_path, target_labeled):
    rows = [(text, ("awful", "so-so", "fine")[number % 3]) for number, (text, _) in enumerate(make_texts(60, 31))]
    target = [text for text, _ in make_texts(40, 32, 0.5)]
    given = {"target_labeled": rows[:9]} if methods.get(name).needs_target_labels else {}
    given = {key: ([t for t, _ in value], [c for _, c in value]) for key, value in given.items()}
    adapted = mtem.adapt(
        ([t for t, _ in rows], [c for _, c in rows]), target, model=encoder, method=name, output=tmp_path / "run",
        max_length=16, batch_size=12, source_epochs=1, source_learning_rate=1e-3, learning_rate=5e-4, steps=3, evaluations=1,
        **given,
    )  # fmt: skip
    loaded = mtem.load(tmp_path / "run")
    assert loaded.classes == adapted.classes == ("awful", "fine", "so-so")
    assert_near(loaded.predict_proba(target), adapted.predict_proba(target), dtype=torch.float32, size=20.0)  # as the scores


@pytest.mark.parametrize("name", ALL)
def test_every_method_runs_in_bfloat16(name, tiny, target_labeled):
    adapted = mtem.adapt(
        **{**tiny, "steps": 2, "source_epochs": 0.2}, method=name, precision="bf16", **labeled(name, target_labeled)
    )
    assert np.isfinite(adapted.predict_proba(["good1 bad2", ""])).all()


# ---------------------------------------------------------------------- less memory

# The raw gradient moves the meta-parameters, not its sign, which would hide small errors.
MTEM, WIND = {"index_step": "rms", "index_learning_rate": 0.1}, {"weight_step": "rms"}
STEPS = [("mtem", {"engine": engine, **MTEM}) for engine in ("layerwise", "forward", "taylor", "second-order")]
STEPS += [("mtem", {"virtual_step": False, **MTEM}), ("mtem", {"meta": False, "ema_decay": 0.0, "view_strength": 0.0})]
STEPS += [("mtem", {"index_mode": "shared", "threshold": 0.5})]
STEPS += [(name, {"view_radius": 0.1}) for name in ("fixmatch", "cst")]
STEPS += [("mtem", {"view_radius": 0.1, "engine": engine, **MTEM}) for engine in ("layerwise", "forward")]
STEPS += [("wind", {"engine": engine, **WIND}) for engine in ("forward", "taylor", "second-order")]
STEPS += [(name, {}) for name in ALL if name not in ("mtem", "wind")]
FROZEN = [step for step in STEPS if step[1].get("engine") in ("layerwise", "second-order") or step[0] in ("biat", "cst")]


def trained(name, encoder, changes, saving=(1, False), **options):
    """Weights, logs and the method's state after two steps on batches of eight."""
    bench = Bench(methods.get(name), encoder, target_labeled=True, **options, **{"ema_decay": 0.9, **changes})
    bench.model.save_memory(*saving)
    torch.manual_seed(3)
    logs = [{key: float(value) for key, value in bench.step(number).items()} for number in range(2)]
    return bench.weights(), logs, {**bench.method.state(), "drawn next": torch.rand(3)}


def check_same_step(name, changes, encoder, savings, **options):
    weights, logs, state = trained(name, encoder, changes, **options)
    for saving in savings:
        found = trained(name, encoder, changes, saving, **options)
        assert_weights_near(found[0], weights)
        for one, other in zip(found[1], logs, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        for key, value in state.items():
            torch.testing.assert_close(found[2][key], value, rtol=1e-3, atol=1e-4, msg=f"{saving} {key}")


@pytest.mark.parametrize(("name", "changes"), STEPS, ids=str)
def test_settings_that_save_memory_give_the_same_step(name, changes, encoder):
    check_same_step(name, changes, encoder, [(3, False), (1, True), (3, True)], dropout=False)


@pytest.mark.parametrize(("name", "changes"), FROZEN, ids=str)
def test_so_they_do_above_frozen_layers(name, changes, encoder):
    check_same_step(name, changes, encoder, [(3, False), (3, True)], dropout=False, frozen=1)


@pytest.mark.parametrize(("name", "changes"), STEPS, ids=str)
def test_recomputed_layers_draw_the_same_dropout_masks(name, changes, encoder):
    check_same_step(name, changes, encoder, [(1, True)])


@pytest.mark.parametrize(("name", "changes"), FROZEN, ids=str)
def test_fewer_bytes_are_alive(name, changes, encoder):
    peaks = {}
    for saving in [(1, False), (4, False), (1, True)]:
        bench = Bench(methods.get(name), encoder, target_labeled=True, **changes)
        bench.model.save_memory(*saving)
        ids = torch.randint(5, 60, (24, 64), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids, "attention_mask": torch.ones((1, 1), dtype=torch.long).expand(ids.shape)}
        with Peak() as peak:
            bench.step(0, Batch(inputs, torch.arange(24) % 2, torch.arange(24)), Batch(inputs, None, torch.arange(24)))
        peaks[saving] = peak.bytes
    assert peaks[4, False] < 0.4 * peaks[1, False], peaks
    if changes.get("engine") != "second-order":  # its twofold pass keeps everything
        assert peaks[1, True] < 0.65 * peaks[1, False], peaks


# ---------------------------------------------------------------------- a file of one's own


@pytest.fixture
def own(tmp_path):
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len(code.splitlines()) <= 60
    path = tmp_path / "infomax.py"
    path.write_text(code, encoding="utf-8")
    return path


def test_the_guides_method_minimises_what_it_says(own, encoder):
    bench = Bench(methods.get(str(own)), encoder, dropout=False, weight=3.0)
    source, target = bench.batches()
    with torch.no_grad():
        p = torch.softmax(bench.model(target.inputs).double(), dim=1).numpy()
        labeled = torch.softmax(bench.model(source.inputs).double(), dim=1).numpy()
    expected = -np.log(labeled[np.arange(8), source.labels]).mean()
    expected += 3.0 * (-(p * np.log(p)).sum(axis=1).mean() + (p.mean(axis=0) * np.log(p.mean(axis=0))).sum())
    losses = []
    bench.method.step(0, source, target, losses.append)
    assert float(losses[0].detach()) == pytest.approx(float(expected), rel=1e-5)


def test_the_guides_method_runs_from_the_command_line_and_resumes(own, tiny, tmp_path):
    given = ["adapt", "--model", str(tiny["model"]), "--target", tiny["target"], "--method", str(own), "--set", "weight=0.5"]
    given += [word for path in tiny["source"] for word in ("--source", path)]
    for name in ("max_length", "batch_size", "source_epochs", "epochs", "frozen_layers"):
        given += ["--set", f"{name}={tiny[name]}"]
    done = CliRunner().invoke(app, [*given, "--output", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    again = CliRunner().invoke(app, [*given, "--output", str(tmp_path / "run"), "--resume"])
    assert again.exit_code == 0 and mtem.load(tmp_path / "run").record["settings"]["weight"] == 0.5


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError"),
        ("x = 1", "found 0"),
        ("from mtem.methods import Method\nclass A(Method):\n    name = 'a'\n    Settings = object", "A has no 'step'"),
        ("from mtem.methods import Method\nclass A(Method):\n    name = 'a'\n    def step(self): ...", "A has no 'Settings'"),
        (None, "no such file"),
    ],
)
def test_a_file_without_a_method_is_refused(tmp_path, tiny, code, message):
    path = tmp_path / "mine.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(RequestError, match=message):
        mtem.adapt(**tiny, method=str(path))
