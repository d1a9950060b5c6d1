"""Verifiers: functions from a response and the expected answer to a reward from 0 to 1, and the answer that was read.

Pure functions of two strings; math-verify is imported when the first mathematical answer needs it. They may run for
ever on a pathological expression: run them through `verifier_pool`, which has a deadline. Invariant: what cannot be
read earns 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A reward, and the answer that was read from the response; None where none was found."""

    reward: float
    answer: str | None


Verifier = Callable[[str, str], Verdict]

_INTEGER = re.compile(r"-?\d{1,18}")
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_ENGLISH_CHOICE = re.compile(r"(?i)answer\s*:\s*[*$(]*\s*([A-J])\b")
# "Answer" in the languages of the multilingual MMLU test set.
_ANSWER_WORDS = (
    "answer|antwort|respuesta|réponse|resposta|risposta|jawaban|jibu|ìdáhùn|idáhùn|câu trả lời|đáp án|"
    "ответ|उत्तर|উত্তর|답변|정답|답|答案|答|回答|解答|الإجابة|الجواب|إجابة"
)
_MULTILINGUAL_CHOICE = re.compile(rf"(?i)(?:{_ANSWER_WORDS})\s*[::]\s*[*$(「]*\s*([A-J]|[أبجد]|[অআইঈবডঢসকখগঘ])")
_CHOICE_LETTERS = {
    "أ": "A",
    "ب": "B",
    "ج": "C",
    "د": "D",
    "অ": "A",
    "ব": "B",
    "ড": "C",
    "ঢ": "D",
    "ক": "A",
    "খ": "B",
    "গ": "C",
    "ঘ": "D",
}


def quick(response: str, expected: str) -> Verdict | None:
    """The verdict on a response that is a plain integer, as is the expected answer; None where it takes a real
    verifier.
    """
    given, wanted = response.strip(), expected.strip()
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(wanted):
        return Verdict(float(int(given) == int(wanted)), given)
    return None


def hf_math_verify(response: str, expected: str) -> Verdict:
    """Mathematical equality by math-verify (https://github.com/huggingface/Math-Verify): any answer read from the
    response may match.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Its own deadlines raise in Python code only and need SIGALRM, which the verifier process has for a deadline that
    # always holds.
    gold = parse(f"\\boxed{{{expected}}}", extraction_config=(LatexExtractionConfig(),), parsing_timeout=0)
    found = parse(response, extraction_config=(ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=0)
    if not gold or not found:
        return Verdict(0.0, None)
    return Verdict(float(verify(gold, found, timeout_seconds=0)), str(found[-1]))


def dapo_math_verify(response: str, expected: str) -> Verdict:
    """DAPO's check (https://arxiv.org/abs/2503.14476): the last `Answer: ...` line equals the expected answer once both
    are written plainly.
    """
    lines = _ANSWER_LINE.findall(response[-300:])
    if not lines:
        return Verdict(0.0, None)
    given = plainly(lines[-1])
    return Verdict(float(given == plainly(expected)), given)


def english_multichoice(response: str, expected: str) -> Verdict:
    """The letter of the last `Answer: X`."""
    found = _ENGLISH_CHOICE.findall(response)
    return _choice(found[-1].upper() if found else None, expected)


def multilingual_multichoice(response: str, expected: str) -> Verdict:
    """The letter after the last word for "answer", in the language of the response."""
    found = _MULTILINGUAL_CHOICE.findall(unicodedata.normalize("NFKC", response))
    letter = found[-1] if found else None
    return _choice(None if letter is None else _CHOICE_LETTERS.get(letter, letter.upper()), expected)


def plainly(answer: str) -> str:
    """A mathematical answer without what does not change it: dollar signs, spaces, units, `\\text`, thousands' commas,
    trailing full stops.

    The rules are those of Minerva's appendix (https://arxiv.org/abs/2206.14858), as far as they concern single answers.
    """
    text = answer.split("=")[-1]
    boxed = re.search(r"\\boxed\s*\{(.*)\}", text)
    text = boxed.group(1) if boxed else text
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox|overline)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|;|!|quad|ldots|dots)|\\?\$|\\?%|\^\{?\\circ\}?", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([^{\\\s])\s*([^{\\\s])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^{\\\s])", r"\\sqrt{\1}", text)
    text = re.sub(
        r"\b(?:units?|degrees?|dollars?|cents?|points?|inches|feet|meters?|cm|hours?|minutes?|square)\b", "", text
    )
    text = re.sub(r"\s+", "", text).rstrip(".。")
    bare = text.replace(",", "")
    return bare if re.fullmatch(r"[+-]?\d+(?:\.\d+)?", bare) else text


def _choice(letter: str | None, expected: str) -> Verdict:
    return Verdict(float(letter is not None and letter == expected.strip().upper()), letter)


def reasoning_gym(response: str, expected: str) -> Verdict:
    """The score, 0 to 1, that reasoning-gym's own verifier gives; `expected` is a problem reference with the `tag` of
    the answer, as JSON.

    Raises:
        Whatever a task's verifier raises on an answer it did not foresee.
    """
    import json

    from reasoning_gym.utils import extract_answer

    from nemo_rl.data.datasets.generated import ProblemReference

    wanted = json.loads(expected)
    tag = wanted.pop("tag")
    answer = response.strip() if tag is None else extract_answer(response, tag)
    if answer is None:
        return Verdict(0.0, None)
    return Verdict(float(ProblemReference(**wanted).score(answer)), answer)


VERIFIERS: dict[str, Verifier] = {
    "hf_math_verify": hf_math_verify,
    "dapo_math_verify": dapo_math_verify,
    "english_multichoice": english_multichoice,
    "multilingual_multichoice": multilingual_multichoice,
    "reasoning_gym": reasoning_gym,
}
