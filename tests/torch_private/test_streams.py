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


def test_the_name_is_there_in_builds_for_cuda():
    """Builds without CUDA do not have it, nor anything else that could ask for it."""
    assert hasattr(torch._C, "_cuda_getCurrentRawStream") is torch.backends.cuda.is_built()
