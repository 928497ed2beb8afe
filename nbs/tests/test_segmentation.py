"""Segmentation from the command line, on files as users have them; and a run that is stopped and goes on, with knobs flipped on the way."""
import contextlib
import io
import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

from medlab import Run, Trainer, recipes
from medlab.cli.main import main
from medlab.data.patches import PatchDataset
from medlab.data.volume import Volume
from medlab.slices.series import write_series
from medlab.train.state import load_model

TINY = ("--debug", "--threads", 1)


def said(*argv):
    "Exit status, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()


AFFINE = np.array([[-2.0, 0, 0, 11], [0, 1.5, 0, -7], [0, 0, 3, 5], [0, 0, 0, 1]])


def put(path, data, affine=AFFINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(data, affine), path)
    return path


def case(seed, shape=(20, 18, 22)):
    "An image and its mask, of ids 7 and 40."
    rng, ids = np.random.default_rng(seed), np.zeros(shape, np.uint8)
    ids[4:10 + seed % 3, 3:9, 5:15], ids[12:17, 10:16, 4:18] = 7, 40
    return (rng.normal(100, 5, shape) + (ids % 9) * 10).astype(np.float32) * (1e4 if seed % 2 else 1), ids


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "Eight cases, of which five are at fault in a way each, and a run on them."
    root = tmp_path_factory.mktemp("files")
    for i in range(8):
        image, ids = case(i)
        if i == 3: ids = ids + np.float32(0.5)
        if i == 4: ids = ids[:-2]
        if i == 5: ids = ids.astype(np.int16); ids[0, 0, 0] = -3
        if i == 6: image[2, 3, 4] = np.nan
        put(root / f"data/images/c{i}.nii.gz", image)
        put(root / f"data/labels/c{i}.nii.gz", ids)
    for part in ("images", "labels"):  # one whose header has a voxel size that is none
        image = nib.load(root / f"data/{part}/c7.nii.gz")
        raw = nib.Nifti1Image(np.asarray(image.dataobj), None, image.header)
        raw.header["sform_code"], raw.header["qform_code"], raw.header["pixdim"] = 1, 0, [1, np.nan, 1, 1, 0, 0, 0, 0]
        raw.header["srow_x"] = [np.nan, 0, 0, 0]
        blob = raw.header.binaryblock + b"\0\0\0\0" + np.asarray(image.dataobj).tobytes("F")
        (root / f"data/{part}/c7.nii.gz").unlink()
        (root / f"data/{part}/c7.nii").write_bytes(blob)
    status, out, err = said("train", "segmentation", *TINY, "--data-root", root / "data", "--run", root / "run", "--steps", 3, "--val", 0.3, "--test", 0)
    assert status == 0 and "step 0 → 3" in out and "train 2, val 1, test 0" in out, (out, err)
    assert "labels in 2 training cases: in all: 7, 40" in out
    for n, words in dict(c3="fractions", c4="grids differ", c5="labels are ≥ 0", c6="NaN", c7="affine").items():
        assert any(l.startswith(f"medlab: warning: {n} is left out: ") and words in l for l in err.splitlines()), (n, words, err)
    return root


def test_predictions_lie_where_their_image_lies_and_hold_its_ids(files):
    assert said("train", "--resume", files / "run", "--steps", 5)[0] == 0 and Run(files / "run").step == 5
    status, out, err = said("predict", files / "run", files / "data/images", files / "made", "--flips", "true", "--largest", "true")
    assert status == 2 and err.count("medlab: ") == 3 and "case 'c6'" in err and "case 'c7'" in err, err
    made = sorted(f.name for f in (files / "made").iterdir())
    assert made == [f"c{i}-labels.nii.gz" for i in range(6)], "what is wrong with a mask does not keep its image from being labelled"
    image = nib.load(files / "made/c1-labels.nii.gz")
    assert image.shape == (20, 18, 22) and np.array_equal(image.affine, AFFINE) and image.get_data_dtype() == np.uint8 and {*np.unique(np.asarray(image.dataobj))} <= {0, 7, 40}
    one = said("predict", files / "run", files / "data/images/c1.nii.gz", files / "one.nii", "--tile", 8, "--overlap", 0.25, "--threshold", 0.6)
    assert one[0] == 0 and nib.load(files / "one.nii").shape == (20, 18, 22)
    recipe, model, step = load_model(files / "run")
    assert step == 5 and recipe.table.ids == (0, 7, 40)


@pytest.mark.host
def test_check_names_what_is_wrong(files):
    status, out, err = said("check", files / "data", "--recipe", "segmentation")
    assert status == 0 and "8 cases: 3 sound, 5 in quarantine" in out and "holds 0, 7, 40" in out, err
    assert "labels in 3 sound cases: in all: 7, 40\n" in out and out.endswith(" would start\n"), "three sound cases are enough to begin"
    status, out, err = said("check", files / "data", "--recipe", "segmentation", "--labels", "7,40,41")
    assert "warning: label 41 is in none of the 3 sound cases: it cannot be learned" in out
    assert "0 sound" in (out := said("check", files / "data", "--recipe", "segmentation", "--labels", 7)[1]) and "holds label 40" in out, "as training would see it"
    assert "8 cases: 3 sound" in said("check", files / "data", "--recipe", "segmentation", "--labels", 7, "--ignore", 40)[1]
    assert "low < high" in said("check", files / "data", "--recipe", "segmentation", "--intensity", "window", "--window", "9,1")[2]


@pytest.mark.parametrize("argv,words", [
    ("--data-root {root}/nowhere", "does not exist"), ("--network dynunett", "did you mean 'dynunet'"), ("--image-size 16,16", "three positive integers"), ("--image-size 18,18,18", "do not fit the patch"), ("--surface-weigth 1", "did you mean '--surface_weight'"),
    ("--set surface_every=0", "surface_every=0 is refused"), ("--data-root {root}/data --labels 7,9", "holds label 40"), ("--flips q", "some of the axes"), ("--intensity minmax", "unknown intensity"), ("--surface boundary --set surface_every=4", "nothing to leave out"),
    ("--labels 9", "phantoms do not fit what was asked for: one holds label 1"), ("--dice-weight 0 --ce-weight 0", "are all 0: there is no loss to learn from")])
def test_mistakes(files, argv, words):
    status, out, err = said("train", "segmentation", *TINY, "--run", files / "never", *argv.replace("{root}", str(files)).split())
    assert status == 2 and words in err and err.startswith("medlab: ") and err.count("\n") == 1 and not (files / "never").exists(), (status, err)


def test_knobs_that_are_impossible_together_are_reverted(tmp_path):
    with Trainer(recipes.Segmentation(**recipes.Segmentation.tiny), tmp_path / "run", threads=1, dice_weight=0.0) as t:
        t.set(at=2, ce_weight=0.0)
        t.set(at=3, ce_weight=0.0, surface_weight=1.0)
        t.fit(4, progress=False)
        assert [(c.state, c.requested) for c in t.run.changes()] == [("reverted", dict(ce_weight=0.0)), ("applied", dict(ce_weight=0.0, surface_weight=1.0))] and "are all 0" in t.run.changes()[0].reason


def test_a_run_that_learned_nothing_says_so(tmp_path, monkeypatch):
    losses = recipes.Segmentation.losses
    monkeypatch.setattr(recipes.Segmentation, "losses", lambda *a: {k: v * torch.nan for k, v in losses(*a).items()})
    status, out, err = said("train", "segmentation", *TINY, "--run", tmp_path / "run", "--steps", 2)
    assert status == 1 and "done at step 2" in out and "medlab: error: not one of the steps 1 to 2 was taken, so nothing was learned" in err and [e.level for e in Run(tmp_path / "run").events("no_step_taken")] == ["error"]


def test_what_was_predicted_is_no_scan_the_next_time(files, tmp_path):
    "Predictions may go below the scans; a second time those alone are predicted, and where nothing else is there, that is said."
    scans = tmp_path / "scans"
    scans.mkdir()
    for name in ("c1", "c2"): shutil.copy(files / f"data/images/{name}.nii.gz", scans)
    assert said("predict", files / "run", scans, scans / "made")[0] == 0
    made = sorted(p.name for p in (scans / "made").iterdir())
    status, out, err = said("predict", files / "run", scans, scans / "made")
    assert status == 0 and "not predicted, since they lie in" in err and sorted(p.name for p in (scans / "made").iterdir()) == made
    for p in scans.glob("*.nii*"): p.unlink()
    status, out, err = said("predict", files / "run", scans, scans / "made")
    assert status == 2 and "every case of" in err and "name another folder for them" in err


def test_mistakes_of_prediction(files, tmp_path):
    image = files / "data/images/c0.nii.gz"
    before = image.read_bytes()
    for argv, words in (((image, image), "is the input itself"), ((image, tmp_path / "a.png"), "cannot write '.png'"), ((files / "data/images", tmp_path / "a.nii"), "give a folder as output"), ((image, tmp_path / "a.nii", "--overlap", 1), "overlap=1.0 must be in"), ((image, tmp_path / "a.nii", "--threshold", 2), "threshold=2.0"),
                        ((files / "nowhere", tmp_path / "a.nii"), "does not exist")):
        status, out, err = said("predict", files / "run", *argv)
        assert status == 2 and words in err and "Traceback" not in err, (argv, status, err)
    assert image.read_bytes() == before


def test_labels_of_a_series_go_back_as_a_dicom_segmentation(files, tmp_path):
    "By the ending of a file, or by --form in a folder; NIfTI is refused before anything is predicted."
    pytest.importorskip("highdicom")
    import pydicom
    image = case(0)[0]
    series = write_series(Volume(image.T, np.diag([1.5, 2, 3, 1])), tmp_path / "series").folder
    assert said("predict", files / "run", series, tmp_path / "a.nii.gz")[0] == 0
    status, out, err = said("predict", files / "run", series, tmp_path / "a.dcm")
    assert status == 0, err
    ds, labels = pydicom.dcmread(tmp_path / "a.dcm"), np.asarray(nib.load(tmp_path / "a.nii.gz").dataobj)
    ids = [int(g.TrackingID.split()[-1]) for g in ds.SegmentSequence]
    assert ids == [7, 40] and [g.SegmentLabel for g in ds.SegmentSequence] == ["label 7", "label 40"]
    counts = [0, 0]
    for bits, f in zip(ds.pixel_array.reshape(-1, ds.Rows, ds.Columns), ds.PerFrameFunctionalGroupsSequence):
        counts[f.SegmentIdentificationSequence[0].ReferencedSegmentNumber - 1] += int(bits.sum())
    assert counts == [int((labels == i).sum()) for i in ids] and sum(counts)
    assert said("predict", files / "run", series, tmp_path / "out", "--form", "dicom")[0] == 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["series-labels.dcm"]
    for argv, words in (((files / "data/images/c0.nii.gz", tmp_path / "no.dcm"), "needs the series it was made from"), ((series, tmp_path / "x", "--form", "dicm"), "did you mean 'dicom'"),
                        ((files / "data/images/c0.nii.gz", tmp_path / "no", "--form", "dicom"), "needs the series it was made from")):
        status, out, err = said("predict", files / "run", *argv)
        assert status == 2 and words in err and "Traceback" not in err, (argv, err)
    assert not (tmp_path / "no.dcm").exists() and not (tmp_path / "no").exists()


def test_a_case_that_breaks_later_is_left_out_by_name(tmp_path):
    "A file that goes bad after the check: the feed drops its patches with the case's name, and puts it into quarantine at last."
    for i in range(3):
        image, ids = case(i)
        put(tmp_path / f"data/images/c{i}.nii.gz", image), put(tmp_path / f"data/labels/c{i}.nii.gz", ids)
    recipe = recipes.Segmentation(**{**recipes.Segmentation.tiny, "data_root": str(tmp_path / "data"), "val": 0.0, "test": 0.0, "cache_gb": 0.0})
    with Trainer(recipe, tmp_path / "run", threads=1, case_budget=2) as t:
        (tmp_path / "data/labels/c1.nii.gz").write_bytes(b"gone")
        t.fit(12, progress=False)
        texts = [e.text for e in t.run.events("bad_sample")]
        assert texts and all("c1 was left out: CaseFault: case 'c1'" in x for x in texts) and len(t.run.events("quarantine")) == 1 and t.iteration == 12 and t.step.optimizer_step >= 10


def test_caches_end_at_their_bytes_and_their_workers_share_them(tmp_path):
    recipe = recipes.Segmentation(**{**recipes.Segmentation.tiny, "phantoms": 6, "val": 0.0, "test": 0.0, "cache_gb": 3e5 / 2**30})
    recipe.setup()
    data = recipe.dataset()
    assert isinstance(data, PatchDataset)
    for seed in range(5):
        for i in range(6): data[i, seed]
    stats = data.stats
    assert all(0 < s["bytes"] <= s["limit"] and s["hits"] + s["misses"] == 30 for s in stats.values()) and sum(s["limit"] for s in stats.values()) <= 3e5
    recipe.workers = 3
    assert abs(sum(s["limit"] for s in recipe.dataset().stats.values()) - 1e5) < 3


def test_knobs_survive_a_stop_and_replay(tmp_path):
    "Stopped after step 4 and resumed: the same bits as without a stop, with the surface loss switched on and staggered on the way; and replayed from the log."
    recipe = lambda: recipes.Segmentation(**{**recipes.Segmentation.tiny, "phantoms": 5, "rotate": 10.0})
    state = lambda t: torch.cat([p.detach().flatten() for p in t.model.parameters()])
    first, second = (3, dict(surface_weight=0.2, surface_every=2)), (6, dict(surface_every=3, cldice_weight=0.1, dice_weight=0.5))
    with Trainer(recipe(), tmp_path / "whole", threads=1) as t:
        for at, kw in (first, second): t.set(at=at, **kw)
        t.fit(9, progress=False)
        whole, parts = state(t), {k: (v.step.tolist(), v.value.tolist()) for k, v in t.run.metrics("loss", "surface_prediction", "surface_target", "cldice").items()}
        assert parts["surface_prediction"][0] == [4, 6, 9] and parts["surface_target"][0] == [*range(3, 10)] and parts["cldice"][0] == [6, 7, 8, 9]
    with Trainer(recipe(), tmp_path / "halves", threads=1) as t:
        t.set(at=first[0], **first[1])
        t.fit(4, progress=False)
    with Trainer.open(tmp_path / "halves", threads=1) as t:
        assert t.knobs.surface_every == 2 and t.recipe.term.every == 2 and t.recipe.weights["surface_weight"] == 0.2
        t.set(at=second[0], **second[1])
        t.fit(5, progress=False)
        assert torch.equal(state(t), whole) and {k: (v.step.tolist(), v.value.tolist()) for k, v in t.run.metrics(*parts).items()} == parts
    with Trainer(recipe(), tmp_path / "again", threads=1) as t:
        t.replay(tmp_path / "whole")
        t.fit(9, progress=False)
        assert torch.equal(state(t), whole)


@pytest.mark.host
def test_workers_load_the_same_patches(tmp_path):
    "Two loading processes: the same weights as without any."
    made = []
    for workers in (0, 2):
        recipe = recipes.Segmentation(**{**recipes.Segmentation.tiny, "phantoms": 4, "workers": workers})
        with Trainer(recipe, tmp_path / str(workers), threads=1, surface_weight=0.1) as t:
            t.fit(3, progress=False)
            made.append(torch.cat([p.detach().flatten() for p in t.model.parameters()]))
    assert torch.equal(*made)


@pytest.mark.host
def test_cases_in_folders_are_read_and_told(tmp_path):
    "Visits in folders and a DICOM series are cases as others, joined to their patients; what lacks its half is named, in check and in train."
    for i, name in enumerate(("P1", "P2", "baseline/P3", "followup/P3", "sub-07/ses-1/anat/x", "lonely/P4")):
        image, ids = case(2 * i)
        put(tmp_path / f"images/{name}.nii.gz", image)
        if name != "lonely/P4": put(tmp_path / f"labels/{name}.nii.gz", ids)
        else: put(tmp_path / "labels/alone/P5.nii.gz", ids)
    series = tmp_path / "images/scan"
    write_series(Volume(case(20)[0].transpose(2, 1, 0), np.diag([1.0, 1, 2, 1]), "thin"), series)
    put(tmp_path / "labels/scan.nii.gz", case(20)[1], np.diag([1.0, 1, 2, 1])), put(tmp_path / "labels/other.nii.gz", case(2)[1])
    (tmp_path / "images/other").mkdir(), (tmp_path / "images/up").symlink_to(tmp_path)
    (tmp_path / "images/loose.dcm").write_bytes(sorted(series.iterdir())[0].read_bytes())
    status, out, err = said("check", tmp_path, "--recipe", "segmentation", *TINY)
    told = dict(images="DICOM files lie loose in images/ (1, such as loose.dcm)", lonely_P4="the image lonely/P4.nii.gz has no label", alone_P5="the label alone/P5.nii.gz has no image",
        other="images/other is a folder without DICOM files in it, and an image is one NIfTI file or the folder of one DICOM series; convert it with dcm2niix")
    assert status == 0 and "10 cases: 6 sound, 4 in quarantine" in out and all(w in out for w in told.values()), (out, err)
    assert "5 patients, 6 scans" in out and "P3 of baseline_P3 and followup_P3" in out
    status, out, err = said("train", "segmentation", *TINY, "--data-root", tmp_path, "--run", tmp_path / "run", "--steps", 1)
    assert status == 0, (out, err)
    for name, words in told.items(): assert any(l.startswith(f"medlab: warning: {name} is left out: ") and words in l for l in err.splitlines()), err


def test_a_list_names_a_series_by_its_folder(tmp_path):
    write_series(Volume(case(2)[0].transpose(2, 1, 0), np.diag([1.0, 1, 2, 1]), "thin"), tmp_path / "images/a")
    put(tmp_path / "labels/a.nii.gz", case(2)[1], np.diag([1.0, 1, 2, 1]))
    (tmp_path / "l.csv").write_text("image,label\nimages/a,labels/a.nii.gz\nimages,labels\n")
    status, out, err = said("check", tmp_path / "l.csv", "--recipe", "segmentation", *TINY)
    assert status == 0 and "2 cases: 1 sound, 1 in quarantine" in out and "the label labels is a folder; a mask is one NIfTI file" in out, (out, err)


def test_a_list_makes_the_split_and_names_the_labels(tmp_path):
    for i in range(4):
        image, ids = case(i)
        put(tmp_path / f"imagesTr/c{i}.nii.gz", image), put(tmp_path / f"labelsTr/c{i}.nii.gz", ids)
    rows = [dict(image=f"./imagesTr/c{i}.nii.gz", label=f"./labelsTr/c{i}.nii.gz") for i in range(4)]
    (tmp_path / "dataset.json").write_text(json.dumps(dict(labels={"0": "background", "7": "liver", "40": "spleen"}, training=rows[:3], validation=rows[3:], test=[])))
    recipe = recipes.Segmentation(**{**recipes.Segmentation.tiny, "data_root": str(tmp_path)})
    info = recipe.setup()
    assert info["split"]["val"] == ["c3"] and info["split"]["train"] == ["c0", "c1", "c2"] and recipe.table.name(2) == "spleen"
    row = recipe.evaluate(recipe.build_model().eval()).rows[0]
    assert {"dice_liver", "hd95_mm_spleen", "surface_dice_liver"} <= {*row} and row["case"] == "c3"
