"""Trains every recipe on a fixed course of faults and changes, and tells whether two revisions end in the same bits.

    identity.py make OUT.json [--only NAME …] [--seed N]    digests of the medlab that PYTHONPATH names
    identity.py compare A.json B.json                       what differs; exit status 1 if anything does
    identity.py against REV [--only NAME …]                 digests at a git revision and of the working tree, compared

A refactoring that means to change nothing gives no difference. What it renames on purpose stands in `RENAMED`. The
course is in `course.py`. The same two files run with either revision: neither knows how medlab is divided, but for
the few lines of the course under "layout".
"""
import argparse
import difflib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

# What was renamed on purpose: old → new, or old → None for what is left out of the comparison. Both sides of it are
# brought to the new names, so entries that are no longer needed do no harm. `words` are regular expressions for the
# texts of events and reasons and for the names within their data; knobs are replaced there too.
RENAMED = dict(
    kinds=dict(lr="external_lr", nothing="no_step_taken", guard="recovery_action", not_saved="checkpoint_failed",
        scaler="loss_scale", sink="logger", waiting="data_stall", oom="out_of_memory"),
    knobs=dict(accumulate="gradient_accumulation_steps", validate="check_inputs",
        checkpointing="activation_checkpointing", climb_after="escalate_after"),
    metrics={},
    words={},
    own_step=("loss_scale", "no_gradient"),  # kinds that stood at the step before the one in their text, and now stand at it
    data=dict(skip=("batch",), diagnosis=("late",)),  # kind → what its data hold by now
    # what is said or done by now and was not: a score tried before step 1, and the weights of a best validation, saved
    more=(r"one case was scored before the first step", r"step (30|60) was saved as"),
)


def named(knobs, cls):
    "Knobs under the names that a Knobs class has for them; they are given by the new ones."
    old = {new: k for k, new in RENAMED["knobs"].items()}
    return {k if hasattr(cls, k) else old.get(k, k): v for k, v in knobs.items()}


# digests

EMA = ("average", "averages", "ema", "ema_weights", "shadow")  # keys that checkpoints have had for the averaged weights
CLOCKS = ("step_time", "data_time", "forward_time", "backward_time", "update_time", "samples_per_s", "elapsed",
    "mem_gb", "gpu_gb")
PASSING = ("sqlite", "waiting", "store", "memory", "leak")  # kinds of events that say how the machine was
MEASURED = ("held_gb", "freed_gb", "traceback", "time", "pid", "host")  # the same within the data of events
VOLATILE = {r"-?\d+\.\d+ of -?\d+\.\d+ GB": "# GB", r"-?\d+(\.\d+)? GB": "# GB", r"\b\d+(\.\d+)? s\b": "# s",
    r"(?<![\w.])(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b": "HASH", r"\b0x[0-9a-f]+\b": "ADDRESS",
    r"(?<![\w/])(/[\w.+-]+){2,}": "PATH", r"\b(process|pid|worker) \d+": r"\1 #", r"\bmedlab(\.\w+)+": "MODULE"}


def digest(x):
    "Type, shape and bits of a tensor."
    x = x.detach().cpu().contiguous()
    head = f"{x.dtype} {tuple(x.shape)}".encode()
    return hashlib.sha256(head + x.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def flat(x, name=""):
    "Name → digest of each tensor within a state, and what else is in it as text."
    if torch.is_tensor(x): return {name: digest(x)}
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (list, tuple)) else None
    if pairs is None: return {name: repr(x)}
    return {k: v for n, y in pairs for k, v in flat(y, f"{name}.{n}" if name else str(n)).items()}


def find_ema(state):
    "The averaged weights within a checkpoint, however deep; None where there are none."
    for k, v in state.items():
        if k in EMA and isinstance(v, dict) and v and all(map(torch.is_tensor, v.values())): return v
    return next((e for v in state.values() if isinstance(v, dict) and (e := find_ema(v))), None)


def newest(run):
    "The newest checkpoint of a run."
    return torch.load(run.path / "checkpoints" / run.checkpoints()[-1]["file"], weights_only=True)


def weights(trainer):
    "Digests of weights, averaged weights and moments; the trainer has saved its last step."
    ema = find_ema(newest(trainer.run))
    model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    return dict(model=flat(model), ema=flat(ema or {}), optimizer=flat(optimizer))


def series(s):
    "A metric: its values, and a digest of steps, values and statuses."
    value = np.where(np.isnan(s.value), np.nan, s.value).astype(np.float64)
    text = f"{s.step.astype(np.int64).tolist()} {s.status.astype(np.int64).tolist()}".encode()
    return dict(sha256=hashlib.sha256(text + value.tobytes()).hexdigest(), value=value.tolist())


def stable(x):
    "Texts and data without what no two runs have in common."
    if isinstance(x, str):
        for pattern, word in VOLATILE.items(): x = re.sub(pattern, word, x)
    if isinstance(x, dict): return {k: stable(v) for k, v in sorted(x.items()) if k not in MEASURED}
    return [stable(v) for v in x] if isinstance(x, (list, tuple)) else x


def said(run):
    "The events, by step."
    rows = [(-1 if e.step is None else e.step, e.kind, e.level, stable(e.text), stable(e.data))
        for e in run.events() if e.kind not in PASSING]
    return sorted(rows, key=lambda r: (*r[:4], json.dumps(r[4])))


def changed(run):
    "The requests, and what became of them."
    keys = "source", "requested", "at", "state", "applied_step", "old", "new", "verified", "reason"
    return [{k: stable(getattr(c, k)) for k in keys} for c in run.changes()]


def digests(trainer):
    "Everything that is compared of a run."
    run = trainer.run
    metrics = {k: series(s) for k, s in run.metrics().items() if k not in CLOCKS}
    return weights(trainer) | dict(metrics=metrics, changes=changed(run), events=said(run),
        checkpoints=[c["step"] for c in run.checkpoints()], end=[run.state, run.step])


def setting():
    "What decides the bits beside the code."
    return dict(torch=torch.__version__, capability=torch.backends.cpu.get_cpu_capability())


# the commands

def make(out, only=(), seed=0, root=None):
    "Write the digests of the medlab that is imported to a file. Only this command needs one."
    import medlab
    from course import chosen, train
    here = Path(medlab.__file__).parents[1]
    if root and here != Path(root).resolve(): sys.exit(f"medlab comes from {here}, not from {root}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = {}
    for name, case, precision in chosen(only):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as temp: made[name] = train(case, Path(temp) / "run", seed, precision)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    Path(out).write_text(json.dumps(dict(setting=setting(), runs=made)), encoding="utf-8")


def reworded(text):
    "A text with new names in it."
    names = {rf"\b{k}\b": new for k, new in RENAMED["knobs"].items() if new}
    for pattern, word in (names | RENAMED["words"]).items(): text = re.sub(pattern, word or "", text)
    return text


def renamed(x):
    "Anything with new names in all of its texts."
    if isinstance(x, str): return reworded(x)
    if isinstance(x, dict): return {reworded(k): renamed(v) for k, v in x.items()}
    return [renamed(v) for v in x] if isinstance(x, list) else x


def rename(run):
    "The digests of a run under new names."
    kinds, metrics = RENAMED["kinds"], RENAMED["metrics"]
    events = [[e[0], kinds.get(e[1], e[1]), e[2], *renamed(e[3:])] for e in run["events"]]
    for e in events:
        for k in RENAMED["data"].get(e[1], ()): e[4].pop(k, None)
        if e[1] in RENAMED["own_step"] and (found := re.match(r"step (\d+):", e[3])): e[0] = int(found[1])
    new = "|".join(RENAMED["more"])
    events = sorted((e for e in events if e[1] and not re.match(new, e[3])), key=lambda e: (*e[:4], json.dumps(e[4], sort_keys=True)))
    series = {new: v for k, v in run["metrics"].items() if (new := metrics.get(k, k))}
    kept = sorted({*run["checkpoints"]})
    return run | dict(events=events, metrics=series, changes=renamed(run["changes"]), checkpoints=kept)


def split_series(name, a, b):
    "Where two series part."
    same = lambda x, y: x == y or (x != x and y != y)
    at = next((i for i, (x, y) in enumerate(zip(a["value"], b["value"])) if not same(x, y)), None)
    if at is not None: return f"{name} from its row {at + 1} on: {a['value'][at]!r} → {b['value'][at]!r}"
    rows = [f"{len(s['value'])} rows" for s in (a, b)]
    return f"{name}: {' → '.join(rows)}" if rows[0] != rows[1] else f"{name}: same values, other steps or statuses"


def split_dicts(part, a, b):
    "Lines on the entries that differ."
    lines = [f"{part}: only in the {which}: {', '.join(sorted(x.keys() - y.keys())[:8])}"
        for which, x, y in (("first", a, b), ("second", b, a)) if x.keys() - y.keys()]
    bad = [k for k in a if k in b and a[k] != b[k] and (part != "metrics" or a[k]["sha256"] != b[k]["sha256"])]
    if part == "metrics": return lines + [f"{part}: {split_series(k, a[k], b[k])}" for k in bad]
    return lines + ([f"{part}: {len(bad)} of {len(a)} differ: {', '.join(bad[:8])}"] if bad else [])


def split_lists(part, a, b):
    "Lines on the rows that differ."
    rows = [[json.dumps(r, ensure_ascii=False, sort_keys=True) for r in x] for x in (a, b)]
    lines = list(difflib.unified_diff(*rows, n=0, lineterm=""))[2:]
    return [f"{part}: {line}" for line in lines if line[0] in "+-"]


def differences(a, b):
    "Lines on what two files of digests do not have in common."
    lines = [f"made with {a['setting']} and with {b['setting']}"] if a["setting"] != b["setting"] else []
    for name in sorted(a["runs"].keys() | b["runs"].keys()):
        if not (name in a["runs"] and name in b["runs"]): lines.append(f"{name}: in one of the two only"); continue
        x, y = rename(a["runs"][name]), rename(b["runs"][name])
        for part in sorted(x.keys() | y.keys()):
            split = split_dicts if isinstance(x[part], dict) else split_lists
            lines += [f"{name}: {line}" for line in split(part, x[part], y[part])]
    return lines


def compare(first, second):
    "Print what differs; the exit status."
    a, b = (json.loads(Path(f).read_text("utf-8")) for f in (first, second))
    lines = differences(a, b)
    parts = sum(len(v) if isinstance(v, (dict, list)) else 1 for r in a["runs"].values() for v in r.values())
    print("\n".join(lines) or f"identical: {len(a['runs'])} runs, {parts} digests and rows")
    return int(bool(lines) or not a["runs"])


def against(rev, only=()):
    "Compare a revision with the working tree; the exit status."
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        before, files = Path(folder) / "medlab-before", [Path(folder) / f"{n}.json" for n in ("before", "now")]
        packed = subprocess.run(["git", "archive", rev, "medlab"], cwd=root, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar: tar.extractall(before)
        for tree, file in zip((before, root), files):
            print(f"training with {rev if tree == before else 'the working tree'}", file=sys.stderr)
            command = [sys.executable, __file__, "make", file, "--root", tree, *(["--only", *only] if only else [])]
            subprocess.run(list(map(str, command)), cwd=folder, env=os.environ | dict(PYTHONPATH=str(tree)), check=True)
        return compare(*files)


def main(argv=None):
    "The command line; the exit status."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one, two, three = (commands.add_parser(c) for c in ("make", "compare", "against"))
    one.add_argument("out")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--root", help="folder that medlab must come from")
    two.add_argument("first")
    two.add_argument("second")
    three.add_argument("rev")
    for p in (one, three):
        p.add_argument("--only", nargs="+", default=(), metavar="NAME", help="runs whose names hold one of these")
    given = vars(parser.parse_args(argv))
    return dict(make=make, compare=compare, against=against)[given.pop("command")](**given)


if __name__ == "__main__": sys.exit(main())
