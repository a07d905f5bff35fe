"""Streams of a GPU."""

import pytest
import torch

from autoac import torch_private


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_current_raw_stream():
    side = torch.cuda.Stream()
    assert torch_private.current_raw_stream(0) == torch.cuda.current_stream(0).cuda_stream != side.cuda_stream
    with torch.cuda.stream(side):
        assert torch_private.current_raw_stream(0) == side.cuda_stream


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sleep_cycles():
    end = torch.cuda.Event()
    torch_private.sleep_cycles(10**8)  # a twentieth of a second
    end.record()
    assert not end.query()  # the host does not wait
    end.synchronize()


def test_the_names_are_there_in_builds_for_cuda():
    """Builds without CUDA do not have them, nor anything else that could ask for them."""
    for name in ("_cuda_getCurrentRawStream", "_cuda_sleep"):
        assert hasattr(torch._C, name) is torch.backends.cuda.is_built()
