"""The lessons say the words that the screen shows, `help` explains every parameter, and no notebook keeps a widget whose model is gone."""
import inspect
import json
import re
from pathlib import Path

import pytest

from medlab import Lab, Run, Trainer, recipes
from medlab.cli.options import field_help
from medlab.widgets.curves import Curves
from medlab.widgets.groups import GROUPS
from medlab.widgets.panel import Panel
from medlab.widgets.preview import Preview
from medlab.widgets.runs import RunList
from medlab.widgets.viewer import Viewer

NBS = Path(__file__).parents[1]
STATIC = NBS.parent / "medlab/widgets/static"


def notebook(path): return json.loads(path.read_text("utf-8"))["cells"]


def screen():
    "All words that panel, curves, viewer and preview of the lesson's run may show."
    columns = "blurred prediction truth"  # of the recipe's preview, checked in its notebook
    recipe = recipes.Restoration(image_size=(32, 32), dim=8, blocks=(1,), phantoms=8)
    fixes = [w for f in recipe.fixes() for w in (f.name, recipe.Knobs.class_traits()[next(iter(f.on))].metadata.get("concern", ""))]
    states = "created starting running paused stopped done failed killed applied, verified"
    return "\n".join([*(p.read_text("utf-8") for p in STATIC.glob("*.js")), columns, states, *fixes, *(g.title for g in GROUPS)])


def test_the_lesson_says_what_the_screen_shows():
    "What is bold in the lesson of the lab is to be found on the screen, letter by letter."
    bold = [w for c in notebook(NBS / "tutorials/live_lab.ipynb") if c["cell_type"] == "markdown" for w in re.findall(r"\*\*(.+?)\*\*", "".join(c["source"]))]
    words = screen()
    assert len(bold) > 20 and {"Pause", "Resume", "cut off", "fp32_fft", "pending"} <= set(bold)
    assert not (missing := [w for w in bold if w not in words]), missing


@pytest.mark.parametrize("thing", [Trainer, Lab, Viewer, Curves, Panel, Preview, RunList, Run.metrics], ids=lambda t: t.__name__)
def test_help_explains_every_parameter(thing):
    told = inspect.getdoc(thing)
    names = [n for n in inspect.signature(thing.__init__ if inspect.isclass(thing) else thing).parameters if n != "self"]
    lines = {m[1]: m[2] for m in re.finditer(r"^ {4}(\w+): (.+)$", told.split("Parameters:\n")[1], re.M)}
    assert list(lines) == names and all(len(v) > 8 and v != "see its type" for v in lines.values()), lines


@pytest.mark.parametrize("cls", [recipes.FastDDPM, recipes.Restoration, recipes.Segmentation, recipes.SliceInterpolation, recipes.Codec, recipes.VJEPA3D], ids=lambda c: c.__name__)
def test_help_of_a_command_names_nothing_that_only_python_has(cls):
    "Who types a command has no function at hand that could be looked up."
    texts = field_help(cls) | {k: t.help for k, t in cls.Knobs.class_traits().items()} | {k: t for k, (_, _, t) in (cls.predict_options | cls.evaluate_options).items()}
    assert len(texts) > 20 and not {k: t for k, t in texts.items() if "see `" in t}


@pytest.mark.parametrize("path", sorted(NBS.rglob("*.ipynb")), ids=lambda p: str(p.relative_to(NBS)))
def test_no_widget_without_its_model_is_kept(path):
    "An output that names a model shows an error where that is gone, unless the output before it is the picture that hides it."
    for c in notebook(path):
        outputs = [o.get("data", {}) for o in c.get("outputs", ())]
        for before, o in zip([{}, *outputs], outputs):
            assert "application/vnd.jupyter.widget-view+json" not in o or "medlab-still-" in "".join(before.get("text/html", "")), c["id"]
