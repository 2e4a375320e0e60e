"""The engines, which run the shards of a plan on this machine or on a cluster."""

from tpuembed.config.checks import check_choice
from tpuembed.export.stream.engines.local import LocalEngine
from tpuembed.export.stream.engines.protocol import Engine
from tpuembed.runtime.cpus import available_cpus

__all__ = ["ENGINES", "Engine", "check_engine", "choose_engine", "default_workers"]

ENGINES = ("local", "ray")

_AT_ONCE_ON_A_CLUSTER = 64


def choose_engine(name: str, workers: int) -> Engine:
    """Return the engine `name`, which runs at most `workers` tasks at once. The plan has checked both."""
    if name == "local":
        return LocalEngine(workers)
    from tpuembed.export.stream.engines.ray import RayEngine

    return RayEngine(workers)


def check_engine(name: str) -> None:
    """Raise ConfigError if the engine is unknown."""
    check_choice("engine", name, ENGINES)


def default_workers(engine: str = "local") -> int:
    """Return the number of processors that this process may use; 64 for a cluster, whose CPUs are not known."""
    return _AT_ONCE_ON_A_CLUSTER if engine == "ray" else available_cpus()
