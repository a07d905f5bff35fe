"""The switches of torch for kernels."""

import pytest
import torch

from autoac import torch_private
from autoac.torch_private.kernel_flags import _FLAGS, _FLAGS_OF_CUDA


def test_kernel_flags_are_read_and_set():
    found: torch_private.KernelFlags = torch_private.kernel_flags()
    assert len(found) == len(_FLAGS) >= 7
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    try:
        changed = torch_private.kernel_flags()
        assert sum(a != b for a, b in zip(found, changed, strict=True)) == 2
        with torch_private.with_kernel_flags(found):
            assert torch_private.kernel_flags() == found
            assert torch.get_default_dtype() is torch.float32
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch_private.kernel_flags() == changed
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert torch_private.kernel_flags() == found


@pytest.mark.parametrize("flags", [_FLAGS, _FLAGS_OF_CUDA], ids=["of this build", "of builds for CUDA"])
def test_each_flag_can_be_set_to_what_it_is(flags):
    assert len(flags) >= 6
    found = [read() for read, _ in flags]
    for (_, write), value in zip(flags, found, strict=True):
        write(value)
    assert [read() for read, _ in flags] == found


def test_a_flag_of_two_parts():
    found = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    flags = {read(): write for read, write in _FLAGS_OF_CUDA if isinstance(read(), tuple)}
    ((before, write),) = flags.items()  # both have the same value
    write((not before[0], before[1]))
    try:
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is not found
    finally:
        write(before)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is found
