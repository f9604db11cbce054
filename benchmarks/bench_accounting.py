"""How long calibration takes. The goal: sigma for 10^5 steps, PLD, in less than 2 s."""

import time

from spectral_dp import accounting

RUNS = [(10**3, 0.02), (10**5, 0.01), (10**5, 1e-3), (10**7, 1e-3)]


def main() -> None:
    print(f"{'steps':>10} {'rate':>8} {'accountant':>10} {'sigma':>8} {'epsilon':>9} {'seconds':>8}")
    for steps, rate in RUNS:
        for accountant in ("pld", "rdp"):
            start = time.perf_counter()
            sigma = accounting.calibrate_noise(2.0, 1e-5, rate, steps, accountant=accountant)
            seconds = time.perf_counter() - start
            spent = accounting.epsilon(sigma, rate, steps, 1e-5, accountant=accountant)
            print(f"{steps:>10} {rate:>8g} {accountant:>10} {sigma:>8.4f} {spent:>9.5f} {seconds:>8.2f}")


if __name__ == "__main__":
    main()
