"""Python programs of the table of moves, as described in kinds.h: the name of a row, and a folder."""
import asyncio
import multiprocessing
import os
import sys
import threading
import time

place = sys.argv[2]


def say(word):
    os.write(1, word.encode() + b"\n")


def told_to_go():
    return os.path.exists(os.path.join(place, "go"))


def moved():
    say("ready")
    while not told_to_go():
        time.sleep(0.001)


def check(good, what):
    if not good:
        say("wrong: " + what)
        os._exit(1)


def threads():
    """A second thread computes, a third one waits for a queue, a generator stands in the middle."""
    import queue
    import random

    dice, sums, orders, answers = random.Random(7), [0], queue.Queue(), queue.Queue()
    numbers = (n * n for n in range(100000))

    def compute():
        while not told_to_go():
            sums[0] += 1
            check(sum(range(1000)) == 499500, "a sum")

    def serve():
        while (order := orders.get()) is not None:
            answers.put(order * 2)

    workers = [threading.Thread(target=compute), threading.Thread(target=serve)]
    for worker in workers:
        worker.start()
    words = {n: str(n) * 20 for n in range(50000)}
    for n in range(1000):
        check(next(numbers) == n * n, "the generator")
    expected = [random.Random(7).random() for _ in range(1)]
    check(dice.random() == expected[0], "the dice")
    state = dice.getstate()
    with open(os.path.join(place, "text"), "w+") as text:
        text.write("buffered")
        moved()
        text.write(" and more")
        text.seek(0)
        check(text.read() == "buffered and more", "the file")
    check(dice.getstate() == state, "the dice")
    check(next(numbers) == 1000 * 1000, "the generator")
    check(all(words[n] == str(n) * 20 for n in words), "the words")
    orders.put(21)
    check(answers.get() == 42, "the queue")
    orders.put(None)
    for worker in workers:
        worker.join()
    check(sums[0] > 0, "the second thread")


def square(number):
    return number * number


def pool():
    """Processes of multiprocessing with their queues and semaphores, in the middle of their work."""
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as workers:
        check(workers.map(square, range(100)) == [n * n for n in range(100)], "before")
        later = workers.map_async(square, range(20000), chunksize=5)
        moved()
        check(later.get() == [n * n for n in range(20000)], "what was under way")
        check(workers.map(square, range(100)) == [n * n for n in range(100)], "after")


def loop():
    """An asyncio loop with a timer, a pipe and a child process."""

    async def main():
        child = await asyncio.create_subprocess_exec(
            "/bin/cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        far = asyncio.create_task(asyncio.sleep(100000))
        child.stdin.write(b"before\n")
        check(await child.stdout.readline() == b"before\n", "before")
        say("ready")
        while not told_to_go():
            await asyncio.sleep(0.001)
        child.stdin.write(b"after\n")
        check(await child.stdout.readline() == b"after\n", "after")
        child.stdin.close()
        check(await child.wait() == 0, "the child")
        check(not far.done(), "a sleep that ended early")
        far.cancel()

    asyncio.run(main())


{"threads": threads, "pool": pool, "loop": loop}[sys.argv[1]]()
say("right")
os._exit(7)
