"""Parts of one storage: what is said to be disjoint, is."""

import itertools
import random

import torch

from autoac.ops.geometry import certainly_disjoint, geometry_of


def elements(part: torch.Tensor) -> set[int]:
    """Places in the storage."""
    places = itertools.product(*(range(size) for size in part.shape))
    return {int(part.storage_offset()) + sum(map(int.__mul__, place, part.stride())) for place in places}


def random_part(whole: torch.Tensor, rng: random.Random) -> torch.Tensor:
    for d in range(whole.dim()):
        start = rng.randrange(whole.shape[d])
        whole = whole.narrow(d, start, rng.randint(1, whole.shape[d] - start))
    for d in reversed(range(whole.dim())):
        if whole.shape[d] == 1 and rng.random() < 0.5:
            whole = whole.squeeze(d)
    return whole


def test_boxes_cut_from_one_tensor():
    rng = random.Random(1)
    found = {True: 0, False: 0}
    for _ in range(2000):
        whole = torch.empty(4, 5, 3).permute(rng.sample(range(3), 3))
        a, b = random_part(whole, rng), random_part(whole, rng)
        disjoint = certainly_disjoint(geometry_of(a), geometry_of(b))
        assert disjoint == (not elements(a) & elements(b))
        found[disjoint] += 1
    assert min(found.values()) > 500


def random_view(rng: random.Random) -> torch.Tensor:
    size, stride = zip(
        *((rng.randint(1, 4), rng.randint(0, 6)) for _ in range(rng.randint(1, 3))), strict=True
    )
    return torch.empty(80).as_strided(size, stride, rng.randrange(20))


def test_any_two_views():
    """It may not know, but must not be wrong."""
    rng = random.Random(2)
    found = 0
    for _ in range(5000):
        a, b = (random_view(rng) for _ in range(2))
        if certainly_disjoint(geometry_of(a), geometry_of(b)):
            assert not elements(a) & elements(b)
            found += 1
    assert found > 500
