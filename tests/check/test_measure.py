"""The ruler, held against numbers worked out by hand."""

import gc
import random
from functools import partial

import pytest
import torch
from torch import nn

from autoac.measure import Measurement, in_turn, measure_peak, unique_storage_bytes

FLOAT = 4  # bytes of a float32


def peak_and_end(measurement: Measurement) -> tuple[int, int]:
    return measurement.peak_above_start_bytes, measurement.end_above_start_bytes


def test_nothing_takes_nothing():
    measurement = measure_peak(lambda: "done")
    assert peak_and_end(measurement) == (0, 0)
    assert measurement.result == "done"
    assert measurement.timeline is not None
    assert len(measurement.timeline.time_s) == 0


def test_result_is_part_of_the_end():
    measurement = measure_peak(lambda: torch.empty(1000))
    assert peak_and_end(measurement) == (1000 * FLOAT, 1000 * FLOAT)
    assert measurement.result.shape == (1000,)


def test_sequence_of_allocations_and_frees():
    def run() -> None:
        a = torch.empty(1024)
        b = a + a
        a.add_(b)  # in place: nothing new
        del a
        c = torch.empty(100)
        del b, c

    assert peak_and_end(measure_peak(run)) == (2048 * FLOAT, 0)


def test_timeline_has_every_change():
    def run() -> None:
        a = torch.empty(10)
        b = torch.empty(20)
        del a
        c = torch.empty(5)
        del b, c

    timeline = measure_peak(run).timeline
    assert timeline is not None
    assert timeline.live_above_start_bytes.tolist() == [n * FLOAT for n in (10, 30, 20, 25, 5, 0)]
    assert timeline.time_s[0] == 0
    assert (timeline.time_s[1:] >= timeline.time_s[:-1]).all()


def test_views_are_free():
    x = torch.empty(4, 256)
    assert peak_and_end(measure_peak(lambda: x.t()[1:].reshape(255, 2, 2)[:, 0])) == (0, 0)


def test_backward_of_a_linear_layer():
    layer = nn.Linear(30, 20, bias=False)
    x = torch.randn(7, 30)

    # Out (7 x 20), its gradient is given (7 x 20, from before), the weight's gradient (20 x 30) stays.
    grad_out = torch.ones(7, 20)
    measurement = measure_peak(lambda: layer(x).backward(grad_out))
    assert peak_and_end(measurement) == ((7 * 20 + 20 * 30) * FLOAT, 20 * 30 * FLOAT)


def test_workspace_inside_an_operator_counts():
    conv = nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn(4, 8, 32, 32)
    with torch.no_grad():
        conv(x)
        measurement = measure_peak(lambda: conv(x))
    out_bytes = 4 * 8 * 32 * 32 * FLOAT
    assert measurement.end_above_start_bytes == out_bytes
    assert measurement.peak_above_start_bytes >= out_bytes
    timeline = measurement.timeline
    assert timeline is not None
    assert timeline.live_above_start_bytes.max() == measurement.peak_above_start_bytes

    # A sort's workspace is certain: values and indices come out, and it does not get by without more.
    y = torch.randn(1000, 3).t()
    sort = measure_peak(lambda: torch.sort(y, dim=1))
    assert sort.peak_above_start_bytes > sort.end_above_start_bytes == 3000 * (FLOAT + 8)


def test_death_of_an_earlier_tensor_counts():
    earlier = [torch.empty(5000), torch.empty(5000)]

    def run() -> torch.Tensor:
        earlier.pop()
        later = torch.empty(6000)
        earlier.pop()
        return later

    assert peak_and_end(measure_peak(run)) == (1000 * FLOAT, -4000 * FLOAT)


def test_death_of_an_earlier_gradient_counts():
    weight = nn.Parameter(torch.randn(1000))
    (weight * weight).sum().backward()

    def run() -> None:
        weight.grad = None

    assert peak_and_end(measure_peak(run)) == (0, -1000 * FLOAT)


def test_a_view_that_autograd_refuses_to_look_at_is_passed_over():
    """As DDP and FSDP2 leave behind: `is_leaf` and `grad` of such a view raise."""
    parts = torch.ones(4, requires_grad=True).mul(1).split(2)
    with torch.no_grad():
        parts[0]._base.add_(1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="multiple views"):
        _ = parts[0].is_leaf
    assert measure_peak(lambda: torch.ones(100).sum() is None).peak_above_start_bytes >= 400


def test_earlier_storage_dies_with_its_last_view():
    owner = [torch.empty(1000)]
    owner.append(owner[0][:10])

    assert peak_and_end(measure_peak(lambda: owner.pop(0) is None)) == (0, 0)
    assert peak_and_end(measure_peak(owner.clear)) == (0, -1000 * FLOAT)


def test_address_known_from_an_earlier_measurement():
    # Rule 2 of NOTE [ What the profiler does not say ]: the profiler knows the address with another size.
    kept = measure_peak(lambda: [torch.empty(5000) for _ in range(20)]).result
    addresses = {t.data_ptr() for t in kept}
    kept.clear()
    again = [torch.empty(4992) for _ in range(20)]
    if not addresses & {t.data_ptr() for t in again}:
        pytest.skip("the allocator used none of the addresses again")

    assert peak_and_end(measure_peak(again.clear)) == (0, -20 * 4992 * FLOAT)


def test_garbage_is_collected_before_the_start():
    cycle: list = [torch.empty(100_000)]
    cycle.append(cycle)
    del cycle

    assert peak_and_end(measure_peak(gc.collect)) == (0, 0)


def test_no_event_is_lost_in_a_long_run():
    a = torch.empty(100)

    def run() -> list[torch.Tensor]:
        kept = []
        for i in range(50_000):
            b = a + a
            if i % 10 == 0:
                kept.append(b)
        return kept

    measurement = measure_peak(run)
    # At the end 5,000 are kept, the last but one is still called b, and the last is being written.
    assert peak_and_end(measurement) == (5002 * 100 * FLOAT, 5000 * 100 * FLOAT)
    assert measurement.timeline is not None
    assert len(measurement.timeline.time_s) == 50_000 + 45_000


def test_twice_the_same_to_the_byte():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    x = torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()

    step()
    measured = set()
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        measured.add(peak_and_end(measure_peak(step)))
    assert len(measured) == 1
    ((_, end_bytes),) = measured
    assert end_bytes == unique_storage_bytes(model.parameters())


def test_an_exception_passes_and_leaves_the_ruler_usable():
    def fails() -> None:
        torch.empty(10)
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        measure_peak(fails)
    assert peak_and_end(measure_peak(lambda: torch.empty(10))) == (10 * FLOAT, 10 * FLOAT)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match=r"cannot measure memory on 'meta': only on 'cpu' and 'cuda'"):
        measure_peak(lambda: None, "meta")


def test_cuda_that_is_not_there_is_refused_before_anything_runs():
    index = torch.cuda.device_count()
    with pytest.raises(
        ValueError, match=rf"cannot measure memory on 'cuda:{index}': torch finds {index} CUDA devices"
    ):
        measure_peak(lambda: pytest.fail("it was run"), f"cuda:{index}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_in_blocks_of_512_bytes():
    def run() -> torch.Tensor:
        a = torch.empty(1000, device="cuda")  # 4,000 bytes in 8 blocks
        b = torch.empty(100, device="cuda")  # 400 bytes in 1
        del a
        return b

    assert peak_and_end(measure_peak(run, "cuda")) == (9 * 512, 512)


def test_unique_storage_bytes():
    a = torch.empty(10)
    b = torch.empty(6, dtype=torch.float64)
    assert unique_storage_bytes([]) == 0
    assert unique_storage_bytes([a, a[2:4], a.view(2, 5), b]) == 10 * 4 + 6 * 8
    assert unique_storage_bytes([a[2:4]]) == 10 * 4
    meta = [torch.empty(10, device="meta"), torch.empty(10, device="meta")]
    assert unique_storage_bytes(meta) == 2 * 10 * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_unique_storage_bytes_of_sparse_tensors():
    sparse = torch.eye(5).to_sparse()
    assert unique_storage_bytes([sparse]) == 2 * 5 * 8 + 5 * 4
    with pytest.raises(ValueError, match=r"layout torch\.sparse_csr"):
        unique_storage_bytes([torch.eye(5).to_sparse_csr()])


def test_runs_take_turns():
    log: list[str] = []

    def run(name: str) -> int:
        log.append(name)
        return len(log)

    rounds: list[int] = []
    found = in_turn({name: partial(run, name) for name in "abc"}, 3, after_round=rounds.append)
    assert found == {"a": [1, 4, 7], "b": [2, 5, 8], "c": [3, 6, 9]}
    assert rounds == [1, 2, 3]
    log.clear()
    found = in_turn({name: partial(run, name) for name in "abcde"}, 20, shuffle=random.Random(1))
    assert all(len(places) == 20 for places in found.values())
    orders = {"".join(log[start : start + 5]) for start in range(0, 100, 5)}
    assert len(orders) > 10
    assert {"".join(sorted(order)) for order in orders} == {"abcde"}


def test_a_measurement_prints_its_bytes_and_not_its_result():
    measured = measure_peak(lambda: torch.ones(100, 100))
    assert repr(measured) == (
        "Measurement(peak_above_start_bytes=40000, end_above_start_bytes=40000, result: Tensor)"
    )
