"""PHEME: the original release and JSON lines, folder and archive, in; a thread per line out, with what was odd told."""

import gzip
import io
import json
import tarfile
import zipfile

import pytest
from typer.testing import CliRunner

from mtem.cli.main import app
from mtem.data.loading import load_corpus
from mtem.data.readers import read_rows
from mtem.data.threads import Thread
from mtem.datasets.pheme import prepare
from mtem.errors import RequestError

TOP = "all-rnr-annotated-threads"


def tweet(identity, reply_to=None, text="", created="Wed Jan 07 11:06:08 +0000 2015", **more):
    """A tweet as Twitter's interface gave it, in short."""
    return {
        "contributors": None,
        "truncated": False,
        "text": text or f"tweet {identity}",
        "in_reply_to_status_id": reply_to,
        "in_reply_to_status_id_str": None if reply_to is None else str(reply_to),
        "id": identity,
        "id_str": str(identity),
        "favorite_count": 3,
        "entities": {"urls": [], "hashtags": [{"indices": [0, 5], "text": "news"}]},
        "retweeted": False,
        "lang": "en",
        "created_at": created,
        "user": {"id": 9, "screen_name": "somebody", "description": "text, id and created_at of a user", "followers_count": 12},
        **more,
    }


def thread(event, label, source, reactions=(), annotation=None, structure=None, folder="source-tweets"):
    """The files of a thread."""
    place = f"{TOP}/{event}-all-rnr-threads/{label}/{source['id']}"
    files = {f"{place}/{folder}/{source['id']}.json": source}
    files |= {f"{place}/reactions/{reaction['id']}.json": reaction for reaction in reactions}
    files[f"{place}/annotation.json"] = annotation or {"is_rumour": {"rumours": "rumour"}.get(label, "nonrumour"), "links": []}
    files[f"{place}/structure.json"] = structure or {str(source["id"]): []}
    files[f"{place}/urls-content/page.json"] = ["not a tweet"]
    return {name: json.dumps(content).encode() for name, content in files.items()}


def original():
    source = tweet(1000, text="Police &amp; press: &lt;b&gt; #Ferguson", created="Sat Aug 09 22:33:06 +0000 2014")
    reactions = [
        tweet(10001, 1000, "later, with one more digit"),
        tweet(2001, 2000, "a reply to a reply"),
        tweet(2000, 1000, "a reply", created="Sun Aug 10 01:01:09 +0200 2014"),
        tweet(3000, 77, "its parent was deleted"),
        tweet(3001, 3000, "a reply to that"),
        tweet(3002, None, "replies to nothing"),
        tweet(1000, None, "Police &amp; press: &lt;b&gt; #Ferguson", created="Sat Aug 09 22:33:06 +0000 2014"),
    ]
    structure = {"1000": {"2000": {"2001": []}, "10001": [], "3000": []}}
    return {
        **thread("ferguson", "rumours", source, reactions, structure=structure),
        **thread("ferguson", "non-rumours", tweet(999), folder="source-tweet"),
        **thread("ottawashooting", "non-rumours", tweet(500, 3, "its own parent is not here"), [tweet(501, 500)]),
        f"{TOP}/ferguson-all-rnr-threads/rumours/.DS_Store": b"\0",
        f"{TOP}/ferguson-all-rnr-threads/rumours/1000/reactions/._2000.json": b"\0\5\x16\7",
        f"{TOP}/README": b"about",
    }


def as_folder(folder, members):
    for name, data in members.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(data)
    return folder / "in"


def as_tar(folder, members, mode="bz2"):
    path = folder / f"in.tar.{mode}"
    with tarfile.open(path, f"w:{mode}") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(f"./{name}" if name.startswith(TOP) else name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def as_zip(folder, members):
    with zipfile.ZipFile(folder / "in.zip", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return folder / "in.zip"


def everything(folder):
    return {path.name: [record for _, record in read_rows(path)] for path in sorted(folder.iterdir())}


def refusal(source, to, *words):
    with pytest.raises(RequestError) as caught:
        prepare(source, to)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert not to.exists()


# The original release


@pytest.mark.parametrize("form", [as_folder, as_tar, as_zip])
def test_original_form(tmp_path, form):
    lines = prepare(form(tmp_path, original()), tmp_path / "out")
    found = everything(tmp_path / "out")
    assert list(found) == ["ferguson.jsonl.gz", "ottawashooting.jsonl.gz"]
    first, second = found["ferguson.jsonl.gz"]
    time = "2015-01-07T11:06:08Z"
    assert first == {
        "id": "999",
        "label": "non-rumour",
        "nodes": [{"id": "999", "parent": None, "text": "tweet 999", "time": time}],
    }
    assert second == {
        "id": "1000",
        "label": "rumour",
        "nodes": [
            {"id": "1000", "parent": None, "text": "Police & press: <b> #Ferguson", "time": "2014-08-09T22:33:06Z"},
            {"id": "2000", "parent": "1000", "text": "a reply", "time": "2014-08-09T23:01:09Z"},
            {"id": "2001", "parent": "2000", "text": "a reply to a reply", "time": time},
            {"id": "3000", "parent": "1000", "text": "its parent was deleted", "time": time, "orphan": True},
            {"id": "3001", "parent": "3000", "text": "a reply to that", "time": time},
            {"id": "3002", "parent": "1000", "text": "replies to nothing", "time": time, "orphan": True},
            {"id": "10001", "parent": "1000", "text": "later, with one more digit", "time": time},
        ],
    }
    (other,) = found["ottawashooting.jsonl.gz"]
    assert [(node["id"], node["parent"], "orphan" in node) for node in other["nodes"]] == [
        ("500", None, False),
        ("501", "500", False),
    ]
    assert lines[0].startswith(f"{tmp_path}/out/ferguson.jsonl.gz: 2 threads (1 rumours, 1 non-rumours), 8 tweets, 2 orphans")
    assert "copies of the source tweet among the reactions, dropped: 1 (first: " in lines[1] and "rumours/1000" in lines[1]
    assert lines[2].startswith(f"{tmp_path}/out/ottawashooting.jsonl.gz: 1 threads") and len(lines) == 3
    corpus = load_corpus(sorted((tmp_path / "out").iterdir()), labeled=True, cache=tmp_path / "cache")
    assert corpus.classes == ("non-rumour", "rumour") and corpus.domains == ["ferguson", "ottawashooting"]
    assert corpus.threads([2]) == [Thread(["its own parent is not here", "tweet 501"], [-1, 0])]
    assert corpus.notices[0].startswith("ferguson.jsonl.gz: 2 replies have an unknown parent")


@pytest.mark.parametrize("above", ["", TOP, f"{TOP}/ferguson-all-rnr-threads"])
def test_any_level_of_the_folder(tmp_path, above, monkeypatch):
    source = as_folder(tmp_path, original()) / above
    prepare(source, tmp_path / "out")
    monkeypatch.chdir(source)
    prepare(".", tmp_path / "again")
    assert "ferguson.jsonl.gz" in everything(tmp_path / "out") and everything(tmp_path / "out") == everything(tmp_path / "again")
    assert len(everything(tmp_path / "out")) == (1 if "ferguson" in above else 2)


def test_the_earlier_release_names_events_plainly(tmp_path):
    members = {name.replace("-all-rnr-threads", ""): data for name, data in original().items()}
    prepare(as_tar(tmp_path, members, "gz"), tmp_path / "out")
    assert list(everything(tmp_path / "out")) == ["ferguson.jsonl.gz", "ottawashooting.jsonl.gz"]


def told(tmp_path, members):
    lines = prepare(as_folder(tmp_path, members), tmp_path / "out")
    return everything(tmp_path / "out")["ferguson.jsonl.gz"], lines


def test_annotation_and_structure_that_disagree_are_told(tmp_path):
    reactions = [tweet(11, 10), tweet(12, 11), tweet(13, 99), tweet(14, 10)]
    structure = {"10": {"11": {"13": {"14": {}}}, "12": []}}  # 12 and 14 differ; 13 has no parent to differ from
    members = {
        **thread("ferguson", "rumours", tweet(10), reactions, {"is_rumour": "nonrumour"}, structure),
        **thread("ferguson", "rumours", tweet(20), annotation={"is_rumour": "rumour"}, structure=[1]),
        **thread("ferguson", "non-rumours", tweet(30), annotation={"is_rumour": "non-rumour"}),
        **thread("ferguson", "non-rumours", tweet(40), annotation={"category": "x"}),
    }
    records, lines = told(tmp_path, members)
    assert [record["label"] for record in records] == ["rumour", "rumour", "non-rumour", "non-rumour"]
    assert [node["parent"] for node in records[0]["nodes"]] == [None, "10", "11", "10", "10"]
    assert "another label in annotation.json, the folder's was taken: 1 (first:" in lines[1] and "rumours/10)" in lines[1]
    assert "without a readable annotation.json, the folder's label was taken: 1" in lines[2] and "non-rumours/40" in lines[2]
    assert "another parent in structure.json" in lines[3] and ": 2 (first:" in lines[3] and "tweet '12'" in lines[3]
    assert len(lines) == 4


def test_reactions_that_cannot_be_read_are_left_out_and_told(tmp_path):
    members = thread("ferguson", "rumours", tweet(10), [tweet(11, 10), tweet(12, 11)])
    place = f"{TOP}/ferguson-all-rnr-threads/rumours/10/reactions"
    deep = b'{"a":' * 100_000
    bad = {"a": b"{", "b": b"[]", "c": b'{"text": "no id"}', "d": b"", "e": b"\xff\xfe\xfa", "f": b'{"id": 1.5}', "g": deep}
    records, lines = told(tmp_path, {**members, **{f"{place}/{name}.json": data for name, data in bad.items()}})
    assert [node["id"] for node in records[0]["nodes"]] == ["10", "11", "12"]
    assert "reactions that cannot be read, left out: 7" in lines[1] and f"{place}/a.json: " in lines[1]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"text": "no id"}', b""])
def test_a_source_tweet_that_cannot_be_read_is_refused(tmp_path, data):
    name = f"{TOP}/ferguson-all-rnr-threads/rumours/10/source-tweets/10.json"
    members = {**thread("ferguson", "rumours", tweet(10)), name: data}
    refusal(as_tar(tmp_path, members), tmp_path / "out", "in.tar.bz2", name, "source tweet")


def test_threads_need_one_source_tweet(tmp_path):
    place = f"{TOP}/ferguson-all-rnr-threads/rumours/10"
    members = thread("ferguson", "rumours", tweet(10), [tweet(11, 10)])
    second = {**members, f"{place}/source-tweets/9.json": json.dumps(tweet(9)).encode()}
    refusal(as_zip(tmp_path, second), tmp_path / "out", "second source tweet", place)
    del members[f"{place}/source-tweets/10.json"]
    refusal(as_zip(tmp_path, members), tmp_path / "out", place, "no source tweet")
    both = {**thread("ferguson", "rumours", tweet(10)), **thread("ferguson", "non-rumours", tweet(10))}
    refusal(as_zip(tmp_path, both), tmp_path / "out", "/rumours/10", "/non-rumours/10", "same source tweet")


def test_repeated_and_circular_reactions(tmp_path):
    place = f"{TOP}/ferguson-all-rnr-threads/rumours/10/reactions"
    members = thread("ferguson", "rumours", tweet(10), [tweet(11, 10), tweet(12, 11)])
    copy = {**members, f"{place}/copy.json": json.dumps(tweet(11, 10, favorite_count=4)).encode()}
    records, lines = told(tmp_path, copy)
    assert len(records[0]["nodes"]) == 3 and "repeated tweets, dropped: 1" in lines[1]
    other = {**members, f"{place}/copy.json": json.dumps(tweet(11, 10, "another text")).encode()}
    (tmp_path / "other").mkdir()
    refusal(as_folder(tmp_path / "other", other), tmp_path / "none", "rumours/10, tweet '11'", "twice")
    circle = thread("ferguson", "rumours", tweet(10), [tweet(11, 12), tweet(12, 11)])
    refusal(as_zip(tmp_path, circle), tmp_path / "none", "rumours/10, post '11'", "circle")


def test_a_parent_with_a_higher_number_still_comes_first(tmp_path):
    records, _ = told(tmp_path, thread("ferguson", "rumours", tweet(10), [tweet(11, 12), tweet(12, 10), tweet(13, 11)]))
    assert [node["id"] for node in records[0]["nodes"]] == ["10", "12", "11", "13"]


def test_missing_fields(tmp_path):
    bare = {"id": 11, "in_reply_to_status_id": 10, "text": None}
    long = {"id_str": "12", "in_reply_to_status_id_str": "10", "full_text": "longer &gt; 140", "created_at": "Foo Bar 2015"}
    odd = tweet(13, 10, created="Wed Feb 31 11:06:08 +0000 2015")
    members = thread("ferguson", "rumours", tweet(10), [bare, {"id": 12, **long}, odd])
    records, lines = told(tmp_path, members)
    assert records[0]["nodes"][1:] == [
        {"id": "11", "parent": "10", "text": ""},
        {"id": "12", "parent": "10", "text": "longer > 140"},
        {"id": "13", "parent": "10", "text": "tweet 13"},
    ]
    assert "tweets without text: 1" in lines[1] and "tweets without a readable time: 3" in lines[2]


# JSON lines


@pytest.mark.parametrize("form", [as_folder, as_tar, as_zip])
def test_json_lines_form_is_a_fixed_point(tmp_path, form):
    prepare(as_folder(tmp_path, original()), tmp_path / "once")
    written = {f"pheme/{path.name}": path.read_bytes() for path in (tmp_path / "once").iterdir()}
    (tmp_path / "again").mkdir()
    lines = prepare(form(tmp_path / "again", written), tmp_path / "twice")
    assert {f"pheme/{path.name}": path.read_bytes() for path in (tmp_path / "twice").iterdir()} == written
    assert "8 tweets, 2 orphans" in lines[0] and len(lines) == 2
    prepare(tmp_path / "once" / "ferguson.jsonl.gz", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["ferguson.jsonl.gz"]
    assert (tmp_path / "one" / "ferguson.jsonl.gz").read_bytes() == written["pheme/ferguson.jsonl.gz"]


def lines_file(folder, *records):
    path = folder / "event.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_are_put_into_the_form(tmp_path):
    nodes = [
        {"id": 30, "parent": 7, "text": "orphan", "more": 1},
        {"id": 20, "text": "&amp; source", "time": 5},
        {"id": 4, "parent": None, "text": "a second root"},
        {"id": 4, "parent": None, "text": "a second root"},
    ]
    late, early = {"id": 20, "label": "rumour", "nodes": nodes}, {"label": "non-rumour", "nodes": [{"id": "3", "text": "x"}]}
    lines = prepare(lines_file(tmp_path, late, early), tmp_path / "out")
    first, second = everything(tmp_path / "out")["event.jsonl.gz"]
    assert first == {"id": "3", "label": "non-rumour", "nodes": [{"id": "3", "parent": None, "text": "x"}]}
    assert second["nodes"] == [
        {"id": "20", "parent": None, "text": "&amp; source"},
        {"id": "4", "parent": "20", "text": "a second root", "orphan": True},
        {"id": "30", "parent": "20", "text": "orphan", "orphan": True},
    ]
    assert "4 tweets, 2 orphans" in lines[0] and "repeated tweets, dropped: 1" in lines[1]


@pytest.mark.parametrize(
    "record, words",
    [
        ({"id": 1, "label": "maybe", "nodes": [{"id": 1, "text": "x"}]}, ["thread '1'", "'label'", "'maybe'"]),
        ({"id": 1, "label": "rumour", "text": "x"}, ["thread '1'", "'nodes'"]),
        ({"id": 1, "label": "rumour", "nodes": []}, ["thread '1'", "empty"]),
        ({"id": 1, "label": "rumour", "nodes": [{"text": "x"}]}, ["thread '1'", "no id"]),
        ({"id": 1, "label": "rumour", "nodes": [{"id": 1, "parent": 2}]}, ["thread '1'", "no source tweet"]),
        ({"id": 0, "label": "rumour", "nodes": [{"id": 0, "text": "x"}]}, ["row 1", "same source tweet '0'"]),
        ([], ["expected an object"]),
    ],
)
def test_bad_json_lines_are_refused_by_row(tmp_path, record, words):
    good = {"id": 0, "label": "rumour", "nodes": [{"id": 0, "text": "x"}]}
    refusal(lines_file(tmp_path, good, record), tmp_path / "out", "event.jsonl: row 2", *words)


# Where it comes from


def test_missing_empty_and_double(tmp_path):
    out = tmp_path / "out"
    refusal(tmp_path / "gone", out, "gone", "no such file or folder")
    refusal(tmp_path / "gone.jsonl.gz", out, "gone.jsonl.gz", "no such file")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", out, "empty", "source-tweets/*.json", ".jsonl.gz")
    twice = {**original(), **{f"copy/{name}": data for name, data in original().items()}}
    refusal(as_tar(tmp_path, twice), out, "both ferguson", f"{TOP}/ferguson-all", f"copy/{TOP}/ferguson-all")
    record = {"id": 1, "label": "rumour", "nodes": [{"id": 1, "text": "x"}]}
    both = {**original(), "ferguson.jsonl.gz": gzip.compress(json.dumps(record).encode())}
    refusal(as_zip(tmp_path, both), out, "both ferguson", "ferguson.jsonl.gz")


@pytest.mark.parametrize("name", ["/etc/x.json", "../x.json", "a/../../._x.json", "C:\\x.json"])
def test_members_that_lead_out_are_refused(tmp_path, name):
    for form in (as_tar, as_zip):
        refusal(form(tmp_path, {**original(), name: b"{}"}), tmp_path / "out", "leads out", repr(name), "refused")


@pytest.mark.parametrize(
    "kind, word",
    [(tarfile.SYMTYPE, "link"), (tarfile.LNKTYPE, "link"), (tarfile.CHRTYPE, "device"), (tarfile.FIFOTYPE, "device")],
)
def test_links_and_devices_are_refused(tmp_path, kind, word):
    path = as_tar(tmp_path, original(), "gz")
    with tarfile.open(path) as old, tarfile.open(tmp_path / "in.tar", "w") as new:
        for entry in old:
            new.addfile(entry, old.extractfile(entry))
        entry = tarfile.TarInfo(f"{TOP}/extra.json")
        entry.type, entry.linkname = kind, "/etc/passwd"
        new.addfile(entry)
    refusal(tmp_path / "in.tar", tmp_path / "out", "in.tar", f"contains a {word}", "extra.json", "refused")
    if word == "link":
        as_zip(tmp_path, original())
        with zipfile.ZipFile(tmp_path / "in.zip", "a") as archive:
            linked = zipfile.ZipInfo(f"{TOP}/extra.json")
            linked.external_attr = 0o120777 << 16
            archive.writestr(linked, "/etc/passwd")
        refusal(tmp_path / "in.zip", tmp_path / "out", "in.zip", "contains a link", "extra.json", "refused")


def test_an_archive_that_was_cut_is_not_taken_for_a_small_one(tmp_path):
    with tarfile.open(as_tar(tmp_path, original(), "gz")) as tar:
        starts = [entry.offset for entry in tar]
    whole = gzip.decompress((tmp_path / "in.tar.gz").read_bytes())
    (tmp_path / "in.tar").write_bytes(whole)
    prepare(tmp_path / "in.tar", tmp_path / "whole")
    for end in (starts[6], starts[6] + 100, starts[6] + 600):
        (tmp_path / "in.tar").write_bytes(whole[:end])
        refusal(tmp_path / "in.tar", tmp_path / "out", "in.tar", "not a readable archive")
    (tmp_path / "in.tar").write_bytes(whole[: starts[6]] + b"x" * 512 + whole[starts[6] + 512 :])
    refusal(tmp_path / "in.tar", tmp_path / "out", f"at byte {starts[6]}")
    packed = bytearray((tmp_path / "in.tar.gz").read_bytes())
    packed[-6] ^= 1  # in the checksum
    (tmp_path / "in.tar.gz").write_bytes(packed)
    refusal(tmp_path / "in.tar.gz", tmp_path / "out", "not a readable archive", "CRC")


@pytest.mark.parametrize("mode", ["gz", "bz2", "xz"])
def test_damaged_archives(tmp_path, mode):
    many = {**original(), **{f"{TOP}/filler{i}": str(i * 7919).encode() * 50 for i in range(400)}}
    whole = as_tar(tmp_path, many, mode).read_bytes()
    cut = tmp_path / f"cut.tar.{mode}"
    cut.write_bytes(whole[: len(whole) // 2])
    refusal(cut, tmp_path / "out", f"cut.tar.{mode}", "archive")
    middle = len(whole) // 2
    cut.write_bytes(whole[:middle] + bytes(byte ^ 0x55 for byte in whole[middle : middle + 50]) + whole[middle + 50 :])
    refusal(cut, tmp_path / "out", f"cut.tar.{mode}", ".tar.bz2, .tar.xz")
    (tmp_path / "no.zip").write_bytes(b"hello")
    refusal(tmp_path / "no.zip", tmp_path / "out", "no.zip", "archive")


def test_what_is_too_large_for_a_tweet(tmp_path, monkeypatch):
    monkeypatch.setattr("mtem.datasets.pheme._LARGEST", 1 << 20)
    members = thread("ferguson", "rumours", tweet(10), [tweet(11, 10, "x" * (1 << 20))])
    refusal(as_tar(tmp_path, members), tmp_path / "out", "reactions/11.json", "1 MB")


def test_writing_into_the_source_is_refused(tmp_path):
    source = as_folder(tmp_path, original())
    prepare(source, tmp_path / "out")
    for place, to in (
        (source, source),
        (tmp_path / "out", tmp_path / "out"),
        (tmp_path / "out/ferguson.jsonl.gz", tmp_path / "out"),
    ):
        with pytest.raises(RequestError, match="another folder"):
            prepare(place, to)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="cannot be created as a folder"):
        prepare(source, tmp_path / "file")


def test_nothing_is_unpacked(tmp_path, monkeypatch):
    source = as_tar(tmp_path, original())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    monkeypatch.setattr("tarfile.TarFile.extract", lambda *_: pytest.fail("unpacked"))
    monkeypatch.setattr("tarfile.TarFile.extractall", lambda *_: pytest.fail("unpacked"))
    prepare(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.tar.bz2", "out"]


def test_command(tmp_path):
    source = as_tar(tmp_path, original())
    done = CliRunner().invoke(app, ["data", "prepare", "pheme", "--from", str(source), "--to", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "ferguson.jsonl.gz: 2 threads (1 rumours, 1 non-rumours), 8 tweets, 2 orphans" in done.stdout
    assert list(everything(tmp_path / "out")) == ["ferguson.jsonl.gz", "ottawashooting.jsonl.gz"]
    done = CliRunner().invoke(app, ["data", "prepare", "phème", "--from", str(source), "--to", str(tmp_path / "out")])
    assert isinstance(done.exception, RequestError) and "amazon and pheme" in str(done.exception)
