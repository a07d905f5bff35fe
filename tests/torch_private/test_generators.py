"""Random number generators."""

import pytest
import torch
import torch.utils.checkpoint

from autoac import torch_private


def test_default_generator():
    generator = torch_private.default_generator(torch.device("cpu"))
    assert isinstance(generator, torch.Generator)
    state = generator.get_state()
    torch.rand(2)
    assert not torch.equal(generator.get_state(), state)
    assert torch.equal(generator.get_state(), torch.get_rng_state())
    generator.set_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert state.nbytes == 5056  # what one stashed state takes, see `CPU_RANDOM_STATE_BYTES`


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_default_generator_of_cuda():
    for device in (torch.device("cuda"), torch.device("cuda", 0)):
        generator = torch_private.default_generator(device)
        state = generator.get_state()
        torch.rand(2, device="cuda")
        assert not torch.equal(generator.get_state(), state)
        assert torch.equal(generator.get_state(), torch.cuda.get_rng_state(0))


@pytest.mark.parametrize("name", ["rand", "randn", "rand_like", "randn_like", "randperm"])
def test_overload_with_generator(name: str):
    packet = getattr(torch.ops.aten, name)
    taking = torch_private.overload_with_generator(packet.default)
    given = (torch.ones(3),) if name.endswith("like") else (3,) if name == "randperm" else ([3],)
    torch.manual_seed(3)
    expected = packet.default(*given)
    assert torch.equal(taking(*given, generator=torch.Generator().manual_seed(3)), expected)


def test_no_overload_with_generator():
    assert torch_private.overload_with_generator(torch.ops.aten.native_dropout.default) is None
    assert torch_private.overload_with_generator(torch.ops.aten.bernoulli.p) is None
