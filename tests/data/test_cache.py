"""The cache folder."""

import pytest

from mtem.data import cache
from mtem.errors import RequestError


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
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="MTEM_CACHE"):
        cache.cache_folder("corpora", tmp_path / "file")
