"""For `make docs`: formulas and cross-references of docstrings, from reStructuredText to what the site can show without scripts.

``.. math::`` blocks and ``:math:`` roles become MathML, other roles (``:func:``, ``:class:``, ``:mod:``) become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)\.\. math::[ \t]*(?P<first>[^\n]*)\n?(?P<rest>(?:(?P=indent)[ \t]+\S[^\n]*(?:\n|\Z)|[ \t]*\n)*)", re.M
)
ROLE = re.compile(r":math:`([^`]+)`")
REFERENCE = re.compile(r":(?:func|class|mod|meth|attr|data):`~?([^`]+)`")
FOOTNOTE = re.compile(r"(?<=[\w.,)])[ \n]+\[(\d+)\]_")


def formula(source: str, display: str) -> str:
    """Return LaTeX as MathML; several aligned lines become a table."""
    source = " ".join(source.split())
    if "&" in source or r"\\" in source:
        source = rf"\begin{{aligned}}{source}\end{{aligned}}"
    return convert(source, display=display)


def _block(match: re.Match[str]) -> str:
    latex = match["first"] + " " + match["rest"]
    return f'{match["indent"]}<div class="formula">{formula(latex, "block")}</div>\n\n'


def translate(text: str) -> str:
    """Return a docstring with its formulas and roles translated."""
    text = BLOCK.sub(_block, text)
    text = ROLE.sub(lambda match: f"<span>{formula(match[1], 'inline')}</span>", text)
    text = FOOTNOTE.sub(r" [\1]", text)
    return REFERENCE.sub(r"`\1`", text)


class DocstringMath(griffe.Extension):
    """Translate every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Translate the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = translate(obj.docstring.value)
