"""Switches are checked before any file is read, whatever is in it."""

from __future__ import annotations

from typing import Any

import pytest
from warptile.formats.errors import UsageError
from warptile.formats.options import CHOICES, Options


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"checkpoint_format": "v3"}, "unknown --checkpoint-format 'v3'; need gptq or gptq_v2 or marlin"),
        ({"zero_wrap": "byte"}, "unknown --zero-wrap 'byte'; need lane or word or none"),
        ({"scale_convention": "both"}, "unknown --scale-convention 'both'; need multiply or divide"),
        ({"nan": "skip"}, "unknown --nan 'skip'; need zero"),
        ({"bits": 0}, "--bits 0: no such width"),
        ({"group_size": -2}, "--group-size -2: no such size"),
    ],
)
def test_a_value_that_no_switch_takes_is_a_usage_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        Options(**given)
    assert words in str(refused.value)


def test_every_value_that_is_named_is_taken() -> None:
    for name, allowed in CHOICES.items():
        for value in allowed:
            assert getattr(Options(**{name: value}), name) == value
