"""The panel in a real JupyterLab: every promise of it is checked twice, in the page and in the kernel that trains."""
import json
import os
from pathlib import Path


HOSTILE = "<img src=x onerror=window.hacked=1>"
RECIPE = f"""
import shutil, sqlite3, time, torch, traitlets
from torch import nn
from medlab import Trainer
from medlab.knobs.fixes import Fix, FIXES
from medlab.knobs.knobs import Knobs
from medlab.knobs.traits import Real
from medlab.recipes.base import Recipe
from medlab.run.directory import Run
from medlab.widgets.panel import Panel

class ToyKnobs(Knobs):
    "Knobs that change nothing but a list of what was in force."
    fft_fp32 = traitlets.Bool(False, help="transforms in float32").tag(off=False, concern="numerics")
    norm_eps = Real(1e-5, 0, 1, above=True, help={HOSTILE!r}).tag(concern="numerics")

class Toy(Recipe):
    "Fit y = Σx, slowly enough to watch, and fail on demand."
    name, Knobs, pace, broken = "toy", ToyKnobs, 0.01, None
    def fixes(self): return (Fix("fp32_fft", dict(fft_fp32=True), dict(fft_fp32=False), "prevents overflow in the transforms", "ends the overflow of the forward pass"), Fix("norm_eps", dict(norm_eps=1e-4), dict(norm_eps=1e-5), "prevents underflow of small variances"), *FIXES)
    def build_model(self): return nn.Linear(4, 1)
    def dataset(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return [dict(x=a, y=a.sum(0, keepdim=True), case=f"toy{{i}}") for i, a in enumerate(x)]
    def prepare(self, batch, seed, step):
        time.sleep(self.pace)
        if self.broken: raise ValueError(self.broken)
        return batch
    def losses(self, model, batch): return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1))

recipe = Toy(batch_size=8)
def applied(knob): return [c.applied_step for c in trainer.run.changes() if c.state == "applied" and c.new and knob in c.new]
"""
SHOW = "trainer = Trainer(recipe, 'runs/live', device='cpu', threads=1, save_every=0)\npanel = Panel(trainer)\npanel"


def root(nb, i=0): return nb.page.locator(".medlab-panel").nth(i)


def knob(nb, name): return root(nb).locator(f".mp-row[data-knob={name}]")


def button(nb, name): return root(nb).locator(".mp-buttons button", has_text=name)


def until_fix(nb, name, state): nb.until("([n, s]) => document.querySelector(`[data-fix=${n}]`)?.dataset.state === s", [name, state], 30)


def until_text(nb, selector, *parts): nb.until("([q, parts]) => { const t = document.querySelector(q)?.innerText || ''; return parts.every(p => t.includes(p)) }", [f".medlab-panel {selector}", list(parts)], 30)


def until_value(nb, name, value): nb.until("([n, v]) => document.querySelector(`.mp-row[data-knob=${n}] input[type=text]`)?.value === v", [name, value], 30)


def shot(nb, name):
    "A picture of the panel, where SHOTS says so."
    nb.page.mouse.move(5, 5)
    nb.page.wait_for_timeout(300)
    if os.environ.get("SHOTS"): root(nb).screenshot(path=Path(os.environ["SHOTS"]) / name)


def asked(nb): return json.loads(nb.kernel("print(__import__('json').dumps([[c.requested, c.state, c.source] for c in trainer.run.changes()]))"))


def test_every_control_reaches_the_step(notebook):
    nb = notebook(RECIPE, SHOW, size=(1200, 2000))
    page = nb.page
    nb.until_state("created")
    assert button(nb, "Pause").get_attribute("aria-disabled") == "true" and "nobody trains it now" in button(nb, "Pause").get_attribute("title")
    button(nb, "Pause").click(force=True)
    until_text(nb, ".mp-said", "nobody trains it now")  # a button that cannot be pressed says why
    root(nb).locator(".mp-until input").fill("1,000,000")
    button(nb, "Start").click()
    nb.until_state("running")
    nb.wait("trainer.iteration > 20 and trainer.run.meta['target'] == 1_000_000")
    height = root(nb).bounding_box()["height"]
    shot(nb, "running.png")

    root(nb).locator("[data-fix=fp32_fft] .mp-switch").click()
    nb.wait("trainer.knobs.fft_fp32 is True and len(applied('fft_fp32')) == 1")
    nb.until_fate("fft_fp32", "applied")
    until_text(nb, ".mp-row[data-knob=fft_fp32] .mp-fate", "✓ step " + nb.kernel("print(applied('fft_fp32')[0])"))

    slider = knob(nb, "lr").locator("input[type=range]")
    box = slider.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2, steps=20)
    assert "lr" not in str(asked(nb)), "nothing is asked for before the mouse is released"
    page.mouse.up()
    nb.wait("trainer.knobs.lr > 5e-3 and len(applied('lr')) == 1")
    nb.until_fate("lr", "applied")
    nb.until("v => Number(document.querySelector('.mp-row[data-knob=lr] input[type=text]').value) === v", float(nb.kernel("print(trainer.knobs.lr)")))
    assert root(nb).bounding_box()["height"] == height, "no layout jumps while it runs"

    eps = knob(nb, "norm_eps").locator("input[type=text]")
    eps.fill("3e-4")
    eps.press("Enter")
    nb.wait("trainer.knobs.norm_eps == 3e-4 and len(applied('norm_eps')) == 1")
    nb.until_fate("norm_eps", "applied")
    eps.fill("0")
    eps.press("Enter")
    until_text(nb, ".mp-row[data-knob=norm_eps] .mp-why", "0 was not asked for: it must be a finite number in (0, 1]")
    shot(nb, "invalid.png")
    eps.press("Escape")
    until_value(nb, "norm_eps", "3e-4")
    knob(nb, "norm_eps").locator(".mp-why").wait_for(state="hidden")
    knob(nb, "norm_eps").locator(".mp-reset").click()
    nb.wait("trainer.knobs.norm_eps == 1e-5")
    knob(nb, "schedule").locator("select").select_option(label="cosine")
    nb.wait("trainer.knobs.schedule == 'cosine'")

    root(nb).locator("input[type=search]").fill("clip")
    nb.until("() => [...document.querySelectorAll('.medlab-panel .mp-row[data-knob]')].filter(r => r.offsetParent).map(r => r.dataset.knob).join() === 'clip_norm,clip_by_loss'")
    knob(nb, "clip_norm").locator("input[type=checkbox]").uncheck()
    until_value(nb, "clip_norm", "1")  # the value of the fix is proposed, and not asked for yet
    shot(nb, "offered.png")
    assert "clip_norm" not in str(asked(nb))
    knob(nb, "clip_norm").locator(".mp-why button").click()
    nb.wait("trainer.knobs.clip_norm == 1.0")
    nb.until_fate("clip_norm", "applied")
    until_fix(nb, "clip_norm", "on")  # where its knobs have the on value
    knob(nb, "clip_norm").locator("input[type=checkbox]").check()
    nb.wait("trainer.knobs.clip_norm is None")
    root(nb).locator("input[type=search]").fill("")

    nb.kernel("trainer.set(scaler_watch=False)")
    until_fix(nb, "scaler_watch", "partly")
    root(nb).locator("[data-fix=scaler_watch] .mp-switch").click()
    nb.wait("trainer.knobs.scaler_watch and trainer.knobs.scale_floor == 1")

    button(nb, "Pause").click()
    nb.until_state("paused")
    at = int(nb.kernel("print(trainer.iteration)"))
    knob(nb, "lr").locator("input[type=text]").fill("2e-5")
    knob(nb, "lr").locator("input[type=text]").press("Tab")
    nb.until_fate("lr", "pending")
    until_text(nb, ".mp-row[data-knob=lr] .mp-fate", "after the pause · now ")
    until_value(nb, "lr", "2e-5")
    shot(nb, "paused.png")
    button(nb, "Resume").click()
    nb.until_fate("lr", "applied")
    assert nb.kernel("print(applied('lr')[-1])") == str(at + 1)

    button(nb, "Save").click()
    nb.wait(f"any(c['step'] > {at} for c in trainer.run.checkpoints())")
    nb.until("() => document.querySelector('.mp-buttons button:last-child').getAttribute('aria-disabled') === 'false'")
    knob(nb, "lr").locator("input[type=text]").fill("0.1")
    knob(nb, "lr").locator("input[type=text]").press("Enter")
    nb.wait("len(applied('lr')) == 3")
    until_text(nb, ".mp-row[data-knob=lr] .mp-fate", "✓ step " + nb.kernel("print(applied('lr')[-1])"))
    button(nb, "Restore").click()
    shot(nb, "restore.png")
    root(nb).locator(".mp-sure button", has_text="Go back").click()
    nb.until_fate("lr", "undone")
    nb.wait("trainer.knobs.lr == 2e-5")
    until_value(nb, "lr", "2e-5")
    button(nb, "Stop").click()
    nb.until_state("stopped")
    nb.wait("not trainer.worker.thread.is_alive()")
    nb.until("() => document.querySelector('.mp-until input').value === '1000000'")
    root(nb).locator(".mp-until input").fill(str(int(nb.kernel("print(trainer.iteration)")) + 5))
    button(nb, "Start").click()
    nb.until_state("done")
    for dark in (True, False):
        nb.theme(dark)
        shot(nb, f"{'dark' if dark else 'light'}.png")
    assert not nb.errors


def test_hostile_names_errors_reload_and_a_second_browser(notebook):
    nb = notebook(RECIPE, SHOW.replace("runs/live", "runs/" + HOSTILE), size=(1200, 2000))
    page = nb.page
    nb.kernel(f"trainer.event('note', {HOSTILE!r}, case={HOSTILE!r}); trainer.start(until=10**6)")
    nb.until_state("running")
    until_text(nb, ".mp-name", HOSTILE)
    label = knob(nb, "norm_eps").locator(".mp-label")
    label.click()
    until_text(nb, ".mp-row[data-knob=norm_eps] .mp-help", HOSTILE)
    assert HOSTILE in label.get_attribute("title")
    nb.kernel("panel._monitor.controls['knobs']['lr']['high'] = 1000; panel._heard(None, dict(t='hello'), [])")  # a page that does not know the rule
    knob(nb, "lr").locator("input[type=range]").wait_for()
    for _ in range(20):  # until the page has the other rule
        knob(nb, "lr").locator("input[type=text]").fill("50")
        knob(nb, "lr").locator("input[type=text]").press("Enter")
        page.wait_for_timeout(500)
        if "not asked for" not in knob(nb, "lr").locator(".mp-why").inner_text(): break
    nb.until_fate("lr", "refused")
    until_text(nb, ".mp-row[data-knob=lr] .mp-why", "lr=50 is refused: it must be a finite number in (0, 10]")
    until_value(nb, "lr", "1e-3")
    nb.kernel(f"recipe.broken = 'no such case: ' + {HOSTILE!r}")
    nb.until_state("failed")
    until_text(nb, ".mp-fault", "Training ended with an error", f"ValueError: no such case: {HOSTILE}")
    root(nb).locator(".mp-fault summary").click()
    until_text(nb, ".mp-fault pre", "in prepare")
    for dark in (True, False):
        nb.theme(dark)
        shot(nb, f"failed_{'dark' if dark else 'light'}.png")
    saved = nb.save().decode()
    assert len(saved) < 20_000 and "text/html" in saved and "<img" not in saved.replace("\\u003c", "<").split("text/html")[1].split("text/plain")[0]

    page.reload()
    nb.until_state("failed")
    until_text(nb, ".mp-row[data-knob=lr] .mp-why", "lr=50 is refused: it must be a finite number in (0, 10]")
    until_text(nb, ".mp-fault", f"ValueError: no such case: {HOSTILE}")
    other = nb.again(size=(1200, 2000))
    other.until_state("failed")
    nb.kernel("recipe.broken = None")
    button(other, "Start").click()
    for one in (nb, other):
        one.until_state("running")
        one.until("() => !document.querySelector('.mp-fault')")
    root(other).locator("[data-fix=fp32_fft] .mp-switch").click()
    for one in (nb, other):
        one.until_fate("fft_fp32", "applied")
        until_fix(one, "fp32_fft", "on")
    nb.wait("trainer.knobs.fft_fp32")

    nb.kernel("shutil.move(trainer.path, 'runs/away')")
    nb.until("() => /is gone or out of reach/.test(document.querySelector('.mp-trouble').textContent)")
    shot(nb, "gone.png")
    nb.kernel("shutil.move('runs/away', trainer.path)")
    nb.until("() => !document.querySelector('.mp-trouble').textContent")
    nb.kernel("trainer.writer.store.db.execute('PRAGMA max_page_count=1')")
    nb.until("() => /cannot be written/.test(document.querySelector('.mp-trouble').textContent)")
    nb.until_state("running")
    button(nb, "Stop").click()  # the checkpoint at the end cannot be listed
    nb.until_state("failed")
    until_text(nb, ".mp-trouble", "Training ended with an error that could not be recorded")
    shot(nb, "full.png")
    nb.kernel("trainer.writer.store.db.execute('PRAGMA max_page_count=1000000')")
    nb.until("() => !/cannot be written/.test(document.querySelector('.mp-trouble').textContent)")
    button(nb, "Start").click()
    nb.wait("trainer.worker.busy.locked()")
    nb.until_state("running")
    nb.kernel("trainer.stop()")
    nb.until_state("stopped")
    for one in (nb, other): assert one.page.evaluate("() => window.hacked") is None and root(one).locator("img").count() == 0
    other.page.context.close()
    assert [e for e in nb.errors if "WebSocket" not in e] == []


def test_keyboard_alone(notebook):
    nb = notebook(RECIPE, SHOW.replace("live", "keys"), "trainer.start(until=10**6)", size=(1200, 2000))
    page = nb.page
    nb.until_state("running")
    button(nb, "Pause").focus()
    for _ in range(60):
        if page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "Fix fp32_fft": break
        page.keyboard.press("Tab")
    cells = page.locator(".jp-Cell").count()
    for key in ("b", "a", "Space"): page.keyboard.press(key)
    nb.wait("trainer.knobs.fft_fp32 and len(applied('fft_fp32')) == 1")
    assert page.locator(".jp-Cell").count() == cells, "keys that are pressed in the panel are not the notebook's"
    nb.until_fate("fft_fp32", "applied")
    shot(nb, "focus.png")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    until_text(nb, "[data-fix=fp32_fft] .mp-help", "Measured: ends the overflow")
    slider = knob(nb, "lr").locator("input[type=range]")
    slider.focus()
    for _ in range(5): page.keyboard.press("ArrowRight")
    nb.wait("len(applied('lr')) == 1 and trainer.knobs.lr > 1.5e-3")
    nb.until("() => document.querySelector('.mp-row[data-knob=lr] input[type=range]').getAttribute('aria-valuetext').startsWith('1.8e-3 per step')")
    number = knob(nb, "horizon").locator("input")
    number.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    nb.wait("trainer.knobs.horizon == 1001")
    names = root(nb).locator("button, input, select, [tabindex='0']").evaluate_all("es => es.filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length)).length")
    assert names == 0, "every control has a name"
    page.evaluate("() => document.querySelector('.medlab-panel').style.width = '340px'")
    assert root(nb).evaluate("e => e.scrollWidth <= e.clientWidth") and root(nb).locator(".mp-row:visible, .mp-buttons, .mp-bartop").evaluate_all("es => es.every(e => e.scrollWidth <= e.clientWidth + 1)")
    shot(nb, "narrow.png")
    nb.kernel("trainer.stop(); panel.close()")
    assert nb.kernel("print(panel._clock.thread.is_alive())") == "False" and not nb.errors


STORM = """
import json, numpy as np, time
from pathlib import Path
from medlab.knobs.describe import describe
from medlab.knobs.fixes import FIXES
from medlab.knobs.knobs import Knobs
from medlab.run.directory import write_columns
from medlab.run.store import Store
from medlab.widgets.panel import Panel

def begin(name, **meta):
    Path("runs", name).mkdir(parents=True)
    store = Store(Path("runs", name, "run.db"))
    store.set_meta(**dict(state="stopped", target=100_000, knobs=dict(lr=1e-3), values=Knobs(precision="fp16", lr=3e-4, ema=0.9995, clip_norm=0.5).values(), controls=describe(Knobs, FIXES)) | meta)
    store.segment = store.write("INSERT INTO segments(step, time, info) VALUES(0, 0, ?)", json.dumps(dict(device="cuda:0"))).result()
    return store

store, n = begin("storm"), 20_000
step = np.arange(1, n + 1)
write_columns(store, step, dict(loss=np.r_[np.geomspace(2, 0.03, n - 1), np.nan], scale=np.full(n, 0.25), skips=np.r_[np.zeros(n - 41), np.arange(41.)], taken=step * 0.75, mem_gb=np.full(n, 21.7), gpu_gb=np.full(n, 63.25), step_time=np.full(n, 0.03)))
write = lambda i: store.write("INSERT INTO events(time, step, kind, level, text, data) VALUES(?,?,'skip','warning',?,'{}')", time.time(), i, f"step {i} was skipped ({i} in a row): Inf in the gradient of encoder.layers.{i % 7}.attention.weight; the forward pass overflows")
for i in range(1, n + 1): write(i)
store.flush()
old = begin("old")
old.write("DELETE FROM meta WHERE key IN ('controls', 'values')").result()
panel = Panel("runs/storm")
"""


def test_a_storm_and_a_run_of_an_earlier_version(notebook):
    nb = notebook(STORM, "panel", size=(1200, 2000))
    nb.until("() => document.querySelectorAll('.mp-item').length === 1")
    assert root(nb).locator(".mp-item b").inner_text() == "skip" and "×2,000, steps 18,001–20,000" in root(nb).locator(".mp-item").inner_text()
    root(nb).locator(".mp-older").click()
    nb.until("() => /×20,000, steps 1–20,000/.test(document.querySelector('.mp-item').textContent)")
    nb.kernel("for i in range(n, n + 3000): _ = write(i)")
    nb.until("() => /×23,000/.test(document.querySelector('.mp-item').textContent)")
    facts = root(nb).locator(".mp-facts").inner_text().split("\n")
    assert [facts[facts.index(k) + 1] for k in ("loss", "GPU memory", "device · precision", "loss scale", "skipped", "in a row")] == ["NaN", "63.3 GB", "cuda:0 · fp16", "0.25", "5,000", "40"]
    for group in ("gradients", "weights"): root(nb).locator(".mp-group > .mp-fold", has_text=group).click()
    shot(nb, "storm.png")
    nb.kernel("panel.close(); panel = Panel('runs/old')")
    nb.page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1 }")
    nb.command("notebook:run-cell")
    nb.until("() => /earlier version/.test(document.querySelector('.mp-note')?.textContent)")
    root(nb).locator(".mp-section[aria-label=Knobs] .mp-row").first.wait_for(state="visible")  # what is not rendered yet has no lines
    shown = nb.page.wait_for_function("() => { const rows = [...document.querySelectorAll('.mp-section[aria-label=Knobs] .mp-row')].map(r => r.innerText); return rows[0].includes('\\n') && rows }").json_value()  # in one look, for the notebook may take a row out of sight between two
    assert shown == ["lr\n1e-3"] and root(nb).locator("[role=switch]").count() == 0
    shot(nb, "old.png")
    assert not nb.errors


CHILD = RECIPE + """
with Trainer(recipe, "runs/child", device="cpu", threads=1) as t: t.fit(until=10**6, progress=False)
"""


def test_a_process_that_outlives_the_kernel(notebook):
    nb = notebook(f"import subprocess, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom waiting import seen, until\nprocess = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)\nuntil(lambda: seen('runs/child'), 90)",
        "from medlab.run.directory import Run\nfrom medlab.widgets.panel import Panel\npanel = Panel('runs/child')\npanel", size=(1200, 1700))
    nb.until_state("running")
    pid = int(nb.kernel("print(process.pid)"))
    try:
        root(nb).locator("[data-fix=fp32_fft] .mp-switch").click()
        nb.until_fate("fft_fp32", "applied")
        nb.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
        nb.page.wait_for_timeout(1500)
        nb.kernel("from medlab.run.directory import Run\nfrom medlab.widgets.panel import Panel\nbefore = Run('runs/child').step")
        nb.page.evaluate("() => { const n = window.jupyterapp.shell.currentWidget.content; n.activeCellIndex = 1 }")
        nb.command("notebook:run-cell")
        nb.until_fate("fft_fp32", "applied")
        nb.wait("Run('runs/child').step > before")
        knob(nb, "lr").locator("input[type=text]").fill("99")
        knob(nb, "lr").locator("input[type=text]").press("Escape")
        button(nb, "Pause").click()
        nb.until_state("paused")
        button(nb, "Resume").click()
        nb.until_state("running")
        knob(nb, "lr").locator("input[type=text]").fill("3e-4")
        knob(nb, "lr").locator("input[type=text]").press("Enter")
        nb.until_fate("lr", "applied")
        assert nb.kernel("print([c.applied_step is not None for c in Run('runs/child').changes()])") == "[True, True]"
        button(nb, "Stop").click()
        nb.until_state("stopped")
        nb.until("() => document.querySelector('.mp-buttons button').getAttribute('aria-disabled') === 'false'")
        button(nb, "Start").click()
        nb.until("() => /is not one of medlab's/.test(document.querySelector('.mp-trouble').textContent)")
        root(nb).locator(".mp-close").click()
        nb.until("() => !document.querySelector('.mp-trouble').textContent")
    finally:
        try: os.kill(pid, 9)
        except ProcessLookupError: pass
