"""Two ranks in a network namespace of their own whose loopback is slow: prints JSON.

unshare -rn python slow_network.py DELAY JITTER     times as `tc netem` takes them: 20ms 5ms
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys

import numpy as np
from gloo_pool import join
from gloo_work import DIM, HEADS, LAYERS, decode, feed

from kvedge import KVCache, errors
from kvedge.distributed import ShardedKVCache

PORT = 29511  # nobody else is in the namespace


def rank_of(rank, timeout, pipe):
    join(rank, 2, PORT)
    try:
        cache = ShardedKVCache(KVCache(LAYERS, HEADS, DIM), block_size=16, timeout=timeout)
        feed(cache, 1, 100)
        pipe.send(decode(cache, 2, 5).tolist())
    except errors.RankLostError as error:
        pipe.send(str(error))


def run(timeout):
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        here, there = context.Pipe()
        process = context.Process(target=rank_of, args=(rank, timeout, there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    found = [pipe.recv() if pipe.poll(100) else "nothing came" for pipe in pipes]
    for process in processes:
        process.kill()
    return found


def main(delay, jitter):
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    netem = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", delay, jitter]
    made = subprocess.run(netem, capture_output=True, text=True)
    if made.returncode:
        return {"skip": f"no tc netem here: {made.stderr.strip()}"}
    whole = KVCache(LAYERS, HEADS, DIM)
    feed(whole, 1, 100)
    wanted = decode(whole, 2, 5)
    patient = run(60.0)
    errors_of = [float(np.abs(np.array(out) - wanted).max()) for out in patient]
    return {"skip": None, "errors": errors_of, "hasty": run(1e-3)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
