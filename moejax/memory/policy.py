"""What the backward pass finds kept, what it fetches from the host, and what it computes again."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from moejax.config import ConfigError, RunConfig
from moejax.memory.names import KNOWN, RESULTS, check_names

# Presets by name; "auto" is made one of them, with names, before a step is built.
POLICIES = ("none", "full", "dots", "exchange")
_MATMULS = ("matmul", "grouped")
_seen: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("seen", default=None)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What becomes of a layer's results until its backward pass.

    Attributes:
      everything: all are kept, tagged or not, and nothing is computed again.
      keep: names of those that stay in the device's memory.
      offload: names of those that go to the host's memory and come back. On a CPU, which has one
        memory, they stay where they are.
    """

    everything: bool = False
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def of(self, name: str) -> str:
        """keep, offload or recompute."""
        if self.everything or name in self.keep:
            return "keep"
        return "offload" if name in self.offload else "recompute"


def policy_for(preset: str, keep: Sequence[str] = (), offload: Sequence[str] = ()) -> Policy:
    """A preset, with names beside.

    Args:
      preset: "none" keeps every intermediate; "full" only the layer's inputs, and runs it again;
        "dots" also the results of matrix products; "exchange" what came over the wire, so that
        nothing is sent twice.
      keep: names that are kept as well.
      offload: names that go to the host, whatever the preset says of them.
    Raises:
      ConfigError: a name that there is not, one that is both kept and offloaded, or names beside
        "none", which keeps all.
      ValueError: no such preset.
    """
    check_names("swap.keep", keep, KNOWN, "moejax")
    check_names("swap.offload", offload, KNOWN, "moejax")
    both = [name for name in keep if name in offload]
    if both:
        raise ConfigError(
            f"swap.keep and swap.offload both have {both[0]!r}: leave it in one of them."
        )
    if preset == "none":
        if keep or offload:
            field = "keep" if keep else "offload"
            raise ConfigError(
                f"swap.{field}={tuple(keep or offload)!r} has no effect with train.remat=none, "
                "which keeps everything on the device. Use train.remat=full with it."
            )
        return Policy(everything=True)
    kinds = {"full": (), "dots": _MATMULS, "exchange": ("exchange",)}
    if preset not in kinds:
        raise ValueError(f"policy {preset!r} is unknown. Use one of {', '.join(POLICIES)}.")
    usual = [one.name for one in RESULTS if one.kind in kinds[preset]]
    kept = [n for n in dict.fromkeys([*usual, *keep]) if n not in offload]
    return Policy(keep=tuple(kept), offload=tuple(offload))


def policy_of(cfg: RunConfig) -> Policy:
    """The policy that a run's config names.

    Raises:
      ValueError: it is "auto", which has to be made names first (`moejax.train.memory_plan`).
    """
    return policy_for(cfg.train.remat, cfg.swap.keep, cfg.swap.offload)


@contextlib.contextmanager
def names_checked(cfg: RunConfig) -> Iterator[None]:
    """Around the tracing of a gradient: what `swap` names must be results of the model.

    Raises:
      ConfigError: at the end, where a name was never met.
    """
    seen: set[str] = set()
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)
    known = [one.name for one in RESULTS if one.name in seen]
    check_names("swap.keep", cfg.swap.keep, known, "this model")
    check_names("swap.offload", cfg.swap.offload, known, "this model")


def _noting(rule: Callable) -> Callable:
    """A policy of `jax.checkpoint` that tells `names_checked` which names it is asked about."""

    def policy(primitive, *avals, **params):
        seen = _seen.get()
        if seen is not None and primitive.name == "name":
            seen.add(params["name"])
        return rule(primitive, *avals, **params)

    return policy


def remat(fn: Callable, policy: Policy | str, *, apart: bool = False) -> Callable:
    """`fn` under a rematerialisation policy.

    Args:
      policy: one, or the name of a preset.
      apart: the compiler must not take what both passes compute, gathered weights for one, for the
        same. Two loops are apart already, and there it would only cost.
    """
    if isinstance(policy, str):
        policy = policy_for(policy)
    if policy.everything:
        return fn
    rule = None
    if policy.offload:
        rule = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.keep),
            names_which_can_be_offloaded=list(policy.offload),
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    elif policy.keep:
        rule = jax.checkpoint_policies.save_only_these_names(*policy.keep)
    return jax.checkpoint(fn, prevent_cse=apart, policy=rule and _noting(rule))
