"""What each level of the exchange sends, counted on simulated devices and beside theory.

    python -m moejax.partitioning.expert_exchange.traffic

runs the ragged exchange of every level on 64 simulated devices and prints the rows and bytes that
it counted itself, per token, with what arithmetic says for the same routing.
"""

from __future__ import annotations

import argparse
import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.partitioning.expert_exchange.api import exchange_experts
from moejax.partitioning.expert_exchange.levels import LEVELS
from moejax.partitioning.expert_exchange.local import ExchangeStats

# Axes that `exchange_experts` looks for.
_AXES = ("data", "fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Experts on hosts x devices, and a token's width in bfloat16; the defaults are Kimi K3's."""

    hosts: int = 8
    near: int = 8
    num_experts: int = 896
    top_k: int = 16
    width: int = 3584

    @property
    def devices(self) -> int:
        return self.hosts * self.near


def choices(layout: Layout, tokens: int, zipf: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Experts of random tokens, distinct in each.

    Args:
      tokens: of a device.
      zipf: expert of popularity rank r is chosen in proportion to r^-zipf; which expert has which
        rank is random. 0: all alike.
    Returns:
      int32 [devices, tokens, A]; share of every expert in one draw [E].
    """
    rng = np.random.default_rng(seed)
    share_E = rng.permutation(np.arange(1.0, layout.num_experts + 1) ** -zipf)
    share_E /= share_E.sum()
    # The k largest of log share + Gumbel noise are k draws without replacement.
    noise = rng.gumbel(size=(layout.devices, tokens, layout.num_experts))
    ids = np.argpartition(-(np.log(share_E) + noise), layout.top_k, axis=-1)[..., : layout.top_k]
    return ids.astype(np.int32), share_E


def count(layout: Layout, ids_BTA: np.ndarray, level: str) -> ExchangeStats:
    """Runs one exchange and returns what it counted: per device, the mean over devices.

    Only the counts are asked for, so the compiler drops the wide rows and keeps the bookkeeping.
    """
    grid = np.asarray(jax.devices()[: layout.devices]).reshape(1, 1, layout.devices)
    mesh = Mesh(grid, _AXES, axis_types=(AxisType.Auto,) * len(_AXES))
    weights_BTA = np.full(ids_BTA.shape, 1 / layout.top_k, np.float32)

    def run(ids_BTA, weights_BTA):
        x_BTL = jnp.zeros((*ids_BTA.shape[:2], layout.width), jnp.bfloat16)
        experts = jnp.zeros((layout.num_experts, 0))
        return exchange_experts(
            x_BTL, ids_BTA, weights_BTA, experts, lambda _, rows_RL, __: rows_RL,
            num_experts=layout.num_experts, exchange="ragged", level=level, hosts=layout.hosts,
        )[1]  # fmt: skip

    with jax.set_mesh(mesh):
        stats = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(
            ids_BTA, weights_BTA
        )
    return jax.tree.map(float, stats)


def theory(layout: Layout, share_E: np.ndarray, level: str) -> tuple[float, float]:
    """Rows a token sends off its device, and off its host, on average."""
    elsewhere, far = 1 - 1 / layout.devices, 1 - 1 / layout.hosts
    if level == "expert":
        return layout.top_k * elsewhere, layout.top_k * far
    per_device = groups_hit(share_E, layout.devices, layout.top_k)
    if level == "device":
        return per_device * elsewhere, per_device * far
    across = groups_hit(share_E, layout.hosts, layout.top_k) * far
    return across + per_device * (1 - 1 / layout.near), across


def groups_hit(share_E: np.ndarray, groups: int, top_k: int) -> float:
    """Groups that hold at least one of `top_k` experts drawn without replacement.

    Draws are a race: expert e rings at an exponential time of rate share_e, the first A are drawn.
    A group is missed if it is still silent when the A-th of the others rings:
        miss_g = ∫ exp(-share_g t) dP(at least A of the others have rung by t)
    For equal shares that is the hypergeometric law.

    Args:
      share_E: the shares [E]; experts are numbered group by group.
    """
    size = share_E.size // groups
    # From when next to nothing has rung to when the A-th surely has.
    begin = _when(share_E, top_k / 200)
    end = _when(share_E, min(6 * top_k + 20, 0.9999 * share_E.size))
    time_N = np.concatenate([[0.0], np.geomspace(begin, end, 400)])
    rung_NGA = np.zeros((time_N.size, groups, top_k))  # P(n of the others have rung), n < A
    rung_NGA[..., 0] = 1
    for expert, share in enumerate(share_E):
        chance_NG1 = np.repeat(-np.expm1(-share * time_N)[:, None], groups, 1)[..., None]
        chance_NG1[:, expert // size] = 0
        before = np.pad(rung_NGA, ((0, 0), (0, 0), (1, 0)))[..., :-1]
        rung_NGA += chance_NG1 * (before - rung_NGA)
    done_NG = 1 - rung_NGA.sum(-1)
    silent_NG = np.exp(-time_N[:, None] * share_E.reshape(groups, size).sum(1))
    miss_G = np.sum(np.diff(done_NG, axis=0) * (silent_NG[1:] + silent_NG[:-1]) / 2, axis=0)
    return float(np.sum(1 - miss_G))


def _when(share_E: np.ndarray, mean: float) -> float:
    """The time at which so many experts have rung on average."""
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        early = np.sum(-np.expm1(-share_E * middle)) < mean
        low, high = (middle, high) if early else (low, middle)
    return high


def table(layout: Layout, tokens: int, zipfs: tuple[float, ...]) -> str:
    """The Markdown table of all levels and routings."""
    lines = [
        "| routing | level | rows off the device | theory | rows off the host | theory "
        "| KiB off the device | KiB off the host | network, of `expert` | rounds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for zipf in zipfs:
        ids, share_E = choices(layout, tokens, zipf)
        name, first = f"Zipf {zipf:g}" if zipf else "uniform", 0.0
        for level in LEVELS:
            stats = count(layout, ids, level)
            off, far = theory(layout, share_E, level)
            first = first or float(stats.network_bytes)
            lines.append(
                f"| {name} | `{level}` | {stats.sent_rows / tokens:.2f} | {off:.2f} "
                f"| {stats.network_rows / tokens:.2f} | {far:.2f} "
                f"| {stats.sent_bytes / tokens / 1024:.1f} "
                f"| {stats.network_bytes / tokens / 1024:.1f} "
                f"| 1 / {first / stats.network_bytes:.2f} | {stats.rounds:.0f} |"
            )
    return "\n".join(lines)


def _parser(layout: Layout) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.partitioning.expert_exchange.traffic",
        description=textwrap.fill(
            "Runs the ragged exchange of every level (expert, device, host) on simulated CPU "
            "devices, with experts chosen evenly and by Zipf's law, and prints a Markdown table: "
            "rows and bytes that a token sends off its device and off its host, beside what "
            "arithmetic says for the same routing. Nothing is timed. Takes about a minute.",
            79,
        ),
        epilog="example, DeepSeek-V3's experts on 4 hosts of 8:\n"
        "  python -m moejax.partitioning.expert_exchange.traffic --hosts=4 --experts=256 \\\n"
        "      --top-k=8 --width=7168",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, value, what in (
        ("hosts", layout.hosts, "hosts that the experts lie on"),
        ("devices-per-host", layout.near, "devices of a host"),
        ("experts", layout.num_experts, "routed experts, over all devices; a multiple of these"),
        ("top-k", layout.top_k, "experts that a token is sent to"),
        ("width", layout.width, "values of a row that is sent, in bfloat16: 2 bytes each"),
        ("tokens", 256, "tokens on a device; more of them come closer to the theory"),
    ):
        help = f"{what} (default: {value})"
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=help)
    return parser


def main() -> None:
    """Prints the table."""
    args = _parser(Layout()).parse_args()
    layout = Layout(args.hosts, args.devices_per_host, args.experts, args.top_k, args.width)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", layout.devices)
    print(table(layout, args.tokens, (0.0, 0.5, 1.0)))


if __name__ == "__main__":
    main()
