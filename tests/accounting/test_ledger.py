"""The ledger: what was recorded is what is reported. (That a longer ledger never reports less: privacy_loss.)"""

import json
import math
import time

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.accounting import ledger_of

from spectral_dp.accounting import Ledger, delta, epsilon
from spectral_dp.accounting.privacy_loss import MAX_STEPS
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def test_ledger_of_one_phase_is_epsilon():
    one_by_one = ledger_of(*[(1.1, 0.02)] * 300)
    assert one_by_one.phases == ((1.1, 0.02, 300),)
    assert one_by_one.phases == ledger_of((1.1, 0.02, 300)).phases
    assert one_by_one.steps == 300
    assert one_by_one.epsilon(1e-5) == epsilon(1.1, 0.02, 300, 1e-5)
    assert one_by_one.delta(1.0) == delta(1.1, 0.02, 300, 1.0)
    assert one_by_one.epsilon(1e-5, accountant="rdp") == epsilon(1.1, 0.02, 300, 1e-5, accountant="rdp")


def test_ledger_keeps_phases_apart_and_ignores_their_order():
    there, back = ledger_of((1.0, 0.01, 100), (2.0, 0.01, 100)), ledger_of((2.0, 0.01, 100), (1.0, 0.01, 100))
    assert there != back
    assert there.epsilon(1e-5) == pytest.approx(back.epsilon(1e-5), rel=1e-9)
    assert ledger_of((1.0, 0.01, 60), (2.0, 0.01, 100), (1.0, 0.01, 40)).epsilon(1e-5) == there.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_dropping_any_phase_shows(accountant):
    """Negative control: a ledger that forgets a phase, the unsampled one included, reports less."""
    phases = [(1.0, 0.01, 200), (1.5, 0.05, 50), (4.0, 1.0, 1)]
    whole = ledger_of(*phases).epsilon(1e-5, accountant=accountant)
    for missing in range(len(phases)):
        rest = phases[:missing] + phases[missing + 1 :]
        assert ledger_of(*rest).epsilon(1e-5, accountant=accountant) < 0.99 * whole


def test_one_step_without_noise_spoils_everything():
    ledger = ledger_of((1.0, 0.01, 100), (0.0, 0.01, 1), (1.0, 0.01, 100))
    assert ledger.epsilon(1e-5) == math.inf
    assert ledger.delta(1.0) == 1.0
    assert ledger.epsilon(1e-5, accountant="rdp") == math.inf


def test_empty_ledger_spent_nothing():
    assert Ledger().epsilon(1e-5) == 0
    assert Ledger().delta(0.0) == 0
    assert Ledger().steps == 0


def test_replace_one_ledger_accounts_for_replace_one():
    phases = [(0.5, 0.2, 20), (1.0, 0.1, 20)]
    replaced, added = ledger_of(*phases, relation=REPLACE), ledger_of(*phases)
    assert replaced != added
    assert replaced.epsilon(1e-5) < 0.9 * added.epsilon(1e-5)
    assert Ledger.from_state_dict(replaced.state_dict()).relation is REPLACE


def test_recording_is_cheap_enough_for_every_step():
    ledger = Ledger()
    start = time.perf_counter()
    for _ in range(10_000):
        ledger.record(1.1, 0.01)
    assert time.perf_counter() - start < 2  # about 50 ms
    assert ledger.steps == 10_000


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-6, 1), st.integers(1, 10**6)), max_size=5),
    st.sampled_from(list(Relation)),
)
def test_state_survives_json(phases, relation):
    """Catches a field lost, or a float rounded, on the way through a checkpoint."""
    ledger = ledger_of(*phases, relation=relation)
    restored = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored == ledger
    assert restored.phases == ledger.phases


def test_a_ledger_never_grows_beyond_what_it_can_restore():
    ledger = ledger_of((1.1, 0.02, MAX_STEPS))
    with pytest.raises(ValueError, match="steps must be"):
        ledger.record(1.1, 0.02)
    assert Ledger.from_state_dict(ledger.state_dict()) == ledger


def test_restored_ledger_goes_on_where_it_stopped():
    ledger = ledger_of((1.1, 0.02, 100))
    restored = Ledger.from_state_dict(ledger.state_dict())
    restored.record(1.1, 0.02, 50)
    assert ledger.steps == 100
    assert restored.phases == ((1.1, 0.02, 150),)


def test_pld_agrees_with_dp_accounting_on_a_heterogeneous_run():
    """Catches a phase composed with another's parameters: dp_accounting gets the events as run."""
    ledger, theirs = Ledger(), dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for sigma, rate, steps in [(1.0, 0.01, 300), (2.0, 0.05, 100), (1.5, 1.0, 2), (1.0, 0.01, 50)]:
        ledger.record(sigma, rate, steps)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    assert ledger.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert ledger.delta(4.0) == pytest.approx(theirs.get_delta(4.0), rel=2e-2)
