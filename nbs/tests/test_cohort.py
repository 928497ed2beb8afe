"""Patients by thirty ways to name them, copies among them; real data without false alarms; lists that leak; split.json."""
import csv
import gzip
import itertools
import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from medlab import Run
from medlab.cohort.duplicates import find_copies
from medlab.cohort.fingerprint import fingerprint
from medlab.core import UserError
from medlab.data.cases import find_cases, inspect_cases
from medlab.data.dicom import read_dicom
from medlab.data.volume import read_volume
from medlab.oct.scans import read_pages
from medlab.recipes.fast_ddpm import FastDDPM
from test_cli import said

DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).resolve().parents[3] / "shared/data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set MEDLAB_DATA)")
TINY = ("--debug", "--threads", 1, "--precision", "fp32", "--steps", 2)

# two scans of a patient as folders; one text with v, or one for each scan
WAYS = ("{p}_visit{v}", "{p}-visit-{v}", "{p}_v{v}", "{p}_V0{v}", "visit{v}_{p}", "baseline_{p} followup_{p}", "{p}_baseline {p}_follow-up", "{p}_pre {p}_post", "{p}_preop {p}_post-op",
    "{p}_2020010{v}", "2020010{v}_{p}", "{p}_2020-01-0{v}", "ses-{v}_sub-{n}", "sub-{n}_ses-{v}", "sub-{n}_run-{v}", "{p}_OD {p}_OS", "{p}_left {p}_right", "{p}_L {p}_R", "{p}_m0{v}", "{p}_month{v}",
    "{p}_tp{v}", "{p}_scan{v}", "{p} {p}_copy", "{p} {p}_resampled", "{p}_session_{v}", "BraTS-GLI-0000{n}-00{v}", "OAS1_000{n}_MR{v}", "{p}_T{v}", "{p}_day_0 {p}_day_30",
    "baseline/{p} followup/{p}", "{p}/baseline {p}/followup", "visit{v}/{p}", "{p}/2020-01-0{v}", "sub-{n}/ses-{v}", "ses-{v}/sub-{n}", "{p}/ses-{v}")


def field(seed, size=(22, 24, 26)):
    "A smooth volume like no other, float32."
    return (500 + 200 * ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=size), 1.6) / 0.12).astype(np.float32)


def save(x, path, affine=None, dtype=np.float32):
    "Write an array (z, y, x)."
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.ascontiguousarray(x.T.astype(dtype)), np.eye(4) if affine is None else affine), path)


def test_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch, recwarn):
    "And those beside it are read; root may list everything, so the refusal is the system's word in its place."
    for name in ("a", "b"): save(field(len(name)), tmp_path / name / "t1n.nii.gz")
    listed, shut = os.scandir, str(tmp_path / "b")
    assert [c.name for c in find_cases(tmp_path)] == ["a", "b"] and not recwarn

    def scandir(path):
        if str(path) == shut: raise PermissionError(13, "Permission denied", shut)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.warns(UserWarning, match="/b cannot be listed .Permission denied., so what lies in it is left out; give permission"):
        assert [c.name for c in find_cases(tmp_path)] == ["a"]


def stored_turned(x, path):
    "The same volume with its first axis stored the other way round, as float64."
    flip = np.diag([-1.0, 1, 1, 1]); flip[0, 3] = x.shape[2] - 1
    save(x[:, :, ::-1], path, flip, np.float64)


PLANTED = dict(  # name → how a copy of a scan is written
    anna=stored_turned, bert=lambda x, p: save(3 * x + 7, p), carl=lambda x, p: save(x[1:, 1:-1, :-2], p), emil=lambda x, p: save(np.rint(x), p, dtype=np.int16),
    dora=lambda x, p: save(ndimage.zoom(x, 0.75, order=1, grid_mode=True, mode="nearest"), p, np.diag([4 / 3, 4 / 3, 4 / 3, 1])))


def named(way, patients=8):
    "Folder of each scan → number of its patient."
    texts = (way.split(" ") * 2)[:2]
    return {texts[v - 1].format(p=f"P0{n}", n=n, v=v): n for n in range(1, patients + 1) for v in (1, 2)}


VOLUMES = ("restoration", *TINY, "--spatial-dims", 3, "--image-size", "16,16,16"), ("vjepa3d", "--debug"), ("codec", "--debug")


@pytest.mark.parametrize("recipe", VOLUMES, ids=lambda r: r[0])
def test_folders_that_hold_patients_are_no_patients_and_one_name_in_two_of_them_is_told(tmp_path, recipe):
    places = "siteA/P01", "siteA/P02", "siteA/P03", "siteB/P01", "siteB/P02", "siteC/P04", "siteC/P05", "baseline/P06", "followup/P06"
    for i, place in enumerate(places): save(field(i, (34, 40, 38)), tmp_path / "in" / place / "t1.nii.gz")
    name, *more = recipe
    check = ("check", tmp_path / "in", "--recipe", name, *(m for m in more if m not in TINY or m == "--debug" or name == "restoration"))
    status, out, err = said(*check)
    assert status == 0 and "of 8 patients" in out and "8 patients, 9 scans; patients by folder (7), visits (2) such as P06 of" in out, (out, err)
    assert "given" not in out.split("patients by")[1].splitlines()[0]
    assert "different patients: siteA/P01 and siteB/P01; siteA/P02 and siteB/P02. Where" in out + err and r"such as 'P\d+', or by a list" in out + err, (out, err)
    status, out, err = said(*check, "--patient-rule", r"P\d+")
    assert status == 0 and "6 patients, 9 scans" in out and "look alike" not in out + err, (out, err)
    status, out, err = said(*check, "--patient-rule", r"(site. )?")
    assert status == 2 and "matches the empty text in" in out + err and "let it demand" in out + err, (status, out, err)


@pytest.mark.parametrize("ways", [WAYS[i::6] for i in range(6)])
def test_no_way_to_name_patients_parts_them_or_their_copies(tmp_path, ways):
    assert len(WAYS) >= 30
    for k, way in enumerate(ways):
        root, truth = tmp_path / str(k), named(way)
        for i, place in enumerate(truth): save(field(i), root / place / "t1n.nii")
        for i, (name, write) in enumerate(PLANTED.items()): write(field(2 * i + 1), root / name / "t1n.nii.gz")
        checks = inspect_cases(find_cases(root))
        assert len(checks) == len(truth) + len(PLANTED) and not any(c.reason for c in checks), [c.reason for c in checks]
        of = {c.case.files["t1n"].parent: c.case.name for c in checks}
        patient = {of[root / place]: n for place, n in truth.items()} | {of[root / name]: i + 1 for i, name in enumerate(PLANTED)}
        for seed in range(20):
            made = FastDDPM(seed=seed).divide(patient, val=0.2, test=0.2, checks=checks)
            sides = {n: s for s in ("train", "val", "test") for n in made["split"][s]}
            assert all(sides[a] == sides[b] for a, b in itertools.combinations(patient, 2) if patient[a] == patient[b]), (way, seed)
            assert not made["look_alikes"], made["look_alikes"]
            assert len({*sides.values()}) == 3 and made["patients"] == 8 and made["proof"]["states"] == "no patient and no hash lies on two sides", (way, seed)
        places = [*truth]
        for i, name in enumerate(PLANTED):
            assert any(of[root / name] in c and of[root / places[2 * i + 1]] in c for c in made["copies"]), (way, name, made["copies"])
        assert len(made["copies"]) == len(PLANTED), (way, made["copies"])


def test_a_copy_in_any_writing_has_the_same_hash(tmp_path):
    x = np.rint(field(0))
    save(x, tmp_path / "a.nii.gz")
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress(gzip.decompress((tmp_path / "a.nii.gz").read_bytes()), 1))
    for name, dtype in (("c", np.int16), ("d", np.float64), ("e", np.int32)): save(x, tmp_path / f"{name}.nii", dtype=dtype)
    save(x, tmp_path / "f.nii", np.diag([2.0, 2, 3, 1]))
    stored_turned(x, tmp_path / "g.nii")
    scaled = nib.Nifti1Image(np.ascontiguousarray((x - 20).T / 2).astype(np.float32), np.eye(4))
    scaled.header.set_slope_inter(2, 20)
    nib.save(scaled, tmp_path / "h.nii")
    assert len({fingerprint(read_volume(f).data).voxels for f in tmp_path.iterdir()}) == 1
    assert fingerprint(read_volume(tmp_path / "a.nii.gz").data + 1).voxels != fingerprint(x).voxels


# ---- real data

def volumes():
    "Part of a path → array, mask: every volume of the real data that can be read."
    for p in sorted(DATA.rglob("*.nii.gz")):
        mask = "label" in str(p) or any(w in p.name for w in ("msk", "lesion", "seg.nii", "pul_", "pulmonary_pulm", "pulmonary_heart"))
        try: yield p.relative_to(DATA).as_posix(), read_volume(p).data, mask
        except UserError: continue
    for folder in sorted({p.parent for p in (DATA / "dicom").rglob("*") if p.is_file()}):
        try: yield folder.relative_to(DATA).as_posix(), read_dicom(folder).data, False
        except UserError: continue
    for p in sorted((DATA / "oct").rglob("*uint16.tif")): yield p.relative_to(DATA).as_posix(), read_pages(p)[0], False


# what is truly of one scan among the real data: written again in other codecs, cut out of one another, or two reconstructions
SAME = (("noise_pixels_geometry_only/mr_compressed",), ("totalseg_example_ct", "totalseg_abdomen"), ("phantom_head_pair", "phantom_head_5mm_noext"))


@needs_data
def test_no_false_alarm_on_real_volumes():
    prints, count = {}, 0
    for name, x, mask in volumes():  # the contrasts of a brain are one case, as a recipe finds them
        case, part = name.rsplit("/", 1) if "brain_mri" in name else (name, "label" if mask else "image")
        prints.setdefault(case, {})[part] = fingerprint(x, mask)
        count += 1
    hippocampi = {n: p for n, p in prints.items() if "hippocampus" in n}
    assert len(hippocampi) == 120 and not find_copies(hippocampi), "60 images and 60 masks"
    family = lambda n: next((i for i, words in enumerate(SAME) if any(w in n for w in words)), n)
    found = find_copies(prints)
    assert count > 150 and all(len({family(n) for n in c.cases}) == 1 for c in found), "\n".join(map(str, found))
    assert any("mr_compressed" in str(c) and c.kind == "voxels" for c in found), "and the true copies among them are found"


@needs_data
def test_every_planted_copy_of_real_volumes_is_found():
    kinds = dict(mirrored=lambda x: x[:, :, ::-1], upside_down=lambda x: 2 * x[::-1, ::-1], scaled=lambda x: 0.013 * x + 5, cropped=lambda x: x[1:, 1:-2, :-1], resampled=lambda x: ndimage.zoom(x, 0.7, order=1, grid_mode=True, mode="nearest"),
        bytes=lambda x: np.rint(255 * (x - x.min()) / np.ptp(x)))
    images = {n: x for n, x, mask in volumes() if not mask and "hippocampus" in n}
    prints = {n: dict(image=fingerprint(x)) for n, x in images.items()}
    for kind, change in kinds.items():
        again = {f"again/{n}": dict(image=fingerprint(change(x))) for n, x in images.items()}
        found = find_copies(prints | again)
        pairs = {frozenset(c.cases) for c in found}
        assert pairs == {frozenset((n, f"again/{n}")) for n in images}, (kind, len(pairs))


# ---- names that look alike, and the table

@pytest.mark.parametrize("names, says", [(("MR001_a", "MR001_b", "MR002", "MR003"), "MR001_a and MR001_b"), (("Anna", "Anna - Kopie", "Bert", "Carl"), "Anna and Anna - Kopie"),
    (("P01", "p01", "sub-P01", "P02"), "P01, p01 and sub-P01"), (("P01", "P02", "P03", "P04"), "")])
def test_names_that_look_alike_are_told_and_not_joined(tmp_path, names, says):
    "At check and at the start of training, with what joins them; and the table says whose scan is on which side."
    for i, name in enumerate(names):
        save(field(i), tmp_path / f"data/images/{name}.nii.gz")
        save((field(i) > 520) + 0, tmp_path / f"data/labels/{name}.nii.gz", dtype=np.uint8)
    options = ("--val", 0.25, "--test", 0.25)
    status, out, err = checked(tmp_path / "data", "--csv", tmp_path / "cases.csv", "--html", tmp_path / "cases.html", *options)
    assert status == 0 and "of 4 patients" in out and (f"look alike and count as different patients: {says}. Where" in err if says else "look alike" not in err), (out, err)
    assert ("look alike" in (tmp_path / "cases.html").read_text("utf-8")) == bool(says)
    rows = {r["case"]: r for r in csv.DictReader((tmp_path / "cases.csv").open(newline="", encoding="utf-8"))}
    assert {n: r["patient"] for n, r in rows.items()} == {n: n.replace(" - ", " ") for n in names} and sorted(r["side"] for r in rows.values()) == ["test", "train", "train", "val"]
    status, out, err = said("train", "segmentation", *TINY, "--data-root", tmp_path / "data", *options, "--run", tmp_path / "run")
    assert status == 0 and ("look alike" in err) == bool(says), err
    assert [r["side"] for r in rows.values()] == [next(s for s, ns in Run(tmp_path / "run").meta["data"]["split"].items() if s in ("train", "val", "test") and n in ns) for n in rows]
    if names[0] == "MR001_a":
        status, out, err = checked(tmp_path / "data", "--patient-rule", r"MR\d+", *options)
        assert status == 0 and "of 3 patients" in out and "look alike" not in err, (out, err)


def test_what_needs_no_reading_is_refused_before_it(labelled, monkeypatch):
    "An expression that is none, or meets no name; a table that cannot be written."
    from medlab.preflight import each
    monkeypatch.setattr(each, "files_of", None)  # the first thing that reading needs
    for argv, says in ((("--patient-rule", "("), "is no regular expression"), (("--patient-rule", "Q"), "matches nothing in 'P0'"), (("--csv", labelled / ("x" * 240)), "name too long"), (("--html", "/nowhere/a.html"), "does not exist")):
        status, out, err = checked(labelled, *argv)
        assert status == 2 and says in err and "Traceback" not in err, (argv, err)


# ---- lists and folders that leak

@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    "Images and masks of six patients, of which P5 has two scans."
    root = tmp_path_factory.mktemp("labelled")
    for i, name in enumerate(("P0", "P1", "P2", "P3", "P4", "P5_v1", "P5_v2")):
        x = field(i)
        save(x, root / f"images/{name}.nii.gz")
        save((x > 520) + 0, root / f"labels/{name}.nii.gz", dtype=np.uint8)
    return root


def listed(root, name, sides, **columns):
    "A list of cases with their sides."
    more = {k: v.split() for k, v in columns.items()}
    rows = [",".join([f"images/{n}.nii.gz", f"labels/{n}.nii.gz", s, *(v[i] for v in more.values())]) for i, (n, s) in enumerate(sides)]
    (root / name).write_text("\n".join([",".join(["image", "label", "split", *more]), *rows]) + "\n")
    return root / name


SOUND = [("P0", "train"), ("P1", "train"), ("P2", "train"), ("P3", "val"), ("P4", "test")]


def checked(data, *more, recipe="segmentation"): return said("check", data, "--recipe", recipe, *TINY[:-2], *more)


def test_lists_that_leak_are_refused_unless_asked_for(labelled):
    status, out, err = checked(listed(labelled, "sound.csv", SOUND))
    assert status == 0 and "train 3, val 1, test 1 of 5 patients" in out and "leak" not in out + err, (out, err)
    both = listed(labelled, "visits.csv", [*SOUND, ("P5_v1", "train"), ("P5_v2", "test")])
    status, out, err = checked(both)
    assert status == 2 and "leaks: P5_v1 in train and P5_v2 in test are of one patient (P5)" in err and "--allow-leak true" in err, err
    status, out, err = checked(both, "--allow-leak", "true")
    assert status == 0 and "P5_v1 in train and P5_v2 in test are of one patient" in err, err
    given = listed(labelled, "given.csv", SOUND, patient="K K L L M")
    assert "P0" in (err := checked(given)[2]) or "P2 in train and P3 in val are of one patient (L)" in err, err
    assert checked(listed(labelled, "own.csv", SOUND, patient="K K L N M"))[0] == 0


def test_the_same_file_and_the_same_voxels_on_two_sides_are_refused(labelled):
    twice = listed(labelled, "twice.csv", [*SOUND, ("P0", "val")])
    status, out, err = checked(twice)
    assert status == 2 and "P0.nii.gz stands in train and in val" in err, err
    renamed = listed(labelled, "renamed.csv", [*SOUND, ("P0", "val")], case="a b c d e f")
    status, out, err = checked(renamed)
    assert status == 2 and "a in train and f in val: a and f hold the same voxels: one patient" in err, err
    meta = dict(labels=dict(background=0, spot=1), training=[dict(image=f"images/{n}.nii.gz", label=f"labels/{n}.nii.gz") for n in ("P0", "P1")],
        validation=[dict(image="images/P1.nii.gz", label="labels/P1.nii.gz")])
    (labelled / "decathlon.json").write_text(json.dumps(meta))
    assert "P1.nii.gz stands in train and in val" in checked(labelled / "decathlon.json")[2]


def test_folders_that_leak_are_refused(tmp_path):
    for side, names in dict(train=("P0", "P1", "0001"), val=("P2", "0002"), test=("P3", "0001")).items():
        for name in names: save(field(hash((side, name)) % 10**6), tmp_path / side / f"{name}.nii.gz")
    options = ("--spatial-dims", 2, "--image-size", "16,16")
    status, out, err = checked(tmp_path, *options, recipe="restoration")
    assert status == 0 and "train 3, val 2, test 2 of 7 patients" in out, (out, err)
    save(field(77), tmp_path / "val/P0_visit2.nii.gz")
    status, out, err = checked(tmp_path, *options, recipe="restoration")
    assert status == 2 and "train_P0 in train and val_P0_visit2 in val are of one patient (P0)" in err, err
    (tmp_path / "val/P0_visit2.nii.gz").unlink()
    x = read_volume(tmp_path / "train/P1.nii.gz").data
    save(2 * x, tmp_path / "test/other.nii.gz")
    status, out, err = checked(tmp_path, *options, recipe="restoration")
    assert status == 2 and "test_other and train_P1 look the same, resampled or rescaled" in err, err


def test_folds_and_classes_from_the_command_line(labelled):
    (labelled / "sites.csv").write_text("case,site\n" + "".join(f"{n},{s}\n" for n, s in zip(("P0", "P1", "P2", "P3", "P4", "P5_v1", "P5_v2"), "AAABBBB")))
    held = []
    for fold in range(3):
        run = labelled / f"fold{fold}"
        status, out, err = said("train", "segmentation", *TINY, "--data-root", labelled, "--test", 0, "--cv-folds", 3, "--cv-fold", fold, "--stratify-by", labelled / "sites.csv", "--run", run)
        assert status == 0 and f"fold {fold} of 3" in out, (out, err)
        proof = json.loads((run / "split.json").read_text())
        assert proof["drawn"]["folds"] == 3 and proof["states"] == "no patient and no hash lies on two sides"
        held += Run(run).meta["data"]["split"]["val"]
    assert sorted(held) == ["P0", "P1", "P2", "P3", "P4", "P5_v1", "P5_v2"]
    for argv, says in ((("--cv-folds", 3, "--cv-fold", 3), "fold=3 must be one of 0 to 2"), (("--cv-folds", 7), "folds=7 of 5 patients"), (("--stratify-by", labelled / "given.csv"), "")):
        assert checked(labelled, *argv)[0] == 2 and says in checked(labelled, *argv)[2]


# ---- split.json

def test_a_run_keeps_its_proof_and_compares_it_when_it_goes_on(labelled, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    for f in labelled.rglob("P*.nii.gz"):
        (data / f.relative_to(labelled)).parent.mkdir(parents=True, exist_ok=True)
        (data / f.relative_to(labelled)).write_bytes(f.read_bytes())
    assert said("train", "segmentation", *TINY, "--data-root", data, "--run", run)[0] == 0
    file = run / "split.json"
    proof, text = json.loads(file.read_text()), file.read_text()
    assert proof["states"] == "no patient and no hash lies on two sides" and {*proof["cases"]} == {"P0", "P1", "P2", "P3", "P4", "P5_v1", "P5_v2"}
    assert proof["cases"]["P0"]["voxels"]["image"] == fingerprint(read_volume(data / "images/P0.nii.gz").data).voxels and proof["cases"]["P5_v2"]["patient"] == "P5"
    assert "proof" not in Run(run).meta["data"], "it is a file of its own"
    goes_on = lambda: said("train", "--resume", run, "--steps", Run(run).step + 1)
    status, out, err = goes_on()
    assert status == 0 and "voxels" not in err, err
    for changed, says in ((text.replace('"side": "train"', '"side": "val"', 1), "contradicts the split of the run"), (text.replace("no patient and no hash", "no patient at all"), "states"),
            (text[:200], "is no valid JSON"), ("[]", "is no proof of a split")):
        file.write_text(changed)
        status, out, err = goes_on()
        assert status == 2 and says in err and "split.json" in err and "Traceback" not in err, err
    file.write_text(text)
    save(field(99), data / "images/P0.nii.gz")
    status, out, err = goes_on()
    assert status == 0 and "the voxels of P0 are others than when the run began" in err, err
    file.unlink()
    assert goes_on()[0] == 0, "an older run has none"
