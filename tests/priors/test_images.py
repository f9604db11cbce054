"""Generated images: bytes of any size and number of channels, decided by the name of a prior and a seed."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from spectral_dp.priors import (
    PRIORS,
    DeadLeaves,
    ImagePrior,
    generate_images,
    get_prior,
    image_batches,
    prior_assumption,
)
from spectral_dp.priors.images import BATCH


@pytest.mark.parametrize("name", PRIORS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (4, 9, 17), (1, 1, 1)])
def test_images_are_bytes_of_any_shape(name, shape):
    images = generate_images(name, 5, shape)
    assert images.shape == (5, *shape)
    assert images.dtype == torch.uint8


@pytest.mark.parametrize("name", PRIORS)
def test_a_seed_gives_the_same_images_and_another_seed_others(name):
    one, again, other = (generate_images(name, 4, (3, 16, 16), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", PRIORS)
def test_images_of_a_batch_differ(name):
    images = generate_images(name, 2 * BATCH, (1, 24, 24)).flatten(1)
    assert len(images.unique(dim=0)) >= 2 * BATCH - 2  # a stroke may lie outside of its image


@pytest.mark.parametrize("count", [1, BATCH, BATCH + 3])
def test_fewer_images_are_the_first_of_more(count):
    more = generate_images("dead-leaves", 2 * BATCH, (3, 8, 8), seed=3)
    assert torch.equal(generate_images("dead-leaves", count, (3, 8, 8), seed=3), more[:count])


def test_batches_go_on_without_end():
    batches = list(itertools.islice(image_batches("strokes", (1, 8, 8)), 3))
    assert torch.equal(torch.cat(batches), generate_images("strokes", 3 * BATCH, (1, 8, 8)))


def test_whoever_takes_images_can_compute_gradients():
    """Catches a generator that is left waiting in ``no_grad``: its caller would go on in it."""
    batches = image_batches("white-noise", (1, 4, 4))
    for _ in range(2):
        next(batches)
        assert torch.is_grad_enabled()
    generate_images("white-noise", 100, (1, 4, 4))
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert not next(batches).is_inference()


@pytest.mark.parametrize("name", PRIORS)
def test_images_use_the_range_of_bytes(name):
    images = generate_images(name, 256, (3, 24, 24)).float()
    assert images.min() <= 10
    assert images.max() >= 245
    assert 40 < images.std() < 90


def test_a_prior_stands_for_itself():
    prior = DeadLeaves(leaves=3)
    assert get_prior(prior) is prior
    assert not torch.equal(generate_images(prior, 2, (3, 8, 8)), generate_images("dead-leaves", 2, (3, 8, 8)))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="choose one of 'dead-leaves'"):
        get_prior("leaves")
    with pytest.raises(ValueError, match="shape \\(C, H, W\\)"):
        generate_images("strokes", 2, (28, 28))
    with pytest.raises(ValueError, match="positive sizes"):
        generate_images("strokes", 2, (1, 0, 28))
    with pytest.raises(ValueError, match="count must be at least 1"):
        generate_images("strokes", 0, (1, 28, 28))


class Stripes(ImagePrior):
    """A prior of a user's own."""

    kind = "stripes"


def test_a_prior_of_ones_own_is_found_by_its_import_path(monkeypatch):
    class Drawn(Stripes):
        def draw(self, count, shape, generator):
            return torch.rand(count, *shape, generator=generator)

    monkeypatch.setitem(sys.modules, "my_priors", SimpleNamespace(stripes=Drawn, number=int))
    assert isinstance(get_prior("my_priors:stripes"), Drawn)
    assert "the user's own prior, who vouches" in prior_assumption("my_priors:stripes"), "we cannot vouch for it"
    with pytest.raises(TypeError, match="makes a int, which is no ImagePrior"):
        get_prior("my_priors:number")


@pytest.mark.parametrize("name", PRIORS)
def test_of_our_own_priors_we_say_that_no_record_was_read(name):
    assert prior_assumption(name) == "no record was read for them"
    assert get_prior(name).is_public
