"""Private interfaces of torch.distributed, in one process that is rank 0 of a job of its own or of torch's fake one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import torch_private
from autoac_solver.records.errors import ProfilingError


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=cast("Any", dist).HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_tensor_has_a_part_here():
    with torch_private.fake_ranks(4):
        model: Any = fully_shard(nn.Linear(8, 8))
        assert torch_private.is_sharded_type(type(model.weight))
        assert not torch_private.is_sharded_type(torch.Tensor)
        assert isinstance(model.weight, DTensor)
        assert torch_private.local_part(model.weight).shape == (2, 8)
        plain = torch.ones(2)
        assert torch_private.local_part(plain) is plain
    assert not dist.is_initialized()


def test_parameters_that_wait_in_host_memory():
    with torch_private.fake_ranks(2):
        model: Any = fully_shard(nn.Linear(8, 8))
        for tensor in (model.weight, torch.ones(2), torch.ones(2, device="meta")):
            assert torch_private.used_on(tensor) == tensor.device
        model.weight.device_mesh._device_type = "meta"  # as on a GPU, with the shard on the CPU
        with pytest.raises(RuntimeError, match="meta"):  # which has no module that knows the current device
            torch_private.used_on(model.weight)


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_copies_between_a_device_and_the_host_that_are_one(in_host_memory: bool):
    targets: list[str] = []
    policy = CPUOffloadPolicy(pin_memory=False) if in_host_memory else OffloadPolicy()

    @contextmanager
    def to_host() -> Iterator[None]:
        targets.append("host")
        yield

    with torch_private.fake_ranks(2), Copies() as copies:
        model: Any = fully_shard(nn.Linear(8, 8), offload_policy=policy)
        with torch_private.offloads_copied(to_host):
            model(torch.ones(1, 8)).sum().backward()
        # Of weight and bias: a copy to the device, and one of the gradient to the host.
        assert (copies.count, targets) == ((4, ["host", "host"]) if in_host_memory else (0, []))
        model(torch.ones(1, 8)).sum().backward()
        assert copies.count == (4 if in_host_memory else 0)


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_units_have_a_class_of_their_own():
    with torch_private.fake_ranks(2):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        fully_shard(model[0])
        assert torch_private.is_unit(model[0])
        assert not torch_private.is_unit(model)
        assert type(model[0]) is not nn.Linear
        assert torch_private.own_class(model[0]) is nn.Linear
        assert torch_private.own_class(model) is nn.Sequential


def test_flat_sharding_is_told_from_units():
    from torch.distributed.fsdp import FullyShardedDataParallel

    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    assert torch_private.is_fsdp1(flat)
    with torch_private.fake_ranks(2):
        assert not torch_private.is_fsdp1(cast("nn.Module", fully_shard(nn.Linear(4, 4))))


def test_units_are_set_up_and_reset():
    with torch_private.fake_ranks(2):
        model: Any = fully_shard(
            nn.Sequential(cast("nn.Module", fully_shard(nn.Linear(4, 4))), nn.Linear(4, 4))
        )
        hooks = len(model[0]._state_dict_pre_hooks)
        torch_private.set_units_up(model)
        assert len(model[0]._state_dict_pre_hooks) > hooks  # what a step that is taken back would lose
        loss = model(torch.ones(1, 4)).sum()
        assert not isinstance(model[1].weight, DTensor)
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        torch_private.reset_units(model)
        assert isinstance(model[1].weight, DTensor)
        model(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.grad is not None


def test_a_rank_is_no_fake_one(alone: None):
    with pytest.raises(ProfilingError, match="this process is a rank already"), torch_private.fake_ranks(2):
        pass


def test_ddp(alone: None):
    model = nn.Linear(2, 2)
    assert torch_private.ddp_around(model) is None
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    assert torch_private.is_ddp(ddp)
    assert not torch_private.is_ddp(model)
    assert torch_private.ddp_around(model) is ddp
    assert torch_private.bucket_options(ddp) == (True, list(model.parameters()))
    assert torch_private.counts_backwards(ddp)
    ddp(torch.ones(1, 2)).sum().backward()
    assert not torch_private.counts_backwards(ddp)


def test_the_store(alone: None):
    store = torch_private.default_store()
    store.set("a", "b")
    assert store.check(["a"])
    assert not store.check(["c"])
    assert store.compare_set("a", "", "d") == b"b"


def test_what_a_group_was_asked_for_is_counted(alone: None):
    """tests/parallel/meeting_worker.py has groups of several ranks."""
    group = dist.new_group([0])
    before = torch_private.collectives_asked_for()
    dist.all_reduce(torch.ones(1), group=group)
    after = torch_private.collectives_asked_for()
    assert set(before) == set(after) == {dist.group.WORLD, group}
    assert [found for found in after if after[found] != before[found]] == [group]


def test_fake_ranks_are_not_there(alone: None):
    assert not torch_private.has_other_ranks()
    dist.destroy_process_group()
    with torch_private.fake_ranks(2):
        assert torch_private.is_one_of_several_ranks()
        assert torch_private.has_process_group()
        assert not torch_private.has_other_ranks()
    dist.init_process_group("gloo", store=cast("Any", dist).HashStore(), rank=0, world_size=1)


def test_connections_are_closed_without_other_ranks(alone: None):
    """tests/parallel/killed.py closes real ones, on which a rank waits."""
    torch_private.close_connections()
    dist.barrier()


def test_the_end_of_another_ranks_process_is_told_from_other_errors():
    """As gloo says it; tests/parallel/killed.py has real ones."""
    gone = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    assert torch_private.lost_a_rank(RuntimeError(gone))
    assert torch_private.lost_a_rank(dist.DistBackendError("NCCL error: remote process exited"))
    assert not torch_private.lost_a_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not torch_private.lost_a_rank(ValueError(gone))


def test_resizes_are_seen():
    seen, own = [], vars(torch.UntypedStorage).get("resize_")  # torch's MemTracker leaves one there
    tensor = torch.ones(4)
    with torch_private.resizes_seen(
        lambda storage, before, after: seen.append((storage.nbytes(), before, after))
    ):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
    tensor.untyped_storage().resize_(0)
    assert seen == [(0, 16, 0), (16, 0, 16)]
    assert vars(torch.UntypedStorage).get("resize_") is own


def test_sharded_tensors_and_the_parts_of_them_that_are_here():
    with torch_private.fake_ranks(4):
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "split"))["split"]
        whole: Any = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        assert torch_private.sharded_like(torch.ones(1)) is None
        like = torch_private.sharded_like(whole)
        assert like is not None
        made: Any = like(torch.zeros(2, 3))
        assert (made.shape, made.placements, made.device_mesh) == (whole.shape, whole.placements, mesh)
        assert torch.equal(torch_private.local_part(made), torch.zeros(2, 3))
        layer = torch.nn.Linear(3, 4)
        assert torch_private.ranks_of(layer) is None
        layer.weight = torch.nn.Parameter(whole)
        assert torch_private.ranks_of(layer) == (0, 1)
        awaited = AsyncCollectiveTensor(torch.ones(3))
        assert torch_private.is_sharded_type(AsyncCollectiveTensor)
        assert torch_private.local_part(awaited) is awaited.elem
        assert torch_private.sharded_like(awaited) is None
        assert torch_private.is_wait(torch.ops._c10d_functional.wait_tensor.default)
        assert not torch_private.is_wait(torch.ops.aten.mm.default)
        assert torch_private.is_wrap(torch.ops._c10d_functional._wrap_tensor_autograd.default)
        assert not torch_private.is_wrap(torch.ops._c10d_functional.wait_tensor.default)
        name = mesh.get_group().group_name
        assert torch_private.ranks_of_group(name) == 2
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        assert torch_private.waited_for(gather) is torch_private.waited_for(gather)
        assert torch_private.waited_for(gather)(torch.ones(3), 2, name).shape == (6,)
        assert torch_private.is_one_of_several_ranks()
    assert not torch_private.is_one_of_several_ranks()


def test_selective_checkpointing_sees_the_local_parts():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((str(op), [type(arg) for arg in args]))
        return CheckpointPolicy.MUST_SAVE

    with torch_private.fake_ranks(2):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        whole = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        for mode in create_selective_checkpoint_contexts(policy):
            with torch_private.on_local_parts(mode):
                result: Any = whole.sin()
                torch.ops._c10d_functional.wait_tensor(torch.ones(1))
            assert torch.equal(result.to_local(), torch.ones(2, 3).sin())
    assert seen == [("aten.sin.default", [torch.Tensor]), ("aten.ones.default", [list])]


def test_whether_ops_run_on_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not torch_private.on_fake_tensors()
    with FakeTensorMode():
        assert torch_private.on_fake_tensors()


def test_gradients_that_a_unit_has_not_reduced():
    with torch_private.fake_ranks(2):
        model: Any = fully_shard(nn.Linear(8, 8))
        assert not torch_private.holds_unreduced_gradients(model)
        for reduces in (False, True):
            model.set_requires_gradient_sync(reduces)
            model(torch.randn(4, 8)).sum().backward()
            assert torch_private.holds_unreduced_gradients(model) is not reduces


def test_meshes_are_joined_in_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch_private.fake_ranks(4):
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "split"))
        before = vars(DeviceMesh)["_concatenate"]
        with FakeTensorMode(), torch_private.meshes_joined_for_real():
            joined: Any = cast("Any", DeviceMesh)._concatenate([mesh["shard"], mesh["split"]])
        assert joined.mesh_dim_names == ("shard", "split")
        assert vars(DeviceMesh)["_concatenate"] is before


def test_threads_of_gloo_rest_once_they_have_released_what_they_held(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))  # a thread names itself after it has started
        threads = torch_private.gloo_threads()
        assert threads
        for _ in range(20):
            dist.all_reduce(given := torch.ones(1))
            torch_private.wait_for_gloo(threads)
            assert cast("Any", given)._use_count() == 1
        waits = collectives.wait_tensor, dist.Work.wait
        for _ in range(20):
            with torch_private.gloo_unhurried(threads):
                work = dist.all_reduce(given := torch.ones(1), async_op=True)
                assert work is not None
                work.wait()
                del work
                assert cast("Any", given)._use_count() == 1
        assert (collectives.wait_tensor, dist.Work.wait) == waits
    finally:
        dist.destroy_process_group()
    torch_private.wait_for_gloo(threads)  # they have ended


def test_sharded_tensors_keep_their_own_dispatch_where_no_mode_is():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with torch_private.fake_ranks(2):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        whole = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        with Refuses(), torch_private.without_dispatch_modes():
            made: Any = whole + whole
    assert torch.equal(made.to_local(), 2 * torch.ones(2, 3))
