"""Reading and writing tables: what goes in comes out, and what is broken says where."""

import errno
import gzip
import json
import os
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from mtem.data import cache, readers
from mtem.data.readers import columns, read_rows
from mtem.data.writers import Writer
from mtem.errors import RequestError, RunError
from tests.conftest import examples

TABLES = [".csv", ".tsv", ".csv.gz", ".tsv.gz"]
TYPED = [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".parquet", ".pq", ".parquet.gz"]

# Everything UTF-8 can hold, but NUL (which no CSV reader takes).
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


def refusal(path, *words):
    with pytest.raises(RequestError) as caught:
        list(read_rows(path))
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message, message
    return message


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


values = st.one_of(st.none(), st.integers(-(2**60), 2**60))


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


# What is accepted


def test_rows_are_counted_as_a_spreadsheet_does(tmp_path):
    path = put(tmp_path, "a.csv", b'\xef\xbb\xbftext,label\r\n"two\r\nlines",1\r\n\r\nlast,2\r\n')
    assert list(read_rows(path)) == [
        (2, {"text": "two\r\nlines", "label": "1"}),
        (4, {"text": "last", "label": "2"}),
    ]


def test_json_lines_with_mark_blank_lines_and_line_separators(tmp_path):
    path = put(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\r\n  \n{"text": "c"}')
    assert list(read_rows(path)) == [(1, {"text": "a\u2028b"}), (4, {"text": "c"})]


def test_old_mac_line_ends(tmp_path):
    assert [r for _, r in read_rows(put(tmp_path, "a.csv", b"text\rone\rtwo\r"))] == [{"text": "one"}, {"text": "two"}]


def test_huge_field(tmp_path):
    path = put(tmp_path, "a.csv", "text,label\n" + "x" * 1_000_000 + ",1\n")
    assert len(next(read_rows(path))[1]["text"]) == 1_000_000


def test_index_column_without_a_name(tmp_path):
    assert columns(put(tmp_path, "a.csv", ",text\n0,a\n")) == ["", "text"]


def test_leaving_off_early_is_fine(tmp_path):
    path = put(tmp_path, "a.csv", "text\n" + "x\n" * 1000)
    assert next(read_rows(path)) == (2, {"text": "x"})


# What is refused


@pytest.mark.parametrize("extension", TABLES + TYPED)
def test_missing_folder_and_empty(tmp_path, extension):
    refusal(tmp_path / f"gone{extension}", "no such file")
    (tmp_path / f"folder{extension}").mkdir()
    refusal(tmp_path / f"folder{extension}", "is a folder")
    refusal(put(tmp_path, f"empty{extension}", b""), "empty")
    if extension.endswith(".gz") and "parquet" not in extension:
        refusal(put(tmp_path, f"zipped-empty{extension}", gzip.compress(b"")), "empty")


def test_unknown_extension_lists_the_known(tmp_path):
    refusal(put(tmp_path, "a.xlsx", b"x"), ".xlsx", ".csv", ".jsonl", ".parquet")
    refusal(put(tmp_path, "data", b"x"), ".csv")


def test_gzip_without_its_extension(tmp_path):
    refusal(put(tmp_path, "a.csv", gzip.compress(b"text\nx\n")), "rename it to a.csv.gz")


def test_broken_utf8_names_row_column_and_byte(tmp_path):
    refusal(put(tmp_path, "a.csv", b"id,text\n1,fine\n2,caf\xe9\n"), "row 3", "column 'text'", "0xE9", "position 4")
    refusal(put(tmp_path, "a.jsonl", b'{"text": "fine"}\n{"text": "caf\xe9"}\n'), "row 2", "0xE9")
    refusal(put(tmp_path, "b.csv", "id,text\n1,é\n".encode("utf-16")), "UTF-16")
    refusal(put(tmp_path, "c.csv", b"id,t\xff\n1,2\n"), "row 1", "0xFF")


def test_broken_utf8_in_parquet(tmp_path):
    bad = pa.array([b"fine", b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    refusal(tmp_path / "a.parquet", "row 2", "column 'text'", "0xE9")


@pytest.mark.parametrize("extension", [".csv.gz", ".tsv.gz", ".jsonl.gz", ".parquet.gz"])
def test_truncated_and_damaged_gzip(tmp_path, extension):
    path = tmp_path / f"a{extension}"
    with Writer(path) as out:
        for i in range(5000):
            out.write({"text": f"text {i} {i * 7919 % 1000}", "label": str(i % 2)})
    whole = path.read_bytes()
    message = refusal(put(tmp_path, f"cut{extension}", whole[: len(whole) // 2]), "truncated")
    assert "parquet" in extension or "after row " in message
    refusal(put(tmp_path, f"bad{extension}", whole[:200] + bytes(400) + whole[600:]), "damaged")
    refusal(put(tmp_path, f"plain{extension}", b"text,label\nx,1\n"), "damaged")


def test_broken_json_lines(tmp_path):
    refusal(put(tmp_path, "a.jsonl", '{"text": "a"}\n\n{"text": \n'), "row 3", "not valid JSON")
    refusal(put(tmp_path, "b.jsonl", '{"text": "a"}\n["a"]\n'), "row 2", "an array", "object")
    refusal(put(tmp_path, "c.jsonl", "3\n"), "row 1", "a number")
    refusal(put(tmp_path, "d.jsonl", "[" * 100_000 + "\n"), "row 1")
    refusal(put(tmp_path, "e.jsonl", '{"n": ' + "9" * 5000 + "}\n"), "row 1")
    refusal(put(tmp_path, "f.jsonl", b'{"text": "a\0b"}\n'), "row 1", "NUL")
    refusal(put(tmp_path, "g.jsonl", "\n \n"), "empty")


def test_broken_tables(tmp_path):
    refusal(put(tmp_path, "a.csv", "text,label\nfine,1\na,b,1\n"), "row 3", "too many fields (3, the header has 2)")
    refusal(put(tmp_path, "b.csv", "text,label\nfine\n"), "row 2", "too few fields (1, the header has 2)")
    refusal(put(tmp_path, "c.csv", "text,text\na,b\n"), "row 1", "'text'", "twice")
    refusal(put(tmp_path, "d.csv", ",\na,b\n"), "row 1", "header")
    refusal(put(tmp_path, "e.csv", "\n\n"), "empty")
    refusal(put(tmp_path, "f.csv", b"text,label\na\0b,1\n"), "row 2", "NUL")
    refusal(put(tmp_path, "g.csv", 'text,label\n"never closed,1\nx,2\n'), "row 2", "quote")
    refusal(put(tmp_path, "h.csv", ",,a\n1,2,3\n"), "row 1", "no name")


def test_corrupt_parquet(tmp_path):
    refusal(put(tmp_path, "a.parquet", b"PAR1 nonsense"), "Parquet")
    with Writer(tmp_path / "b.parquet") as out:
        for i in range(2000):
            out.write({"text": f"text {i}"})
    whole = (tmp_path / "b.parquet").read_bytes()
    refusal(put(tmp_path, "c.parquet", whole[:-100]), "Parquet")


def test_unreadable_output_places(tmp_path):
    with pytest.raises(RequestError, match=r"a\.csv: the folder .* does not exist"), Writer(tmp_path / "no" / "a.csv"):
        pass
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(RequestError, match=r"b\.csv: is a folder"), Writer(tmp_path / "b.csv"):
        pass
    with pytest.raises(RequestError, match="unknown kind"):
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


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MTEM_CACHE", str(tmp_path / "own"))
    assert cache.cache_directory() == tmp_path / "own"
    monkeypatch.delenv("MTEM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / "mtem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "mtem"


def test_cache_folder_that_is_a_file(tmp_path):
    put(tmp_path, "file", "x")
    with pytest.raises(RequestError, match="MTEM_CACHE"):
        cache.cache_folder("corpora", tmp_path / "file")


def test_bare_names():
    assert readers.bare_name("a/books.labeled.jsonl.gz") == "books.labeled"
    assert readers.bare_name("books.CSV") == "books"
    assert readers.bare_name("v1.2.tsv") == "v1.2"


def test_json_reader_agrees_with_plain_json(tmp_path):
    records = [{"a": i, "b": [i, None, "ü"]} for i in range(100)]
    path = put(tmp_path, "a.jsonl", "\n".join(json.dumps(r) for r in records))
    assert [record for _, record in read_rows(path)] == records
