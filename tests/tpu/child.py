"""Runs a module as the main one, in a process that ends with the one that started it, however that one ends.

python -m tests.tpu.child MODULE [ARGUMENT]...

Standard library alone: every environment runs it, and pip with it.
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["PARENT", "command", "variables"]

PARENT: Final = "TPUEMBED_PROOF_PARENT"
"""The environment variable with the process that starts a child."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def command(python: Path | str, module: str, *arguments: str) -> list[str]:
    """What to run; the thread that starts it must outlive it, for Linux counts the end of the thread."""
    return [str(python), "-m", "tests.tpu.child", module, *arguments]


def variables(*more: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: this process', `more`, and this process' id."""
    merged = {name: value for of in more for name, value in of.items()}
    return {**os.environ, **merged, PARENT: str(os.getpid())}


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; at once where it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(f"the process {parent} that started this one has ended")


def _main(arguments: Sequence[str]) -> None:
    _end_with(int(os.environ[PARENT]))
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
