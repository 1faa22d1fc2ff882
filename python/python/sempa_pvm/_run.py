"""Helpers for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from ._native import Vm
from .errors import PvmError


def run(main: Callable[[Vm], int | None]) -> NoReturn:
    """Enrolls this process, calls ``main``, and exits with the status that ``main`` returns.

    If the process cannot enroll, or ``main`` does not handle a :class:`PvmError`, the program
    prints one sentence, as programs in C do, and exits with status 1.
    """
    try:
        with Vm.enroll() as vm:
            status = main(vm)
    except PvmError as error:
        program = os.path.basename(sys.argv[0]) or "python"
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(status or 0)


def python(script: str | os.PathLike[str], *args: str) -> tuple[str, list[str]]:
    """Returns program and arguments that run a Python script with this interpreter.

    The host on which the task starts must have interpreter and script under the same paths::

        workers = vm.spawn(*python("worker.py", "--fast"), count=4)
    """
    return sys.executable, [os.path.abspath(script), *args]
