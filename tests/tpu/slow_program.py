"""Compiles one program in a process of its own, and says what that took: for `slow`. In jax's environment.

python -m tests.tpu.slow_program PROGRAM.mlir TOPOLOGY FACTS.json
"""

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tests.tpu.compiling import build


def main(program: Path, topology: str, facts: Path) -> None:
    """Write what libtpu says of a program for one replica, with the compiler's processor time and peak memory."""
    began = time.perf_counter()
    found = _outcome(program.read_text(), topology)
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {
        "wall_seconds": round(time.perf_counter() - began),
        "cpu_seconds": round(used.ru_utime + used.ru_stime),
        "compiler_bytes": used.ru_maxrss * 1024,
    }
    facts.write_text(json.dumps(found))


def _outcome(text: str, topology: str) -> dict[str, Any]:
    try:
        return build(text, topology, 1)
    except Exception as error:
        return {"refusal": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
