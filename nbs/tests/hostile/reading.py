"""Reads what is named on standard input, one thing a line, and answers with a line each: what became of it.

Run by `fuzz.py` as a process of its own, so that a file can do no more than end it.
"""
import contextlib
import io
import json
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np


def _truth(path):
    file = Path(str(path) + ".truth.npy")
    return np.load(file) if file.exists() else None


def _same(data, path):
    "Whether what was read is what the sound file held; None: not known."
    expected = _truth(path)
    if expected is None: return None
    return any(np.array_equal(np.flip(data, axes), expected) for axes in ((), (1, 2), (1,), (2,), (0,), (0, 1), (0, 2), (0, 1, 2)) if data.ndim == expected.ndim
               and all(a < data.ndim for a in axes))


def nifti(path):
    from medlab.data.volume import read_volume
    _each(path.parent)
    return _same(read_volume(path).data, path)


def dicom(path):
    from medlab.data.dicom import read_dicom
    from medlab.oct.scans import read_oct_dicom
    _each(path.parent)
    with contextlib.suppress(ValueError): read_oct_dicom([path])
    return _same(read_dicom(path).data, path)


def series(path):
    from medlab.data.dicom import read_dicom
    _each(path)
    return _same(read_dicom(path).data, path)


def picture(path):
    from medlab.data.images import read_image
    from medlab.oct.scans import read_pages
    _each(path.parent)
    if path.suffix == ".tif":
        with contextlib.suppress(ValueError): read_pages(path)
    return _same(read_image(path).data, path)


def pages(path):
    from medlab.oct.scans import read_pages
    _each(path.parent)
    return _same(read_pages(path)[0], path)


def strange(path):
    "Each reader for its name; all that look for cases at it."
    from medlab.core import UserError
    with contextlib.suppress(UserError): _each(path)
    by = {".nii": nifti_alone, ".gz": nifti_alone, ".dcm": dicom_alone, ".png": picture, ".tif": picture, ".csv": listed, ".yaml": settings, ".json": listed}
    by[path.suffix](path)


def nifti_alone(path):
    from medlab.data.volume import read_grid, read_volume
    with contextlib.suppress(ValueError): read_grid(path)
    read_volume(path)


def dicom_alone(path):
    from medlab.data.dicom import read_dicom
    read_dicom(path)


def _each(folder):
    "What finds cases in folders looks at the folder: it must name its faults and may not end."
    from medlab.data.cases import Report, find_cases
    from medlab.oct.files import find_oct, inspect_oct_case
    from medlab.slices.files import find_slices
    for find in (find_slices, find_oct, find_cases):
        with contextlib.suppress(ValueError):
            for case in find(folder):
                if find is not find_oct: continue
                _shown(Report([inspect_oct_case(case)])._repr_html_())


def listed(path):
    from medlab.core import UserError
    from medlab.data.label_files import find_labelled
    from medlab.oct.files import find_oct
    from medlab.slices.files import find_slices
    said = []
    for find in (find_slices, find_oct, find_labelled):
        try:
            cases = find(path)
            cases = getattr(cases, "cases", cases)
            for c in cases:
                if c.fault: raise UserError(c.fault)
                c.read()
        except UserError as e: said.append(e)
    if len(said) == 3: raise said[0]


def settings(path):
    from medlab.cli.options import read_yaml, yaml_knob
    from medlab.recipes.fast_ddpm import FastDDPM
    file = read_yaml(path, FastDDPM)
    for k in file.keys() & FastDDPM.Knobs.class_traits().keys(): yaml_knob(FastDDPM, k, file[k])
    FastDDPM(**{k: v for k, v in file.items() if k in FastDDPM.__dataclass_fields__})


def decathlon(path):
    from medlab.data.label_files import find_labelled
    for c in find_labelled(path).cases: c.read()


def _shown(text):
    "Raise for markup that a notebook would run."
    if "<script" in text: raise SystemError(f"markup: {text[:300]}")


def _listed(root):
    "`medlab runs`: one bad run may not hide the others, and nothing may steer the terminal."
    from medlab.cli.main import runs
    from medlab.core import UserError
    with contextlib.redirect_stdout(out := io.StringIO()), contextlib.redirect_stderr(out):
        with contextlib.suppress(UserError): runs([str(root)])
    if "\x1b" in out.getvalue(): raise SystemError(f"control characters: {out.getvalue()[:300]!r}")


def run(path):
    from medlab.core import UserError
    from medlab.run.directory import Run
    from medlab.train.state import recipe_of
    _shown((runs := Run.list(path.parent))._repr_html_())
    for other in runs: other.close()
    _listed(path.parent)
    with contextlib.suppress(UserError): recipe_of(path)
    r = Run(path)
    _shown(r._repr_html_())
    try: r.state, r.step, r.names(), r.meta, r.events(), r.changes(), r.checkpoints(), r.summary(), repr(r), [r.metrics(n) for n in [*r.names()][:3]]
    finally: r.close()


def checkpoint(path):
    from medlab.core import UserError
    from medlab.run.checkpoint import read_state, sha256
    try: right = sha256(path)
    except OSError as e: raise UserError(str(e)) from e
    read_state(path, right)
    if (path.parent / "ran").exists(): raise SystemError("code ran")


READERS = {"nifti": nifti, "nifti.gz": nifti, "dicom": dicom, "dicom series": series, "dicom packed": dicom, "tiff volume": pages, "path": strange, "png": picture, "tiff": picture, "jpeg": picture,
           "csv": listed, "yaml": settings, "json": decathlon, "run": run, "checkpoint": checkpoint}


def _those():
    "This process and the one that decodes for it."
    with open(f"/proc/self/task/{os.getpid()}/children") as f: return ["self", *f.read().split()]


def _peak():
    "Bytes that were resident at the most, of both together."
    total = 0
    for p in _those():
        with contextlib.suppress(OSError, StopIteration), open(f"/proc/{p}/status") as f:
            total += next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    return total


def _forget_peak():
    for p in _those():
        with contextlib.suppress(OSError), open(f"/proc/{p}/clear_refs", "w") as f: f.write("5")


def one(format, path):
    "(outcome, what was said)"
    from medlab.core import UserError
    try: same = READERS[format](Path(path))
    except UserError as e: return "refused", str(e)
    except MemoryError: return "memory", "MemoryError"
    except BaseException as e: return "traceback", "".join(traceback.format_exception(e))[-1500:]
    return ("misread" if same is False else "read"), ""


def main():
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = io.StringIO()
    from medlab.recipes import fast_ddpm  # noqa: F401
    for line in sys.stdin:
        asked = json.loads(line)
        _forget_peak()
        before, start = _peak(), time.perf_counter()
        outcome, said = one(asked["format"], os.fsdecode(bytes.fromhex(asked["path"])))
        print(json.dumps(dict(outcome=outcome, said=said, seconds=time.perf_counter() - start, bytes=_peak() - before)), file=answers, flush=True)


if __name__ == "__main__": main()
