"""Sums squares with a journal: py_work_journal.py CLASS|FUNCTION JOURNAL

The program may be killed and started again.
"""

import sys
import time

from sempa_pvm import work

TASKS = 300


def square(number):
    time.sleep(0.02)
    return number * number


class Sum(work.Driver):
    def __init__(self):
        self.sum = 0
        self.count = 0

    def initial_tasks(self, run):
        return (work.Task(number, key=number) for number in range(TASKS))

    def on_result(self, run, task, result):
        self.sum += result
        self.count += 1
        print(self.count, flush=True)


def main(way, journal):
    options = work.Options(workers=2, journal=journal, name=f"journal-{way}", look_ahead=0)
    if way == "class":
        driver = Sum()
        outcome = work.run(driver, square, **options)
        total, count = driver.sum, driver.count
    else:
        results = work.map(square, range(TASKS), **options)
        total = count = 0
        for _, result in results:
            total += result
            count += 1
            print(count, flush=True)
        outcome = results.outcome
    assert count == outcome.statistics["counts"]["results_accepted"] == TASKS, (count, outcome)
    print(f"sum {total} masters {outcome.generation} workers {outcome.statistics['A'] > 0}")


if __name__ == "__main__":
    main(*sys.argv[1:])
