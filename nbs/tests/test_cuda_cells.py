"""The cells that only a GPU runs, run without one.

Every cell flagged `#| cuda` is executed here on the stand-in of fake_device, after those cells of its notebook that it needs, so
that a wrong name, a wrong argument, a tensor on the wrong side or a wait where none may be is found before a GPU is rented. What the
stand-in cannot say is how fast a GPU is, and what its own arithmetic gives. `REDUCED` makes cells smaller; `LEFT_OUT` holds those that
cannot be run so, each with its reason. Neither table may hold what is not there, nor what is not needed.
"""
import ast
import inspect
import json
import linecache
import os
import symtable
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from fake_device import DeviceTensor, FakeCuda

from medlab.losses import edt, edt_triton

NBS = Path(__file__).resolve().parents[1]

TINY = "a CPU is slow, above all in half precision, so everything is smaller"
# notebook and cell → (why, text of the cell or of one that it needs → what stands for it here)
REDUCED = {
    ("batches/04_copies", "20e0f101"): (TINY, {"4096, 4096": "16, 16", "(64, 1024, 64)": "(2, 3, 4)"}),
    ("bench/attention", "0e2a1c63"): (TINY, {"48, 64": "4, 16", "rounds=20": "rounds=1"}),
    ("bench/attention", "f9034fee"): (TINY, {"[half](48)": "[half](4)", "data(48, 16": "data(4, 16", "48, 64": "4, 16", "rounds=20": "rounds=1"}),
    ("bench/attention", "99ee6783"): (TINY, {"16, 64": "2, 16", "rounds=20": "rounds=1"}),
    ("cli/03_selftest", "b01d37b6"): (
        "a CPU is slow; a process of its own and a compiler would look for a driver", {
        "48 if device.type": "6 if device.type", "side=96": "side=16", ", process=check_process, compilers=check_compilers": ""}),
    ("losses/02_edt_triton", "4d8d4465"): (
        "the kernels need a GPU: torch's way stands for them, and the clock stands still", {
        "(2, 72, 136, 136)": "(2, 12, 13, 13)", "(1, 256, 256, 256)": "(1, 16, 16, 16)"}),
    ("memory/05_leak", "7d10b2f6"): (
        "tensors of the stand-in are of a class of their own", {
        "type(o) in (torch.Tensor, torch.nn.Parameter)": "isinstance(o, torch.Tensor)"}),
}

# notebook and cell → (why it cannot be run without a GPU, text of the cell that is the cause)
LEFT_OUT = {
    ("bench/memory", "707e7e59"): ("looks for the largest batch under CUDA's own limit on memory, in a process for each; minutes on the stand-in", 'ask(GPU_NET, "cuda", largest='),
    ("bench/memory", "71847d14"): ("trains three runs of a hundred steps in processes of their own; minutes on the stand-in", 'three(100, net=GPU_NET, device="cuda")'),
    ("nets/03_streaming", "4b10d5ee"): ("waits in pinned memory, for which the stand-in has no allocator; it passed on a GPU", 'store in ("memory", "pinned", "disk")'),
    ("step/07_speed", "20edfc73"): ("records CUDA graphs, and torch.compile does not trace where a dispatch mode, such as the stand-in's, is active", "cuda_graphs=True"),
}


def code_cells(path):
    "The code cells of a notebook: (id, source)."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(c["id"], "".join(c["source"])) for c in cells if c["cell_type"] == "code"]


def directives(source):
    "What the lines `#| …` of a cell say."
    return {line[2:].strip() for line in source.splitlines() if line.startswith("#|")}


def find_cells():
    "{(notebook, cell id): source of the cell} of all that only a GPU runs."
    return {(p.relative_to(NBS).with_suffix("").as_posix(), k): s for p in sorted(NBS.rglob("*.ipynb")) for k, s in code_cells(p) if "cuda" in directives(s)}


CELLS = find_cells()


def scopes(table):
    "A symbol table and those within it."
    yield table
    for inner in table.get_children(): yield from scopes(inner)


def of_statement(node):
    "(names that a statement binds, names that it reads from before)."
    table = symtable.symtable(ast.unparse(node), "cell", "exec")
    symbols = [s for t in scopes(table) for s in t.get_symbols() if t is table or s.is_global()]
    binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    reads = {s.get_name() for s in symbols if s.is_referenced()}
    if isinstance(node, ast.AugAssign): return binds, reads | binds
    return binds, reads if isinstance(node, ast.Assign) else reads - binds  # a loop makes its own variables


def names(source):
    "(names that a cell binds, names that it reads and has not made itself by then)."
    binds, reads = set(), set()
    for node in ast.parse("\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))).body:
        made, asked = of_statement(node)
        reads |= asked - binds
        binds |= made
    return binds, reads


def needed(cells, at):
    "The cells before a cell that it builds on: all that are exported or import, which need no others, and the last to bind a name that is read."
    earlier = [(source, *names(source)) for _, source in cells[:at]]
    usable = [i for i, (s, *_) in enumerate(earlier) if not directives(s) & {"slow", "cuda", "eval: false"}]
    chosen = {i for i in usable if directives(earlier[i][0]) & {"export", "hide"} or imports_only(earlier[i][0])}
    left = [(at, names(cells[at][1])[1])]
    while left:
        reader, reads = left.pop()
        for name in reads:
            binder = max((i for i in usable if i < reader and name in earlier[i][1]), default=None)
            if binder is None or binder in chosen: continue
            chosen.add(binder)
            left.append((binder, earlier[binder][2]))
    return [earlier[i][0] for i in sorted(chosen)]


def imports_only(source):
    "Whether a cell holds nothing but imports."
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body)


def distances_by_torch(sites, spacing, limit=float("inf"), signed=True, offset=0.0, squared=False):
    "What the kernels of the distance transform give, without any wait, as theirs."
    kw = dict(max_distance=None if limit == float("inf") else limit)
    held, n = sites.held, sites.ndim - 1
    if signed: out = edt.signed_distance_map(held, spacing, boundary="kervadec" if offset else "voxel", **kw)
    else: out = edt.distance_transform_edt(~held, spacing, squared=squared, spatial_dims=n, **kw)
    return DeviceTensor(out)


@pytest.fixture
def scene(monkeypatch):
    "Runs cells as a notebook does, and leaves the process as it was."
    monkeypatch.setattr(os, "environ", os.environ.copy())
    kernels = edt_triton.distances
    monkeypatch.setattr(edt_triton, "distances", lambda x, *a, **kw: (distances_by_torch if isinstance(x, DeviceTensor) else kernels)(x, *a, **kw))
    threads = torch.get_num_threads()
    module = types.ModuleType("notebook_of_cells")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module.__dict__
    plt.close("all")
    torch.set_num_threads(threads)


# notebook → names that stand for what a GPU alone has: functions of the notebook's own names
GIVEN = {
    "losses/02_edt_triton": dict(
        distances=lambda names: lambda x, *args, **kw: distances_by_torch(x, *args, **kw),
        triton=lambda names: SimpleNamespace(testing=SimpleNamespace(do_bench=lambda call, return_mode: (call(), 0.0)[1]))),
}


def run(source, name, names):
    "Execute a cell, whose source can be asked for afterwards, as in a notebook; Triton's kernels are read so."
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), names)


def executed(case, names):
    "Run what a cell needs, then the cell on the stand-in."
    cells = code_cells(NBS / f"{case[0]}.ipynb")
    sources = smaller(case, [*needed(cells, [k for k, _ in cells].index(case[1])), CELLS[case]])
    for i, source in enumerate(sources[:-1]): run(source, f"<{case[0]}, {i}>", names)
    names |= {k: make(names) for k, make in GIVEN.get(case[0], {}).items()}
    with FakeCuda(): run(sources[-1], f"<{' '.join(case)}>", names)


def smaller(case, sources):
    "The sources of cells, made smaller where the table says so."
    for text, other in REDUCED.get(case, ("", {}))[1].items():
        assert any(text in s for s in sources), f"{case}: {text!r} is in no cell that it needs; the table is stale"
        sources = [s.replace(text, other) for s in sources]
    return sources


@pytest.mark.parametrize("case", [c for c in CELLS if c not in LEFT_OUT], ids="-".join)
def test_cell(case, scene, monkeypatch):
    monkeypatch.chdir((NBS / case[0]).parent)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        executed(case, scene)


def test_tables_hold_nothing_stale():
    for case in [*REDUCED, *LEFT_OUT]: assert case in CELLS, f"{case} is no cell that is flagged cuda"
    for case, (_, cause) in LEFT_OUT.items(): assert cause in CELLS[case], f"{case} no longer holds {cause!r}; run it, or give another reason"
    assert not {*REDUCED} & {*LEFT_OUT} and {*GIVEN} <= {notebook for notebook, _ in CELLS}
    assert all(len(why) > 20 for why, _ in [*LEFT_OUT.values(), *REDUCED.values()])


def test_a_broken_cell_is_found(scene):
    "Names, devices and waits are seen."
    broken = {"x = torch.ones(3).cuda()\nwrong(x)": NameError, "torch.ones(3).cuda().numpy()": TypeError,
              "x = (torch.ones(3) * 0.5).cuda().requires_grad_() * 2\nx.sum().backward()\nx.grad + 1": TypeError,
              "torch.cuda.set_sync_debug_mode('error')\ntorch.ones(3).cuda(non_blocking=True).sum().item()": RuntimeError}
    for source, error in broken.items():
        with FakeCuda(), pytest.raises(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec("import torch\n" + source, scene)


def test_the_source_of_a_cell_can_be_read(scene):
    "Where Triton is installed, a kernel whose source it cannot read is refused; without it nothing would tell."
    source = "def kernel(x):\n    return x + 1\n"
    exec(compile(source, "<unread>", "exec"), scene)
    with pytest.raises(OSError, match="source"): inspect.getsource(scene["kernel"])
    run(source, "<read>", scene)
    assert inspect.getsource(scene["kernel"]) == source and scene["kernel"](1) == 2
