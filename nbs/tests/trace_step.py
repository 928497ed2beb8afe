"""Counts what one training step calls: functions, files, and which file is entered from which.

    python nbs/tests/trace_step.py                    this tree: a clean step, and one with a sample whose loss is NaN
    python nbs/tests/trace_step.py --tree PATH …      other checkouts, each in a process of its own
    python nbs/tests/trace_step.py --table …          one line per tree
    python nbs/tests/trace_step.py --json …           everything, for a program

A toy recipe trains on the CPU with the default knobs, so with every guard on; no checkpoint, validation or change falls
into the steps that are looked at. A *step* is one turn of the loop: the loop is the innermost function of medlab that
stays on the stack from one step to the next, and a turn begins with the first call in its source that every turn makes.

What counts is every call that Python's profiler reports, in the training thread, of code that lives in medlab/:
functions, methods, lambdas, comprehensions (which are calls up to Python 3.11) and each resumption of a generator. What
the recipe below does is the user's and does not count, nor do torch and the standard library; what they call does,
wherever it lies in medlab. A file is *entered* where a function of it is called while the nearest function of medlab,
or of the recipe, on the stack is in another file. Control *reaches* a file where it is entered, and where a call into
another file returns to it. Calls in other threads, such as the writer's, are counted apart.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CLEAN, NAN, LAST, BATCH = 10, 14, 18, 4  # numbers of the steps looked at, of the last one; samples per step
USER = "recipe"  # stands for this file among the callers
OPTIMIZER = os.path.join("torch", "optim")


def base_recipe():
    "The base class of recipes: the one import whose path depends on the tree."
    try: from medlab.recipes.base import Recipe
    except ImportError: from medlab.train.recipe import Recipe
    return Recipe


class Samples(list):
    "Samples, one of which is planted: the last one that is read for one step."
    at, reads = 0, 0

    def __getitem__(self, key):
        self.reads += 1
        sample = super().__getitem__(key[0] if isinstance(key, tuple) else key)
        return {**sample, "x": sample["x"] * (1e30 if self.reads == self.at * BATCH else 1.0)}


def samples(seed):
    "Sixty-four of them."
    import torch
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(seed))
    return Samples(dict(x=v, y=v.sum(0, keepdim=True), case=f"toy{i:02}") for i, v in enumerate(x))


def toy(at, tracer):
    "A recipe of one layer whose step `at` meets a sample with a NaN loss, and which tells a tracer of its steps."
    import torch

    @dataclass
    class Toy(base_recipe()):
        batch_size: int = BATCH

        def build_model(self): return torch.nn.Linear(4, 1)

        def dataset(self):
            made = samples(self.seed)
            made.at = at
            return made

        def prepare(self, batch, seed, step):
            tracer.prepared(step)
            return super().prepare(batch, seed, step)

        def losses(self, model, batch):
            tracer.forward()
            size = batch["x"].square().sum(1)  # infinite for the planted sample, though its values are finite
            return dict(loss=(model(batch["x"]) - batch["y"]).square().mean(1) * size / size)

    return Toy()


class Event(NamedTuple):
    "A call, or the return from one, or the optimizer's own step, of which nothing else is known."
    kind: str  # "call", "return" or "update"
    file: str = ""  # of what is called, or returns
    name: str = ""
    by: str = ""  # the file of the nearest function outwards that counts; empty: none
    caller: str = ""  # its name
    place: tuple = ()  # (line, column) in it
    looping: bool = False  # whether that is the loop


def position(frame):
    "Where in its source a frame is: (line, column)."
    places = getattr(frame.f_code, "co_positions", None)  # from Python 3.11 on
    line, _, column, _ = list(places())[frame.f_lasti // 2] if places else (None, None, None, None)
    return line or frame.f_lineno, column or 0


class Tracer:
    "Records the calls of medlab's functions while a trainer trains."

    def __init__(self, package):
        self.package, self.events, self.others = str(package) + os.sep, [], Counter()
        self.marks, self.step, self.thread = {}, 0, None  # step → number of events before it; the step; who trains
        self.loop, self.stack, self.fresh = None, (), False  # the loop's frame; those a step ago; whether a step begins

    def file(self, frame):
        "The file in medlab that a frame's code lives in; `USER` for the recipe, nothing for all others."
        name = frame.f_code.co_filename
        if name == __file__: return USER
        return name[len(self.package):] if name.startswith(self.package) else ""

    def profile(self, frame, event, arg):
        "What `sys.setprofile` calls."
        if event not in ("call", "return"): return
        file = self.file(frame)
        if file in ("", USER): return self.update(frame, event)
        if threading.get_ident() == self.thread: self.note(event, file, frame)
        elif event == "call" and self.thread: self.others[file] += 1

    def note(self, kind, file, frame):
        "Record a call of a function in medlab, or its return."
        by = frame.f_back
        while by is not None and not self.file(by): by = by.f_back
        where = (self.file(by), by.f_code.co_name, position(by), by is self.loop) if by else ()
        self.events.append(Event(kind, file, frame.f_code.co_name, *where))

    def update(self, frame, event):
        "Record the optimizer's own step."
        if event != "call" or frame.f_code.co_name != "step": return
        if OPTIMIZER in frame.f_code.co_filename: self.events.append(Event("update"))

    def prepared(self, step):
        "A step's batch is prepared."
        self.step, self.fresh = step, True
        self.marks.setdefault(step, len(self.events))

    def forward(self):
        "The first forward pass of a step: the loop is medlab's innermost function that was on the stack a step ago."
        if not self.fresh or self.step > 3: return
        self.fresh, self.thread, stack = False, threading.get_ident(), [sys._getframe()]
        while (frame := stack[-1].f_back) is not None: stack.append(frame)
        stayed = [f for f in stack if self.file(f) not in ("", USER) and any(f is g for g in self.stack)]
        self.loop, self.stack = (stayed or [None])[0], stack

    def places(self, step):
        "Calls that the loop makes between two preparations, as (number of the event, place)."
        between = range(self.marks[step], self.marks[step + 1])
        return [(i, e.place) for i in between if (e := self.events[i]).looping and e.kind == "call"]

    def begins(self, step):
        "The number of the event with which a step's turn begins."
        first = min(set.intersection(*({p for _, p in self.places(n)} for n in range(5, LAST))))
        places = [(-1, None), *self.places(step - 1)]
        return max(i for (_, before), (i, place) in zip(places, places[1:]) if place == first != before)

    def turn(self, step):
        "The events of one turn of the loop."
        return self.events[self.begins(step):self.begins(step + 1)]


def entered(events):
    "Calls from one file, or from outside, into another."
    return [e for e in events if e.kind == "call" and e.file != e.by]


def reached(events):
    "How often control reached each file, by a call or by a return."
    files = (e.file if e.kind == "call" else e.by for e in events if e.file != e.by)
    return Counter(f for f in files if f not in ("", USER))


def origin(event):
    "Where a call comes from: file:function:line."
    return f"{event.by or 'outside'}:{event.caller}:{event.place[0] if event.place else 0}"


def again(entries):
    "The files that are entered more than once: {file: {where from: how often}}."
    often = Counter(e.file for e in entries)
    return {f: dict(Counter(origin(e) for e in entries if e.file == f)) for f, n in often.items() if n > 1}


def summary(turn):
    "The figures of one step."
    calls, entries = [e for e in turn if e.kind == "call"], entered(turn)
    before = turn[:next(i for i, e in enumerate(turn) if e.kind == "update")]
    return dict(
        calls=len(calls), files=len({e.file for e in calls}), entries=[(origin(e), e.file, e.name) for e in entries],
        again=again(entries), before_update=dict(reached(before).most_common()),
    )


def traced(path):
    "Train a few steps under the profiler; the figures of the clean step and of the one with a NaN."
    import medlab
    from medlab import Trainer
    tracer = Tracer(Path(medlab.__file__).parent)
    with Trainer(toy(NAN, tracer), path, device="cpu", threads=1) as trainer:
        threading.setprofile(tracer.profile)
        sys.setprofile(tracer.profile)
        try: trainer.fit(LAST, progress=False)
        finally: sys.setprofile(None); threading.setprofile(None)
        loss = trainer.run.metrics("loss")["loss"].value
    assert len(loss) == LAST and bool((loss == loss).all()), "the planted sample alone should have left its batch"
    tree = str(Path(medlab.__file__).resolve().parents[1])
    return dict(tree=tree, clean=summary(tracer.turn(CLEAN)), nan=summary(tracer.turn(NAN)), others=dict(tracer.others))


def child(tree):
    "The figures of one checkout, from a process of its own."
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    command, env = [sys.executable, "-W", "ignore", __file__, "--here"], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode: sys.exit(f"{tree} could not be traced; what it said stands above")
    found = json.loads(done.stdout)
    if found["tree"] != str(tree): sys.exit(f"{tree} holds no medlab: the one in {found['tree']} came first")
    return found


COLUMNS = ("calls", "files", "entries", "twice", "NaN calls", "files", "entries", "twice")
HEAD = "".join(f"{w:>10}" for w in COLUMNS) + "   tree; files reached most often before optimizer.step"


def line(tree, found):
    "The line of the table for one tree."
    steps = found["clean"], found["nan"]
    figures = [v for s in steps for v in (s["calls"], s["files"], len(s["entries"]), len(s["again"]))]
    reach = found["clean"]["before_update"]
    most = max(reach.values())
    files = ", ".join(f for f, n in reach.items() if n == most)
    return "".join(f"{v:>10}" for v in figures) + f"   {tree}; {files} {most}×"


def part(title, s):
    "The lines on one step."
    yield f"\n{title}: {s['calls']} calls through {s['files']} files, {len(s['entries'])} entries"
    for by, file, name in s["entries"]: yield f"    {by} → {file}:{name}"
    yield f"  {len(s['again'])} files are entered more than once:"
    for f, by in s["again"].items():
        yield f"    {f} {sum(by.values())}×: " + ", ".join(f"{w} {n}×" if n > 1 else w for w, n in by.items())
    yield "  control reaches before optimizer.step: " + ", ".join(f"{f} {n}×" for f, n in s["before_update"].items())


def report(tree, found):
    "The figures of one tree, in full."
    others = ", ".join(f"{f} {n}" for f, n in found["others"].items()) or "none"
    steps = *part("a clean step", found["clean"]), *part("a step with a NaN", found["nan"])
    return "\n".join([str(tree), *steps, f"\ncalls in other threads, in all steps: {others}"])


def arguments(argv):
    "What is asked for."
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tree", type=Path, nargs="+", default=[ROOT], help="checkouts to trace")
    p.add_argument("--table", action="store_true", help="one line per tree")
    p.add_argument("--json", action="store_true", help="everything, for a program")
    p.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main(argv=None):
    "The command."
    args = arguments(argv)
    if args.here:
        with tempfile.TemporaryDirectory() as folder: return print(json.dumps(traced(Path(folder) / "run")))
    found = {tree: child(tree.resolve()) for tree in args.tree}
    if args.json: print(json.dumps({str(t): f for t, f in found.items()}, indent=1))
    elif args.table: print(HEAD, *(line(*f) for f in found.items()), sep="\n")
    else: print("\n\n".join(report(*f) for f in found.items()))


if __name__ == "__main__": main()
