"""The `medlab` command in the hands of people who make mistakes: exit status, one clear line, no traceback, nothing left behind."""
import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from waiting import until

from medlab.cli.main import main
from medlab.phantoms import write_brats
from medlab.run.directory import Run

MEDLAB = shutil.which("medlab", path=os.path.dirname(sys.executable))
DATA = Path(os.environ.get("MEDLAB_DATA", Path(__file__).parents[2] / "../shared/data")) / "brain_mri"
DEBUG = ("train", "fast_ddpm", "--debug", "--threads", 1, "--steps", 1)


def said(*argv):
    "Exit status, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()


def began(*argv, **env):
    "The command in a process of its own, without a W&B account."
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | env
    return subprocess.Popen([MEDLAB, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def ended(process):
    "Exit status, standard output and standard error of a process."
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def is_mistake(result, *words):
    "A user's mistake: status 2 and one line that says what is wrong, but for those that say what is being done."
    status, out, err = result
    err = "".join(l for l in err.splitlines(True) if not l.startswith("predicting "))
    assert status == 2 and err.startswith("medlab: ") and err.count("\n") == 1 and "Traceback" not in out + err, (status, out[-300:], err[-2000:])
    for w in words: assert w in err, err


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    "A folder with `cases` (four sound ones), `run` (trained for a step on phantoms), `file` and `empty`."
    root = tmp_path_factory.mktemp("cli")
    write_brats(root / "cases", [1, 2, 3, 4], size=(16, 16, 16))
    (root / "file").write_text("")
    (root / "empty").mkdir()
    (root / "empty/notes.txt").write_text("no scans yet")
    assert said(*DEBUG, "--run", root / "run")[0] == 0
    return root


# what is typed wrong

WRONG = [  # (options, what the line says); {root} is the folder of the fixture
    ("--validate-every 3", "unknown option '--validate_every': ", "val_every_steps"),
    ("--set lrr=1", "unknown knob 'lrr'; did you mean 'lr'?"),
    ("--set lr", "'lr' is not of the form name=value"),
    ("--set lr=inf", "lr=inf is refused: it must be a finite number in (0, 10]"),
    ("--lr fast", "lr=fast is refused"),
    ("--image-size big", "image_size=big must be a list such as 1,2,3"),
    ("--image-size [16,16]", "must be 3 positive integers"),
    ("--image-size [17,16,16]", "must divide by 2 along z", "try 16"),
    ("--batch-size 0", "batch_size=0 must be an integer ≥ 1"),
    ("--steps 0", "steps=0 must be an integer ≥ 1"),
    ("--steps -5", "steps=-5 must be an integer ≥ 1"),
    ("--steps 1.5", "steps=1.5 must be a whole number"),
    ("--threads -1", "threads=-1 must be an integer ≥ 1"),
    ("--device cudaa", "device='cudaa' cannot be used", "try cpu"),
    ("--optimizer Adamm", "optimizer='Adamm' is no class of torch.optim; try AdamW"),
    ("--optimizer LBFGS", "optimizer='LBFGS' needs a closure"),
    ("--optimizer Muon", "does not take this network: Muon only supports 2D"),
    ("--prediction noise", "unknown prediction 'noise'; known: epsilon, sample, v_prediction"),
    ("--resume {root}/run", "leave out debug, run"),
    ("foo", "unrecognized arguments: foo"),
    ("--data-root nowhere", "nowhere does not exist"),
    ("--data-root {root}/empty", "no case in", "CASE-{t1n,t1c,t2w,t2f}.nii.gz", "found notes.txt", "name map"),
    ("--run {root}/run", "holds a run already", "--resume"),
    ("--run {root}/file/run", "the run directory", "cannot be written: Not a directory; choose another"),
    ("--tensorboard {root}/file/x", "cannot write to", "choose another folder"),
    ("--config nowhere.yml", "nowhere.yml: cannot be read: no such file"),
    ("--config {root}", "is a folder and no ordinary file"),
]


@pytest.mark.parametrize("options,words", [(o, w) for o, *w in WRONG], ids=[o for o, *_ in WRONG])
def test_wrong_options(root, tmp_path, options, words):
    is_mistake(said(*DEBUG, "--run", tmp_path / "run", *options.replace("{root}", str(root)).split()), *words)
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


@pytest.mark.parametrize("text,words", [
    ("validate_every: 3", ["unknown key in f.yml 'validate_every': ", "val_every_steps"]),
    ("a: [", ["f.yml is not valid YAML"]),
    ("- lr", ["must hold keys and values", "it holds a list"]),
    ("lr: -1", ["lr=-1 is refused"]),
    ("threads: '2'", ["threads='2' must be an integer ≥ 1"]),
    ("device: 3", ["device=3 must be a text"]),
    ("limit: many", ["limit=many must be a whole number"]),
], ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_config(tmp_path, text, words):
    (tmp_path / "f.yml").write_text(text)
    is_mistake(said(*DEBUG[:3], "--run", tmp_path / "run", "--config", tmp_path / "f.yml"), *words)
    assert not (tmp_path / "run").exists()


def test_an_empty_config_is_none(tmp_path):
    (tmp_path / "f.yml").write_text("# all defaults\n")
    assert said(*DEBUG, "--run", tmp_path / "run", "--config", tmp_path / "f.yml")[0] == 0


@pytest.mark.parametrize("argv,words", [
    ("trian", ["unknown command 'trian'; did you mean 'train'?"]),
    ("train", ["which recipe?"]),
    ("train segmentatoin", ["unknown recipe 'segmentatoin'"]),
    ("train --resume", ["--resume needs the run directory"]),
    ("train --resume {root}/nowhere", ["no run directory"]),
    ("train --resume {root}/damaged", ["damaged/run.db is damaged", "start a new run"]),
    ("runs {root}/nowhere", ["no run below"]),
    ("runs --all", ["'--all' is not one folder"]),
    ("demo --fast", ["--fast"]),
    ("check {root}/empty", ["no case in"]),
    ("predict {root}/run", ["required: input, output"]),
    ("predict {root}/cases {root}/cases {root}/o", ["no run directory"]),
    ("predict {root}/damaged {root}/cases {root}/o", ["is damaged"]),
    ("predict {root}/run {root}/empty {root}/o", ["no case in"]),
    ("predict {root}/run {root}/cases {root}/o --samples 0", ["--samples 0 must be at least 1"]),
    ("predict {root}/run {root}/cases {root}/o --seed x", ["seed=x must be a whole number"]),
    ("predict {root}/run {root}/cases {root}/o --device cudaa", ["device='cudaa' cannot be used"]),
    ("predict {root}/run {root}/cases {root}/o.nii.gz", ["holds 4 cases; give a folder as output"]),
    ("predict {root}/run {root}/cases/PHANTOM-0001 {root}/o", ["lacks nothing; say which to synthesize: modality=t1n or"]),
    ("predict {root}/run {root}/cases/PHANTOM-0001 {root}/o --modality t2", ["unknown modality 't2'; did you mean"]),
    ("predict {root}/run {root}/cases/PHANTOM-0001 {root}/file --modality t2f", ["file cannot be written (", "file: not a directory); predictions need a folder"]),
])
def test_wrong_commands(root, argv, words):
    (root / "damaged").mkdir(exist_ok=True)
    (root / "damaged/run.db").write_bytes(b"not a database" * 99)
    is_mistake(said(*argv.replace("{root}", str(root)).split()), *words)
    assert not (root / "o").exists()


def test_runs_names_the_damaged_one_and_lists_the_others(root):
    (root / "damaged").mkdir(exist_ok=True)
    (root / "damaged/run.db").write_bytes(b"not a database" * 99)
    status, out, err = said("runs", root)
    assert status == 0 and "done     step        1" in out and "damaged/run.db is damaged" in err and "Traceback" not in err


# what is wrong with the data

def changed(path, change):
    "Rewrite a NIfTI file with other voxels or another affine."
    image = nib.load(path)
    voxels, affine = change(image.get_fdata(dtype=np.float32).copy(), image.affine.copy())
    nib.save(nib.Nifti1Image(voxels, affine), path)


def spoil(x): x[3:5, 2, 1] = np.nan; return x
def moved(a): a[0, 3] += 5; return a


SPOILT = dict(
    truncated=(lambda f: f["t1n"].write_bytes(f["t1n"].read_bytes()[:-200]), "t1n.nii.gz: is truncated: its gzip stream ends early"),
    nan=(lambda f: changed(f["t1c"], lambda x, a: (spoil(x), a)), "t1c.nii.gz: holds 2 NaN and 0 Inf among 4,096 voxels, the first at voxel (x, y, z) = (3, 2, 1)"),
    flat=(lambda f: changed(f["t2w"], lambda x, a: (x[:, :, 8], a)), "t2w.nii.gz: is a 2D image (16×16); a volume needs at least two slices"),
    series=(lambda f: changed(f["t2w"], lambda x, a: (np.stack([x, x], -1), a)), "t2w.nii.gz: holds 2 volumes (16×16×16×2)"),
    blank=(lambda f: changed(f["t2f"], lambda x, a: (x * 0, a)), "t2f: is empty: none of its 4,096 voxels is above 0"),
    grids=(lambda f: changed(f["t2f"], lambda x, a: (x[:12], moved(a))), "grids differ: t1n: 16×16×16 voxels of 10×10×10 mm (z, y, x), RAS; t2f: 16×16×12 voxels"),
    alone=(lambda f: [f[m].unlink() for m in ("t1c", "t2w", "t2f")], "only 1 of the 2 modalities needed (t1n)"),
    target=(lambda f: f["t2f"].unlink(), "t2f missing; it has t1n, t1c, t2w"),
)


@pytest.mark.parametrize("kind", SPOILT)
def test_a_bad_case_is_quarantined_or_refused(root, tmp_path, kind):
    spoilt, reason = SPOILT[kind]
    shutil.copytree(root / "cases", tmp_path / "cases")
    spoilt({m: tmp_path / f"cases/PHANTOM-0002/PHANTOM-0002-{m}.nii.gz" for m in ("t1n", "t1c", "t2w", "t2f")})
    options = ["--target", "t2f"] if kind == "target" else []
    status, out, err = said(*DEBUG, "--run", tmp_path / "run", "--data-root", tmp_path / "cases", *options)
    assert status == 0 and "medlab: warning: PHANTOM-0002 is left out: " in err and reason in err and "done at step 1" in out, (status, out, err)
    run = Run(tmp_path / "run")
    assert [e.data["case"] for e in run.events("quarantine")] == ["PHANTOM-0002"] and reason in run.events("quarantine")[0].text
    assert sorted(sum((run.meta["data"]["split"][k] for k in ("train", "val", "test")), [])) == ["PHANTOM-0001", "PHANTOM-0003", "PHANTOM-0004"]
    is_mistake(said(*DEBUG, "--run", tmp_path / "alone", "--data-root", tmp_path / "cases/PHANTOM-0002", *options), "none of the 1 cases", reason)
    assert not (tmp_path / "alone").exists()
    status, out, err = said("check", tmp_path / "cases", *DEBUG[2:], *options)
    assert status == 0 and reason in out and "3 sound, 1 in quarantine" in out and out.endswith(" would start\n"), "check says what train does"
    is_mistake(said("check", tmp_path / "cases/PHANTOM-0002", *DEBUG[2:], *options), "none of the 1 cases", reason)


def test_a_missing_modality_is_no_fault(root, tmp_path):
    shutil.copytree(root / "cases", tmp_path / "cases")
    (tmp_path / "cases/PHANTOM-0002/PHANTOM-0002-t2f.nii.gz").unlink()
    status, out, err = said(*DEBUG, "--run", tmp_path / "run", "--data-root", tmp_path / "cases")
    assert status == 0 and "left out" not in err and "PHANTOM-0002" in str(Run(tmp_path / "run").meta["data"]["split"])


@pytest.mark.parametrize("kind", ["truncated", "nan", "flat", "grids"])
def test_a_bad_case_cannot_be_predicted(root, tmp_path, kind):
    spoilt, reason = SPOILT[kind]
    shutil.copytree(root / "cases/PHANTOM-0001", tmp_path / "PHANTOM-0001")
    spoilt({m: tmp_path / f"PHANTOM-0001/PHANTOM-0001-{m}.nii.gz" for m in ("t1n", "t1c", "t2w", "t2f")})
    want = "t1c" if kind != "nan" else "t2w"
    is_mistake(said("predict", root / "run", tmp_path / "PHANTOM-0001", tmp_path / "o", "--modality", want), "PHANTOM-0001", reason.split(": ")[-1][:20])
    assert not (tmp_path / "o").exists()


@pytest.mark.skipif(not (DATA / "isles22_sub0009").exists(), reason=f"no real data at {DATA} (set MEDLAB_DATA)")
def test_real_modalities_on_different_grids(tmp_path):
    names = '{"dwi": "*_dwi.nii.gz", "adc": "*_adc.nii.gz", "flair": "*_flair.nii.gz"}'
    argv = (*DEBUG, "--run", tmp_path / "run", "--data-root", DATA / "isles22_sub0009", "--names", names)
    is_mistake(said(*argv), "grids differ: dwi: 73×112×112 voxels", "flair: 29×512×512 voxels", "ask for resampling")
    status, out, err = said(*argv, "--resample", "true")
    assert status == 0 and "done at step 1" in out and Run(tmp_path / "run").metrics("loss")["loss"].value[0] > 0, (out, err)


@pytest.mark.skipif(not (DATA / "stroke_mit").exists(), reason=f"no real data at {DATA} (set MEDLAB_DATA)")
def test_a_real_case_without_the_target(tmp_path):
    is_mistake(said(*DEBUG, "--run", tmp_path / "run", "--data-root", DATA / "stroke_mit", "--target", "t1c"), "t1c missing; it has t1n, t2w, t2f")
    status, out, err = said(*DEBUG, "--run", tmp_path / "run", "--data-root", DATA / "stroke_mit", "--target", "t2f")
    assert status == 0 and "1 patient only: val and test stay empty" in out


# processes

def test_a_process_is_held_stopped_and_gone_on_with(tmp_path):
    "`--debug` reaches its first step in seconds; a second trainer is refused; SIGTERM ends with a checkpoint; the run goes on."
    run, start = tmp_path / "run", time.monotonic()
    process = began(*DEBUG[:-2], "--run", run, "--steps", 10**6)
    until(lambda: (run / "checkpoints").is_dir() and Run(run).step >= 1, 60)
    first = time.monotonic() - start
    is_mistake(ended(began("train", "--resume", run, "--steps", 10**6)), "is held by a live trainer", f"process {process.pid}", "stop that one, or choose another")
    process.send_signal(signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 130 and "stopped at step" in out and err.startswith("medlab: stopping after this step") and err.count("\n") == 1, (status, out, err)
    stopped = Run(run).step
    assert Run(run).state == "stopped" and Run(run).checkpoints()[-1]["step"] == stopped
    status, out, err = said("train", "--resume", run, "--steps", stopped + 2, "--set", "lr=3e-4")
    assert status == 0 and f"step {stopped} → {stopped + 2}" in out and Run(run).metrics("lr")["lr"].value[-2:].tolist() == [3e-4, 3e-4], (out, err)
    print(f"first step after {first:.1f} s")
    assert first < 30


def test_mistakes_in_a_process(root, tmp_path):
    "The same lines and statuses as above, as a shell sees them."
    write_brats(tmp_path / "cut", [1], size=(16, 16, 16))
    SPOILT["truncated"][0]({"t1n": tmp_path / "cut/PHANTOM-0001/PHANTOM-0001-t1n.nii.gz"})
    wrong = {("train", "fast_ddpm", "--validate-every", 3): "val_every_steps says", ("train", "fast_ddpm", "--debug", "--run", tmp_path / "r", "--data-root", tmp_path / "cut"): "is truncated",
        ("predict", root / "run", root / "empty", tmp_path / "o"): "no case in"}
    for process, words in [(began(*argv), words) for argv, words in wrong.items()]: is_mistake(ended(process), words)


def test_wandb_and_tensorboard(tmp_path):
    "Offline W&B writes its file; online without a key it is refused before anything is trained, and the directory stays free."
    home = dict(HOME=str(tmp_path), NETRC=str(tmp_path / "none"), WANDB_BASE_URL="http://127.0.0.1:9")
    sinks = ("--use-wandb", "--tensorboard", tmp_path / "board", "--run", tmp_path / "run")
    is_mistake(ended(began(*DEBUG, *sinks, **home)), "W&B has no API key", "WANDB_MODE=offline")
    status, out, err = ended(began(*DEBUG, *sinks, **home, WANDB_MODE="offline"))
    assert status == 0 and "done at step 1" in out, (out, err)
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    assert b"grad_norm" in file.read_bytes() and b"grad_norm" in b"".join(f.read_bytes() for f in (tmp_path / "board").glob("events*"))
    assert not Run(tmp_path / "run").events("logger")


def test_the_lab_opens_at_its_tutorial_and_ends_with_its_command(tmp_path):
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed; it comes with: pip install 'medlab[lab]'")
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    env = {f"JUPYTER_{k.upper()}_DIR": str(tmp_path / k) for k in ("config", "runtime", "data")}
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    process = began("lab", tmp_path / "notes", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=t", *root, **env)
    try:
        address = f"http://127.0.0.1:{port}/api/contents/live_lab.ipynb?content=0&token=t"
        until(lambda: process.poll() is not None or answers(address), 60)
        assert process.poll() is None, process.communicate()
        process.terminate()
        out, err = process.communicate(timeout=60)  # the pipes are closed once nobody is left who holds them
        assert "files copied to" in out and "lab/tree/live_lab.ipynb" in err and "Traceback" not in err
    finally: process.kill()


def answers(address):
    "Whether a web server answers there."
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer: return answer.status == 200
    return False


def test_a_relative_path_is_told_from_another_folder(tmp_path, monkeypatch):
    for place, seeds in (("a", range(6)), ("b", range(7))): write_brats(tmp_path / place / "cases", seeds, size=(16, 16, 16))
    typed = "train fast_ddpm --debug --data-root cases --steps 1 --threads 1 --run".split()
    monkeypatch.chdir(tmp_path / "a")
    assert said(*typed, tmp_path / "run")[0] == 0
    words = f"where data_root='cases' is {tmp_path}/a/cases; here it is {tmp_path}/b/cases"
    same = said("evaluate", tmp_path / "run", "--cases", 1, "--threads", 1)
    assert same[0] == 0 and "was started in" not in same[2]
    monkeypatch.chdir(tmp_path / "b")
    for command in (("evaluate", tmp_path / "run", "--cases", 1), ("train", "--resume", tmp_path / "run", "--steps", 2)):
        status, out, err = said(*command, "--threads", 1)
        assert status == 0 and err.count(words) == 1, err
    status, out, err = said("evaluate", tmp_path / "run", tmp_path / "a/cases", "--cases", 1, "--threads", 1)
    assert status == 0 and words not in err, "the data is named"
