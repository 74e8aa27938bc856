"""Writing tables: the values that are written are read back, and a file appears complete or not at all."""

import errno
import os
import subprocess

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from mtem.data.readers import columns, read_rows
from mtem.data.writers import Writer, without_formula
from mtem.errors import RequestError, RunError
from tests.conftest import examples

TABLES = [".csv", ".tsv", ".csv.gz", ".tsv.gz"]
TYPED = [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".parquet", ".pq", ".parquet.gz"]

# Everything UTF-8 can hold, but NUL (which no CSV reader takes).
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
values = st.one_of(st.none(), st.integers(-(2**60), 2**60))


def put(folder, name, data):
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


# Round trips


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(texts, texts), min_size=1, max_size=8), extension=st.sampled_from(TABLES))
def test_strings_come_back_from_csv_and_tsv_as_they_were(tmp_path, rows, extension):
    path = tmp_path / f"a{extension}"
    records = [{"text": a, "other": b} for a, b in rows]
    with Writer(path) as out:
        for record in records:
            out.write(record)
    assert list(read_rows(path)) == [(row, record) for row, record in enumerate(records, start=2)]
    assert columns(path) == ["text", "other"]


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(texts, values, st.booleans()), min_size=1, max_size=8), extension=st.sampled_from(TYPED))
def test_values_keep_their_types_in_json_and_parquet(tmp_path, rows, extension):
    path = tmp_path / f"a{extension}"
    records = [{"text": a, "number": b, "flag": c} for a, b, c in rows]
    with Writer(path) as out:
        for record in records:
            out.write(record)
    assert list(read_rows(path)) == list(enumerate(records, start=1))
    assert columns(path) == ["text", "number", "flag"]


def test_a_single_column_with_empty_cells_survives(tmp_path):
    path = tmp_path / "a.csv"
    with Writer(path) as out:
        for text in ("", "x", ""):
            out.write({"text": text})
    assert [record["text"] for _, record in read_rows(path)] == ["", "x", ""]


def test_parquet_column_that_is_empty_for_thousands_of_records(tmp_path):
    path = tmp_path / "a.parquet"
    with Writer(path) as out:
        for i in range(3000):
            out.write({"i": i, "late": None if i < 2500 else i / 2})
    got = [record["late"] for _, record in read_rows(path)]
    assert got[:2500] == [None] * 2500 and got[2501] == 1250.5


def test_parquet_of_mixed_types_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(RequestError, match=r"a\.parquet.*one type per column"), Writer(tmp_path / "a.parquet") as out:
        out.write({"a": 1})
        out.write({"a": "x"})
    assert list(tmp_path.iterdir()) == []


def test_json_keeps_nested_values_and_half_surrogates(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"text": "\ud800x", "list": [1, {"a": None}]}, {"other": 1.5}]
    with Writer(path, columns=["text"]) as out:
        for record in records:
            out.write(record)
    assert [record for _, record in read_rows(path)] == records


def test_numbers_lists_and_nothing_in_csv(tmp_path):
    path = tmp_path / "a.csv"
    with Writer(path, columns=["a", "b", "c"]) as out:
        out.write({"a": 1.5, "b": [1, "é"]})
    assert path.read_bytes() == 'a,b,c\n1.5,"[1, ""é""]",\n'.encode()


def test_a_file_without_records_has_its_header(tmp_path):
    for name in ("a.csv", "a.parquet"):
        with Writer(tmp_path / name, columns=["x", "y"]):
            pass
        assert columns(tmp_path / name) == ["x", "y"] and list(read_rows(tmp_path / name)) == []


def test_unknown_column_names_the_record(tmp_path):
    with pytest.raises(RequestError, match=r"a\.csv: record 2 has a column 'b'"), Writer(tmp_path / "a.csv") as out:
        out.write({"a": 1})
        out.write({"a": 1, "b": 2})
    assert list(tmp_path.iterdir()) == []


def test_gzip_is_the_same_bytes_every_time(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        with Writer(tmp_path / name) as out:
            out.write({"text": "same"})
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_unreadable_output_places(tmp_path):
    with pytest.raises(RequestError, match=r"a\.csv: the folder .* does not exist"), Writer(tmp_path / "no" / "a.csv"):
        pass
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(RequestError, match=r"b\.csv: is a folder"), Writer(tmp_path / "b.csv"):
        pass
    with pytest.raises(RequestError, match="unknown file format"):
        Writer(tmp_path / "a.xlsx")


# Nothing half written


@pytest.mark.parametrize("extension", [".csv", ".jsonl.gz", ".parquet"])
def test_failure_leaves_the_old_file_and_nothing_else(tmp_path, extension):
    path = put(tmp_path, f"a{extension}", b"before")
    with pytest.raises(KeyError), Writer(path) as out:
        out.write({"text": "x"})
        raise KeyError
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == [path.name]


def test_writing_follows_a_link_and_keeps_usual_permissions(tmp_path):
    put(tmp_path, "real.csv", "old\n")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    with Writer(tmp_path / "link.csv") as out:
        out.write({"a": "1"})
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "real.csv").read_text() == "a\n1\n"
    put(tmp_path, "other.csv", "x")
    assert (tmp_path / "real.csv").stat().st_mode == (tmp_path / "other.csv").stat().st_mode


@pytest.fixture
def tiny_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount a small disk here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("extension", [".csv", ".csv.gz", ".jsonl", ".parquet"])
def test_full_disk(tiny_disk, extension):
    path = tiny_disk / f"a{extension}"
    with pytest.raises(RunError, match=rf"a{extension}: the disk is full"), Writer(path) as out:
        for _ in range(20_000):
            out.write({"text": os.urandom(50).hex()})
    assert list(tiny_disk.iterdir()) == []


def test_full_disk_when_flushing(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"a\.csv: the disk is full"), Writer(tmp_path / "a.csv") as out:
        out.write({"a": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cell", ["=1+1", "+x", "-x", "@a", "\t=1", "\r=1", " =1", "-1+1", "\uff1d1"])
def test_formulas(cell):
    assert without_formula(cell) == "'" + cell


@pytest.mark.parametrize("cell", ["", "a=1", "1", "-1", "+1.5", "-1e-5", ".5", "'=1", "x -1"])
def test_no_formulas(cell):
    assert without_formula(cell) == cell


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
def test_files_for_spreadsheets(tmp_path, ending):
    for spreadsheet, expected in ((True, [{"'=a": "'=1"}]), (False, [{"=a": "=1"}])):
        with Writer(tmp_path / f"x{ending}", spreadsheet=spreadsheet) as out:
            out.write({"=a": "=1"})
        assert [record for _, record in read_rows(tmp_path / f"x{ending}")] == expected
