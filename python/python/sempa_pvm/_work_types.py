"""What drivers and workers of master-worker programs see."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._work_payload import dump, load
from .errors import WorkError

if TYPE_CHECKING:
    from ._native import WorkContext, WorkRun

ALL_GROUPS = (1 << 64) - 1
_NAMES = {
    "W": "wall_s",
    "T": "cpu_s",
    "N": "normalized_s",
    "P": "pool_performance",
    "A": "average_workers",
    "eta": "efficiency",
    "N/W": "normalized_per_wall",
}


def group_bits(groups: Iterable[int] | None) -> int:
    """Returns a set of groups as bits. None stands for all groups."""
    if groups is None:
        return ALL_GROUPS
    bits = 0
    for group in groups:
        if not 0 <= group < 64:
            raise ValueError(f"{group} is not a group; groups are 0 to 63")
        bits |= 1 << group
    return bits


@dataclass(frozen=True, slots=True)
class Task:
    """A task with a place in the order, or for some workers only.

    Drivers may use any other object as a task, too. Workers and callbacks get ``value``.
    """

    value: Any
    key: float = 0.0
    """Tasks with lower keys are dispatched first."""
    groups: Iterable[int] | None = None
    """The task goes only to workers that share a group; None stands for all groups."""


def task_parts(task: object) -> tuple[bytes, float, int]:
    """Returns payload, key and groups of a task."""
    if isinstance(task, Task):
        return dump(task.value), task.key, group_bits(task.groups)
    return dump(task), 0.0, ALL_GROUPS


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that returned no result."""

    attempt: int
    worker: int
    host: str
    reason: str
    duration: float
    """Seconds."""
    counts: bool
    """True if the attempt counts against the task."""
    traceback: str | None
    """The text of the exception. None if there was none, or if an earlier master received it."""


class TaskFailed(WorkError):
    """A task has failed too often and is not tried again. ``str(error)`` has the traceback."""

    task: Any
    attempts: list[Attempt]

    def __init__(self, task: Any, attempts: list[Attempt]) -> None:
        last = attempts[-1] if attempts else None
        reason = last.reason if last else "no attempt is known"
        text = f"a task is not tried again after {len(attempts)} attempts: {reason}"
        if last is not None:
            text += f" on {last.host}"
        if last is not None and last.traceback:
            text += f"\n{last.traceback.rstrip()}"
        super().__init__(text, "task")
        self.task = task
        self.attempts = attempts

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.task, self.attempts)


@dataclass(frozen=True, slots=True)
class OpenTask:
    """A task that waits or is executed."""

    task_id: int
    task: Any
    key: float
    is_running: bool


@dataclass(frozen=True, slots=True)
class ResultInfo:
    """What a result cost."""

    task_id: int
    worker: int
    cpu_time: float
    """Seconds."""
    wall_time: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change of the hosts or workers of a run. The framework has already reacted."""

    kind: str
    """``HostAdded``, ``HostLost``, ``WorkerReady``, ``WorkerPaused``, ``WorkerResumed``,
    ``WorkerMigrated`` or ``WorkerLost``."""
    host: str | None
    worker: int | None
    reason: str | None
    """Why a worker was lost, or ``owner`` or ``suspended`` for a pause."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a task is tried again after an attempt that counts against the task."""

    attempts: int = 5
    """Number of counted attempts after which the task is quarantined."""
    delay: float = 1.0
    """Seconds after the first attempt; the delay doubles with each further one."""
    delay_max: float = 60.0
    host_exclusion: float = 60.0
    """Seconds for which the task does not return to the host of its last counted attempt."""


def statistics_of(report_json: str | dict[str, Any]) -> dict[str, Any]:
    """Returns the statistics with the short names of the formulas."""
    report: dict[str, Any] = json.loads(report_json) if isinstance(report_json, str) else report_json
    return {name: report[field_name] for name, field_name in _NAMES.items()} | report


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run."""

    is_finished: bool
    """False if the run was stopped: open tasks are in the journal, if there is one."""
    statistics: dict[str, Any]
    """``W``, ``T``, ``N``, ``P``, ``A``, ``eta``, ``N/W``, and the other fields of
    ``pvm --json work status``."""
    text: str
    """The statistics for a user."""
    generation: int
    """Number of masters that the run has had."""
    repeated_results: int
    """Results of earlier masters that were repeated for the driver at the start."""
    init_bytes_sent: int


def outcome_of(text: str) -> Outcome:
    """Returns the outcome in a JSON text of the native part."""
    facts = json.loads(text)
    facts["statistics"] = statistics_of(facts["statistics"])
    return Outcome(**facts)


class Run:
    """The calls of a driver about its run. Only callbacks of the driver may use them."""

    info: ResultInfo | None
    """What the result of the present :meth:`Driver.on_result` cost."""

    def __init__(self, native: WorkRun) -> None:
        self._native = native
        self.info = None

    def add(self, tasks: Iterable[Any], *, in_front: bool = False) -> list[int]:
        """Adds tasks behind or in front of those of equal key, and returns their numbers."""
        return self._native.add([task_parts(task) for task in tasks], in_front)

    def update(self, data: object, *, worker: int | None = None) -> None:
        """Sends data to one worker or all, also to running ones. A newer update replaces older."""
        self._native.send_update(dump(data), worker)

    def refresh_init_data(
        self, data: object, *, groups: Iterable[int] | None = None, only_new: bool = False
    ) -> None:
        """Replaces the init data of workers that start later, and of present ones.

        Present workers that share a group take them (:meth:`Worker.init`) before their next task;
        None stands for all groups. With ``only_new``, present workers keep theirs. After a restart,
        workers get what :meth:`Driver.init_data` returns, which must be the newest data.
        """
        self._native.refresh_init_data(dump(data), None if only_new else group_bits(groups))

    def cancel_task(self, task_id: int) -> bool:
        """Closes an open task without a result; returns False if the task is closed."""
        return self._native.cancel_task(task_id)

    def stop_work(self, worker: int) -> int | None:
        """Closes the task that a worker executes, and returns its number; None without one."""
        return self._native.stop_work(worker)

    def open_tasks(self) -> list[OpenTask]:
        """Returns the open tasks in no particular order."""
        return [
            OpenTask(task_id, load(payload), key, is_running)
            for task_id, payload, key, is_running in self._native.open_tasks()
        ]

    def prune(self, bound: float, *, with_running: bool = False) -> int:
        """Removes the waiting tasks whose keys are greater than ``bound``; returns their number."""
        return self._native.prune(bound, with_running)

    def set_key(self, task_id: int, key: float) -> bool:
        """Changes the key of an open task; returns False if the task is closed."""
        return self._native.set_key(task_id, key)

    def set_workers(self, count: int) -> None:
        """Changes the number of workers that the run should have."""
        self._native.set_workers(count)

    def set_grain(self, shortest: float | None, longest: float | None = None) -> None:
        """Sets the time limits of tasks in seconds (:meth:`Context.is_time_over`); None for none."""
        if shortest is None:
            return self._native.set_grain(None)
        longest = shortest if longest is None else longest
        self._native.set_grain((round(shortest * 1e6), round(longest * 1e6)))

    def stop(self) -> None:
        """Ends the run after the present callback. Open tasks stay in the journal."""
        self._native.stop()

    @property
    def best_waiting_key(self) -> float | None:
        return self._native.best_waiting_key

    @property
    def best_running_key(self) -> float | None:
        return self._native.best_running_key

    @property
    def wanted_tasks(self) -> int:
        """Number of tasks that should be added so that no worker becomes idle."""
        return self._native.wanted_tasks

    def progress(self) -> dict[str, Any]:
        """Returns the numbers of tasks and workers, and the estimated remaining time."""
        progress: dict[str, Any] = json.loads(self._native.progress())
        return progress

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics up to now (:attr:`Outcome.statistics`)."""
        return statistics_of(self._native.statistics()[0])


class Context:
    """What a worker can do while it executes a task."""

    init_data: Any
    """The init data of the run."""

    def __init__(self) -> None:
        self._native: WorkContext | None = None
        self.init_data = None

    def _port(self) -> WorkContext:
        if self._native is None:
            raise RuntimeError("the context can be used only while its task is executed")
        return self._native

    @property
    def task_id(self) -> int:
        """Number of the task. It is the same in each attempt."""
        return self._port().task

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return self._port().attempt

    def poll(self) -> None:
        """Looks for messages of the master. Most calls only read a clock."""
        self._port().poll()

    def update(self) -> Any:
        """Returns the newest update if this attempt has not seen it, and None otherwise."""
        data = self._port().update()
        return None if data is None else load(data)

    def is_canceled(self) -> bool:
        """True if the master needs no result of this attempt."""
        return self._port().is_canceled()

    def is_time_over(self) -> bool:
        """True if the task should return its result and its remaining work now."""
        return self._port().is_time_over()

    def return_task(self, task: object) -> None:
        """Returns work that this attempt does not do. It becomes a task if the result counts."""
        self._port().return_task(task_parts(task))

    def send_partial(self, value: object) -> None:
        """Sends part of the result to the driver at once."""
        self._port().send_partial(dump(value))


class Driver:
    """The application's part of the master.

    With a journal, the attributes of the driver are saved. A restart restores them, and repeats
    :meth:`on_result` and :meth:`on_quarantined` for what happened after the newest saved state, so
    these two must depend only on the driver and their arguments.

    In :func:`arun` the methods may be coroutines; the loop's thread calls them.
    """

    def initial_tasks(self, run: Run) -> Any:
        """Returns the first tasks. A list is added at once; an iterator is read as needed."""
        raise NotImplementedError("a driver needs the method initial_tasks")

    def on_result(self, run: Run, task: Any, result: Any) -> Any:
        """Handles the first result of a task."""
        raise NotImplementedError("a driver needs the method on_result")

    def init_data(self) -> Any:
        """Returns the data that each worker gets once before its first task."""
        return None

    def configure(self, run: Run) -> Any:
        """Sets what is not saved: targets, settings. Called after each start and restart."""

    def benchmark(self) -> Any:
        """Returns the benchmark task, whose duration is a worker's factor; None for none."""
        return None

    def on_partial(self, run: Run, task: Any, part: Any) -> Any:
        """Handles a part of the result of a running task."""

    def on_quarantined(self, run: Run, task: Any, attempts: list[Attempt]) -> Any:
        """Handles a task that is not tried again. By default, the reason is printed."""
        print(f"warning: {TaskFailed(task, attempts)}", file=sys.stderr)

    def on_pool_event(self, run: Run, event: PoolEvent) -> Any:
        """Handles a change of the hosts or workers."""

    def on_all_closed(self, run: Run) -> Any:
        """Handles the end of the last open task. The run is finished if no task is added."""

    def save(self) -> Any:
        """Returns the state for a restart: any object that pickle can copy."""
        return self.__dict__

    def restore(self, state: Any) -> Any:
        """Restores a state that :meth:`save` returned."""
        self.__dict__.update(state)


class Worker:
    """The application's part of a worker."""

    groups: Iterable[int] | None = None
    """The groups of the worker; None stands for all groups."""

    def init(self, data: Any) -> None:
        """Takes the init data. Called again for each new master with other init data."""

    def execute(self, task: Any, context: Context) -> Any:
        """Executes a task and returns its result. A generator yields partial results."""
        raise NotImplementedError("a worker needs the method execute")


@dataclass
class Interrupt:
    """An exception that ends a run in one process, such as KeyboardInterrupt in a worker."""

    exception: BaseException | None = field(default=None)
