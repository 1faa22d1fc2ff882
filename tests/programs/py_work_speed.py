"""Prints how many tasks without work a run finishes in a second: py_work_speed.py [TASKS]"""

import sys
import time

from sempa_pvm import work


def same(number):
    return number


def main():
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    results = work.map(same, range(tasks), workers=2, name="speed")
    next(results)
    begin = time.perf_counter()
    count = sum(1 for _ in results)
    duration = time.perf_counter() - begin
    assert count == tasks - 1, count
    print(f"{count / duration:.0f} tasks/s, {duration / count * 1e6:.1f} µs per task")
    print(results.outcome.text)


if __name__ == "__main__":
    main()
