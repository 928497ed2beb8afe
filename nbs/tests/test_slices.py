"""Slice interpolation from the command line: trained, stopped, resumed and used on files, and bad input that costs its case or nothing.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import said

from medlab import Run, Trainer, recipes
from medlab.core import CaseFault, UserError
from medlab.data.dicom import read_dicom
from medlab.data.volume import read_volume, write_volume
from medlab.nets.codec import maisi_autoencoder
from medlab.slices.latents import LatentStore
from medlab.slices.phantoms import write_ct_phantoms
from medlab.slices.series import write_series

DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).resolve().parents[3] / "shared/data"))
SMALL = ("--debug", "--threads", 1, "--set", "gradient_accumulation_steps=1", "--set", "val_share=0")


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    "Five synthetic patients with thick and thin scans, and the cache that their latents go to."
    root = tmp_path_factory.mktemp("slices")
    write_ct_phantoms(root / "data", range(5), shape=(40, 40, 48), spacing=(1.0, 0.9, 0.8))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    yield root
    del os.environ["XDG_CACHE_HOME"]


@pytest.fixture(scope="module")
def trained(patients):
    "A run of three steps, and of two more after a resume."
    status, out, err = said("train", "slice_interpolation", "--data-root", patients / "data", "--run", patients / "run", "--steps", 3, *SMALL)
    assert status == 0, err
    assert said("train", "slice_interpolation", "--resume", patients / "run", "--steps", 5, "--threads", 1)[0] == 0
    assert Run(patients / "run").step == 5
    return patients / "run"


def test_a_thick_nifti_becomes_a_thin_one_in_its_place(trained, patients):
    thick, thin = (patients / "data/PHANTOM-0003" / f"{p}.nii.gz" for p in ("thick", "thin"))
    for answer in ("mean", "sample"):
        out = patients / f"{answer}.nii.gz"
        assert said("predict", trained, thick, out, "--answer", answer, "--steps", 2)[0] == 0
        made, truth, given = nib.load(out), nib.load(thin), nib.load(thick).get_fdata()
        assert made.shape == truth.shape and np.abs(made.affine - truth.affine).max() < 1e-3
        assert np.abs(made.get_fdata().reshape(*given.shape, 5).mean(-1) - given).max() < 0.5, "it averages back to what was measured"


def test_a_series_is_written_beside_its_source_and_read_back(trained, patients):
    truth = read_volume(patients / "data/PHANTOM-0001/thick.nii.gz")
    write_series(truth, patients / "thick_series", description="thick")
    status, _, err = said("predict", trained, patients / "thick_series", patients / "series", "--form", "dicom")
    assert status == 0, err
    made, source = read_dicom(patients / "series"), read_dicom(patients / "thick_series")
    assert np.allclose(made.spacing, (source.spacing[0] / 5, *source.spacing[1:]), atol=1e-3)
    assert np.abs(made.data.reshape(len(source.data), 5, *made.shape[1:]).mean(1) - source.data).max() <= 1.0, "rounded to integers twice"
    header = pydicom.dcmread(next((patients / "series").glob("*.dcm")))
    assert "synthetic" in header.SeriesDescription and "DERIVED" in header.ImageType


def test_scores_stand_beside_those_of_interpolation_and_say_what_thick_slices_are(trained, patients):
    status, out, err = said("evaluate", trained, "--steps", 2, "--csv", patients / "scores.csv")
    assert status == 0, err
    head, *rows = (patients / "scores.csv").read_text().splitlines()
    columns = head.split(",")
    assert {"psnr_sagittal", "psnr_sagittal_cubic", "psnr_sagittal_ceiling", "detail_sample", "back"} <= {*columns}
    assert len(rows) == 2 and all("acquired" in r for r in rows)
    value = lambda r, k: float(r.split(",")[columns.index(k)])
    assert all(value(r, "back") < 0.5 and value(r, "psnr_sagittal_ceiling") > value(r, "psnr_sagittal_cubic") for r in rows)
    assert "psnr_sagittal − psnr_sagittal_cubic = " in out and "n = 2, exact Wilcoxon p" in out
    status, out, err = said("evaluate", trained, "--steps", 2, "--answer", "sample")
    assert status == 2 and "answer" in err and "Traceback" not in err, "both answers are scored"


def test_a_regression_beside_it_by_the_public_protocol(trained, patients):
    status, _, err = said("train", "slice_interpolation", "--data-root", patients / "data", "--run", patients / "regression", "--steps", 3, *SMALL, "--mean-share", 1)
    assert status == 0, err
    status, out, err = said("evaluate", trained, "--steps", 0, "--protocol", "rplhr", "--beside", patients / "regression")
    assert status == 0, err
    head = next(line for line in out.splitlines() if line.startswith("case"))
    assert "psnr_rplhr@regression" in head and "psnr_rplhr_cubic" in head and "psnr_rplhr_cubic@regression" not in head


def test_what_is_wrong_with_a_case_costs_the_case(patients, tmp_path):
    shutil.copytree(patients / "data", tmp_path / "data")
    thick = tmp_path / "data/PHANTOM-0000/thick.nii.gz"
    thick.write_bytes(thick.read_bytes()[:2000])
    (tmp_path / "data/PHANTOM-0001/thick.nii.gz").unlink()
    shutil.copy(tmp_path / "data/PHANTOM-0003/thin.nii.gz", tmp_path / "data/PHANTOM-0002/thin.nii.gz")  # another's
    status, out, err = said("check", tmp_path / "data", "--recipe", "slice_interpolation", *SMALL[:3])
    assert status == 0 and "5 cases: 3 sound, 2 in quarantine" in out, "three are enough to start with"
    bad = {line.split("|")[1].strip(): line for line in out.splitlines() if "quarantine:" in line}
    assert "truncated" in bad["PHANTOM-0000"] and "of one patient" in bad["PHANTOM-0002"] and "simulated" in out
    status, out, err = said("train", "slice_interpolation", "--data-root", tmp_path / "data", "--run", tmp_path / "run", "--steps", 1, *SMALL)
    assert status == 0, err
    info = Run(tmp_path / "run").meta["data"]
    assert sorted(n for n, _ in info["quarantined"]) == ["PHANTOM-0000", "PHANTOM-0002"] and sum(map(len, (info["split"][p] for p in ("train", "val", "test")))) == 3


@pytest.mark.parametrize("words, why", [(("--start", 2, "--answer", "sample"), "start=2"), (("--answer", "best"), "answer 'best'"), (("--form", "dcm"), "form 'dcm'"), (("--overlap", 1), "overlap")])
def test_an_option_that_fits_no_case_is_no_fault_of_a_case(trained, patients, tmp_path, words, why):
    status, out, err = said("predict", trained, patients / "data", tmp_path / "out", *words)
    assert status == 2 and why in err and "PHANTOM" not in err and "case '" not in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "out").exists() and "Traceback" not in err


def test_copies_of_an_anonymous_patient_are_cases_of_one_patient_and_a_folder_without_a_volume_is_named(patients, tmp_path):
    volume = read_volume(patients / "data/PHANTOM-0001/thin.nii.gz")
    for i in range(3): write_series(volume, tmp_path / "data" / f"copy{i}", description="thin")
    for i in (1, 2): shutil.rmtree(tmp_path / "data" / f"copy{i}"), shutil.copytree(tmp_path / "data/copy0", tmp_path / "data" / f"copy{i}")
    (tmp_path / "data/lost").mkdir()
    file = next((tmp_path / "data/copy1").glob("*.dcm"))
    file.write_bytes(file.read_bytes()[:-500])
    status, out, err = said("check", tmp_path / "data", "--recipe", "slice_interpolation", *SMALL[:3])
    bad = {line.split("|")[1].strip(): line for line in out.splitlines() if "quarantine:" in line}
    assert {*bad} == {"copy1", "lost"} and "no file at all" in bad["lost"], out + err
    assert "of 1 patient" in out, "copies stay together in the split"


def test_one_thick_slice_is_refused_with_its_reason(trained, patients, tmp_path):
    volume = read_volume(patients / "data/PHANTOM-0004/thick.nii.gz")
    nib.save(nib.Nifti1Image(volume.data.T[..., :1].astype(np.float32), volume.affine), tmp_path / "one.nii.gz")
    status, _, err = said("predict", trained, tmp_path / "one.nii.gz", tmp_path / "out.nii.gz")
    assert status != 0 and "at least two slices" in err and not (tmp_path / "out.nii.gz").exists()


@pytest.mark.parametrize("why", ["full", "limit"])
def test_latents_that_do_not_fit_stop_before_training_and_leave_nothing(patients, tmp_path, monkeypatch, why):
    recipe = recipes.SliceInterpolation(data_root=str(patients / "data"), latents=str(tmp_path / "latents"), latents_gb=1e-6 if why == "limit" else 1, **recipes.SliceInterpolation.tiny)
    if why == "full":
        def full(*args, **kw): raise OSError(28, "No space left on device")
        monkeypatch.setattr("medlab.slices.latents.save_file", full)
    with pytest.raises(UserError, match="latents_gb" if why == "limit" else "no space left on device; free space"): Trainer(recipe, tmp_path / "run")
    assert not list((tmp_path / "latents").glob("*")) and not (tmp_path / "run").exists()
    monkeypatch.undo()
    recipe = recipes.SliceInterpolation(data_root=str(patients / "data"), latents=str(tmp_path / "latents"), **recipes.SliceInterpolation.tiny)
    with Trainer(recipe, tmp_path / "run", gradient_accumulation_steps=1, val_share=0.0, device="cpu") as t: t.fit(steps=1)
    assert len(LatentStore(tmp_path / "latents").files()) == 3


def test_a_step_runs_no_codec(patients, monkeypatch):
    recipe = recipes.SliceInterpolation(data_root=str(patients / "data"), **recipes.SliceInterpolation.tiny)
    with Trainer(recipe, patients / "no_codec", gradient_accumulation_steps=1, val_share=0.0, device="cpu") as t:
        def called(*args): raise AssertionError("the codec ran")
        monkeypatch.setattr("medlab.nets.residual.BlockCodec._apply", called)
        t.fit(steps=2)
        assert t.iteration == 2
        with pytest.raises(AssertionError, match="the codec ran"): t.predict(patients / "data/PHANTOM-0000/thick.nii.gz")


def test_an_autoencoder_is_frozen_beside_the_network_and_its_hash_alone_is_saved(patients, tmp_path):
    status, out, err = said("train", "codec", "--debug", "--steps", 2, "--run", tmp_path / "codec", "--threads", 1)
    assert status == 0, err
    assert said("export", tmp_path / "codec", tmp_path / "exported")[0] == 0
    sizes = recipes.SliceInterpolation.tiny | dict(image_size=(16, 16, 16), codec=str(tmp_path / "exported"))
    recipe = recipes.SliceInterpolation(data_root=str(patients / "data"), latents=str(tmp_path / "latents"), **sizes)
    with Trainer(recipe, tmp_path / "run", gradient_accumulation_steps=1, val_share=0.0, device="cpu") as t:
        before = {k: v.clone() for k, v in t.system.frozen["codec"].state_dict().items()}
        t.fit(steps=2)
        after = t.system.frozen["codec"].state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before) and not any(p.requires_grad for p in t.system.frozen["codec"].parameters())
        held = {id(p) for g in t.optimizer.param_groups for p in g["params"]}
        assert held.isdisjoint(map(id, t.system.frozen["codec"].parameters()))
        names = [k for k in torch.load(t.save(), weights_only=True)["model"]]
        assert not any("encoder" in k or "decoder" in k for k in names)
        made = t.predict(patients / "data/PHANTOM-0000/thick.nii.gz")
    thick = read_volume(patients / "data/PHANTOM-0000/thick.nii.gz").data
    assert np.abs(made.data.reshape(len(thick), 5, *thick.shape[1:]).mean(1) - thick).max() < 0.5
    with pytest.raises(UserError, match="is not the one that the run was trained with|is no file"):
        (tmp_path / "exported").rename(tmp_path / "away")
        Run(tmp_path / "run").export(tmp_path / "out")
    (tmp_path / "away").rename(tmp_path / "exported")
    assert Run(tmp_path / "run").export(tmp_path / "out", form="safetensors").forms == ("safetensors",)
    shutil.rmtree(tmp_path / "exported")  # the folder holds the autoencoder's weights, so its file is not needed
    held, about = load_file(tmp_path / "out/models/model.safetensors"), json.loads((tmp_path / "out/configs/metadata.json").read_text())
    assert all(torch.equal(held[f"codec.{k}"], v) for k, v in before.items()) and about["medlab"]["settings"]["coded"]["kind"] == "maisi"
    assert "codec.…: that of the file they were loaded from" in (tmp_path / "out/docs/README.md").read_text()
    line = [sys.executable, tmp_path / "out/load.py", tmp_path / "again.nii.gz", patients / "data/PHANTOM-0000/thick.nii.gz"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert np.abs(read_volume(tmp_path / "again.nii.gz").data - made.data).max() <= 1e-5 * np.abs(made.data).max()  # another process, other threads: an autoencoder sums otherwise


def codec_folder(folder, **sizes):
    "An autoencoder with random weights, as `medlab export` of a run of the recipe codec leaves it."
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "configs/metadata.json").write_text(json.dumps(dict(medlab=dict(recipe=["", "", sizes]))))
    torch.manual_seed(0)
    network = maisi_autoencoder(**sizes)
    save_file(network.state_dict(), folder / "models/model.safetensors")
    torch.save(network.state_dict(), folder / "other.pt")
    return folder


def test_check_shows_what_coding_alone_loses_before_there_are_latents(patients, tmp_path, monkeypatch):
    held = codec_folder(tmp_path / "codec", channels=[8, 16], blocks=[1, 1], latent_channels=4, groups=4)
    load = recipes.SliceInterpolation.load
    def one_fails(self, case, **kw):
        if case == "PHANTOM-0001": raise CaseFault(case, "its file is gone")
        return load(self, case, **kw)

    monkeypatch.setattr(recipes.SliceInterpolation, "load", one_fails)
    monkeypatch.setattr("medlab.cli.check.CHEAP", 0)  # no case is scored
    words = ("check", "slice_interpolation", "--data-root", patients / "data", "--latents", tmp_path / "latents", "--val", 0, "--test", 0, *SMALL[:3])
    status, out, err = said(*words, "--codec", held, "--image-size", "16,16,16")
    assert status == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(("volume", "PHANTOM-", "mean of 4"))]
    assert rows[0] == ["volume", "thick", "way", "psnr", "ssim", "mae", "air", "lung", "fat", "soft", "bone"] and len(rows) == 1 + 5 * 3
    assert [r[2] for r in rows[1:4]] == ["cubic", "autoencoder", "ceiling"] and all("acquired" in r for r in rows[1:])
    assert "left out: PHANTOM-0001: its file is gone" in out and "BELOW cubic" in out and "4 of 5 training cases in" in out
    status, out, err = said(*words)
    assert status == 0 and "more than cubic interpolation" in out and "autoencoder" not in out and "dct: 16 channels" in out
    status, out, err = said(*words, "--codec", held / "other.pt")
    assert status == 2 and "does not fit the autoencoder of 130 tensors" in err and "of another shape" in err and "psnr" not in out


@pytest.mark.skipif(not (DATA / "dicom").is_dir(), reason="the real scans are not here: set MEDLAB_DATA")
def test_a_real_thick_series_is_predicted_in_its_place(trained, tmp_path):
    thick = read_dicom(DATA / "dicom/lidc0001_2p5mm_16slices")
    cut = tmp_path / "thick.nii.gz"
    write_volume(type(thick)(np.ascontiguousarray(thick.data[:, 200:264, 200:264]), thick.affine @ np.array([[1, 0, 0, 200], [0, 1, 0, 200], [0, 0, 1, 0], [0, 0, 0, 1.0]]), "cut"), cut)
    assert said("predict", trained, cut, tmp_path / "thin.nii.gz")[0] == 0
    made = nib.load(tmp_path / "thin.nii.gz")
    corner = made.affine @ [0, 0, 2, 1]  # the middle one of the five slices of the first thick one
    assert made.shape == (64, 64, 80) and np.abs(corner[:3] - (thick.affine @ [200, 200, 0, 1])[:3]).max() < 1e-3
    assert json.dumps(made.header["descrip"].item().decode()) == '"medlab: synthetic thin-mean"'
