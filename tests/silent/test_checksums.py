"""Checksums of the guard: the same for the same bits, another for any other."""

import pytest
import torch

from autoac.execute.checksums import checksum_of, checksums_of, on_device
from autoac.record.unseen import bytes_of_storage

CHECKSUMS = pytest.mark.parametrize("checksum", [checksum_of, on_device])
X = torch.linspace(-1, 1, 6 * 10 * 33).reshape(6, 10, 33)

VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "slice": lambda x: x[:, 2:5, 1:],
    "steps": lambda x: x[::2, :, ::3],
    "expanded": lambda x: x[:, :1].expand(6, 10, 33),
    "one": lambda x: x[3, 4, 5],
    "flat": lambda x: x.flatten()[7:],
}


@CHECKSUMS
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_any_element_counts_and_so_does_its_place(checksum, view, dtype):
    x = (X > 0.3) if dtype is torch.bool else X.to(dtype)
    found = checksum(VIEWS[view](x))
    copy = x.clone()
    assert checksum(VIEWS[view](copy)) == found
    seen = VIEWS[view](copy)
    index = tuple(size - 1 for size in seen.shape)
    seen[index] = ~seen[index] if dtype is torch.bool else seen[index] + 1
    assert checksum(seen) != found
    assert view == "one" or checksum(VIEWS[view](x.flip(0, 1, 2))) != found


@CHECKSUMS
def test_what_is_not_seen_does_not_count(checksum):
    x = torch.zeros(4, 6)
    found = checksum(x[:, :3])
    x[:, 3:] = 1
    assert checksum(x[:, :3]) == found


@CHECKSUMS
def test_bits_count_and_not_values(checksum):
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    assert checksum(torch.empty(0)) == 0


def test_what_has_no_bytes_of_its_own_is_not_looked_at():
    assert checksum_of(torch.empty(3, device="meta")) is None
    assert checksum_of(torch.eye(3).to_sparse()) is None


def test_bytes_of_a_whole_storage():
    values = torch.randn(4, dtype=torch.complex64)
    expected = values.view(torch.uint8)
    for view in (values, values.conj(), values.conj().imag, values[1:2], values.real):
        assert torch.equal(bytes_of_storage(view), expected)
    assert on_device(values.conj()) == on_device(values.conj().clone())


def test_of_several_tensors():
    a, b = torch.ones(3), torch.ones(2, 2)[:, ::2]
    before = checksums_of([a, torch.ones(2, device="meta"), b])
    assert len(before) == 2
    a.data[2] = 2
    after = checksums_of([a, b])
    assert after[0] != before[0]
    assert after[1] == before[1]
