"""What the OpenAI-compatible endpoint costs: the same requests through it and through the run's router.

    python benchmarks/endpoint.py --model 0.5b [--requests 1024] [--at-once 256] [--tokens 64] [--prompt 64]
        [--repeats 3] [--device cpu] [--apart]

`--model`: a shape of shapes.py with random weights, or a directory. Every request is drawn from a seed of its own, and
both ways must draw the same number of tokens; they take turns in being first. One process holds all connections and
does no more than send bytes that were made before and count tokens, so that its work is not charged to the endpoint.

Prints for each repetition tokens per second and processor time per request of both ways: of the driver, and of the
driver with its engine and Ray (`all`); then the share that the endpoint takes of throughput, and what it adds to the
processor time of all, each as median with smallest and largest. On GPUs only the first counts. Engines on CPU slots
take every core, so that there the endpoint takes of throughput what it adds to processor time, and processor time is
the steadier of the two where the machine has other work. With `--apart` engines leave one core to the driver and the
client, as engines on GPUs do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shapes import SHAPES, make_model

from nemo_rl.config import load_master_config
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.endpoint.server import start_endpoint
from nemo_rl.models.generation.interfaces import GenerationRequest
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.generation.vllm.engine_actors import start_engine_actors

_CONFIG = Path(__file__).resolve().parents[1] / "examples" / "configs" / "grpo_arithmetic_cpu.yaml"


def over_http(base_url: str, prompts: list[tuple[int, list[int]]], tokens: int, at_once: int) -> tuple[int, float]:
    """Sends prompts with their seeds; the tokens that came back, and the processor seconds that it took."""
    host, _, rest = base_url.removeprefix("http://").partition(":")
    port, _, path = rest.partition("/")
    messages: list[bytes] = []
    for seed, ids in prompts:
        body = json.dumps({"model": "policy", "prompt": ids, "max_tokens": tokens, "seed": seed}).encode()
        head = f"POST /{path}/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        messages.append(head.encode() + body)
    began, came = time.process_time(), 0
    waiting = iter(messages)
    with selectors.DefaultSelector() as connections:
        for message in islice(waiting, at_once):
            connection = socket.create_connection((host, int(port)))
            connection.sendall(message)
            connections.register(connection, selectors.EVENT_READ, bytearray())
        while connections.get_map():
            for key, _ in connections.select():
                connection, received = key.fileobj, key.data
                if not isinstance(connection, socket.socket):
                    continue
                received += connection.recv(1 << 20)
                head, _, body = received.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if length is None or len(body) < int(length[1]):
                    continue
                if not head.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(bytes(received).decode())
                came += json.loads(body)["usage"]["completion_tokens"]
                received.clear()
                if (message := next(waiting, None)) is not None:
                    connection.sendall(message)
                else:
                    connections.unregister(connection)
                    connection.close()
    return came, time.process_time() - began


async def over_router(generation: VllmGeneration, requests: list[GenerationRequest], at_once: int) -> int:
    """Runs requests; the tokens that came back."""
    slots = asyncio.Semaphore(at_once)

    async def one(request: GenerationRequest) -> int:
        async with slots:
            return len((await generation.generate_one(request)).token_ids)

    return sum(await asyncio.gather(*(one(request) for request in requests)))


def keep_apart(clients: ProcessPoolExecutor) -> None:
    """Gives the last core to this process and the client, and the others to all that this process started."""
    *others, last = sorted(os.sched_getaffinity(0))
    clients.submit(os.getpid).result()
    mine = {os.getpid(), *(process.pid for process in multiprocessing.active_children())}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {last} if process.pid in mine else set(others))


def processor_s(without: set[int]) -> float:
    """Processor seconds of this process and all that it started, but for some."""
    spent = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            if process.pid not in without:
                times = process.cpu_times()
                spent += times.user + times.system
    return spent


@dataclass(frozen=True)
class Measured:
    """One way in one repetition."""

    tokens: int
    seconds: float
    driver_s: float  # processor seconds
    all_s: float
    client_s: float = 0.0

    def line(self, name: str, requests: int) -> str:
        """For the terminal."""
        spent = (("driver", self.driver_s), ("all", self.all_s), ("client", self.client_s))
        parts = ", ".join(f"{whose} {1000 * seconds / requests:.2f}" for whose, seconds in spent if seconds)
        return f"{name} {self.tokens / self.seconds:8.0f} tokens/s, ms per request: {parts}"


def measured(work: Callable[[], tuple[int, float]], without: set[int]) -> Measured:
    """`work` returns tokens and processor seconds of the client."""
    began, driver_s, all_s = time.monotonic(), time.process_time(), processor_s(without)
    tokens, client_s = work()
    return Measured(
        tokens, time.monotonic() - began, time.process_time() - driver_s, processor_s(without) - all_s, client_s
    )


def spread(shares: list[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}, {len(shares)} repetitions)"


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the OpenAI-compatible endpoint.")
    parser.add_argument("--model", default="0.5b", help="a shape of shapes.py with random weights, or a directory")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--work", default="/tmp/nemo_rl_bench", help="where models of shapes are written")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--apart", action="store_true", help="engines leave the last core to driver and client")
    given = parser.parse_args()
    model = make_model(given.model, Path(given.work)) if given.model in SHAPES else given.model
    longest = given.prompt + given.tokens
    overrides = [
        f"policy.model_name={model}",
        f"policy.max_total_sequence_length={longest}",
        f"policy.generation.vllm_cfg.max_model_len={longest}",
        # In bfloat16 on GPUs; CPUs without units for it are faster in float32.
        f"policy.precision={'bfloat16' if given.device == 'cuda' else 'float32'}",
        "policy.generation.vllm_kwargs.kv_cache_memory_bytes=1610612736",
        f"policy.generation.max_new_tokens={given.tokens}",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "policy.generation.vllm_cfg.request_seeds=true",
        f"cluster.device={given.device}",
        "cluster.cpu_slots=1",
    ]
    config = load_master_config(_CONFIG, overrides)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    init_ray(device=given.device, cpu_slots=1)
    cluster = RayVirtualCluster([1], use_gpus=given.device == "cuda", num_gpus_per_node=1, name="endpoint")
    actors = start_engine_actors(cluster, config.policy, config.cluster, seed=1, colocated=False, refits=False)
    generation = VllmGeneration(actors, pad_token_id=tokenizer.pad_token_id, stop_token_ids=[tokenizer.eos_token_id])
    generation.wait_until_started()
    endpoint = start_endpoint(
        config.policy,
        tokenizer,
        generation.generate_one,
        stop_token_ids=[tokenizer.eos_token_id],
        cuda=given.device == "cuda",
    )
    numbered = (f"{n:06d}" * (given.prompt // 6 + 1) for n in range(given.requests))
    prompts = [(n, tokenizer(text)["input_ids"][: given.prompt]) for n, text in enumerate(numbered)]
    of_throughput: list[float] = []
    of_processor: list[float] = []
    try:
        with ProcessPoolExecutor(1) as clients:
            if given.apart:
                keep_apart(clients)
            without = {clients.submit(os.getpid).result()}
            for repeat in range(given.repeats + 1):
                requests = [
                    GenerationRequest(f"b{repeat}-{seed}", ids, given.tokens, generation.default_sampling(), seed)
                    for seed, ids in prompts
                ]

                def route(requests: list[GenerationRequest] = requests) -> tuple[int, float]:
                    return asyncio.run(over_router(generation, requests, given.at_once)), 0.0

                def serve() -> tuple[int, float]:
                    return clients.submit(over_http, endpoint.base_url, prompts, given.tokens, given.at_once).result()

                ways = {"router": route, "endpoint": serve}
                order = list(ways)[:: 1 if repeat % 2 else -1]
                done = {name: measured(ways[name], without) for name in order}
                router, served = done["router"], done["endpoint"]
                if served.tokens != router.tokens:
                    raise SystemExit(f"the endpoint drew {served.tokens} tokens, the router {router.tokens}")
                # The first repetition warms engine and client up.
                if repeat:
                    of_throughput.append(1 - router.seconds / served.seconds)
                    of_processor.append(served.all_s / router.all_s - 1)
                    print("   ".join(one.line(name, given.requests) for name, one in done.items()), flush=True)
        print(f"the endpoint takes {spread(of_throughput)} of the throughput")
        print(f"the endpoint adds {spread(of_processor)} to the processor time")
    finally:
        endpoint.close()
        generation.shutdown()
        cluster.shutdown()
        shutdown_ray()


if __name__ == "__main__":
    main()
