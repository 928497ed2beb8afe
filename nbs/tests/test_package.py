"""The package as an interpreter of its own sees it: quick to import, whole without the extras, honest about names."""
import importlib
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import requires, version
from pathlib import Path

import pytest

import medlab
from medlab import data, recipes

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "monai", "numpy", "scipy", "matplotlib", "nibabel", "skimage"}
EXTRAS = {"IPython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "plotly", "tensorboard", "wandb", "nbdev", 
          "execnb", "pytest", "hypothesis", "nbformat", "nbconvert", "playwright", "ignite", "accelerate", "lightning"}
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS!r}: raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def fresh(code, **kwargs):
    "What `code` prints in an interpreter of its own."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def settings():
    "settings.ini as a dictionary."
    ini = ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]


def modules():
    "Names of all modules of the library."
    return [m.name for m in pkgutil.walk_packages(medlab.__path__, "medlab.") if not m.name.endswith("_modidx")]


def test_import_is_quick():
    "Less than 0.2 s, at the best of five: the others measure what else the machine does."
    code = "import time; start = time.perf_counter(); import medlab; print(time.perf_counter() - start)"
    assert min(float(fresh(code)) for _ in range(5)) < 0.2


@pytest.mark.parametrize("package", ["medlab", "medlab.data", "medlab.recipes"])
def test_import_is_light(package):
    loaded = fresh(f"import {package}, sys; print(*{HEAVY | EXTRAS} & set(sys.modules))")
    assert loaded == "", f"import {package} loads {loaded}"


@pytest.mark.parametrize("words", ["--version", "--help", "train --help", "train nosuch", "runs {}", "standing"])
def test_a_quick_question_loads_no_torch(words, tmp_path):
    "Which takes seconds; of a run that is told too what a job's script asks for each time it begins."
    shutil.copytree(Path(__file__).with_name("fixtures") / "run_v1", tmp_path / "run")
    asks = f"from medlab.deploy.standing import begun; assert begun({str(tmp_path / 'run')!r})" if words == "standing" else \
        f"from medlab.cli.main import main; main({words.format(tmp_path).split()!r})"
    assert fresh(f"import sys\ntry: {asks}\nexcept SystemExit: pass\nprint('torch' in sys.modules)").endswith("False")


@pytest.mark.parametrize("package", [medlab, data, recipes], ids=lambda p: p.__name__)
def test_every_name_of_the_tables_resolves(package):
    "By `from … import …` in a fresh interpreter, and by attribute."
    assert (names := dir(package))
    fresh(f"from {package.__name__} import {', '.join(names)}")
    assert all(getattr(package, name) is not None for name in names)


def test_dir_and_unknown_names():
    assert {"Trainer", "Run", "recipes", "data"} <= set(dir(medlab))
    with pytest.raises(AttributeError, match="Trianer"): medlab.Trianer
    with pytest.raises(ImportError, match="Trianer"): exec("from medlab import Trianer")


def test_version_has_one_place():
    assert medlab.__version__ == version("medlab") == settings()["version"]


def test_modules_import_without_the_extras():
    "All but the widgets, which need the extra `lab`."
    names = [n for n in modules() if ".widgets" not in n]
    assert len(names) > 10
    fresh(BLOCK + f"import importlib\nfor name in {names}: importlib.import_module(name)")


def test_a_blocked_module_is_blocked():
    "The guard of the test above is one."
    assert "ModuleNotFoundError" in subprocess.run([sys.executable, "-c", BLOCK + "import IPython"], capture_output=True, text=True).stderr


def test_each_module_imports_alone():
    for name in modules(): importlib.import_module(name)


def test_requirements_are_those_of_settings():
    "The base needs none of the extras' packages, and the installed metadata says what settings.ini says."
    base = {r.split(";")[0] for r in requires("medlab") if "extra ==" not in r}
    assert len(base) == len(shlex.split(settings()["requirements"])), "settings.ini has changed since the installation: pip install -e ."
    assert any(r.startswith("torch") for r in base) and not any(r.startswith(("ipykernel", "wandb", "nbdev")) for r in base)


def test_the_network_of_ones_own_in_the_readme(tmp_path):
    "The example as it stands there, as a script."
    text = (ROOT / "README.md").read_text("utf-8")
    code, = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "class Mine" in c]
    fresh(code, cwd=tmp_path)
    assert medlab.Run(tmp_path / "runs/mine").step == 20
