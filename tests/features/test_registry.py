"""Front ends by name, or from a module of one's own."""

import pytest
from tests.support.extractors import Pooled, Scaled

from spectral_dp.features import (
    FeatureError,
    ImageFacts,
    Scattering,
    Upright,
    build_extractor,
    extractor_entry,
    extractor_names,
    register_extractor,
)

FACTS = ImageFacts((1, 28, 28), (0.1,), (0.3,))


def test_scattering_is_that_of_the_paper_with_published_constants():
    assert build_extractor("scattering", FACTS) == Scattering((0.1,), (0.3,), 2, 8, 2)
    assert build_extractor("scattering", FACTS, {"scales": 1, "angles": 4}) == Scattering((0.1,), (0.3,), 1, 4, 2)
    assert extractor_entry("scattering").settings == {"feature_norm": "group", "feature_groups": 27}


def test_what_is_registered_is_known_by_name(monkeypatch):
    monkeypatch.setattr("spectral_dp.features.registry._REGISTRY", {})
    register_extractor("scaled", lambda images, factor=2.0: Scaled(factor), assumption="made up")
    assert extractor_names() == ("scaled",)
    assert build_extractor("scaled", FACTS, {"factor": 3.0}) == Scaled(3.0)
    assert (extractor_entry("scaled").assumption, dict(extractor_entry("scaled").settings)) == ("made up", {})


def test_a_front_end_of_ones_own():
    path = "tests.support.extractors:pooled"
    assert build_extractor(path, FACTS, {"cells": 3}) == Pooled(3)
    assert "vouches" in extractor_entry(path).assumption


def test_any_front_end_can_see_images_upright():
    found = build_extractor("scattering", FACTS, {"upright": True, "scales": 1})
    assert found == Upright(Scattering((0.1,), (0.3,), 1, 8, 2))
    assert build_extractor("scattering", FACTS, {"upright": False}) == build_extractor("scattering", FACTS)


def test_a_front_end_with_such_an_option_keeps_it(monkeypatch):
    monkeypatch.setattr("spectral_dp.features.registry._REGISTRY", {})
    register_extractor("own", lambda images, upright=1.0: Scaled(upright), assumption="made up")
    assert build_extractor("own", FACTS, {"upright": 3.0}) == Scaled(3.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wavelets", {}, "unknown features 'wavelets': choose one of scattering"),
        ("scattering", {"depth": 3}, "no option depth: choose from scales, angles, order"),
        ("scattering", {"scales": "two"}, "cannot make the features scattering"),
        ("scattering", {"order": 3}, "order 1 or 2"),
        ("scattering", {"upright": "yes"}, "upright must be true or false, got 'yes'"),
        ("tests.support.extractors:doubled", {"x": 1}, "choose from upright"),
    ],
)
def test_what_there_is_not_is_refused(name, options, message):
    with pytest.raises(FeatureError, match=message):
        build_extractor(name, FACTS, options)


def test_a_path_with_nothing_at_it_says_how_to_write_it():
    with pytest.raises(ValueError, match=r"cannot import front end.*package.module:factory"):
        build_extractor("tests.support.extractors:missing", FACTS)
