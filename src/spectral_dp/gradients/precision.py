"""Full float32 precision for norms and clipped sums, whatever the rest of the process uses.

GPUs may round the operands of float32 products to 10 bits (TF32, PyTorch's default for convolutions), and some CPUs to
7 bits (bfloat16). Norm and sum of a sample then differ by about a thousandth, which is a hundred times the clip's
rounding guard, and by any factor if terms cancel. A larger guard would clip ordinary samples too much. So the products
in norms and sums are computed in full precision. Forward and backward pass keep their own precision, because their
results are *input* to both norm and sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_depth = 0
_restore: list[Callable[[], None]] = []


@contextmanager
def full_precision() -> Iterator[None]:
    """Switches to full float32 precision until the last such block of the process ends.

    Formal guarantee. Inside the block, PyTorch's switches for CUDA and for CPUs do not allow float32 operands to be
    rounded:

    * The switches belong to the process. Other threads compute in full precision meanwhile, and no thread restores the
      switches while another is still inside such a block.
    * Not covered are devices without such a switch, and libraries that ignore it.
    """
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _restore.extend(_forbid_by_operation() if _HAS_SWITCHES else _forbid_by_library())
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _restore:
                    _restore.pop()()


# PyTorch 2.9 and later has one switch for each library and operation, and its kernels read these. The older switches
# are not used there: setting them gives a warning, and reading them can raise an error.
_HAS_SWITCHES = hasattr(torch._C, "_get_fp32_precision_getter")
_SWITCHES = [(library, operation) for library in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")]


def _forbid_by_operation() -> Iterator[Callable[[], None]]:
    get, set_to = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    for switch in _SWITCHES:
        if (before := get(*switch)) not in ("none", "ieee"):
            set_to(*switch, "ieee")

            def restore(switch: tuple[str, str] = switch, before: str = before) -> None:
                set_to(*switch, "none")
                if get(*switch) != before:  # otherwise it follows a general switch, as before
                    set_to(*switch, before)

            yield restore


def _forbid_by_library() -> Iterator[Callable[[], None]]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if products != "highest":
        torch.set_float32_matmul_precision("highest")
        yield lambda: torch.set_float32_matmul_precision(products)
    if convolutions:
        torch.backends.cudnn.allow_tf32 = False
        yield lambda: setattr(torch.backends.cudnn, "allow_tf32", convolutions)
