"""The two environments of the proof, apart from the main one: made once under `.tpu-proof/`, pinned, and checked.

python -m tests.tpu.environments        # makes what is missing
"""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from tests.tpu import child
from tests.tpu.integrity import problems

__all__ = [
    "ENVIRONMENTS",
    "JAX",
    "ROOT",
    "TENSORFLOW_TPU",
    "DamagedEnvironmentError",
    "Environment",
    "EnvironmentUnavailableError",
    "ensure",
]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
ROOT: Final = REPOSITORY / ".tpu-proof"
"""Where environments and results lie; git ignores it."""
_INSTALL_SECONDS = 1800


class EnvironmentUnavailableError(Exception):
    """An environment cannot be made here: a wheel is missing, or cannot be fetched."""


class DamagedEnvironmentError(Exception):
    """An environment's files are not those of its wheels: nothing that it says counts."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment with pinned wheels.

    Attributes:
        name: of its folder and of its requirements file.
    """

    name: str

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        return ROOT / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def requirements(self) -> Path:
        """Every wheel, with its version."""
        return Path(__file__).with_name("requirements") / f"{self.name}.txt"

    @property
    def site_packages(self) -> Path:
        """Where its wheels are unpacked."""
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def pins(self) -> dict[str, str]:
        """Distribution -> version."""
        lines = [line.strip() for line in self.requirements.read_text().splitlines()]
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    def is_complete(self) -> bool:
        """Whether it was made of the requirements as they are now."""
        return self._stamp.is_file() and self._stamp.read_text() == self._fingerprint()

    def problems(self) -> list[str]:
        """What is wrong with its files, a sentence each."""
        return problems(self.site_packages, self.pins())

    @property
    def _stamp(self) -> Path:
        return self.folder / "complete"

    def _fingerprint(self) -> str:
        return f"{sys.version}\n{hashlib.sha256(self.requirements.read_bytes()).hexdigest()}\n"

    def make(self) -> None:
        """Make it anew; an interrupted one is not taken for complete.

        Raises:
            EnvironmentUnavailableError: pip could not install the wheels.
        """
        if self.folder.exists():
            shutil.rmtree(self.folder)
        venv.create(self.folder, with_pip=True, symlinks=True)
        if error := _pip(self.python, self.requirements):
            raise EnvironmentUnavailableError(f"{self.name}: {error}")
        self._stamp.write_text(self._fingerprint())


def _pip(python: Path, requirements: Path) -> str:
    """Install `requirements`, wheels alone; what went wrong, "" where nothing did."""
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--only-binary", ":all:")
    try:
        done = subprocess.run(
            child.command(python, "pip", "install", *options, "-r", str(requirements)),
            cwd=REPOSITORY,
            env=child.variables(),
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip had not ended after {_INSTALL_SECONDS} seconds"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or [f"pip: {done.stderr[-500:]}"])[-1] if done.returncode else ""


TENSORFLOW_TPU: Final = Environment("tensorflow-tpu")
"""Traces and lowers. Trace with TPU_LIBRARY_PATH=/nonexistent.so: it waits for minutes for a TPU otherwise."""
JAX: Final = Environment("jax")
"""Compiles."""
ENVIRONMENTS: Final = (TENSORFLOW_TPU, JAX)


def ensure(environment: Environment) -> bool:
    """Make `environment` unless it is there; whether it was made now.

    Raises:
        EnvironmentUnavailableError: it cannot be made.
        DamagedEnvironmentError: its files are not those of its wheels.
    """
    made = not environment.is_complete()
    if made:
        environment.make()
    if found := environment.problems():
        shown = "\n  ".join(found[:5])
        raise DamagedEnvironmentError(
            f"{environment.name} is damaged, remove {environment.folder} and try again ({len(found)} problems):\n  {shown}"
        )
    return made


if __name__ == "__main__":
    for one in ENVIRONMENTS:
        print(one.name, "made" if ensure(one) else "was there", one.python)
