"""V-JEPA on volumes from the command line: trained, stopped and resumed to the bit; each planted fault is alarmed or refused, a clean run is quiet.
"""
import functools
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest
import tifffile
import torch
from test_cli import is_mistake, said

from medlab import Run, Trainer, recipes
from medlab.contracts.system import Average
from medlab.core import UserError
from medlab.nets.vjepa import Encoder, take
from medlab.oct.phantoms import write_oct_dicom, write_oct_phantoms
from medlab.probes.features import FeatureSet
from medlab.recipes.vjepa3d import VJEPALosses
from medlab.run.checkpoint import newest_state

KNOBS = dict(lr=1e-3, warmup=10, horizon=400, teacher_start=0.99, val_share=0.0, save_every=0)
OPTIONS = ("--debug", "--threads", 1, *(f"--{k}={v}" for k, v in KNOBS.items()))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    "Six synthetic patients of three makers as DICOM."
    root = tmp_path_factory.mktemp("vjepa")
    write_oct_phantoms(root / "data", 6, shape=(8, 32, 32))
    return root


def trained(path, recipe=None, steps=60, **knobs):
    "The run of a tiny network, and which alarms it raised: (iteration, signal)."
    with Trainer(recipe or recipes.VJEPA3D(**recipes.VJEPA3D.tiny), path, device="cpu", threads=1, **KNOBS | knobs) as t: t.fit(steps=steps, progress=False)
    run = Run(path)
    return run, [(e.step, e.data["signal"]) for e in run.events("collapse")]


# from the command line

def test_stopped_and_resumed_to_the_bit(scans):
    line = ("train", "vjepa3d", "--data-root", scans / "data", *OPTIONS, "--val", 0.2)
    status, out, err = said(*line, "--run", scans / "whole", "--steps", 24)
    assert status == 0, err
    assert said(*line, "--run", scans / "halves", "--steps", 11)[0] == 0
    assert said("train", "--resume", scans / "halves", "--steps", 24, "--threads", 1)[0] == 0
    (whole, _), (halves, _) = (newest_state(scans / r) for r in ("whole", "halves"))
    assert whole["progress"]["iteration"] == 24 == whole["step"]["optimizer_step"]
    for part in (lambda s: s["model"], lambda s: s["step"]["system"]["averages"]["teacher"]):
        assert all(torch.equal(v, part(halves)[k]) for k, v in part(whole).items())
    assert any(not torch.equal(v, whole["step"]["system"]["averages"]["teacher"][k.removeprefix("encoder.")]) for k, v in whole["model"].items() if k.startswith("encoder.")), "the teacher is not the student"
    losses = [Run(scans / r).metrics("loss")["loss"].value for r in ("whole", "halves")]
    assert np.array_equal(*losses) and len(losses[0]) == 24
    assert not Run(scans / "whole").events("collapse")


def test_a_resumed_run_keeps_its_split_and_its_plan_names_the_rate(scans):
    run = Run(scans / "halves")
    info = run.meta["data"]
    patients = [{n.rsplit("_", 2)[0] for n in info["split"][k]} for k in ("train", "val", "test")]
    assert patients[0] and patients[1] and not set.intersection(*patients[:2])
    texts = [e.text for e in run.events("data")]
    assert any("0 restarts" in t for t in texts) and any("by manufacturer" in t for t in texts)


def test_evaluated_with_the_mean_beside_it(scans):
    status, out, err = said("evaluate", scans / "whole", "--csv", scans / "scores.csv")
    assert status == 0, err
    assert {"loss", "mean_loss", "skill", "std", "domain"} <= set((scans / "scores.csv").read_text().splitlines()[0].split(","))


def test_features_are_written_and_probed(scans):
    status, out, err = said("embed", scans / "whole", scans / "data", scans / "features.npz", "--threads", 1)
    assert status == 0 and "12 scans" in out and "weights of step 24" in out, (out, err)
    found = FeatureSet.load(scans / "features.npz")
    assert found.values["mean"].shape == (12, 48) and np.isfinite(found.values["depth"]).all()
    with torch.no_grad():
        sample = recipes.VJEPA3D(data_root=str(scans / "data"), **recipes.VJEPA3D.tiny, val=0.2)
        sample.setup()
        image = sample.data([found.cases[0]]).loaded(0)
        tokens = Run(scans / "whole").encoder()(image.image[None] * image.seen[None, None, :, None, None])[0]
    if bool(image.seen.all()): np.testing.assert_allclose(tokens.mean(0), found.values["mean"][0], atol=1e-5)
    patients = sorted({*found.patients})
    held = [p for p in patients if p not in Run(scans / "whole").meta["data"]["trained"]]
    grade = {p: int(p in held[::2] or p in [q for q in patients if q not in held][::2]) for p in patients}
    (scans / "labels.csv").write_text("patient,grade\n" + "".join(f"{p},{g}\n" for p, g in grade.items()))
    status, out, err = said("probe", scans / "whole", "--labels", scans / "labels.csv", "--probes", "knn", "--csv", scans / "probe.csv", "--threads", 1)
    assert status == 0 and "patients were seen by the encoder" in out and "depth profile" in out, (out, err)
    assert (scans / "probe.csv").read_text().startswith("features,probe,auroc")
    assert "no label" not in out and "are of no" not in out, "everybody has a partner"
    few = [p for p in patients if p != patients[-1]]
    (scans / "few.csv").write_text("patient,grade\n" + "".join(f"{p},{grade[p]}\n" for p in few) + "nobody,1\n")
    status, out, err = said("probe", scans / "whole", "--labels", scans / "few.csv", "--probes", "knn", "--threads", 1)
    assert status == 0 and f"2 of 12 scans have no label: {patients[-1]}_L_0, {patients[-1]}_R_0" in out and "1 labels are of no patient that is here: nobody" in out, (out, err)


def test_layers_and_the_same_network_from_scratch(tmp_path, monkeypatch):
    from medlab.probes import layers
    monkeypatch.setattr(layers, "dense_probe", functools.partial(layers.dense_probe, batch=32))
    from medlab.cli import features
    monkeypatch.setattr(features, "probe_run", functools.partial(features.probe_run, layer_steps=30, repeats=50))
    trained(tmp_path / "run", recipes.VJEPA3D(**recipes.VJEPA3D.tiny | dict(phantoms=12)), steps=2)
    status, out, err = said("probe", tmp_path / "run", "--labels", "layers", "--csv", tmp_path / "layers.csv", "--threads", 1)
    rows = (tmp_path / "layers.csv").read_text().splitlines()
    assert status == 0 and rows[0] == "features,layer,dice,dice_low,dice_high,share" and len(rows) == 1 + 4 * 12, (out, err)
    assert "random: tokens" in out and "greys and place" in out and "layers, trained: tokens − random: tokens: " in out
    before = newest_state(tmp_path / "run")[0]["model"]
    status, out, err = said("probe", tmp_path / "run", "--labels", "lesion", "--probes", "knn", "--scratch-steps", 3, "--threads", 1)
    assert status == 0 and "scratch: mean" in out and "from scratch: 3 steps of 8 samples" in err, (out, err)
    assert all(torch.equal(v, before[k]) for k, v in newest_state(tmp_path / "run")[0]["model"].items()), "the run's own weights stay"


@pytest.mark.parametrize("words,message", [
    (("embed", "whole", "data", "out.csv"), "written as .npz or .parquet"),
    (("embed", "whole", "nowhere", "out.npz"), "nowhere"),
    (("embed", "nowhere", "data", "out.npz"), "nowhere"),
    (("probe", "whole"), "no labels to learn from"),
    (("probe", "whole", "--labels", "none.csv"), "none.csv"),
    (("probe", "whole", "--labels", "strangers.csv"), "names must be the same"),
    (("probe", "whole", "--labels", "misspelt.csv"), "did you mean 'patient-0001_R_0'?"),
    (("probe", "whole", "--labels", "labels.csv", "--probes", "linea"), "linear"),
    (("probe", "whole", "--labels", "labels.csv", "--scratch-steps", "-1"), "must be 0 (off) or more"),
    (("probe", "whole", "--labels", "layers"), "are known of phantoms alone"),
    (("probe", "whole", "--masks", "nowhere"), "nowhere is no folder"),
    (("probe", "whole", "--masks", "nowhere", "--labels", "labels.csv"), "are two questions"),
    (("probe", "whole", "--labels", "labels.csv", "--share", "1.5"), "share=1.5"),
    (("probe", "whole", "--labels", "labels.csv", "--target", "greade"), "grade"),
])
def test_what_cannot_be_embedded_or_probed_is_refused(scans, monkeypatch, words, message):
    monkeypatch.chdir(scans)
    (scans / "strangers.csv").write_text("case,label\na,0\nb,1\n")
    (scans / "misspelt.csv").write_text("case,label\nPatient-0001_r_0,0\nPatient-0002_r_0,1\n")
    is_mistake(said(*words, "--threads", 1), message)
    assert not (scans / "out.npz").exists()


def test_a_missing_package_is_told_before_any_scan_is_read(scans, monkeypatch):
    from medlab.cli import features
    monkeypatch.chdir(scans)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(features, "embed_run", lambda *words: pytest.fail("it was embedded"))
    is_mistake(said("embed", "whole", "data", "out.parquet", "--threads", 1), "medlab[table]")


def test_a_run_within_its_warm_up_is_told(tmp_path):
    words = ("train", "vjepa3d", "--debug", "--steps", 3, "--threads", 1, "--phantoms", 4)
    status, out, err = said(*words, "--run", tmp_path / "a")
    assert status == 0 and "warning: all steps to 3 lie in the warm-up, in which the learning rate rises to 3e-07 of 0.0001; train longer, or take a smaller --warmup (now 1000)" in out, (out, err)
    status, out, err = said(*words, "--run", tmp_path / "b", "--warmup", 2)
    assert status == 0 and "lie in the warm-up" not in out, (out, err)



def test_damaged_files_are_in_the_table_and_training_goes_on(tmp_path):
    write_oct_phantoms(tmp_path / "data", 6, damaged=0.25, shape=(8, 32, 32))
    status, out, err = said("check", tmp_path / "data", "--recipe", "vjepa3d", "--debug")
    assert "12 cases: 9 sound, 3 in quarantine" in out and "manufacturer | volumes | quarantine" in out, out
    status, out, err = said("train", "vjepa3d", "--data-root", tmp_path / "data", "--run", tmp_path / "run", "--steps", 2, *OPTIONS)
    assert status == 0 and len(Run(tmp_path / "run").meta["data"]["quarantined"]) == 3, err


# damaged files

DAMAGES = {"no pixels": "no pixel data", "cut": "pixels damaged", "garbled": "pixels damaged", "header": "header damaged", "constant": "constant", "one frame": "one frame only"}


def damage(path, phantom, how):
    "Damage a file of a phantom."
    whole = path.read_bytes()
    if how in ("cut", "garbled", "no pixels"): return write_oct_dicom(phantom, path, damage=how.removeprefix("no "))
    if how == "header": return path.write_bytes(whole[:140] + bytes(range(256)) * 2 + whole[652:])
    d, data = pydicom.dcmread(path), phantom.data[:1] if how == "one frame" else np.full_like(phantom.data, 7)
    if how == "one frame": d.PerFrameFunctionalGroupsSequence = (d.get("PerFrameFunctionalGroupsSequence") or [])[:1]
    d.file_meta.TransferSyntaxUID, d.NumberOfFrames, d["PixelData"].is_undefined_length = pydicom.uid.ExplicitVRLittleEndian, len(data), False
    d.PixelData = data.tobytes()
    d.save_as(path, enforce_file_format=True)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    "Thirty scans as DICOM: `sound` holds the 24 whole ones, `every` also six damaged, each in another way; and the phantoms of these."
    root = tmp_path_factory.mktemp("archive")
    written = write_oct_phantoms(root / "sound", 15, shape=(8, 32, 32))
    shutil.copytree(root / "sound", root / "every")
    picked = dict(zip(DAMAGES, np.random.default_rng(0).permutation(len(written))))
    for how, i in picked.items():
        path, phantom, _ = written[i]
        path.unlink()
        damage(root / "every" / path.relative_to(root / "sound"), phantom, how)
    return root, {how: written[i][1] for how, i in picked.items()}


def on_files(root, name, meanwhile=None, steps=20, **fields):
    "A run on the files of a folder: (its trainer, how often each manufacturer was drawn); `meanwhile` is done before the first step."
    t = Trainer(recipes.VJEPA3D(**recipes.VJEPA3D.tiny, val=0.2, test=0.0, **fields), root / name, device="cpu", threads=1, **KNOBS)
    drawn, prepare = Counter(), t.recipe.prepare

    def counted(batch, *args):
        drawn.update(batch["domain"])
        return prepare(batch, *args)

    t.recipe.prepare = counted
    if meanwhile: meanwhile(t.recipe)
    with t: t.fit(steps=steps, progress=False)
    return t, drawn


def test_a_fifth_of_the_files_damaged_trains_as_without_them(archive):
    "Each damaged file is in the table with its reason; the split, the order and so the losses are to the bit those of a run on the sound files alone."
    root, damaged = archive
    (every, drawn), (sound, _) = (on_files(root, f"run of {part}", data_root=str(root / part)) for part in ("every", "sound"))
    losses = [Run(t.path).metrics("loss")["loss"].value for t in (every, sound)]
    assert len(losses[0]) == 20 and np.array_equal(*losses) and every.info["split"] == sound.info["split"]
    out = dict(map(tuple, every.info["quarantined"]))
    assert len(out) == 6 and not sound.info["quarantined"]
    for how, phantom in damaged.items():
        name = next(n for n in out if n in (phantom.name, f"{phantom.patient}_{phantom.eye}_{0}"))
        assert {"no pixel data": "no pixel data", "pixels damaged": "pixels", "header damaged": "damaged DICOM header", "constant": "is constant", "one frame only": "one frame only"}[DAMAGES[how]] in out[name]
    (table,) = [e.text for e in Run(every.path).events("data") if e.text.startswith("volumes by manufacturer")]
    head, *rows = [line.split(" | ") for line in table.split("\n")[1:]]
    counted = {r[0]: {k: v for k, v in zip(head[3:], map(int, r[3:])) if v} for r in rows}
    wanted = {}
    for how, phantom in damaged.items():  # a header that says nothing says no manufacturer either
        wanted.setdefault("unknown" if how == "header" else phantom.manufacturer, Counter())[DAMAGES[how]] += 1
    assert {m: {k: v for k, v in c.items() if k != "sound"} for m, c in counted.items() if set(c) != {"sound"}} == wanted
    assert sum(c.get("sound", 0) for c in counted.values()) == 24
    held = Counter(every.recipe.cases[n].manufacturer for n in every.info["split"]["train"])
    assert max(held.values()) > 1.5 * min(held.values()) and set(drawn) == set(held)  # the archive is not even, but what is drawn from it is:
    assert len({*every.recipe.dataset().domains.values()}) == 1 and max(drawn.values()) - min(drawn.values()) <= 6, drawn


def test_files_damaged_after_the_check_are_left_out_and_the_loss_is_no_other(archive):
    "Files that are torn while a run goes on fall out of their batches, and then into quarantine. The order of the samples is another then, so the loss is compared on the same held-out scans with the same masks, within the difference that another seed makes."
    root, _ = archive
    shutil.copytree(root / "sound", root / "later")
    torn = []

    def tear(recipe):
        torn.extend(recipe.split.train[::5])
        for n in torn:
            (path,) = recipe.cases[n].paths
            path.write_bytes(path.read_bytes()[:-3000])

    later, _ = on_files(root, "run of later", tear, data_root=str(root / "later"), cache_gb=0.0)
    clean, other = (on_files(root, f"run of seed {k}", data_root=str(root / "sound"), seed=k)[0] for k in (0, 1))
    scans = clean.recipe.split.shown
    loss = [np.mean([clean.recipe.score(t.recipe.for_use(t.model.eval(), {k: a.network for k, a in t.system.averages.items()}), n)["loss"] for n in scans]) for t in (clean, other, later)]
    print("loss of held-out scans: clean %.4f, another seed %.4f, a fifth torn %.4f" % tuple(loss))
    run = Run(later.path)
    faults = [e for e in run.events("bad_sample")]
    assert len(torn) == 4 and len(run.metrics("loss")["loss"].value) == 20 and faults and all(any(n in e.text for n in torn) for e in faults)
    assert run.events("quarantine") and not Run(clean.path).events("bad_sample")
    assert abs(loss[2] - loss[0]) < 2 * abs(loss[1] - loss[0]), loss


@pytest.mark.skipif(not Path(os.environ.get("MEDLAB_DATA", ""), "dicom").is_dir() or "MEDLAB_DATA" not in os.environ, reason="no folder dicom in MEDLAB_DATA")
def test_a_ct_of_single_frames_is_one_volume(tmp_path):
    data = Path(os.environ["MEDLAB_DATA"], "dicom", "ct_j2k_overlap_noext")
    status, out, err = said("check", data, "--recipe", "vjepa3d", "--debug", "--val", 0, "--test", 0)
    assert status == 0 and "1 case: 1 sound, 0 in quarantine" in out, (out, err)


# planted faults, all within 100 steps

def test_a_clean_run_is_quiet(tmp_path):
    run, alarms = trained(tmp_path / "run", steps=100)
    assert alarms == [] and not [e.text for e in run.events() if e.level == "error"]
    seen = run.metrics("features/teacher_std", "teacher/motion")
    std, motion = seen["features/teacher_std"], seen["teacher/motion"]
    assert len(std) == 11 and min(std.value) > 0.3 and min(motion.value) > 0


def test_an_average_that_is_never_updated(tmp_path, monkeypatch):
    monkeypatch.setattr(Average, "update", lambda self, weight: None)
    assert (30, "motion") in trained(tmp_path / "run")[1]


def test_a_teacher_that_is_the_student(tmp_path):
    assert (30, "equal") in trained(tmp_path / "run", teacher_start=0.0, teacher_end=0.0)[1]


def test_a_teacher_shared_with_the_student(tmp_path, monkeypatch):
    made = VJEPALosses.__init__

    def shared(self, recipe, system):
        made(self, recipe, system)
        self.teacher = system.model.encoder

    monkeypatch.setattr(VJEPALosses, "__init__", shared)
    assert (30, "equal") in trained(tmp_path / "run")[1]


def test_a_predictor_that_gives_one_answer(tmp_path, monkeypatch):
    made = recipes.VJEPA3D.network

    def dead(self):
        net = made(self)
        torch.nn.init.zeros_(net.predictor.predictor_proj.weight).requires_grad_(False)
        return net

    monkeypatch.setattr(recipes.VJEPA3D, "network", dead)
    monkeypatch.setattr(recipes.VJEPA3D, "prove_masking", lambda self, model: 0)  # no context reaches its answer
    assert (20, "predicted") in trained(tmp_path / "run")[1]


@pytest.mark.parametrize("how", ["all_tokens", "mixed_before"])
def test_context_that_is_not_masked_never_trains(tmp_path, monkeypatch, how):
    if how == "all_tokens":
        def predictions(self, model, x, masks):
            every = torch.arange(64).expand(len(x), -1)
            return model(x, [every] * len(masks), [m.target for m in masks])
        monkeypatch.setattr(recipes.VJEPA3D, "predictions", predictions)
    else:
        forward = Encoder.forward
        monkeypatch.setattr(Encoder, "forward", lambda self, x, keep=None, **kw: forward(self, x, **kw) if keep is None else take(forward(self, x, **kw), keep))
    with pytest.raises(UserError, match="hidden patches reach the student"): Trainer(recipes.VJEPA3D(**recipes.VJEPA3D.tiny), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_cannot_follow(tmp_path):
    found = trained(tmp_path / "run", steps=100, teacher_start=0.97, teacher_end=0.97, distance_alarm=0.01)[1]
    assert (100, "distance") in found, "after the warm-up and twice the 33 steps that it averages over"


@pytest.mark.parametrize("masks,ratio", [("blocks", None), ("random", 0.9)])
def test_a_rate_ten_times_too_high(tmp_path, masks, ratio):
    "The weights that a step made are written over within fifty others; the clean run of the same seed has less than half of that drift."
    recipe = lambda: recipes.VJEPA3D(**recipes.VJEPA3D.tiny | dict(masks=masks))
    high, alarms = trained(tmp_path / "high", recipe(), steps=60, lr=1e-2, mask_ratio=ratio)
    assert any(signal == "drift" and step <= 60 for step, signal in alarms), alarms
    clean, quiet = trained(tmp_path / "clean", recipe(), steps=60, mask_ratio=ratio)
    most = [max(run.metrics("drift")["drift"].value) for run in (clean, high)]
    assert quiet == [] and most[0] < 0.25 and 2 * most[0] < most[1], most


def test_a_horizon_in_the_wrong_unit(tmp_path):
    "Eleven epochs of nine steps, given as a horizon of steps: told before the first step, with restarts or without, and alarmed where nothing is learned any more."
    restarts, _ = trained(tmp_path / "restarts", steps=1, schedule="restarts", horizon=11)
    warned = [e.text for e in restarts.events("data") if e.level == "warning"]
    assert any("the learning rate restarts 2 times, first at step 21; the horizon 11 counts optimizer steps, not epochs" in t for t in warned)
    early, alarms = trained(tmp_path / "early", steps=60, horizon=20, teacher_horizon=400)
    said_first, alarm = early.events("zero_lr")
    assert (said_first.step, said_first.level) == (0, "warning") and "so 40 of the 60 steps to come will move nothing" in said_first.text
    assert (alarm.step, alarm.level) == (40, "error"), "twenty steps with a rate of zero"
    late, _ = trained(tmp_path / "late", steps=2, horizon=300)
    assert not late.events("zero_lr")
    clean, _ = trained(tmp_path / "clean", steps=30, horizon=30)
    assert not clean.events("zero_lr") and not [e for e in clean.events("data") if "restarts 2" in e.text]


def test_a_validation_loss_of_zero_is_no_score(tmp_path, monkeypatch):
    from medlab.recipes import vjepa3d
    zero = lambda *args, **kw: dict(loss=torch.zeros(1))
    with Trainer(recipes.VJEPA3D(**recipes.VJEPA3D.tiny), tmp_path / "run", device="cpu", threads=1, **KNOBS | dict(val_every_steps=2)) as t:
        t.fit(steps=2, progress=False)
        monkeypatch.setattr(t.recipe, "score", functools.partial(score_with, vjepa3d, monkeypatch, t.recipe.score, zero))
        t.fit(steps=2, progress=False)
    told = [e for e in Run(tmp_path / "run").events("validation") if e.level == "error"]
    assert len(told) == 1 and told[0].step == 4 and "is exactly 0" in told[0].text


def score_with(module, monkeypatch, score, zero, *args):
    "The score where every loss is zero."
    with monkeypatch.context() as m:
        m.setattr(module, "jepa_losses", zero)
        return score(*args)


# bad input

BAD = [
    ("--image-size 8,32,4", "is 4 voxels along x, and a patch is 8"),
    ("--image-size 2,8,8", "leave no context"),
    ("--masks random --mask-ratio 0", "mask_ratio=0 is refused"),
    ("--masks random --mask-ratio 0.999", "leave no context"),
    ("--masks tube --mask-ratio 1", "must lie between 0 and 1"),
    ("--masks tube --mask-ratio 0.95", "hides 16 of 16 places of a volume of (4, 4, 4) tokens; take a ratio of at most 0.937"),
    ("--masks tube --image-size 8,16,16", "ratio 0.9 hides 4 of 4 places of a volume of (4, 2, 2) tokens; take a ratio of at most 0.749"),
    ("--masks random --image-size 2,8,8", "leave no context"),
    ("--image-size 2,8,16", "hide all of a volume of (1, 1, 2) tokens; take fewer or smaller blocks"),
    ("--mask-ratio 0.5", "mask_ratio=0.5 is nothing that masks='blocks' have"),
    ("--dense-weight 0.5", "start a run with dense=True"),
    ("--teacher-start 1", "keeps the teacher as it was"),
    ("--teacher-start 0.99 --teacher-end 0.9", "must rise within"),
    ("--set domain_balance=even", "domain_balance is a field of the recipe"),
    ("--encoder huge", "unknown encoder 'huge'"),
    ("--weights {root}/none.pt", "is not a file"),
]


@pytest.mark.parametrize("options,words", BAD, ids=[o for o, _ in BAD])
def test_what_cannot_work_is_refused_before_anything_is_written(scans, tmp_path, options, words):
    is_mistake(said("train", "vjepa3d", "--debug", "--run", tmp_path / "run", "--steps", 1, *options.replace("{root}", str(scans)).split()), words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", ["--masks tube --mask-ratio 0.937", "--masks tube --image-size 8,16,16 --mask-ratio 0.749", "--masks random --image-size 2,8,16 --mask-ratio 0.49", "--image-size 2,16,16"])
def test_the_neighbours_of_impossible_masks_train(scans, tmp_path, options):
    status, out, err = said("train", "vjepa3d", "--data-root", scans / "data", *OPTIONS, "--run", tmp_path / "run", "--steps", 1, *options.split())
    assert status == 0 and "done at step 1" in out, (out, err)


def test_public_weights_say_what_became_of_them(tmp_path):
    found = Encoder((1, 8, 8), dim=48, depth=2, heads=2, channels=3).state_dict() | dict(pos_embed=torch.zeros(1, 64, 48))
    torch.save(dict(target_encoder=found), tmp_path / "public.pt")
    line = ("train", "vjepa3d", *OPTIONS, "--run", tmp_path / "run", "--weights", tmp_path / "public.pt")
    status, out, err = said(*line, "--steps", 1)
    told = f"the encoder begins with public.pt: loaded {len(found) - 2} of {len(found)} tensors; inflated patch_embed.proj.weight: (48, 3, 1, 8, 8) → (48, 1, 2, 8, 8); left pos_embed"
    assert status == 0 and told in out, (out, err)
    status, out, err = said("train", "--resume", tmp_path / "run", "--steps", 2, "--threads", 1)
    assert status == 0 and told not in out, "a run that goes on has weights of its own"
    assert [e.step for e in Run(tmp_path / "run").events("data") if told in e.text] == [0]


def test_one_patient_one_frame_and_volumes_below_a_patch(tmp_path):
    write_oct_phantoms(tmp_path / "one", 1, shape=(8, 32, 32))
    train = lambda root: said("train", "vjepa3d", "--data-root", root, "--run", tmp_path / "run", "--steps", 1, *OPTIONS)
    is_mistake(train(tmp_path / "one"), "are of one patient", "val=0")
    write_oct_phantoms(tmp_path / "small", 2, shape=(4, 16, 4))
    is_mistake(train(tmp_path / "small"), "none of the 4 volumes", "is 4 voxels along x, and a patch is 8")
    (tmp_path / "frame").mkdir()
    tifffile.imwrite(tmp_path / "frame/a.tif", np.arange(1024, dtype=np.uint8).reshape(32, 32))
    is_mistake(train(tmp_path / "frame"), "one frame only")
    assert not (tmp_path / "run").exists()
