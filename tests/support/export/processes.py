"""Processes of this machine, as /proc lists them."""

import time
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, dead ones that nobody waited for included."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(entry.name))
    return found


def session_members(session: int) -> list[int]:
    """Living processes of a session; zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if stat:
            state, _, _, its_session = stat.rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


def wait_for_end(session: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while members := session_members(session):
        assert time.monotonic() < deadline, f"processes {members} outlive their exporter"
        time.sleep(0.02)
