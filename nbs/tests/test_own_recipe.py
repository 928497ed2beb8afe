"""A recipe of one's own in the hands of the commands: named by its file, remembered by its run, and nobody else's code executed."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medlab import Run, Trainer
from medlab.core import UserError
from medlab.recipes.base import Recipe
from medlab.run.store import Store
from test_cli import MEDLAB, said

CODE = '''"""A recipe of somebody's own."""
from dataclasses import dataclass

import numpy as np
import torch
from medlab import Knobs, Real, Recipe
from medlab.data.volume import Volume, read_volume
from helpers_of_{stem} import WIDTH

HIDDEN = 5


class Block(torch.nn.Module):
    "A network of its own."
    def __init__(self, width, hidden):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv3d(1, hidden, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(hidden, 1, 3, padding=1))
        self.scale = torch.nn.Parameter(torch.full((width,), 0.5))
    def forward(self, x): return self.body(x) * self.scale.mean()


@dataclass
class Mine(Recipe):
    "Volumes of noise, made smooth."
    data_root: str = ""  # folder of volumes
    hidden: int = 5  # channels
    shape: tuple = (8, 8, 8)  # voxels (z, y, x)

    def setup(self, split=None):
        self.cases = {{f"case-{{i}}": i for i in range(10)}}
        return self.divide(self.cases, split, val=0.2, test=0.2)

    def sample(self, name): return torch.randn((1, *self.shape), generator=torch.Generator().manual_seed(self.cases[name]))
    def dataset(self): return [dict(case=n, x=self.sample(n)) for n in self.split.train]
    def build_model(self): return Block(WIDTH, self.hidden)
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["x"].mean((2, 3, 4), keepdim=True)).square().flatten(1).mean(1))
    def score(self, model, name): return dict(error=model(self.sample(name)[None]).square().mean().item())

    def find(self, path):
        class Case: name, file = "one", str(path)
        return [Case]

    def predict(self, model, case):
        volume = read_volume(case.file)
        made = model(torch.from_numpy(volume.data.astype(np.float32))[None, None])[0, 0]
        return Volume(made.numpy(), volume.affine, "smooth", volume.grid)
'''


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A folder with a recipe in a file of its own name, its neighbour, and a user's state of its own."
    stem = "own_" + re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"{stem}.py").write_text(CODE.format(stem=stem))
    (tmp_path / f"helpers_of_{stem}.py").write_text("WIDTH = 3\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path, f"{tmp_path / stem}.py"


def trained(file, run, *more):
    "A run of two steps by the command."
    result = said("train", f"{file}:Mine", "--run", run, "--steps", 2, "--threads", 1, "--precision", "fp32", *more)
    assert result[0] == 0, result
    return result


def elsewhere(*argv, **env):
    "The command in a process of its own, in another folder; on a busy machine too it says nothing of its threads."
    argv += ("--threads", 1) if argv[0] in ("evaluate", "predict") else ()
    env = {k: v for k, v in os.environ.items()} | env
    done = subprocess.run([MEDLAB, *map(str, argv)], capture_output=True, text=True, cwd="/", env=env, timeout=200)
    return done.returncode, done.stdout, done.stderr


def volume(path):
    import nibabel as nib
    import numpy as np
    nib.save(nib.Nifti1Image(np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32), np.eye(4)), path)
    return path


def test_the_commands_find_what_the_run_remembers(home):
    "Evaluate, predict and resume in other processes, with nothing named; and the run has hash and source."
    root, file = home
    status, out, _ = trained(file, root / "run", "--hidden", 4)
    assert "Mine in " in out and "cases: train 6, val 2, test 2" in out and "done at step 2" in out
    origin = Run(root / "run").meta["origin"]
    assert origin["file"] == str(Path(file).resolve()) and origin["qualname"] == "Mine" and len(origin["sha256"]) == 64
    assert (root / "run/recipe.py").read_text() == Path(file).read_text()
    assert f"medlab train {Path(file).resolve()}:Mine --config" in (root / "run/config.yml").read_text()
    status, out, err = elsewhere("evaluate", root / "run")
    assert status == 0 and "4 cases of the run, held out" in out and not err, (out, err)
    status, out, err = elsewhere("predict", root / "run", volume(root / "one.nii.gz"), root / "made.nii.gz")
    assert status == 0 and (root / "made.nii.gz").exists(), (out, err)
    status, out, err = elsewhere("train", "--resume", root / "run", "--steps", 3, "--threads", 1)
    assert status == 0 and "step 2 → 3" in out and not err, (out, err)
    status, out, err = said("train", f"{file}:Mine", "--config", root / "run/config.yml", "--run", root / "again", "--steps", 1, "--threads", 1)
    assert status == 0 and Run(root / "again").meta["recipe"][2]["hidden"] == 4, err


def test_a_changed_source_is_said_with_both_hashes(home):
    root, file = home
    trained(file, root / "run")
    then = Run(root / "run").meta["origin"]["sha256"]
    Path(file).write_text(Path(file).read_text() + "\n# another line\n")
    status, out, err = elsewhere("evaluate", root / "run")
    assert status == 0 and err.count("is used as it is now, and is not the source that") == 1 and then[:12] in err and "recipe.py is what it was" in err, err
    status, out, err = elsewhere("train", "--resume", root / "run", "--steps", 3, "--threads", 1)
    assert status == 0 and [e.level for e in Run(root / "run").events("source")] == ["warning"], (out, err)
    assert err.count("is used as it is now") == 1, err
    prove = ("prove", root / "run", "--set", "lr=1e-5", "--steps", 1, "--aa", 0, "--seeds", 6, "--cases", "train", "--no-scores", "--threads", 1)
    status, out, err = elsewhere(*prove)
    assert status == 0 and err.count("is used as it is now") == 1, "a run and the fork that a proof makes of it are one origin"


WRONG = """    def losses(self, model, batch):
        if self.knobs.lr < 1e-4: batch["imge"]
        return dict(loss="""
SCRIPT = """from {stem} import Mine
from medlab import Run, Trainer
if __name__ == "__main__":
    t = Trainer(Mine(), "run", threads=1, val_share=0.0, lr=1e-5)
    {how}
"""


def frames(err):
    "The files of a traceback, and its last line."
    return re.findall(r'File ".*?([^/"]+)", line', err), err.rstrip().splitlines()[-1]


@pytest.mark.parametrize("way", ["command", "fit", "start", "arm of the command", "arm of a script"])
def test_an_error_of_the_users_own_code_shows_their_line(home, way):
    "Planted: a key that is not there. Their frames are shown, none of medlab's between them, and the run keeps all."
    root, file = home
    text = Path(file).read_text()
    Path(file).write_text(re.sub(r"    def losses\(self, model, batch\): return dict\(loss=", WRONG, text))
    name, line, arms = Path(file).name, 'if self.knobs.lr < 1e-4: batch["imge"]', "arm" in way
    how = dict(fit="t.fit(2, progress=False)", start="t.start(2); t.wait()").get(way, "t.fit(1, progress=False)")
    if arms:
        how = "t.set(lr=1e-3); t.fit(1, progress=False)" + "; t.prove(set=dict(lr=1e-5), steps=1, aa=0, seeds=6, cases='train', scores=False, process=False)" * (way == "arm of a script")
    (root / "script.py").write_text(SCRIPT.format(stem=Path(file).stem, how=how))
    if way == "command": status, _, err = elsewhere("train", f"{file}:Mine", "--run", root / "run", "--steps", 2, "--threads", 1, "--set", "lr=1e-5", "--set", "val_share=0")
    else:
        done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=root, timeout=200)
        status, err = done.returncode, done.stderr
        if way == "arm of the command":
            assert status == 0, err
            status, _, err = elsewhere("prove", root / "run", "--set", "lr=1e-5", "--steps", 1, "--aa", 0, "--seeds", 6, "--cases", "train", "--no-scores", "--threads", 1)
    seen, last = frames(err)
    command = "command" in way
    assert status == 1 and last == f"{name}, line {text[:text.index('def losses')].count(chr(10)) + 2}, in losses: {line}", err
    assert seen == ([name] if command else ["script.py", "trainer.py", name]), err
    assert ("has every frame" in err) == command and err.count("KeyError") == 1, err
    proof, = Run(root / "run").proofs if arms else [None]
    kept = (proof.run if arms else Run(root / "run")).events("error")[-1].data["traceback"]
    assert kept.count("File ") > 8 and line in kept and "medlab/step/step.py" in kept


def test_a_file_that_moved_is_named(home):
    "The run says what it looked for and where its copy lies; --recipe takes any place, also the copy."
    root, file = home
    trained(file, root / "run")
    (root / "moved").mkdir()
    for f in root.glob("*own_*.py"): f.rename(root / "moved" / f.name)
    status, out, err = elsewhere("evaluate", root / "run")
    assert status == 2 and "neither is the module" in err and f"--recipe {root}/run/recipe.py:Mine" in err and err.count("\n") == 1, err
    moved = root / "moved" / Path(file).name
    assert elsewhere("evaluate", root / "run", "--recipe", f"{moved}:Mine")[0] == 0
    status, out, err = elsewhere("evaluate", root / "run", "--recipe", f"{moved}:Block")
    assert status == 2 and "is a type and must be a subclass of medlab.Recipe; recipes there: Mine" in err


def test_nobody_elses_code_is_executed(home):
    "A directory that was sent, by whatever hostile hand: refused by every command, and the file is not executed."
    root, file = home
    trained(file, root / "run")
    mark = root / "executed"
    Path(file).write_text(f"open({str(mark)!r}, 'w')\n" + Path(file).read_text())
    status, out, err = elsewhere("evaluate", root / "run", XDG_STATE_HOME=str(root / "other"))
    assert status == 2 and "was made by another user or elsewhere" in err and f"--recipe {Path(file).resolve()}:Mine" in err, err
    assert not mark.exists()
    store = Store(root / "run/run.db")
    store.set_meta(recipe=["subprocess", "Popen", dict(args=["touch", str(mark)])]).result()
    store.close()
    for argv in (("evaluate", root / "run"), ("predict", root / "run", root, root / "o"), ("export", root / "run", root / "o"), ("train", "--resume", root / "run")):
        status, out, err = said(*argv)
        assert "Popen" not in err or status == 2, (argv, err)
    assert not (root / "o").exists()
    store = Store(root / "run/run.db")
    store.set_meta(origin=dict(module="subprocess", qualname="Popen", file="", signature="0" * 64)).result()
    store.close()
    with pytest.raises(UserError, match="not one of medlab's"): Trainer.open(root / "run")
    assert not mark.exists()


class Local(Recipe):
    "A recipe of this file."
    def build_model(self): return torch.nn.Linear(1, 1)
    def dataset(self): return [dict(x=torch.ones(1), case="one")] * 4
    def losses(self, model, batch): return dict(loss=model(batch["x"]).square().mean(1))


@pytest.mark.parametrize("script", [False, True])
def test_a_class_of_a_notebook_or_a_script_says_how_it_becomes_loadable(home, script):
    root, file = home
    text = Path(file).read_text() + f"""
from medlab import Trainer
with Trainer(Mine(), {str(root / 'run')!r}, device="cpu", threads=1, precision="fp32") as t: t.fit(1, progress=False)
"""
    (root / "script.py").write_text(text)
    words = [str(root / "script.py")] if script else ["-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{text}"]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=200)
    status, out, err = elsewhere("evaluate", root / "run")
    what = f"was defined in the script {(root / 'script.py').resolve()}" if script else "was defined in a notebook or at a prompt"
    assert status == 2 and what in err and "put" in err and "into a file" in err and "--recipe FILE.py:Mine" in err and err.count("\n") == 1, err
    assert elsewhere("evaluate", root / "run", "--recipe", f"{file}:Mine")[0] == 0, "what the sentence says is true"


def test_a_script_that_keeps_what_it_does_below_a_guard_is_found_again(home):
    root, file = home
    (root / "script.py").write_text(Path(file).read_text() + f"""
if __name__ == "__main__":
    from medlab import Trainer
    with Trainer(Mine(), {str(root / 'run')!r}, device="cpu", threads=1, precision="fp32") as t: t.fit(1, progress=False)
""")
    subprocess.run([sys.executable, str(root / "script.py")], check=True, capture_output=True, timeout=200)
    assert elsewhere("evaluate", root / "run")[0] == 0 and Run(root / "run").step == 1, "nothing was trained again"


def test_a_module_that_can_be_imported(home, monkeypatch):
    "package.module:CLASS, also from the working directory."
    root, file = home
    (root / "pack_here").mkdir()
    (root / "pack_here/__init__.py").write_text("")
    shutil.copy(file, root / "pack_here/lines.py")
    monkeypatch.chdir(root)
    status, out, err = said("train", "pack_here.lines:Mine", "--run", root / "run", "--steps", 1, "--threads", 1)
    assert status == 0 and Run(root / "run").meta["recipe"][0] == "pack_here.lines", err
    assert elsewhere("evaluate", root / "run")[0] == 0, "by its file, with the folder above the package"


def test_check_and_debug(home):
    "The verdict of train for a recipe of one's own: its setup, its first batch, its score; a mistake in it as train gives it."
    root, file = home
    status, out, err = said("check", "--recipe", f"{file}:Mine", "--threads", 1, "--debug")
    assert status == 0 and "setting up the data of Mine" in out and "first batch: x 2×1×8×8×8" in out and "one case scored" in out, (out, err)
    assert out.endswith(f"medlab train {file}:Mine --threads 1 --debug would start\n")
    assert said("check", f"{file}:Mine", "--threads", 1, "--debug")[1].endswith(out[out.index("medlab train"):]), "the first word, as train takes it"
    rooted = Path(file.replace("own_", "rooted_"))
    rooted.write_text(Path(file).read_text().replace("    data_root: str", "    root: str"))
    status, _, err = said("check", f"{rooted}:Mine", root)
    assert status == 2 and "no field data_root" in err and "own fields: --root, --hidden, --shape" in err, err
    Path(file.replace("own_", "bad_")).write_text(Path(file).read_text().replace("dict(error=model", "3 or dict(error=model"))
    argv = (f"{file.replace('own_', 'bad_')}:Mine", "--threads", 1, "--run", root / "bad")
    checked, done = said("check", "--recipe", *argv), said("train", *argv, "--steps", 1)
    assert checked[0] == done[0] == 2 and checked[2] == done[2] and "Mine.score()" in done[2] and "gave 3 for case" in done[2], (checked, done)
    assert trained(file, root / "run", "--debug")[0] == 0


@pytest.mark.parametrize("argv,words", [
    ("train {file}", "which recipe of {file}? {file}:Mine"),
    ("train --device cpu {file}:Mine", "which recipe? name {file}:Mine before the options: medlab train {file}:Mine [options]"),
    ("train --device cpu --optimizer {file}:Mine", "which recipe? medlab train fast_ddpm|"),
    ("check {file}:Mine --processes 2", "what several would refuse is told by medlab forecast RECIPE --processes N"),
    ("train {file}:Min", "unknown recipe in {file} 'Min'; did you mean 'Mine'?"),
    ("train {file}:Mine --hiden 3", "did you mean '--hidden'"),
    ("train {file}:Mine --size small", "unknown option '--size'"),
    ("train {file}:Mine --recipe {file}:Mine", "two recipes"),
    ("train none.py:Mine", "none.py does not exist; name a file"),
    ("train segmentatoin", "FILE.py:CLASS"),
    ("train --recipe", "--recipe needs a value"),
    ("evaluate {root}/run --recipe segmentation", "is a run of Mine, not of Segmentation"),
    ("train fast_ddpm --resume {root}/run", "is a run of Mine, not of fast_ddpm"),
])
def test_mistakes(home, argv, words):
    root, file = home
    if "{root}/run" in argv: trained(file, root / "run")
    put = lambda text: text.replace("{file}", file).replace("{root}", str(root))
    status, out, err = said(*put(argv).split())
    assert status == 2 and put(words) in err and err.count("\n") == 1 and err.startswith("medlab: "), err


def test_medlabs_own_recipes_are_as_before(tmp_path):
    assert said("train", "segmentation", "--debug", "--steps", 1, "--threads", 1, "--run", tmp_path / "run")[0] == 0
    assert Run(tmp_path / "run").meta["origin"] == {} and not (tmp_path / "run/recipe.py").exists()
    assert said("evaluate", tmp_path / "run")[0] == 0


EXPORTED = """
import sys
sys.path.insert(0, {out!r})
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("medlab", "fastcore", "traitlets", {stem!r}): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from load import load
network = load()
torch.manual_seed(0)
with torch.no_grad(): torch.save(network(torch.randn(1, 1, 8, 8, 8)), {made!r})
"""


def numbers(root, stem):
    "What the exported network gives where there is no medlab, and what the trainer's gives."
    code = EXPORTED.format(out=str(root / "out"), stem=stem, made=str(root / "made.pt"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, cwd="/")
    from medlab.train.state import load_model
    _, model, _ = load_model(root / "run")
    torch.manual_seed(0)
    with torch.no_grad(): return torch.load(root / "made.pt"), model(torch.randn(1, 1, 8, 8, 8))


def test_the_network_of_ones_own_leaves_with_its_code(home):
    root, file = home
    stem = Path(file).stem
    inside = Path(file).read_text().replace(f"from helpers_of_{stem} import WIDTH", "WIDTH = 3")
    Path(file).write_text(inside)
    trained(file, root / "run", "--hidden", 4)
    status, out, err = said("export", root / "run", root / "out")
    assert status == 0 and "safetensors; the raw weights of step 2" in out and "define Mine.example_inputs()" in out, (out, err)
    assert "no numbers" in (root / "out/docs/README.md").read_text()
    a, b = numbers(root, stem)
    assert torch.equal(a, b) and a.std() > 0
    status, out, err = said("export", root / "run", root / "bundle", "--form", "bundle")
    assert status == 2 and "a bundle predicts from files" in err and not (root / "bundle").exists()


def test_an_example_gives_a_program_and_a_comparison(home):
    root, file = home
    text = Path(file).read_text().replace(f"from helpers_of_{Path(file).stem} import WIDTH", "WIDTH = 3")
    Path(file).write_text(text + "\n    def example_inputs(self): return (torch.randn(1, 1, *self.shape),)\n")
    trained(file, root / "run")
    status, out, err = said("export", root / "run", root / "out")
    assert status == 0 and "safetensors, program; the raw weights" in out, (out, err)
    assert "its numbers were compared" in (root / "out/docs/README.md").read_text()
    program = torch.export.load(root / "out/models/program.pt2").module()
    assert program(torch.ones(1, 1, 8, 8, 8)).shape == (1, 1, 8, 8, 8)


def test_a_network_beside_the_recipe_travels_with_it(home):
    "From a neighbour file, which takes from another one; neither lies where the copy is loaded."
    root, file = home
    stem = Path(file).stem
    text = Path(file).read_text()
    block = text[text.index("class Block"):text.index("@dataclass")]
    (Path(file).parent / f"nets_of_{stem}.py").write_text(f"import torch\n\nfrom helpers_of_{stem} import WIDTH\n\nUNUSED = open\n\n\n{block.replace('(width,)', '(WIDTH,)')}")
    Path(file).write_text(text.replace(block, "").replace("import torch\n", f"import torch\nfrom nets_of_{stem} import Block\n", 1))
    trained(file, root / "run")
    status, out, err = said("export", root / "run", root / "out")
    assert status == 0, err
    made = (root / f"out/network/beside/nets_of_{stem}.py").read_text()
    assert f"# From nets_of_{stem}.py, SHA-256 " in made and "UNUSED" not in made and f"from ..beside.helpers_of_{stem} import WIDTH" in made
    for name in (f"helpers_of_{stem}", f"nets_of_{stem}"): (Path(file).parent / f"{name}.py").rename(Path(file).parent / f"{name}.gone")
    a, b = numbers(root, stem)
    assert torch.allclose(a, b, atol=1e-6) and a.std() > 0


@pytest.mark.parametrize("new, words", [
    ("import helpers_of_{stem}\nWIDTH = helpers_of_{stem}.WIDTH", "helpers_of_{stem}"), ("from helpers_of_{stem} import *", "helpers_of_{stem}"),
    ("def width():\n    from helpers_of_{stem} import WIDTH\n    return WIDTH\n\n\nWIDTH = width()", "helpers_of_{stem}")])
def test_a_network_that_lies_elsewhere_is_refused(home, new, words):
    "Planted: a neighbour that is imported as a whole, by a star, or late: the copy would look for it in vain."
    root, file = home
    stem = Path(file).stem
    Path(file).write_text(Path(file).read_text().replace(f"from helpers_of_{stem} import WIDTH", new.format(stem=stem)))
    trained(file, root / "run")
    status, out, err = said("export", root / "run", root / "out")
    assert status == 2 and f"it needs {words.format(stem=stem)}, which lies beside" in err and f"from {words.format(stem=stem)} import NAME" in err, err
    assert err.count("\n") == 1 and not (root / "out").exists()


def test_nothing_to_predict_is_said(home):
    "A recipe whose find() returns no case."
    root, file = home
    empty = Path(file.replace("own_", "empty_"))
    empty.write_text(Path(file).read_text().replace("        return [Case]", "        return []"))
    assert trained(empty, root / "run")[0] == 0
    status, out, err = said("predict", root / "run", root, root / "made")
    assert status == 2 and "nothing to predict: Mine.find(" in err and not (root / "made").exists(), (out, err)


def test_a_field_that_python_loses_is_named(home):
    "Planted: no @dataclass above the class, so --hidden is no option and hidden=4 no argument."
    root, file = home
    lost = Path(file.replace("own_", "lost_"))
    lost.write_text(Path(file).read_text().replace("@dataclass\nclass Mine", "class Mine"))
    for command in ("train", "check"):
        status, out, err = said(command, f"{lost}:Mine", "--hidden", 4, "--run", root / "run")
        assert status == 2 and f"Mine ({lost.name}, line " in err and "names data_root, hidden, shape and is no dataclass" in err, (out, err)
        assert "put @dataclass above class Mine (from dataclasses import dataclass)" in err and err.count("\n") == 1 and not (root / "run").exists()


def test_a_folder_that_is_not_there_is_named(home):
    "Planted: cases are found by glob(), and the folder is mistyped."
    root, file = home
    found = Path(file.replace("own_", "globbing_"))
    body = Path(file).read_text().replace('{f"case-{i}": i for i in range(10)}', "{p.stem: i for i, p in enumerate(Path(self.data_root).glob('*.txt'))}")
    found.write_text(body.replace("import numpy as np", "from pathlib import Path\nimport numpy as np"))
    (root / "scans").mkdir()
    for i in range(10): (root / f"scans/case-{i}.txt").touch()
    argv = ("--data-root", root / "scan", "--threads", 1)
    trained, checked = said("train", f"{found}:Mine", *argv, "--run", root / "run"), said("check", f"{found}:Mine", *argv)
    assert trained[0] == checked[0] == 2 and trained[2] == checked[2]
    assert f"Mine.setup() ({found.name}, line " in trained[2] and f"Mine.data_root = '{root}/scan' does not exist; {root} does, with scans in it" in trained[2], trained
    assert said("train", f"{found}:Mine", "--data-root", root / "scans", "--threads", 1, "--run", root / "run", "--steps", 1)[0] == 0, "and it does"


def test_check_reads_every_sample(home):
    "Planted: a torn case and a NaN far behind the first batch, which check did not see."
    root, file = home
    many = Path(file.replace("own_", "many_"))
    body = Path(file).read_text().replace("range(10)}", "range(60)}").replace("def dataset(self): return [dict(case=n, x=self.sample(n)) for n in self.split.train]",
        "def dataset(self): return Data(self)")
    data = """
class Data(torch.utils.data.Dataset):
    def __init__(self, recipe): self.recipe, self.names = recipe, recipe.split.train
    def __len__(self): return len(self.names)
    def __getitem__(self, i):
        if self.recipe.data_root == "torn" and len(self) - i in (2, 4): raise OSError("truncated file")
        return dict(case=self.names[i], x=self.recipe.sample(self.names[i]) * (float("nan") if i == len(self.names) - 1 else 1.0))


@dataclass
class Mine"""
    many.write_text(body.replace("\n@dataclass\nclass Mine", data))
    argv = (f"{many}:Mine", "--threads", 1, "--precision", "fp32", "--set", "log_every=1")
    status, out, err = said("check", *argv, "--data-root", "torn", "--check-minutes", 2)
    train = int(re.search(r"cases: train (\d+)", out)[1])
    assert status == 0 and f"reading each of the {train} samples once, for 2 min at most" in out, (out, err)
    assert re.search(r"case-\d+ was left out: 'x' \(1, 8, 8, 8\) holds 512 non-finite values", out) and out.count("was left out: OSError: truncated file") == 2, out
    left = out.count(" was left out: ")
    assert f"{train} of {train} samples were read, {left} of them left out" in out and out.endswith("log_every=1 --data-root torn would start\n"), out
    assert said("check", *argv, "--check-minutes", 0)[0] == 2 and said("train", *argv, "--check-minutes", 1)[0] == 2
    clean = said("check", f"{file}:Mine", "--threads", 1)
    assert clean[0] == 0 and " was left out" not in clean[1] and re.search(r"(\d+) of \1 samples were read, 0 of them left out", clean[1]), clean


@pytest.mark.parametrize("kind, stored", [("made.numpy() > 0", "uint8"), ("np.where(made.numpy() > 0, 300, 0)", "int16"), ("made.numpy()", "float32")])
def test_labels_are_written_as_integers(home, kind, stored):
    "Planted: predictions of bool and int64, which float32 was the type of; clean: float."
    import nibabel as nib
    from medlab.data.volume import read_volume
    root, file = home
    Path(file).write_text(Path(file).read_text().replace("return Volume(made.numpy(),", f"return Volume({kind},"))
    trained(file, root / "run")
    status, out, err = said("predict", root / "run", volume(root / "one.nii.gz"), root / "made.nii.gz", "--recipe", f"{file}:Mine")
    image = nib.load(root / "made.nii.gz")
    assert status == 0 and image.get_data_dtype() == stored, (err, image.get_data_dtype())
    values = {*read_volume(root / "made.nii.gz").data.flat}
    assert len(values) > 2 if stored == "float32" else values == {0, dict(uint8=1, int16=300)[stored]}


@pytest.mark.parametrize("case", ["return [Case]", "return [Path(path)]"])
def test_predictions_never_overwrite_what_they_are_made_from(home, case):
    "Planted: the output is the scan itself, or the folder of the scans; clean: another file, and the folder of a file."
    root, file = home
    code = Path(file).read_text().replace("import numpy as np", "from pathlib import Path\nimport numpy as np", 1).replace("return [Case]", case)
    Path(file).write_text(code.replace("read_volume(case.file)", "read_volume(getattr(case, 'file', case))"))
    trained(file, root / "run")
    (root / "scans").mkdir()
    scan = volume(root / "scans/one.nii.gz")
    before, argv = scan.read_bytes(), ("predict", "--threads", 1, root / "run", scan)
    status, _, err = said(*argv, scan)
    assert status == 2 and "is the input itself and would be overwritten; choose another output" in err and err.count("\n") == 1, err
    assert said("predict", root / "run", root / "scans", root / "scans/../scans", "--threads", 1)[0] == 2 and scan.read_bytes() == before
    assert said(*argv, root / "made.nii.gz")[0] == said(*argv, root / "scans")[0] == 0 and scan.read_bytes() == before
    assert {p.name for p in (root / "scans").iterdir()} == {"one.nii.gz", "one-smooth.nii.gz"}, "an ending is no part of a case's name"


def test_what_predict_build_model_and_dataset_give_is_named(home):
    "Planted: a tensor for a volume, no network, a generator and a loader for a dataset; a name of the split without cases."
    root, file = home
    code = Path(file).read_text()
    Path(file).write_text(code.replace("return Volume(made.numpy(), volume.affine, \"smooth\", volume.grid)", "return made"))
    trained(file, root / "run")
    status, _, err = said("predict", root / "run", volume(root / "one.nii.gz"), root / "made.nii.gz", "--threads", 1)
    assert status == 2 and "Mine.predict() gave a Tensor" in err and "return replace(read_volume(file)" in err and "Traceback" not in err, err
    for old, new, words in (("return Block(WIDTH, self.hidden)", "Block(WIDTH, self.hidden)", "Mine.build_model() (*, line *) returned None; it must return a torch.nn.Module"),
            ("for n in self.split.train]", "for n in self.split.train].__iter__()", "Mine.dataset() (*, line *) returned a list_iterator, which has no length and index; give a list"),
            ("return [dict(case=n, x=self.sample(n)) for n in self.split.train]", "return torch.utils.data.DataLoader([1, 2])", "returned a DataLoader, which has no length and index; give its dataset")):
        bad = Path(file.replace("own_", f"bad{len(new)}_"))
        bad.write_text(code.replace(old, new))
        status, out, err = said("train", f"{bad}:Mine", "--run", root / "never", "--threads", 1)
        assert status == 2 and re.search(re.escape(words).replace(r"\*", "[^)]*?"), err) and "Traceback" not in err, (out, err)
    recipe = type("Unnamed", (Recipe,), {})()
    recipe.divide([f"p{i}" for i in range(10)])
    with pytest.raises(UserError, match="'p3' is a case of the run, and is found by its name once setup"): recipe.find("p3")
    with pytest.raises(UserError, match="'p33' is no name of a case of the run"): recipe.find("p33")


def test_a_broken_file_is_said_with_the_users_line(home):
    root, file = home
    code = Path(file).read_text().replace("def dataset(self): return [dict(case=n, x=self.sample(n)) for n in self.split.train]", "def dataset(self): return Data(self)")
    code = code.replace("\n@dataclass\nclass Mine", """
class Data(torch.utils.data.Dataset):
    def __init__(self, recipe): self.recipe, self.names = recipe, recipe.split.train
    def __len__(self): return len(self.names)
    def __getitem__(self, i):
        if i == 2: raise EOFError("ended early")
        return dict(case=self.names[i], x=self.recipe.sample(self.names[i]))


@dataclass
class Mine""")
    Path(file).write_text(code)
    status, out, err = said("train", f"{file}:Mine", "--run", root / "run", "--steps", 4, "--threads", 1, "--precision", "fp32")
    line = 1 + [l.strip() for l in code.splitlines()].index('if i == 2: raise EOFError("ended early")')
    assert status == 0 and f"sample 2 was left out: EOFError: ended early ({Path(file).name}, line {line}, in __getitem__: if i == 2: raise EOFError" in err, err


class Named(Recipe):
    "Four samples whose names are their numbers."
    def setup(self, split=None): return dict(split=dict(train=["0", "1"], test=["2"]))
    def dataset(self): return [dict(case=n, x=torch.full((1,), float(n))) for n in self.split.train]
    def build_model(self): return torch.nn.Linear(1, 1)
    def losses(self, model, batch): return dict(loss=model(batch["x"]).square()[:, 0])


class Leaking(Named):
    "Trains on what it holds out."
    def dataset(self): return [dict(case=n, x=torch.full((1,), float(n))) for n in "012"]


class Lost(Named):
    "Forgets to return what it prepares."
    def prepare(self, batch, seed, step): batch["x"] = batch["x"] + 1


def test_a_split_that_setup_gives_is_the_split(tmp_path):
    for resume in (False, True):
        with Trainer(Named(batch_size=2), tmp_path / "run", resume=resume, threads=1) as t:
            t.fit(2, progress=False)
            assert t.recipe.split.train == ["0", "1"] and t.recipe.split.val == [] and t.info["split"]["test"] == ["2"]


@pytest.mark.parametrize("workers", (0, 2))
def test_what_is_held_out_is_not_trained_on(tmp_path, workers):
    with Trainer(Leaking(batch_size=1, workers=workers), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError, match="2 is held out for test, and dataset.. .list. gives it for training"): t.fit(3, progress=False)


def test_what_prepare_must_give(tmp_path):
    with Trainer(Lost(batch_size=2), tmp_path / "run", threads=1) as t:
        with pytest.raises(UserError, match=r"Lost.prepare\(\) \(test_own_recipe.py, line \d+\) gave None and must return the batch"): t.fit(3, progress=False)


def test_how_many_patients_there_are_is_said(tmp_path, monkeypatch, capsys):
    "Left and right of one patient are two patients, unless `group` says otherwise: the number tells."
    (tmp_path / "sides.py").write_text('''import torch
from medlab import Recipe
class Sides(Recipe):
    def setup(self, split=None): return self.divide([f"P{i:02}_{s}" for i in range(10) for s in ("left", "right")], split, group=self.patient)
    def patient(self, name): return name
    def dataset(self): return [dict(case=n, x=torch.ones(1)) for n in self.split.train]
    def build_model(self): return torch.nn.Linear(1, 1)
    def losses(self, model, batch): return dict(loss=model(batch["x"]).square()[:, 0])
class Patients(Sides):
    def patient(self, name): return name[:3]
''')
    monkeypatch.chdir(tmp_path)
    for name, patients in (("Sides", 20), ("Patients", 10)):
        status, out, err = said("train", f"sides.py:{name}", "--steps", 1, "--threads", 1, "--run", f"runs/{name}")
        assert status == 0 and f" of {patients} patients\n" in out, out
