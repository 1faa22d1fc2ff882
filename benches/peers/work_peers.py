"""The task farms of `bench work` in systems with a Python interface.

    work_peers.py SYSTEM TASKS GRAIN_US WORKERS FOLDER

SYSTEM is dask, ray or hyperqueue. FOLDER contains work_loop and libwork_loop.so, and takes files of
this run. Prints one line of JSON.
"""

import ctypes
import json
import os
import struct
import sys
import time

SYSTEM, TASKS, GRAIN_US, WORKERS, FOLDER = (
    sys.argv[1],
    int(sys.argv[2]),
    float(sys.argv[3]),
    int(sys.argv[4]),
    sys.argv[5],
)
LIBRARY = os.path.join(FOLDER, "libwork_loop.so")


def load_library(path):
    library = ctypes.CDLL(path)
    library.work_loop.argtypes = [ctypes.c_double]
    library.work_machine_cpu_s.restype = ctypes.c_double
    return library


def print_figures(seconds, cpu_s):
    figures = {
        "tasks": TASKS,
        "seconds": seconds,
        "tasks_per_second": TASKS / seconds,
        "efficiency": TASKS * GRAIN_US / 1e6 / (WORKERS * seconds),
        "machine_us_per_task": cpu_s * 1e6 / TASKS,
    }
    print(json.dumps(figures), flush=True)


def measure(execute):
    """Calls `execute` once and prints the figures. `execute` returns the time of the end or None."""
    machine_cpu_s = load_library(LIBRARY).work_machine_cpu_s
    cpu_s, start = machine_cpu_s(), time.monotonic()
    end = execute()
    print_figures((end or time.monotonic()) - start, machine_cpu_s() - cpu_s)


# Processes of workers keep the library between tasks.
LOADED = {}


def loop(_number, grain_us=GRAIN_US, path=LIBRARY):
    if path not in LOADED:
        LOADED[path] = load_library(path)
    LOADED[path].work_loop(grain_us)


def run_dask():
    from distributed import Client, LocalCluster

    with LocalCluster(
        n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, protocol="tcp"
    ) as cluster, Client(cluster) as client:
        client.wait_for_workers(WORKERS)
        client.gather(client.map(loop, range(100), pure=False))
        measure(lambda: client.gather(client.map(loop, range(TASKS), pure=False)) and None)


def run_ray():
    import ray

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    remote_loop = ray.remote(loop)
    ray.get([remote_loop.remote(number) for number in range(100)])
    measure(lambda: ray.get([remote_loop.remote(number) for number in range(TASKS)]) and None)
    ray.shutdown()


def run_hyperqueue():
    from hyperqueue import Job, LocalCluster
    from hyperqueue.cluster import WorkerConfig

    ends_path = os.path.join(FOLDER, "ends")
    program = [os.path.join(FOLDER, "work_loop"), str(GRAIN_US), ends_path]

    def job(tasks):
        result = Job()
        for _ in range(tasks):
            result.program(program, stdout=None, stderr=None)
        return result

    with LocalCluster() as cluster:
        for _ in range(WORKERS):
            cluster.start_worker(WorkerConfig(cores=1))
        client = cluster.client()
        client.wait_for_jobs([client.submit(job(20))])
        os.remove(ends_path)
        measured = job(TASKS)

        def execute():
            client.wait_for_jobs([client.submit(measured)])
            # The client looks about once a second, so the tasks note their ends.
            with open(ends_path, "rb") as file:
                return max(end for (end,) in struct.iter_unpack("d", file.read()))

        measure(execute)


if __name__ == "__main__":
    {"dask": run_dask, "ray": run_ray, "hyperqueue": run_hyperqueue}[SYSTEM]()
