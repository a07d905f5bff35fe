"""Floating-point operations of attention, and results that need not be written as a whole."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from autoac.ops.private_results import may_stay_unwritten
from autoac.ops.signatures import Signature, flops_of

_ATEN = torch.ops.aten
FLASH, BACKWARD = (
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_backward,
)


@pytest.mark.parametrize("op", [FLASH, BACKWARD])
def test_key_heads_that_queries_share_count_in_full(op, monkeypatch: pytest.MonkeyPatch):
    """Also with formulas that refuse them, as those of torch 2.11 do."""
    query, key = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")
    gradient = (query,) if op is BACKWARD else ()
    backward = (query, query) if op is BACKWARD else ()

    def flops(heads: torch.Tensor) -> int:
        result = (query, heads, heads) if op is BACKWARD else (query,)
        return flops_of(op.default, (*gradient, query, heads, heads, *backward), {}, result)

    expected, formula = flops(query), flop_registry[op]
    assert expected

    def refusing(*args, **kwargs):
        given = args[len(gradient) :]
        assert given[0].shape[1] == given[1].shape[1], "shapes are incompatible"
        return formula(*args, **kwargs)

    assert flops(key) == expected
    monkeypatch.setitem(flop_registry, op, refusing)
    assert flops(key) == expected


def test_results_that_need_not_be_written_as_a_whole():
    """The seeds of CUDA's attention, and private workspaces; never what the model computes with."""
    for kernel in ("_scaled_dot_product_flash_attention", "_efficient_attention_forward"):
        found = [may_stay_unwritten(f"aten.{kernel}.default", i) for i in range(4)]
        assert found == [False, False, True, True]
    assert not may_stay_unwritten("aten._scaled_dot_product_flash_attention_backward.default", 2)
    assert [may_stay_unwritten("aten._cudnn_rnn.default", i) for i in (2, 3)] == [False, True]


def test_a_storage_among_the_arguments_is_told_by_its_size():
    """As of `set_` in a loader: all of its bytes in words would take minutes, and the signature would keep it alive."""
    storage = torch.empty(10**7).untyped_storage()
    signature = Signature.of(_ATEN.set_.source_Storage, (torch.empty(0), storage), {})
    assert str(signature) == "aten.set_.source_Storage(float32[0], storage of 40000000 bytes)"
    with pytest.raises(NotImplementedError):
        signature.scratch()
