"""Texts from anywhere become plain data or one clear error."""

import pytest

from coterie.engines.documents import parse_document
from coterie.errors import InfeasiblePlacement

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


def test_json_and_yaml_give_the_same() -> None:
    assert parse_document('{"a": [1, 2]}', "x") == parse_document("# c\na: [1, 2]\n", "x") == {"a": [1, 2]}
    assert parse_document(" \n[1]", "x") == [1]
    assert parse_document("3: [1]\n12: [2]", "x") == {3: [1], 12: [2]}
    assert parse_document("a:\n- b: 1\n  c: 1\n- b: 2\nc: 1", "x") == {"a": [{"b": 1, "c": 1}, {"b": 2}], "c": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [1,', "truncated or no JSON"),
        ("a: [1, 2", "truncated or no JSON or YAML"),
        ("a: 'open", "truncated or no JSON or YAML"),
        ("\ta: 1", "truncated or no JSON or YAML"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("!!python/object/new:os.system [echo]", "could not determine a constructor"),
        ("a: &x [1]\nb: *x", "anchors or aliases"),
        (BOMB, "anchors or aliases"),
        ("a: 1\n<<: *nowhere", "anchors or aliases|truncated"),
        ("1: [0]\n1: [1]", "the key '1' is written twice"),
        ("a: {b: 1, c: 2, b: 3}", "the key 'b' is written twice"),
        ("x: " + "[" * 20 + "]" * 20, "nests more than 8 levels"),
        ("x: " + "[" * 100_000, "nests more than 8 levels|maximum nesting depth"),
        ("{" * 100_000, "truncated or no JSON"),
        ("a: 2026-13-45", "month must be in"),
        ("? [1, 2]\n: 3", "unhashable|truncated"),
        ("--- 1\n--- 2\n", "single document"),
        ("a: \0", "special characters|unacceptable|control characters"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InfeasiblePlacement, match=message) as caught:
        parse_document(text, "m.yaml")
    assert str(caught.value).startswith("m.yaml is truncated or no JSON")
    assert "\n" not in str(caught.value)
