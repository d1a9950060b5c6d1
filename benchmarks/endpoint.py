"""What the OpenAI-compatible endpoint costs: the same requests through it and through the run's router.

    python benchmarks/endpoint.py MODEL [--requests 1024] [--at-once 256] [--tokens 64] [--repeats 3] [--device cpu]
        [--apart]

Every request is drawn from a seed of its own, and both ways must draw the same number of tokens. One process holds all
connections and does no more than send bytes that were made before and count tokens, so that its work is not charged to
the endpoint. Prints tokens per second of each repetition, processor time per request of the driver and of the client,
and the share of throughput that the endpoint takes (median). Engines on CPU slots take every core, so that the share
is that of processor time which they lack; with `--apart` they leave one core to the driver and the client, as engines
on GPUs do.
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
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the OpenAI-compatible endpoint.")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--at-once", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--apart", action="store_true", help="engines leave the last core to driver and client")
    given = parser.parse_args()
    overrides = [
        f"policy.model_name={given.model}",
        "policy.max_total_sequence_length=512",
        "policy.generation.vllm_cfg.max_model_len=512",
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
    prompts = [(n, tokenizer(f"{n % 97}+{n % 13}=")["input_ids"]) for n in range(given.requests)]
    shares: list[float] = []
    try:
        with ProcessPoolExecutor(1) as clients:
            if given.apart:
                keep_apart(clients)
            for repeat in range(given.repeats + 1):
                requests = [
                    GenerationRequest(f"b{repeat}-{seed}", ids, given.tokens, generation.default_sampling(), seed)
                    for seed, ids in prompts
                ]
                began, driver_s = time.monotonic(), time.process_time()
                routed = asyncio.run(over_router(generation, requests, given.at_once))
                router_s, began = time.monotonic() - began, time.monotonic()
                routing_s, driver_s = time.process_time() - driver_s, time.process_time()
                client = clients.submit(over_http, endpoint.base_url, prompts, given.tokens, given.at_once)
                served, client_s = client.result()
                http_s, serving_s = time.monotonic() - began, time.process_time() - driver_s
                if served != routed:
                    raise SystemExit(f"the endpoint drew {served} tokens, the router {routed}")
                # The first repetition warms engine and client up.
                if repeat:
                    shares.append(1 - router_s / http_s)
                    routing, serving, asking = (
                        1000 * spent / given.requests for spent in (routing_s, serving_s, client_s)
                    )
                    print(
                        f"router {routed / router_s:8.0f} tokens/s, driver {routing:.2f} ms per request   "
                        f"endpoint {served / http_s:8.0f} tokens/s, driver {serving:.2f}, client {asking:.2f} ms"
                    )
        print(f"the endpoint takes {statistics.median(shares):.1%} of the throughput (median of {len(shares)})")
    finally:
        endpoint.close()
        generation.shutdown()
        cluster.shutdown()
        shutdown_ray()


if __name__ == "__main__":
    main()
