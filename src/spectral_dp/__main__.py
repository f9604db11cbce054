"""``spectral-dp`` and ``python -m spectral_dp``: the command line, or how to get what it needs."""

import sys
from importlib.util import find_spec

#: What the extra ``cli`` brings, by the names under which it is imported.
EXTRA = ("jinja2", "matplotlib", "PIL", "rich", "safetensors", "sklearn", "typer")


def main() -> None:
    """Runs the command; without the extra, says in one line how to get it (exit code 2)."""
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        sys.exit(_refuse(missing))
    from spectral_dp.cli import app  # late: it imports the extra

    app(prog_name="spectral-dp")


def _refuse(missing: list[str]) -> int:
    print(
        f"error: the command line needs more than the library ({', '.join(missing)} not found): "
        "pip install 'spectral-dp[cli]'",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    main()
