"""Regular expressions out of other people's configurations: compiled once, refused when matching might not end."""

from __future__ import annotations

import re
from functools import cache
from math import comb, prod

from .errors import UnsupportedError

LONGEST = 512
MOST_STEPS = 10**8  # of backtracking, for one pattern on one name


def matcher(pattern: str, name_length: int, file: str) -> re.Pattern[str]:
    """The compiled rule, once it is sure that matching it ends soon: Python's matcher backtracks without a limit."""
    compiled, steps = _compile(pattern) if len(pattern) <= LONGEST else (None, None)
    if compiled is None or steps is None or comb(name_length + steps[0], steps[0]) * steps[1] > MOST_STEPS:
        raise UnsupportedError(
            "a rule for modules is not a regular expression that can be matched in reasonable time",
            file=file,
            found=repr(pattern[:80]),
            do="write the rule without nested repetition",
        )
    return compiled


@cache
def _compile(pattern: str) -> tuple[re.Pattern[str] | None, tuple[int, int] | None]:
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
