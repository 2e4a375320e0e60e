"""The build hook: put lookup.c and search.c, compiled, into the wheel. Without a compiler the wheel is a pure one.

With TPUEMBED_NATIVE=1 in the environment, a library that cannot be compiled fails the build.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags


class CustomBuildHook(BuildHookInterface):
    """Compiles the library, into the package's folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Set the wheel's tag to the platform's if there is a library."""
        build = runpy.run_path(str(Path(self.root, "tpuembed/native/src/build.py")))
        fault = build["compile_library"]()
        if fault and os.environ.get("TPUEMBED_NATIVE") == "1":
            raise RuntimeError(f"TPUEMBED_NATIVE=1, but lookup.c was not compiled: {fault}")
        if fault:
            build["LIBRARY"].unlink(missing_ok=True)
            self.app.display_warning(f"without native lookups, TensorFlow does them: {fault}")
            return
        build_data["artifacts"].append("/tpuembed/native/_lookup.so")
        build_data["pure_python"] = False
        platforms = [tag.platform for tag in sys_tags()]
        # The library needs the C library alone. Package indexes take wheels that say of which version.
        portable = [name for name in platforms if name.startswith(("manylinux", "musllinux"))]
        build_data["tag"] = f"py3-none-{[*portable, *platforms][0]}"
