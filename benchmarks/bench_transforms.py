"""Where the matrix product stops being quicker than the fast algorithm: the basis of ``Transform.matmul_limit``.

python benchmarks/bench_transforms.py
"""

from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from spectral_dp.mechanism.transforms import Transform, get_transform


def seconds(transform: Transform, x: torch.Tensor, dims: tuple[int, ...], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        transform.inverse(transform.forward(x, dims), dims)
        times.append(perf_counter() - start)
    return median(times[1:])


def main() -> None:
    table = Table("samples", "transform", "matmul ms", "fast ms", "fast / matmul", title="4M values, forward + inverse")
    for shape in [(8,), (16,), (32,), (64,), (128,), (256,), (3, 3), (5, 5), (8, 8), (16, 16), (32, 32)]:
        for name in ("fourier", "dct", "haar", "hadamard"):
            transform = get_transform(name)
            try:
                transform.check_shape(shape)
            except ValueError:
                continue
            n = torch.Size(shape).numel()
            x = torch.randn(4_000_000 // n, *shape)
            dims = tuple(range(-len(shape), 0))
            limit = type(transform).matmul_limit
            timings = {}
            for path, value in (("matmul", 10**9), ("fast", 0)):
                type(transform).matmul_limit = value
                timings[path] = seconds(transform, x, dims)
            type(transform).matmul_limit = limit
            ratio = timings["fast"] / timings["matmul"]
            times = [f"{timings[p] * 1e3:.1f}" for p in ("matmul", "fast")]
            table.add_row("x".join(map(str, shape)), name, *times, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
