"""Tokens per second and model FLOPs utilisation of a training step on both backends, beside the devices' own peak.

    python benchmarks/train_step.py --shape 1.5b [--gpus 2] [--sequence 1024 4096] [--backends dtensor megatron]
    python benchmarks/train_step.py --shape moe --expert-parallel 2 --gpus 2
    python benchmarks/train_step.py --shape 1.5b --backends dtensor --sequence 1024 --prompt 512 --samples 8
    python benchmarks/train_step.py --shape moe --gpus 2 --expert-parallel 2 --sequence 4096 --replay --steps 6
    python benchmarks/train_step.py --shape tiny --device cpu

Random weights, packed rows of equal sequences, the token-level policy loss, one optimizer step of several microbatches
after one that warms up. With `--samples` so many sequences have a prompt in common, and DTensor runs twice: with
prompts shared and with every sequence by itself; tokens a second count whole sequences, utilisation what was computed.
With `--replay` every backend runs twice: routing naturally, and with the experts of its own first step replayed, so
that both give every expert the same tokens.
Every contender runs in processes of its own, one after the other. The peak is that of a large
matrix product in the same precision, measured on the same devices before and after each contender: utilisation against
the data sheet and against what was measured are both in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import SHAPES, make_model, visible_gpus  # noqa: E402

from nemo_rl.distributed.ports import free_ports  # noqa: E402

BACKENDS = ("dtensor", "megatron")


class Contender(NamedTuple):
    """What is measured: a backend, whether the samples of a prompt share it, and whether routes are replayed."""

    backend: str
    shares: bool = False
    replays: bool = False

    def __str__(self) -> str:
        shares, replays = ", prompts shared" * self.shares, ", routes replayed" * self.replays
        return f"{self.backend}{shares}{replays}"


def policy_section(args: argparse.Namespace, model: Path, contender: Contender, sequence: int) -> dict[str, Any]:
    """The policy section of one contender."""
    megatron = contender.backend == "megatron"
    optimizer = {"lr": 1e-6, "min_lr": 1e-6, "weight_decay": 0.0, "use_distributed_optimizer": True}
    section: dict[str, Any] = {
        "model_name": str(model),
        "precision": args.precision,
        "max_total_sequence_length": sequence,
        "train_global_batch_size": rows(args, sequence),
        "train_micro_batch_size": max(1, args.tokens // sequence),
        "tokenizer": {"chat_template": None},
        "sequence_packing": {
            "enabled": True,
            "train_mb_tokens": args.tokens,
            "logprob_mb_tokens": args.tokens,
            "share_prompts": contender.shares,
        },
        "dtensor_cfg": {
            "enabled": not megatron,
            "defer_fsdp_grad_sync": True,
            "activation_checkpointing": args.recompute,
            "expert_parallel_size": args.expert_parallel,
            "torch_compile": None if args.compile == "auto" else args.compile == "on",
            "automodel_kwargs": {"use_liger_kernel": args.liger},
        },
        "optimizer": None
        if megatron
        else {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6, "fused": args.device == "cuda"}},
        "scheduler": None,
        "router_replay": {"enabled": contender.replays},
    }
    if megatron:
        section["megatron_cfg"] = {
            "enabled": True,
            "activation_checkpointing": args.recompute,
            "expert_model_parallel_size": args.expert_parallel,
            "optimizer": optimizer,
        }
    return section


def rows(args: argparse.Namespace, sequence: int) -> int:
    """Sequences of a step over all devices."""
    return max(1, args.tokens // sequence) * args.microbatches * args.gpus


def batch_of(args: argparse.Namespace, rows_here: int, sequence: int, vocabulary: int, seed: int) -> Any:
    """One device's rows, full of tokens."""
    import torch

    from nemo_rl.data_plane.field_schema import PROMPT, PROMPT_TOKENS, TAG
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    draw = torch.Generator().manual_seed(seed)
    shape = (rows_here, sequence)
    ids, prompts = torch.randint(0, vocabulary, shape, generator=draw), torch.arange(rows_here) // args.samples
    ids[:, : args.prompt] = ids[prompts * args.samples, : args.prompt]
    tags = {TAG + PROMPT: prompts, TAG + PROMPT_TOKENS: torch.full((rows_here,), args.prompt)}
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=torch.full((rows_here,), sequence),
        token_mask=torch.ones(shape, dtype=torch.long),
        sample_mask=torch.ones(rows_here),
        advantages=torch.randn(shape, generator=draw),
        prev_logprobs=torch.full(shape, -12.0),
        generation_logprobs=torch.full(shape, -12.0),
        **tags,
    )


def own_routes(data: Any, shape: dict[str, Any], step: Callable[[], object]) -> None:
    """Puts the routes that a step takes by itself into its batch, so that what replays them does the same work."""
    import torch

    from nemo_rl.models.policy.router_replay import EXPERTS, VALID, RouterTarget

    layers, experts_per_token = shape["num_hidden_layers"], shape["num_experts_per_tok"]
    ids_BS, choose = data["input_ids"], RouterTarget.choose
    place_T = torch.arange(ids_BS.numel())
    # Routes that are not valid: the digits of a token's place, which tell where in the batch a router's tokens belong.
    digits_TK = torch.stack([place_T >> (8 * digit) & 255 for digit in range(experts_per_token)], dim=1)
    routes = digits_TK.to(torch.uint8)[:, None].expand(-1, layers, -1).reshape(*ids_BS.shape, layers, -1).contiguous()
    data[EXPERTS], data[VALID] = routes, torch.zeros_like(ids_BS, dtype=torch.bool)
    found_TLK = torch.zeros(ids_BS.numel(), layers, experts_per_token, dtype=torch.uint8)

    def noting(target: RouterTarget, natural_TK: Any) -> Any:
        told = target.now.routes
        if told is not None:
            real_T = told.read_T.cpu()
            digits = told.experts_TLK[:, target.layer].cpu().long()[real_T]
            places = sum(digits[:, digit] << (8 * digit) for digit in range(experts_per_token))
            found_TLK[places, target.layer] = natural_TK.detach().cpu()[real_T].to(torch.uint8)
        return choose(target, natural_TK)

    RouterTarget.choose = noting
    step()
    RouterTarget.choose = choose
    valid_BS = data[VALID].clone()
    valid_BS[:, :-1] = True
    data[EXPERTS] = torch.where(valid_BS[..., None, None], found_TLK.reshape(routes.shape), 0)
    data[VALID] = valid_BS


def matmul_tflops(device: Any, precision: str) -> float:
    """TFLOP/s of the best of several large matrix products."""
    import torch

    cuda = device.type == "cuda"
    size, times = (8192, 10) if cuda else (1024, 3)
    a = torch.randn(size, size, device=device, dtype=getattr(torch, precision))
    best = float("inf")
    for _ in range(times):
        if cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ a
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e12


def run_rank(args: argparse.Namespace, contender: Contender, sequence: int, model: Path) -> None:
    """One rank of one contender; rank 0 prints what was measured as JSON."""
    import torch

    from nemo_rl.config import MasterConfig
    from nemo_rl.loss import ClippedPGLossFn
    from nemo_rl.models.policy.batches import shard_rows
    from nemo_rl.models.policy.policy_worker import PolicyWorker
    from nemo_rl.utils.flops import peak_tflops

    config = MasterConfig(
        policy=policy_section(args, model, contender, sequence), loss_fn={"reference_policy_kl_penalty": 0.0}
    )
    worker = PolicyWorker(config.policy, init_reference_model=False)
    worker.build()
    device = worker.backend.device
    peaks = [matmul_tflops(device, args.precision)]
    here = rows(args, sequence) // args.gpus
    data = batch_of(args, here, sequence, worker.backend.model_config.vocab_size, worker.backend.rank)
    data["token_mask"][:, : args.prompt] = 0
    loss = ClippedPGLossFn(config.loss_fn)
    seconds = []

    def step() -> Any:
        worker.begin_train_step(loss)
        shards, _ = shard_rows(data, worker.cfg, 1, training=True, share=contender.shares)
        worker.train_microbatches(shards[0])
        return worker.finish_train_step()

    if contender.replays:
        own_routes(data, SHAPES[args.shape], step)
    for _ in range(args.steps + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        torch.distributed.barrier()
        started = time.perf_counter()
        result = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        torch.distributed.barrier()
        seconds.append(time.perf_counter() - started)
    if args.profile:
        print_profile(step, device)
    if args.offload:
        print_moves(worker)
    peaks.append(matmul_tflops(device, args.precision))
    if worker.backend.rank == 0:
        told = worker.describe()
        tokens = here * sequence * args.gpus
        wall = statistics.median(seconds[1:])
        flops = told["shape"].train_flops(result["work"]) * args.gpus
        sheet = peak_tflops(told["device_name"], args.precision) if device.type == "cuda" else None
        answer = {
            "kernels": told["kernels"],
            "tokens_per_s": tokens / wall,
            "seconds": wall,
            "tflops": flops / wall / args.gpus / 1e12,
            "sheet": sheet,
            "measured_peak": max(peaks),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            "loss": result["loss"][0],
        }
        print("RESULT " + json.dumps(answer), flush=True)
    torch.distributed.barrier()
    worker.shutdown()


def print_profile(step: Callable[[], object], device: Any, rows: int = 30) -> None:
    """One more step under torch's profiler: how long it took, how long kernels ran in it, and the longest of those."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - started
    kind = DeviceType.CUDA if cuda else DeviceType.CPU
    order = "self_device_time_total" if cuda else "self_cpu_time_total"
    kernels = [event for event in profiler.key_averages() if event.device_type == kind]
    kernels.sort(key=lambda event: getattr(event, order), reverse=True)
    busy = sum(getattr(event, order) for event in kernels) / 1e6
    print(f"profiled step {wall:.3f} s, kernels {busy:.3f} s", file=sys.stderr)
    for event in kernels[:rows]:
        print(f"{getattr(event, order) / 1e3:10.1f} ms {event.count:6d} {event.key[:100]}", file=sys.stderr)


def print_moves(worker: Any, rounds: int = 3) -> None:
    """Seconds in which training state leaves the GPU and comes back, against the same bytes by `Tensor.to`."""
    import torch

    def timed(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    resident = worker.memory_in_use()
    for number in range(rounds):
        away = timed(worker.offload_all)
        moved = resident - worker.memory_in_use()
        back = timed(worker.prepare_for_training)
        print(f"moved {moved / 1e9:.1f} GB, round {number}: away {away:.2f} s, back {back:.2f} s", file=sys.stderr)
    worker.offload_all()
    block = 256 << 20
    tensors = [torch.ones(block, dtype=torch.uint8, device="cuda") for _ in range(max(1, moved // block))]

    def all_to(device: str) -> None:
        tensors[:] = [tensor.to(device) for tensor in tensors]

    for number in range(rounds):
        away, back = timed(partial(all_to, "cpu")), timed(partial(all_to, "cuda"))
        print(f"the same by Tensor.to, round {number}: away {away:.2f} s, back {back:.2f} s", file=sys.stderr)
    tensors.clear()
    worker.prepare_for_training()


def measure(args: argparse.Namespace, contender: Contender, sequence: int, model: Path) -> dict[str, Any]:
    """Runs every rank of one contender; what rank 0 measured.

    Raises:
        RuntimeError: A rank failed or took longer than the deadline.
    """
    (port,) = free_ports(1)
    processes = []
    for rank in range(args.gpus):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.gpus),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        if args.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus(args.gpus)[rank]
        line = [sys.executable, __file__, *sys.argv[1:], "--rank-of", contender.backend]
        line += [str(int(contender.shares)), str(int(contender.replays)), str(sequence), str(model)]
        processes.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
    deadline = time.monotonic() + args.timeout
    try:
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{contender} with sequences of {sequence} gave no result in {args.timeout} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    if not told:
        raise RuntimeError(f"{contender} with sequences of {sequence} failed: see the errors above")
    answer: dict[str, Any] = json.loads(told[0].removeprefix("RESULT "))
    return answer


def row_of(contender: Contender, sequence: int, answer: dict[str, Any]) -> str:
    """One line of the table."""
    sheet = f"{answer['tflops'] / answer['sheet']:.1%}" if answer["sheet"] else "-"
    memory = f"{answer['memory_gib']:.1f}" if answer["memory_gib"] is not None else "-"
    cells = (
        str(contender),
        answer["kernels"],
        str(sequence),
        f"{answer['tokens_per_s']:,.0f}",
        f"{answer['seconds']:.3f}",
        f"{answer['tflops']:.3g}",
        sheet,
        f"{answer['measured_peak']:.3g}",
        f"{answer['tflops'] / answer['measured_peak']:.1%}",
        memory,
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="a shape of benchmarks/shapes.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="devices; slots of the CPU with --device cpu")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--sequence", type=int, nargs="+", help="tokens of a sequence (1024 and 4096; tiny: 32)")
    parser.add_argument("--tokens", type=int, help="tokens of a microbatch (16384; tiny: 256)")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches of a step without shared prompts")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile of DTensor's")
    parser.add_argument("--liger", action="store_true", help="Liger's layers for DTensor's")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a sequence that are not trained")
    parser.add_argument("--samples", type=int, default=1, help="sequences that have a prompt in common")
    parser.add_argument("--offload", action="store_true", help="time moves of training state to the host and back")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step by their time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one contender may take")
    parser.add_argument("--work", default="/tmp/nemo_rl_train_step", help="where models are made")
    parser.add_argument("--replay", action="store_true", help="also with recorded routes; a shape with experts")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tiny = args.shape.startswith("tiny")
    args.precision = "bfloat16" if args.device == "cuda" else "float32"
    args.tokens = args.tokens or (256 if tiny else 16384)
    if args.rank_of:
        backend, shares, replays, sequence, model = args.rank_of
        run_rank(args, Contender(backend, shares == "1", replays == "1"), int(sequence), Path(model))
        return
    if args.replay and "num_experts" not in SHAPES[args.shape]:
        parser.error(f"--replay: the shape {args.shape} has no experts; moe and tiny-moe have")
    model = make_model(args.shape, Path(args.work))
    print(f"shape={args.shape} devices={args.gpus} ({args.device}) tokens_per_microbatch={args.tokens}\n")
    header = ("backend", "kernels", "sequence", "tokens/s", "s a step", "TFLOP/s a device", "MFU, data sheet")
    header = (*header, "matmul TFLOP/s", "of matmul", "GiB")
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    replays = (False, True) if args.replay else (False,)
    contenders = [Contender(backend, replays=each) for backend in args.backends for each in replays]
    if args.samples > 1 and "dtensor" in args.backends:
        contenders.insert(args.backends.index("dtensor") + 1, Contender("dtensor", shares=True))
    for sequence in args.sequence or ([32] if tiny else [1024, 4096]):
        seconds = {}
        for contender in contenders:
            answer = measure(args, contender, sequence, model)
            seconds[contender] = answer["seconds"]
            print(row_of(contender, sequence, answer), flush=True)
        for contender in contenders:
            if contender.shares:
                ratio = seconds[contender._replace(shares=False)] / seconds[contender]
                print(f"every sequence by itself / prompts shared, seconds a step: {ratio:.2f}", flush=True)
            if contender.replays:
                ratio = seconds[contender] / seconds[contender._replace(replays=False)]
                print(f"{contender.backend}: replayed / natural routing, seconds a step: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
