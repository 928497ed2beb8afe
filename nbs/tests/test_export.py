"""What leaves the lab, used where no medlab is: every form of every recipe, in an interpreter that may import torch and MONAI and no more.

MEDLAB_FRESH=/path/to/python takes an interpreter of another environment instead, with torch, monai, safetensors, nibabel and fire in it, and
einops, which MONAI leaves out and its diffusion network needs; for the slice interpolation scipy.
"""
import contextlib
import csv
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

import medlab
from medlab import Run, Trainer
from medlab.cli.main import main
from medlab.data.volume import Volume, read_volume, write_volume
from medlab.export.source import outside_modules, travelling_source
from medlab.phantoms import write_brats
from medlab.recipes.fast_ddpm import FastDDPM
from medlab.recipes.restoration import Restoration
from medlab.recipes.segmentation import Segmentation
from medlab.recipes.slice_interpolation import SliceInterpolation
from medlab.slices.phantoms import write_ct_phantoms

# medlab's own requirements, which an exported network must do without
FORBIDDEN = ("medlab", "fastcore", "traitlets", "pydicom", "skimage", "matplotlib", "sqlite3", "psutil", "filelock", "jsonargparse",
    "lazy_loader", "IPython", "ipywidgets", "anywidget", "jaxtyping", "tifffile", "einops")
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        here = sys._getframe(1)
        while here and "importlib" in here.f_code.co_filename: here = here.f_back
        own = here is not None and {"{root!r}"} in here.f_code.co_filename
        if name.split(".")[0] == "medlab" or own and name.split(".")[0] in {FORBIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
AFFINE = np.array([[-1.5, 0, 0, 11], [0, 2.0, 0, -7], [0, 0, 3, 5], [0, 0, 0, 1]])


def alone(code, root, needs=(), **kw):
    "What a program prints that must not import medlab, and from the folder `root` none of its requirements, but for those that an export says it needs."
    block = BLOCK.replace("{root!r}", repr(str(root))).replace(repr(FORBIDDEN), repr(tuple(n for n in FORBIDDEN if n not in needs)))
    python, block = (os.environ["MEDLAB_FRESH"], "") if os.environ.get("MEDLAB_FRESH") else (sys.executable, block)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(OMP_NUM_THREADS="1")
    if not os.environ.get("MEDLAB_FRESH"): env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if "site" in p)
    done = subprocess.run([python, "-c", block + code], capture_output=True, text=True, env=env, timeout=200, **kw)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def said(*argv):
    "Exit status, standard output and standard error of the command, in this process."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = main(list(map(str, argv)))
    return status, out.getvalue(), err.getvalue()


def volume(path, seed, shape=(20, 18, 22)):
    "A NIfTI file of smooth noise."
    coarse = torch.from_numpy(np.random.default_rng(seed).random((1, 1, 6, 6, 6), np.float32))
    data = torch.nn.functional.interpolate(coarse, shape, mode="trilinear")[0, 0].numpy() * 100 + 1
    return write_volume(Volume(data, AFFINE), path)


def moved(trainer):
    "Weights far from where they began, so that a wrong one is seen; saved."
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in trainer.model.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=g))
    trainer.save()


CASES = dict(
    segmentation=(lambda root: Segmentation(image_size=(16, 16, 16), filters=(4, 8, 8), phantoms=4), dict(overlap=0.25, flips=True)),
    restoration=(lambda root: Restoration(image_size=(16, 16), dim=4, blocks=(1, 1), refinement=1, phantoms=4), dict(overlap=0.25)),
    fast_ddpm=(lambda root: FastDDPM(data_root=str(root / "cases"), **FastDDPM.tiny | dict(points=3)), dict(modality="t2f", seed=5)),
    slice_interpolation=(lambda root: SliceInterpolation(data_root=str(root / "cases"), latents=str(root / "latents"), **SliceInterpolation.tiny), dict(answer="sample", steps=2, seed=3)))


@pytest.fixture(scope="module", params=CASES)
def lab(request, tmp_path_factory):
    "(name, folder with run and out, files of a case as load.py takes them, options, what the trainer predicts)"
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    make, options = CASES[name]
    if name == "fast_ddpm": write_brats(root / "cases", [1, 2, 3, 4], size=(18, 16, 20))
    if name == "slice_interpolation": write_ct_phantoms(root / "cases", range(3), shape=(40, 32, 40))
    knobs = dict(restoration=dict(norm_eps=0.5), slice_interpolation=dict(gradient_accumulation_steps=1, val_share=0.0)).get(name, {})
    with Trainer(make(root), root / "run", device="cpu", threads=1, precision="fp32", **knobs) as trainer:
        trainer.fit(steps=1, progress=False)
        moved(trainer)
        if name == "fast_ddpm":
            case = trainer.recipe.find(root / "cases")[0]
            files, given = {m: str(f) for m, f in case.files.items() if m != "t2f"}, case
        elif name == "slice_interpolation": given = files = str(root / "cases/PHANTOM-0001/thick.nii.gz")
        else: given = files = str(volume(root / "case.nii.gz", 3))
        trainer.step.ema = None if name == "segmentation" else trainer.step.ema
        want = trainer.predict(given, **options)
        made = trainer.run.export(root / "out")
    assert made.forms == ("safetensors", "program", "bundle"), made.program
    return name, root, files, options, want


def equal(file, want, share=1e-5):
    "Whether a written prediction is the trainer's, to a share of its largest value, on its grid."
    got = read_volume(file)
    assert got.shape == want.shape and np.allclose(got.affine, want.affine, atol=1e-4)
    assert np.abs(got.data - want.data.astype(np.float32)).max() <= share * np.abs(want.data).max()
    assert len(np.unique(want.data)) > 1, "a constant would prove nothing"


USE = """
import json, runpy, sys, torch
root = {root!r}
sys.path.insert(0, root + "/out")
import load
assert load.main({words!r}) in (0, None)
predictor, network = load.load()
args, kw = predictor.example(torch)
args = (torch.randn(args[0].shape), *args[1:])
program = torch.export.load(root + "/out/models/program.pt2").module()
with torch.no_grad(): a, b = network(*args, **kw), program(*args, **kw)
print("program:", float((a - b).abs().max() / a.abs().max()))
for m in [m for m in sys.modules if m.split(".")[0] in ("network", "load")]: del sys.modules[m]
sys.path[0] = ""
if {fire}:
    sys.argv = {argv!r}
    runpy.run_module("monai.bundle", run_name="__main__")
"""


def test_each_form_gives_the_trainers_numbers(lab):
    "The script, the program and MONAI's bundle, in one interpreter each recipe: importing torch and MONAI is what costs here."
    name, root, files, options, want = lab
    words = [f"{m}={f}" for m, f in files.items()] if isinstance(files, dict) else [files]
    words = [str(root / "script.nii.gz"), *words, *(f"--{k}={json.dumps(v)}" for k, v in options.items())]
    argv = ["monai.bundle", "run", "--config_file", "configs/inference.json", "--input", str(files), "--output", str(root / "bundle.nii.gz"),
        "--options", str(options), "--device", "cpu"]
    fire = bool(os.environ.get("MEDLAB_FRESH")) or importlib.util.find_spec("fire") is not None
    needs = json.loads((root / "out/configs/metadata.json").read_text())["required_packages_version"]
    said = alone(USE.format(root=str(root), words=words, argv=argv, fire=fire), root / "out", needs, cwd=root / "out")
    share = 1e-6 if name == "slice_interpolation" else 1e-5
    equal(root / "script.nii.gz", want, share)
    assert float(re.search(r"program: (\S+)", said)[1]) < 1e-5
    if fire: equal(root / "bundle.nii.gz", want, share)
    else: warnings.warn("fire is not installed, so MONAI's bundle was not run; it comes with medlab[dev]")


def test_the_metadata_says_where_it_came_from(lab):
    name, root, *_ = lab
    run, about = Run(root / "run"), json.loads((root / "out/configs/metadata.json").read_text())
    newest = run.checkpoints()[-1]
    own = about["medlab"]
    assert own["sha256"] == newest["sha256"] and own["step"] == newest["step"] and own["version"] == medlab.__version__
    assert own["recipe"][1:] == run.meta["recipe"][1:] and own["knobs"]["lr"] == run.meta["knobs"]["lr"]
    assert own["weights"] == ("ema" if name in ("fast_ddpm", "slice_interpolation") else "raw") and "not a medical device" in own["warning"]
    needed = {"version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task", "description",
        "authors", "copyright", "network_data_format", "schema"}
    assert needed <= about.keys()
    assert about["required_packages_version"].keys() == {"nibabel", "safetensors", *["einops"] * (name in ("fast_ddpm", "slice_interpolation")), *["scipy"] * (name == "slice_interpolation")}
    for part in (about["network_data_format"]["inputs"]["image"], about["network_data_format"]["outputs"]["pred"]):
        assert {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range", "is_patch_data", "channel_def"} <= part.keys()
        assert len(part["channel_def"]) == part["num_channels"]


def test_the_source_needs_torch_and_monai_alone():
    for module, cls in (("segmenter", "Segmenter"), ("restorer", "Restorer"), ("synthesizer", "Synthesizer")):
        roots = [(f"medlab.export.{module}", f"{cls}.{m}") for m in ("example", "load", "predict", "write")]
        files = travelling_source(*roots, note="")
        assert outside_modules(files, tried=False) - {*sys.stdlib_module_names} == {"torch", "monai", "numpy", "nibabel"}
        assert not {"sqlite3", "subprocess", "socket"} & outside_modules(files)


def test_the_block_blocks(tmp_path):
    "The guard of these tests is one."
    if os.environ.get("MEDLAB_FRESH"): pytest.skip("another environment has no medlab to be blocked")
    with pytest.raises(AssertionError, match="No module named 'medlab'"): alone("import medlab", tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A run of one step on phantoms, made by the command."
    root = tmp_path_factory.mktemp("command")
    assert said("train", "segmentation", "--debug", "--steps", 3, "--threads", 1, "--precision", "fp32", "--lr", "0.003", "--flips", "zy",
        "--run", root / "run")[0] == 0
    return root


@pytest.mark.parametrize("argv,words", [
    ("{root}/run {root}/x --form safetensor", "unknown form 'safetensor'; did you mean 'safetensors'?"),
    ("{root}/run {root}/x --weights ema", "kept no average of its weights"),
    ("{root}/run {root}/x --weights both", "unknown weights 'both'; known: auto, ema, raw"),
    ("{root}/run {root}/x --step 99", "no checkpoint of step 99 is kept"),
    ("{root}/nowhere {root}/x", "is no run directory"),
    ("{root}/run {root}/run", "exists and is not empty"),
    ("{root}/run {root}/run --overwrite", "no export of medlab"),
    ("{root}/run {root}/run/run.db", "is no folder"),
    ("{root}/run {root}/run/run.db/x", "run.db: not a directory); an export is made beside its place"),
    ("{root}/run /proc/self/out", "/proc/self/out cannot be written (/proc/self: "),
    ("{root}/run", "out"),
])
def test_wrong_commands(trained, argv, words, monkeypatch):
    if "cannot be" in words or "not a directory" in words:
        monkeypatch.setattr("medlab.export.folder.gathered", lambda *a: pytest.fail("the checkpoint was read"))
    there = lambda: sorted(p for p in trained.rglob("*") if not p.name.startswith("run.db-"))  # SQLite's own, of a reader
    before = there()
    status, out, err = said("export", *argv.replace("{root}", str(trained)).split())
    assert status == 2 and err.startswith("medlab: ") and err.count("\n") == 1 and words in err, (status, err)
    assert there() == before, "a refused export leaves nothing behind"


def test_the_command_says_what_it_wrote(trained):
    status, out, _ = said("export", trained / "run", trained / "one", "--form", "safetensors")
    assert status == 0 and "raw weights" in out and "of step 3" in out and (trained / "one/load.py").exists()
    assert said("export", trained / "run", trained / "one", "--form", "safetensors", "--overwrite")[0] == 0


def test_ctrl_c_leaves_nothing(trained):
    "A SIGINT while the program is being traced, in a process of its own."
    code = f"""
import sys, medlab.export.folder as f
from medlab.cli.main import main
def slow(e, folder):
    print("writing", flush=True)
    import time; time.sleep(60)
f.WRITERS["program"] = slow
sys.exit(main(["export", {str(trained / 'run')!r}, {str(trained / 'half')!r}]))"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # where a shell in the background ignores it
    while "writing" not in (line := process.stdout.readline()): assert line, process.stderr.read()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "interrupted" in process.stderr.read()
    assert not [*trained.glob("half")] and not [*trained.glob(".half*")]


def losses(run): return Run(run).metrics("loss")["loss"].value.tolist()


def test_a_run_begins_again_from_its_config(trained):
    "Same options, same knobs, same first losses; and the file does not follow what is changed later."
    status, out, err = said("train", "segmentation", "--config", trained / "run/config.yml", "--run", trained / "again", "--steps", 3, "--threads", 1)
    assert status == 0, err
    assert losses(trained / "again") == losses(trained / "run") and len(losses(trained / "run")) == 3
    first, again = Run(trained / "run").meta, Run(trained / "again").meta
    assert first["recipe"] == again["recipe"] and first["knobs"] == again["knobs"] and first["knobs"]["lr"] == 0.003
    text = (trained / "again/config.yml").read_text()
    assert said("train", "--resume", trained / "again", "--steps", 4, "--set", "lr=1e-4")[0] == 0
    assert (trained / "again/config.yml").read_text() == text and yaml.safe_load(text)["lr"] == 0.003


def test_the_configs_of_the_other_recipes_are_taken(tmp_path):
    for name, recipe in (("fast_ddpm", FastDDPM(**FastDDPM.tiny)), ("restoration", Restoration(**Restoration.tiny))):
        with Trainer(recipe, tmp_path / name, device="cpu", threads=1, precision="fp32") as trainer: trainer.fit(steps=1, progress=False)
        status, _, err = said("train", name, "--config", tmp_path / name / "config.yml", "--run", tmp_path / f"{name}2", "--steps", 1, "--threads", 1)
        assert status == 0, err
        assert losses(tmp_path / name) == losses(tmp_path / f"{name}2")
        assert Run(tmp_path / name).meta["recipe"] == Run(tmp_path / f"{name}2").meta["recipe"]


class Own(Segmentation):
    "A recipe of one's own, with a field that YAML has no words for."


def test_the_config_of_a_recipe_of_ones_own_says_so(tmp_path, monkeypatch):
    with Trainer(Own(**Segmentation.tiny), tmp_path / "own", device="cpu", threads=1): pass
    text = (tmp_path / "own/config.yml").read_text()
    assert f"medlab train {__file__}:Own --config" in text and yaml.safe_load(text)["phantoms"] == 8
    monkeypatch.setattr(Own, "__module__", "__main__")
    with Trainer(Own(**Segmentation.tiny), tmp_path / "cell", device="cpu", threads=1): pass
    assert "unknown to the command line, until\n# its class lies in a file" in (tmp_path / "cell/config.yml").read_text()


def test_the_csv_of_a_run(trained):
    rows = list(csv.DictReader(open(Run(trained / "run").to_csv(), newline="")))
    assert [float(r["loss"]) for r in rows] == losses(trained / "run") and [int(r["step"]) for r in rows] == [1, 2, 3]


def test_the_checkpoint_predicts_as_the_trainer_does(tmp_path):
    "Knobs that are part of the network's arithmetic are in force after loading; without them outputs lie far apart."
    from medlab.train.state import load_model
    recipe = Restoration(image_size=(16, 16), dim=4, blocks=(1, 1), refinement=1, phantoms=4)
    file = volume(tmp_path / "case.nii.gz", 3)
    with Trainer(recipe, tmp_path / "run", device="cpu", threads=1, precision="fp32", norm_eps=0.5) as trainer:
        moved(trainer)
        want = trainer.predict(file).data
    again, model, _ = load_model(tmp_path / "run")
    with torch.no_grad():
        got = again.predict(model, file).data
        again.apply("norm_eps", 1e-5, model)
        other = again.predict(model, file).data
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max() < np.abs(other - want).max()
    print(f"without the knob: {np.abs(other - want).max() / np.abs(want).max():.3f} of the largest value")


def test_nifti_of_the_prediction_is_readable(lab):
    "By nibabel alone, with the header of its case."
    name, root, files, *_ = lab
    image = nib.load(root / "script.nii.gz")
    first = next(iter(files.values())) if isinstance(files, dict) else files
    times = 5 if name == "slice_interpolation" else 1
    assert image.shape == (*nib.load(first).shape[:2], times * nib.load(first).shape[2]) and Path(first).exists()
