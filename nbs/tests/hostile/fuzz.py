"""Makes hostile files, lets a process read them and counts what became of them.

    python nbs/tests/hostile/fuzz.py --files 10000           a table by format and kind, and the worst
    python nbs/tests/hostile/fuzz.py --files 10000 --save F  the same; started anew, it goes on where F ends
    python nbs/tests/hostile/fuzz.py --seed 4711 --keep DIR  one of them, kept

Exit status 1 where one ended in a traceback, a crash, a hang, more than a gigabyte, or other than it must.
"""
import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from generator import Made, make  # noqa: E402

SECONDS, BYTES = 10, 2**30
GOOD = ("read", "refused")


@dataclass
class Result:
    "What became of one thing."
    seed:int
    made:Made
    outcome:str  # read, refused, traceback, misread, lost (sound, and refused), taken (must be refused), crash, hang, memory
    said:str = ""
    seconds:float = 0.0
    bytes:int = 0  # more than before, at the most


class Reader:
    "A process that reads, made anew when a file has ended it."
    process = None

    def start(self):
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", str(HERE / "reading.py")], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)

    def stop(self):
        if self.process:
            with contextlib.suppress(OSError): os.killpg(self.process.pid, 9)
            self.process.communicate()
            self.process = None

    def read(self, made, seconds=SECONDS):
        "What the process says; a process that says nothing in time is ended."
        if self.process is None: self.start()
        line = json.dumps(dict(format=made.format, path=os.fsencode(made.path).hex())) + "\n"
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
            limit = time.monotonic() + seconds + (60 if not getattr(self.process, "used", False) else 0)
            self.process.used = True
            while not select.select([self.process.stdout], [], [], 0.5)[0]:
                if time.monotonic() > limit:
                    self.stop()
                    return dict(outcome="hang", said=f"more than {seconds} s", seconds=seconds, bytes=0)
            answer = self.process.stdout.readline()
            return json.loads(answer) if answer else self.crashed()
        except OSError: return self.crashed()

    def crashed(self):
        code = self.process.wait()
        self.process = None
        return dict(outcome="crash", said=f"exit status {code}", seconds=0, bytes=0)


def judged(seed, made, said):
    "The result: what was found, held against what must be."
    outcome = said["outcome"]
    if outcome in GOOD and said["bytes"] > BYTES: outcome = "memory"
    if outcome in GOOD and said["seconds"] > SECONDS: outcome = "hang"
    if outcome == "refused" and made.must == "read": outcome = "lost"
    if outcome == "read" and made.must == "refuse": outcome = "taken"
    if outcome == "refused" and any(ord(c) < 32 and c != "\n" or 0xD800 <= ord(c) < 0xE000 for c in said["said"]): outcome = "control"
    if outcome == "refused" and len(said["said"]) > 3000: outcome = "long"
    return Result(seed, made, outcome, said["said"], said["seconds"], said["bytes"])


def try_all(seeds, keep=lambda result: None):
    "A result for each seed, by one process; `keep` is told each."
    reader, found = Reader(), []
    try:
        for seed in seeds:
            with tempfile.TemporaryDirectory() as root:  # of its own: what lists runs looks at all that lie beside one
                (folder := Path(root) / "there").mkdir()
                made = make(seed, folder)
                found.append(judged(seed, made, reader.read(made)))
                keep(found[-1])
    finally: reader.stop()
    return found


def kept(path):
    "{seed: result} of a file of lines; a last line that was cut off does not count."
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    results = [Result(**r | {"made": Made(**r["made"])}) for r in map(json.loads, (l for l in lines if l.endswith(b"\n")))]
    if lines and not lines[-1].endswith(b"\n"): path.write_bytes(b"".join(lines[:-1]))
    return {r.seed: r for r in results}


def fuzz(files, first=0, processes=2, save=None):
    "Results of many seeds; where `save` names a file, each is written there at once, and those in it are not tried again."
    wanted = range(first, first + files)
    with ThreadPoolExecutor(processes) as pool, open(save or os.devnull, "a") as out:
        known = kept(Path(save)) if save else {}
        def keep(result): print(json.dumps(asdict(result), default=str), file=out, flush=True)
        left = [s for s in wanted if s not in known]
        parts = pool.map(lambda seeds: try_all(seeds, keep), [left[i::processes] for i in range(processes)])
        return sorted([r for p in parts for r in p] + [known[s] for s in wanted if s in known], key=lambda r: r.seed)


def counts(results, key):
    "Lines of a table: key, files, then the outcomes."
    by = defaultdict(Counter)
    for r in results: by[key(r)][r.outcome] += 1
    columns = [*GOOD, *sorted({r.outcome for r in results} - {*GOOD})]
    yield f"{'':34}{'files':>7}" + "".join(f"{c:>11}" for c in columns)
    for k in sorted(by): yield f"{k:34}{sum(by[k].values()):7}" + "".join(f"{by[k][c] or '·':>11}" for c in columns)


def report(results, kinds=False):
    "The table and the worst."
    print("\n".join(counts(results, lambda r: r.made.format)))
    if kinds: print("\n" + "\n".join(counts(results, lambda r: f"{r.made.format}: {r.made.kind}")))
    print("\n" + "\n".join(counts(results, lambda r: "all")))
    for what in ("bytes", "seconds"):
        r = max(results, key=lambda r: (r.outcome in GOOD, getattr(r, what)))
        print(f"most {what}: {getattr(r, what) / (2**20 if what == 'bytes' else 1):.1f} {'MiB' if what == 'bytes' else 's'}, {r.made.format} {r.made.kind}, seed {r.seed}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--files", type=int, default=400)
    p.add_argument("--first", type=int, default=0, help="seed of the first")
    p.add_argument("--save", help="file that keeps each result at once")
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--kinds", action="store_true", help="a line for each kind")
    p.add_argument("--bad", type=int, default=20, help="how many of the bad are shown, one for each last line")
    p.add_argument("--seed", type=int, help="only this one")
    p.add_argument("--keep", help="folder for its files")
    args = p.parse_args()
    if args.seed is not None and args.keep:
        Path(args.keep).mkdir(parents=True)
        print(make(args.seed, args.keep))
        return 0
    results = try_all([args.seed]) if args.seed is not None else fuzz(args.files, args.first, args.processes, args.save)
    report(results, args.kinds)
    bad, shown = [r for r in results if r.outcome not in GOOD], set()
    for r in bad:
        what = (r.made.format, r.outcome, r.said.strip().splitlines()[-1][:60] if r.said.strip() else "")
        if what in shown or len(shown) >= args.bad: continue
        shown.add(what)
        print(f"\n--- seed {r.seed}: {r.made.format} {r.made.kind}, must {r.made.must}: {r.outcome}\n{r.said[-900:]}")
    return int(bool(bad))


if __name__ == "__main__": sys.exit(main())
