"""Settings for all tests; they have to be made before torch is first used."""

import gc
import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads anything
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # threads that spin while they wait take the others' cores
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's start and stop messages
os.environ.setdefault("AUTOAC_PROGRESS", "0")  # no bars in notebooks that tests run
# Under pytest-xdist the workers, and the processes that they start, share the cores among themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# pytest listens to loggers that do not propagate: torch's compiler would write its whole trace for it.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish() -> None:
    importlib.import_module("torch._dynamo")  # nearly every test needs it, and most objects are its


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Keep what was imported and what other modules have left out of the garbage collector's sight.

    The ruler collects and looks through all objects: with compiled code around it takes a hundred times as long.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fewest_rounds() -> Iterator[None]:
    """Steps of tiny models are timed in as few rounds as those of large ones: no test here needs exact times.

    The processes that tests start, such as those of the command line and of notebooks, time them in all rounds.
    """
    in_model = importlib.import_module("autoac.calibrate.in_model")
    verify = importlib.import_module("autoac.check.verify")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_ROUNDS", "_FORWARD_ROUNDS"):
            fewest, _ = getattr(in_model, name)
            patch.setattr(in_model, name, (fewest, fewest))
        patch.setattr(verify, "_TIMED_ROUNDS", 1)
        yield


@pytest.fixture(scope="session")
def device_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the second device."""
    found = importlib.import_module("tests.second_device").compiled(tmp_path_factory.mktemp("device"))
    return found or pytest.skip("needs a C++ compiler")


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have one width: pytest-xdist tells its workers another."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    """accelerate keeps the mixed precision of a process's first `Accelerator`."""
    state = pytest.importorskip("accelerate").state.AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of models so small that a second thread only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
