"""Responses to patches: equal to a plain loop in float64, the same for mirrored images, and held by half precision."""

import json
import pickle

import pytest
import torch
from tests.support.mirrored_patches import mirror_coordinates
from torch.nn import functional as F

from spectral_dp.features import (
    DictionarySettings,
    FeatureError,
    ImageFacts,
    Patches,
    build_extractor,
    extract_features,
)
from spectral_dp.features.patches import PatchResponses, _bounds
from spectral_dp.priors import PRIORS, DeadLeaves, generate_images, get_prior
from spectral_dp.priors.dictionary import learn_dictionary
from spectral_dp.priors.patches import CONTRAST_FLOOR

SHAPE = (3, 14, 16)
SMALL = DictionarySettings(size=4, atoms=12)


def naive(images, patches, each):
    """The formula of the module's docstring, patch by patch in float64, for the image and its mirror image."""
    learnt = learn_dictionary(get_prior(patches.prior), tuple(images.shape[1:]), seed=patches.seed, **vars(each))
    zero = torch.zeros(1, learnt.odd_atoms.shape[1])
    W = torch.block_diag(learnt.even_whitening.double(), learnt.odd_whitening.double())
    m = torch.cat([learnt.mean[None], zero], 1).double()
    d = torch.cat([learnt.even_atoms, learnt.odd_atoms], 1).double()
    features = []
    for x in (images, images.flip(-1)):
        x = F.avg_pool2d(x.double() / 255, each.shrink)
        p = F.unfold(x, each.size).transpose(1, 2)
        p = (p - p.mean(2, keepdim=True)) / (p.var(2, keepdim=True) + CONTRAST_FLOOR).sqrt()
        p = torch.cat(mirror_coordinates(p.reshape(-1, x.shape[1], each.size, each.size)), 1)
        q = ((p - m) @ W @ d.T).view(len(x), -1, len(d)).transpose(1, 2)
        q = torch.cat([(q - patches.threshold).relu(), (-q - patches.threshold).relu()], 1)
        q = q.unflatten(2, (x.shape[2] - each.size + 1, x.shape[3] - each.size + 1))
        features.append(F.adaptive_avg_pool2d(q, patches.cells))
    if not patches.mirrored:  # a mirrored image meets an atom as the image meets the mirrored atom
        return torch.cat([features[0], features[1].flip(-1)], 1)
    return (features[0] + features[1]) / 2


class TestFeatures:
    @pytest.mark.parametrize(
        "patches",
        [
            Patches((SMALL,), cells=1),
            Patches((SMALL,), cells=3),  # which does not divide the positions
            Patches((DictionarySettings(5, 9),), cells=2, threshold=0.0),
            Patches((DictionarySettings(3, 7, shrink=2),), cells=2, seed=3),
            Patches((SMALL, DictionarySettings(3, 5), DictionarySettings(3, 4, shrink=2)), cells=2, threshold=1.0),
            Patches((SMALL,), prior="strokes"),
            Patches((SMALL, DictionarySettings(3, 5)), cells=3, mirrored=False),
        ],
    )
    def test_they_are_those_of_the_formula(self, patches):
        images = generate_images("dead-leaves", 6, SHAPE, seed=11)
        expected = torch.cat([naive(images, patches, each) for each in patches.dictionaries], 1)
        found = patches.module(SHAPE)(images)
        assert found.shape == (6, *patches.output_shape(SHAPE))
        assert torch.allclose(found.double(), expected, atol=2e-5)

    def test_tiles_do_not_matter(self, monkeypatch):
        images, module = generate_images("dead-leaves", 5, SHAPE), Patches((SMALL,)).module(SHAPE)
        whole = module(images)
        monkeypatch.setattr("spectral_dp.features.patches._RESPONSES_AT_ONCE", 100)
        assert torch.allclose(module(images), whole, atol=1e-6)

    def test_a_word_is_no_truth_value(self):
        with pytest.raises(FeatureError, match="true or false, got 'no'"):
            Patches(mirrored="no")

    def test_left_and_right_can_be_told_apart(self):
        images = generate_images("strokes", 5, SHAPE)
        module = Patches((SMALL,), cells=3, mirrored=False).module(SHAPE)
        found, mirrored = module(images), module(images.flip(-1))
        atoms, their_mirror_images = found.chunk(2, 1)
        assert torch.allclose(mirrored, torch.cat([their_mirror_images, atoms], 1).flip(-1), atol=1e-5)
        assert not torch.allclose(mirrored, found, atol=1e-2)

    @pytest.mark.parametrize("cells", [1, 2, 3, 4])
    def test_a_mirrored_image_has_the_same(self, cells):
        images, module = generate_images("one-over-f", 4, SHAPE), Patches((SMALL,), cells=cells).module(SHAPE)
        assert torch.allclose(module(images), module(images.flip(-1)), atol=1e-5)

    def test_negative_control_an_image_upside_down_has_others(self):
        images, module = generate_images("one-over-f", 4, SHAPE), Patches((SMALL,)).module(SHAPE)
        assert not torch.allclose(module(images), module(images.flip(-2)), atol=1e-2)

    def test_images_are_treated_independently_to_the_last_bit(self):
        images, module = generate_images("dead-leaves", 9, SHAPE), Patches((SMALL,)).module(SHAPE)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
        assert torch.equal(module(images)[order], module(images[order]))
        assert torch.equal(module(images)[3:4], module(images[3:4]))

    def test_bytes_and_numbers_from_zero_to_one_agree(self):
        images, module = generate_images("dead-leaves", 3, SHAPE), Patches((SMALL,)).module(SHAPE)
        assert torch.allclose(module(images), module(images.double() / 255), atol=1e-6)

    def test_none_of_no_images(self):
        assert Patches((SMALL,)).module(SHAPE)(torch.empty(0, *SHAPE, dtype=torch.uint8)).shape == (0, 24, 3, 3)

    @pytest.mark.parametrize("name", PRIORS)
    def test_half_precision_holds_them_for_every_image(self, name):
        """The largest response to any patch is bounded: a normalised patch has at most the length sqrt(numbers - 1)."""
        patches = Patches((SMALL,), prior=name)
        learnt = learn_dictionary(get_prior(name), SHAPE, seed=0, **vars(SMALL))
        largest = max(float(torch.linalg.matrix_norm(W, 2)) for W in (learnt.even_whitening, learnt.odd_whitening))
        bound = largest * (3 * 4**2 - 1) ** 0.5 + float(learnt.offset.abs().max())
        assert bound < 1000
        generator = torch.Generator().manual_seed(0)
        hostile = torch.randint(2, (16, *SHAPE), generator=generator).mul(255).to(torch.uint8)
        hostile[0], hostile[1], hostile[2] = 0, 255, torch.arange(16) % 2 * 255
        found = patches.module(SHAPE)(hostile)
        assert float(found.max()) < bound
        assert bool(torch.isfinite(found).all())
        assert torch.allclose(found.half().float(), found, rtol=1e-3, atol=1e-6)

    def test_they_can_be_cached(self, tmp_path):
        images = generate_images("strokes", 20, SHAPE)
        cache = extract_features(images, Patches((SMALL,)), tmp_path, title="generated")
        expected = Patches((SMALL,)).module(SHAPE)(images)
        assert torch.allclose(cache[:].float(), expected, rtol=1e-3, atol=1e-6)
        other = extract_features(images, Patches((SMALL,), seed=1), tmp_path, title="generated")
        assert other.identity != cache.identity


class TestSettings:
    def test_they_are_plain_values_that_name_everything(self):
        base = Patches((SMALL,))
        others = [
            Patches((DictionarySettings(4, 13),)),
            Patches((DictionarySettings(3, 12),)),
            Patches((DictionarySettings(4, 12, shrink=2),)),
            Patches((SMALL, SMALL)),
            Patches((SMALL,), prior="one-over-f"),
            Patches((SMALL,), prior=DeadLeaves(leaves=41)),
            Patches((SMALL,), cells=2),
            Patches((SMALL,), threshold=0.4),
            Patches((SMALL,), seed=1),
        ]
        texts = {json.dumps(each.settings, sort_keys=True) for each in (base, *others)}
        assert len(texts) == len(others) + 1

    def test_a_prior_by_name_and_the_prior_itself_are_the_same(self):
        assert Patches(prior="dead-leaves").settings == Patches(prior=DeadLeaves()).settings

    def test_an_extractor_is_pickled_for_other_processes(self):
        patches = Patches((SMALL,))
        assert pickle.loads(pickle.dumps(patches)) == patches
        assert patches.name == "patches"

    def test_there_are_settings_to_begin_with(self):
        assert Patches.for_images((3, 32, 32)) == Patches()
        assert Patches.for_images((1, 28, 28)).output_shape((1, 28, 28)) == (1000, 4, 4)

    def test_the_module_has_no_state_and_is_in_evaluation_mode(self):
        module = Patches((SMALL,)).module(SHAPE)
        assert isinstance(module, PatchResponses)
        assert not module.training
        assert not module.state_dict()
        assert not list(module.parameters())

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((14, 16), "expected images \\(C, H, W\\)"),
            ((3, 4, 16), "have 1 positions .* 3 cells: use fewer cells"),
            ((3, 3, 16), "have 0 positions"),
        ],
    )
    def test_images_without_features_are_refused(self, shape, message):
        with pytest.raises(FeatureError, match=message):
            Patches((SMALL,)).module(shape)

    def test_images_that_cannot_be_shrunk_are_refused(self):
        with pytest.raises(FeatureError, match="cannot be shrunk by 4"):
            Patches((DictionarySettings(2, 3, shrink=4),)).module(SHAPE)

    def test_images_of_another_shape_are_refused(self):
        with pytest.raises(FeatureError, match="expected images of shape \\(B, 3, 14, 16\\)"):
            Patches((SMALL,)).module(SHAPE)(torch.zeros(2, 3, 16, 16))

    @pytest.mark.parametrize("wrong", [{"dictionaries": ()}, {"cells": 0}, {"threshold": -1.0}])
    def test_settings_without_a_meaning_are_refused(self, wrong):
        with pytest.raises(FeatureError, match="patches need a dictionary"):
            Patches(**wrong)

    def test_an_unknown_prior_is_refused_at_once(self):
        with pytest.raises(ValueError, match="unknown prior 'leafs'"):
            Patches(prior="leafs")

    def test_a_dictionary_without_atoms_is_refused(self):
        with pytest.raises(FeatureError, match="needs patches of at least 2 x 2"):
            DictionarySettings(atoms=0)


@pytest.mark.parametrize("size", range(1, 12))
def test_cells_cover_all_positions_and_are_symmetric(size):
    for cells in range(1, size + 1):
        bounds = _bounds(size, cells)
        assert {i for a, b in bounds for i in range(a, b)} == set(range(size))
        assert [(size - b, size - a) for a, b in reversed(bounds)] == bounds


COLOUR = ImageFacts((3, 32, 32), (0.5,) * 3, (0.25,) * 3)


def test_patches_are_known_by_name_with_options():
    assert build_extractor("patches", COLOUR) == Patches()
    options = {"patch": "6+8+4/2", "atoms": 50, "cells": 2, "threshold": 0.25, "prior": "white-noise"}
    dictionaries = (DictionarySettings(6, 50), DictionarySettings(8, 50), DictionarySettings(4, 50, 2))
    assert build_extractor("patches", COLOUR, options) == Patches(dictionaries, "white-noise", 2, 0.25)
    grey = ImageFacts((1, 28, 28), (0.1,), (0.3,))
    assert build_extractor("patches", grey, {"patch": 7}).dictionaries == (DictionarySettings(7, 500),)


@pytest.mark.parametrize("patch", ["six", "/2", "6+", "6/half", "6,8", 1])
def test_sizes_that_cannot_be_read_are_refused_with_the_form(patch):
    with pytest.raises(FeatureError, match=r"write 6, 6/2, or several as 6\+8"):
        build_extractor("patches", COLOUR, {"patch": patch})
