"""File formats by extension."""

from mtem.data import formats


def test_bare_names():
    assert formats.bare_name("a/books.labeled.jsonl.gz") == "books.labeled"
    assert formats.bare_name("books.CSV") == "books"
    assert formats.bare_name("v1.2.tsv") == "v1.2"
