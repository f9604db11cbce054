"""Arguments beside those of the Trainer; ``test_transformers.py`` has each that the Trainer itself refuses."""

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra spectral-dp[transformers]")

from spectral_dp.integrations.training_arguments import PrivacyArguments, refuse_arguments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")


def arguments(tmp_path, **options):
    return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **options)


def test_the_arguments_can_come_from_a_command_line():
    """Beside those of the Trainer, so that no name may be in both."""
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, PrivacyArguments))
    line = (
        "--output_dir out --target_delta 1e-5 --per_sample_max_grad_norm 1 --expected_batch_size 64 --target_epsilon 3 "
        "--clipping per_layer"
    )
    _, privacy = parser.parse_args_into_dataclasses(line.split())
    assert privacy == PrivacyArguments(1e-5, 1.0, 64.0, target_epsilon=3.0, clipping="per_layer")


def test_those_of_a_plain_training_are_fine(tmp_path):
    refuse_arguments(arguments(tmp_path))


def test_all_that_is_refused_is_listed(tmp_path):
    with pytest.raises(ValueError, match="cannot do what TrainingArguments says") as caught:
        refuse_arguments(arguments(tmp_path, gradient_accumulation_steps=4, neftune_noise_alpha=5.0))
    message = str(caught.value)
    assert "gradient_accumulation_steps=4: leave it at 1" in message
    assert "neftune_noise_alpha: leave it out" in message
