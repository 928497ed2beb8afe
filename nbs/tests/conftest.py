"""Tests of trainers run twice: with decisions taken on the host, and with those of a GPU, forced on the CPU."""
import pytest

from medlab.step.device import DeviceDecisions
from medlab.train import trainer

BOTH = "test_trainer", "test_guards", "test_lr", "test_restoration", "test_segmentation"  # modules


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
