"""API keys: which header names which caller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_service.api.access import ApiKeys

pytestmark = pytest.mark.unit

KEYS = ("first-key-0123456789", "second-key-0123456789")


def test_each_key_has_a_name_of_its_own_that_does_not_contain_it() -> None:
    keys = ApiKeys(KEYS)
    names = [keys.caller(f"Bearer {key}") for key in KEYS]
    assert None not in names
    assert len(set(names)) == 2
    assert not [name for name in names for key in KEYS if name is None or key[:4] in name]


def test_a_name_is_the_same_after_a_restart_and_in_any_order() -> None:
    header = f"Bearer {KEYS[0]}"
    assert ApiKeys(KEYS).caller(header) == ApiKeys(reversed(KEYS)).caller(header)


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}",
     f"Bearer {KEYS[0]},{KEYS[1]}", f"Bearer {KEYS[0].upper()}", "Bearer \xff\xfe"],
)  # fmt: skip
def test_anything_else_names_nobody(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) is None


@given(st.text(max_size=40))
def test_no_header_is_an_accident(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) is None


@pytest.mark.parametrize("header", [f"bearer {KEYS[1]}", f"Bearer   {KEYS[1]} "])
def test_the_scheme_is_read_as_http_says(header: str) -> None:
    assert ApiKeys(KEYS).caller(header) == ApiKeys(KEYS).caller(f"Bearer {KEYS[1]}")
