"""Context parallelism on CPU: torch's own ring attention, with the CPU's kernel, for which torch has no ring.

What torch adds for CUDA's kernels is added for the CPU's: the ring around the kernel, and how its arguments are split.
"""

# pyright: reportPrivateImportUsage=false
# (the ring is a private name of torch)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy, register_op_strategy
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SEQUENCE = 2


def _ring(mesh: Any, query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False) -> Any:
    def kernel(query: Any, key: Any, value: Any, **names: Any) -> tuple[torch.Tensor, ...]:
        return ATTENTION(query, key, value, dropout, names["is_causal"])

    return _attention._templated_ring_attention(
        mesh.get_group(), SEQUENCE, kernel, query=query, key=key, value=value, is_causal=is_causal
    )


def _ring_backward(mesh: Any, grad_out: Any, *saved: Any) -> Any:
    query, key, value, out, logsumexp, dropout, is_causal = saved

    def kernel(query: Any, key: Any, value: Any, **names: Any) -> tuple[torch.Tensor, ...]:
        saved = query, key, value, names["out"], names["logsumexp"]
        return BACKWARD(names["grad_out"], *saved, dropout, names["is_causal"])

    return _attention._templated_ring_attention_backward(
        *(mesh.get_group(), SEQUENCE, kernel, grad_out, "grad_out"),
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=is_causal,
    )


def _at_once(exchange: Callable[..., None]) -> Callable[..., None]:
    def run(rotater: Any, buffer: torch.Tensor) -> None:
        exchange(rotater, buffer)
        for name in ("_buffer", "_aggregated_buffer"):
            if (received := getattr(rotater, name, None)) is not None:
                setattr(rotater, name, _attention._maybe_wait(received))

    return run


def enable_on_cpu() -> None:
    """From now on, `context_parallel` splits attention on CPU.

    Its exchanges are over before attention goes on: gloo has a buffer of its own for each until then, and how long that
    lives would be by chance.
    """
    for rotater in (_attention._AllGatherRotater, _attention._AllToAllRotater):
        rotater.exchange_buffers = _at_once(rotater.exchange_buffers)
    dispatcher: Any = DTensor._op_dispatcher

    def with_ring(ring: Callable[..., Any]) -> Callable[..., Any]:
        def handler(op: Any, args: Any, kwargs: Any) -> Any:
            info = dispatcher.unwrap_to_op_info(op, args, kwargs)
            dispatcher.sharding_propagator.propagate(info)
            return dispatcher.wrap(
                ring(info.compute_mesh, *info.local_args), info.output_sharding.output_spec
            )

        return handler

    def split(outputs: int, inputs: int) -> Callable[[Any], Any]:
        places: Any = [[Shard(SEQUENCE)] * (outputs + inputs)]
        return lambda schema: expand_to_full_mesh_op_strategy(
            schema.get_mesh_from_args(validate=False), schema, places, input_index=outputs
        )

    _attention.custom_ops.update({ATTENTION: with_ring(_ring), BACKWARD: with_ring(_ring_backward)})
    register_op_strategy(ATTENTION, schema_info=RuntimeSchemaInfo(3))(split(2, 3))
    register_op_strategy(BACKWARD, schema_info=RuntimeSchemaInfo(6))(split(3, 6))


def step_of(
    model: Any, mesh: DeviceMesh, x: torch.Tensor, wanted: torch.Tensor, loss: Any
) -> Callable[[], None]:
    """A step in which each rank has a part of the sequence. The batch is that of all ranks."""

    def step() -> None:
        own = [x.clone(), wanted.clone()]  # they are cut in place
        with context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 1]):
            loss(model(own[0]), own[1]).backward()

    return step
