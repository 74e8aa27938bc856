"""Settings: parsing, bounds, choices, and that every field says what it means."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtem import methods, settings
from mtem.errors import RequestError
from mtem.settings import setting
from mtem.training.settings import TrainingSettings

CLASSES = [TrainingSettings, *(methods.get(name).Settings for name in methods.METHODS)]


@dataclasses.dataclass(frozen=True)
class Example:
    count: int = setting(3, "a whole number", low=1, high=10)
    share: float = setting(0.5, "a number", low=0.0)
    free: float = setting(0.0, "any finite number")
    switch: bool = setting(True, "on or off")
    limit: int | None = setting(None, "a whole number or none", low=0)
    word: str = setting("one", "a word", choices=("one", "two"))
    name: str | None = setting(None, "any word")


def build(**values):
    return settings.build({"example": Example}, values)["example"]


def test_defaults_and_record():
    assert build() == Example()
    assert settings.record(build(count=4))["count"] == 4
    assert settings.names(Example) == ["count", "share", "free", "switch", "limit", "word", "name"]
    assert ("word", "one", "a word (one, two)") in settings.describe(Example)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("count", "7", 7),
        ("count", 7, 7),
        ("count", np.int64(7), 7),
        ("share", "1e-3", 1e-3),
        ("share", "2", 2.0),
        ("share", 2, 2.0),
        ("share", np.float64(0.25), 0.25),
        ("free", "-4.5", -4.5),
        ("switch", "false", False),
        ("switch", "Yes", True),
        ("switch", "0", False),
        ("switch", False, False),
        ("limit", "none", None),
        ("limit", "5", 5),
        ("limit", None, None),
        ("word", "two", "two"),
        ("name", "null", None),
        ("name", "7", "7"),
    ],
)
def test_values(name, given, wanted):
    got = getattr(build(**{name: given}), name)
    assert got == wanted and isinstance(got, type(wanted))


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("count", "0", r"count=0: expected a value between 1 and 10"),
        ("count", "11", r"between 1 and 10"),
        ("count", "2.5", r"count=2.5: expected a whole number"),
        ("count", 2.5, r"expected a whole number"),
        ("count", True, r"expected a whole number"),
        ("count", "true", r"expected a whole number"),
        ("count", "none", r"count"),
        ("count", None, r"count=None: expected a whole number"),
        ("count", "", r"expected a whole number"),
        ("share", "-0.1", r"at least 0"),
        ("share", "much", r"share=much: expected a number"),
        ("share", "nan", r"at least 0"),
        ("share", "inf", r"share=inf: expected a value of at most 1e\+15"),
        ("share", float("nan"), r"at least 0"),
        ("share", "9" * 400, r"share=inf: expected a value of at most 1e\+15"),
        ("free", "inf", r"at most 1e\+15"),
        ("free", "-inf", r"a finite number"),
        ("switch", "maybe", r"expected true or false"),
        ("switch", 1, r"expected true or false"),
        ("limit", "-1", r"at least 0"),
        ("word", "three", r"one of one, two"),
        ("word", 3, r"expected a word"),
        ("share", [1], r"expected a number"),
    ],
)
def test_bad_values_are_refused(name, given, message):
    with pytest.raises(RequestError, match=message) as caught:
        build(**{name: given})
    assert "\n" not in str(caught.value)


def test_unknown_names_are_refused_with_a_hint():
    with pytest.raises(RequestError, match=r"unknown setting 'cuont': did you mean 'count'\? There are count, free"):
        build(cuont=1)
    with pytest.raises(RequestError, match=r"unknown setting 'zzz': there are count, free"):
        build(zzz=1)


@pytest.mark.parametrize(("old", "new"), settings.RENAMED.items())
def test_an_old_name_is_refused_with_the_new_one(old, new):
    owners = [cls for cls in CLASSES if new in settings.names(cls)]
    assert owners, "the new name exists"
    assert not any(old in settings.names(cls) for cls in CLASSES)
    for owner in owners:
        with pytest.raises(RequestError, match=f"^unknown setting '{old}': it is now called '{new}'$"):
            settings.build({"training": TrainingSettings, "only": owner}, {old: "1"})


def test_an_old_name_is_unknown_where_the_new_one_is_unknown_too():
    with pytest.raises(RequestError, match="unknown setting 'teacher': there are count"):
        build(teacher=0.9)


@pytest.mark.parametrize("settings_cls", CLASSES)
def test_every_setting_says_what_it_means_and_has_a_default_it_accepts(settings_cls):
    for field in dataclasses.fields(settings_cls):
        assert len(field.metadata["help"]) > 3, field.name
        settings.build({"only": settings_cls}, {field.name: field.default})
        text = str(field.default)
        assert settings.build({"only": settings_cls}, {field.name: text})["only"] == settings_cls(), field.name


@pytest.mark.parametrize("method", methods.METHODS)
def test_presets_name_known_settings_and_no_setting_has_two_owners(method):
    method_cls = methods.get(method)
    known = settings.names(TrainingSettings, method_cls.Settings)
    assert len(known) == len(set(known))
    for preset in method_cls.presets.values():
        assert set(preset) <= set(known)
        settings.build({"training": TrainingSettings, "method": method_cls.Settings}, preset)


@pytest.mark.parametrize("settings_cls", CLASSES)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", float("nan")])
def test_no_number_may_be_infinite_or_none_at_all(settings_cls, value):
    for field in dataclasses.fields(settings_cls):
        if "float" in field.type:
            with pytest.raises(RequestError, match=field.name):
                settings.build({"only": settings_cls}, {field.name: value})


@pytest.mark.parametrize("pair", [{"index_low": 3, "index_high": 2}, {"temperature_start": 0.1, "temperature_end": 0.5}])
def test_settings_that_contradict_each_other_are_refused_before_anything_runs(pair):
    with pytest.raises(RequestError, match="|".join(pair)):
        settings.build({"method": methods.get("mtem").Settings}, pair)
