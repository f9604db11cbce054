import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "prints"),
    [
        ("README.md", "epsilon = "),
        ("docs/quickstart.md", "epoch 3: epsilon = 2.00"),
        ("docs/gradients.md", ""),
        ("docs/extending.md", ""),
        ("docs/audit.md", "no violation found"),
        ("docs/pretrained.md", ""),
        ("docs/priors.md", "nothing of it is released or charged"),
        ("docs/transfer.md", "Linear(in_features=512"),
    ],
)
def test_python_examples_run(page, prints, capsys, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks, f"no example found in {page}"
    namespace: dict = {}
    for block in (block.replace("/tmp/", f"{tmp_path}/") for block in blocks):
        exec(compile(block, page, "exec"), namespace)
    assert prints in capsys.readouterr().out


def test_the_examples_of_the_features_run(monkeypatch):
    pytest.importorskip("kymatio")
    monkeypatch.setattr("spectral_dp.features.registry._REGISTRY", {})
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/features.md").read_text(), flags=re.DOTALL):
        exec(compile(block, "docs/features.md", "exec"), namespace := {})
    assert namespace["coarse_scattering"](namespace["ImageFacts"]((1, 8, 8), (0.5,), (0.5,))).scales == 3


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
