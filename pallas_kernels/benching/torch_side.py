"""What torch's libraries need for the same work, timed by triton's own clock.

    python -m pallas_kernels.benching.torch_side fla '{"B": 1, "T": 8192, "N": 96, "H": 128}'

A process of its own, because torch and JAX would share a device's memory otherwise. A JSON line for
each direction: {"impl": "fla", "what": "forward", "ms": 1.0}, or a reason instead of the time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

Both = tuple[Callable[[], Any], Callable[[], Any] | None]


def fla(dims: dict[str, Any]) -> Both:
    """KDA of flash-linear-attention from raw gates, in bfloat16."""
    import torch
    from fla.ops.kda import chunk_kda

    B, T, N, H = (int(dims[name]) for name in "BTNH")
    bound = dims.get("lower_bound")
    q, k, v, gate = (_normal(B, T, N, H) for _ in range(4))
    beta = _normal(B, T, N)
    a_log, dt_bias = (_normal(size, dtype=torch.float32) for size in (N, N * H))
    leaves = [q, k, v, gate, beta, a_log, dt_bias]

    def forward() -> Any:
        out, _ = chunk_kda(
            q, k, v, gate, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, safe_gate=bound is not None, lower_bound=bound,
            A_log=a_log, dt_bias=dt_bias,
        )  # fmt: skip
        return out

    return forward, _with_gradients(forward, leaves)


def grouped_mm(dims: dict[str, Any]) -> Both:
    """torch._grouped_mm of rows sorted by expert."""
    import torch

    E, M, K, F = (int(dims[name]) for name in "EMKF")
    rows, weights = _normal(M, K), _normal(E, K, F)
    ends = (torch.arange(1, E + 1, device="cuda") * M // E).to(torch.int32)

    def forward() -> Any:
        return torch._grouped_mm(rows, weights, offs=ends)

    return forward, _with_gradients(forward, [rows, weights])


def liger(dims: dict[str, Any]) -> Both:
    """Fused linear cross-entropy of Liger; its forward forms the gradients."""
    import torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    T, D, V = (int(dims[name]) for name in "TDV")
    x, weight = _normal(T, D), _normal(V, D)
    labels, loss = torch.randint(0, V, (T,), device="cuda"), LigerFusedLinearCrossEntropyLoss()

    def forward() -> Any:
        return loss(weight, x, labels)

    return forward, _with_gradients(forward, [x, weight])


KNOWN: dict[str, Callable[[dict[str, Any]], Both]] = {
    "fla": fla, "torch._grouped_mm": grouped_mm, "liger": liger,
}  # fmt: skip


def _normal(*shape: int, dtype: Any = None) -> Any:
    import torch

    x = torch.randn(shape, device="cuda", dtype=dtype or torch.bfloat16)
    return x.requires_grad_()


def _with_gradients(forward: Callable[[], Any], leaves: list[Any]) -> Callable[[], Any]:
    import torch

    cotangent = torch.randn_like(forward())

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, cotangent)

    return both


def measure(name: str, dims: dict[str, Any]) -> None:
    """Prints the lines of one library."""
    try:
        from triton.testing import do_bench

        forward, both = KNOWN[name](dims)
        for what, fn in (("forward", forward), ("forward + backward", both)):
            if fn is not None:
                ms = do_bench(fn, return_mode="median")
                print(json.dumps({"impl": name, "what": what, "ms": ms}), flush=True)
    except Exception as error:  # whatever a library has against it is told, not raised
        status = "absent" if isinstance(error, ImportError) else "failed"
        reason = " ".join(str(error).split())[:300]
        print(json.dumps({"impl": name, "status": status, "reason": reason}), flush=True)


def main(argv: list[str]) -> None:
    names, dims = argv
    for name in names.split(","):
        measure(name, json.loads(dims))


if __name__ == "__main__":
    main(sys.argv[1:])
