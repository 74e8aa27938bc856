"""What the commands share: settings on the command line, log messages above the progress bar."""

import logging

import pytest

from mtem.cli.console import logged_progress, parse_settings
from mtem.errors import RequestError


def test_settings_are_parsed_by_name():
    assert parse_settings(["epochs=3", "batch-size = 8"]) == {"epochs": "3", "batch_size": "8"}
    assert parse_settings(None) == {}
    for wrong in ("epochs", "=3", " =3"):
        with pytest.raises(RequestError, match="expected KEY=VALUE"):
            parse_settings([wrong])


@pytest.mark.parametrize("quiet", [False, True])
def test_log_messages_are_shown_and_the_logger_is_left_as_it_was(capsys, quiet):
    logger = logging.getLogger("mtem")
    before = (list(logger.handlers), logger.level)
    with logged_progress(quiet):
        logging.getLogger("mtem.run.adapt").info("reading the data")
        logging.getLogger("mtem.run.adapt").warning("few texts")
    assert (list(logger.handlers), logger.level) == before
    shown = capsys.readouterr().err
    assert "few texts" in shown and ("reading the data" in shown) is not quiet
    logging.getLogger("mtem.run.adapt").warning("nobody listens")
    assert capsys.readouterr().err == ""
