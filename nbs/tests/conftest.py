"""Tests of trainers run twice, with decisions taken on the host and with those of a GPU, forced on the CPU; the files
that take longest come first, and what shows once more what others show waits for MEDLAB_LONG=1."""
import os
import signal
from pathlib import Path

import pytest

from medlab.step.device import DeviceDecisions
from medlab.train import trainer

HERE = Path(__file__).parent
BOTH = "test_trainer", "test_guards", "test_lr", "test_restoration", "test_segmentation"  # modules

LONG = ("test_prove", "process/test_launch", "test_forecast", "test_same_stream", "test_cache", "test_own_recipe",
    "test_guards", "browser/test_panel", "process/test_elastic", "browser/test_proofs", "browser/test_screen",
    "process/test_workers", "test_speed", "test_deploy", "test_segmentation", "test_trainer", "test_slices", "test_cli",
    "test_mirror", "browser/test_lab", "test_export", "browser/test_kernel", "browser/test_fault",
    "browser/test_curves", "test_preflight", "test_lr", "test_codec", "test_own_data", "test_cohort", "test_vjepa",
    "test_hostile", "test_fork", "test_kill", "process/test_ranks", "browser/test_two_ranks", "test_check",
    "test_waits", "test_bench_tables", "test_background", "test_compare", "test_culprit", "process/test_outages",
    "test_child", "browser/test_viewer")  # longest first


def pytest_configure():
    "A shell has what it starts in the background ignore Ctrl-C, and so would the processes that tests interrupt."
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    "A long file that begins last would run alone, with the other process of tests idle."
    if not os.environ.get("MEDLAB_LONG"):
        wait = pytest.mark.skip(reason="shows once more what a shorter test shows; MEDLAB_LONG=1 runs it")
        for item in items:
            if item.get_closest_marker("long"): item.add_marker(wait)
    place = {f"{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.relative_to(HERE).as_posix(), len(LONG)))


def pytest_generate_tests(metafunc):
    "A test of one of these modules has a strategy, unless it says that it needs none."
    if metafunc.module.__name__.rpartition(".")[2] not in BOTH or metafunc.definition.get_closest_marker("host"): return
    metafunc.fixturenames.append("strategy")
    metafunc.parametrize("strategy", ["host", "device"], indirect=True)


@pytest.fixture
def strategy(request, monkeypatch):
    "Which strategy decides; in processes of their own trainers choose for themselves."
    if request.param == "device": monkeypatch.setattr(trainer, "decisions_for", lambda *args: DeviceDecisions)
    return request.param
