"""Verifiers: functions from a response and the expected answer to a reward from 0 to 1, and the answer that was read;
and, as a program, the process that runs them.

Pure functions of two strings; math-verify is imported when the first mathematical answer needs it. They may run for
ever on a pathological expression: run them through `VerifierPool`, which has a deadline. The process reads a JSON line
{verifier, response, expected, deadline_s} and writes one {reward, answer}. The deadline is an interval timer whose
signal ends the process: unlike an exception it also ends a computation stuck in C code. Invariant: what cannot be read
earns 0.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import resource
import signal
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Verdict:
    """A reward, and the answer that was read from the response; None where none was found."""

    reward: float
    answer: str | None
    given_up: bool = False  # no verdict came in time, or its process ended twice


Verifier = Callable[[str, str], Verdict]

_INTEGER = re.compile(r"-?\d{1,18}")
# How far two numbers may be apart, as a share of the larger: six decimals of 1/6 are within it.
_NEAR = 1e-5
_TERM = r"[-+\w.*/^() ]+"
_BARE_RELATION = re.compile(rf"{_TERM}(?:(?:[<>]=?|≤|≥){_TERM})+")
_BARE_PERCENT = re.compile(r"(?<!\\)%")
_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
# Allowed between "Answer:" and the letter: emphasis, mathematics, a box, brackets.
_MARKUP = r"(?:[*$(\[{「【\s]|\\(?:boxed|text|textbf|mathbf|mathrm|\(|\[))*"
# A letter that a word goes on with is none, nor are the pronoun and the article: "Answer: I think", "answer: a few".
_LATIN_CHOICE = r"(?!(?-i:I|a)\s+[^\W\d_])([A-J])(?![a-zÀ-ɏ'\u2019])"
_ENGLISH_CHOICE = re.compile(rf"(?i)answer\s*:{_MARKUP}{_LATIN_CHOICE}")
# "Answer" in the languages of the multilingual MMLU test set, whose questions have four choices.
_ANSWER_WORDS = (
    "answer|antwort|respuesta|réponse|resposta|risposta|jawaban|jibu|ìdáhùn|idáhùn|idahun|àmọ̀nà|àdáhùn|ànúgọ|àṣàyàn|"
    "câu trả lời|đáp án|ответ|उत्तर|উত্তর|답변|정답|답|答案|答复|答え|答曰|答|回答|解答|"
    "(?:الإجابة|الجواب|إجابة)(?: النهائية| النهائي| الصحيحة| الصحيح)?(?: هي| هو)?"
)
_MULTILINGUAL_CHOICE = re.compile(
    unicodedata.normalize("NFKC", rf"(?i)(?:(?:{_ANSWER_WORDS})\s*:|উত্তরঃ:?){_MARKUP}")
    + rf"(?:{_LATIN_CHOICE.replace('A-J', 'A-D')}|([أبجد])(?![\u0600-\u06ff])|([অআইঈবডঢসকখগঘ])(?![\u0980-\u09ff]))"
)
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
    response may match. A `%` and LaTeX's `\\%` are the same, and so are an interval and a chain of inequalities. Small
    numbers are compared by their first digits, where math-verify compares decimals.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def judged(response: str, expected: str) -> Verdict:
        # Its own deadlines raise in Python code only and need SIGALRM, which the verifier process has for a deadline
        # that always holds.
        gold = parse(f"\\boxed{{{expected}}}", extraction_config=(LatexExtractionConfig(),), parsing_timeout=0)
        found = parse(response, extraction_config=(ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=0)
        if not gold or not found:
            return Verdict(0.0, None)
        pairs = ((wanted, given) for wanted in gold for given in found)
        right = any(
            verify([wanted], [given], timeout_seconds=0, allow_set_relation_comp=True) and _near(wanted, given)
            for wanted, given in pairs
        )
        return Verdict(float(right), str(found[-1]))

    if _BARE_RELATION.fullmatch(response.strip()):
        # Without marks of mathematics only its first number would be read.
        response = f"${response.strip().replace('≤', '<=').replace('≥', '>=')}$"
    verdict = judged(response, expected)
    if verdict.reward or not any(map(_BARE_PERCENT.search, (response, expected))):
        return verdict
    again = judged(*(_BARE_PERCENT.sub(r"\\%", text) for text in (response, expected)))
    return again if again.reward else verdict


def _near(wanted: object, given: object) -> bool:
    """Whether all numbers of two expressions that math-verify takes for equal are near each other."""
    from sympy import Basic, FiniteSet, Interval, Tuple, Union
    from sympy.core.relational import Relational
    from sympy.matrices import MatrixBase

    if isinstance(wanted, MatrixBase) and isinstance(given, MatrixBase):
        return all(map(_near, wanted.flat(), given.flat()))
    if not isinstance(wanted, Basic) or not isinstance(given, Basic):
        return True
    if wanted == given:
        return True
    if _is_number(wanted) and _is_number(given):
        left, right = (complex(one.evalf(30)) for one in (wanted, given))  # pyrefly: ignore[missing-attribute]
        return abs(left - right) <= _NEAR * max(abs(left), abs(right))
    collections = (FiniteSet, Interval, Tuple, Union, Relational)
    if not isinstance(wanted, collections) or type(wanted) is not type(given) or len(wanted.args) != len(given.args):
        # Forms of one expression, which it compared exactly.
        return True
    left, right = wanted.args, given.args
    if isinstance(wanted, FiniteSet) and all(map(_is_number, (*left, *right))):
        # The order of a set's elements is that of their forms.
        left, right = sorted(left, key=_size), sorted(right, key=_size)
    return all(map(_near, left, right))


def _is_number(expression: object) -> bool:
    return bool(getattr(expression, "is_number", False) and getattr(expression, "is_finite", False))


def _size(number: object) -> float:
    return float(abs(complex(number.evalf(30))))  # type: ignore[attr-defined]


def dapo_math_verify(response: str, expected: str) -> Verdict:
    """DAPO's check (https://arxiv.org/abs/2503.14476): the last `Answer: ...` line equals the expected answer once both
    are written plainly.
    """
    lines = _ANSWER_LINE.findall(response[-300:])
    if not lines:
        return Verdict(0.0, None)
    given = plainly(lines[-1].strip("* "))
    return Verdict(float(given == plainly(expected)), given)


def english_multichoice(response: str, expected: str) -> Verdict:
    """The letter of the first `Answer: X`."""
    found = _ENGLISH_CHOICE.search(response)
    return _choice(found[1].upper() if found else None, expected)


def multilingual_multichoice(response: str, expected: str) -> Verdict:
    """The letter after the first word for "answer", in the language of the response."""
    found = _MULTILINGUAL_CHOICE.search(unicodedata.normalize("NFKC", response))
    letter = next(filter(None, found.groups())) if found else None
    return _choice(None if letter is None else _CHOICE_LETTERS.get(letter, letter.upper()), expected)


# Minerva's list of words and marks that do not change an answer.
_UNITS = re.compile(
    r"(?<![A-Za-z\\])(?:square|ways|integers|dollars?|mph|inch(?:es)?|ft|hours?|km|units?|points?|feet|foot|minutes?|"
    r"digits|cents?|degrees?|cm|gm|pounds?|meters?|meals|edges|students|multiples)(?![A-Za-z])"
)
_MARKS = re.compile(
    r'\\(?:left|right)(?![a-z])|\\[,;!\s%]|\\?\$|%|\{,\}|"|\^\{?\\circ\}?|\\l?dots|\^?\{?\\mathrm\{th\}\}?|'
    r"\^(?:\{th\}|th(?![a-z]))"
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def plainly(answer: str) -> str:
    """A mathematical answer without what does not change it.

    The rules are those of Minerva's appendix (https://arxiv.org/abs/2206.14858, D.1): what follows the last `=`, inside
    the first pair of dollar signs; without `\\text`, `\\boxed` and the like around it, articles, units, spaces and
    marks; `\\frac12` written out; no commas between thousands. docs/evaluation.md lists where ours differ.
    """
    text = answer.split("=")[-1].replace("\\$", "")
    mathematics = re.search(r"\$([^$]+)\$", text)
    text = mathematics.group(1) if mathematics else text
    text = re.sub(r"\\mbox(?=\s*\{)", r"\\text", text)
    text = re.sub(r",?\s*\\text\s*\{\s*,?\s*and\s*\}", ",", text)
    text = re.sub(r"\\text\s*\{\s*(?:m|s|\.)?\s*\}(?:\^\{?[23]\}?)?", "", text)
    text = _MARKS.sub("", text)
    for _ in range(2):  # a box around text, or text in a box
        text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|overline)\s*\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\(?:boxed|fbox)\s*\{(.*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([^{\\\s])\s*([^{\\\s])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([^{\\\s\[])", r"\\sqrt{\1}", text)
    text = _UNITS.sub("", re.sub(r"\ban? ", "", text))
    text = re.sub(r"\s+", "", text).rstrip(".。")
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _choice(letter: str | None, expected: str) -> Verdict:
    return Verdict(float(letter is not None and letter == expected.strip(" ().").upper()), letter)


def reasoning_gym(response: str, expected: str) -> Verdict:
    """The score, 0 to 1, that reasoning-gym's own verifier gives; `expected` is a problem reference with the `tag` of
    the answer, as JSON. Raises whatever a task's verifier raises on an answer it did not foresee.
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
