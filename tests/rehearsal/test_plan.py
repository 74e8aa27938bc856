"""What a rehearsal compares, and requests that it refuses before it reads anything."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtem.errors import RequestError
from mtem.rehearsal.domains import DOMAINS, Domains
from mtem.rehearsal.plan import EPOCHS, OWN, make_plan

LABELS = np.array([0] * 5 + [1] * 3 + [2] * 4)
SOME = Domains(DOMAINS, ("books",), np.zeros(len(LABELS), int), (0,), ())


def plan(*methods, model="minilm", preset="recommended", rates=None, priors=None, rarer=None, **given):
    return make_plan(methods or ("mtem",), model, preset, rates, priors, rarer, given)


def test_the_defaults():
    found = plan()
    assert found.methods == ("mtem",) and found.epochs == EPOCHS and found.given == {} and found.seed == 0
    assert found.learning_rates is None and found.class_priors is None and not found.rarer_classes
    assert found.rates_of("mtem", 2e-5) == (2e-5, 5e-5) and found.priors_of("mtem") == ("none",)
    assert found.rare_of(("a", "b", "c"), SOME, LABELS) == ("",)


def test_a_model_or_a_preset_may_have_its_own_rate_and_prior():
    assert plan(model="bigcn").priors_of("mtem") != ("none",)
    assert plan(preset="paper").rates_of("mtem", 2e-5) == (5e-5, 1.25e-4)
    assert plan("mtem", "dann", preset="paper").rates_of("dann", 2e-5) == (2e-5, 5e-5)


def test_what_is_given_by_name_is_not_varied():
    found = plan(learning_rate="3e-4", target_class_prior="uniform", epochs="4", seed="7", batch_size="16")
    assert found.rates_of("mtem", 2e-5) == (3e-4,) and found.priors_of("mtem") == ("uniform",)
    assert found.epochs == 4 and found.seed == 7 and found.given == {"seed": 7, "batch_size": 16}


def test_given_rates_and_priors():
    found = plan(rates=[1e-5, 1e-4], priors=["none", "uniform"])
    assert found.rates_of("mtem", 2e-5) == (1e-5, 1e-4) and found.priors_of("mtem") == ("none", "uniform")
    assert plan(rates=[1e-5, 1e-4, 1e-5]).learning_rates == (1e-5, 1e-4) and plan(priors=["none", "none"]).class_priors == (
        "none",
    )


def test_classes_are_made_rarer_if_priors_are_compared():
    found = plan(priors=["none", "uniform"])
    assert found.rarer_classes and found.rare_of(("a", "b", "c"), SOME, LABELS) == ("", "b", "a"), "the smallest, the largest"
    assert plan(priors=["uniform"]).rarer_classes is False
    assert plan(rarer=True).rarer_classes and not plan(priors=["none", "uniform"], rarer=False).rarer_classes
    assert found.rare_of(("a", "b"), SOME, np.array([0, 1])) == ("", "a", "b")


def test_a_setting_goes_to_the_methods_that_have_it():
    found = plan("mtem", "fixmatch", weak="dropout", batch_size="16")
    assert found.settings_of("fixmatch") == {"weak": "dropout", "batch_size": 16}
    assert found.settings_of("mtem") == {"batch_size": 16} == found.settings_of("source-only")


@pytest.mark.parametrize("name", OWN)
def test_settings_that_a_rehearsal_sets_itself_are_refused(name):
    with pytest.raises(RequestError, match=f"--set {name}: a rehearsal sets this itself; leave it out"):
        plan(**{name: "1"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("wind",)}, "--method wind: needs labeled target texts, which a rehearsal does not have"),
        ({"methods": ("mtem", "source-only")}, "--method source-only: every rehearsal compares with the source model"),
        ({"methods": ("dan",)}, "unknown method 'dan'"),
        ({"preset": "best"}, "unknown preset 'best': mtem has recommended, learned, paper"),
        ({"batch_size": "many"}, "batch_size"),
        ({"epoch": "3"}, "unknown setting 'epoch': did you mean 'epochs'"),
        ({"rates": [0.0]}, "--learning-rates 0.0: expected a positive number"),
        ({"rates": [1e-3, -1e-3]}, "--learning-rates -0.001"),
        ({"rates": [float("nan")]}, "--learning-rates nan"),
        ({"rates": []}, "--learning-rates: expected at least one"),
        ({"learning_rate": "0"}, "--learning-rates 0.0: expected a positive number"),
        ({"priors": ["even"]}, "--class-priors even: expected some of none, auto, uniform, source, estimated"),
        ({"priors": ["labeled"]}, "--class-priors labeled"),
        ({"epochs": "2.5"}, "--set epochs=2.5: a rehearsal needs a whole number of passes"),
        ({"epochs": "0"}, "a whole number of passes, at least 1"),
    ],
)
def test_bad_requests_are_refused(changes, words):
    given = {name: value for name, value in changes.items() if name != "methods"}
    with pytest.raises(RequestError) as refused:
        plan(*changes.get("methods", ("mtem",)), **given)
    assert words in str(refused.value)


def test_no_method_is_refused():
    with pytest.raises(RequestError, match="--method: expected at least one method"):
        make_plan((), "minilm", "recommended", None, None, None, {})


def test_a_plan_is_a_plain_value():
    assert plan(seed=3) == plan(seed="3") and dataclasses.replace(plan(), epochs=1) != plan()


def test_a_preset_that_changes_the_training_has_its_own_source_model():
    """The paper's preset has another weight decay: a source model of the other preset would not be its own."""
    recommended, paper = (plan("mtem", preset=preset) for preset in ("recommended", "paper"))
    assert not recommended.own_source_model("mtem") and paper.own_source_model("mtem")
    assert recommended.own_source_model("mme")


def test_a_value_and_several_of_it_are_refused():
    with pytest.raises(RequestError, match=r"--set learning_rate=0\.1: --learning-rates is given too"):
        plan(rates=[1e-3], learning_rate=0.1)
    with pytest.raises(RequestError, match="--set target_class_prior=uniform: --class-priors is given too"):
        plan(priors=["none"], target_class_prior="uniform")
