"""The sentences that report faults of a spec."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, Field, ValidationError

from paceline.plan.spec.sentences import first_of, sentences
from paceline.plan.spec.values import Name


class _Options(BaseModel):
    name: Name
    checksum: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


def test_text_of_another_form_is_told_that_of_its_own_field() -> None:
    with pytest.raises(ValidationError) as caught:
        _Options.model_validate({"name": "a/b", "checksum": "0xAB"})
    assert sentences(caught.value.errors()) == [
        "name: expected letters a to z, digits, '.', '_' and '-', at most 64, got 'a/b'",
        "checksum: expected text that matches ^[0-9a-f]{8}$, got '0xAB'",
    ]


def test_value_is_shown_with_60_characters_at_most() -> None:
    for given, shown in (("/" * 58, f"'{'/' * 58}'"), ("/" * 59, f"'{'/' * 56}...")):
        with pytest.raises(ValidationError) as caught:
            _Options.model_validate({"name": given, "checksum": "0" * 8})
        assert sentences(caught.value.errors())[0].endswith(f", got {shown}")


def test_names_beyond_the_first_ones_are_counted() -> None:
    assert first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert first_of(["a", "b"], 2) == "a, b"
