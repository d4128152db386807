"""Signals are answered at once, whatever the main thread does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

# Like a compilation: long, and no signal handler of Python runs before its end.
_BUSY = """
import hashlib, time
from moejax.train import signals
signals._GRACE_S = 0.3
with signals.StopRequest(lambda line: print(line, flush=True)) as stop:
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
"""
# The same while the step is compiled.
_COMPILING = _BUSY.replace(
    '    print("begun", flush=True)\n    hash',
    '    with stop.nothing_to_save():\n        print("begun", flush=True)\n        hash',
)
# Between two steps the main thread answers by itself.
_IDLE = """
import time
from moejax.train import signals
try:
    with signals.StopRequest(lambda line: print(line, flush=True)) as stop:
        print("begun", flush=True)
        while True:
            time.sleep(0.01)
except KeyboardInterrupt:
    print("left by itself", stop.name)
"""


def _process(script: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def test_a_signal_is_acknowledged_and_a_second_ctrl_c_obeyed_while_the_program_is_busy():
    with _process(_BUSY) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == (
            "SIGTERM: stopping after this step and saving; Ctrl-C to quit now\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "SIGINT: quitting\n"
        assert process.wait(timeout=60) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("several", "signum", "code"),
    [(False, signal.SIGTERM, 143), (True, signal.SIGTERM, 0), (True, signal.SIGINT, 130)],
)
def test_while_it_compiles_the_first_signal_ends_it(several, signum, code):
    script = _COMPILING.replace("flush=True))", f"flush=True), several={several})")
    with _process(script) as process:
        process.send_signal(signum)
        name = signal.Signals(signum).name
        assert process.stdout.readline() == f"{name}: quitting, there is nothing to save yet\n"
        assert process.wait(timeout=60) == code


def test_a_second_ctrl_c_interrupts_and_sigterm_only_asks():
    with _process(_IDLE) as process:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(signum)
            time.sleep(0.1)
        out = process.stdout.read()
        assert out == (
            "SIGINT: stopping after this step and saving; again to quit now\n"
            "left by itself SIGTERM\n"
        )
        assert process.wait(timeout=60) == 0
