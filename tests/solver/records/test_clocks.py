"""Two clocks: the closed form against the recursion, and against a device with a thread of its own."""

import dataclasses
import queue
import random
import threading

import numpy as np
import pytest

from autoac_solver.records.clocks import longest_path, run
from tests.solver.profiles import two_blocks

Piece = tuple[float, float, bool]


def end_by_definition(pieces: list[Piece]) -> float:
    launched = done = 0.0
    for host_s, device_s, waits in pieces:
        launched += host_s
        done = max(done, launched) + device_s
        if waits:
            launched = max(launched, done)
    return max(launched, done)


def random_pieces(seed: int) -> list[Piece]:
    dice = random.Random(seed)
    kinds = dice.choice([(1.0, 1.0), (1.0, 5.0), (5.0, 1.0)])  # balanced, bound by the device, by the host
    waits = dice.choice([0.0, 0.1, 0.5])
    return [
        (
            dice.choice([0.0, dice.uniform(0, kinds[0])]),
            dice.choice([0.0, dice.uniform(0, kinds[1])]),
            dice.random() < waits,
        )
        for _ in range(dice.randint(0, 40))
    ]


def columns(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([piece[0] for piece in pieces]),
        np.array([piece[1] for piece in pieces]),
        np.array([piece[2] for piece in pieces], dtype=bool),
    )


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_random_sequences(first: int):
    for seed in range(first, first + 100):
        pieces = random_pieces(seed)
        lanes = run(*columns(pieces))
        assert lanes.end_s == pytest.approx(end_by_definition(pieces), abs=1e-12)
        assert lanes.host_s == pytest.approx(sum(piece[0] for piece in pieces))
        assert lanes.device_s == pytest.approx(sum(piece[1] for piece in pieces))
        assert max(lanes.host_s, lanes.device_s) <= lanes.end_s + 1e-12


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_longest_path_adds_up_to_the_end_and_no_change_costs_less_than_it_says(first: int):
    for seed in range(first, first + 100):
        pieces = random_pieces(seed)
        host_s, device_s, waits = columns(pieces)
        on_host, on_device = longest_path(host_s, device_s, waits)
        end_s = end_by_definition(pieces)
        assert host_s[on_host].sum() + device_s[on_device].sum() == pytest.approx(end_s, abs=1e-12)
        dice = np.random.default_rng(seed)
        for _ in range(5):
            more_host, more_device = dice.uniform(0, 1, len(pieces)), dice.uniform(0, 1, len(pieces))
            slower = [
                (h + more_h, d + more_d, wait)
                for (h, d, wait), more_h, more_d in zip(pieces, more_host, more_device, strict=True)
            ]
            promised = more_host[on_host].sum() + more_device[on_device].sum()
            assert end_by_definition(slower) >= end_s + promised - 1e-9


class FakeDevice:
    """Runs kernels in order on a thread of its own, by a clock that does not tick by itself."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        self.queue: queue.Queue[tuple[float, float, threading.Event] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def launch(self, at_s: float, kernel_s: float) -> threading.Event:
        done = threading.Event()
        self.queue.put((at_s, kernel_s, done))
        return done

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def _work(self) -> None:
        while (kernel := self.queue.get()) is not None:
            launched_s, kernel_s, done = kernel
            self.clock_s = max(self.clock_s, launched_s) + kernel_s
            done.set()


@pytest.mark.parametrize("seed", range(20))
def test_a_device_with_a_thread_of_its_own(seed: int):
    """The host goes on while kernels run, and reads the device's clock only after it has waited for it."""
    pieces, device, host_clock_s = random_pieces(seed), FakeDevice(), 0.0
    for host_s, device_s, waits in pieces:
        host_clock_s += host_s
        done = device.launch(host_clock_s, device_s)
        if waits:
            assert done.wait(timeout=10)
            host_clock_s = max(host_clock_s, device.clock_s)
    device.close()
    assert run(*columns(pieces)).end_s == pytest.approx(max(host_clock_s, device.clock_s), abs=1e-12)


def test_a_profile_with_one_clock_adds_up():
    profile = two_blocks()
    assert not profile.has_two_clocks
    assert profile.step_s == 15.0


def test_a_profile_with_two_clocks():
    """Launches of 3 s: forward's 5 ops take 15 s of host, of which the device works 7."""
    tape = tuple(dataclasses.replace(op, host_s=3.0) for op in two_blocks().tape)
    profile = dataclasses.replace(two_blocks(), tape=tape)
    assert profile.has_two_clocks
    assert profile.step_s == 9 * 3.0 + 2.0  # the last op still has to run
    assert profile.lanes.idle_share == pytest.approx(1 - 15 / 29)
    waiting = dataclasses.replace(tape[2], waits=True)
    waits = dataclasses.replace(profile, tape=(*tape[:2], waiting, *tape[3:]))
    assert waits.step_s == 9 * 3.0 + 2.0 + 2.0  # the host stands still for an op of 2 s
