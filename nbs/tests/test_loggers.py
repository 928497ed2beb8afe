"""Weights & Biases without a network, without an account, and with its own process killed."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("wandb")

HEAD = """
import psutil, sys, time
from medlab.run.loggers import SafeLoggers, WandbLogger
reported = []
loggers = SafeLoggers([WandbLogger("medlab", sys.argv[1], config={"lr": 1e-3}, id="id1")], lambda name, text: reported.append(text))
loggers.log_rows(["loss", "grad_norm"], [(s, 1 / s, float("inf")) for s in range(1, 101)])
"""
KILL = """
while loggers.loggers[0].lane._calls.qsize(): time.sleep(0.01)
for child in psutil.Process().children(recursive=True): child.kill()
for step in range(101, 121): loggers.log(step, {"loss": 0.5}); time.sleep(0.01)
"""
TAIL = """
loggers.close()
print(*reported, sep=chr(10))
"""


def run(code, folder, **env):
    "A process with no W&B account, whose W&B server and proxy do not exist."
    nowhere = {k: "http://127.0.0.1:9" for k in ("WANDB_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.run([sys.executable, "-c", code, str(folder / "first")], capture_output=True, text=True, timeout=120,
                          env={**kept, **nowhere, "HOME": str(folder), "NETRC": str(folder / "none"), **env})


def test_offline_needs_no_network(tmp_path):
    done = run(HEAD + TAIL, tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0 and done.stdout.strip() == "", done.stderr
    (file,) = tmp_path.glob("first/wandb/offline-run-*/run-id1.wandb")
    content = file.read_bytes()
    assert content[:4] == b":W&B" and content.count(b"grad_norm") >= 100 and b"Infinity" in content


def test_online_without_a_key_is_said_at_once(tmp_path):
    done = run(HEAD, tmp_path)
    assert "UserError: W&B has no API key" in done.stderr


def test_a_killed_wandb_is_switched_off(tmp_path):
    done = run(HEAD + KILL + TAIL, tmp_path, WANDB_MODE="offline")
    assert "log failed: ConnectionResetError" in done.stdout and "switched off after 3 faults" in done.stdout, done.stderr
    assert done.stdout.count("log failed") == 3
