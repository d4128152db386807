"""`moejax verify`: what works with a folder of weights, as a list of checks with their figures."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from moejax.config import ConfigError, MeshConfig
from moejax.verify import checks
from moejax.verify.checks import Setting, Skipped

STEPS: dict[str, Callable[[Setting], tuple[bool, str, dict[str, Any]]]] = {
    "load": checks.load_folder,
    "keys": checks.key_coverage,
    "dtypes": checks.dtype_report,
    "import": checks.import_folder,
    "export": checks.export_round_trip,
    "logits": checks.logits,
    "train step": checks.train_one_step,
    "save, resume": checks.save_and_resume,
    "export trained": checks.export_trained,
}


class Check(NamedTuple):
    """One line of the card: `outcome` is ok, failed or skipped."""

    name: str
    outcome: str
    seconds: float
    line: str
    facts: dict[str, Any]


class Card(NamedTuple):
    """All checks of one source."""

    source: str
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(check.outcome != "failed" for check in self.checks)

    def as_json(self) -> str:
        """The card as a JSON object."""
        rows = [check._asdict() for check in self.checks]
        return json.dumps({"source": self.source, "passed": self.passed, "checks": rows}, indent=1)


def verify(
    source: str | pathlib.Path,
    *,
    reference: str | pathlib.Path | None = None,
    routing: str = "free",
    tolerance: float = 1e-4,
    mesh: MeshConfig | None = None,
    skip: Collection[str] = (),
    folder: str | pathlib.Path | None = None,
    on_check: Callable[[Check], Any] | None = None,
) -> Card:
    """Runs every check on a Hugging Face folder.

    Args:
      source: the folder.
      reference: .npz of `input_ids` [B, T] and `logits` [B, T, V] (and, where there are,
        `router_idx_<layer>` [T, A]), each with any prefix, as in `a_input_ids`; several prefixes
        are several cases.
      routing: "free", or "pinned" to the reference's experts.
      tolerance: largest error of a logit, relative to the largest logit of the case.
      mesh: devices; None puts all of them along `fsdp`.
      skip: names of checks to leave out.
      folder: where the copies are made; a temporary folder, removed at the end, by default.
      on_check: called with each check as it ends.
    Raises:
      ConfigError: an unknown check, or a reference that cannot be read.
    """
    unknown = [name for name in skip if name not in STEPS]
    if unknown:
        raise ConfigError(f"no check is called {unknown[0]!r}; there are {', '.join(STEPS)}.")
    if routing not in ("free", "pinned"):
        raise ConfigError(f"--routing={routing}: it is free or pinned.")
    cases = checks.read_reference(pathlib.Path(reference)) if reference else {}
    place = pathlib.Path(tempfile.mkdtemp(prefix="moejax-verify-", dir=folder))
    setting = Setting(pathlib.Path(source), place, cases, routing, tolerance, mesh or MeshConfig())
    card = Card(str(source), [])
    try:
        for name, run in STEPS.items():
            if name in skip:
                check = Check(name, "skipped", 0.0, "left out on request", {})
            else:
                check = _run(name, run, setting)
            card.checks.append(check)
            if on_check:
                on_check(check)
            if name == "load" and check.outcome == "failed":
                break
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return card


def _run(name: str, run: Callable[[Setting], Any], setting: Setting) -> Check:
    began = time.perf_counter()
    try:
        ok, line, facts = run(setting)
    except Skipped as reason:
        return Check(name, "skipped", time.perf_counter() - began, str(reason), {})
    except (ConfigError, OSError) as error:
        line = " ".join(str(error).split())
        return Check(name, "failed", time.perf_counter() - began, line, {})
    return Check(name, "ok" if ok else "failed", time.perf_counter() - began, line, facts)
