"""Tables of figures on pages, written from the committed results: no figure is typed by hand.

    python -m website.result_tables

Between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` on a page stands the table of that name. A test compares
the pages with what the results give.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spectral_dp.experiments.comparison import Difference, paired_difference
from spectral_dp.experiments.grid import Grid
from spectral_dp.experiments.recipe import read_recipe

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGES = (
    *("README.md", "results/README.md"),
    *("docs/paper-claims.md", "docs/performance.md", "docs/priors.md", "docs/scattering.md", "docs/transfer.md"),
)
_BATCH_OF_SEQUENCES = 32
_SEEDS_OF_A_CLAIM = 5
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read_results(name: str, file: str = "results.json") -> dict[str, Any]:
    """Returns what a file of committed results says."""
    return json.loads((RESULTS / name / file).read_text(encoding="utf-8"))


def accuracies(cell: dict[str, Any]) -> dict[int, float]:
    """Returns the test accuracies of a cell by seed."""
    return {run["seed"]: run["heldout_accuracy"] for run in cell["runs"].values()}


#: Results in which DP-SGD stands beside Spectral-DP: directory, panel, and what its columns are of.
_PAIRED = {
    ("best-results-cpu", 1): "",  # columns name the network
    ("scattering-cpu", 1): "MNIST, scattering, linear, ",
    ("scattering-cpu", 2): "CIFAR-10, scattering, linear, ",
    ("scattering-cpu", 3): "CIFAR-10, scattering, convolutional, ",
    ("priors-cpu", 0): "CIFAR-10, features from no data, ",
    ("transfer-cpu", 0): "CIFAR-10, frozen EfficientNet-Lite0, ",
    ("transfer-cpu", 1): "CIFAR-10, frozen MobileNetV2, ",
    ("transfer-cpu", 2): "CIFAR-10, frozen ResNet-18, ",
    ("transfer-cpu", 3): "CIFAR-100, frozen EfficientNet-Lite0, ",
    ("transfer-cpu", 4): "CIFAR-100, frozen MobileNetV2, ",
    ("transfer-cpu", 5): "CIFAR-100, frozen ResNet-18, ",
}
#: Those of them that the README shows.
_SHOWN = (
    *("MNIST, Model1, ε = 2", "MNIST, LeNet-5, ε = 2"),
    *("CIFAR-10, scattering, linear, ε = 1", "CIFAR-10, scattering, linear, ε = 3"),
    *("CIFAR-10, scattering, convolutional, ε = 3", "CIFAR-10, features from no data, released gains, ε = 3"),
    *("CIFAR-10, frozen EfficientNet-Lite0, ε = 1", "CIFAR-10, frozen EfficientNet-Lite0, ε = 0.1"),
    *("CIFAR-10, frozen MobileNetV2, ε = 1", "CIFAR-10, frozen ResNet-18, ε = 2"),
)


def paired_results() -> dict[str, tuple[str, dict[int, float], dict[int, float]]]:
    """Returns where each paired result is, and the accuracies of DP-SGD and Spectral-DP by seed."""
    found = {}
    for (name, panel), label in _PAIRED.items():
        cells = read_results(name)["panels"][panel]["cells"]
        for column in dict.fromkeys(cell["column"] for cell in cells):
            rows = {cell["row"]: accuracies(cell) for cell in cells if cell["column"] == column}
            for row in (each for each in rows if each.startswith("Spectral-DP")):
                form = row.removeprefix("Spectral-DP").removeprefix(", ")  # as "released gains"
                if rows["DP-SGD"].keys() & rows[row].keys():
                    found[label + (f"{form}, " if form else "") + column] = (name, rows["DP-SGD"], rows[row])
    return found


def accuracy_table() -> str:
    """Accuracy of DP-SGD and Spectral-DP at the same epsilon, with the paired difference: those that matter most."""
    lines = ["| Test accuracy % | DP-SGD | Spectral-DP | difference (95 %) |", "|---|---|---|---|"]
    paired = paired_results()
    for label in (each for each in _SHOWN if each in paired):
        name, theirs, ours = paired[label]
        shown = f"{_mean(theirs)} | {_mean(ours)} | {_difference(ours, theirs)}"
        lines.append(f"| [{label}](results/{name}/README.md) | {shown} |")
    return "\n".join(lines)


def gains_table() -> str:
    """The same for all results, with the number of seeds that both have, and what the interval says."""
    head = "| Test accuracy % | DP-SGD | Spectral-DP | seeds | difference (95 %) | shown |"
    lines = [head, "|---" * 6 + "|"]
    for label, (name, theirs, ours) in paired_results().items():
        difference, seeds = _difference(ours, theirs), len(theirs.keys() & ours.keys())
        shown = f"{_mean(theirs)} | {_mean(ours)} | {seeds} | {difference} | {_supported(difference, seeds)}"
        lines.append(f"| [{label}](results/{name}/README.md) | {shown} |")
    return "\n".join(lines)


def opacus_table() -> str:
    """The three methods with the same settings, beside Opacus' own training."""
    compared = read_results("opacus-digits", "comparison.json")
    names = {"dpsgd": "DP-SGD", "opacus": "Opacus", "spectral": "Spectral-DP"}
    rows = {row["label"]: row for row in compared["rows"]}
    shown = [_mean(dict(enumerate(rows[label]["accuracies"]))) for label in names]
    lines = ["| Test accuracy % | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    label = "[digits, LeNet-5, ε = 3](results/opacus-digits/comparison.md)"
    return "\n".join([*lines, f"| {label} | {' | '.join(shown)} |"])


def cost_table() -> str:
    """Time and memory of a training step over those of Opacus' quickest mode, at batch 256."""
    quantities = ("time / Opacus", "memory / Opacus", "time / plain PyTorch", "the same order of channels")
    lines = ["| One step, batch 256 | " + " | ".join(quantities) + " |", "|---" * 5 + "|"]
    names = {"model1 blocks": "Model1, blocks of 8", "lenet5": "LeNet-5", "model2": "Model2", "model3": "Model3"}
    for entry in read_results("bench", "training.json")["entries"]:
        if entry["size"] != 256 or entry["name"] not in names:
            continue
        measured = {
            each["contestant"]: each for each in entry["measured"] if not each["failure"] and any(each["seconds"])
        }
        opacus = min((each for name, each in measured.items() if name.startswith("opacus")), key=_seconds)
        ours, plain = measured.get("spectral, channels last", measured["spectral"]), measured["plain"]
        alike = measured.get("plain, channels last", plain)
        memory = ours["memory_mb"] / opacus["memory_mb"]
        ratios = (_ratio(ours, opacus), memory, _ratio(ours, plain), _ratio(ours, alike))
        shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"| [{names[entry['name']]}](results/bench/training.md) | {shown} |")
    return "\n".join(lines)


def steps_table() -> str:
    """Each goal of a training step, with what was measured."""
    quantities = ("time / plain", "time / best Opacus", "memory / plain")
    lines = ["| | batch | " + " | ".join(f"{each} | goal" for each in quantities) + " |", "|---" * 8 + "|"]
    by_contestant: dict[tuple[str, str, int], dict[str, Any]] = {}
    for goal in read_results("bench", "training.json")["goals"]:
        if goal["batch"] != _BATCH_OF_SEQUENCES:  # those are in the whole table only
            who = (goal["workload"], goal["contestant"], goal["batch"])
            by_contestant.setdefault(who, {})[goal["quantity"]] = goal
    for (workload, contestant, batch), goals in by_contestant.items():
        shown = [_judged(goals[quantity]) if quantity in goals else " | " for quantity in quantities]
        lines.append(f"| [{workload}](results/bench/training.md), {contestant} | {batch} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _judged(goal: dict[str, Any]) -> str:
    missed = "" if goal["verdict"].startswith("reached") else ", " + goal["verdict"]
    return f"{goal['with_spread']}{missed} | ≤ {goal['most']:g}"


def paper_table() -> str:
    """What the paper prints, and what its settings and tuned ones give under a sound mechanism."""
    lines = ["| MNIST, ε = 2 | paper | its settings, made private | tuned | runs |", "|---|---|---|---|---|"]
    panels = [panel["cells"] for panel in read_results("best-results-cpu")["panels"]]
    for theirs, tuned in zip(panels[0], panels[1], strict=True):
        shown = (f"{theirs['paper_percent']:.2f}", _mean(accuracies(theirs)), _mean(accuracies(tuned)))
        counts = f"{len(theirs['runs'])}, {len(tuned['runs'])}"
        name = theirs["column"].removeprefix("MNIST, ").removesuffix(", ε = 2")
        lines.append(f"| {name}, {theirs['row']} | {' | '.join(shown)} | {counts} |")
    return "\n".join(lines)


def priors_table() -> str:
    """Heads on features from no data: accuracy at each epsilon, and how many seeds are behind it."""
    lines = ["| data set, method | ε | test accuracy % | seeds |", "|---|---|---|---|"]
    for panel in read_results("priors-cpu")["panels"]:
        shown = set()
        for cell in panel["cells"]:
            private = cell["row"] != "Non-private"
            if not cell["runs"] or (cell["row"] in shown and not private):
                continue
            shown.add(cell["row"])
            name, epsilon = panel["title"].partition(",")[0], cell["column"].removeprefix("ε = ") if private else "-"
            lines.append(f"| {name}, {cell['row']} | {epsilon} | {_mean(accuracies(cell))} | {len(cell['runs'])} |")
    return "\n".join(lines)


def scattering_table() -> str:
    """Heads on scattering features: both methods at each epsilon, with the paired difference, and without privacy."""
    lines = ["| | ε | DP-SGD | Spectral-DP | difference (95 %) | without privacy |", "|---|---|---|---|---|---|"]
    for panel in (p for p in read_results("scattering-cpu")["panels"] if p["origin"] == "tuned"):
        for column in dict.fromkeys(cell["column"] for cell in panel["cells"]):
            found = {cell["row"]: accuracies(cell) for cell in panel["cells"] if cell["column"] == column}
            theirs, ours = found["DP-SGD"], found["Spectral-DP"]
            if not theirs.keys() & ours.keys():
                continue
            name = f"[{panel['title']}](results/scattering-cpu/README.md)"
            shown = f"{_mean(theirs)} | {_mean(ours)} | {_difference(ours, theirs)} | {_mean(found['Non-private'])}"
            lines.append(f"| {name} | {column.removeprefix('ε = ')} | {shown} |")
    return "\n".join(lines)


def transfer_table() -> str:
    """Heads on pretrained networks: all methods at each epsilon, with the paired difference, and without privacy."""
    private = ("DP-SGD", "Spectral-DP", "Class means", "Least squares")
    lines = ["| | ε | " + " | ".join(private) + " | shown | without privacy |", "|---" * 8 + "|"]
    for panel in read_results("transfer-cpu")["panels"]:
        for column in dict.fromkeys(cell["column"] for cell in panel["cells"]):
            found = {cell["row"]: accuracies(cell) for cell in panel["cells"] if cell["column"] == column}
            theirs, ours = found["DP-SGD"], found["Spectral-DP"]
            seeds = len(theirs.keys() & ours.keys())
            if not seeds:
                continue
            difference = _difference(ours, theirs)
            shown = [_mean(found[row]) for row in private]
            shown += [f"{difference}, {_supported(difference, seeds)}", _mean(found["Non-private"])]
            name = f"[{panel['title']}](results/transfer-cpu/README.md)"
            lines.append(f"| {name} | {column.removeprefix('ε = ')} | {' | '.join(shown)} |")
    return "\n".join(lines)


def text_table() -> str:
    """Texts: every method at each epsilon, and how many seeds are behind it."""
    columns = ("1", "3", "8")
    lines = ["| | " + " | ".join(f"ε = {each}" for each in columns) + " | seeds |", "|---" * 5 + "|"]
    for panel in read_results("text-cpu")["panels"]:
        for row in dict.fromkeys(cell["row"] for cell in panel["cells"]):
            found = {cell["column"]: accuracies(cell) for cell in panel["cells"] if cell["row"] == row}
            if not any(found.values()):
                continue
            shown = " | ".join(_mean(found.get(f"ε = {each}", {})) for each in columns)
            seeds = max(len(each) for each in found.values())
            lines.append(f"| [{panel['title']}](results/text-cpu/README.md), {row} | {shown} | {seeds} |")
    return "\n".join(lines)


def cifar10_table() -> str:
    """CIFAR-10 at epsilon 3 without other data: networks from scratch, scattering, features from no data."""
    found: list[tuple[str, str, str, dict[int, float]]] = []
    networks = next(panel for panel in read_recipe("best-results", "cpu").panels if panel.origin == "ours")
    for (row, column), cell in networks.cells.items():
        runs = Grid({column: cell.settings}, range(5)).results(RESULTS / "runs")[column].runs
        if runs:
            by_seed = {run.settings.seed: run.figure("heldout_accuracy") for run in runs}
            name = f"{column.split(', ')[1]} from scratch"
            found.append((name, f"runs/{runs[0].name}/summary.json", row, by_seed))
    heads = {"scattering-cpu": (2, "scattering, linear"), "priors-cpu": (0, "features from no data, linear")}
    for results, (panel, name) in heads.items():
        for cell in read_results(results)["panels"][panel]["cells"]:
            if cell["column"] == "ε = 3" and cell["row"] != "Non-private":
                found.append((name, f"{results}/README.md", cell["row"], accuracies(cell)))
    lines = ["| CIFAR-10, ε = 3 | test accuracy % | seeds |", "|---|---|---|"]
    lines += [f"| [{name}](results/{link}), {row} | {_mean(each)} | {len(each)} |" for name, link, row, each in found]
    return "\n".join(lines)


def ablation_table() -> str:
    """What each part of the features from no data is worth: the paired difference from leaving everything as it is."""
    panels = read_results("priors-ablation-cpu")["panels"]
    unchanged = accuracies(panels[0]["cells"][0])
    lines = ["| what is changed | test accuracy % | difference (95 %) |", "|---|---|---|"]
    lines.append(f"| nothing: {panels[0]['cells'][0]['row']} | {_mean(unchanged)} | |")
    for cell in (cell for panel in panels[1:] for cell in panel["cells"] if cell["runs"]):
        changed = accuracies(cell)
        lines.append(f"| {cell['row']} | {_mean(changed)} | {_difference(changed, unchanged)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "ablation": ablation_table,
    "accuracy": accuracy_table,
    "cifar10": cifar10_table,
    "cost": cost_table,
    "gains": gains_table,
    "opacus": opacus_table,
    "paper": paper_table,
    "priors": priors_table,
    "scattering": scattering_table,
    "steps": steps_table,
    "text": text_table,
    "transfer": transfer_table,
}


def with_tables(text: str, page: str) -> str:
    """Returns a page with its tables as the results give them; links lead from where the page is."""
    up = "../" * page.count("/")

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]]().replace('](results/', f']({up}results/')}\n\n{found[3]}"

    return _MARKED.sub(table, text)


def main() -> None:
    """Writes the tables of all pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8"), page), encoding="utf-8")


def _mean(accuracies: dict[int, float]) -> str:
    values = [100 * value for value in accuracies.values()]
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}" if values else "not run"


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> Difference:
    """Returns the paired difference over the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    return paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def _supported(difference: Difference, seeds: int) -> str:
    """Returns what may be said of a difference: nothing is claimed of fewer than five pairs."""
    if seeds < _SEEDS_OF_A_CLAIM or difference.low is None or difference.high is None:
        return "too few seeds"
    return "gain" if difference.low > 0 else "loss" if difference.high < 0 else "nothing"


def _seconds(measured: dict[str, Any]) -> float:
    return statistics.median(each for each in measured["seconds"] if each is not None)


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The median of the ratios within a round; a slow contestant may sit rounds out."""
    rounds = zip(ours["seconds"], theirs["seconds"], strict=False)
    return statistics.median(a / b for a, b in rounds if a is not None and b is not None)


if __name__ == "__main__":
    main()
