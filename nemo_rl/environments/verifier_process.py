"""A process that verifies answers, one at a time, and is killed by the kernel when one exceeds its deadline.

Reads a JSON line {verifier, response, expected, deadline_s} and writes one {reward, answer}. The deadline is an
interval timer whose signal ends the process: unlike an exception it also ends a computation stuck in C code.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import signal
import sys
from typing import TextIO

from nemo_rl.environments.verifiers import VERIFIERS, Verdict

# A pathological expression can eat memory as well as time; past this, the process gets a MemoryError and the answer
# earns 0.
MEMORY_LIMIT_BYTES = 4 * 1024**3


def main() -> None:
    """Serves requests until standard input ends."""
    # Libraries may print; the answers have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadlines are off, which is meant
    # Imports cost seconds, which no answer should have to pay for out of its deadline.
    if sys.argv[1:] == ["reasoning_gym"]:
        importlib.import_module("reasoning_gym")
    else:
        VERIFIERS["hf_math_verify"]("1", "1")
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"])
        verdict, problem = _verify(request["verifier"], request["response"], request["expected"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, {"reward": verdict.reward, "answer": verdict.answer, "problem": problem})


def _verify(verifier: str, response: str, expected: str) -> tuple[Verdict, str | None]:
    try:
        return VERIFIERS[verifier](response, expected), None
    except Exception as error:  # noqa: BLE001 - sympy raises anything on what a model writes; the answer earns 0 and the cause is reported
        return Verdict(0.0, None), f"{type(error).__name__}: {error}"[:500]


def _reply(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
