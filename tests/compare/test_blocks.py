"""Which modules count as the blocks that people checkpoint one by one."""

from __future__ import annotations

import pytest
from torch import nn

from autoac.compare.blocks import find_blocks
from autoac_solver.records.errors import ProfilingError
from tests.small_models import make


class Block(nn.Module):
    def __init__(self, width: int = 8, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Module()
        self.mlp.up = nn.Linear(width, width)
        self.mlp.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x):
        return x


class Expert(Block):
    def __init__(self) -> None:
        super().__init__(width=64)


class OtherBlock(Block):
    pass


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.downsample = nn.Linear(width, 2 * width)

    def forward(self, x):
        return x


class Net(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}" for index in range(count)]


def test_a_list_of_equal_blocks() -> None:
    assert list(find_blocks(make(blocks=4))) == names("blocks", 4)


def test_the_largest_list_counts_and_small_ones_do_not() -> None:
    model = Net(
        heads=nn.ModuleList(Expert() for _ in range(2)),
        layers=nn.ModuleList(OtherBlock(256) for _ in range(6)),
    )
    assert list(find_blocks(model)) == names("layers", 6)


def test_an_encoder_and_a_decoder_of_different_classes() -> None:
    model = Net(
        encoder=nn.ModuleList(Block() for _ in range(3)),
        decoder=nn.ModuleList(OtherBlock() for _ in range(2)),
    )
    assert list(find_blocks(model)) == [*names("encoder", 3), *names("decoder", 2)]


def test_stages_are_gone_into_and_narrow_ones_count_too() -> None:
    model = Net(stages=nn.ModuleList([Stage(4, 2), Stage(128, 3)]))
    assert list(find_blocks(model)) == [*names("stages.0.layers", 2), *names("stages.1.layers", 3)]


def test_experts_are_not_blocks_though_they_hold_most_parameters() -> None:
    model = Net(layers=nn.ModuleList(Block(experts=8) for _ in range(3)))
    assert list(find_blocks(model)) == names("layers", 3)


def test_other_modules_in_the_list_are_passed_over() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), Block(), Block(), nn.LayerNorm(8), OtherBlock())
    assert list(find_blocks(model)) == ["1", "2"]


def test_a_model_without_blocks_and_patterns() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert find_blocks(plain) == ()
    assert list(find_blocks(make(blocks=4), ["blocks.[02]"])) == ["blocks.0", "blocks.2"]
    with pytest.raises(ProfilingError, match="matches no module"):
        find_blocks(plain, ["layers.*"])
