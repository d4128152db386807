"""The environment of processes that tests start."""

import os
import re


def clean_environment() -> dict[str, str]:
    """As a user's shell has it: devices and platform are the command's to choose.

    Flags that make compiling short stay.
    """
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    env["XLA_FLAGS"] = re.sub(
        r"--xla_force_host_platform_device_count=\S*", "", env.get("XLA_FLAGS", "")
    ).strip()
    return env
