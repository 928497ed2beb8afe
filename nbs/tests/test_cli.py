"""The command as its users meet it: their mistakes are one clear line and status 2, bad cases are quarantined with a reason."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medlab.cli import main
from medlab.phantoms import write_brats
from medlab.train.run import Run, run_or_fault
from medlab.train.trainer import Trainer
from medlab.recipes.fast_ddpm import FastDDPM

DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).parents[3] / "shared" / "data")) / "brain_mri"
real = pytest.mark.skipif(not DATA.is_dir(), reason="no real volumes: set MEDLAB_DATA to the folder that holds brain_mri")
TINY = ["--debug", "--steps", "2", "--threads", "1", "--set", "accumulate=1"]


@pytest.fixture
def said(capfd):
    "Run the command in this process: exit status, standard output, standard error."
    def run(*argv):
        capfd.readouterr()
        status = main(list(map(str, argv)))
        return status, *capfd.readouterr()
    return run


@pytest.fixture
def cases(tmp_path):
    "Three sound cases."
    write_brats(tmp_path / "cases", [1, 2, 3], size=(16, 16, 16))
    return tmp_path / "cases"


def mistake(answer, *words):
    "One line that says what was wrong, and status 2."
    status, _, err = answer
    lines = [l for l in err.splitlines() if l.startswith("medlab: ")]
    assert status == 2 and len(lines) == 1 and "Traceback" not in err, answer
    for w in words: assert w in lines[0], (w, lines[0])


def test_misspelled_keys(said, tmp_path):
    (tmp_path / "c.yml").write_text("validate_every: 3\n")
    run = tmp_path / "run"
    mistake(said("train", "fast_ddpm", "--config", tmp_path / "c.yml", "--run", run), "unknown key in c.yml 'validate_every'", "'val_every_steps'")
    mistake(said("train", "fast_ddpm", "--imagesize", "8", "--run", run), "did you mean '--image_size'")
    mistake(said("train", "fast_ddpm", "--set", "lrr=1", "--run", run), "unknown knob", "'lr'")
    mistake(said("train", "fast_ddpm", "--set", "lr=1e9", "--run", run), "lr=1e9", "finite number in (0, 10]")
    mistake(said("train", "fast_ddpm", "--image-size", "[10,10,9]", "--channels", "[8,16]", "--norm-groups", "8", "--run", run), "must divide by 2 along x", "try 8")
    assert not run.exists(), "a refused start leaves nothing behind"


def test_folder_without_cases(said, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for place in ("empty", "other", "nowhere"):
        for command in (("train", "fast_ddpm", "--run", tmp_path / "run", "--data-root"), ("check",)): mistake(said(*command, tmp_path / place), place)


def spoil(cases, name):
    "A file of a sound case, about to be spoiled."
    return cases / "PHANTOM-0002" / f"PHANTOM-0002-{name}.nii.gz"


def truncated(f): f.write_bytes(f.read_bytes()[:-200])
def no_gzip(f): f.write_bytes(b"not gzip at all")
def empty(f): f.write_bytes(b"")
def flat(f): nib.save(nib.Nifti1Image(nib.load(f).get_fdata()[:, :, 0].astype(np.float32), np.eye(4)), f)
def blank(f): nib.save(nib.Nifti1Image(np.zeros((16, 16, 16), np.float32), nib.load(f).affine), f)
def other_grid(f): nib.save(nib.Nifti1Image(np.random.default_rng(0).random((8, 16, 16), np.float32), np.diag([20.0, 10, 10, 1])), f)


def not_a_number(f):
    a = nib.load(f).get_fdata().astype(np.float32)
    a[3, 4, 5] = np.nan
    nib.save(nib.Nifti1Image(a, nib.load(f).affine), f)


@pytest.mark.parametrize("harm, words", [(truncated, "truncated"), (no_gzip, "t2w"), (empty, "t2w"), (flat, "2"), (blank, "t2w"), (other_grid, "grids differ"), (not_a_number, "NaN")])
def test_a_bad_case_is_quarantined_and_training_goes_on(said, cases, tmp_path, harm, words):
    harm(spoil(cases, "t2w"))
    assert said("check", cases)[0] == 2
    status, out, err = said("train", "fast_ddpm", "--data-root", cases, "--run", tmp_path / "run", *TINY)
    line, = [l for l in out.splitlines() if l.startswith("quarantined")]
    assert status == 0 and "PHANTOM-0002" in line and words in line and "Traceback" not in err, (out, err)
    event, = Run(tmp_path / "run").events("quarantine")
    assert event.data["case"] == "PHANTOM-0002" and "PHANTOM-0002" not in sum((Run(tmp_path / "run").meta["data"]["split"][k] for k in ("train", "val", "test")), [])


def test_only_bad_cases_is_an_error(said, cases, tmp_path):
    for f in cases.glob("*/*-t1n.nii.gz"): truncated(f)
    mistake(said("train", "fast_ddpm", "--data-root", cases, "--run", tmp_path / "run"), "none of the 3 cases", "truncated")


def test_missing_modality(said, cases, tmp_path):
    spoil(cases, "t2f").unlink()
    status, out, _ = said("train", "fast_ddpm", "--data-root", cases, "--run", tmp_path / "any", *TINY)
    assert status == 0 and "quarantined" not in out, "a case without the modality still teaches the others"
    status, out, _ = said("train", "fast_ddpm", "--data-root", cases, "--target", "t2f", "--run", tmp_path / "one", *TINY)
    assert status == 0 and "quarantined: PHANTOM-0002" in out and "t2f missing" in out
    assert said("predict", tmp_path / "any", cases / "PHANTOM-0002", tmp_path / "made.nii.gz")[0] == 0
    made = nib.load(tmp_path / "made.nii.gz")
    assert np.array_equal(made.affine, nib.load(spoil(cases, "t1n")).affine) and np.isfinite(made.get_fdata()).all()
    status, _, err = said("predict", tmp_path / "any", cases / "PHANTOM-0001", tmp_path / "no.nii.gz")
    assert status == 2 and "say which to synthesize" in err and "Traceback" not in err


def test_run_directories(said, tmp_path):
    assert said("train", "fast_ddpm", "--run", tmp_path / "run", *TINY)[0] == 0
    mistake(said("train", "fast_ddpm", "--run", tmp_path / "run", *TINY), "holds a run already")
    (tmp_path / "file").write_text("x")
    mistake(said("train", "fast_ddpm", "--run", tmp_path / "file" / "run", *TINY), "file")
    mistake(said("train", "--resume", tmp_path / "nothing"), "no run directory")
    with Trainer.open(tmp_path / "run"): mistake(said("train", "--resume", tmp_path / "run", "--steps", "9"), "held by a live trainer")
    for steps in ("0", "-3", "x"): mistake(said("train", "--resume", tmp_path / "run", "--steps", steps), "steps")


def test_tracking_offline(said, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    status, out, err = said("train", "fast_ddpm", "--run", tmp_path / "run", *TINY, "--use-wandb", "--tensorboard", tmp_path / "board")
    assert status == 0, err
    assert list((tmp_path / "run").glob("wandb/offline-run-*/*.wandb")) and list((tmp_path / "board").rglob("events.out.tfevents*"))
    assert not Run(tmp_path / "run").events("sink"), Run(tmp_path / "run").events("sink")


def test_sigterm_saves_and_resumes(tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", "import sys; from medlab.cli import main; sys.exit(main())", "train", "fast_ddpm", "--debug", "--steps", "100000", "--threads", "1", "--run", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not isinstance(r := run_or_fault(run), Run) or r.step < 3: assert process.poll() is None and time.monotonic() < end; time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped at step" in out and "Traceback" not in err, (out, err)
    saved = Run(run).checkpoints()[-1]["step"]
    assert Run(run).state == "stopped" and saved == Run(run).step
    with Trainer.open(run) as trainer: assert trainer.number == saved


@real
def test_real_brains(said, tmp_path):
    for name, modality in (("open_ms_patient07", "t2w"), ("stroke_mit", "t2f")):
        run, made = tmp_path / name, tmp_path / f"{name}.nii.gz"
        assert said("train", "fast_ddpm", "--data-root", DATA / name, "--run", run, *TINY)[0] == 0
        assert said("train", "--resume", run, "--steps", "4")[0] == 0 and Run(run).step == 4
        assert said("predict", run, DATA / name, made, "--modality", modality)[0] == 0
        given = nib.load(next(p for p in (DATA / name).glob("*.nii.gz") if p.name.lower().startswith("t1.")))
        assert np.array_equal(nib.load(made).affine, given.affine) and nib.load(made).shape == given.shape and np.isfinite(nib.load(made).get_fdata()).all()


@real
def test_modalities_on_different_grids(said, tmp_path):
    command = ("train", "fast_ddpm", "--data-root", DATA / "isles22_sub0009", "--names", '{"dwi": "*_dwi.nii.gz", "adc": "*_adc.nii.gz", "flair": "*_flair.nii.gz"}', *TINY)
    mistake(said(*command, "--run", tmp_path / "refused"), "73×112×112", "29×512×512", "resample")
    assert said(*command, "--run", tmp_path / "resampled", "--resample", "true")[0] == 0
