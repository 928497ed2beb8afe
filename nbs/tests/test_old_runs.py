"""A run of an earlier revision, whose process was killed, is read, and goes on as that revision went on with it."""
import json
import math
import platform
import shutil
import time
from pathlib import Path

import pytest
import torch
from identity import RENAMED, weights

from medlab import Run, Trainer, recipes

FIXTURES = Path(__file__).parent / "fixtures"
TWIN = json.loads((FIXTURES / "twin.json").read_text("utf-8")) if (FIXTURES / "twin.json").exists() else {}
KEPT, KILLED, MORE = 20, 25, 10  # step of its checkpoint, its last step, steps that are made after the resume
ASKED = {4: dict(accumulate=2), 6: dict(validate=False), 8: dict(climb_after=5), 10: dict(checkpointing=True),
    12: dict(lr=1e-3, fft_loss_norm="ortho"), 16: dict(validate=True), 22: dict(accumulate=3), 23: dict(climb_after=7),
    24: dict(checkpointing=False, lr=5e-4), 28: dict(validate=False, accumulate=1)}  # step before which → knobs


def now(knobs):
    "Knobs under the names that they have now."
    new = RENAMED["knobs"]
    return {new[k] if k in new and hasattr(recipes.Restoration.Knobs, new[k]) else k: v for k, v in knobs.items()}


def machine():
    "What decides the last bits beside the code: another one rounds otherwise."
    cpu = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    vendors = [line.split(": ")[1] for line in cpu.splitlines() if line.startswith("vendor_id")]
    vendor = vendors[0] if vendors else platform.machine()
    return dict(torch=torch.__version__, capability=torch.backends.cpu.get_cpu_capability(), vendor=vendor)


def onward(path):
    "Take up the run and make some steps: digests of what it ends in, and the norm of every tensor."
    with Trainer.open(path, device="cpu", threads=1) as t:
        time.sleep(0.5)  # until the request that was pending has been heard
        t.fit(MORE, progress=False)
        return dict(weights(t), norms={k: v.double().norm().item() for k, v in t.model.state_dict().items()})


@pytest.fixture
def path(tmp_path): return shutil.copytree(FIXTURES / "run_v1", tmp_path / "run")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    "(the run directory after it has gone on, what `onward` says of it)"
    path = shutil.copytree(FIXTURES / "run_v1", tmp_path_factory.mktemp("old") / "run")
    return path, onward(path)


def test_it_is_read(path):
    run = Run(path)
    assert (run.state, run.step, [c["step"] for c in run.checkpoints()]) == ("killed", KILLED, [KEPT])
    loss, skipped, val = run.metrics("loss", "skipped", "val_psnr").values()
    assert loss.step.tolist() == list(range(1, KILLED + 1)) and all(map(math.isfinite, loss.value))
    assert skipped.step[skipped.value == 1].tolist() == [14] and val.step.tolist() == [10, 20]
    assert any("step 14 was skipped" in e.text for e in run.events()) and len(run.events()) == 13


def test_its_changes_have_the_names_of_today(path):
    changes = {c.at: c for c in Run(path).changes()}
    assert changes.keys() == ASKED.keys()
    for at, knobs in ASKED.items():
        c, wanted = changes[at], now(knobs)
        assert c.requested == wanted and c.state == ("applied" if at <= KILLED else "pending"), c
        if c.state == "applied": assert c.new == wanted and c.old.keys() == wanted.keys(), c
        assert (c.applied_step, c.verified) == ((at, True) if c.state == "applied" else (None, None)), c


def test_its_checkpoint_is_taken_up(path):
    with Trainer.open(path, device="cpu", threads=1) as t:
        held = now(dict(accumulate=2, climb_after=5, checkpointing=True, validate=True)) | dict(lr=1e-3, ema=0.9)
        assert {k: getattr(t.knobs, k) for k in held} == held
        val = t.run.metrics("val_psnr")["val_psnr"].value[-1]
        assert t.evaluate(1).metrics["psnr"] == pytest.approx(val, rel=0 if machine() == TWIN["machine"] else 1e-3)


def test_it_goes_on_in_the_same_bits(resumed):
    made = resumed[1]
    for k, norm in TWIN["norms"].items(): assert made["norms"][k] == pytest.approx(norm, rel=1e-3, abs=1e-6), k
    if machine() == TWIN["machine"]: assert {k: made[k] for k in ("model", "ema", "optimizer")} == TWIN["digests"]


def test_what_was_asked_for_after_the_checkpoint_is_in_force_again(resumed):
    "The request that was pending, and those that were asked for again after it."
    run = Run(resumed[0])
    again = {c.applied_step: c.new for c in run.changes() if c.id >= len(ASKED)}
    assert again == {at: now(k) for at, k in ASKED.items() if at > KEPT}
    assert (run.state, run.step) == ("done", KEPT + MORE)
    assert run.metrics("loss")["loss"].step.tolist() == list(range(1, KEPT + MORE + 1))
