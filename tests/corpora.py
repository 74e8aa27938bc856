"""Small files of reviews, and what a refused request must say."""

import pytest

from mtem.data.writers import Writer
from mtem.errors import RequestError


def table(folder, name, records):
    with Writer(folder / name) as out:
        for record in records:
            out.write(record)
    return folder / name


def reviews(count=6, word="review"):
    return [{"text": f"{word} number {i}", "label": ["bad", "good"][i % 2]} for i in range(count)]


def refusal(function, *words):
    with pytest.raises(RequestError) as caught:
        function()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
