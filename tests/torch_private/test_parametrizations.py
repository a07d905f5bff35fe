"""The cache of parametrized parameters."""

from torch import nn
from torch.nn.utils import parametrize

from autoac import torch_private


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * 2


def test_only_while_the_cache_is_on_and_where_something_is_parametrized():
    doubled = Doubled()
    plain, around = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    parametrize.register_parametrization(around[0], "weight", doubled)
    assert not torch_private.reads_cached_parametrizations(around)
    with parametrize.cached():
        assert torch_private.reads_cached_parametrizations(around)
        assert not torch_private.reads_cached_parametrizations(plain)
        before = doubled.calls
        assert around[0].weight is around[0].weight
        assert doubled.calls == before + 1  # so the cache is what is asked about
    assert not torch_private.reads_cached_parametrizations(around)
