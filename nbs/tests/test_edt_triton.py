"""The distance transform's GPU kernels: values in Triton's interpreter, compiled code for each GPU since Turing, and what happens where they cannot be built.

None of it needs a GPU; the last tests take one where there is one. MEDLAB_TRITON=1 runs the long ones too: every kernel for every GPU, the
whole table of values, and each of 66,000 slices in the interpreter.
"""
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
import torch

LONG = bool(os.environ.get("MEDLAB_TRITON"))
long = pytest.mark.skipif(not LONG, reason="takes minutes: set MEDLAB_TRITON=1")
triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton (Linux; no GPU is needed)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def number(package): return tuple(int(n) for n in version(package).split(".")[:2]) if find_spec(package) else (0, 0)


interpreter = pytest.mark.skipif((0, 0) < number("triton") < (3, 7) and number("numpy") >= (2, 4),
                                 reason=f"the interpreter of Triton {number('triton')} takes NumPy below 2.4: TypeError in its range()")


def python(program, *args, path=(), timeout=280, **env):
    "What a program prints as JSON in its last line, and what it writes to stderr; variables that are None are taken away."
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, sys.path)]), **env}
    env = {k: str(v) for k, v in env.items() if v is not None}
    done = subprocess.run([sys.executable, "-c", program, *map(str, args)], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


# What happens where the kernels cannot be built: tensors that say they are on a GPU are passed to the public functions, by several threads.
POSING = """
import json, os, sys, sysconfig, threading, warnings
case, empty, turn = sys.argv[1], sys.argv[2], int(sys.argv[3])  # which function is called first
if case == "no Triton": sys.modules["triton"] = None
if case in ("no compiler", "no headers"):
    from triton.backends.nvidia.driver import CudaDriver
    CudaDriver.is_active = staticmethod(lambda: True)
if case == "no headers":
    paths = sysconfig.get_paths
    sysconfig.get_paths = lambda *args, **kw: {**paths(*args, **kw), "include": empty}
import torch
from medlab.losses.edt import distance_transform_edt, signed_distance_map
class Posing(torch.Tensor): is_cuda = True
mask = torch.rand(2, 3, 9, 8, 7, generator=torch.Generator().manual_seed(0)) > 0.6
names = dict(edt=distance_transform_edt, signed=signed_distance_map)
exec(compile("\\n" * 40 + "calls = [lambda x: edt(x, (3, 0.8, 0.8)), lambda x: signed(x, (3, 0.8, 0.8), 4.0), lambda x: edt(x, 2, squared=True, spatial_dims=2)]",
             "/home/user/train.py", "exec"), names)
calls = names["calls"][turn:] + names["calls"][:turn]
plain, wrong = [f(mask) for f in calls], []
def work():
    for f, p in zip(calls, plain):
        if not torch.equal(f(mask.as_subclass(Posing)), p): wrong.append(f)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads: t.start()
    for t in threads: t.join()
    work()
assert not wrong
print(json.dumps([(w.category.__name__, str(w.message), w.filename, w.lineno) for w in heard]))
"""


def fallback(case, tmp_path, turn=0, **env):
    "The one warning of a process in which the kernels cannot be built; it names the line that called the library, not one of its own."
    (tmp_path / "empty").mkdir(exist_ok=True)
    heard, err = python(POSING, case, tmp_path / "empty", turn, TRITON_CACHE_DIR=tmp_path / "cache", TRITON_LIBCUDA_PATH=tmp_path,
                        TRITON_INTERPRET=0, path=[tmp_path], **env)
    assert len(heard) == 1, heard
    assert heard[0][2:] == ["/home/user/train.py", 41], heard
    assert heard[0][0] == "RuntimeWarning" and "plain torch" in heard[0][1] and "start Python anew" in heard[0][1]
    return heard[0][1], err


@pytest.mark.parametrize("turn", [0, 1], ids=["distance_transform_edt", "signed_distance_map"])
def test_without_triton(tmp_path, turn):
    said, _ = fallback("no Triton", tmp_path, turn)
    assert "No module named 'triton'" in said or "import of triton halted" in said
    assert "pip install triton" in said


def test_with_a_broken_triton(tmp_path):
    "A Triton that is there and cannot be imported, as with a libtriton.so for another system."
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise ImportError(\"libtriton.so: version `GLIBC_2.34' not found\")")
    said, _ = fallback("broken Triton", tmp_path)
    assert "GLIBC_2.34" in said and "pip install triton" in said


@triton
def test_without_a_compiler(tmp_path):
    said, _ = fallback("no compiler", tmp_path, PATH=tmp_path / "empty", CC=None)
    assert "Failed to find C compiler" in said and "apt-get install gcc" in said


@triton
@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
def test_without_headers(tmp_path):
    said, err = fallback("no headers", tmp_path)
    assert "Python.h: No such file" in err  # of the compiler itself
    assert "CalledProcessError" in said and "python3-dev" in said


@triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver(tmp_path):
    said, _ = fallback("no driver", tmp_path)
    assert "active drivers" in said and "collect_env" in said


# Values, in the interpreter
VALUES = """
import itertools, json, math, os, sys
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np, torch
from scipy.ndimage import distance_transform_edt as scipy_edt
from medlab.losses import edt_triton as E

def masks(shape):
    "Seven in a batch, by name."
    rng, at, one = np.random.default_rng(0), np.indices(shape), np.zeros(shape, bool)
    one[tuple((n - 1) * (i % 2) for i, n in enumerate(shape))] = True
    ball = sum(((x - (n - 1) / 2) / max(n / 3, 0.5))**2 for x, n in zip(at, shape)) <= 1
    return dict(empty=one & False, full=one | True, one=one, ball=ball, random=rng.random(shape) < 0.5, checker=at.sum(0) % 2 == 0,
                sparse=rng.random(shape) < 0.02)

def truth(m, w, signed):
    if not m.any(): return np.full(m.shape, np.inf)
    if m.all(): return np.full(m.shape, -np.inf if signed else 0.0)
    return scipy_edt(~m, sampling=w) - (scipy_edt(m, sampling=w) if signed else 0)

def error(shape, w, signed, only=None, **blocks):
    "Largest relative error of a batch; infinities and zeros must agree."
    kept = {k: getattr(E, k) for k in blocks}
    for k, v in blocks.items(): setattr(E, k, v)
    batch = [m for k, m in masks(shape).items() if only is None or k in only]
    out, worst = E.distances(torch.from_numpy(np.stack(batch)), w, signed=signed).numpy(), 0.0
    for k, v in kept.items(): setattr(E, k, v)
    assert len(out) == len(batch) and out.dtype == np.float32
    for m, o in zip(batch, out):
        t = truth(m, w, signed)
        special = np.isinf(t) | (t == 0)
        assert (o[special] == t[special]).all()
        worst = max(worst, (np.abs(o - t)[~special] / np.abs(t[~special])).max(initial=0))
    return float(worst)

found = {repr(case): error(*case[0], **case[1]) for case in eval(sys.argv[1])}
print(json.dumps(found))
"""
SMALL = [((3, 9, 7), (3, 0.8, 0.8)), ((1, 17, 5), (0.7, 5, 2)), ((35, 7), (0.7, 5)), ((23, 1), (1, 1))]
MORE = [((5, 9, 14), (3, 0.8, 0.8))] + [((7, 11, 13), w) for w in ((1, 1, 1), (5, 0.7, 0.7), (0.01, 1, 10))] + [((33, 3, 67), (2, 1, 0.5)), ((67, 5, 3), (0.3, 2, 1)), ((1, 1, 1), (1, 1, 1)),
        ((23, 31), (1, 1)), ((65, 129), (0.8, 3)), ((1, 130), (2, 0.5)), ((130, 1), (2, 0.5)), ((2, 2, 2049), (1, 3, 0.8)), ((3, 2501), (2, 0.5))]
TILED = [((2, 21), (0.7, 5)), ((2, 2, 24), (3, 0.8, 0.8))]  # in tiles of 8: with a rest, and without
LINE = dict(COLUMNS=1 << 15, ROWS=2)  # one program across a line of 32,768: the interpreter takes its time for each


def values(cases, **kw):
    "Errors by case, all within float32 of SciPy."
    found, _ = python(VALUES, repr(cases), TRITON_INTERPRET=1, **kw)
    for case, e in found.items(): print(f"{e:.2e}  {case}")
    assert len(found) == len(cases) and max(found.values()) <= 1.3e-7
    return found


@triton
@interpreter
def test_values():
    values([((*case, signed), {}) for case in SMALL for signed in (False, True)])


@triton
@interpreter
def test_lines_in_tiles():
    values([((*case, signed), dict(TILE=8)) for case in TILED for signed in (False, True)])


@triton
@interpreter
def test_a_line_of_32768():
    values([(((1, 32768), (1, 0.7), True), dict(only=["one"], **LINE))], timeout=600)


@long
@triton
@interpreter
@pytest.mark.timeout(7200)
def test_more_values():
    cases = [((*case, signed), {}) for case in MORE for signed in (False, True)]
    lines = [(((1, 32768), (1, 0.5), signed), LINE) for signed in (False, True)] + [(((1, 2, 32767), (3, 1, 0.5), True), LINE)]
    across = [(((32768, 2), (0.5, 1), True), dict(only=["one", "ball", "random", "checker"], COLUMNS=2, ROWS=16384, STEP=512))]
    values(cases + lines + across, timeout=7000)


SLICES = VALUES.partition("found =")[0] + """
from triton.runtime import interpreter
E.TILE, step = int(sys.argv[1]), int(sys.argv[2])
chosen, ran = sorted({*range(0, 66_000, step), *range(32_760, 32_772), *range(65_530, 65_540), 65_999}), []
def programs(*n):
    "The interpreter's loop over programs; in grids of a program for a slice, or a line, those of the slices that are chosen."
    per = {66_000: 1, 132_000: 2}.get(n[0]) if len(n) == 1 else None
    if per is None: return range(*n)
    ran.append(n[0])
    return [per * i + k for i in chosen for k in range(per)]
interpreter.range = programs
x = np.random.default_rng(0).random((66_000, 2, 3)) < 0.5
x[:, 0, 0], x[:, 1, 2] = True, False
out = E.distances(torch.from_numpy(x), (2.0, 0.7)).numpy()
error = max(np.abs(out[i] / truth(x[i], (2.0, 0.7), True) - 1).max() for i in chosen)
print(json.dumps([float(error), ran, len(chosen)]))
"""


def slices(tile, step, timeout=280):
    "Error in the slices of a batch whose grids are all longer than CUDA allows along their second and third axis."
    (error, ran, n), _ = python(SLICES, tile, step, TRITON_INTERPRET=1, timeout=timeout)
    print(f"{error:.2e} in {n} of 66,000 slices, lines {'walked' if tile < 3 else 'whole'}")
    assert ran == [132_000] * (2 if tile < 3 else 1) + [66_000] and error <= 1.3e-7


@triton
@interpreter
@pytest.mark.parametrize("tile", [4, 2], ids=["whole lines", "walked lines"])
def test_values_beyond_65535_programs(tile): slices(tile, 999)


@long
@triton
@interpreter
@pytest.mark.timeout(7200)
def test_values_of_66000_slices(): slices(4, 1, 7000)


# Compiled code
COMPILE = """
import json, os, sys, tempfile
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from medlab.losses import edt_triton as E

LINES = dict(mask="*u8", out="*fp32", lines="i32", n="i32", w2="fp32")
ACROSS = dict(source="*fp32", out="*fp32") | {k: "i32" for k in ("n", "inner")} | {k: "fp32" for k in ("w2", "scale", "limit", "offset")}
def cpu(): return sum(os.times()[:4])
def seconds(kernel, types, constants, capability):
    "CPU time to machine code."
    fixed = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    began = cpu()
    made = triton.compile(ASTSource(fn=kernel, signature=types | {k: "constexpr" for k in constants}, constexprs=fixed),
                          target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
    return cpu() - began

def jobs(every):
    "Kernels with the constants they are launched with; by default those that take longest."
    both = (False, True) if every else (True,)
    for signed in both:
        always = dict(SIGNED=signed, FAR=E.FAR)
        for n in (1, 16, 64, 256, 2048) if every else (E.TILE,):
            yield f"lines of {n}", E.lines_kernel, LINES, always | dict(COLUMNS=n, LINES=E.TILE // n)
        walk = {k: t for k, t in LINES.items() if k != "lines"}
        for back in both: yield f"walk, back={back}", E.walk_kernel, walk, always | dict(BACK=back, COLUMNS=E.TILE)
        blocks = dict(ROWS=E.ROWS, COLUMNS=E.COLUMNS, STEP=E.STEP)
        for last, root in ((False, True), (True, False), (True, True)) if every else ((True, True),):
            yield f"across, last={last}, root={root}", E.across_kernel, ACROSS, always | blocks | dict(LAST=last, ROOT=root)
        for ones in (dict(n=1), dict(inner=1), dict(n=1, inner=1)) if every else ():  # Triton compiles a 1 in
            yield f"across, {ones}", E.across_kernel, ACROSS, always | blocks | dict(LAST=True, ROOT=True) | ones

print(json.dumps({f"sm_{c} {name}{', signed' * constants['SIGNED']}": seconds(kernel, types, constants, c) for c in map(int, sys.argv[2:])
                  for name, kernel, types, constants in jobs(int(sys.argv[1]))}))
"""


def compiled(every, *capabilities, **kw):
    "Seconds by kernel, all of them below 10."
    found, _ = python(COMPILE, int(every), *capabilities, TRITON_INTERPRET=0, **kw)
    for name, s in found.items(): print(f"{s:6.2f} s  {name}")
    assert found and max(found.values()) < 10
    return found


@triton
def test_compiles():
    "What a line of 32,768 needs, walk and across, is among these."
    assert len(compiled(False, 75, 90)) == 6


@long
@triton
@pytest.mark.timeout(7200)
def test_compiles_for_every_gpu():
    assert len(compiled(True, 75, 80, 86, 89, 90, 100, 120, timeout=7000)) == 26 * 7


# On a GPU
def agrees(shape, spacing, device="cuda"):
    "The public function against SciPy."
    from scipy.ndimage import distance_transform_edt as scipy_edt

    from medlab.losses.edt import signed_distance_map
    masks = np.random.default_rng(0).random(shape) < 0.3
    sides = masks.reshape(-1, *shape[-len(spacing):])
    sides[:, *[0] * len(spacing)], sides[:, *[-1] * len(spacing)] = True, False
    ours = signed_distance_map(torch.from_numpy(masks).to(device), spacing).cpu().numpy().reshape(sides.shape)
    for o, m in zip(ours, sides): np.testing.assert_allclose(o, scipy_edt(~m, sampling=spacing) - scipy_edt(m, sampling=spacing), rtol=1.3e-7)


@gpu
@triton
@pytest.mark.parametrize("shape, spacing", [((70_000, 8, 8), (3.0, 0.8)), ((300, 256, 4, 4), (3.0, 0.8, 0.8)), ((2, 32_768), (1.0, 0.5)), ((32_768, 2), (1.0, 0.5)),
                                            ((3, 40_001), (1.0, 0.5)), ((5, 40, 67, 131), (5.0, 0.7, 0.7))])
def test_on_a_gpu(shape, spacing): agrees(shape, spacing)


@gpu
@triton
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_second_gpu():
    assert torch.cuda.current_device() == 0
    agrees((2, 20, 30, 40), (3.0, 0.8, 0.8), "cuda:1")
