"""What the benchmarks of all operators share: timing, memory, devices, tables."""
