"""Regular expressions out of other people's configurations: compiled once, refused when matching might not end."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from math import comb, prod

from .errors import UnsupportedError

LONGEST = 512
MOST_STEPS = 10**7  # of backtracking, for one pattern on one name: a fraction of a second
QUICK = 20e-6
"""Seconds of one match that cost nothing."""
PATIENCE = 1.0
"""Seconds beyond those that all rules together may take."""
# Comments and verbose mode put something between a part and its repetition that the count below would not see.
HIDDEN = re.compile(r"\(\?(?:#|[a-zA-Z]*x)")


@dataclass(frozen=True)
class Rule:
    """A pattern that ends soon on a name of the length it was asked for. Both methods raise UnsupportedError when the
    rules of a configuration, each of them quick enough, together are not."""

    compiled: re.Pattern[str]
    file: str

    def match(self, name: str) -> bool:
        """Whether it matches from the start of the name."""
        start = time.thread_time()
        found = self.compiled.match(name) is not None
        _charge(time.thread_time() - start, self)
        return found

    def search(self, name: str) -> bool:
        """Whether it matches anywhere in the name."""
        start = time.thread_time()
        found = self.compiled.search(name) is not None
        _charge(time.thread_time() - start, self)
        return found


_spent = [0.0]
"""Seconds that matching took beyond ``QUICK``; quick matches pay it back."""


def _charge(seconds: float, rule: Rule) -> None:
    _spent[0] = max(0.0, _spent[0] + seconds - QUICK)
    if _spent[0] > PATIENCE:
        _spent[0] = 0.0
        raise _refusal(rule.compiled.pattern, rule.file)


def matcher(pattern: str, name_length: int, file: str, *, anywhere: bool = False) -> Rule:
    """The compiled rule, once it is sure that matching it ends soon: Python's matcher backtracks without a limit.

    ``anywhere``: it will be searched for, not matched from the start. Raises UnsupportedError.
    """
    compiled, steps = _compile(pattern) if len(pattern) <= LONGEST else (None, None)
    starts = name_length + 1 if anywhere else 1
    if compiled is None or steps is None or starts * comb(name_length + steps[0], steps[0]) * steps[1] > MOST_STEPS:
        raise _refusal(pattern, file)
    return Rule(compiled, file)


def _refusal(pattern: str, file: str) -> UnsupportedError:
    return UnsupportedError(
        "a rule for modules is not a regular expression that can be matched in reasonable time",
        file=file,
        found=repr(pattern[:80]),
        do="write the rule without nested repetition",
    )


@cache
def _compile(pattern: str) -> tuple[re.Pattern[str] | None, tuple[int, int] | None]:
    if HIDDEN.search(pattern):
        return None, None
    try:
        return re.compile(pattern), _backtracking(pattern)
    except (re.error, RecursionError, OverflowError, IndexError):
        return None, None


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!:]|\(\?P<\w+>|[*+?]|\{\d*,?\d*\}|[()|]|.", re.DOTALL)


def _backtracking(pattern: str) -> tuple[int, int] | None:
    """(number of repetitions, ways through optional and alternative parts); None when repetitions are nested."""
    repeats, choices = 0, [1]
    branching = [False]  # one entry for each open group: it holds a choice
    alternatives = [1]
    last, inner = "", False
    for token in _TOKEN.findall(pattern):
        if token[0] in "*+{" or token == "?":
            if last in ("", "repeat"):  # lazy or possessive mark
                last = ""
                continue
            if token == "?":
                choices.append(2)
            elif last == ")" and inner:
                return None
            else:
                repeats += 1
            branching[-1], last = True, "repeat"
        elif token[0] == "(":
            branching.append(False)
            alternatives.append(1)
            last = ""
        elif token == ")":
            inner = branching.pop()
            branching[-1] |= inner
            choices.append(alternatives.pop())
            last = ")"
        elif token == "|":
            branching[-1], last = True, ""
            alternatives[-1] += 1
        else:
            last = "atom"
    return repeats, prod(choices + alternatives)
