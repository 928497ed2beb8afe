"""Kernels that are busy or lose requests, words that never arrive, and Notebook 7: what a page shows all the same."""
import os
import queue
import random
import sys
import time
from importlib.util import find_spec

import pytest
from conftest import kernel_version

VIEWER = "() => document.querySelector('.medlab-viewer')?.dataset.complete === 'true'"
CURVES = "() => Number(document.querySelector('.medlab-curves')?.dataset.updates || 0) > 0"
DRAWN = """n => { const drawn = [...document.querySelectorAll('.medlab-curves[data-updates][data-drawn]')];
    return drawn.filter(e => e.querySelector('canvas')).length === n
        && drawn.every(e => e.querySelector('.mc-state').textContent.endsWith('step 1,000')) }"""
RUN = """import json, threading, time, numpy as np
from pathlib import Path
from medlab.run.store import Store
from medlab.run.directory import write_columns
from medlab.widgets.curves import Curves
from medlab.widgets.viewer import Viewer
data, path = np.arange(24 * 40 * 32, dtype="f4").reshape(24, 40, 32), Path("runs", {name!r})
path.mkdir(parents=True)
store = Store(path / "run.db")
store.write("INSERT INTO segments(id, step, time, info) VALUES(0, 0, 0, '{{}}')").result()
store.set_meta(state="running")
write_columns(store, np.arange(1, 1001), dict(loss=1 / np.arange(1, 1001)))
"""
BOTH = "viewer, curves = Viewer(data, at=(1, 1, 1)), Curves(path)\ndisplay(viewer, curves)"
LATER = """go = Path("go_on")
def live():
    for k in range(1, 100):
        time.sleep(0.2); viewer.update(data + k); write_columns(store, np.array([1000 + k]), dict(loss=np.ones(1)))
        if go.exists(): break
threading.Thread(target=live, daemon=True).start()
end = time.monotonic() + 60
while time.monotonic() < end and not go.exists(): time.sleep(0.02)
go.unlink(missing_ok=True)"""
STILL = """curves, go = Curves(path), Path("go_on")
display(curves, curves)
end = time.monotonic() + 60
while time.monotonic() < end and not go.exists(): time.sleep(0.02)"""
PANELS = """from ipywidgets import VBox
from medlab.widgets.panel import Panel
store.set_meta(values=dict(lr=1e-3, ema=None))
panel, boxed, go = Panel(path), VBox([Panel(path), Curves(path)]), Path("go_on")
display(panel, panel, boxed)
end, asked = time.monotonic() + 60, False
while time.monotonic() < end and not go.exists():
    time.sleep(0.02)
    if not asked and Path("ask").exists():
        asked = store.write("INSERT INTO events(time, step, kind, level, text, data) VALUES(1e9, 1000, 'skip', 'warning', 'while a cell runs', '{}')").result() or True
        store.set_meta(values=dict(lr=2e-3, ema=None))
go.unlink(missing_ok=True)"""
TOLD = """([n, texts]) => { const panels = [...document.querySelectorAll('.medlab-panel')];
    return panels.length === n && panels.every(p => p.dataset.state && texts.every(t => p.innerText.includes(t))) }"""
LAB = """from medlab import Lab, Trainer, recipes
trainer = Trainer(recipes.Restoration(image_size=(32, 32), dim=8, blocks=(1,), refinement=0, batch_size=1, phantoms=8), "runs/lab", device="cpu", threads=1)"""
FIT = """lab, go = Lab(trainer), Path("go_on")
display(lab)
end = time.monotonic() + 120
while time.monotonic() < end and not go.exists(): trainer.fit(20, progress=False)
go.unlink(missing_ok=True)"""
SHOWN = """() => { const canvas = c => c.width > 20 && c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v > 60 && v < 255);
    return document.querySelectorAll('.mp-row[data-knob]').length > 50 && document.querySelectorAll('.mp-item').length > 0
        && document.querySelector('.medlab-curves[data-drawn] canvas') && [...document.querySelectorAll('.medlab-viewer canvas')].filter(canvas).length === 3 }"""
STEP = "() => parseInt(document.querySelector('.mp-facts b').textContent.replaceAll(',', ''))"
TEXT = "() => document.querySelector('.medlab-viewer .mv-status').textContent"
DATASET = "() => ({...document.querySelector('.medlab-curves').dataset})"
RUNS = "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.some(c => !c.execution_count)"


def zoom(nb):
    "Zoom into the first panel of curves."
    canvas = nb.page.locator(".medlab-curves canvas").first
    for _ in range(10):  # JupyterLab may scroll to another cell meanwhile
        canvas.evaluate("e => e.scrollIntoView({ block: 'center' })")
        box = canvas.bounding_box()
        nb.page.mouse.move(box["x"] + 150, box["y"] + 60); nb.page.mouse.down()
        nb.page.mouse.move(box["x"] + 250, box["y"] + 60, steps=4); nb.page.mouse.up()
        if nb.page.evaluate("() => !!document.querySelector('.medlab-curves').dataset.range"): return
        nb.page.wait_for_timeout(300)
    raise AssertionError("the curves could not be zoomed by mouse")


def test_a_busy_cell(notebook):
    "Pictures come and move on every kernel; what the page asks is answered at once by 7.0 to 7.3, after the cell by others."
    nb = notebook(RUN.format(name="busy"), BOTH, LATER, run=False)
    nb.start_all()
    nb.until(VIEWER, seconds=60); nb.until(CURVES)
    text, last = nb.page.evaluate(TEXT), nb.page.evaluate(DATASET).get("last")
    nb.until("old => document.querySelector('.medlab-viewer .mv-status').textContent !== old", text)
    nb.until("old => document.querySelector('.medlab-curves').dataset.last !== old", last)
    assert nb.page.evaluate(RUNS), "all of this while the cell runs"
    zoom(nb)
    ranged = "() => { const { range, answered } = document.querySelector('.medlab-curves').dataset; return range && range === answered }"
    if at_once := (7, 0) <= kernel_version() < (7, 4): nb.until(ranged); assert nb.page.evaluate(RUNS)
    (nb.path.parent / "go_on").touch()
    nb.until(f"() => !({RUNS})()", seconds=60)
    nb.until(ranged)
    nb.wait("curves._view.range is not None")
    nb.wait("viewer._feed.pages and not viewer._feed.waiting")
    print(f"\nipykernel {'.'.join(map(str, kernel_version()))}: first picture and live updates while a cell runs; zoom answered {'while it runs' if at_once else 'after it'}")
    assert not nb.errors, nb.errors


def test_a_cell_that_shows_and_goes_on(notebook):
    "A cell draws a run in which nothing more happens, and keeps the kernel busy: no page is heard, nothing is repeated."
    nb = notebook(RUN.format(name="still"), STILL, run=False)
    nb.start_all()
    nb.until(DRAWN, 2, seconds=60)
    assert nb.page.evaluate(RUNS), "every view has all that was said while the cell runs"
    (nb.path.parent / "go_on").touch()
    nb.until(f"() => !({RUNS})()", seconds=60)
    assert not nb.errors, nb.errors


def test_a_panel_in_a_cell_that_goes_on(notebook):
    "Every view of a panel, in a box or not, has all that was said and what comes while the cell runs, though no page is heard."
    nb = notebook(RUN.format(name="panels"), PANELS, run=False)
    nb.start_all()
    nb.until(TOLD, [3, ["lr", "1e-3"]], seconds=60)
    nb.until("() => document.querySelector('.medlab-curves[data-drawn] canvas')")
    (nb.path.parent / "ask").touch()
    nb.until(TOLD, [3, ["2e-3", "while a cell runs"]])
    nb.page.evaluate("() => { window.first = window.jupyterapp.shell.currentWidget.id; window.jupyterapp.commands.execute('notebook:create-output-view') }")
    nb.until(TOLD, [6, ["2e-3", "while a cell runs"]])
    nb.page.evaluate("() => window.jupyterapp.shell.activateById(window.first)")
    nb.until("() => window.jupyterapp.shell.currentWidget.id === window.first")
    assert nb.page.evaluate(RUNS), "all of this while the cell runs"
    (nb.path.parent / "go_on").touch()
    nb.until(f"() => !({RUNS})()", seconds=60)
    nb.until(TOLD, [6, ["2e-3", "while a cell runs"]])
    assert not nb.errors, nb.errors


def test_a_lab_in_a_cell_that_trains(notebook):
    "`Lab(trainer)` and `trainer.fit(…)` in one cell: panel, curves and preview are there and move while it runs."
    nb = notebook(RUN.format(name="own"), LAB, FIT, size=(1300, 1900), run=False)
    nb.start_all()
    nb.until(SHOWN, seconds=60)
    nb.until_state("running")
    step, drawn = nb.page.evaluate(STEP), nb.page.evaluate(DATASET)["updates"]
    nb.until(f"old => ({STEP})() > old + 10", step)
    nb.until("old => Number(document.querySelector('.medlab-curves').dataset.updates) > Number(old)", drawn)
    assert nb.page.evaluate(RUNS), "all of this while the cell runs"
    (nb.path.parent / "go_on").touch()
    nb.until(f"() => !({RUNS})()", seconds=60)
    nb.page.locator("[data-fix=norm_eps] .mp-switch").click()
    nb.wait("trainer.run.changes()")
    nb.kernel("lab.close(); trainer.close()")
    assert not nb.errors, nb.errors


@pytest.fixture
def client(tmp_path, monkeypatch):
    "A client of a kernel that shows no page."
    pytest.importorskip("jupyter_client", reason="jupyter_client is not installed; it comes with: pip install 'medlab[lab]'")
    from jupyter_client import KernelManager
    from jupyter_client.kernelspec import KernelSpec
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    manager = KernelManager(connection_file=str(tmp_path / "kernel.json"))
    manager._kernel_spec = KernelSpec(argv=[os.environ.get("MEDLAB_KERNEL") or sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], display_name="Python 3", language="python")
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield client
    finally: client.stop_channels(); manager.shutdown_kernel(now=True)


MEND = "from medlab.widgets.codes import mend_kernel\nmend_kernel()"


def test_no_request_is_lost(client):
    "Requests that arrive while a reply leaves: unmended, ipykernel 7.0 to 7.3 lose one of the first few dozen pairs, and then all."
    client.execute(MEND, reply=True, timeout=60)
    for i in range(400):
        wanted = {client.execute("pass", store_history=False)}
        time.sleep(random.Random(i).uniform(0, 0.004))
        wanted.add(client.comm_info())
        while wanted: wanted.discard(client.get_shell_msg(timeout=20)["parent_header"]["msg_id"])


ECHO = """from comm import create_comm
import ipykernel.comm.comm
echo = create_comm(target_name='echo', comm_id='echo')
echo.on_msg(lambda m: echo.send(m['content']['data']))"""


@pytest.mark.parametrize("mended", [True, False])
def test_a_page_that_is_loaded_again_is_heard(client, mended):
    "It has a subshell of its own, and the one in which its widget spoke last is gone with the page before; planted: ipykernel 7.4 as it is."
    if kernel_version() < (7, 0): pytest.skip("this ipykernel has no subshells")
    client.execute(ECHO + f"\n{MEND}" * mended, reply=True, timeout=60)

    def control(kind, **content):
        message = client.session.msg(kind, content)
        client.control_channel.send(message)
        while (reply := client.get_control_msg(timeout=20))["parent_header"]["msg_id"] != message["header"]["msg_id"]: pass
        return reply["content"]

    def echoed(subshell, text, seconds):
        message = client.session.msg("comm_msg", dict(comm_id="echo", data=text))
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try: said = client.get_iopub_msg(timeout=left)
            except queue.Empty: return False
            if said["msg_type"] == "comm_msg" and said["content"]["data"] == text: return True
        return False

    first = control("create_subshell_request")["subshell_id"]
    assert echoed(first, "the first page", 30)
    control("delete_subshell_request", subshell_id=first)
    again = control("create_subshell_request")["subshell_id"]
    if mended: assert echoed(again, "loaded again", 30) and echoed(first, "of a page that is gone", 30)
    elif kernel_version() == (7, 4): assert not echoed(again, "loaded again", 3), "mend_kernel has nothing to mend any more"


def test_words_that_are_lost(notebook):
    "The first messages of the page go nowhere, and so does the first array."
    nb = notebook(RUN.format(name="lost"))
    nb.page.evaluate("""() => { const k = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel; window.lost = []; const send = WebSocket.prototype.send;
        WebSocket.prototype.send = function (data) { const text = typeof data === 'string' ? data : new TextDecoder().decode(data);
            if (window.lost.length < 4 && text.includes('"comm_msg"') && /"ready"|"view"/.test(text)) { window.lost.push(text); return } return send.call(this, data) } }""")
    nb.kernel("""import medlab.widgets.codes as codes
whole = codes._messages
def lose(*args): codes._messages = whole; return [(dict(type="array lost"), [])]
codes._messages = lose""")
    nb.page.evaluate("""([source]) => { const c = window.jupyterapp.shell.currentWidget.content; c.model.sharedModel.addCell({cell_type: 'code', source}); c.activeCellIndex = 1; window.jupyterapp.commands.execute('notebook:run-cell') }""", [BOTH])
    nb.until(VIEWER); nb.until(CURVES)
    nb.until("() => window.lost.length === 4")
    nb.wait("viewer._feed.pages and curves._view.request")
    nb.until("() => document.querySelector('.medlab-viewer').dataset.drawn", seconds=30)
    nb.kernel("viewer.cursor = (20, 30, 10)")
    nb.until("() => document.querySelector('.medlab-viewer .mv-status').textContent.includes('26570')")
    assert not nb.errors, nb.errors


@pytest.mark.long
@pytest.mark.skipif(find_spec("notebook") is None, reason="Notebook 7 is not installed; it comes with: pip install 'notebook>=7.6'")
def test_notebook_7(notebook):
    nb = notebook(RUN.format(name="seven"), BOTH, ui="notebooks")
    nb.until(VIEWER); nb.until(CURVES)
    nb.page.locator(".medlab-viewer canvas").first.focus()
    nb.page.keyboard.press("PageUp")
    nb.wait("viewer.cursor == (2, 1, 1)")
    nb.until("() => document.querySelector('.medlab-viewer .mv-status').textContent.includes('(2, 1, 1)')")
    zoom(nb)
    nb.wait("curves._view.range is not None")
    saved = nb.save()
    errors = [e for e in nb.errors if not any(k in e for k in ("'filebrowser:open-path' not registered", "(reading 'schema')"))]  # Notebook 7.6's own
    assert b"image/png" in saved and len(saved) < 300_000 and not errors, (len(saved), errors)
