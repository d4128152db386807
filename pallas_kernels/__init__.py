"""Operators of the Kimi-K3 family on JAX: a package each, one public function, several bodies.

Import the operator's package, for example `from pallas_kernels.kda import kda`.
"""
