"""Estimates pi with a master-worker run: monte_carlo.py [TASKS] [JOURNAL]

With SEMPA_WORK_IN_PROCESS=1 the program needs no virtual machine.
"""

import random
import sys

from sempa_pvm import work

POINTS_PER_TASK = 100_000


def count_hits(seed):
    """Counts the random points within the circle."""
    number = random.Random(seed).random
    return sum(number() ** 2 + number() ** 2 < 1 for _ in range(POINTS_PER_TASK))


def main():
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    journal = sys.argv[2] if len(sys.argv) > 2 else None
    results = work.map(count_hits, range(tasks), name="monte-carlo", journal=journal)
    hits = sum(count for _, count in results)
    print(f"pi is about {4 * hits / tasks / POINTS_PER_TASK:.5f}")
    print(results.outcome.text)


if __name__ == "__main__":
    main()
