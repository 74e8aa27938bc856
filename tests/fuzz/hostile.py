"""Hostile values, bytes, tables and JSON, drawn from a generator: the same seed gives the same case everywhere."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Random = random.Random

TEXTS = (
    "", " ", "\n", "\r\n", "\0", "\t", '"', '""', "'", ",", ";", "a,b", 'say "so"', "word5 good3", "nan", "None", "null", "<NA>",
    "true", "-1", "1e400", "1.0", "0x10", "9" * 400, "9" * 5000, "-" + "9" * 400, "=1+1", "@SUM(1)", "+cmd|' /C calc'!A0", "-x",
    "\x1b[2J\x1b]0;x\x07", "\u202egnp.exe", "\ufeff", "\u2028", "é" * 50, "中文", "😀", "../../../outside", "/etc/passwd", "a/b",
    "..", ".", "CON", "%s%n", "{0}", "${HOME}", "<script>alert(1)</script>", "[bold red]x[/]", "\\", "\\u0000", "x" * 5000,
    "e\u0301" * 30, "\ud800",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**308, 10**400, -(10**400), 10**4000, 0.0, -0.0, 0.5,
    1e-320, 1e308, 1.5, float("inf"), float("-inf"), float("nan"), 1e9, 10**6,
)  # fmt: skip
COLUMNS = ("text", "label", "Text", "LABEL", "nodes", "id", "prediction", "confidence", "review", "domain", "row", "", " ")
TOKENS = (
    b"", b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b'""', b",", b"\n", b"\r", b"\r\n", b"\t", b"{", b"}", b"[", b"]",
    b":", b"null", b"true", b"NaN", b"Infinity", b"-", b"1e999", b"9" * 400, b"\\ud800", b"\\", b"\x1f\x8b", b"PAR1",
    b"PK\x03\x04", b"<review>", b"</review>", b"../", b"\x80\x80",
    b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff",
)  # fmt: skip


def draw_text(draw: Random) -> str:
    if draw.random() < 0.5:
        return " ".join(draw.choice(("good", "bad", "word")) + str(draw.randrange(12)) for _ in range(draw.randrange(1, 9)))
    return draw.choice(TEXTS)


def draw_value(draw: Random, depth: int = 0) -> Any:
    """Any value that JSON can express, and some more."""
    kind = draw.randrange(10 if depth < 3 else 7)
    if kind < 3:
        return draw_text(draw)
    if kind < 6:
        return draw.choice(NUMBERS)
    if kind == 6:
        return draw.choice((None, True, False))
    if kind == 7:
        return [draw_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 8:
        return {draw_text(draw): draw_value(draw, depth + 1) for _ in range(draw.randrange(4))}
    deep: Any = draw.choice((0, "x"))
    for _ in range(draw.choice((1, 10, 500))):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    return deep


def mutate_json(draw: Random, value: Any) -> Any:
    """The value with one part of it replaced, removed, renamed or repeated."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        way = draw.randrange(8)
        if way == 0:
            return {k: v for k, v in value.items() if k != key}
        if way == 1:
            return {(draw_text(draw) if k == key else k): v for k, v in value.items()}
        return {k: (mutate_json(draw, v) if k == key else v) for k, v in value.items()}
    if isinstance(value, list) and value and draw.random() < 0.85:
        position = draw.randrange(len(value))
        way = draw.randrange(6)
        if way == 0:
            return value[:position] + value[position + 1 :]
        if way == 1:
            return value[:position] + [value[position]] * draw.choice((2, 50)) + value[position:]
        return [mutate_json(draw, item) if k == position else item for k, item in enumerate(value)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice((-value, value + 1, value * 1000, value / 3, str(value)))
    return draw_value(draw)


def dump_json(value: Any) -> bytes:
    """JSON as Python writes it, NaN and lone surrogates included."""
    try:
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):
        return b"[" * 100_000


def mutate_bytes(draw: Random, data: bytes) -> bytes:
    """The bytes with a few places changed, cut out, repeated or inserted."""
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        place, end = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
        way = draw.randrange(9)
        if way == 0 and data:
            place = min(place, len(data) - 1)
            data = data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1 :]
        elif way == 1:
            data = data[:place] + data[min(end, place + draw.choice((1, 4, 64))) :]
        elif way == 2:
            data = data[:end]
        elif way == 3:
            data = data[:end] + data[place:end] * draw.choice((1, 1, 3)) + data[end:]
        elif way == 4:
            data = data[:place] + draw.randbytes(draw.choice((1, 4, 16))) + data[place:]
        elif way == 5:
            token = draw.choice(TOKENS)
            data = data[:place] + token + data[place + (len(token) if draw.random() < 0.5 else 0) :]
        elif way == 6:
            data = data[:place] + draw.choice(TOKENS) * draw.choice((1, 2, 1000)) + data[place:]
        elif way == 7:
            data = data[place:] + data[:place]
        else:
            data = data[place:]
        if len(data) > 1 << 20:
            data = data[: 1 << 20]
    return data


def draw_records(draw: Random) -> list[dict[str, Any]]:
    """Rows of texts and labels, some with odd cells."""
    odd = draw.choice((0.0, 0.05, 0.3))
    records = []
    for number in range(draw.choice((1, 2, 5, 12, 40))):
        record: dict[str, Any] = {"text": f"word{number % 9} {draw_text(draw)}", "label": ("bad", "good")[number % 2]}
        for name in list(record):
            if draw.random() < odd:
                record[name] = draw_value(draw)
        if draw.random() < odd:
            record[draw.choice(COLUMNS) or draw_text(draw)] = draw_value(draw)
        records.append(record)
    return records


def draw_thread(draw: Random) -> dict[str, Any]:
    size = draw.choice((1, 2, 6))
    nodes: list[Any] = [
        {"id": str(k), "parent": None if k == 0 else str(draw.randrange(k)), "text": draw_text(draw)} for k in range(size)
    ]
    thread: dict[str, Any] = {"id": str(draw.randrange(10**6)), "label": draw.choice(("rumour", "non-rumour")), "nodes": nodes}
    return mutate_json(draw, thread) if draw.random() < 0.3 else thread


def table_bytes(draw: Random, delimiter: bytes) -> bytes:
    """A table of separated values: right, or with odd quotes, ends of lines and numbers of fields."""
    ends = draw.choice((b"\n", b"\r\n", b"\r", b"\n\n"))
    rows = [[b"text", b"label"]]
    if draw.random() < 0.2:
        rows = [[draw.choice(COLUMNS).encode() for _ in range(draw.randrange(1, 5))]]
    for record in draw_records(draw):
        rows.append([_field(draw, value, delimiter) for value in list(record.values())[: draw.choice((2, 2, 2, 3))]])
    return ends.join(delimiter.join(fields) for fields in rows) + draw.choice((b"", ends))


def _field(draw: Random, value: Any, delimiter: bytes) -> bytes:
    data = (value if isinstance(value, str) else str(value)[:4000] if not isinstance(value, int) else "7").encode(
        "utf-8", "surrogatepass"
    )
    if draw.random() < 0.9 and (b'"' in data or delimiter in data or b"\n" in data or b"\r" in data):
        return b'"' + data.replace(b'"', b'""') + b'"'
    return data


def lines_bytes(draw: Random) -> bytes:
    records: list[Any] = [draw_thread(draw) for _ in range(3)] if draw.random() < 0.2 else draw_records(draw)
    if draw.random() < 0.2:
        records.insert(draw.randrange(len(records)), draw_value(draw))
    return draw.choice((b"\n", b"\r\n", b"\n\n", b"\n")).join(map(dump_json, records))


TYPES = (
    pa.string(), pa.large_string(), pa.binary(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.date32(),
    pa.date64(), pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", tz="Nowhere/Land"), pa.timestamp("ms", tz="UTC"),
    pa.time64("ns"), pa.duration("s"), pa.decimal128(38, 2), pa.null(), pa.list_(pa.string()), pa.list_(pa.date32()),
    pa.struct([("a", pa.timestamp("s"))]), pa.map_(pa.string(), pa.int32()),
)  # fmt: skip


def parquet_bytes(draw: Random) -> bytes:
    """A Parquet file with columns of any types, their extreme values among them."""
    count = draw.choice((1, 3, 30))
    columns: dict[str, pa.Array] = {"text": pa.array([f"word{k} good" for k in range(count)])}
    if draw.random() < 0.7:
        columns["label"] = pa.array([("bad", "good")[k % 2] for k in range(count)])
    for _ in range(draw.randrange(3)):
        columns[draw.choice((*COLUMNS, "when"))] = _array(draw, draw.choice(TYPES), count)
    options = {"compression": draw.choice(("none", "snappy", "zstd", "gzip")), "row_group_size": draw.choice((1, 7, 1000))}
    while True:
        sink = pa.BufferOutputStream()
        try:
            pq.write_table(pa.table(columns), sink, **options)
            return sink.getvalue().to_pybytes()
        except pa.ArrowException:  # Parquet does not have all times that Arrow has
            columns.popitem()


def _array(draw: Random, kind: pa.DataType, count: int) -> pa.Array:
    width = kind.bit_width if pa.types.is_primitive(kind) else 0
    if width >= 8 and not pa.types.is_time(kind):
        extremes = (b"\0", b"\xff", b"\x7f", b"\x80")
        data = b"".join(draw.choice(extremes) * (width // 8 - 1) + draw.choice(extremes) for _ in range(count))
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.array([draw_text(draw).encode("utf-8", "replace").decode() for _ in range(count)], kind)
    if pa.types.is_binary(kind):
        return pa.array([draw.randbytes(draw.randrange(5)) for _ in range(count)], kind)
    if kind == pa.list_(pa.date32()):
        days = pa.array([-(2**31), 2**31 - 1, 0][: min(3, count)], pa.int32()).cast(pa.date32())
        return pa.ListArray.from_arrays(pa.array([0] * count + [len(days)], pa.int32()), days)
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([_array(draw, pa.timestamp("s"), count)], ["a"])
    return pa.nulls(count, kind)


def compressed(draw: Random, data: bytes) -> bytes:
    """The data gzipped: whole, in several members, or with something behind it."""
    way = draw.randrange(4)
    if way == 0:
        middle = draw.randrange(len(data) + 1)
        return gzip.compress(data[:middle], mtime=0) + gzip.compress(data[middle:], mtime=0)
    whole = gzip.compress(data, mtime=0)
    return whole + draw.choice((b"\0" * 10, b"junk")) if way == 1 else whole


def packed(draw: Random, data: bytes) -> tuple[bytes, str]:
    """The data as an archive's compression, and the ending of its name."""
    way = draw.randrange(4)
    if way == 0:
        return data, ".tar"
    if way == 1:
        return gzip.compress(data, mtime=0), ".tar.gz"
    return (bz2.compress(data), ".tar.bz2") if way == 2 else (lzma.compress(data, preset=0), ".tar.xz")
