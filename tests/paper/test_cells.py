"""Reading and writing results."""

from __future__ import annotations

import dataclasses
import json

from mtem_paper import cells, coverage, protocol


def test_places_show_the_earlier_rules_until_their_main_rows_or_as_much_was_run_under_the_new_ones(tmp_path):
    from tests.made_up import make_cell

    def result(protocol, seed, variant="mtem", prior="uniform"):
        made = make_cell(variant, "ferguson", seed, dataset="pheme", settings={"target_class_prior": prior}, protocol=protocol)
        path = tmp_path / f"cells/pheme/bigcn/unsupervised/event/{variant}-{prior}-{seed}-{protocol}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))

    for seed in (0, 1):
        result(2, seed)
        result(1, seed, prior="none", variant="out-as-is")  # nothing had changed for these before number 4
    result(1, 0, variant="dann")  # its estimate was made otherwise
    result(4, 0)
    found = cells.read(tmp_path)
    assert sorted((cell["variant"], cell["seed"], cell["protocol"]) for cell in found.cells) == [
        ("mtem", 0, 2), ("mtem", 1, 2), ("out-as-is", 0, 1), ("out-as-is", 1, 1),
    ]  # fmt: skip
    current = [("mtem", 2), ("mtem", 4), ("out-as-is", 1), ("out-as-is", 1)]
    assert sorted((cell["variant"], cell["protocol"]) for cell in found.current) == current, "of each run the newest"
    assert "| PHEME, bigcn, unsupervised | 4 | 4 | 1 |" in coverage.earlier_rules(found.cells, found.current)
    for seed in (0, 1):
        result(4, seed, prior="none", variant="out-as-is")
    assert {cell["protocol"] for cell in cells.read(tmp_path).cells} == {1, 2}, "three of four, and a run of mtem is missing"
    result(4, 2)
    result(4, 1, prior="none", variant="out-as-is")
    found = cells.read(tmp_path)
    assert [cell["protocol"] for cell in found.cells] == [4] * 4, "as many, and all rows of a place change at once"
    for variant in ("dann", "cst", "mme"):
        result(2, 0, variant=variant)
    assert {cell["protocol"] for cell in cells.read(tmp_path).cells} == {1, 2}, "now more of the earlier ones"
    result(4, 1)
    assert {cell["protocol"] for cell in cells.read(tmp_path).cells} == {4}, "all runs of mtem"
    assert coverage.earlier_rules(found.cells, found.current) == "None.\n"


def test_perturbed_views_are_shown_when_the_main_rows_have_them(tmp_path):
    """Under number 5 the rows without labels in a view are those of number 4."""
    from tests.made_up import make_cell

    def result(number, variant, seed):
        path = tmp_path / f"cells/amazon/minilm/unsupervised/mixed/{variant}-{seed}-{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make_cell(variant, "books", seed, protocol=number)))

    def shown():
        return sorted((cell["variant"], cell["seed"], cell["protocol"]) for cell in cells.read(tmp_path).cells)

    before = [("biat", 0, 4), ("cst", 0, 4), ("mtem", 0, 4), ("mtem", 1, 4), ("out", 0, 4), ("out", 1, 4)]
    for variant, seed, number in before:
        result(number, variant, seed)
    result(5, "mtem", 0)
    assert shown() == before
    found = cells.read(tmp_path)
    assert "| Amazon, minilm, mixed pool, unsupervised | 6 | 3 | 4 |" in coverage.earlier_rules(found.cells, found.current)
    result(5, "mtem", 1)
    result(5, "mtem-learned", 1)
    result(4, "mtem-without-perturbation", 1)
    today = [("biat", 0, 4), ("mtem", 0, 5), ("mtem", 1, 5), ("mtem-learned", 1, 5), ("mtem-without-perturbation", 1, 4)]
    assert shown() == [*today, ("out", 0, 4), ("out", 1, 4)], "not the run of cst, whose view was not perturbed"
    assert coverage.earlier_rules(cells.read(tmp_path).cells, []) == "None.\n"


def test_what_todays_runs_say_while_the_tables_show_earlier_ones():
    def run(variant, target, seed, score, number=4):
        place = {"dataset": "amazon", "model": "minilm", "pool": "mixed", "setting": "unsupervised"}
        number = 5 if number == 4 and variant != "out" else number
        method = {"method": variant if variant != "out" else "source-only", "preset": "recommended"}
        return {**place, **method, "variant": variant, "target": target, "seed": seed, "score": score, "protocol": number}

    targets = protocol.DATASETS["amazon"].targets
    old = [run("mtem", target, seed, 0.5, 3) for target in targets for seed in range(9)]
    new = [run("mtem", target, 0, 0.8) for target in targets] + [run("mtem", target, 1, 0.9) for target in targets]
    new += [run("mtem", "books", 2, 0.1), run("fixmatch", "books", 0, 0.7)]  # not all targets
    new += [run("out", target, 0, 0.75 + 0.01 * number) for number, target in enumerate(targets)]
    lines = coverage.so_far(old, new).splitlines()[2:]
    assert lines == [
        "| Amazon, minilm, mixed pool, unsupervised | Out | 1 | .7500 .7600 .7700 .7800 | .7650 |",
        "|  | MTEM | 2 | .8500 .8500 .8500 .8500 | .8500 |",
    ]
    assert coverage.so_far(new, new) == coverage.so_far(old, old) == "None.\n", "the tables show them, or there are none"


def test_damaged_files_and_rehearsals_are_no_results(tmp_path):
    cell = protocol.plan(["general"], "pheme", "bigcn", "bigcn", variants=["mtem"], seeds=[0])[0]
    names = ("dataset", "model", "setting", "pool", "variant", "target", "seed")
    result = {
        **{name: getattr(cell, name) for name in names},
        "overrides": {},
        "protocol": 2,
        "oracle": False,
        "method": "mtem",
        "preset": "recommended",
        "settings": {"target_class_prior": "uniform"},
        "finished": "2026-01-01",
        "score": 1,
    }
    path = cells.write(tmp_path, cell, result)
    cells.write(tmp_path, dataclasses.replace(cell, target="b"), {**result, "target": "b", "overrides": {"steps": "1"}})
    cells.write(tmp_path, dataclasses.replace(cell, target="c"), {**result, "target": "c", "protocol": 6})
    cells.write(tmp_path, dataclasses.replace(cell, factors=(9.0,)), {**result, "finished": "2025-01-01", "score": 0})
    path.with_name("half-a-0-00000000.json").write_text(path.read_text()[:40])
    path.with_name("list-a-0-00000000.json").write_text("[]")
    path.with_name(".mtem.json.abc.part").write_text("{")
    found, damaged, current = cells.read(tmp_path)
    assert [each["score"] for each in found] == [1] and found == current
    assert len(damaged) == 2 and all("run it again" in line for line in damaged)
    assert cells.read(tmp_path / "nothing").cells == []
