import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spectral_dp.gradients.sums import CHUNK_BYTES, in_chunks, weigh, weighted_sum


class Written(TorchDispatchMode):
    """The most numbers that one operation wrote, views apart."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, 0 if func.is_view else out.numel())
        return out


@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)])
def test_weighted_sums_do_not_copy_what_they_sum(dims):
    z, c = torch.randn(7, 4, 5, 6).double().permute(dims), torch.rand(7).double()
    with Written() as written:
        total = weighted_sum(c, z)
    torch.testing.assert_close(total, torch.tensordot(c, z, dims=1))
    assert written.most == 4 * 5 * 6


def test_control_a_copy_would_be_counted():
    z = torch.randn(7, 4, 5, 6).permute(0, 3, 1, 2)
    with Written() as written:
        z.flatten(1)
    assert written.most == 7 * 4 * 5 * 6


def test_weighted_sum_of_scalars_and_of_no_samples():
    assert weighted_sum(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) == 11
    assert torch.equal(weighted_sum(torch.zeros(0), torch.zeros(0, 2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("samples", [0, 1, 5, 1000])
def test_chunks_cover_every_sample_once(samples):
    chunks = list(in_chunks(samples, CHUNK_BYTES // 32, torch.zeros(1)))
    assert len(chunks) >= 1
    assert [b for rows in chunks for b in range(samples)[rows]] == list(range(samples))
    assert all(rows.stop - rows.start == 8 for rows in chunks)


@pytest.mark.parametrize(("n", "m"), [(2, 9), (9, 2)])
def test_the_smaller_factor_is_weighted(n, m):
    x, dA, c = torch.randn(4, n), torch.randn(4, m), torch.rand(4)
    left, right = weigh(x, dA, c)
    torch.testing.assert_close(right.T @ left, (dA * c[:, None]).T @ x)
    assert (left is x) == (n > m)
