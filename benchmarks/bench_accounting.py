"""How long calibration takes, and accounting during training. The goals: sigma for 10^5 steps, PLD, in less than 2 s;
a budget that is checked before every step of a schedule that changes at every step, in milliseconds a step.
"""

import time

from spectral_dp import accounting
from spectral_dp.accounting.budget import Budget

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

    for name, rates in (("one rate", [0.01]), ("two rates", [0.01, 0.02])):
        ledger, start = accounting.Ledger(), time.perf_counter()
        plan = Budget(2.0, 1e-5, accounting.Phase(1.0, 0.01, 1000), stop=True, accountant="pld")
        while not plan.is_spent(
            ledger, *(step := (max(2 - ledger.steps / 1000, 0.7), rates[ledger.steps % len(rates)]))
        ):
            ledger.record(*step)
        seconds = (time.perf_counter() - start) / ledger.steps
        print(f"falling noise, {name}: stopped after {ledger.steps} steps, {1000 * seconds:.2f} ms a step")


if __name__ == "__main__":
    main()
