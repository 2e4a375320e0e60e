"""`tpuembed` in this process: for the many runs of which each would start a process of its own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from tpuembed_cli.main import cli

__all__ = ["Done", "json_of", "tpuembed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A finished run: the fields of `subprocess.CompletedProcess` that tests read."""

    returncode: int
    stdout: str
    stderr: str

    def refused(self) -> str:
        """Return the only line on stderr of a run that failed with exit code 1 and printed nothing else."""
        assert (self.returncode, self.stdout) == (1, ""), self
        (line,) = self.stderr.splitlines()
        assert line.startswith("Error: ")
        return line


def tpuembed(*arguments: str | Path) -> Done:
    """Run the command with these arguments. See `run_command` for one in a process of its own."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def json_of(*arguments: str | Path) -> Any:
    """Run the command with --json, which must succeed; return the one object that it prints."""
    done = tpuembed(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)
