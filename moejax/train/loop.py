"""The training loop: batches through the compiled step, and everything that happens beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.checkpoint import Checkpoints, LocalCheckpoints
from moejax.checkpoint.base import fingerprint
from moejax.cluster import Watchdog
from moejax.config import as_dict
from moejax.data import TrainIterator
from moejax.models.flops import train_flops_per_token
from moejax.observability import (
    DeadExperts,
    Goodput,
    LoadLog,
    Progress,
    StepProfiler,
    Writers,
    peak_flops,
)
from moejax.optim import ema_params
from moejax.train.agreement import Agreement
from moejax.train.bad_steps import BadSteps
from moejax.train.compile import Compiled, compile_once, kernel_lines
from moejax.train.corruption import StateCheck
from moejax.train.diagnose import NonFiniteError, first_bad_tensor
from moejax.train.evaluate import EvalResult, Evaluator, put_batch
from moejax.train.pace import Pace, pace_row
from moejax.train.placement import Placer, without_places
from moejax.train.samples import Samples
from moejax.train.signals import StopRequest
from moejax.train.state import Program, TrainState, as_tree, frozen_leaves, saved_part
from moejax.train.step import train_step
from moejax.train.xla_flags import compiler_options

_SET_METRICS = ("loss", "nats_per_byte")  # of an EvalResult, as eval/NAME/...


class Pending(NamedTuple):
    """A step that was handed to the devices and not looked at yet; `rows` are this process's."""

    step: int
    rows: dict[str, np.ndarray]
    batch: dict[str, jax.Array]
    metrics: dict[str, jax.Array]
    position: dict[str, Any]


class Loop:
    """One process' part of a run, from `state` to `train.num_steps`."""

    def __init__(
        self, program: Program, state: TrainState, iterator: TrainIterator, evaluator: Evaluator,
        checkpoints: Checkpoints, writers: Writers, progress: Progress, profiler: StepProfiler,
        tokens: int, bad_steps: BadSteps, watchdog: Watchdog, *,
        sets: Mapping[str, Evaluator] | None = None, samples: Samples | None = None,
        loads: LoadLog | None = None, placer: Placer | None = None, goodput: Goodput | None = None,
        local: LocalCheckpoints | None = None,
    ):  # fmt: skip
        self.program, self.state, self.iterator, self.evaluator = (
            program,
            state,
            iterator,
            evaluator,
        )
        self.checkpoints, self.writers, self.progress, self.profiler = (
            checkpoints,
            writers,
            progress,
            profiler,
        )
        self.sets, self.samples = dict(sets or {}), samples
        self.loads, self.placer, self.local = loads, placer, local
        self.goodput = goodput
        self.bad_steps, self.watchdog = bad_steps, watchdog
        self.cfg = program.cfg
        self.base = None
        if program.has_base:
            self.base = fingerprint(frozen_leaves(program, state.params))
        self.start_step = int(state.step)
        self.tokens = tokens
        self.step_tokens = self.cfg.data.batch_size * self.cfg.data.seq_len
        self.compiled: Compiled | None = None
        self.first_step_s: float | None = None
        self.last: dict[str, Any] = {}
        self._timed_steps, self._timed_s = 0, 0.0
        self.last_eval: EvalResult | None = None
        self.last_sets: dict[str, EvalResult] = {}
        self.best_eval = checkpoints.best_loss()
        moe = self.cfg.model.moe
        self.dead = DeadExperts(len(program.parts.moe_layers()), moe.num_experts)
        self.flops_per_token = train_flops_per_token(
            program.parts, self.cfg.data.seq_len, program.trains, self.cfg.data.image_patches
        )
        self.peak = peak_flops(jax.devices()[0], self.cfg.train.compute_dtype)[0] * len(
            program.mesh.devices.flat
        )
        self.pace = Pace()
        self._began = time.perf_counter()
        self._begin_step()
        self._pending: list[Pending] = []
        self.check, self._batch = StateCheck(program), dict[str, jax.Array]()

    def run(self, stop: StopRequest) -> str:
        """Steps until the end, a signal, or `train.stop_at`. Returns why it ended, in words."""
        stop_at = self.cfg.train.stop_at
        self._stop = stop
        self.agreement = Agreement(self.program.mesh, stop, self.pace)
        total = self.iterator.last_step(self.start_step, self.cfg.train.num_steps)
        for step in range(self.start_step + 1, total + 1):
            traced = self._dispatch(step)
            # Read the signal once: one that comes a moment later must find the next step, and save.
            signalled = self.agreement.name
            stopping = bool(signalled) or step == stop_at
            closing = stopping or step == total or self._is_due(step)
            self.checkpoints.check()
            # Between milestones the host looks at a step while the next one runs.
            self._drain(keep=0 if closing or traced else 1, held=step if closing else None)
            if traced:
                self.profiler.after(step)
                self._begin_step()
            if closing:
                self.watchdog.at(None)  # evaluating and saving take as long as they take
                self._milestone(step, final=step == total, saving=stopping)
            if stopping and step < total:
                why = f"stopped by {signalled}" if signalled else "stopped by train.stop_at"
                return f"{why} after step {step}"
        if total < self.cfg.train.num_steps:
            return f"data used up after step {total} (data.epochs={self.cfg.data.epochs})"
        return "finished"

    def _dispatch(self, step: int) -> bool:
        """Hands a step to the devices. Returns whether a trace is to end after it."""
        with self.pace.waiting("data"):
            rows = next(self.iterator)
        batch = put_batch(self.program, rows, self.cfg.train.accumulation)
        beside = (self.bad_steps.highest_loss(step), self.agreement.vote())
        if self.compiled is None:
            with self._stop.nothing_to_save():
                self.compiled = self._compile(batch, *beside)
            self._begin_step()  # compiling is no part of the first step's time
        if self.profiler.starts(step):
            self._drain(keep=0, held=None)
            self.profiler.before(step)
            self._begin_step()  # nor is starting a trace, or ending one
        else:
            self.profiler.before(step)
        self.watchdog.at(step)
        with self.pace.waiting("devices"):  # a queue that is full blocks here
            self.state, metrics = self.compiled.call(self.state, batch, *beside)
        self._batch = batch
        self._pending.append(Pending(step, rows, batch, metrics, self.iterator.get_state()))
        if self.profiler.ends(step):
            return True
        self.profiler.after(step, metrics)
        return False

    def _begin_step(self) -> None:
        """What was before is no part of a step's time."""
        self._mark = time.perf_counter()
        self.pace.restart()

    def _compile(self, batch: dict[str, jax.Array], *beside: tuple[jax.Array, ...]) -> Compiled:
        program = self.program

        def step(state, batch, highest_loss, vote):
            state, metrics = train_step(program, state, batch, *highest_loss)
            return state, Agreement.counted(metrics, *vote)

        with jax.set_mesh(program.mesh):
            compiled = compile_once(
                step, self.state, batch, *beside,
                donate_argnums=0, out_shardings=(program.shardings, None),
                compiler_options=compiler_options(program.cfg.train.prefetch, program.mesh),
            )  # fmt: skip
        for line in kernel_lines(compiled.kernels):
            self.progress.print(f"  {line}")
        return compiled

    def _drain(self, keep: int, held: int | None) -> None:
        """Looks at the oldest pending steps until `keep` are left.

        Writes the lines of all but `held`.
        """
        while len(self._pending) > keep:
            done = self._pending.pop(0)
            with self.pace.waiting("devices"):
                host = jax.device_get(done.metrics)
            self.agreement.read(host)
            if self.first_step_s is None:
                self.first_step_s = time.perf_counter() - self._began
            if host["finite"]:
                self.bad_steps.good(done.step, float(host["loss"]))
            else:
                self._bad(done, float(host["loss"]), float(host["grad_norm"]))
            now = time.perf_counter()
            step_s, self._mark = now - self._mark, now
            self.tokens += self.step_tokens
            self._report(done.step, host, step_s, done.position)
            if done.step != held and done.step % self.cfg.log.every == 0:
                self.writers.write(done.step, self.last)

    def _bad(self, done: Pending, loss: float, norm: float) -> None:
        """Keeps the batch of a step that was not applied; stops, goes back, or tells and goes on.

        All processes do the same: they read the same numbers, at the same place of the loop.
        """
        limit = self.bad_steps.limit(done.step)
        spike = math.isfinite(loss) and math.isfinite(norm)
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {norm}"
        what = f"loss {loss:.6g} above the limit {limit:.6g}" if spike else what
        facts = {
            "loss": loss, "grad_norm": norm, "limit": limit, "policy": self.cfg.train.bad_step,
            "microbatches": self.cfg.train.accumulation, "data": done.position,
        }  # fmt: skip
        good = self.checkpoints.latest_step()
        newest = "nothing was saved"
        if good is not None:
            newest = f"the last good checkpoint is {self.checkpoints.path(good)}"
        if self.cfg.train.bad_step != "stop":
            kept = self.bad_steps.keep(done.step, done.rows, facts)
            line = self.bad_steps.next(done.step, what, kept, done.position, newest)
            self.progress.print(line)
            return
        where = "" if spike else first_bad_tensor(self.program, self.state, done.batch)
        kept = self.bad_steps.keep(done.step, done.rows, facts | {"first_bad_tensor": where})
        raise NonFiniteError(
            f"{what} at step {done.step}: {f'first bad tensor: {where}; ' if where else ''}"
            f"{newest}; the batch is {kept}. Lower the learning rate, look at the data of this "
            "step (`moejax replay`), or set train.bad_step=skip or rewind."
        )

    def mean_tokens_per_s(self) -> float | None:
        """Speed of all steps of this process but its first, which compiles."""
        return self._timed_steps * self.step_tokens / self._timed_s if self._timed_steps else None

    def _report(
        self, step: int, host: dict[str, np.ndarray], step_s: float, position: dict[str, Any]
    ) -> None:
        """The step's line; `position` is that of the data behind it, a later batch may be read."""
        rate = self.step_tokens / step_s
        if step > self.start_step + 1:
            self._timed_steps += 1
            self._timed_s += step_s
        row: dict[str, Any] = {
            "loss": float(host["loss"]),
            "eval_loss": None,
            "eval_nats_per_byte": None,
            "grad_norm": float(host["grad_norm"]),
            "lr": float(host["lr"]),
            "tokens": self.tokens,
            "tokens_per_s": rate,
            "step_s": step_s,
            "mfu": rate * self.flops_per_token / self.peak,
            "model_flops_per_token": self.flops_per_token,
            "peak_memory_bytes": self.compiled.peak_bytes if self.compiled else 0,
        }
        row |= {f"eval/{name}/{key}": None for name in self.sets for key in _SET_METRICS}
        if "load" in host:
            load = np.asarray(host["load"], np.float64)
            mean = np.maximum(load.mean(-1), 1e-9)
            row["moe_load_max"] = (load.max(-1) / mean).tolist()
            row["moe_load_min"] = (load.min(-1) / mean).tolist()
            row["moe_dropped"] = np.asarray(host["dropped"]).tolist()
            for key in ("rounds", "sent_bytes", "sent_bytes_network"):
                row[f"moe_{key}"] = np.asarray(host[key]).tolist()
            row["dead_experts"] = self.dead.update(step, host["load"]).tolist()
            if self.loads is not None:
                self.loads.add(step, host["load"])
            if self.placer is not None:
                row["moe_device_load_max"] = self.placer.observe(host["load"]).tolist()
        row |= pace_row(self.agreement.laps, step_s)
        if self.goodput is not None:
            self.goodput.add(step_s)
            row |= self.goodput.row()
        if "bad_images" in position:
            row["bad_images"] = position["bad_images"]["count"]
        for name in ("indexer_kl", "aux_loss", "max_logit"):
            if name in host:
                row[name] = np.asarray(host[name]).tolist()
        self.last = row
        self.progress.update(step, row)

    def _is_due(self, step: int) -> bool:
        """Whether this step is evaluated, sampled or saved by its period, or places experts."""
        sampled = self.samples is not None and self.samples.due(step)
        placed = self.placer is not None and self.placer.due(step)
        saved = self.checkpoints.due(step) or self._local_due(step)
        return self._eval_due(step) or saved or sampled or placed or self.check.due(step)

    def _local_due(self, step: int) -> bool:
        return self.local is not None and self.local.due(step)

    def _eval_due(self, step: int) -> bool:
        return self.cfg.eval.every > 0 and step % self.cfg.eval.every == 0

    def _milestone(self, step: int, *, final: bool, saving: bool) -> None:
        """Places experts, evaluates and saves where it is due; then writes the step's line."""
        is_best = False
        if self.check.due(step):  # before anything is saved
            self.check(step, self.state, self._batch)
        if self.placer is not None and self.placer.due(step):
            self.state, line = self.placer.renew(self.state)
            self.progress.print(f"step {step}: {line}")
        if final or self._eval_due(step):
            result = self.last_eval = self.evaluate()
            is_best = result.loss < self.best_eval
            self.best_eval = min(self.best_eval, result.loss)
            self.last |= {"eval_loss": result.loss, "eval_nats_per_byte": result.nats_per_byte}
            self.progress.print(
                f"step {step}: validation loss {result.loss:.4f} a token, "
                f"{result.nats_per_byte:.4f} nats a byte"
            )
            self._evaluate_sets(step)
        self.writers.write(step, self.last)
        if self.samples is not None and (final or self.samples.due(step)):
            self.samples(step, self.weights(), self.state.balance)
        if self._local_due(step):
            self.save(step, local=True)
        if (
            final
            or saving
            or self.checkpoints.due(step)
            or (is_best and self.cfg.checkpoint.keep_best)
        ):
            self.save(step)
        self._begin_step()  # nothing of this is part of a step's time

    def weights(self) -> dict:
        """What is evaluated: the current weights, or their average where one is kept."""
        if not self.cfg.optim.ema_decay:
            return self.state.params
        return jax.device_put(ema_params(self.state.opt_state), self.program.shardings.params)

    def evaluate(self) -> EvalResult:
        """Validation loss."""
        return self.evaluator(self.weights(), self.state.balance)

    def _evaluate_sets(self, step: int) -> None:
        for name, evaluator in self.sets.items():
            # Batches have one shape: the program of the validation split serves all.
            evaluator.compiled = evaluator.compiled or self.evaluator.compiled
            result = self.last_sets[name] = evaluator(self.weights(), self.state.balance)
            self.last |= {f"eval/{name}/{key}": getattr(result, key) for key in _SET_METRICS}
            self.progress.print(
                f"step {step}: {name} loss {result.loss:.4f} a token, "
                f"{result.nats_per_byte:.4f} nats a byte"
            )

    def save(self, step: int, *, local: bool = False) -> None:
        """Saves everything a resumed run needs to repeat the same bits."""
        if self.loads is not None:
            self.loads.flush()  # no record spans a step from which a run may go on
        position = {
            "data": self.iterator.get_state(),
            "tokens": self.tokens,
            "bad_steps": self.bad_steps.position(),
        }
        if self.placer is not None:
            position["placement"] = self.placer.position()
            self.state = self.placer.in_order(self.state)
        if self.base is not None:
            position["base"] = self.base
        state = self.state._replace(balance=without_places(self.state.balance))
        metrics = {
            k: v for k, v in self.last.items() if k in ("eval_loss", "loss") and v is not None
        }
        tree = saved_part(self.program, as_tree(state, self.cfg.seed))
        if local and self.local is not None:
            self.local.save(step, tree, position)
        else:
            self.checkpoints.save(
                step, tree, position=position, config=as_dict(self.cfg), metrics=metrics
            )
        if self.placer is not None:
            self.state = self.placer.again(self.state)
