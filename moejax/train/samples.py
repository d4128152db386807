"""Text that a model continues while it learns: fixed prompts, so that steps can be compared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import jax
import numpy as np

from moejax.data import Tokenizer
from moejax.generate.engine import Generator
from moejax.generate.prompts import prompt_ids
from moejax.generate.sample import Sampling
from moejax.observability import MetricsLog

if TYPE_CHECKING:
    from moejax.observability import Writers
    from moejax.train.state import Program

FILE = "samples.jsonl"


class Samples:
    """Continues the prompts of `cfg.samples` with a run's own arrays, on its own mesh.

    Nothing is compiled before the first call, and nothing again after it. Draws depend on the run's
    seed and the prompt's place, not on the mesh.

    Attributes:
      generator: the programs.
    """

    def __init__(
        self,
        program: Program,
        tokenizer: Tokenizer,
        workdir: str | os.PathLike[str],
        writers: Writers,
        *,
        first_step: int,
    ):
        """
        Args:
          program: model, mesh and config of the run.
          tokenizer: of prompts and continuations.
          workdir: where `samples.jsonl` goes: {"step", "prompt", "text"}.
          writers: those that show texts get them too.
          first_step: the run's first step; lines of that step and later ones are removed.
        """
        self._cfg, self._tokenizer = program.cfg.samples, tokenizer
        self._prompts = [prompt_ids(tokenizer, text) for text in self._cfg.prompts]
        self._sampling = Sampling(temperature=self._cfg.temperature, seed=program.cfg.seed)
        self.generator = Generator(
            program.parts, mesh=program.mesh, dtype=program.cfg.train.compute_dtype
        )
        self._writers, self._log = writers, None
        if jax.process_index() == 0:
            self._log = MetricsLog(os.fspath(workdir), first_step=first_step, file=FILE)

    def due(self, step: int) -> bool:
        """Whether the period says so."""
        return self._cfg.every > 0 and step % self._cfg.every == 0

    def __call__(self, step: int, params: dict, balance: dict) -> list[str]:
        """Continues every prompt with these weights and writes what comes. Returns the texts."""
        tokens = self.generator.generate(
            params, balance, self._prompts, max_new_tokens=self._cfg.max_new_tokens,
            sampling=self._sampling, stop=frozenset(self._tokenizer.stop_ids),
        )  # fmt: skip
        texts = [self._tokenizer.decode(np.asarray(row, np.int32)) for row in tokens]
        if self._log is not None:
            for place, (prompt, text) in enumerate(zip(self._cfg.prompts, texts, strict=True)):
                self._log.write(step, {"prompt": prompt, "text": text})
                self._writers.write_text(step, f"samples/{place}", prompt + text)
        return texts

    def close(self) -> None:
        """Closes the file."""
        if self._log is not None:
            self._log.close()
