"""The spectrum of features under generated images: exact, computed once, verified, and of no private record."""

import pickle

import pytest
import torch
from tests.support.extractors import Edges, Pooled, Scaled

from spectral_dp.features import FeatureError, Prepared, generated_spectrum
from spectral_dp.features import spectrum as module
from spectral_dp.priors import generate_images

SHAPE = (1, 8, 8)


def features(front_end, images, seed=0, prior="dead-leaves"):
    return front_end.module(SHAPE)(generate_images(prior, images, SHAPE, seed=seed)).half().double()


@pytest.mark.parametrize("images", [40, 400])  # fewer and more than there are numbers: both ways to the axes
def test_it_is_that_of_the_features_of_generated_images(tmp_path, images):
    stored = generated_spectrum(Scaled(1 / 9), SHAPE, tmp_path, images=images)
    found, x = stored.load(10), features(Scaled(1 / 9), images).flatten(1)
    assert (stored.size, found.basis.shape) == (128, (128, 10))
    assert torch.allclose(found.mean.double(), x.mean(0), atol=1e-3)
    values = torch.linalg.eigvalsh(torch.cov(x.T, correction=0)).flip(0)[:10]
    assert torch.allclose(found.eigenvalues.double(), values, rtol=1e-3)
    residual = torch.cov(x.T, correction=0) @ found.basis.double() - found.basis.double() * values
    assert residual.norm() < 1e-3 * values[0]


def test_one_of_channels_is_that_of_all_positions(tmp_path):
    found = generated_spectrum(Scaled(0.5), SHAPE, tmp_path, images=30, channels=True).load()
    x = features(Scaled(0.5), 30).flatten(2).transpose(1, 2).flatten(0, 1)
    assert found.mean.shape == (2,)
    assert torch.allclose(found.mean.double(), x.mean(0), rtol=1e-4)
    assert found.eigenvalues[0].item() == pytest.approx(torch.linalg.eigvalsh(torch.cov(x.T))[-1].item(), rel=1e-3)


@pytest.mark.parametrize("channels", [False, True])
def test_a_standardised_one_is_that_of_correlations(tmp_path, channels):
    """Its directions include the division by deviations: coordinates are those of standardised features."""
    maps, settings = features(Edges(), 400), {"images": 400, "channels": channels}
    x = maps.flatten(2).transpose(1, 2).flatten(0, 1) if channels else maps.flatten(1)
    found = generated_spectrum(Edges(), SHAPE, tmp_path, standardized=True, **settings).load()
    values, axes = torch.linalg.eigh(torch.corrcoef(x.T))
    assert torch.allclose(found.eigenvalues, values.flip(0)[: found.rank], rtol=1e-3, atol=1e-4)
    coordinates = (x - found.mean.double()) @ found.basis.double()
    expected = ((x - x.mean(0)) / x.std(0, correction=0)) @ axes[:, -1]
    assert torch.allclose(coordinates[:, 0].abs(), expected.abs(), rtol=1e-3, atol=1e-3)
    assert torch.allclose(coordinates.square().mean(0), found.eigenvalues, rtol=1e-2, atol=1e-4)
    covariances = generated_spectrum(Edges(), SHAPE, tmp_path, **settings).load()
    assert float(covariances.eigenvalues.sum()) == pytest.approx(x.var(0).sum().item(), rel=0.01)
    assert float(found.eigenvalues.sum()) == pytest.approx(x.shape[1], rel=0.01)


def test_numbers_that_never_vary_are_not_blown_up(tmp_path):
    stored = generated_spectrum(Scaled(0.0), SHAPE, tmp_path, images=40, standardized=True)
    varying, constant = stored.load(10).basis.split(64)
    assert bool(torch.isfinite(varying).all())
    assert float(constant.abs().max()) < 1e-3 * float(varying.abs().max())


def test_views_and_stages_come_first(tmp_path):
    stored = generated_spectrum(Scaled(), SHAPE, tmp_path, stages=[Prepared(groups=2)], mirrored=True, images=50)
    mean = stored.load(1).mean.view(2, 8, 8)
    assert torch.allclose(mean, mean.flip(-1), atol=1e-3)
    assert mean.mean().abs() < 1e-3


class TestIsComputedOnce:
    @pytest.fixture
    def computed(self, monkeypatch):
        """How often features of generated images are asked for."""
        calls, extract = [], module.extract_in_stages
        monkeypatch.setattr(module, "extract_in_stages", lambda *a, **k: calls.append(1) or extract(*a, **k))
        return calls

    def test_and_then_read(self, tmp_path, computed):
        one, two = (generated_spectrum(Pooled(), SHAPE, tmp_path, images=20) for _ in range(2))
        assert one == two
        assert len(computed) == 1
        assert pickle.loads(pickle.dumps(one)).load(2).rank == 2

    @pytest.mark.parametrize(
        "change",
        [
            {"images": 21},
            {"seed": 1},
            {"prior": "white-noise"},
            {"standardized": True},
            {"stages": [Prepared(groups=2)]},
            {"stages": [Prepared()], "mirrored": True},
            {"extractor": Pooled(3)},
            {"input_shape": (1, 10, 10)},
        ],
    )
    def test_another_one_for_everything_that_decides_it(self, tmp_path, computed, change):
        common = {"extractor": Pooled(), "input_shape": SHAPE, "root": tmp_path, "images": 20}
        one, two = generated_spectrum(**common), generated_spectrum(**(common | change))
        assert one.path != two.path
        assert len(computed) == 2

    @pytest.mark.parametrize("damage", ["truncated", "changed", "no file of tensors", "other tensors", "another one"])
    def test_unless_it_is_damaged(self, tmp_path, computed, damage):
        stored = generated_spectrum(Pooled(), SHAPE, tmp_path, images=20)
        content = bytearray(stored.path.read_bytes())
        if damage == "changed":
            content[content.find(stored.load().mean.numpy().tobytes())] ^= 1
        elif damage == "another one":
            content = generated_spectrum(Pooled(), SHAPE, tmp_path, images=30).path.read_bytes()
        stored.path.write_bytes({"truncated": content[:-5], "no file of tensors": b"nothing"}.get(damage, content))
        if damage == "other tensors":
            torch.save({"mean": torch.zeros(3)}, stored.path)
        again = generated_spectrum(Pooled(), SHAPE, tmp_path, images=20)
        assert again == stored
        assert len(computed) == 2 + (damage == "another one")

    def test_nothing_half_written_is_left(self, tmp_path, monkeypatch):
        def fails(value, file):
            file.write(b"half of it")
            raise KeyboardInterrupt

        monkeypatch.setattr(module.torch, "save", fails)
        with pytest.raises(KeyboardInterrupt):
            generated_spectrum(Pooled(), SHAPE, tmp_path, images=20)
        assert [path.suffix for path in (tmp_path / "spectra").iterdir()] == [".lock"]


class TestErrors:
    def test_more_directions_than_there_are(self, tmp_path):
        with pytest.raises(FeatureError, match=r"at most 19 directions, not 20.*feature_prior_images"):
            generated_spectrum(Scaled(), SHAPE, tmp_path, images=20, rank=20)

    def test_channels_of_vectors(self, tmp_path):
        with pytest.raises(FeatureError, match="maps"):
            generated_spectrum(Pooled(), SHAPE, tmp_path, images=20, channels=True)

    def test_an_unknown_prior(self, tmp_path):
        with pytest.raises(ValueError, match="unknown prior 'photographs'"):
            generated_spectrum(Pooled(), SHAPE, tmp_path, prior="photographs")

    def test_a_spectrum_that_is_gone_or_replaced(self, tmp_path):
        one, two = (generated_spectrum(Pooled(), SHAPE, tmp_path, images=n) for n in (20, 30))
        one.path.write_bytes(two.path.read_bytes())
        with pytest.raises(FeatureError, match="another spectrum"):
            one.load()
        one.path.unlink()
        with pytest.raises(FeatureError, match="begin again"):
            one.load()

    def test_a_directory_that_cannot_be_made(self, tmp_path):
        (tmp_path / "spectra").write_text("in the way")
        with pytest.raises(FeatureError, match="choose another directory"):
            generated_spectrum(Pooled(), SHAPE, tmp_path, images=20)
