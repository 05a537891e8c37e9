"""What counts as a document, and where its values are."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import document
from extproc.config.document import Diagnostics, parse, path_text, shown
from extproc.errors import ConfigError


def value_of(text: str | bytes) -> Any:
    read = parse(text, source="f")
    read.diagnostics.raise_if_any("f")
    return read.value


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        value_of(text)
    return [str(problem) for problem in caught.value.problems]


def test_scalars_by_yaml_1_2() -> None:
    text = "[1, -2, +3, 0, 1.5, .5, 2., 1e3, 1.5e-3, .inf, true, False, ~, null, , no, on, 010, 1_000, 1:30, 0x1f, 2026-11-21, '5', \"x\"]"
    assert value_of(text.replace(", ,", ", ")) == [
        1, -2, 3, 0, 1.5, 0.5, 2.0, 1000.0, 0.0015, float("inf"), True, False, None, None,
        "no", "on", "010", "1_000", "1:30", "0x1f", "2026-11-21", "5", "x",
    ]  # fmt: skip


def test_an_empty_text_is_none() -> None:
    assert value_of("") is None
    assert value_of("# nothing\n") is None


def test_bytes_with_a_byte_order_mark() -> None:
    assert value_of(b"\xef\xbb\xbfa: 1") == {"a": 1}


def test_bytes_that_are_not_utf_8() -> None:
    assert problems(b"a: \xff") == ["not UTF-8 text (at byte 3); save the file as UTF-8"]


def test_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_DOCUMENT_CHARACTERS", 10)
    assert "the limit is 10" in problems("a" * 11)[0]


def test_json_with_tabs_and_escapes() -> None:
    found = {"a": ["\t x", "é", "\U0001f600"], "b": {"c": 1e-7, "d": None}}
    assert value_of(json.dumps(found, indent="\t")) == found


def test_a_lone_surrogate_is_replaced() -> None:
    assert value_of(r'{"a": "x\ud83dy"}') == {"a": "x\ufffdy"}


def test_yaml_with_tabs_that_is_no_json_is_refused() -> None:
    assert "line 2: not readable as YAML" in problems("{a: 1,\n\tb: [}")[0]
    assert "nested too deeply" in problems("[" * 5000 + "\t")[0]


def test_syntax_errors_name_the_line() -> None:
    assert problems("a: 1\nb: [1\nc: 2\n")[0].startswith("line 3: not readable as YAML: ")


def test_characters_yaml_does_not_allow() -> None:
    assert "not readable as YAML" in problems("a: \x00")[0]


def test_an_escape_beyond_unicode() -> None:
    assert "not readable as YAML" in problems('"\\UFFFFFFFF"')[0]


def test_several_documents() -> None:
    assert "not readable as YAML" in problems("a: 1\n---\nb: 2\n")[0]


def test_deep_nesting() -> None:
    assert problems("[" * 3000 + "]" * 3000) == ["line 1: not readable as YAML: nested too deeply"]
    assert "nested too deeply" in problems("".join(" " * n + "a:\n" for n in range(100)))[0]
    assert "nested too deeply" in problems("- " * 100)[0]


def test_duplicate_keys_name_both_lines() -> None:
    assert problems("a: 1\nb:\n  c: 1\n  c: 2\n") == ["line 4: b.c: duplicate key, first on line 3; remove one of them"]


def test_a_mapping_as_a_key() -> None:
    assert problems("? {a: 1}\n: 2\n") == ["line 1: a list or mapping is used as a key; write the key as plain text"]


def test_merge_keys_are_refused() -> None:
    assert problems("a: &x {b: 1}\nc:\n  <<: *x\n") == [
        "line 3: c: merge keys (`<<`) are not supported; write out the keys"
    ]


def test_tags_are_refused() -> None:
    found = problems("a: !!python/object:os.system {}\nb: !x y\nc: !!set {q}\nd: !!omap []\n")
    assert [line[:9] for line in found] == ["line 1: a", "line 2: b", "line 3: c", "line 4: d"]
    assert all("is not supported; remove the tag" in line for line in found)


def test_explicit_tags_that_do_not_fit() -> None:
    assert problems("!!int abc") == ['line 1: the text "abc" cannot be read as int']
    assert problems("!!bool maybe") == ['line 1: the text "maybe" cannot be read as bool']
    assert len(problems("9" * 5000)) == 1


def test_aliases_are_built_once() -> None:
    text = "a: &a [x, x]\n" + "".join(f"b{i}: &b{i} [*b{i - 1}, *b{i - 1}]\n" for i in range(1, 40))
    assert len(value_of(text.replace("*b0", "*a"))["b39"]) == 2


def test_an_alias_to_itself() -> None:
    assert problems("a: &x [*x]") == ["line 1: a[0]: an alias contains itself; remove the alias"]


def test_numeric_keys_are_text() -> None:
    assert value_of("{1: a, true: b}") == {"1": "a", "true": "b"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing (null)"),
        (True, "true"),
        (False, "false"),
        (5, "the number 5"),
        (10**30, "the number 1e+30"),
        (0.25, "the number 0.25"),
        ("a", 'the text "a"'),
        ("x" * 100, 'the text "' + "x" * 60 + '..."'),
        ([1, 2], "a list of 2 items"),
        ([], "an empty list"),
        ({}, "a mapping"),
    ],
)
def test_shown(value: object, text: str) -> None:
    assert shown(value) == text


def test_path_text() -> None:
    assert path_text(()) == ""
    assert path_text(("pool", "endpoints", 2, "port")) == "pool.endpoints[2].port"


def test_findings_come_in_document_order() -> None:
    diagnostics = Diagnostics({(): (0, 0), ("a",): (3, 0), ("b",): (1, 0)})
    diagnostics.add(("a", "x"), "late")
    diagnostics.add(("b",), "early")
    assert diagnostics.touches(("a",))
    assert diagnostics.touches(("a", "x", "y"))
    assert not diagnostics.touches(("c",))
    with pytest.raises(ConfigError) as caught:
        diagnostics.raise_if_any("f")
    assert [(p.path, p.line) for p in caught.value.problems] == [("b", 2), ("a.x", 4)]


@given(st.text(alphabet=st.sampled_from("abc:{}[]-&*!<>|'\"#,?%@ \n\t\\019.~"), max_size=60) | st.text())
def test_any_text_gives_values_or_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        value_of(text)


@given(st.binary())
def test_any_bytes_give_values_or_config_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        value_of(data)


# YAML calls some characters unprintable and takes others for line ends; JSON does not.
PRINTABLE = st.text(st.characters(codec="utf-8", exclude_characters="".join(map(chr, range(0x7F, 0xA0))))).filter(
    lambda text: not set(text) & set("\u2028\u2029\ufeff\ufffe\uffff") and text != "<<"
)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
# YAML takes a key for one only if its colon comes within 1,024 characters (YAML 1.2.2, 7.4.2), 12 for an escaped pair here.
KEYS = PRINTABLE.filter(lambda text: len(text) < 80)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | PRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 2, "\t"]), st.booleans())
def test_json_is_read_as_json_reads_it(found: Any, indent: int | str | None, ascii_only: bool) -> None:
    text = json.dumps(found, indent=indent, ensure_ascii=ascii_only)
    assert value_of(text) == found
