"""A run of two processes that a test does harm to: five layers of width 32 on 2 x 2 devices."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.small import PATIENCE_S, ROOT, flags, rows
from tests.environment import clean_environment

FIVE = {
    "model__num_layers": 5, "model__attention": "mla", "model__attn_res_block": 0,
    "model__ffn__num_dense_layers": 5, "model__ffn__dim": 32, "optim__name": "adamw",
    "mesh__fsdp": 4, "mesh__expert": 1,
    "train__num_steps": 12, "checkpoint__every": 2, "checkpoint__keep": 3,
    "checkpoint__keep_every": 0, "eval__every": 0, "log__tensorboard": False,
}  # fmt: skip
ENDLESS = 100_000


class Job:
    """`moejax launch local` with a training run, as a process whose children can be found."""

    def __init__(
        self, workdir: Path, cache: Path, *launching: str, env: dict[str, str] | None = None,
        file_bytes: int | None = None, **changes,
    ):  # fmt: skip
        """
        Args:
          workdir: of the run; what is printed goes to a file beside it.
          cache: of compiled programs.
          launching: options of `moejax launch`.
          env: more environment variables.
          file_bytes: largest file that can be written, as if the disk were full.
          changes: of the config FIVE.
        """

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        clean = clean_environment()
        self.workdir = workdir
        before = len(list(workdir.parent.glob(f"{workdir.name}-*.said")))
        self.said_in = workdir.with_name(f"{workdir.name}-{before}.said")
        with self.said_in.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moejax.cli.main", "launch", "local", "--processes=2",
                 "--devices-per-process=2", *launching, "--", "train", f"--workdir={workdir}",
                 *flags(**FIVE | {"compile_cache": cache} | changes)],
                cwd=ROOT, env=clean | (env or {}), text=True, stdout=out, stderr=out,
                preexec_fn=limit,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.said_in.read_text()

    def ranks(self) -> list[int]:
        """Process ids of its processes, in their order; fewer while they start."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return sorted(map(int, found.stdout.split()))

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """A signal to one process, once all have been started."""
        self.wait_for(lambda: len(self.ranks()) == 2)
        os.kill(self.ranks()[rank], signum)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Returns when it is so; the job must not end before."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Returns when a step is in the metrics."""
        self.wait_for(lambda: self.step() >= step)

    def step(self) -> int:
        """The last step in the metrics."""
        there = (self.workdir / "metrics.jsonl").exists()
        lines = rows(self.workdir) if there else []
        return lines[-1]["step"] if lines else 0

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=PATIENCE_S)
