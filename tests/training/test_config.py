"""Every pair of the fields of SpectralConfig: both have an effect, or the pair is refused with the fix named."""

import dataclasses
import itertools

import pytest
import torch
from tests.support.private_runs import cnn, setup, train, weights
from tests.support.small_targets import public_basis
from torch import nn
from torch.nn import functional as F

from spectral_dp import (
    BlockCirculantLinear,
    CheckpointError,
    EigenvalueFilter,
    LayerConfig,
    LowPassFilter,
    SpectralConfig,
)
from spectral_dp.mechanism.filters import AdaptiveFilter

# A value of each field that is not its default.
VALUES = {
    "conv_ratio": 0.5,
    "linear_ratio": 0.5,
    "conv_filter": LowPassFilter(0.3),
    "linear_filter": LowPassFilter(0.3),
    "layers": {"circulant": LayerConfig(LowPassFilter(0.7))},
    "input_layouts": {"dense": (2, 4)},
    "input_bases": {"dense": public_basis(8, 5)},
    "conv_transform": "fourier",
    "support": "signal",
    "order": "clip_then_filter",
    "band": "box",
}

REFUSED = {
    ("conv_ratio", "conv_filter"): "not both",
    ("conv_ratio", "input_layouts"): "give linear_ratio or linear_filter",
    ("linear_ratio", "linear_filter"): "not both",
    ("linear_ratio", "conv_transform"): "give conv_ratio or conv_filter",
    ("conv_filter", "input_layouts"): "give linear_ratio or linear_filter",
    ("conv_filter", "order"): "leave order out, and make that filter as you want it",
    ("conv_filter", "band"): "leave band out, and make that filter as you want it",
    ("linear_filter", "conv_transform"): "give conv_ratio or conv_filter",
    ("linear_filter", "order"): "leave order out, and make that filter as you want it",
    ("linear_filter", "band"): "leave band out, and make that filter as you want it",
    ("layers", "input_layouts"): "give linear_ratio or linear_filter",
    ("layers", "conv_transform"): "give conv_ratio or conv_filter",
    ("layers", "order"): "give conv_ratio or linear_ratio",
    ("layers", "band"): "give conv_ratio or linear_ratio",
    ("input_layouts", "input_bases"): "give linear_ratio or linear_filter",
    ("input_layouts", "conv_transform"): "leave conv_transform out",
    ("input_layouts", "support"): "acts on nothing",  # the layer named is a dense one
    ("input_layouts", "order"): "give conv_ratio or linear_ratio",
    ("input_layouts", "band"): "give conv_ratio or linear_ratio",
    ("input_bases", "conv_transform"): "give conv_ratio or conv_filter",
    ("input_bases", "order"): "give conv_ratio or linear_ratio",
    ("input_bases", "band"): "give conv_ratio or linear_ratio",
    ("conv_transform", "support"): "leave conv_transform out",
    ("conv_transform", "order"): "give conv_ratio or linear_ratio",
    ("conv_transform", "band"): "give conv_ratio or linear_ratio",
    ("support", "order"): "give conv_ratio or linear_ratio",
    ("support", "band"): "give conv_ratio or linear_ratio",
    ("order", "band"): "give conv_ratio or linear_ratio",
}


def model():
    circulant = BlockCirculantLinear(8, 8, block_size=8)
    other = BlockCirculantLinear(8, 8, block_size=8)
    return nn.ModuleDict(
        {"conv": nn.Conv2d(1, 2, 3), "circulant": circulant, "other": other, "act": nn.ReLU(), "dense": nn.Linear(8, 2)}
    )


def released(**fields):
    return SpectralConfig(**fields).layer_configs(model())


def test_every_field_is_here():
    assert set(VALUES) == {field.name for field in dataclasses.fields(SpectralConfig)}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(VALUES, 2)))
def test_pairs(one, other):
    """A pair that is taken releases something else than either of the two alone, where these are taken."""
    both = {one: VALUES[one], other: VALUES[other]}
    if (one, other) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[one, other]):
            released(**both)
        return
    together = released(**both)
    for alone in (one, other):
        try:
            assert together != released(**{alone: VALUES[alone]}), f"{both} ignores a setting"
        except ValueError:  # the one has a meaning only with the other
            continue


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": "filter_then_clip", "conv_filter": LowPassFilter(0.5, order="clip_then_filter")}, "order out"),
        ({"order": "clip_then_filter", "conv_filter": LowPassFilter(0.5), "linear_ratio": 0.5}, "the other kind"),
        ({"support": "signal", "conv_transform": "dct", "conv_ratio": 0.5}, "leave conv_transform out"),
        ({"band": "paper", "conv_ratio": 0.5}, "conv_transform='fourier' or support='signal'"),
        ({"band": "paper", "conv_ratio": 0.5, "conv_transform": "dct"}, "not of 'dct'"),
        ({"linear_ratio": 0.5, "input_layouts": {"circulant": (8,)}}, "'circulant' is a BlockCirculantLinear"),
        ({"linear_ratio": 0.5, "input_layouts": {"conv": (1, 8, 8)}}, "'conv' is a Conv2d"),
        ({"layers": {"act": LayerConfig(LowPassFilter(0.5))}}, "nothing is filtered of a ReLU"),
        (
            {"linear_ratio": 0.5, "layers": {"dense": LayerConfig()}, "input_layouts": {"dense": (8,)}},
            "layers wins over input_layouts for 'dense'",
        ),
        (
            {"layers": {"dense": LayerConfig()}, "input_bases": {"dense": public_basis(8, 5)}},
            "layers wins over input_bases for 'dense': give LayerConfig\\(..., input_basis=...\\)",
        ),
        (
            {"linear_ratio": 0.5, "input_layouts": {"dense": (8,)}, "input_bases": {"dense": public_basis(8, 5)}},
            "both say in what to express the input of 'dense'",
        ),
        ({"input_bases": {"circulant": public_basis(8, 5)}}, "'circulant' is a BlockCirculantLinear"),
        ({"input_bases": {"conv": public_basis(9, 5)}}, "'conv' is a Conv2d: bases are for nn.Linear"),
        ({"input_bases": {"nowhere": public_basis(8, 5)}}, "no layer named 'nowhere'"),
    ],
)
def test_what_would_be_ignored_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        released(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"conv_ratio": 0.0, "linear_ratio": 0.0, "order": "clip_then_filter", "band": "box"},  # the end of a sweep
        {"linear_ratio": 0.0, "input_layouts": {"dense": (2, 4)}},
        {"support": "signal", "input_layouts": {"conv": (1, 8, 8)}},
        {"support": "signal", "conv_transform": "fourier", "conv_ratio": 0.5},
        {"band": "paper", "conv_transform": "fourier", "conv_ratio": 0.5},
        {"band": "paper", "linear_ratio": 0.5},
        {"layers": {"conv": LayerConfig(LowPassFilter(0.5))}},
        {"input_bases": {"dense": public_basis(8, 8)}},
        {"linear_ratio": 0.5, "input_bases": {"dense": public_basis(8, 5)}},
    ],
    ids=str,
)
def test_what_has_a_meaning_is_taken(fields):
    released(**fields)


def test_a_ratio_of_zero_filters_nothing():
    assert released(conv_ratio=0.0, linear_ratio=0.0) == released() == {}


class TestConfig:
    def test_ratios_apply_to_the_layers_that_have_a_spectrum(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(8, 8), BlockCirculantLinear(8, 8, 4), nn.Linear(8, 8))
        config = SpectralConfig(conv_ratio=0.3, linear_ratio=0.6, input_layouts={"3": (8,)})
        spectral = config.layer_configs(model)
        assert set(spectral) == {"0", "2", "3"}
        assert spectral["0"].filter == LowPassFilter(0.3)
        assert spectral["2"].filter == spectral["3"].filter == LowPassFilter(0.6)

    def test_dpsgd_filters_nothing(self):
        assert SpectralConfig.dpsgd().layer_configs(cnn()) == {}

    def test_learning_filters_are_not_shared(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
        spectral = SpectralConfig(conv_filter=AdaptiveFilter()).layer_configs(model)
        assert spectral["0"].filter is not spectral["1"].filter

    def test_is_frozen_and_checked(self):
        config = SpectralConfig(linear_ratio=0.5, input_layouts={"3": (8,)})
        with pytest.raises(AttributeError):
            config.conv_ratio = 0.5
        with pytest.raises(TypeError):
            config.input_layouts["4"] = (8,)
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            SpectralConfig(conv_ratio=1.0)
        with pytest.raises(ValueError, match="not both"):
            SpectralConfig(conv_ratio=0.5, conv_filter=LowPassFilter(0.2))
        with pytest.raises(ValueError, match="no layer named 'nine'"):
            SpectralConfig(linear_ratio=0.5, input_layouts={"nine": (8,)}).layer_configs(cnn())
        with pytest.raises(ValueError, match="'kernel' or 'signal'"):
            SpectralConfig(support="image")
        with pytest.raises(ValueError, match="'lowest', 'box', 'paper'"):
            SpectralConfig(band="high")
        with pytest.raises(ValueError, match="unknown transform"):
            SpectralConfig(conv_transform="wavelet")

    def test_layers_that_share_a_weight_share_its_filter(self):
        model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3))
        model[1].weight = model[0].weight
        spectral = SpectralConfig(conv_filter=AdaptiveFilter()).layer_configs(model)
        assert spectral["0"].filter is spectral["1"].filter

    def test_the_papers_layout_survives_an_empty_first_batch(self):
        _, model, optimizer, loader = setup(spectral=SpectralConfig.paper(0.5, 0.5), rehearsal=False)
        for x, y in loader:
            loader.current = dataclasses.replace(loader.current, size=0)
            optimizer.zero_grad()
            F.cross_entropy(model(x[:0]), y[:0]).backward()
            optimizer.step()
            break
        assert optimizer.steps == 1


class TestInputBases:
    def test_a_layer_keeps_all_axes_unless_a_filter_says_otherwise(self):
        basis = public_basis(8, 5)
        plain, filtered = (
            released(input_bases={"dense": basis}),
            released(linear_filter=LowPassFilter(0.4), input_bases={"dense": basis}),
        )
        assert plain == {"dense": LayerConfig(input_basis=basis)}
        assert filtered["dense"] == LayerConfig(LowPassFilter(0.4), input_basis=basis)

    def test_a_basis_is_not_copied_for_a_layer(self):
        """It may be larger than the model."""
        basis = public_basis(8, 5)
        assert released(input_bases={"dense": basis})["dense"].input_basis is basis

    def test_the_statement_says_that_nothing_of_it_is_charged(self):
        basis = public_basis(8, 5)
        for config in (
            SpectralConfig(input_bases={"dense": basis}),
            SpectralConfig(layers={"dense": LayerConfig(input_basis=basis)}),
        ):
            text = " ".join(config.describe().values())
            assert "5 axes of 8 numbers, from generated images" in text
            assert "nothing of it is released or charged" in text
            assert basis.digest[:16] in text

    def test_another_basis_is_another_configuration(self):
        """Else a run could be resumed with another one."""
        one, two = (SpectralConfig(input_bases={"dense": public_basis(8, 5, seed)}) for seed in (0, 1))
        assert one.describe() != two.describe()


class TestTrainingInABasis:
    CONFIG = SpectralConfig(input_bases={"3": public_basis(64, 10)}, linear_filter=EigenvalueFilter(0.5, 0.01))

    def test_a_run_learns_and_only_in_the_span_of_the_basis(self):
        model = cnn()
        before = model[3].weight.detach().clone()
        engine, private, optimizer, loader = setup(model, spectral=self.CONFIG)
        train(private, optimizer, loader)
        moved = (model[3].weight.detach() - before).double()
        U = public_basis(64, 10).basis(10)
        assert float(moved.norm()) > 0
        assert torch.allclose(moved @ U.T @ U, moved, atol=1e-5)
        assert engine.get_epsilon(1e-5) > 0

    def test_it_costs_what_plain_training_costs(self):
        spent = []
        for spectral in (None, self.CONFIG):
            engine, *private = setup(spectral=spectral)
            train(*private)
            spent.append(engine.get_epsilon(1e-5))
        assert spent[0] == spent[1]

    def test_physical_batches_do_not_matter(self):
        found = []
        for size in (None, 7):
            model = cnn()
            _, *private = setup(model, spectral=self.CONFIG, max_physical_batch_size=size)
            train(*private)
            found.append(weights(model))
        assert torch.allclose(*found, atol=1e-5)

    def test_a_run_goes_on_in_its_own_basis_only(self, tmp_path):
        engine, model, *private = setup(spectral=self.CONFIG)
        train(model, *private)
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model)
        again, model, *_ = setup(spectral=self.CONFIG)
        again.load_checkpoint(path=tmp_path / "run.pt", module=model)
        other = SpectralConfig(
            input_bases={"3": public_basis(64, 10, seed=1)}, linear_filter=EigenvalueFilter(0.5, 0.01)
        )
        wrong, model, *_ = setup(spectral=other)
        with pytest.raises(CheckpointError, match="input_bases"):
            wrong.load_checkpoint(path=tmp_path / "run.pt", module=model)
