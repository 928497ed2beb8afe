"""Real JupyterLab in headless Chromium: a private server for the session, notebooks made of cells, and pages to drive them.

    def test_it(notebook):
        nb = notebook("from medlab.widgets.viewer import Viewer", "v = Viewer(volume)\nv")   # opened, run, free of errors
        nb.page.locator("canvas").first.hover()                                             # Playwright's page
        nb.wait("v.cursor[0] == 3")                                                         # until it is true in the kernel
        assert nb.kernel("print(v.cursor)") == "(3, 8, 8)" and not nb.errors                 # console errors of the page

Without Playwright, JupyterLab or Chromium the tests are skipped with a line that says so. Environment variables: CHROMIUM names
another executable, MEDLAB_KERNEL a Python whose ipykernel runs the notebooks, SHOTS a folder for pictures of failed tests (else
they go to pytest's temporary folder)."""
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

SLACK = 3 if os.environ.get("CI") else 1  # a busy machine is so many times slower than one that is left alone
ARGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
SETTINGS = {"@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}, "@jupyterlab/docmanager-extension/plugin": {"autosave": False}}
IDLE = """() => { const s = window.jupyterapp?.shell?.currentWidget?.sessionContext; return !!s && s.isReady && s.session?.kernel?.status === 'idle' }"""
DONE = """() => { const w = window.jupyterapp.shell.currentWidget, cells = w.content.model.sharedModel.cells.filter(c => c.cell_type === 'code' && c.source);
    return w.sessionContext.session.kernel.status === 'idle' && (cells.every(c => c.execution_count) || cells.some(c => (c.toJSON().outputs || []).some(o => o.output_type === 'error'))) }"""
MEND = """k = get_ipython().kernel  # ipykernel 7.0 to 7.3 lose requests from the start; medlab mends that where a widget is made, too late for a test
m = getattr(getattr(k, "shell_channel_thread", None), "manager", None)
if hasattr(m, "_shell_socket"): m._shell_socket = k.shell_stream
del k, m
"""
OUTPUTS = "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells.map(c => c.toJSON().outputs || [])"
EXECUTE = """async code => { const f = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code, store_history: false}); let out = '', error = '';
    f.onIOPub = m => { if (m.header.msg_type === 'stream') out += m.content.text; if (m.header.msg_type === 'error') error = m.content.ename + ': ' + m.content.evalue };
    await f.done; return [out, error] }"""


def chromium():
    "The browser's executable, or None."
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@functools.cache
def kernel_version():
    "Version of the ipykernel that runs the notebooks, such as (7, 4)."
    out = subprocess.run([os.environ.get("MEDLAB_KERNEL") or sys.executable, "-c", "import ipykernel; print(ipykernel.__version__)"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, out.split(".")[:2]))


def slack(seconds=0.1):
    "How much longer than on a machine of our own things may take now: wall time for a second of work."
    wall, cpu = time.perf_counter(), time.process_time()
    while time.process_time() < cpu + seconds: pass
    return SLACK * min(8, max(1, (time.perf_counter() - wall) / seconds) ** 2)  # a picture passes through four processes


class Server:
    "A private JupyterLab, with settings of its own."

    def __init__(self, root, home):
        self.root, self.home, self.token = Path(root), Path(home), secrets.token_hex(8)
        with socket.socket() as s: s.bind(("127.0.0.1", 0)); self.port = s.getsockname()[1]

    def start(self, seconds=90):
        "Start it, and wait until it answers."
        for name, value in SETTINGS.items():
            file = self.home / "settings" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value))
        self._kernel()
        own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython"}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "0",  # else the environment's own kernel is found before ours
               **{k: str(self.home / v) for k, v in own.items()}}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={self.port}", "--ServerApp.port_retries=0",
                   f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}", "--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True", "--LabApp.news_url=None",
                   "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.extension_manager=readonly",
                   f"--LabApp.user_settings_dir={self.home / 'settings'}", f"--LabApp.workspaces_dir={self.home / 'workspaces'}"]
        with open(self.home / "log", "wb") as log: self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        end = time.time() + seconds
        while True:
            with contextlib.suppress(OSError): self.api("status"); return self
            if self.process.poll() is not None or time.time() > end: raise RuntimeError("JupyterLab did not start:\n" + (self.home / "log").read_text()[-4000:])
            time.sleep(0.1)

    def _kernel(self):
        "The kernel of the notebooks, and what it does first."
        spec, startup = self.home / "data" / "kernels" / "python3", self.home / "ipython" / "profile_default" / "startup"
        for folder in (spec, startup): folder.mkdir(parents=True)
        argv = [os.environ.get("MEDLAB_KERNEL") or sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        (spec / "kernel.json").write_text(json.dumps(dict(argv=argv, display_name="Python 3", language="python")))
        (startup / "mend.py").write_text(MEND)

    def api(self, path, method="GET"):
        "What the server's REST interface answers."
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer: return json.loads(answer.read() or "null")

    def end_kernels(self):
        "Shut down whatever runs."
        for s in self.api("sessions"):
            with contextlib.suppress(urllib.error.HTTPError): self.api(f"sessions/{s['id']}", "DELETE")

    def stop(self):
        "Shut down kernels and server."
        with contextlib.suppress(OSError): self.end_kernels()
        self.process.terminate()
        try: self.process.wait(15)
        except subprocess.TimeoutExpired: self.process.kill(); self.process.wait()


class Notebook:
    "A page that shows one notebook of a `Server`."

    def __init__(self, server, browser, name, size=(1300, 1000), ui="lab/tree"):
        self.server, self.browser, self.name, self.errors, self.ui = server, browser, name, [], ui
        self.page = browser.new_context(viewport={"width": size[0], "height": size[1]}).new_page()
        self.page.set_default_timeout(30_000 * SLACK)
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda e: self.errors.append(e.stack or str(e)))
        self.page.goto(f"http://127.0.0.1:{server.port}/{ui}/{name}?reset&token={server.token}")
        self.page.wait_for_function(IDLE, timeout=60_000 * SLACK)

    path = property(lambda self: self.server.root / self.name)

    def command(self, name, **args):
        "Execute one of JupyterLab's commands, and wait for it."
        self.page.evaluate("([n, a]) => window.jupyterapp.commands.execute(n, a).then(() => true)", [name, args])

    def start_all(self):
        "Start to run all cells."
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")

    def run_all(self, seconds=120):
        "Run all cells; a cell that raises fails the test."
        self.start_all()
        self.page.wait_for_function(DONE, timeout=seconds * 1000)
        raised = [o for cell in self.outputs() for o in cell if o["output_type"] == "error"]
        assert not raised, raised
        return self

    def outputs(self):
        "The outputs of every cell, as the notebook holds them."
        return self.page.evaluate(OUTPUTS)

    def kernel(self, code):
        "What `code` prints in the notebook's kernel; an exception there fails the test."
        out, error = self.page.evaluate(EXECUTE, code)
        assert not error, error
        return out.strip()

    def wait(self, expression, seconds=15):
        "Wait until a Python expression is true in the kernel."
        end = time.time() + seconds * SLACK
        while self.kernel(f"print(bool({expression}))") != "True":
            assert time.time() < end, f"never true in the kernel: {expression}"
            time.sleep(0.05)

    def until(self, condition, arg=None, seconds=20):
        "Wait until a JavaScript function of `arg` is true in the page."
        self.page.wait_for_function(condition, arg=arg, timeout=seconds * 1000 * SLACK)

    def until_state(self, *states, seconds=60):
        "Wait until the panel shows one of the states."
        self.until("w => w.includes(document.querySelector('.medlab-panel')?.dataset.state)", list(states), seconds)

    def until_fate(self, knob, fate, seconds=60):
        "Wait until the panel shows what became of a change of a knob."
        self.until("([n, f]) => document.querySelector(`.mp-row[data-knob=${n}]`)?.dataset.fate === f", [knob, fate], seconds)

    def save(self):
        "Save the notebook; its bytes on disk."
        self.command("docmanager:save")
        return self.path.read_bytes()

    def theme(self, dark):
        "Switch JupyterLab's theme, and wait for its splash to go: JupyterLab removes it twice where two changes are 200 ms apart, which is an error."
        self.command("apputils:change-theme", theme="JupyterLab Dark" if dark else "JupyterLab Light")
        self.until("light => document.body.dataset.jpThemeLight === light && !document.getElementById('jupyterlab-splash')", arg=str(not dark).lower())

    def again(self, size=(1300, 1000)):
        "The same notebook in another browser window, with nothing run."
        return Notebook(self.server, self.browser, self.name, size, self.ui)


@pytest.fixture(scope="session")
def chrome():
    "A headless Chromium; the tests are skipped where there is none."
    if missing := [m for m in ("playwright", "jupyterlab", "anywidget") if find_spec(m) is None]: pytest.skip(f"{' and '.join(missing)} not installed; they come with: pip install 'medlab[dev]'")
    if chromium() is None: pytest.skip("Chromium is not installed; on Debian: apt install chromium (or set CHROMIUM to an executable)")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), headless=True, args=list(ARGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(chrome, tmp_path_factory):
    "A JupyterLab for all tests of the session."
    server = Server(tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home"))
    try: yield server.start()
    finally: server.stop()


@contextlib.contextmanager
def _notebooks(server, chrome, prefix):
    "A function that makes a notebook of cells, opens and runs it; pages and kernels end with the context."
    import nbformat
    made = []

    def make(*cells, size=(1300, 1000), ui="lab/tree", run=True):
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
        name = f"{prefix}/{len(made)}.ipynb"  # a folder for each test: their runs have the same names
        nbformat.write(nb, server.root / name)
        made.append(Notebook(server, chrome, name, size, ui))
        return made[-1].run_all() if run else made[-1]

    make.made, make.folder = made, server.root / prefix
    make.folder.mkdir(exist_ok=True)
    try: yield make
    finally:
        for nb in made: nb.page.context.close()
        for s in server.api("sessions"):
            if s["path"].startswith(f"{prefix}/"): server.api(f"sessions/{s['id']}", "DELETE")


@pytest.fixture
def notebook(request, server, chrome, tmp_path):
    "`notebook(*cells)`: a `Notebook` of these cells, run to its end; `run=False` only opens it, `ui='notebooks'` does so in Notebook 7."
    with _notebooks(server, chrome, f"{request.path.stem}_{request.node.name}".replace("[", "_").replace("]", "")) as make: yield make


@pytest.fixture
def no_process_stays(server):
    "What a failed test left training or proving ends with it."
    yield
    for p in psutil.process_iter(["cmdline", "cwd"]):
        own = (p.info["cwd"] or "").startswith(str(server.root))
        if own and re.search(r"medlab\.(train|prove)\.", " ".join(p.info["cmdline"] or ())): p.kill()


@pytest.fixture(scope="module")
def module_notebook(request, server, chrome):
    "The same for a notebook that all tests of a file share."
    with _notebooks(server, chrome, Path(request.node.name).stem + "_module") as make: yield make


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    "A picture of every page of a test that failed."
    report = (yield).get_result()
    if report.when != "call" or not report.failed: return
    folder = Path(os.environ.get("SHOTS") or item.funcargs.get("tmp_path") or tempfile.mkdtemp(prefix="medlab_shots_"))
    for name in ("notebook", "module_notebook"):
        for i, nb in enumerate(getattr(item.funcargs.get(name), "made", ())):
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(Exception): nb.page.screenshot(path=folder / f"{item.name}_{name}_{i}.png"); report.sections.append(("picture", str(folder / f"{item.name}_{name}_{i}.png")))
