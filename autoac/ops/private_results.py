"""Results whose size only the kernel knows: their fake implementation returns an empty tensor in their place.

Recurrent layers of oneDNN and of cuDNN pass a private workspace to backward that is larger than all their other
results. Its size does not depend on values, so the kernel is run once on scratch memory for each distinct call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.signatures import Signature
from autoac.torch_private import DispatchMode, is_fake, schema_of, unset_fake_temporarily

PRIVATE_RESULTS = {"aten.mkldnn_rnn_layer.default": 3, "aten._cudnn_rnn.default": 3}
"""Index of the private result, by op."""

_ATTENTION = re.compile(
    r"aten\.(_scaled_dot_product_(flash|efficient|cudnn)_attention|_(flash|efficient|cudnn)_attention_forward)\."
)
_OF_ATTENTION = 2  # its output and the logarithms of its sums


def may_stay_unwritten(op: str, index: Any) -> bool:
    """Whether a result need not be written as a whole, so that its bits may differ from run to run.

    Besides private workspaces these are the seed and the offset of CUDA's attention, which its kernels leave as they
    are allocated if they drop nothing.

    Args:
        index: of the result, counted with or without those that are no tensors.

    Source: `mha_fwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if _ATTENTION.match(op):
        return isinstance(index, int) and index >= _OF_ATTENTION
    return PRIVATE_RESULTS.get(op) == index


REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
"""Errors of kernels that do not accept scratch values: an index out of range, a matrix that is not definite."""


class PrivateResults(DispatchMode):
    """Mode in which such results have their real size; entered above the fake mode and below the recording modes.

    Args:
        affordable: whether an op may be run here. The names of ops that may not, or that fail, are in `unknown`.
    """

    def __init__(self, affordable: Callable[[Signature], bool]):
        super().__init__()
        self.unknown: set[str] = set()
        self._affordable = affordable
        self._results: dict[Signature, torch.Size | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        index = PRIVATE_RESULTS.get(str(func))
        if index is None or not torch.is_grad_enabled() or not is_fake(result[index]):
            return result  # without gradients the kernel makes none
        signature = Signature.of(func, args, kwargs)
        if signature not in self._results:
            self._results[signature] = self._measured(signature, index)
        shape = self._results[signature]
        if shape is None:
            self.unknown.add(str(func))
            return result
        return (*result[:index], result[index].new_empty(shape), *result[index + 1 :])

    def _measured(self, signature: Signature, index: int) -> torch.Size | None:
        if not self._affordable(signature):
            return None
        devices = device_for(signature.device).generator_devices() if signature.device else []
        with unset_fake_temporarily(), torch.random.fork_rng(devices=devices):
            try:
                args, kwargs = signature.scratch()
                return signature.func(*args, **kwargs)[index].shape
            except REFUSALS:
                return None


_FORWARD = {"aten.mkldnn_rnn_layer_backward.default": torch.ops.aten.mkldnn_rnn_layer.default}
_OTHER_NAMES = {
    "weight0": "weight1",
    "weight1": "weight2",
    "weight2": "weight3",
    "weight3": "weight4",
    "cx_": "cx_tmp",
}


def stands_made_up_values(func: Any) -> bool:
    """Whether `scratch_call` makes arguments that the op's kernel can take.

    A kernel does not check a private workspace that another kernel made, so that has to be a real one. Nothing is known
    about kernels of other namespaces.
    """
    if func.namespace not in ("aten", "prims"):
        return False
    private = any(word in a.name for a in schema_of(func).arguments for word in ("workspace", "reserve"))
    return not private or str(func) in _FORWARD


def scratch_call(signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of this signature on fresh memory; the forward kernel makes a private workspace from the others.

    Raises:
        NotImplementedError: one of them cannot be made.
    """
    args, kwargs = signature.scratch()
    forward = _FORWARD.get(str(signature.func))
    if forward is not None:
        names = [argument.name for argument in schema_of(signature.func).arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        wanted = [_OTHER_NAMES.get(argument.name, argument.name) for argument in schema_of(forward).arguments]
        with torch.enable_grad():  # without, the kernel makes none
            made = forward(*(given[name] for name in wanted))[PRIVATE_RESULTS[str(forward)]]
        args = [made if name == "workspace" else given[name] for name in names]
        kwargs = {}
    return args, kwargs
