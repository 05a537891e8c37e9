from __future__ import annotations

import pytest

from extproc.protocol.subset import parse_subset


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["10.0.0.1:80", "10.0.0.2:80"], {"10.0.0.1:80", "10.0.0.2:80"}),
        ("10.0.0.1:80, 10.0.0.2:80", {"10.0.0.1:80", "10.0.0.2:80"}),
        (["10.0.0.1:80,10.0.0.2:80", " [2600::1]:80 "], {"10.0.0.1:80", "10.0.0.2:80", "[2600::1]:80"}),
        (("10.0.0.1",), {"10.0.0.1"}),
        ([], set()),
        ("", set()),
        (" , ", set()),
        ([""], set()),
        (5.0, set()),
        ({"a": "b"}, set()),
    ],
)
def test_every_encoding_seen_in_the_field_is_read_and_a_present_hint_never_widens(
    value: object, expected: set[str]
) -> None:
    assert parse_subset(value) == expected
