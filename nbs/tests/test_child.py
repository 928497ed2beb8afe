"""The process that decodes: whatever a decoder does costs its file; no such process is left behind, in whatever way its parent ends."""
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydicom.uid import JPEG2000Lossless

sys.path.insert(0, str(Path(__file__).parent / "hostile"))
from generator import dicom, dicom_bytes, packed  # noqa: E402

from medlab.core import UserError  # noqa: E402
from medlab.data.dicom import read_dicom  # noqa: E402
from medlab.intake import child  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at through /proc")
PLANTED = '''
import ctypes, os, time
from medlab.intake.decoders import dicom_frame as sound
def dicom_frame(raw, **options):
    "The decoder, but that the file of which the environment says so is hostile."
    if int(os.environ["VICTIM"]) == len(raw): {}
    yield from sound(raw, **options)
dicom_frame.needs = sound.needs
'''
FAULTS = {"segfault": ("ctypes.string_at(0)", r"crashed \(segmentation fault\)"), "abort": ("os.abort()", r"crashed \(aborted\)"),
    "hang": ("\n        while True: pass", "took more time than an image may"), "waits": ("time.sleep(999)", "did not answer in time"),
    "grows": ("list(iter(lambda: bytes(2**26), None))", "asked for more than .* bytes of memory"), "exit": ("os._exit(0)", "ended with status 0"),
    "prints": ("os.write(1, b'x' * 10**6)", None)}


def series(folder):
    "Nine slices in JPEG 2000, the fifth of another length; (folder, stored numbers)."
    data = np.random.default_rng(0).integers(-1000, 1000, (9, 12, 16)).astype(np.int16)
    folder.mkdir()
    for z in range(9): (folder / f"{z}.dcm").write_bytes(packed(dicom_bytes(dicom(data, z)), JPEG2000Lossless))
    return folder, data


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hostile_file_costs_itself(tmp_path, monkeypatch, fault):
    "Planted: a decoder that crashes, does not return, waits, takes all memory, leaves; the error names the file, the next one is read."
    program, words = FAULTS[fault]
    (tmp_path / "planted_decoder.py").write_text(PLANTED.format(program))
    folder, data = series(tmp_path / "series")
    one = tmp_path / "one.dcm"
    one.write_bytes((folder / "5.dcm").read_bytes())
    from medlab.data import dicom as module
    sizes = {}
    real = module._packed
    def jobs(path, header, indices):
        for job in real(path, header, indices):
            sizes[path.name] = len(job.raw)
            yield child.Job(job.path, "planted_decoder:dicom_frame", job.raw, job.options, job.promised, job.what)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_packed", jobs)
    monkeypatch.setattr(child, "_PATIENCE", 2 if fault == "waits" else 30)
    monkeypatch.setenv("MEDLAB_LIMITS", "seconds=1, memory=300e6")
    monkeypatch.setenv("VICTIM", "0")
    child.stop_children()
    assert (read_dicom(folder, canonical=False).data == data).all()
    child.stop_children()  # the next one has the environment of now
    monkeypatch.setenv("VICTIM", str(sizes["5.dcm"]))
    if words is None: assert (read_dicom(folder, canonical=False).data == data).all(), "what a library prints is no answer"
    else:
        with pytest.raises(UserError, match=rf"\.dcm: its pixels cannot be decoded: its decoder {words}"): read_dicom(folder)
    child.stop_children()
    monkeypatch.setenv("VICTIM", "0")
    assert (read_dicom(folder, canonical=False).data == data).all()
    child.stop_children()


SLOW = "import time\nwhile time.process_time() < {}: pass"
USER = """
def decode(raw):
    import slow_library
    yield __import__("numpy").zeros(3)
{}
"""


@pytest.mark.parametrize("needs", (True, False))
def test_an_import_is_no_image(tmp_path, monkeypatch, needs):
    "A library that takes long to import is paid for by no image, if its decoder says that it needs it; planted: it does not."
    (tmp_path / "slow_library.py").write_text(SLOW.format(4))
    (tmp_path / "uses_it.py").write_text(USER.format('decode.needs = ("slow_library",)' if needs else ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEDLAB_LIMITS", "seconds=1")
    child.stop_children()
    job = child.Job(tmp_path / "a.dcm", "uses_it:decode", b"raw")
    if needs: assert [len(a) for a in next(child.decoded([job]))] == [3]
    else:
        with pytest.raises(UserError, match="took more time than an image may"): next(child.decoded([job]))
    child.stop_children()


PARENT = '''
import os, sys, threading, time
from pathlib import Path
from medlab.data.dicom import read_dicom
from medlab.intake import child
folder = sys.argv[2]
def read(): read_dicom(folder)
def pids(): print(*[c.process.pid for c in child._idle], flush=True)
if sys.argv[1] == "loader":
    import torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 6
        def __getitem__(self, i): return torch.from_numpy(read_dicom(folder).data), torch.tensor([c.process.pid for c in child._idle][0])
if __name__ == "__main__":
    if sys.argv[1] == "loader":
        out = list(torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None, multiprocessing_context="spawn"))
        print(*{int(p) for _, p in out}, flush=True)
    else:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for t in threads: t.start()
        for t in threads: t.join()
        read()
        pids()
        if sys.argv[1] == "killed": time.sleep(99)
        if sys.argv[1] == "at once": os._exit(3)
        if sys.argv[1] == "forked" and not (pid := os.fork()):
            read()  # with a child of its own
            os._exit(0)
        if sys.argv[1] == "forked": assert os.waitpid(pid, 0)[1] == 0
'''


@pytest.mark.parametrize("how", ["ends", "killed", "at once", "loader", "forked"])
def test_no_process_is_left_behind(tmp_path, how):
    "At the end of a program, after kill −9, after os._exit, of the workers of a loader, of a fork."
    folder, _ = series(tmp_path / "series")
    (tmp_path / "parent.py").write_text(textwrap.dedent(PARENT))
    p = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), how, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = p.stdout.readline()
    pids = [*map(int, line.split())]
    assert pids, p.communicate()[1]
    if how == "killed":
        assert all(map(psutil.pid_exists, pids))
        os.kill(p.pid, signal.SIGKILL)
    said = p.communicate(timeout=120)[1]
    assert p.returncode == {"killed": -9, "at once": 3}.get(how, 0), said
    until = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until: time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_who_reads_what_is_not_packed_pays_nothing(tmp_path):
    "Neither for NIfTI nor for plain DICOM is a process started."
    data = np.zeros((9, 12, 16), np.int16)
    (tmp_path / "plain").mkdir()
    for z in range(9): (tmp_path / "plain" / f"{z}.dcm").write_bytes(dicom_bytes(dicom(data, z)))
    child.stop_children()
    read_dicom(tmp_path / "plain")
    assert not child._idle
