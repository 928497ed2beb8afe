"""`medlab check` and `medlab train` say the same; hints name options that exist; sizes; how long it will take."""
import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import medlab
from medlab import Run
from medlab.cli.main import COMMANDS, main
from medlab.cli.options import RECIPES, known_keys, recipe_class
from medlab.phantoms import write_brats
from medlab.recipes import restoration, segmentation
from test_cli import SPOILT, said

TINY = ("--debug", "--threads", 1, "--precision", "fp32")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("check")
    write_brats(root / "cases", [1, 2, 3, 4], size=(16, 16, 16))
    rng = np.random.default_rng(0)
    for i in range(4):  # signed values, for which Rician noise has no meaning
        (root / "signed").mkdir(exist_ok=True)
        nib.save(nib.Nifti1Image(rng.normal(size=(40, 40, 4)).astype(np.float32), np.eye(4)), root / f"signed/p{i}.nii.gz")
    (root / "empty").mkdir()
    return root


SAME = [  # (recipe, options, what the error says)
    ("fast_ddpm", "--data-root {root}/empty", "no case in"),
    ("fast_ddpm", "--data-root {root}/cases/PHANTOM-0001 --names {{\"a\":\"*t1n*\"}}", "only 1 of the 2 modalities needed"),
    ("fast_ddpm", "--data-root {root}/cases --image-size 17,16,16", "must divide by 2 along z"),
    ("fast_ddpm", "--data-root {root}/cases --lr inf", "lr=inf is refused"),
    ("fast_ddpm", "--data-root {root}/cases --device cudaa", "cannot be used"),
    ("fast_ddpm", "--data-root {root}/cases --optimizer Muon", "does not take this network"),
    ("fast_ddpm", "--data-root {root}/cases --val 0.6 --test 0.6", "sum to less than 1"),
    ("restoration", "--data-root {root}/signed", "'gaussian' for signed values"),
    ("restoration", "--data-root {root}/nowhere", "does not exist"),
    ("segmentation", "--data-root {root}/cases", ""),
    ("segmentation", "--data-root {root}/cases --nois 3", "unknown option '--nois'"),
]


@pytest.mark.parametrize("recipe,options,words", SAME, ids=[f"{r} {o}" for r, o, _ in SAME])
def test_the_same_error_as_train(root, tmp_path, recipe, options, words):
    argv = [w.replace("{{", "{").replace("}}", "}") for w in options.replace("{root}", str(root)).split()]
    trained = said("train", recipe, *TINY, "--run", tmp_path / "run", *argv)
    checked = said("check", "--recipe", recipe, *TINY, "--run", tmp_path / "run", *argv)
    told = [re.sub(r"there are \d+", "there are n", err) for _, _, err in (trained, checked)]  # check has an option of its own
    assert trained[0] == checked[0] == 2 and told[0] == told[1] and words in checked[2], (trained, checked)
    assert not (tmp_path / "run").exists()


def test_what_the_error_recommends_is_taken(root, tmp_path):
    "Gaussian noise for signed values: the command that recommends it refused it."
    for command in (("check", root / "signed", "--recipe", "restoration"), ("train", "restoration", "--data-root", root / "signed", "--run", tmp_path / "r", "--steps", 1)):
        status, out, err = said(*command, *TINY, "--noise", "gaussian")
        assert status == 0, (command, out[-500:], err)


@pytest.mark.parametrize("kind", ["truncated", "alone"])
def test_a_case_in_quarantine_keeps_nobody_from_starting(root, tmp_path, kind):
    import shutil
    shutil.copytree(root / "cases", tmp_path / "cases")
    spoilt, reason = SPOILT[kind]
    spoilt({m: tmp_path / f"cases/PHANTOM-0002/PHANTOM-0002-{m}.nii.gz" for m in ("t1n", "t1c", "t2w", "t2f")})
    status, out, err = said("check", tmp_path / "cases", *TINY)
    assert status == 0 and reason in out and "3 sound, 1 in quarantine" in out and out.endswith(" would start\n"), (out, err)
    assert "warning: cases to train on: " in out, "few to learn from"
    command = out.splitlines()[-1].removesuffix(" would start").split()[1:]
    status, trained, err = said(*command, "--run", tmp_path / "run", "--steps", 1)
    assert status == 0 and "warning: cases to train on: " in trained, "and it does, in the same words"


@pytest.mark.parametrize("argv,words", [
    ("--resume {root}/x", "leave out --resume"),
    ("{root}/cases --data-root {root}/signed", "two places of data"),
    ("{root}/cases {root}/signed", "unrecognized arguments"),
    ("{root}/cases --size tiny", "unknown size of FastDDPM 'tiny'; known: base, small"),
    ("{root}/cases --size small --debug", "leave out --size"),
])
def test_mistakes(root, argv, words):
    status, out, err = said("check", *argv.replace("{root}", str(root)).split())
    assert status == 2 and words in err and err.count("\n") == 1, err


def test_the_data_are_read_once(root, monkeypatch):
    calls = []
    for module, name in ((restoration, "inspect_pairs"), (segmentation, "inspect_all")):
        kept = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _kept=kept, _name=name, **kw: calls.append(_name) or _kept(*a, **kw))
    assert said("check", root / "signed", "--recipe", "restoration", *TINY, "--noise", "none")[0] == 0
    assert said("check", "--recipe", "segmentation", *TINY)[0] == 0
    assert calls == ["inspect_pairs", "inspect_all"]


@pytest.mark.parametrize("workers,kept", [(0, True), (2, False)])
def test_the_speed_of_loading(root, tmp_path, monkeypatch, workers, kept):
    "From files, with the user's cache neither used nor spoiled, and with none; the command at the end is that of training."
    users = tmp_path / "users"
    monkeypatch.setenv("MEDLAB_CACHE", str(users) if kept else "off")
    argv = ("check", "restoration", "--data-root", root / "signed", *TINY, "--noise", "gaussian", "--workers", workers, "--check-minutes", "1")
    assert said(*argv)[0] == 0
    held = sorted(users.glob("??/*"))  # of the first batch
    status, out, err = said(*argv, "--speed")
    assert status == 0 and out.splitlines()[-1].endswith(" would start") and "--speed" not in out.splitlines()[-1], (out, err)
    lines = out[out.index("speed of loading"):].splitlines()
    rates = [float(l.split(": ")[-1].split()[0].replace(",", "")) for l in lines if " samples/s (" in l and " a step on " not in l]
    assert lines[0] == f"speed of loading with workers={workers}, at most 200 samples or 12 s a pass:" and min(rates) > 0, out
    assert "from the files, with empty caches" in lines[1] and "again, from the cache (in memory, cache_gb=2" in lines[2], out
    assert (f" and in {users}, " in lines[2]) == kept and not list(users.glob("speed-*")) and sorted(users.glob("??/*")) == held, out
    assert any(l.startswith("  a step on cpu takes ") for l in lines) and any(l.startswith("loading ") for l in lines), out


def test_the_speed_needs_time(root):
    status, out, err = said("check", "restoration", "--data-root", root / "signed", *TINY, "--noise", "none", "--speed", "--check-minutes", "0")
    assert status == 2 and "--check-minutes 0.0 must be above 0" in err, err


# hints

def hints():
    "(file, line, function, option, the sentence) of every option that a sentence of medlab's names."
    package = Path(medlab.__file__).parent
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.Module)): continue
            own = node.body if isinstance(node, ast.FunctionDef) else [s for s in node.body if not isinstance(s, (ast.FunctionDef, ast.ClassDef))]
            for call in (c for s in own for c in ast.walk(s) if isinstance(c, (ast.Raise, ast.Call)) and "add_argument" not in ast.unparse(c)):
                for text in (t for t in ast.walk(call) if isinstance(t, (ast.JoinedStr, ast.Constant))):
                    sentence = ast.unparse(text)
                    if " " not in sentence: continue  # a word of a list, as of what Tab completes
                    for option in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", sentence):
                        yield file.relative_to(package).as_posix(), getattr(node, "lineno", 0), getattr(node, "name", ""), option, sentence


ELSEWHERE = {"nproc-per-node", "max-restarts", "error-unmatch", "ip", "port", "no-browser", "allow-root", "config_file", "bundle_root", "output", "input", "options", "option", "help", "version"}


def help_of(*argv):
    "What a command prints with --help."
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit): main([*argv, "--help"])
    return out.getvalue()


def accepted(command, option):
    "Whether a command takes an option, as its own parser says."
    argv = dict(predict=["predict"], evaluate=["evaluate"], export=["export"], fork=["fork"], demo=["demo"], selftest=["selftest"])
    if command in ("train", "check"):
        names = {n for r in RECIPES for n in known_keys(recipe_class(r))} | {"config", "recipe", "resume", "use_wandb", "tensorboard", "debug", "set", "help"}
        return option.replace("-", "_") in names | ({"check_minutes", "speed"} if command == "check" else {"processes", "parallel", "restarts", "rank_wait", "run_dir"})
    argv |= dict(compare=["compare"], notebook=["notebook"], prove=["prove"], forecast=["forecast"], deploy=["deploy"])
    if command not in argv: return False
    if command == "deploy" and accepted("train", option): return True  # "what else follows is that of medlab train"
    return f"--{option}" in help_of(*argv[command]) or command in ("predict", "evaluate") and any(option.replace("-", "_") in recipe_class(r).predict_options for r in RECIPES)


OF_FILE = {  # who prints what a module says: all of them must take what it recommends
    "recipes/origin.py": ("train", "evaluate", "predict", "export"), "export/own.py": ("export",), "export/folder.py": ("export",), "cli/check.py": ("check",), "batches/speed.py": ("check",), "cli/forecast.py": ("forecast",), "cli/fork.py": ("fork",), "cli/prove.py": ("prove",), "prove/plan.py": ("prove",), "prove/start.py": ("prove",),
    "cli/pace.py": ("train",), "cli/ranks.py": ("train",), "parallel/launch.py": ("train",), "cli/options.py": ("train", "check"), "train/process.py": ("train",), "train/ranks.py": ("train",), "train/trainer.py": ("train",), "run/writer.py": ("train",),
    "cli/deploy.py": ("deploy",), "deploy/checks.py": ("deploy",), "deploy/plan.py": ("deploy",), "deploy/containers.py": ("deploy",), "rebuild/config.py": ("notebook",), "rebuild/code.py": ("notebook",)}


def printers(file, function, option, sentence):
    "The commands that print a sentence about an option."
    named = re.search(rf"medlab (\w+)[^;:]*--{option}", sentence)
    if named and named[1] in COMMANDS: return (named[1],)
    if file == "cli/main.py" and function == "_deploy_there": return ("deploy",)
    if file == "cli/main.py" and function in COMMANDS: return (function,)
    if file == "cli/main.py": return dict(best=("evaluate", "predict"), samples=("evaluate", "predict"), csv=("evaluate",)).get(option, ("train",))
    return OF_FILE.get(file, ("train", "check"))


def test_a_hint_names_an_option_that_its_command_takes():
    found = [h for h in hints() if h[3] not in ELSEWHERE]
    assert len(found) > 25, "they are found"
    wrong = [(f, line, option, c, s[:90]) for f, line, name, option, s in found if not f.startswith(("cli/selftest", "cli/demo"))
        for c in printers(f, name, option, s) if not accepted(c, option)]
    assert not wrong, wrong


def test_the_hint_test_sees_a_wrong_one():
    assert not accepted("forecast", "noise") and accepted("forecast", "step-time") and not accepted("predict", "noise") and accepted("check", "noise") and accepted("train", "size") and not accepted("export", "noise")


# sizes

def test_a_size_is_below_what_is_typed(tmp_path):
    status, out, err = said("train", "segmentation", "--size", "small", "--image-size", "16,16,16", "--filters", "4,8,8", "--phantoms", 4, "--run", tmp_path / "run",
        "--steps", 1, "--threads", 1, "--precision", "fp32")
    assert status == 0, err
    config = Run(tmp_path / "run").meta["recipe"][2]
    assert config["image_size"] == [16, 16, 16] and config["filters"] == [4, 8, 8]
    (tmp_path / "f.yml").write_text("size: small\nphantoms: 4\n")
    assert said("check", "--recipe", "fast_ddpm", "--config", tmp_path / "f.yml", "--image-size", "16,16,16", "--threads", 1, "--precision", "fp32")[0] == 0


def test_a_run_says_how_long_it_takes(tmp_path):
    status, out, err = said("train", "segmentation", *TINY, "--run", tmp_path / "run", "--steps", 8)
    assert status == 0 and re.search(r"a step takes [\d.]+ s: the \d that are left take [\d.]+ s, until \d\d:\d\d on ", out), out
    assert len(Run(tmp_path / "run").events("pace")) == 1 and "--size" not in out


# completion

def completed(line, folder, tmp_path):
    "What Tab offers for a line, in a process of its own, as a shell asks for it; and whether torch was loaded for it."
    code = "from medlab.cli.entry import entry; entry()"
    env = {k: v for k, v in os.environ.items()} | dict(_ARGCOMPLETE="1", COMP_LINE=line, COMP_POINT=str(len(line)), _ARGCOMPLETE_IFS="\n", _ARGCOMPLETE_SHELL="bash",
        _ARGCOMPLETE_STDOUT_FILENAME=str(tmp_path / "offered"))
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], cwd=folder, env=env, capture_output=True, timeout=120, text=True)
    return (tmp_path / "offered").read_text().split("\n"), "| torch\n" in done.stderr


def test_completion(tmp_path):
    pytest.importorskip("argcomplete", reason="argcomplete is not installed; it comes with: pip install 'medlab[completion]'")
    for name in ("first", "second"):
        (tmp_path / "work/runs" / name).mkdir(parents=True)
        (tmp_path / "work/runs" / name / "run.db").touch()
    (tmp_path / "work/mine.py").touch()
    offered = lambda line: completed(line, tmp_path / "work", tmp_path)
    assert offered("medlab ev")[0] == ["evaluate "] and not offered("medlab ev")[1], "without torch"
    assert offered("medlab evaluate runs/f")[0] == ["runs/first "] and offered("medlab train --resume runs/")[0] == ["runs/first", "runs/second"]
    assert offered("medlab train seg")[0] == ["segmentation "] and offered("medlab train m")[0] == ["mine.py "]
    assert offered("medlab export runs/first out --form b")[0] == ["bundle "]
