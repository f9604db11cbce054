"""Builds the source archive and the wheel, installs the wheel into a fresh environment, and uses it there.

    python release/check_wheel.py [--out dist]

Needs `build` and a package index for the dependencies. The source tree is not on the path of the fresh environment.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def check(wheel: Path, folder: Path) -> None:
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[cli]"], check=True)
    shutil.copy(ROOT / "release" / "smoke.py", folder)
    subprocess.run([python, "-I", "smoke.py", str(folder)], cwd=folder, check=True)  # -I: no PYTHONPATH, no user site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the archives go; old ones are removed")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        check(build(out), Path(folder))


if __name__ == "__main__":
    main()
