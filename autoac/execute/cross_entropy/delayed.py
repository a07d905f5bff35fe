"""Casts of half-precision logits to float32 that are left to the loss, which can make them by the chunk.

NOTE [ Delayed casts ]
  1. The losses of transformers' language models call `logits.float()`, view the result as rows, and give it to torch's
     cross entropy. Under autocast, or for a model in half precision, that copy is twice as large as the logits.
  2. In these functions, and where the cross entropy is lean, `.float()` makes no copy: it returns another tensor on the
     same logits. `LeanLosses` knows that tensor and its views, and their cross entropy makes the cast.
  3. The result would differ from torch's if the function did anything else with the float32 logits. So the functions
     are known by the names that their code uses, and the cross entropy must be torch's: another version of them, or
     another loss put in its place (Liger Kernel does that), gets float32 logits.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType, FrameType
from typing import Any

import torch

from autoac.torch_private import torchs_cross_entropy

_MODULE = "transformers.loss.loss_utils"
_USED = {
    "ForCausalLMLoss": "float nn functional pad contiguous view to device fixed_cross_entropy",
    "ForMaskedLMLoss": "float view to device fixed_cross_entropy",
    "fixed_cross_entropy": "nn functional cross_entropy torch is_tensor to device",
}
"""Names that the code of each function uses (transformers 5.24, `loss/loss_utils.py`)."""


class Delayed:
    """Half-precision logits that stand for float32 ones."""

    def __init__(self) -> None:
        # Weak, so that a forward with several losses frees the logits of each before the next one.
        self._logits: list[weakref.ref[torch.Tensor]] = []

    def __contains__(self, tensor: Any) -> bool:
        return any(logits() is tensor for logits in self._logits)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor, and return it."""
        self._logits = [logits for logits in self._logits if logits() is not None]
        self._logits.append(weakref.ref(tensor))
        return tensor


def may_delay(caller: FrameType) -> bool:
    """Whether the code that calls `.float()` may be given the logits as they are."""
    module = sys.modules.get(_MODULE)
    if module is None or caller.f_globals is not vars(module):
        return False
    codes = {name: getattr(vars(module).get(name), "__code__", None) for name in _USED}
    is_known = all(
        isinstance(code, CodeType) and code.co_names == tuple(_USED[name].split())
        for name, code in codes.items()
    )
    if not is_known or caller.f_code not in codes.values():
        return False
    return module.nn.functional.cross_entropy is torchs_cross_entropy
