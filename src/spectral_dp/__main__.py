"""``python -m spectral_dp`` is ``spectral-dp``."""

from spectral_dp.cli import app

if __name__ == "__main__":
    app(prog_name="spectral-dp")
