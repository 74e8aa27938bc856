"""The Multi-Domain Sentiment Dataset: pseudo-XML and JSON lines, folder and archive, in; one form out."""

import io
import json
import tarfile
import zipfile

import pytest

from mtem.data.readers import read_rows
from mtem.data.writers import Writer
from mtem.datasets.amazon import prepare
from mtem.errors import RequestError


def review(text, rating="5.0", title="Title", identity="1:x"):
    parts = {"unique_id": identity, "asin": "0", "rating": rating, "title": title, "review_text": text}
    fields = b"".join(
        b"<%s>\n%s\n</%s>\n" % (tag.encode(), value if isinstance(value, bytes) else value.encode(), tag.encode())
        for tag, value in parts.items()
    )
    return b"<review>\n" + fields + b"</review>\n"


def original():
    kitchen = "sorted_data_acl/kitchen_and_housewares"
    return {
        f"{kitchen}/positive.review": review("Great &quot;pan&quot;,\n  very\tgood &amp; cheap", title="A <b>winner</b>")
        + review(b"na\xefve caf\xe9 \x93quoted\x94 \xe2\x82\xac5 lost\x1aletter", rating="4.0")
        + review("Great pan twice")
        + review("great PAN, twice!"),
        f"{kitchen}/negative.review": review("Broke at once", rating="1.0") + review("  ", rating="2.0"),
        f"{kitchen}/unlabeled.review": b"".join(
            review(text)
            for text in ("An unseen one", "BROKE, at once!", "an Unseen one.", "Another", "Third <review_text> inside")
        ),
        "sorted_data_acl/books/positive.review": b"junk before\n" + review("A good read"),
        "sorted_data_acl/books/negative.review": review("A bad read", rating="2.0")
        # No end, then one that is cut off in the middle of its text.
        + b"<review>\n<rating>\n1.0\n</rating>\n<review_text>\nNo end here\n</review_text>\n"
        + b"<review>\n<rating>1.0</rating><review_text>cut off",
        "sorted_data_acl/books/all.review": b"ignored",
        "sorted_data_acl/stopwords": b"the",
    }


def as_folder(folder, members):
    for name, data in members.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_bytes(data)
    return folder / "in"


def as_tar(folder, members, mode="gz"):
    path = folder / f"in.tar.{mode}"
    with tarfile.open(path, f"w:{mode}") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
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


@pytest.mark.parametrize("form", [as_folder, as_tar, as_zip])
def test_original_form(tmp_path, form):
    lines = prepare(form(tmp_path, original()), tmp_path / "out")
    found = everything(tmp_path / "out")
    assert list(found) == ["books.labeled.jsonl.gz", "kitchen.labeled.jsonl.gz", "kitchen.unlabeled.jsonl.gz"]
    kitchen = found["kitchen.labeled.jsonl.gz"]
    assert kitchen[0] == {
        "id": "kitchen-positive-0000",
        "label": "positive",
        "text": 'Great "pan", very good & cheap',
        "title": "A <b>winner</b>",
        "rating": 5,
    }
    assert kitchen[1]["text"] == "naïve café “quoted” €5 lost\ufffdletter" and kitchen[1]["rating"] == 4
    assert [r["label"] for r in kitchen] == ["positive"] * 4 + ["negative"]  # repeats stay, the empty one goes
    unlabeled = found["kitchen.unlabeled.jsonl.gz"]
    assert {r["text"] for r in unlabeled} == {"An unseen one", "Another", "Third <review_text> inside"}
    assert all(set(r) == {"id", "text", "source", "title"} for r in unlabeled)  # neither label nor rating
    assert len({r["id"] for r in unlabeled}) == 3
    assert [r["text"] for r in found["books.labeled.jsonl.gz"]] == ["A good read", "A bad read", "No end here", "cut off"]
    text = "\n".join(lines)
    assert "5 reviews (4 positive, 1 negative)" in text and "1 that are in the labeled set, 1 repeated" in text
    assert "kitchen: 1 reviews without text left out" in text and "books: no unlabeled reviews" in text


@pytest.mark.parametrize("form", [as_folder, as_tar, as_zip])
def test_json_lines_form_is_a_fixed_point(tmp_path, form):
    prepare(as_folder(tmp_path, original()), tmp_path / "once")
    written = {f"amazon/{path.name}": path.read_bytes() for path in (tmp_path / "once").iterdir()}
    (tmp_path / "again").mkdir()
    prepare(form(tmp_path / "again", written), tmp_path / "twice")
    assert {f"amazon/{path.name}": path.read_bytes() for path in (tmp_path / "twice").iterdir()} == written


def test_json_lines_overlap_is_closed(tmp_path):
    (tmp_path / "in").mkdir()
    with Writer(tmp_path / "in" / "toys.labeled.jsonl.gz") as out:
        out.write({"label": "negative", "text": "Dull"})
        out.write({"label": "positive", "text": "Fun", "rating": 4})
    with Writer(tmp_path / "in" / "toys.unlabeled.jsonl.gz") as out:
        for text in ("FUN!", "new", "New", "other"):
            out.write({"text": text, "source": "fdu", "label": "positive", "rating": 5})
    prepare(tmp_path / "in", tmp_path / "out")
    found = everything(tmp_path / "out")
    assert [r["text"] for r in found["toys.labeled.jsonl.gz"]] == ["Fun", "Dull"]
    assert [r["text"] for r in found["toys.unlabeled.jsonl.gz"]] == ["new", "other"]
    assert all(set(r) == {"id", "text", "source"} for r in found["toys.unlabeled.jsonl.gz"])


def test_marks_across_read_borders(tmp_path):
    many = b"".join(review(f"number {i} " + "x" * (i % 700)) for i in range(3000))
    members = {"d/positive.review": many, "d/negative.review": review("bad")}
    prepare(as_tar(tmp_path, members), tmp_path / "out")
    got = everything(tmp_path / "out")["d.labeled.jsonl.gz"]
    assert [r["text"].split()[:2] for r in got[:3000]] == [["number", str(i)] for i in range(3000)]


def test_missing_and_empty(tmp_path):
    out = tmp_path / "out"
    refusal(tmp_path / "gone", out, "gone", "no such file or folder")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", out, "empty", "positive.review", ".labeled.jsonl.gz")
    members = original()
    del members["sorted_data_acl/kitchen_and_housewares/negative.review"]
    refusal(as_tar(tmp_path, members), out, "in.tar.gz", "kitchen", "no negative.review")


def test_processed_form_is_recognised(tmp_path):
    members = {"p/books/positive.review": b"good:1 #label#:positive\n", "p/books/negative.review": b"bad:1\n"}
    refusal(as_folder(tmp_path, members), tmp_path / "out", "positive.review", "sorted_data_acl")


def test_two_copies_of_a_domain(tmp_path):
    members = {f"{top}/books/positive.review": review("x") for top in ("a", "b")}
    refusal(as_folder(tmp_path, members), tmp_path / "out", "a/books/positive.review", "b/books/positive.review")


@pytest.mark.parametrize("name", ["/etc/books/positive.review", "../books/positive.review", "a/../../positive.review"])
def test_members_that_lead_out_are_refused(tmp_path, name):
    refusal(as_tar(tmp_path, {name: review("x")}), tmp_path / "out", "in.tar.gz", name, "refused")
    refusal(as_zip(tmp_path, {name: review("x")}), tmp_path / "out", "in.zip", name, "refused")


def test_links_are_refused(tmp_path):
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        with tarfile.open(tmp_path / "in.tar", "w") as tar:
            entry = tarfile.TarInfo("books/positive.review")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
        refusal(tmp_path / "in.tar", tmp_path / "out", "in.tar", "link", "refused")
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        entry = zipfile.ZipInfo("books/positive.review")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
    refusal(tmp_path / "in.zip", tmp_path / "out", "in.zip", "link", "refused")


def test_damaged_archives(tmp_path):
    whole = as_tar(tmp_path, {"d/positive.review": b"".join(review(f"{i * 7919}") for i in range(5000))}).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    refusal(tmp_path / "cut.tar.gz", tmp_path / "out", "cut.tar.gz", "archive")
    (tmp_path / "no.zip").write_bytes(b"hello")
    refusal(tmp_path / "no.zip", tmp_path / "out", "no.zip", "archive")


def test_bad_label_in_json_lines(tmp_path):
    members = {"books.labeled.jsonl": (json.dumps({"text": "x", "label": "meh"}) + "\n").encode()}
    refusal(as_folder(tmp_path, members), tmp_path / "out", "books.labeled.jsonl", "row 1", "'label'", "'meh'")


def test_writing_into_the_source_is_refused(tmp_path):
    source = as_folder(tmp_path, original())
    with pytest.raises(RequestError, match="another folder"):
        prepare(source, source)
