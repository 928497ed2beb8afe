"""Measures the slow tables again: runs whole notebooks of nbs/bench and nbs/tutorials, keeps and stamps their outputs.

    python nbs/bench/run.py                    all that fit into 90 minutes, the quickest first
    python nbs/bench/run.py edt first_light    these
    python nbs/bench/run.py --minutes 20       no longer than that
    python nbs/bench/run.py --list             what there is, how long it took, and what has changed since
    python nbs/bench/run.py --list edt         of this one all that has changed
    python nbs/bench/run.py --mark             let tables without a stamp say that they were never measured under one

Each notebook runs in a kernel of its own, in its folder, one after the other: what they measure is time. At the end
come those that measure something else, with one thread each: two at a time. Cells flagged `cuda` run where there is a
GPU. A notebook is written only when its last cell has passed; one that fails, that does not
fit, or that is still running when the time is over keeps its tables. What it had found by then lies in the folder
.partial beside it, which git ignores. Exit status 1 where one failed.
"""
import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from execnb.nbio import dict2nb, write_nb
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbdev.clean import clean_nb

sys.path.insert(0, str(Path(__file__).parent))
import stamp  # noqa: E402

ROOT, MINUTES = Path(__file__).resolve().parents[2], 90.0
WIDTH = 120  # characters of a line
# scores and skips, with one thread each
UNTIMED = {"do_boundary_losses_help", "first_light", "is_it_learning_or_collapsing", "sampling", "segmentation",
    "the_restart_that_was_a_unit", "why_the_scaler_dies"}


class Failed(Exception): "A cell failed; the message names it."
class Late(Exception): "The time was over before the last cell had run."


def gpu():
    "The name of the GPU; None where there is none."
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def say(*words): print(*words, flush=True)


def runs(cell, cuda):
    "Whether a cell is run here."
    found = stamp.flags(cell)
    skipped = found.get("eval") == "false" or ("cuda" in found and not cuda)
    return cell["cell_type"] == "code" and bool(cell["source"].strip()) and not skipped


def is_progress(output):
    "Whether an output is a progress bar, a warning, or anything else that is not kept."
    if output["output_type"] == "stream": return output["name"] == "stderr"
    data = output.get("data", {})
    text = "".join(data.get("text/plain", ""))
    bar = "%|" in text or text.startswith("HBox(") or re.search(r"\dit \[\d\d:\d\d, ", text)  # the last has no end
    return "application/vnd.jupyter.widget-view+json" in data and bool(bar)


def tidy(cell):
    "Leave in a cell what is to be kept."
    silent = stamp.flags(cell).get("output") == "false"
    cell["outputs"] = [] if silent else [o for o in cell["outputs"] if not is_progress(o)]


def first_line(cell):
    "The first line of a cell that is not a directive."
    return next((l for l in cell["source"].splitlines() if l.strip() and not l.startswith("#|")), "")[:80]


def environment(root):
    "Of the kernel and the processes it starts: medlab is that of this checkout, pictures are inline."
    paths = filter(None, [str(root), os.environ.get("PYTHONPATH")])
    return {k: v for k, v in os.environ.items() if k != "MPLBACKEND"} | {"PYTHONPATH": os.pathsep.join(paths)}


def client(nb, folder, deadline):
    "What runs a notebook's cells; none of them beyond a moment of the clock."
    name = nb["metadata"].get("kernelspec", {}).get("name", "python3")
    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(
        nb, kernel_name=name, resources=place, store_widget_state=False, coalesce_streams=True,
        timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
    )


def execute(nb, path, root, deadline, cuda):
    "Run a notebook in place; raises `Failed` or `Late`."
    made = client(nb, path.parent, deadline)
    made.reset_execution_trackers()
    with contextlib.ExitStack() as stack:
        try: stack.enter_context(made.setup_kernel(env=environment(root)))
        except Exception as e: raise Failed(f"no kernel: {type(e).__name__}: {e}") from e
        for i, cell in enumerate(nb["cells"]):
            if runs(cell, cuda): one(made, path.stem, i, cell)


def one(made, name, i, cell):
    "Run a cell; raises `Failed` or `Late`."
    start, where = time.monotonic(), f"cell {i} ({first_line(cell)})"
    try: made.execute_cell(cell, i)
    except CellTimeoutError as e: raise Late(where) from e
    except CellExecutionError as e: raise Failed(f"{where}: {e.ename}: {e.evalue}") from e
    except DeadKernelError as e: raise Failed(f"{where}: the kernel died, perhaps for want of memory") from e
    tidy(cell)
    if "slow" in stamp.flags(cell): say(f"    {name}, cell {i:3}  {time.monotonic() - start:6.1f} s  {first_line(cell)}")


def write(nb, path):
    "Write a notebook as nbdev would, in one piece."
    made = dict2nb(json.loads(nbformat.writes(nbformat.from_dict(nb))))
    clean_nb(made, allowed_metadata_keys=[stamp.KEY])
    new = path.with_suffix(".new")
    write_nb(made, new)
    os.replace(new, path)


def keep_partial(nb, path):
    "Keep the outputs of a notebook whose own tables stay as they were."
    place = path.parent / ".partial"
    place.mkdir(exist_ok=True)
    nbformat.write(nb, place / path.name)


def measure(path, root, deadline, card):
    "Run a notebook, stamp it and write it; the seconds it took. Raises `Failed` or `Late`, and it stays as it was."
    before, start = path.read_bytes(), time.monotonic()
    nb, old = nbformat.read(path, as_version=4), stamp.load(path)
    head, code = stamp.commit(root, old, path), stamp.Code(root).of(old)  # as they are when the kernel starts
    try:
        execute(nb, path, root, deadline, bool(card))
        if path.read_bytes() != before: raise Failed("the notebook was changed while it ran, and is left as it is")
    except (Failed, Late):
        keep_partial(nb, path)
        raise
    seconds = round(time.monotonic() - start)
    made = dict(commit=head, machine=stamp.machine(card), seconds=seconds, cells=stamp.own(old), code=code)
    nb["metadata"][stamp.KEY] = made
    stamp.show(nb)
    write(nb, path)
    return seconds


def known(path):
    "How long a notebook took when it was last measured, s; None where that is not known."
    return stamp.load(path)["metadata"].get(stamp.KEY, {}).get("seconds")


def planned(paths):
    "The order: the quickest first, those never measured at the end."
    times = {name: known(path) for name, path in paths.items()}
    return sorted(paths, key=lambda n: (times[n] is None, times[n] or 0))


def fits(path, deadline):
    "Whether a notebook may be started: there is time left, and as much as it took before."
    left = deadline - time.monotonic()
    return left > 0 and left >= (known(path) or 0)


def attempt(name, path, root, deadline, card):
    "Measure one notebook, and say what became of it: \"measured\", \"failed\" or \"left\"."
    if not fits(path, deadline): return "left"
    say(f"{name}: started")
    try: say(f"{name}: measured in {measure(path, root, deadline, card)} s")
    except Failed as e: say(f"{name}: FAILED, its tables stay as they were; {e}"); return "failed"
    except Late as e: say(f"{name}: ended in {e}, for the time is over; its tables stay as they were"); return "left"
    return "measured"


def choose(root, names):
    "The notebooks of these names, or all; ends the program where there is none."
    there = stamp.notebooks(root)
    if unknown := [n for n in names if Path(n).stem not in there]:
        say(f"no notebook with slow cells is called {', '.join(unknown)}; there are {', '.join(there)}")
        sys.exit(2)
    return {n: p for n, p in there.items() if not names or n in {Path(m).stem for m in names}}


def state(path, code):
    "(commit, what has changed since) of a notebook's tables; (None, []) where they have no stamp."
    nb = stamp.load(path)
    found = stamp.changed(nb, code)
    return (None, []) if found is None else (nb["metadata"][stamp.KEY]["commit"], found)


def brief(found, width):
    "What has changed, as far as it fits into so many characters, and how much more."
    names = [n.removeprefix("medlab.") for n in found]
    for kept in range(len(names), 0, -1):
        rest = f" and {len(names) - kept} more" * (kept < len(names))
        if len(text := ", ".join(names[:kept]) + rest) <= width: return text
    return f"{len(names)} changes" if names else "nothing"


ROW = "{:29} {:15} {:>7}  {:9} {}"  # name, cells, time, commit, what has changed


def row(name, path, code, width):
    "A line on a notebook."
    nb, took = stamp.load(path), known(path)
    slow, cuda = len(stamp.cells(nb, "slow")), len(stamp.cells(nb, "cuda"))
    cells = f"{slow} slow" + (f", {cuda} cuda" if cuda else "")
    at, found = state(path, code)
    since = brief(found, width - len(ROW.format(*[""] * 5))) if at else "?"
    return ROW.format(name, cells, "?" if took is None else f"{took:,} s", at or "never", since)


def listing(paths, root, width):
    "A line for each notebook, in the order in which they would run."
    code = stamp.Code(root)
    say(ROW.format("notebook", "cells", "took", "measured", "changed since"))
    for name in planned(paths): say(row(name, paths[name], code, width))


def mark(paths):
    "Let notebooks without a stamp say so."
    for path in paths.values():
        nb = nbformat.read(path, as_version=4)
        if stamp.KEY in nb["metadata"]: continue
        nb["metadata"][stamp.KEY] = dict(stamp.UNMEASURED)
        write(nb, path)


def run_all(paths, root, minutes):
    "Measure what fits, and say what became of each; the exit status."
    deadline, card = time.monotonic() + 60 * minutes, gpu() if minutes > 0 else None
    if minutes > 0 and (load := os.getloadavg()[0]) > 0.5:
        say(f"note: the machine is busy (load {load:.1f}), and times will show it")
    tried = lambda name: attempt(name, paths[name], root, deadline, card)
    plan = planned(paths)
    became = {name: tried(name) for name in plan if name not in UNTIMED}
    with ThreadPoolExecutor(min(2, len(os.sched_getaffinity(0)))) as pool:  # the longest first: less waiting at the end
        rest = [name for name in reversed(plan) if name in UNTIMED]
        became |= dict(zip(rest, pool.map(tried, rest)))
    for what in ("measured", "failed", "left"):
        say(f"{what}: {', '.join(n for n in became if became[n] == what) or 'none'}")
    if "left" in became.values(): say(f"what is left did not fit into {minutes:g} minutes")
    return int("failed" in became.values())


def main(argv=None):
    "The command; its exit status."
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help="notebooks; all where none is named")
    p.add_argument("--minutes", type=float, default=MINUTES, help="none starts, or goes on, after so many; %(default)g")
    p.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    p.add_argument("--mark", action="store_true", help="mark tables that have no stamp, and run nothing")
    p.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    paths, root = choose(args.root, args.names), args.root.resolve()
    if args.list: return listing(paths, root, math.inf if args.names else WIDTH) or 0
    if args.mark: return mark(paths) or 0
    return run_all(paths, root, args.minutes)


if __name__ == "__main__": sys.exit(main())
