"""A prediction in tiles: what it is fixed to, what is said of it, and what is left where it is stopped."""
import contextlib
import io
import os
import shutil
import signal

import nibabel as nib
import numpy as np
import pytest
import torch

from medlab import Trainer, recipes
from medlab.cli.evaluate import evaluate_run, score_options
from medlab.cli.main import main
from medlab.core import UnknownName
from medlab.recipes.base import Recipe
from medlab.recipes.segmentation import probabilities
from medlab.train.state import load_model


def said(*argv):
    "Exit status, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A run, and two volumes."
    root = tmp_path_factory.mktemp("prediction")
    recipe = recipes.Segmentation(image_size=(16, 16, 16), filters=(4, 8, 8), phantoms=4)
    with Trainer(recipe, root / "run", threads=1) as t: t.fit(1, progress=False)
    rng = np.random.default_rng(0)
    (root / "in").mkdir()
    for name in "ab": nib.save(nib.Nifti1Image(rng.normal(size=(40, 40, 40)).astype(np.float32), np.eye(4)), root / f"in/{name}.nii.gz")
    return root


def files(folder): return sorted(p.name for p in folder.rglob("*")) if folder.exists() else []


@pytest.mark.parametrize("at", (1, 6))
def test_ctrl_c_leaves_nothing_half_and_says_so(root, tmp_path, monkeypatch, at):
    from medlab.nets.segmentation import SupervisedUNet
    forward, calls = SupervisedUNet.forward, []
    def stopped(self, x):
        calls.append(len(x))
        if len(calls) == at: signal.raise_signal(signal.SIGINT)
        return forward(self, x)
    monkeypatch.setattr(SupervisedUNet, "forward", stopped)
    # 64 windows a case, 16 of them in each call of the network
    status, out, err = said("predict", root / "run", root / "in", tmp_path / "out", "--tile-batch", 16)
    first = at <= 4
    assert status == 130 and f"interrupted: {'a' if first else 'b'} was not written" in err and "Traceback" not in err, err
    assert files(tmp_path / "out") == ([] if first else ["a-labels.nii.gz"]), "no part, no half"
    for f in (tmp_path / "out").glob("*.gz"): nib.load(f).get_fdata()


def test_windows_at_once_change_nothing_and_are_said(root, tmp_path):
    recipe, model, _ = load_model(root / "run")
    image = recipe.data([recipe.find(root / "in/a.nii.gz")[0]]).whole(0, label=False).image
    with torch.no_grad(): one, *others = (probabilities(recipe, model, image, tile_batch=n) for n in (1, 3, 16, None))
    assert all(torch.allclose(p, one, atol=1e-6) for p in others)
    status, out, err = said("predict", root / "run", root / "in/a.nii.gz", tmp_path, "--threads", 1)
    assert status == 0 and "a: 64 tiles of 16 × 16 × 16, " in err and "ms a tile, by how many: 1: " in err, err
    status, out, err = said("predict", root / "run", root / "in/a.nii.gz", tmp_path, "--tile-batch", 2)
    assert status == 0 and "tiles of" not in err, "nothing was tried"
    for option, words in (("--tile-batch", "tile_batch=0 must be at least 1"), ("--threads", "--threads 0 must be at least 1")):
        assert (result := said("predict", root / "run", root / "in/a.nii.gz", tmp_path, option, 0))[0] == 2 and words in result[2], result


def test_memory_for_fewer_windows_at_once_keeps_what_is_done(root, tmp_path, monkeypatch):
    from medlab.nets.segmentation import SupervisedUNet
    expected = said("predict", root / "run", root / "in/a.nii.gz", tmp_path / "all", "--tile-batch", 8)
    forward, sizes = SupervisedUNet.forward, []
    def short(self, x):
        if len(x) > 2: raise torch.OutOfMemoryError("planted")
        sizes.append((len(x), x.shape[2]))
        return forward(self, x)
    monkeypatch.setattr(SupervisedUNet, "forward", short)
    status, out, err = said("predict", root / "run", root / "in/a.nii.gz", tmp_path / "short", "--tile-batch", 8)
    assert expected[0] == status == 0 and "it goes on with 4 of its tiles at once" in err and "it goes on with 2 of its tiles" in err
    assert {*sizes} == {(2, 16)} and "tried again" not in err, "no smaller tile was needed"
    a, b = (nib.load(tmp_path / f"{k}/a-labels.nii.gz").get_fdata() for k in ("all", "short"))
    assert (a == b).mean() > 0.999


def test_the_number_of_threads_is_put_back(root, tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.getloadavg", lambda: (1e3,) * 3)
    torch.set_num_threads(2)
    try:
        status, out, err = said("predict", root / "run", root / "in/a.nii.gz", tmp_path)
        assert status == 0 and "with one thread since the machine is busy" in err and torch.get_num_threads() == 2
    finally: torch.set_num_threads(before)


def test_scores_are_made_with_the_options_of_prediction(tmp_path, capsys):
    "Planted: an evaluation that ignores tile and overlap, an option of neither, an option that the recipe's own score does not take. What is not typed is left to the recipe."
    run, tiny = tmp_path / "run", dict(recipes.Segmentation.tiny, val=0.25, test=0.25)
    with Trainer(recipes.Segmentation(**tiny), run, threads=1) as t:
        t.fit(2, progress=False)
        case, wide, plain = t.recipe.split.val[0], t.evaluate(tile=8, overlap=0.0, tile_batch=1), t.evaluate()
        for call in (lambda: t.predict(case, tile_size=8), lambda: t.evaluate(tile_size=8)):
            with pytest.raises(UnknownName, match="unknown option 'tile_size'; did you mean 'tile'"): call()
    assert str(wide) != str(plain)
    status, out, err = said("evaluate", run, "--tile", 8, "--overlap", 0, "--tile-batch", 1, "--threads", 1)
    assert status == 0 and str(wide) in out and str(plain) in said("evaluate", run, "--threads", 1)[1], err
    with pytest.raises(SystemExit): main(["evaluate", str(run), "--help"])
    assert "--overlap OVERLAP" in capsys.readouterr().out and "unknown option '--tilee'; did you mean '--tile'" in said("evaluate", run, "--tilee", 8)[2]
    assert "overlap=1.0 must be in [0, 1)" in said("evaluate", run, "--overlap", 1)[2]
    seen = []

    class Own(recipes.Segmentation):
        "Its scores take a tile, and nothing else."
        def score(self, model, name, tile=16): seen.append(tile); return dict(dice=0.5)

    assert {*score_options(Own)} == {"tile"} and {*score_options(recipes.Segmentation)} == {*recipes.Segmentation.predict_options} and not score_options(Recipe)
    assert {*score_options(recipes.FastDDPM)} == {*recipes.FastDDPM.predict_options} and {*score_options(recipes.Restoration)} == {*recipes.Restoration.predict_options}
    for kw in ({}, dict(tile=8)): evaluate_run(run, cls=type("Segmentation", (Own,), {}), **kw)
    assert {*seen} == {16, 8}


@pytest.mark.parametrize("output,words", [("{there}/file", "file: not a directory"), ("{there}/file/x.nii.gz", "file: not a directory"),
    ("/proc/self/out", "cannot be written (/proc/self: "), ("{there}/labels.nii.gz", "is a folder, and its name is that of a file"),
    ("{there}/x.png", "cannot write '.png'; name a folder, or a file that ends in .nii"), ("{there}/scan.nii.gz", "is the input itself and would be overwritten"),
    ("{there}/closed/x", "permission denied")])
def test_what_cannot_be_written_is_refused_before_it_is_predicted(root, tmp_path, monkeypatch, output, words):
    "Planted: outputs that fail after minutes of work. Clean: new folders and files, of which nothing is made but the prediction."
    if "closed" in output and not os.geteuid(): pytest.skip("to root nothing is forbidden")
    (tmp_path / "file").touch()
    (tmp_path / "labels.nii.gz").mkdir()
    (tmp_path / "closed").mkdir(mode=0o500)
    shutil.copy(root / "in/a.nii.gz", tmp_path / "scan.nii.gz")
    before, calls, predict = files(tmp_path), [], recipes.Segmentation.predict
    monkeypatch.setattr(recipes.Segmentation, "predict", lambda *a, **kw: calls.append(1) or predict(*a, **kw))
    status, out, err = said("predict", root / "run", tmp_path / "scan.nii.gz", output.replace("{there}", str(tmp_path)), "--threads", 1)
    assert status == 2 and words in err and err.count("\n") == 1 and "Traceback" not in err and not calls and files(tmp_path) == before, (out, err)
    status, out, err = said("predict", root / "run", tmp_path / "scan.nii.gz", tmp_path / "new/deep.nii.gz", "--threads", 1)
    assert status == 0 and len(calls) == 1 and {*files(tmp_path)} - {*before} == {"new", "deep.nii.gz"}, err


@pytest.mark.parametrize("table,words", [("{there}/nowhere/x.csv", "nowhere does not exist; make it first"), ("{there}", "is a folder; name a file in it"), ("/proc/self/x.csv", "x.csv cannot be written (/proc/")])
def test_a_table_that_cannot_be_written_is_refused_before_it_is_scored(root, tmp_path, monkeypatch, table, words):
    monkeypatch.setattr("medlab.cli.evaluate.evaluate_run", lambda *a, **kw: pytest.fail("it was scored"))
    status, out, err = said("evaluate", root / "run", "--csv", table.replace("{there}", str(tmp_path)))
    assert status == 2 and words in err and err.count("\n") == 1 and not files(tmp_path), err


def test_a_table_goes_over_an_older_one(root, tmp_path):
    (tmp_path / "x.csv").write_text("older")
    status, out, err = said("evaluate", root / "run", "--csv", tmp_path / "x.csv", "--threads", 1)
    assert status == 0 and (tmp_path / "x.csv").read_text().startswith("case,"), err


def test_a_run_without_a_checkpoint_says_when_one_comes(tmp_path):
    "Planted: a run that died before its first checkpoint."
    recipe = recipes.Segmentation(image_size=(16, 16, 16), filters=(4, 8, 8), phantoms=4)
    with Trainer(recipe, tmp_path / "run", threads=1, save_every=50) as t:
        t.saver.save_end = lambda state: None
        t.fit(1, progress=False)
    status, out, err = said("predict", tmp_path / "run", tmp_path, tmp_path / "out")
    assert status == 2 and "has no checkpoint to predict from: it is done at step 1, and is saved every save_every=50 steps, after save_minutes=10.0" in err, err
    assert f"medlab train --resume {tmp_path}/run --set save_minutes=1" in err and err.count("\n") == 1
