"""Restoration from the command line, on files as users have them; and a run that is stopped and goes on, with switches flipped on the way."""
import contextlib
import io
import math

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from medlab import Run, Trainer, recipes
from medlab.cli.main import main
from medlab.data.images import write_image
from medlab.data.pair_files import PhantomPair
from medlab.phantoms import brain

TINY = ("--debug", "--threads", 1, "--dim", 4, "--refinement", 0, "--image-size", "16,16", "--strength", 2)


def said(*argv):
    "Exit status, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()


def picture(seed, size=(40, 33)): return 200 * PhantomPair(seed, size).read()["sharp"].data


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    "Four sharp images, one of which is truncated, and a run on them."
    root = tmp_path_factory.mktemp("images")
    for i in range(6): write_image(picture(i), root / f"data/{i}.png")
    whole = (root / "data/5.png").read_bytes()
    (root / "data/5.png").write_bytes(whole[:len(whole) // 2])
    status, out, err = said("train", "restoration", *TINY, "--data-root", root / "data", "--run", root / "run", "--steps", 3)
    assert status == 0 and "medlab: warning: 5 is left out: " in err and "cannot be decoded" in err and "step 0 → 3" in out, (out, err)
    return root


def test_images_are_restored_in_their_own_kind_and_size(images):
    assert said("train", "--resume", images / "run", "--steps", 5)[0] == 0 and Run(images / "run").step == 5
    status, out, err = said("predict", images / "run", images / "data", images / "made")
    assert status == 2 and "case '5'" in err and err.count("medlab: ") == 1 + err.count("were cut") + 1, err
    made = sorted((images / "made").iterdir())
    assert [f.name for f in made] == [f"{i}-restored.png" for i in range(5)]
    with Image.open(made[0]) as new, Image.open(images / "data/0.png") as old: assert (new.size, new.mode) == (old.size, old.mode) == ((33, 40), "L")
    assert said("predict", images / "run", images / "data/1.png", images / "one.tif", "--tile", 16, "--overlap", 0.25)[0] == 0 and (images / "one.tif").exists()


def test_pairs_in_folders_with_depth(tmp_path):
    for split, seeds in dict(train=(1, 2), val=(3,)).items():
        for seed in seeds:
            made = PhantomPair(seed, (32, 32), depth=True).read()
            depth = made["depth"].copy()
            depth[0], depth[1] = 0, math.inf
            for part, x in dict(sharp=200 * made["sharp"].data, blur=100 * made["sharp"].data + 1).items(): write_image(x, tmp_path / f"d/{split}/{part}/{seed}.png")
            np_depth = tmp_path / f"d/{split}/depth/{seed}.tif"
            np_depth.parent.mkdir(exist_ok=True)
            Image.fromarray(depth).save(np_depth)
    status, out, err = said("train", "restoration", *TINY, "--network", "depth", "--data-root", tmp_path / "d", "--run", tmp_path / "run", "--steps", 2)
    assert status == 0 and "train 2, val 1, test 0" in out and "no sample dropped" in out, (out, err)
    assert said("predict", tmp_path / "run", tmp_path / "d/val", tmp_path / "made")[0] == 0 and [f.name for f in (tmp_path / "made").iterdir()] == ["3-restored.png"]
    assert said("check", tmp_path / "d", "--recipe", "restoration", *TINY, "--network", "depth")[0] == 0


def test_volumes_keep_their_grid(tmp_path):
    affine = np.diag([-2.0, 1.5, 3.0, 1.0])
    affine[:3, 3] = 11, -7, 5
    for seed in range(4): nib.save(nib.Nifti1Image(brain(seed, (20, 22, 18), noise=0).images["t1n"].T, affine), tmp_path / f"{seed}.nii.gz")
    bad = np.ones((18, 22, 20), np.float32)
    bad[3, 4, 5] = np.nan
    nib.save(nib.Nifti1Image(bad, affine), tmp_path / "nan.nii.gz")
    for dims, size in ((3, "16,16,16"), (2, "16,16")):
        status, out, err = said("train", "restoration", *TINY[:-4], "--spatial-dims", dims, "--image-size", size, "--data-root", tmp_path, "--run", tmp_path / f"run{dims}", "--steps", 2)
        assert status == 0 and "medlab: warning: nan is left out: nan.nii.gz: holds 1 NaN" in err, (out, err)
        file = tmp_path / f"made{dims}.nii.gz"
        assert said("predict", tmp_path / f"run{dims}", tmp_path / "1.nii.gz", file)[0] == 0
        made = nib.load(file)
        assert np.array_equal(made.affine, affine) and made.shape == (18, 22, 20) and np.isfinite(made.get_fdata()).all()
        file.unlink()


@pytest.mark.parametrize("argv,words", [
    ("--data-root {root}/nowhere", "does not exist"), ("--data-root {root}/data --pattern *.tif", "no image or volume named '*.tif'"), ("--data-root {root}/data --spatial-dims 3 --image-size 16,16,16", "needs volumes"),
    ("--network fftfomer", "did you mean 'fftformer'"), ("--image-size 16", "image_size"), ("--set fft_fp32=maybe", "True or False"), ("--set norm_eps=0", "norm_eps=0 is refused"), ("--blur lens", "unknown kind of blur"),
    ("--network restormer --patch 8", "unknown option of 'restormer'"), ("--fft-fp23 true", "did you mean '--fft_fp32'"), ("--depth true", "unknown option '--depth'"), ("--network restormer --set fft_fp32=false", "no layer with the switch")])
def test_mistakes(images, argv, words):
    status, out, err = said("train", "restoration", *TINY[:3], "--run", images / "never", *argv.replace("{root}", str(images)).split())
    assert status == 2 and words in err and err.startswith("medlab: ") and err.count("\n") == 1, (status, err)


def test_mistakes_of_prediction(images, tmp_path):
    before = (images / "data/0.png").read_bytes()
    for argv, words in (((images / "data/0.png", images / "data/0.png"), "is the input itself"), ((images / "data/0.png", tmp_path / "a.jpg"), "cannot write '.jpg'"), ((images / "data", tmp_path / "a.png"), "give a folder as output"), ((images / "data/0.png", tmp_path / "a.png", "--overlap", 1), "overlap=1.0 must be in"), ((images / "data/0.png", tmp_path / "a.png", "--tile", 0), "tile=0 must be"),
                        ((images / "nowhere", tmp_path / "a.png"), "does not exist"), ((images / "data/0.png", tmp_path / "a.png", "--modality", "t1n"), "modality")):
        status, out, err = said("predict", images / "run", *argv)
        assert status == 2 and words in err and "Traceback" not in err, (argv, status, err)
    assert (images / "data/0.png").read_bytes() == before
    status, out, err = said("train", "fast_ddpm", "--resume", images / "run", "--steps", 9)
    assert status == 2 and "is a run of restoration, not of fast_ddpm" in err


def test_switches_survive_a_stop_and_replay(tmp_path):
    "Stopped after step 4 and resumed: the same bits as without a stop, in fp16, with switches flipped at steps 3 and 6; and replayed from the log."
    recipe = lambda: recipes.Restoration(**{**recipes.Restoration.tiny, "image_size": (16, 16), "dim": 4, "refinement": 0, "phantoms": 4})
    state = lambda t: torch.cat([p.detach().flatten() for p in t.model.parameters()])
    kw = dict(precision="fp16", fft_fp32=False, norm_fp32=False, threads=1)
    with Trainer(recipe(), tmp_path / "whole", **kw) as t:
        t.set(at=3, fft_fp32=True, norm_eps=1e-4); t.set(at=6, fft_fp32=False, fft_loss_norm="ortho")
        t.fit(8, progress=False)
        whole, scale = state(t), t.step.scaler.get_scale()
    with Trainer(recipe(), tmp_path / "halves", **kw) as t:
        t.set(at=3, fft_fp32=True, norm_eps=1e-4)
        t.fit(4, progress=False)
    with Trainer.open(tmp_path / "halves", threads=1) as t:
        assert t.knobs.fft_fp32 and t.recipe.read("fft_fp32", t.model, None) and t.recipe.read("norm_eps", t.model, None) == 1e-4
        t.set(at=6, fft_fp32=False, fft_loss_norm="ortho")
        t.fit(4, progress=False)
        assert torch.equal(state(t), whole) and t.step.scaler.get_scale() == scale
    with Trainer(recipe(), tmp_path / "again", **kw) as t:
        t.replay(tmp_path / "whole")
        t.fit(8, progress=False)
        assert torch.equal(state(t), whole)


def test_the_watch_speaks_in_a_run(tmp_path):
    "A forward pass that overflows in half: the alarm comes with the third skip, names the forward pass and the fixes of this recipe; the scale stays ≥ 1."
    recipe = recipes.Restoration(**{**recipes.Restoration.tiny, "image_size": (16, 16), "dim": 4, "refinement": 0, "phantoms": 4})
    with Trainer(recipe, tmp_path / "run", precision="fp16", check_loss=False, max_skips=40, escalate_after=None, threads=1) as t:
        losses = t.step.losses
        t.step.losses = lambda m, b: {k: v * (math.inf if t.iteration >= 5 else 1) for k, v in losses(m, b).items()}
        with pytest.raises(RuntimeError, match="40 steps in a row"): t.fit(60, progress=False)
        assert t.run.checkpoints()[-1]["step"] >= 4, "what was learned before the failure is kept"
        said = t.run.events("loss_scale")
        assert said[0].level == "error" and said[0].step - 5 <= 3 and "the forward pass overflows" in said[0].text and "fixes: fp32_fft, ortho_fft, norm_fp32, bf16, fp32" in said[0].text
        assert any("below 1024 (critical)" in e.text for e in said) and t.run.metrics("scale")["scale"].value.min() >= 1 and t.run.events("scale_floor")
