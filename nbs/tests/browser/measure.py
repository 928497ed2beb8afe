"""What the lab costs, and how soon a click holds; figures in JSON on standard output.

    python measure.py latency [clicks]     from a click in JupyterLab to the first step that uses the value, idle and while a cell runs
    python measure.py slowdown [seconds]   steps per second with the lab open against closed, ABAB in one run

MEDLAB_KERNEL names the Python of the kernel, as for the tests."""
import contextlib
import json
import statistics
import sys
import tempfile

from conftest import ARGS, Notebook, Server, chromium

STEP = 0.05  # seconds that a step takes at least, so that a click falls into the middle of one
TOY = f"""
import time, torch, traitlets
from torch import nn
from medlab import Trainer
from medlab.knobs.fixes import Fix, FIXES
from medlab.knobs.knobs import Knobs
from medlab.recipes.base import Recipe

class ToyKnobs(Knobs):
    "One switch."
    switch = traitlets.Bool(False, help="nothing but a switch").tag(off=False, concern="numerics")

class Toy(Recipe):
    "Fit y = Σx, slowly."
    name, Knobs = "toy", ToyKnobs
    def fixes(self): return (Fix("switch", dict(switch=True), dict(switch=False)), *FIXES)
    def build_model(self): return nn.Linear(4, 1)
    def dataset(self): return [dict(x=torch.ones(4), y=torch.ones(1), case=str(i)) for i in range(64)]
    def prepare(self, batch, seed, step): time.sleep({STEP}); return batch
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))

trainer = Trainer(Toy(batch_size=8), "runs/latency", device="cpu", threads=1)
trainer.start(until=10**9)
"""
LAB = "from medlab import Lab\nlab = Lab(trainer, share=0)\nlab"
CLICK = "() => { const t = Date.now() / 1000; document.querySelector('[data-fix=switch] .mp-switch').click(); return t }"
APPLIED = "n => document.querySelectorAll('[data-fix=switch]').length && document.querySelector('.mp-row[data-knob=switch]')?.dataset.fate === 'applied' && document.querySelector('[data-fix=switch]').dataset.state === n"
BUSY = "import time\nfrom pathlib import Path\nend = time.monotonic() + 120\nwhile time.monotonic() < end and not Path('enough').exists(): time.sleep(0.01)"
BEGAN = """
import json
trainer.writer.store.flush()
m, t = trainer.run.metrics("step_time")["step_time"], {e.step: e.time for e in trainer.run.events("change")}
print(json.dumps([[c.applied_step, t[c.applied_step] - float(m.value[m.step == c.applied_step][0])] for c in trainer.run.changes() if c.state == "applied" and c.source == "panel"]))
"""
TRAIN = """
from medlab import Lab, Trainer, recipes
trainer = Trainer(recipes.Restoration(image_size=(48, 48), dim=12, blocks=(1, 1), refinement=1, batch_size=2, phantoms=16), "runs/slow", device="cpu", threads=1)
trainer.start(until=10**9)
"""


@contextlib.contextmanager
def browser():
    "A function that opens a notebook of cells, in a JupyterLab of its own."
    import nbformat
    from playwright.sync_api import sync_playwright
    server = Server(tempfile.mkdtemp(), tempfile.mkdtemp()).start()

    def show(*cells):
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))), server.root / "m.ipynb")
        return Notebook(server, chrome, "m.ipynb", (1280, 1400))

    try:
        with sync_playwright() as p:
            chrome = p.chromium.launch(executable_path=chromium(), headless=True, args=list(ARGS))
            yield show
            chrome.close()
    finally: server.stop()


def clicks(nb, n, patience):
    "Times of clicks on the switch, one after another; fewer where none was answered within the patience, in seconds."
    made = []
    for i in range(n):
        nb.page.wait_for_timeout(200 + 37 * (i % 7))  # at any place within a step
        made.append(nb.page.evaluate(CLICK))
        try: nb.page.wait_for_function(APPLIED, arg="off" if nb.on else "on", timeout=1000 * patience)
        except Exception as e:
            if "Timeout" not in type(e).__name__: raise
            return made
        nb.on = not nb.on
    return made


def delays(made, began):
    "Seconds from each click to the beginning of the first step that used it."
    return [round(b - t, 4) for t, (_, b) in zip(made, began)]


def latency(n=30):
    "Idle, and while a cell runs. `answered` is how many clicks took effect before the cell ended."
    with browser() as show:
        nb = show(TOY, LAB, BUSY)
        nb.on = False
        for i in range(2): nb.page.evaluate("i => { const c = window.jupyterapp.shell.currentWidget.content; c.activeCellIndex = i; return window.jupyterapp.commands.execute('notebook:run-cell').then(() => true) }", i)
        nb.page.wait_for_function("() => document.querySelector('.medlab-panel')?.dataset.state === 'running'", timeout=60_000)
        made = clicks(nb, n, 30)
        idle = delays(made, json.loads(nb.kernel(BEGAN)))
        nb.page.evaluate("() => { const c = window.jupyterapp.shell.currentWidget.content; c.activeCellIndex = 2; window.jupyterapp.commands.execute('notebook:run-cell') }")
        nb.page.wait_for_timeout(1000)
        busy = clicks(nb, n, 3)
        (nb.server.root / "enough").touch()
        nb.page.wait_for_timeout(3000)
        late = delays(busy, json.loads(nb.kernel(BEGAN))[len(made):])
        steps = json.loads(nb.kernel("import json; print(json.dumps(trainer.run.metrics('step_time')['step_time'].value.tolist()))"))
        return dict(kernel=nb.kernel("import ipykernel; print(ipykernel.__version__)"), step=statistics.median(steps), idle=idle, busy=late, answered=len(late) if len(busy) == n else len(busy) - 1)


def slowdown(seconds=20, rounds=4):
    "Steps per second, by turns with the lab open and closed."
    with browser() as show:
        nb = show(TRAIN, "lab = None")
        nb.run_all()
        out = dict(open=[], closed=[])
        rate = lambda: float(nb.kernel(f"import time; a, t = trainer.iteration, time.perf_counter(); time.sleep({seconds}); print((trainer.iteration - a) / (time.perf_counter() - t))"))
        for _ in range(rounds):
            for how, code in (("closed", "lab.close() if lab else None; lab = None"), ("open", "lab = Lab(trainer, share=0); lab")):
                nb.page.evaluate("code => { const c = window.jupyterapp.shell.currentWidget.content; c.widgets[1].model.sharedModel.setSource(code); c.activeCellIndex = 1; return window.jupyterapp.commands.execute('notebook:run-cell').then(() => true) }", code)
                nb.page.wait_for_timeout(3000)
                if how == "open": nb.page.wait_for_function("() => Number(document.querySelector('.medlab-curves')?.dataset.updates || 0) > 0", timeout=60_000)
                out[how].append(rate())
        return out


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    print(json.dumps(dict(latency=latency, slowdown=slowdown)[what](*map(float if what == "slowdown" else int, words))))
