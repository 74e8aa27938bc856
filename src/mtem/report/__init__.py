"""The report of a run: one HTML file, made from the run directory alone.

`files` reads what there is, `answer` says in a few sentences what came of it, `charts` and `explorer` make the data of the
figures and of the table of texts, and `page` puts them together.
"""
