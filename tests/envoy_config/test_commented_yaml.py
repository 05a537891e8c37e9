"""Comments stand above their place, and the document survives them."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.envoy_config.commented_yaml import dump

DOCUMENT = {
    "clusters": [{"name": "a", "timeout": "5s", "ports": [1, 2]}, {"name": "b", "timeout": "6s", "empty": {}}],
    "code": "one\n  two\n",
    "on": True,
}


def test_comments_stand_above_their_place() -> None:
    comments = {"clusters/a/timeout": "quick", "clusters/b": "the second", "ports/1": "a port", "on": "two\n  lines"}
    assert dump(DOCUMENT, comments, head="Head.\n\nMore.") == (
        "# Head.\n#\n# More.\n"
        "clusters:\n"
        "- name: a\n"
        "  # quick\n"
        "  timeout: 5s\n"
        "  ports:\n"
        "  - 1\n"
        "  # a port\n"
        "  - 2\n"
        "# the second\n"
        "- name: b\n"
        "  timeout: 6s\n"
        "  empty: {}\n"
        "code: |\n"
        "  one\n"
        "    two\n"
        "# two\n"
        "#  lines\n"
        "'on': true\n"
    )


def test_comment_on_the_first_key_of_an_element_goes_above_its_dash() -> None:
    assert dump({"a": [{"b": 1, "c": 2}]}, {"a/0/b": "why"}) == "a:\n# why\n- b: 1\n  c: 2\n"


def test_long_comments_are_wrapped() -> None:
    lines = dump({"a": 1}, {"a": "word " * 100}).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(("place", "count"), [("clusters/c", 0), ("timeout", 2)])
def test_a_comment_needs_exactly_one_place(place: str, count: int) -> None:
    with pytest.raises(LookupError, match=f"'{place}': {count} places instead of one"):
        dump(DOCUMENT, {place: "?"})


SCALARS = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))


@settings(deadline=None)  # a first example pays for imports
@given(
    st.dictionaries(
        st.text("abc:#-", min_size=1),
        st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text("xyz "), x), max_leaves=20),
    )
)
def test_any_document_is_read_back_as_it_was(document: dict[str, object]) -> None:
    assert (yaml.safe_load(dump(document, {})) or {}) == document
