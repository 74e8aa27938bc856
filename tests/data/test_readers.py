"""Reading tables: rows and columns as a person counts them, and errors that say where a file is damaged."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtem.data import formats, readers
from mtem.data.readers import columns, read_rows
from mtem.data.writers import Writer
from mtem.errors import RequestError

TABLES = [".csv", ".tsv", ".csv.gz", ".tsv.gz"]
TYPED = [".jsonl", ".ndjson", ".json", ".jsonl.gz", ".parquet", ".pq", ".parquet.gz"]


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


def test_json_reader_agrees_with_plain_json(tmp_path):
    records = [{"a": i, "b": [i, None, "ü"]} for i in range(100)]
    path = put(tmp_path, "a.jsonl", "\n".join(json.dumps(r) for r in records))
    assert [record for _, record in read_rows(path)] == records


# Rows without end


@pytest.mark.parametrize(
    "name, data", [("a.csv", "text\n" + "x" * 101), ("a.csv", 'text\n"' + "x\n" * 51), ("a.jsonl", '{"text": "' + "x" * 100)]
)
def test_a_row_without_end(tmp_path, monkeypatch, name, data):
    monkeypatch.setattr(readers, "LARGEST_RECORD", 100)
    refusal(put(tmp_path, name, data), f"row {2 if name == 'a.csv' else 1}", "more than 100 characters in one row")


@pytest.mark.parametrize("name, first", [("a.csv", "text\nx\n"), ("a.jsonl", '{"text": "x"}\n')])
def test_blank_rows_without_end(tmp_path, monkeypatch, name, first):
    monkeypatch.setattr(readers, "MOST_BLANK_ROWS", 10)
    last = "y\n" if name == "a.csv" else '{"text": "y"}\n'
    assert len(list(read_rows(put(tmp_path, name, first + "\n" * 10 + last + "\n" * 10)))) == 2
    refusal(put(tmp_path, name, first + "\n" * 11 + last), "blank rows one after the other")


def test_too_many_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MOST_COLUMNS", 50)
    assert len(columns(put(tmp_path, "a.csv", ",".join(f"c{k}" for k in range(50)) + "\n"))) == 50
    refusal(put(tmp_path, "b.csv", ",".join(f"c{k}" for k in range(51)) + "\n"), "51 columns")
