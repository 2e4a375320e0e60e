"""Run tests with another Python: `newest_python.py VERSION EXTRAS PYTEST_ARGUMENT...`, in an environment of its own.

The interpreter is looked for on PATH and among those of pyenv. Where there is none, a line says so, and that is no failure: no
package index offers interpreters.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = Path(".venv-newest")


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of `version`, such as 3.13, that starts; None where there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, root.glob(f"versions/{version}*/bin/python{version}"))),
    ]
    for candidate in filter(None, candidates):
        # A shim of pyenv is there for versions that are installed and not chosen, and fails.
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None


def main() -> int:
    """Make the environment if pyproject.toml is newer, and run pytest in it."""
    version, extras, *arguments = sys.argv[1:]
    stamp = ENVIRONMENT / ".installed"
    python = ENVIRONMENT / "bin" / "python"
    if not stamp.exists() or stamp.stat().st_mtime < Path("pyproject.toml").stat().st_mtime:
        found = find_python(version)
        if found is None:
            print(f"not run: this machine has no Python {version}")
            return 0
        subprocess.run([found, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", extras]
        subprocess.run([python, *install], check=True)
        stamp.touch()
    return subprocess.run([python, "-m", "pytest", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
