"""Where the time of vLLM's decode steps goes: seconds of a batch under several settings, and what kernels take of it.

    python benchmarks/generation.py --shape 0.5b [--ways uni mp no_logprobs kernels] [--requests 512] [--work DIR]

Plain vLLM on random weights of a Qwen2.5 shape: 64 prompts x 8 samples, 512 + 512 tokens, the log-probability of each
token. `uni` has scheduler and kernels in one process, `mp` in two, `no_logprobs` leaves log-probabilities out;
`kernels` runs everything in one process under torch's profiler, and subtracts a short batch from a longer one. Every
way runs in a process of its own, one after the other; the first batch of each warms up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import host_speed_s, make_model, make_prompts  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS, SAMPLES, BATCHES = 512, 512, 8, 4
WAYS = ("uni", "mp", "no_logprobs", "kernels")
SHORT, LONGER = 32, 64


def batches_of(args: argparse.Namespace, prompts: Path) -> list[list[dict[str, list[int]]]]:
    """Requests of each batch."""
    texts = [json.loads(line)["input"] for line in prompts.read_text().splitlines()]
    # Byte-level tokens of lower-case letters: the id of a character is its code minus that of "!".
    rows = [{"prompt_token_ids": [ord(c) - 33 for c in text]} for text in texts for _ in range(SAMPLES)]
    return [rows[start : start + args.requests] for start in range(0, len(rows), args.requests)]


def run_way(args: argparse.Namespace) -> None:
    """One way; prints what it took."""
    if args.only == "kernels":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = make_model(args.shape, Path(args.work))
    prompts = make_prompts(BATCHES * args.requests // SAMPLES, PROMPT_TOKENS, Path(args.work) / "generation.jsonl")
    batches = batches_of(args, prompts)
    engine = LLM(
        str(model),
        dtype="bfloat16",
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,
        gpu_memory_utilization=0.4,
        max_num_seqs=args.requests,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        disable_log_stats=True,
        distributed_executor_backend="mp" if args.only == "mp" else "uni",
    )
    # A list of numbers per request instead of an object per token, as our engines ask for.
    logprobs: dict[str, Any] = {} if args.only == "no_logprobs" else {"logprobs": 0, "flat_logprobs": True}

    def generate(batch: list[Any], tokens: int = NEW_TOKENS) -> float:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=1.0, **logprobs)
        started = time.perf_counter()
        engine.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        engine.reset_prefix_cache()
        return seconds

    generate(batches[0])
    if args.only != "kernels":
        print("RESULT " + ", ".join(f"{generate(batch):.2f}" for batch in batches[1:]) + " s a batch")
        return
    seconds, kernels = zip(*(_profiled(lambda n=n: generate(batches[1], n)) for n in (SHORT, LONGER)), strict=True)
    steps = LONGER - SHORT
    print(
        f"RESULT a decode step: {(seconds[1] - seconds[0]) / steps * 1e3:.2f} ms, its kernels "
        f"{(kernels[1] - kernels[0]) / steps * 1e3:.2f} ms"
    )


def _profiled(work: Any) -> tuple[float, float]:
    """Seconds of the work, and of the kernels in it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = work()
    return seconds, sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def main() -> None:
    """Runs the ways and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", help="a shape of benchmarks/shapes.py")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--work", default="/tmp/nemo_rl_bench")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        run_way(args)
        return
    print(f"this host adds 20 million numbers in Python in {host_speed_s():.2f} s", flush=True)
    for way in args.ways:
        line = [sys.executable, __file__, *sys.argv[1:], "--only", way]
        finished = subprocess.run(line, capture_output=True, text=True, check=False)
        told = [text for text in finished.stdout.splitlines() if text.startswith("RESULT ")]
        print(f"{way}: {told[0].removeprefix('RESULT ') if told else 'failed: ' + finished.stderr[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
