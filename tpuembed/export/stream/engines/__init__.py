"""Engines run the shards of a plan: on this machine, or on a cluster."""

import os

from tpuembed.config.checks import check_choice, check_count
from tpuembed.errors import ConfigError
from tpuembed.export.stream.engines.local import LocalEngine
from tpuembed.export.stream.engines.protocol import Engine, Job

__all__ = ["ENGINES", "Engine", "Job", "check_engine", "choose_engine", "default_workers"]

ENGINES = ("local", "ray")

_AT_ONCE_ON_A_CLUSTER = 64


def choose_engine(name: str, workers: int, ray_address: str | None = None) -> Engine:
    """The engine called `name`, running at most `workers` tasks at once.

    Raises:
        ConfigError: no such engine, fewer than one worker, or an address for an engine that has none.
    """
    check_engine(name, ray_address)
    check_count("workers", workers)
    if name == "local":
        return LocalEngine(workers)
    from tpuembed.export.stream.engines.ray import RayEngine

    return RayEngine(workers, ray_address)


def check_engine(name: str, ray_address: str | None) -> None:
    """Raise ConfigError for an engine that there is not, or an address that it has no use for."""
    check_choice("engine", name, ENGINES)
    if ray_address is not None and name != "ray":
        raise ConfigError(f"ray_address {ray_address!r}: the engine is {name!r}; choose engine='ray', or leave it out")


def default_workers(engine: str = "local") -> int:
    """The processors that this process may use; on a cluster, which may have more or fewer CPUs, 64 tasks at once."""
    if engine == "ray":
        return _AT_ONCE_ON_A_CLUSTER
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
