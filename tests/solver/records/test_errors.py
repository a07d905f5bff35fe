import pickle

from autoac_solver import InfeasibleBudgetError
from autoac_solver.records.errors import OtherFileError


def test_message_without_what_only_the_caller_knows():
    error = InfeasibleBudgetError(10 * 10**9, 12_300_000_123)
    assert str(error) == (
        "No plan fits a budget of 10000000000 bytes (10 GB = 9.313 GiB): the least possible peak is "
        "12300000123 bytes (12.3 GB = 11.46 GiB). Ask for budget=12300000123 or more."
    )


def test_message_says_when_the_minimum_is_not_proved():
    error = InfeasibleBudgetError(1000, 2000, proven=False)
    assert str(error) == (
        "No plan for a budget of 1000 bytes (1 KB = 0.9766 KiB) was found in the time given; the least peak found is "
        "2000 bytes (2 KB = 1.953 KiB), and a lower one was not ruled out. Ask for budget=2000 or more, or give "
        "more time (time_limit_s)."
    )


def test_message_with_the_peak_explained():
    error = InfeasibleBudgetError(1000, 2000)
    error.where = "aten.mm in model.layers.3, backward"
    error.holders = [("Parameter", "model.embed", 1500), ("Temp", "", 500)]
    error.suggestions = ("a smaller batch", "regions one level finer")
    assert str(error).splitlines()[1:] == [
        "The peak of that plan lies at aten.mm in model.layers.3, backward.",
        "It is held by:",
        "  Parameter    model.embed  1.5 KB = 1.465 KiB",
        "  Temp         outside of all submodules  500 bytes",
        "What would lower it:",
        "  - a smaller batch",
        "  - regions one level finer",
    ]


def test_survives_pickling():
    error = InfeasibleBudgetError(1000, 2000, False, (True, False), 7)
    error.where = "somewhere"
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_an_error_about_another_file_can_be_pickled():
    error = pickle.loads(pickle.dumps(OtherFileError("it is a plan", "autoac.plan", "autoac.profile")))
    assert (str(error), error.found, error.expected) == ("it is a plan", "autoac.plan", "autoac.profile")
