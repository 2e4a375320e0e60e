"""Compile lookup.c and search.c into the package, with any C compiler: python tpuembed/native/src/build.py

`hatch_build.py` does the same when the package is installed or built.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = [FOLDER / "lookup.c", FOLDER / "search.c"]
LIBRARY = FOLDER.with_name("_lookup.so")
# Values must be those of TensorFlow, which rounds each product: no contraction to fused operations.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]


def compile_library(target: Path = LIBRARY, extra: Sequence[str] = ()) -> str:
    """Compile the library, and replace `target` by it. Return "", or the reason why it could not be made.

    The compiler is $CC, else the first of cc, gcc and clang that is installed.
    """
    given = shlex.split(os.environ.get("CC", ""))
    compilers = [given] if given else [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if not compilers:
        return "no C compiler was found: install gcc or clang, or set CC"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        command = [*compilers[0], *FLAGS, *extra, "-fPIC", "-shared", "-o", str(made), *map(str, SOURCES), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{shlex.join(compilers[0])} could not run: {error}"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return f"{shlex.join(compilers[0])} failed: " + next((line for line in lines if "error" in line), lines[0])
        made.replace(target)
    return ""


if __name__ == "__main__":
    sys.exit(compile_library() or None)
