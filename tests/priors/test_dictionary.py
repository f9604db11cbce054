"""The dictionary: whitened patches cluster around its atoms, up to signs and mirroring, and it is always the same."""

import pytest
import torch
from tests.support.mirrored_patches import mirror_coordinates

from spectral_dp.priors import PRIORS, get_prior
from spectral_dp.priors.dictionary import _spherical_k_means, _unit, learn_dictionary, shrunk
from spectral_dp.priors.patches import normalised_patches

SHAPE = (3, 16, 16)


def learn(name="dead-leaves", shape=SHAPE, size=4, atoms=20, **others):
    return learn_dictionary(get_prior(name), shape, size=size, atoms=atoms, **others)


def patches_of(name="dead-leaves", seed=77, size=4, count=512):
    images = get_prior(name).draw(count, SHAPE, torch.Generator().manual_seed(seed))
    return [part.flatten(1).T for part in normalised_patches(images, size)]


@pytest.fixture
def learn_anew():
    learn_dictionary.cache_clear()
    yield learn
    learn_dictionary.cache_clear()


@pytest.mark.parametrize("size", [4, 5])
def test_atoms_have_unit_length_and_are_pictures(size):
    found = learn(size=size)
    pictures = found.pictures()
    assert pictures.shape == (20, 3, size, size)
    assert torch.allclose(pictures.flatten(1).norm(dim=1), torch.ones(20), atol=1e-5)
    even, odd = mirror_coordinates(pictures)
    assert torch.allclose(even, found.even_atoms, atol=1e-6)
    assert torch.allclose(odd, found.odd_atoms, atol=1e-6)


def test_whitening_gives_new_patches_of_the_prior_nearly_unit_variance():
    """On patches of another seed: variances above the damping become one; with it, none is larger."""
    found = learn()
    even, odd = patches_of()
    for x, whitening in ((even - found.mean, found.even_whitening), (odd, found.odd_whitening)):
        variances = torch.linalg.eigvalsh(torch.cov((x @ whitening).T.double()))
        assert float(variances.max()) == pytest.approx(1, abs=0.15)


def test_whitening_is_that_of_all_patches_and_their_mirror_images():
    """Even and odd coordinates are uncorrelated in a law that is symmetric, so two blocks are the whole whitening."""
    even, odd = patches_of()
    both = torch.cat([torch.cat([even, odd], 1), torch.cat([even, -odd], 1)])
    cross = torch.cov(both.T)[: even.shape[1], even.shape[1] :]
    assert float(cross.abs().max()) < 1e-5


def test_atoms_fit_patches_better_than_those_k_means_began_with():
    def fit(even, odd, atoms):
        return float(((even @ atoms[0].T).abs() + (odd @ atoms[1].T).abs()).max(1).values.mean())

    found = learn()
    even, odd = patches_of()
    even, odd = (even - found.mean) @ found.even_whitening, odd @ found.odd_whitening
    random = _unit(even[:20], odd[:20])
    assert fit(even, odd, (found.even_atoms, found.odd_atoms)) > 1.05 * fit(even, odd, random)


@pytest.mark.parametrize("name", PRIORS)
def test_atoms_differ_from_each_other(name):
    """Most patches of strokes are dark and alike: atoms that start there would all be the same, and stay."""
    found = learn(name, (1, 28, 28), size=5, atoms=40)
    scores = (found.even_atoms @ found.even_atoms.T).abs() + (found.odd_atoms @ found.odd_atoms.T).abs()
    assert float(scores.fill_diagonal_(0).max()) < 0.999


def test_k_means_finds_directions_whatever_their_sign_and_side():
    """Samples of three directions, turned and mirrored at random, and a start from one sample of each."""
    generator = torch.Generator().manual_seed(0)
    even, odd = _unit(*(torch.randn(3, n, generator=generator) for n in (6, 5)))
    kind = torch.arange(600) % 3
    sign, side = (torch.randint(2, (600, 1), generator=generator) * 2 - 1 for _ in range(2))
    e = sign * even[kind] + 0.1 * torch.randn(600, 6, generator=generator)
    o = sign * side * odd[kind] + 0.1 * torch.randn(600, 5, generator=generator)
    found = _spherical_k_means(e, o, torch.arange(3))
    scores = (found[0] @ even.T).abs() + (found[1] @ odd.T).abs()
    assert torch.allclose(scores.diagonal(), torch.ones(3), atol=0.02)


def test_an_atom_without_patches_stays_where_it_is():
    e, o = torch.eye(4)[:2].repeat(50, 1), torch.zeros(100, 3)
    found = _spherical_k_means(e, o, torch.tensor([0, 1, 2]))  # the third equals the first, which wins
    assert torch.allclose(found[0][2], e[0])
    assert bool(torch.isfinite(found[0]).all())


def test_responses_are_those_of_atoms_and_of_mirrored_atoms():
    """In float64, with all coordinates together: ((p - m) W) d."""
    found = learn(size=5)
    even, odd = (x.double() for x in patches_of(size=5, count=2))
    S, A = even @ found.even_map.double() - found.offset.double(), odd @ found.odd_map.double()
    w_even, w_odd = (even - found.mean.double()) @ found.even_whitening.double(), odd @ found.odd_whitening.double()
    for response, pictures in ((S + A, found.pictures()), (S - A, found.pictures().flip(-1))):
        d_even, d_odd = mirror_coordinates(pictures.double())
        assert torch.allclose(response, w_even @ d_even.T + w_odd @ d_odd.T, atol=1e-5)


class TestItIsAlwaysTheSame:
    def test_from_the_same_settings(self, learn_anew):
        one = learn_anew()
        learn_dictionary.cache_clear()
        torch.manual_seed(5)
        two = learn_anew()
        assert one is not two
        assert torch.equal(one.even_atoms, two.even_atoms)
        assert torch.equal(one.odd_whitening, two.odd_whitening)

    def test_for_any_number_of_threads(self, learn_anew):
        """Catches atoms that depend on how sums were shared out: processes that compute features must agree."""
        before = torch.get_num_threads()
        try:
            found = []
            for threads in (1, 2):
                torch.set_num_threads(threads)
                learn_dictionary.cache_clear()
                found.append(learn_anew())
                assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0].even_atoms, found[1].even_atoms)

    def test_but_for_other_seeds_and_priors_it_is_another(self):
        base = learn().even_atoms
        assert not torch.equal(base, learn(seed=1).even_atoms)
        assert not torch.equal(base, learn("white-noise").even_atoms)
        assert not torch.equal(base, learn(shrink=2).even_atoms)


@pytest.mark.parametrize("name", PRIORS)
def test_every_prior_has_a_dictionary(name):
    found = learn(name, (1, 14, 14), size=5, atoms=10)
    assert bool(torch.isfinite(found.even_map).all())
    assert found.pictures().shape == (10, 1, 5, 5)


def test_shrunk_images_are_averages():
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(shrunk(image, 2), torch.tensor([[[[2.5, 4.5], [10.5, 12.5]]]]))
    assert shrunk(image, 1) is image


@pytest.mark.parametrize("wrong", [{"size": 1}, {"size": 17}, {"atoms": 0}, {"shrink": 0}, {"size": 9, "shrink": 2}])
def test_dictionaries_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ValueError, match="fit into the image"):
        learn(**wrong)
