"""The same run on fewer or more devices: microbatches for its batch, counts that fit."""

from __future__ import annotations

from collections.abc import Callable

from moejax.config.fields import ConfigError

_FAR = 4096  # hosts more or fewer than that are no help


def microbatches(batch_rows: int, shards: int, rows_per_device: int) -> int:
    """The fewest equal microbatches of a batch in which no device has too many rows at once.

    Args:
      batch_rows: rows of the global batch, a multiple of `shards`.
      shards: devices that the rows are divided over.
      rows_per_device: rows that a device may have at once.
    """
    rows = batch_rows // shards
    return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= rows_per_device)


def with_nearest(
    error: ConfigError, check: Callable[[int], object], num_devices: int, per_host: int = 1
) -> ConfigError:
    """The error of a number of devices, with the numbers next to it that have none.

    Args:
      error: of `num_devices`.
      check: raises ConfigError for a number of devices that does not fit.
      num_devices: that was asked for.
      per_host: devices that come and go together.
    """

    def fits(count: int) -> bool:
        try:
            check(count)
        except ConfigError:
            return False
        return True

    def first(counts: range) -> list[int]:
        return next(([count] for count in counts if fits(count)), [])

    reach, whole = _FAR * per_host, num_devices - num_devices % per_host
    below = first(range(whole - per_host * (whole == num_devices), 0, -per_host)[:_FAR])
    above = first(range(whole + per_host, whole + reach, per_host))
    if not below + above:
        return error
    names = " or ".join(
        f"{count} ({count // per_host} hosts)" if per_host > 1 else str(count)
        for count in below + above
    )
    return ConfigError(f"{error} The nearest numbers of devices that fit this run: {names}.")
