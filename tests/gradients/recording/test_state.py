"""What a forward pass leaves behind in the model is raw data: found by value, whatever way it was written."""

import numpy as np
import pytest
import torch
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.fingerprint import Fingerprint
from spectral_dp.gradients.recording.state import Keepsake, StateGuard

pytestmark = pytest.mark.filterwarnings("ignore:no rule for")


class Holds(nn.Module):
    """A layer with something to write to, and a way to write there."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("codebook", torch.randn(6))
        self.store = nn.Module()
        self.store.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.bank = torch.zeros(40, 6)
        self.queue = [torch.zeros(6)]
        self.array = np.zeros(6)
        self.level = 0.0
        self.slots = [None] * 2000
        self.write = write

    def forward(self, x):
        self.write(self, x.detach())
        return self.linear(x)


def _through_data(m, x):
    m.codebook.data.mul_(0.9).add_(0.1 * x.mean(0))


def _through_numpy(m, x):
    m.codebook.numpy()[:] = x.mean(0).numpy()


def _initialise_from_data(m, x):
    if not m.store.frozen.any():
        m.store.frozen.data.copy_(x.std(0))


def _into_frozen_parameter(m, x):
    m.store.frozen.data.lerp_(x.mean(0), 0.1)


def _into_trained_parameter(m, x):
    with torch.no_grad():
        m.linear.bias.add_(1e-3 * x.mean(0))


def _into_bank(m, x):
    m.bank[: len(x)] = x


def _replace_bank(m, x):
    m.bank = torch.cat([x, m.bank])[:40]


def _append(m, x):
    m.queue.append(x[0])


def _into_array(m, x):
    m.array += x.mean(0).numpy()


def _into_float(m, x):
    m.level = 0.9 * m.level + 0.1 * float(x.mean())


def _into_numpy_float(m, x):
    m.single = x.numpy().mean()


def _into_complex(m, x):
    m.phase = complex(x.mean())


def _into_slot(m, x):
    """A slot for every record of the data, most of them empty."""
    m.slots[7] = x[0].clone()


def _new_attribute(m, x):
    m.seen = x


def _swap(m, x):
    """Values stay, places change: which rows are swapped tells who was there."""
    if x[0, 0] > -100:
        m.codebook.data[[0, 1]] = m.codebook.data[[1, 0]]


WRITERS = {
    "a codebook through .data": (_through_data, "codebook"),
    "a buffer through .numpy()": (_through_numpy, "codebook"),
    "a running mean in a frozen parameter": (_into_frozen_parameter, "store.frozen"),
    "a trained parameter": (_into_trained_parameter, "linear.bias"),
    "a memory bank": (_into_bank, "bank"),
    "a memory bank that is replaced": (_replace_bank, "bank"),
    "a list of tensors": (_append, "queue"),
    "an array": (_into_array, "array"),
    "a float": (_into_float, "level"),
    "a float of numpy": (_into_numpy_float, "single"),
    "a complex number": (_into_complex, "phase"),
    "one of many slots": (_into_slot, "slots"),
    "an attribute that was not there": (_new_attribute, "seen"),
    "values that change places": (_swap, "codebook"),
}

PARAMETERS = ("store.frozen", "linear.bias")  # not kept: what is written there is an error


def train_step(model, gradients, x):
    model(x).square().sum().backward()
    return gradients.take()


@pytest.mark.parametrize(("write", "name"), WRITERS.values(), ids=WRITERS)
class TestWhatAPassLeavesBehind:
    def test_is_refused_by_name(self, write, name):
        model = Holds(write)
        gradients = ModelGradients(model)
        with pytest.raises(RuntimeError, match=f"'{name}'"):
            train_step(model, gradients, torch.randn(4, 6))

    def test_is_refused_without_gradients_as_soon_as_the_pass_ends(self, write, name):
        model = nn.Sequential(nn.Tanh(), Holds(write))
        gradients = ModelGradients(model)
        with torch.no_grad(), pytest.raises(RuntimeError, match=f"'1.{name}'"):
            model(torch.randn(4, 6))
        gradients.remove()

    def test_versions_alone_would_not_do(self, write, name):
        """The control: most of these leave the version counter of every buffer as it was."""
        model = Holds(write)
        before = model.codebook._version
        model(torch.randn(4, 6))
        assert model.codebook._version == before


def test_a_frozen_embedding_bag_that_rewrites_its_rows_is_refused():
    """Which rows were renormalised shows exactly which tokens were in the batch."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 6, mode="mean")
            self.bag.weight.requires_grad_(False)
            self.linear = nn.Linear(6, 2)

        def forward(self, x):
            return self.linear(self.bag(x))

    model = Bag()
    gradients = ModelGradients(model)
    model.bag.max_norm = 0.1  # its rule refuses one that has it from the beginning
    with pytest.raises(RuntimeError, match=r"parameter 'bag\.weight'"):
        train_step(model, gradients, torch.randint(20, (4, 3)))


def test_initialisation_from_the_first_batch_is_refused():
    model = Holds(_initialise_from_data)
    model.store.frozen.data.zero_()
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="initialisation from public data"):
        train_step(model, gradients, torch.randn(4, 6))


def nothing(m, x):
    m.linear.weight.data_ptr()


def test_a_model_that_keeps_nothing_passes():
    model = Holds(nothing)
    gradients = ModelGradients(model)
    for _ in range(3):
        train_step(model, gradients, torch.randn(4, 6))


def test_what_happens_between_passes_is_the_users_business():
    """Clamped weights, averages in buffers, a validation pass before: none of it is a forward pass."""
    model = Holds(nothing)
    gradients = ModelGradients(model)
    for _ in range(2):
        train_step(model, gradients, torch.randn(4, 6))
        with torch.no_grad():
            model(torch.randn(9, 6))
        model.codebook.lerp_(model.linear.bias.detach(), 0.1)
        with torch.no_grad():
            model.linear.weight.clamp_(-0.1, 0.1)


def test_a_pass_that_failed_does_not_blind_the_guard():
    model = Holds(nothing)
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(4, 5))
    model.write = _through_data
    with pytest.raises(RuntimeError, match="codebook"):
        train_step(model, gradients, torch.randn(4, 6))


def test_the_next_step_begins_anew_after_a_refusal():
    model = Holds(_through_data)
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="codebook"):
        train_step(model, gradients, torch.randn(4, 6))
    model.write = nothing
    gradients.discard()
    train_step(model, gradients, torch.randn(4, 6))


def test_nothing_is_left_of_a_guard_that_was_removed():
    model = Holds(_through_data)
    gradients = ModelGradients(model)
    gradients.remove()
    with torch.no_grad():
        model(torch.randn(4, 6))
    guard = StateGuard(model)
    del guard
    with torch.no_grad():
        model(torch.randn(4, 6))


class TestKeepsake:
    @pytest.mark.parametrize(
        "write", [w for w, name in WRITERS.values() if name not in ("store.frozen", "linear.bias")]
    )
    def test_puts_back_whatever_was_written(self, write):
        model = Holds(write)
        before, kept = Fingerprint(model), Keepsake(model)
        model(torch.randn(4, 6))
        assert Fingerprint(model).changes(before)
        kept.restore()
        assert Fingerprint(model).changes(before) == []

    def test_lazily_made_values_are_unmade(self):
        module = nn.Module()
        module.mask, module.calls = None, 0
        module.register_buffer("lazy", None)
        kept = Keepsake(module)
        module.mask, module.calls, module.lazy, module.more = torch.ones(3), 5, torch.ones(2), torch.ones(1)
        kept.restore()
        assert module.mask is None
        assert module.calls == 0
        assert module.lazy is None
        assert not hasattr(module, "more")

    def test_a_buffer_that_others_hold_stays_the_same_tensor(self):
        model = Holds(_through_data)
        held = model.codebook
        kept = Keepsake(model)
        model(torch.randn(4, 6))
        kept.restore()
        assert model.codebook is held

    def test_a_list_that_was_empty_is_empty_again(self):
        module = nn.Module()
        module.losses, module.tokens = [], {"seen": [1]}
        kept = Keepsake(module)
        module.losses.append(torch.ones(1))
        module.tokens["seen"].append(2)
        kept.restore()
        assert module.losses == []
        assert module.tokens == {"seen": [1]}

    def test_what_was_not_written_stays_the_same_object(self):
        module = nn.Module()
        module.names, module.limits = ["a", "b"], (1, 2)
        names = module.names
        Keepsake(module).restore()
        assert module.names is names


def test_weights_may_be_swapped_around_an_evaluation_with_gradients():
    """Of an average, for instance: the pass is looked at when it ends, not when the next step is made."""
    model = nn.Sequential(nn.Linear(6, 3))
    gradients = ModelGradients(model)
    model.eval()
    model(torch.randn(4, 6))
    with torch.no_grad():
        model[0].weight.add_(1)
    model.train()
    train_step(model, gradients, torch.randn(4, 6))


def test_an_evaluation_with_gradients_leaves_nothing_behind_either():
    model = Holds(_through_data)
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="codebook"):
        model.eval()(torch.randn(4, 6))
    gradients.remove()


class TestKeepsakeOfAPassThatIsUnderWay:
    """What it has put on the model is the same object again: gradients flow through it."""

    def test_objects_are_the_same(self):
        module = nn.Module()
        module.kept, module.rebound = torch.ones(2, requires_grad=True) * 2, torch.zeros(2)
        module.listed, module.named, module.pair = [module.kept], {"h": module.kept}, (module.kept, [1])
        before = dict(vars(module))
        kept = Keepsake(module)
        module.rebound[:] = 5
        module.kept, module.rebound = torch.zeros(2), torch.ones(2)
        module.listed.append(torch.ones(1))
        module.named["h"] = None
        module.pair[1].append(2)
        module.pair = ()
        kept.restore()
        assert all(vars(module)[name] is before[name] for name in ("kept", "rebound", "listed", "named", "pair"))
        assert (module.listed, module.named, module.pair[1]) == ([module.kept], {"h": module.kept}, [1])
        assert module.kept.grad_fn is not None
        assert not bool(module.rebound.any())

    @pytest.mark.parametrize("store", ["attribute", "list"])
    def test_what_a_pass_has_stored_before_its_trial_keeps_its_gradient(self, store):
        """The first batch trained all but the layer before, silently."""

        class Stores(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.out, self.gate = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.randn(3))
                self.hidden, self.stack = None, []

            def forward(self, x):
                self.hidden = self.layer(x)
                self.stack.append(self.hidden)
                y = self.gate * x  # the first operation of what samples share: the trial
                hidden = self.stack.pop()
                hidden = self.hidden if store == "attribute" else hidden
                self.hidden = None
                return self.out(torch.tanh(y + hidden))

        torch.manual_seed(0)
        check(Stores().double(), torch.randn(4, 3).double())
