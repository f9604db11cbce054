import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from spectral_dp import layers
from spectral_dp.layers import BlockCirculantLinear, convert_linear

PATHS = {"dense": (True, 0), "matrix": (False, 10**6), "fft": (False, 0)}
BLOCKS = [1, 2, 3, 7, 8, 10, 16]
SIZES = [(16, 16), (21, 14), (23, 17), (30, 4), (5, 33)]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Each way to compute the layer, whatever it would choose by itself, and two rows of input at a time."""
    dense, short = PATHS[request.param]
    monkeypatch.setattr(layers, "ROWS", 2)
    monkeypatch.setattr(layers, "_prefers_dense", lambda *_: dense)
    monkeypatch.setattr(layers, "SHORT_BLOCK", short)
    return request.param


def naive(layer, x):
    """The definition, entry by entry."""
    d = layer.block_size
    W = torch.zeros(layer.out_features, layer.in_features, dtype=x.dtype)
    for row in range(layer.out_features):
        for column in range(layer.in_features):
            W[row, column] = layer.weight[row // d, column // d, (column % d - row % d) % d]
    return x @ W.T + (0 if layer.bias is None else layer.bias)


def sizes_and_blocks():
    return [(n, m, d) for n, m in SIZES for d in BLOCKS if d <= max(n, m)]


@pytest.mark.parametrize(("n", "m", "d"), sizes_and_blocks())
def test_every_path_is_the_definition(path, n, m, d):
    """Catches a transposed circulant, a padded input that leaks, a lost factor √d, a Nyquist counted twice."""
    layer = BlockCirculantLinear(n, m, d, dtype=torch.float64)
    x = torch.randn(3, n, dtype=torch.float64)
    torch.testing.assert_close(layer(x), naive(layer, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n", "m", "d"), [(21, 14, 7), (23, 17, 8), (30, 4, 10)])
def test_every_path_has_the_gradients_of_the_definition(path, n, m, d):
    layer = BlockCirculantLinear(n, m, d, dtype=torch.float64)
    x = torch.randn(3, n, dtype=torch.float64, requires_grad=True)
    dA = torch.randn(3, m, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    actual = torch.autograd.grad((layer(x) * dA).sum(), wanted)
    expected = torch.autograd.grad((naive(layer, x) * dA).sum(), wanted)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3), (2, 3, 4)])
def test_any_leading_dimensions(path, shape):
    layer = BlockCirculantLinear(13, 9, 4, dtype=torch.float64)
    x = torch.randn(*shape, 13, dtype=torch.float64)
    y = layer(x)
    assert y.shape == (*shape, 9)
    torch.testing.assert_close(y, layer.to_dense()(x), rtol=0, atol=1e-12)
    swapped = x.transpose(0, -2) if len(shape) > 1 else x
    torch.testing.assert_close(layer(swapped), layer.to_dense()(swapped), rtol=0, atol=1e-12)  # not contiguous


def test_vmap_and_grad_give_per_sample_gradients(path):
    layer = BlockCirculantLinear(13, 9, 4, dtype=torch.float64)
    x = torch.randn(5, 13, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return functional_call(layer, parameters, x).square().sum()

    per_sample = vmap(grad(loss), (None, 0))(parameters, x)
    for b in range(5):
        alone = torch.autograd.grad(layer(x[b]).square().sum(), list(layer.parameters()))
        for name, g in zip(parameters, alone, strict=True):
            torch.testing.assert_close(per_sample[name][b], g)


@pytest.mark.parametrize("d", [8, 64])
def test_reduced_precision_works_and_stays_close(d):
    """The FFT knows no bfloat16; transforms in it would lose more than a dense layer does."""
    layer = BlockCirculantLinear(1024, 512, d)
    x = torch.randn(4, 1024)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0, atol=0.02)
    half = copy.deepcopy(layer).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_evaluating_first_does_not_spoil_training(path):
    """Matrices cached under inference_mode could not be saved for backward."""
    layer = BlockCirculantLinear(29, 31, 5)
    layers.bilinear.cache_clear()
    layers._circulant_index.cache_clear()
    with torch.inference_mode():
        layer(torch.randn(2, 29))
    layer(torch.randn(2, 29, requires_grad=True)).sum().backward()


def test_small_layers_are_written_out_and_large_ones_are_not():
    """As measured: p, q, d of 160 -> 10, of few outputs on many inputs, of Model1's first layers."""
    assert layers._prefers_dense(1, 16, 10)
    assert layers._prefers_dense(2, 2048, 8)
    assert not layers._prefers_dense(128, 256, 8)
    assert not layers._prefers_dense(256, 98, 8)
    assert layers._prefers_dense(4096, 4096, 1)  # blocks of one: already dense


def test_initial_outputs_vary_like_those_of_a_linear_layer():
    x = torch.randn(256, 640)
    ours = sum(BlockCirculantLinear(640, 320, 8)(x).var().item() for _ in range(5))
    assert ours == pytest.approx(sum(nn.Linear(640, 320)(x).var().item() for _ in range(5)), rel=0.05)


@pytest.mark.parametrize(("n", "m", "d"), [(16, 24, 8), (21, 14, 7), (13, 9, 4), (10, 3, 8), (3, 10, 8)])
def test_from_linear_is_the_least_squares_solution(n, m, d):
    """A mean over the padding too would shrink the blocks at the edge."""
    linear = nn.Linear(n, m, dtype=torch.float64)
    layer = BlockCirculantLinear.from_linear(linear, d)
    shape = layer.weight.shape
    columns = []
    for unit in torch.eye(shape.numel(), dtype=torch.float64):
        probe = BlockCirculantLinear(n, m, d, bias=False, dtype=torch.float64)
        probe.weight.data = unit.view(shape)
        columns.append(probe.to_dense().weight.detach().flatten())
    design = torch.stack(columns, 1)
    solution = torch.linalg.lstsq(design, linear.weight.detach().flatten(), driver="gelsd").solution
    torch.testing.assert_close(layer.weight.detach().flatten(), solution, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.bias, linear.bias)


def test_dense_and_back_is_exact_and_keeps_what_else_there_is():
    layer = BlockCirculantLinear(24, 16, 8, dtype=torch.float64).eval()
    layer.bias.requires_grad_(False)
    dense = layer.to_dense()
    back = BlockCirculantLinear.from_linear(dense, 8)
    torch.testing.assert_close(back.weight, layer.weight)
    for other in (dense, back):
        assert other.weight.dtype == torch.float64
        assert (other.weight.requires_grad, other.bias.requires_grad, other.training) == (True, False, False)
        assert other.bias.data_ptr() != layer.bias.data_ptr()
    assert BlockCirculantLinear(4, 4, 2, bias=False).to_dense().bias is None


def test_copies_pickles_and_state_dicts_compute_the_same():
    layer = BlockCirculantLinear(13, 9, 4)
    x = torch.randn(2, 13)
    loaded = BlockCirculantLinear(13, 9, 4)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), layer(x))
    assert set(layer.state_dict()) == {"weight", "bias"}


def test_meta_device_shows_no_stray_cpu_tensor(path):
    layer = BlockCirculantLinear(13, 9, 4, device="meta")
    assert layer(torch.empty(2, 13, device="meta")).shape == (2, 9)


def test_repr_tells_the_compression():
    assert "160, out_features=10, block_size=5, bias=False, compression=5x" in repr(
        BlockCirculantLinear(160, 10, 5, bias=False)
    )


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((8, 4, 0), ValueError, "from 1 to 8.*got 0"),
        ((8, 4, -2), ValueError, "from 1 to 8.*got -2"),
        ((4, 6, 9), ValueError, "from 1 to 6 for a layer 4 -> 6, got 9"),
        ((8, 4, 2.0), TypeError, r"integer, got 2\.0"),
        ((8, 4, True), TypeError, "integer, got True"),
        ((0, 4, 1), ValueError, "0 -> 4"),
    ],
)
def test_impossible_sizes_are_explained(sizes, error, message):
    with pytest.raises(error, match=message):
        BlockCirculantLinear(*sizes)


def test_wrong_input_is_explained():
    """Zero-padding must not make a too narrow input pass."""
    for shape in ((2, 7), (2, 9), ()):
        with pytest.raises(ValueError, match=r"\(\.\.\., 8\)"):
            BlockCirculantLinear(8, 8, 3)(torch.zeros(shape))


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OwnInit(nn.Linear):
    pass


class TestConvertLinear:
    def test_returns_a_copy_and_leaves_the_model_alone(self):
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 8, bias=False)))
        before = copy.deepcopy(model.state_dict())
        converted = convert_linear(model, 4)
        assert isinstance(model[0], nn.Linear)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert isinstance(converted[0], BlockCirculantLinear)
        assert isinstance(converted[2][0], BlockCirculantLinear)
        assert converted[2][0].bias is None
        nn.init.zeros_(converted[0].bias)
        assert not torch.equal(model[0].bias, converted[0].bias)

    def test_is_the_projection_of_each_layer(self):
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
        converted = convert_linear(model, 4)
        for ours, dense in zip(converted, model, strict=True):
            torch.testing.assert_close(ours.weight, BlockCirculantLinear.from_linear(dense, 4).weight)

    def test_fresh_weights(self):
        """As spread as those of a new layer; projected ones are smaller by the root of the block size."""
        dense = nn.Sequential(nn.Linear(256, 256).double().eval())
        dense[0].bias.requires_grad_(False)
        fresh, projected = (convert_linear(dense, 16, weights=weights)[0] for weights in ("fresh", "project"))
        assert float((fresh.weight.std() / dense[0].weight.std()).detach()) == pytest.approx(1, rel=0.1)
        assert float((projected.weight.std() / dense[0].weight.std()).detach()) == pytest.approx(1 / 4, rel=0.1)
        assert not torch.equal(fresh.bias, projected.bias)
        assert [p.requires_grad for p in fresh.parameters()] == [True, False]
        assert fresh.weight.dtype == torch.float64
        assert not fresh.training
        with pytest.raises(ValueError, match="choose 'project' or 'fresh'"):
            convert_linear(dense, 16, weights="dense")

    @pytest.mark.parametrize("kind", ["Bert", "GPT2"])
    def test_projections_of_real_transformers(self, kind):
        """Also those of GPT-2, whose dense layers have their weights transposed."""
        hf = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
        if kind == "GPT2":
            sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}
        model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes)).eval()
        converted = convert_linear(model, 4)
        layers = [name for name, m in converted.named_modules() if isinstance(m, BlockCirculantLinear)]
        assert len(layers) == (4 if kind == "GPT2" else 7)  # of attention, the block behind it, and the pooler
        for name in layers:
            ours, theirs = converted.get_submodule(name), model.get_submodule(name)
            dense = theirs if kind == "Bert" else nn.Linear(*theirs.weight.shape)
            if kind == "GPT2":
                dense.weight.data, dense.bias.data = theirs.weight.data.T, theirs.bias.data
            torch.testing.assert_close(ours.weight, BlockCirculantLinear.from_linear(dense, 4).weight)
            theirs.weight.data = ours.to_dense().weight.data if kind == "Bert" else ours.to_dense().weight.data.T
        ids = torch.arange(6)[None]
        with torch.no_grad():
            torch.testing.assert_close(converted(ids).last_hidden_state, model(ids).last_hidden_state)

    def test_the_last_layer_may_differ(self):
        model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 10))
        sizes = [layer.block_size for layer in convert_linear(model, 8, last_block_size=5)]
        assert sizes == [8, 8, 5]
        assert [layer.block_size for layer in convert_linear(model)] == [8, 8, 8]
        skipped = convert_linear(model, 8, last_block_size=4, skip="2")
        assert [skipped[0].block_size, skipped[1].block_size, type(skipped[2])] == [8, 4, nn.Linear]

    def test_a_lone_linear_becomes_a_lone_block_circulant(self):
        converted = convert_linear(nn.Linear(16, 8), 4)
        assert isinstance(converted, BlockCirculantLinear)
        assert convert_linear(nn.Linear(16, 8), 4, last_block_size=2).block_size == 2

    @pytest.mark.parametrize("skip", ["1", ["1"], {"1"}, lambda name, layer: layer.out_features == 6])
    def test_skip_takes_names_or_a_predicate(self, skip):
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6)), nn.Linear(6, 4))
        converted = convert_linear(model, 2, skip=skip)
        kinds = [type(m) for m in (converted[0], *converted[1], converted[2])]
        assert kinds == [BlockCirculantLinear, nn.Linear, nn.Linear, BlockCirculantLinear]

    def test_a_skipped_name_that_is_not_there_is_an_error(self):
        """Else a typo would convert the very layer it was to protect."""
        with pytest.raises(ValueError, match="clasifier"):
            convert_linear(nn.Sequential(nn.Linear(8, 8)), 2, skip=["clasifier"])

    def test_layers_with_a_life_of_their_own_are_left_alone(self):
        model = nn.Sequential(
            OwnForward(8, 8),
            OwnInit(8, 8),
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            nn.Bilinear(8, 8, 8),
        )
        kinds = [isinstance(layer, BlockCirculantLinear) for layer in convert_linear(model, 2)]
        assert kinds == [False, True, False, False]

    @pytest.mark.parametrize("training", [True, False])
    def test_transformers_still_run(self, training):
        """Attention reads its projection's weight itself; in evaluation the encoder reads all its weights itself."""
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0, batch_first=True), 2)
        converted = convert_linear(model, 4).train(training)
        assert isinstance(converted.layers[1].linear2, BlockCirculantLinear)
        assert isinstance(converted.layers[1].self_attn.out_proj, BlockCirculantLinear)
        dense = copy.deepcopy(converted)
        for layer in dense.layers:
            layer.linear1, layer.linear2 = layer.linear1.to_dense(), layer.linear2.to_dense()
        x = torch.randn(2, 3, 16)
        with torch.no_grad():
            torch.testing.assert_close(converted(x), dense(x))

    def test_a_module_used_twice_stays_one_module(self):
        shared = nn.Linear(8, 8)
        converted = convert_linear(nn.Sequential(shared, nn.ReLU(), shared), 2)
        assert converted[0] is converted[2]
        assert isinstance(converted[0], BlockCirculantLinear)

    def test_a_tied_weight_is_not_silently_untied(self):
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
        model[1].weight = model[0].weight
        with pytest.raises(ValueError, match=r"'1'.*shares its weight.*skip"):
            convert_linear(model, 2)
        converted = convert_linear(model, 2, skip="1")
        assert converted[1].weight is converted[0].weight

    def test_a_layer_smaller_than_the_block_is_named_with_the_fix(self):
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Linear(10, 10))
        with pytest.raises(ValueError, match=r"'3'.*from 1 to 10 .*got 16.*last_block_size.*skip"):
            convert_linear(model, 16)
        assert convert_linear(model, 16, last_block_size=5)[3].block_size == 5
        with pytest.raises(TypeError, match="integer"):
            convert_linear(model, 2.5)

    def test_keeps_frozen_parameters_dtype_and_mode(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double().eval()
        model[0].requires_grad_(False)
        converted = convert_linear(model, 4)
        assert [p.requires_grad for p in converted.parameters()] == [False, False, True, True]
        assert {p.dtype for p in converted.parameters()} == {torch.float64}
        assert not converted[0].training

    def test_trains(self):
        """Converted layers must be reachable by an optimizer and lower a loss."""
        model = convert_linear(nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1)), 4, last_block_size=1)
        x = torch.randn(64, 20)
        y = x[:, :1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]
        assert math.isfinite(losses[-1])
