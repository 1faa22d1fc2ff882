"""How a script starts its workers: as further processes of the same script."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ._work_types import Retry
from .errors import WorkError

IN_PROCESS_VARIABLE = "SEMPA_WORK_IN_PROCESS"
_run_count = 0


def _main_module() -> str | None:
    """Returns the name after ``python -m``; None for a script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return None if spec is None else str(spec.name).removesuffix(".__main__")


def default_name() -> str:
    """Returns the name of a run without a name: that of the script, with a number from 2 on."""
    global _run_count
    _run_count += 1
    script = _main_module() or os.path.basename(sys.argv[0]).removesuffix(".py") or "python"
    return script if _run_count == 1 else f"{script}-{_run_count}"


def worker_command() -> tuple[str, list[str]]:
    """Returns program and arguments that run this script again."""
    module = _main_module()
    if module is not None:
        return sys.executable, ["-m", module, *sys.argv[1:]]
    script = sys.argv[0]
    if not os.path.exists(script):
        raise WorkError(
            "the run was not begun: workers execute the script of this process, and this process "
            "has none; save the program as a file, or use in_process=True",
            "start",
        )
    return sys.executable, [os.path.abspath(script), *sys.argv[1:]]


def export_environment() -> None:
    """Lets workers inherit the variables of the interpreter, such as PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    if path:
        # Workers have another working directory.
        entries = [os.path.abspath(entry) if entry else "" for entry in path.split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    exported = [name for name in os.environ.get("PVM_EXPORT", "").split(":") if name]
    exported += [name for name in os.environ if name.startswith("PYTHON") and name not in exported]
    if exported:
        os.environ["PVM_EXPORT"] = ":".join(exported)


def is_in_process(in_process: bool | None) -> bool:
    """Returns whether a run is without a virtual machine. None: as the environment says."""
    if in_process is not None:
        return in_process
    return os.environ.get(IN_PROCESS_VARIABLE, "") not in ("", "0")


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def options_json(
    *,
    name: str,
    workers: int,
    journal: str | os.PathLike[str] | None,
    look_ahead: float | None,
    retry: Retry | None,
    attempt_timeout: float | None,
    progress: float | None,
    master_wait: float,
    host: str | None,
    arch: str | None,
    settings: dict[str, Any] | None,
    in_process: bool,
) -> str:
    """Returns the options of a run for the native part."""
    changes: dict[str, Any] = dict(settings or {})
    if look_ahead is not None:
        changes["look_ahead"] = _micros(look_ahead)
    if attempt_timeout is not None:
        changes["attempt_timeout"] = _micros(attempt_timeout)
    if retry is None and in_process:
        retry = Retry(delay=0, delay_max=0)
    if retry is not None:
        changes["retry"] = {
            "attempts_max": retry.attempts,
            "delay": _micros(retry.delay),
            "delay_max": _micros(retry.delay_max),
            "host_exclusion": _micros(retry.host_exclusion),
        }
    program, arguments = ("", []) if in_process else worker_command()
    return json.dumps(
        {
            "run_name": name,
            "journal": None if journal is None else os.fspath(journal),
            "program": program,
            "arguments": arguments,
            "workers": workers,
            "host": host,
            "arch": arch,
            "settings": changes,
            "master_wait_s": master_wait,
            "progress_interval_s": progress,
        }
    )
