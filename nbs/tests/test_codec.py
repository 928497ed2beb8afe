"""Streamed coding in processes of its own: memory that is bounded, a disk that fills up, a kill that leaves nothing."""
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets limits of Linux")

HEAD = """
import json, os, resource, sys
import torch
torch.set_num_threads(1)
from medlab.core import UserError
from medlab.nets.codec import maisi_autoencoder
from medlab.nets.streaming import stream
torch.manual_seed(0)
vae = maisi_autoencoder(channels=(16, 32, 32), blocks=(2, 1, 1), groups=8).eval().requires_grad_(False)
x = torch.rand(1, 1, int(sys.argv[1]), 64, 64)
status = lambda key: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
"""

PEAK = HEAD + """
vae.encoder(x[:, :, :8, :16, :16])
with open("/proc/self/clear_refs", "w") as f: f.write("5")
base = status("VmRSS:")
vae.encoder(x) if sys.argv[2] == "whole" else stream(vae.encoder, x, 4, sys.argv[2], sys.argv[3])
print(json.dumps(status("VmHWM:") - base))
"""

FULL = HEAD + """
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
before = os.listdir("/proc/self/fd")
try: stream(vae.encoder, x, 4, "disk", sys.argv[3])
except UserError as e: print(json.dumps([str(e), len(os.listdir("/proc/self/fd")) - len(before)]))
else: print(json.dumps(["done", len(os.listdir("/proc/self/fd")) - len(before)]))
"""

ENDLESS = HEAD + """
print("ready", flush=True)
while True: stream(vae.encoder, x, 4, "disk", sys.argv[2])
"""


def ask(program, *words):
    "What a program prints at its end."
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program, *map(str, words)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_through_a_file_does_not_grow_with_depth(tmp_path):
    whole, short, long = (ask(PEAK, depth, way, tmp_path) for depth, way in ((128, "whole"), (64, "disk"), (256, "disk")))
    assert long < whole / 3, (whole, long)
    assert long < short + 12 * 2**20, (short, long)  # 192 more slices of 64 × 64 are 48 MB of 16 channels
    assert not os.listdir(tmp_path)


HEAP = HEAD + """
import ctypes
class Heap(ctypes.Structure): _fields_ = [(k, ctypes.c_size_t) for k in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc, most = ctypes.CDLL(None), []
libc.mallinfo2.restype = Heap
from medlab.nets.streaming import _Norm
add = _Norm.add
def watched(self, x):
    most.append(libc.mallinfo2().arena)
    add(self, x)
_Norm.add = watched
large = torch.empty(31 * 2**18)
del large  # from now on blocks of up to 31 MB come from the heap
z = torch.randn(1, 4, x.shape[2] // 4, 16, 16)
libc.malloc_trim(0)
base = libc.mallinfo2().arena
stream(vae.decoder, z, 1, "disk", sys.argv[2])
print(json.dumps(max(most) - base))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or later")
def test_pieces_leave_no_holes_in_the_heap(tmp_path):
    grown = ask(HEAP, 256, tmp_path)
    assert grown < 4 * 2**20, grown  # memory that is taken for each piece anew leaves 14 MB, or as much as there are pieces


def test_a_disk_that_fills_up_is_a_clear_error_and_leaves_nothing(tmp_path):
    said, opened = ask(FULL, 64, 2**22, tmp_path)
    assert "of activations are written and no more can be (file too large" in said and "larger disk" in said, said
    assert opened == 0 and not os.listdir(tmp_path)
    assert ask(FULL, 64, 2**30, tmp_path) == ["done", 0]


def held(pid):
    "Bytes of the nameless files that a process holds open."
    total = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if "(deleted)" in os.readlink(f"/proc/{pid}/fd/{fd}"): total += os.stat(f"/proc/{pid}/fd/{fd}").st_size
        except OSError: pass
    return total


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_file(tmp_path, how):
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", ENDLESS, "64", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 60
        while held(process.pid) < 2**22: assert process.poll() is None and time.monotonic() < end; time.sleep(0.01)
        process.send_signal(how)
        assert process.wait(30) == -how
    finally:
        if process.poll() is None: process.kill()
    assert not os.listdir(tmp_path)
