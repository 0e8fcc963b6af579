"""The traps of CEL and of its library, each in its place; and which conditions are translated."""

from pathlib import Path
from typing import Final

import pytest

from controlplane.domain.errors import ConfigurationError
from policies.attributes import INT_MAX, LIVE, STATIC, UNLIMITED, reference_page
from policies.facts import TEXT_CHARS_MAX, LiveFacts, StaticFacts, as_json, from_json, unclean
from policies.language import FUSED_MAX, Condition, Failure, Flaw, language, self_test
from policies.translate import parse

ROOT: Final = Path(__file__).parents[2]
USUAL: Final = as_json(*from_json({}))


def answer(text, **changes):
    condition = language().compile(text)
    assert isinstance(condition, Condition), condition
    facts = USUAL | {name.replace("__", "."): value for name, value in changes.items()}
    return language().evaluate(condition, facts)


# ---------------------------------------------------------------- errors are values

# A million rounds of a loop within a loop.
LONG_LOOP = (
    "".join(f"[1,2,3,4,5,6,7,8,9,10].all(v{n}, " for n in range(6)) + "request.n > 0" + ")" * 6
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("request.n / (request.n - 1) > 0", "divide by zero"),
        ("request.n % (request.n - 1) > 0", "modulus by zero"),
        ("request.n + 9223372036854775807 > 0", "overflow"),
        ("tenant.class.matches('(')", "regular expression"),
        # Raised by the library, where the others are returned.
        (LONG_LOOP, "budget"),
    ],
)
def test_an_error_is_returned_and_is_not_an_answer(text, word):
    failure = answer(text)
    assert isinstance(failure, Failure)
    assert word in failure.message


def test_a_loop_without_end_in_one_of_many_is_traced_to_it():
    loop, other = (language().compile(text) for text in (LONG_LOOP, "request.n == 1"))
    assert isinstance(loop, Condition)
    assert isinstance(other, Condition)
    answers = language().fuse([other, loop]).evaluate(USUAL)
    assert answers[0] is True
    assert isinstance(answers[1], Failure)


def test_an_error_beside_a_deciding_answer_does_not_count():
    assert answer("request.n / 0 > 1 || true") is True
    assert answer("request.n / 0 > 1 && false") is False
    assert isinstance(answer("request.n / 0 > 1 || false"), Failure)


def test_a_text_as_answer_of_an_error_is_not_taken_for_true():
    # The library's value of an error is a text, which Python takes for true.
    assert answer("tenant.class.matches('[')") is not True


def test_a_wrong_type_of_value_is_an_error():
    assert isinstance(answer("tenant.class == 'a'", tenant__class=5), Failure)
    assert isinstance(answer("request.n > 1", request__n=1.5), Failure)
    assert isinstance(answer("request.n > 1", request__n=INT_MAX + 1), Failure)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("text", ["a\0b", "a\nb", "\x7f", "\ud800", "x" * (TEXT_CHARS_MAX + 1)])
def test_text_that_would_be_misread_never_reaches_cel(text):
    assert unclean(text)
    assert isinstance(answer("tenant.class == 'a'", tenant__class=text), Failure)
    fused = language().fuse([language().compile("true")])
    assert isinstance(fused.evaluate(USUAL | {"tenant.class": text})[0], Failure)
    with pytest.raises(ValueError, match=r"`tenant\.class` holds control characters"):
        from_json({"tenant.class": text})


@pytest.mark.parametrize("text", ["", "acme", "é\U0001f600", "x" * TEXT_CHARS_MAX])
def test_plain_text_is_clean(text):
    assert not unclean(text)


@pytest.mark.parametrize("text", ["tenant.class == 'a\0b'", "tenant.class == '\ud800'"])
def test_a_condition_with_broken_text_is_refused(text):
    flaw = language().compile(text)
    assert isinstance(flaw, Flaw)
    assert "remove it" in flaw.message


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("request.n > 1.0", 1, 11, "`>` does not take (int, double)"),
        ("request.n == '1'", 1, 11, "does not take (int, string)"),
        ("request.n", 1, 1, "is of type int; compare it"),
        ("has(tenant.class)", 1, 1, "is of type string"),
        ("request.max_token > 1", 1, 8, "did you mean `request.max_tokens`?"),
        ("quota.left > 1", 1, 6, "`headway policy attributes` lists them"),
        ("request.n > 1 &&\n  request.n <", 2, 14, "mend the condition there"),
        ("9223372036854775808 > request.n", 1, 1, "invalid int literal"),
        ("(" * 40 + "true" + ")" * 40, 1, 1, "nested too deeply; split the rule"),
    ],
)
def test_a_flaw_names_its_place_and_a_remedy(text, line, column, words):
    flaw = language().compile(text)
    assert isinstance(flaw, Flaw)
    assert (flaw.line, flaw.column) == (line, column)
    assert words in flaw.message


# ---------------------------------------------------------------- many at once


def test_an_error_in_one_of_many_is_traced_to_it():
    texts = ["request.n == 1", "request.n / 0 > 1", "request.n == 2 // a remark", "true"]
    answers = language().fuse([language().compile(text) for text in texts]).evaluate(USUAL)
    assert isinstance(answers.pop(1), Failure)
    assert answers == [True, False, True]


def test_more_than_one_list_of_conditions():
    texts = [f"request.n == {number}" for number in range(FUSED_MAX * 2 + 1)]
    answers = language().fuse([language().compile(text) for text in texts]).evaluate(USUAL)
    assert [number for number, fired in enumerate(answers) if fired] == [1]


def test_a_condition_as_deep_as_can_be_is_evaluated_by_itself():
    deepest = max(
        ("(" * depth + "request.n == 1" + ")" * depth for depth in range(40)),
        key=lambda text: (isinstance(language().compile(text), Condition), len(text)),
    )
    fused = language().fuse([language().compile(deepest), language().compile("request.n == 2")])
    assert fused.chunks == (None,)
    assert fused.evaluate(USUAL) == [True, False]


# ---------------------------------------------------------------- the library has not changed


def test_the_library_is_the_one_that_rules_were_written_for():
    self_test()


@pytest.mark.parametrize(
    "golden",
    [
        ("n.i > 3", 3, "", False, True),
        ("n.i / 0 == 1", 1, "", False, False),
        ("n.i > 1.0", 3, "", False, True),
    ],
)
def test_another_answer_refuses_to_start(golden):
    # What a library with another behaviour looks like from here.
    with pytest.raises(ConfigurationError, match="install the pinned version of cel-expr-python"):
        self_test(golden=[golden])


def test_taking_what_was_refused_refuses_to_start():
    with pytest.raises(ConfigurationError, match=r"answers `n\.i > 1` otherwise"):
        self_test(refused=["n.i > 1"])


# ---------------------------------------------------------------- what is translated


@pytest.mark.parametrize(
    "text",
    [
        "request.n > 1 && !(pool.is_overloaded || workflow.exists)",
        "request.prompt_tokens + request.max_tokens * 2 - 1 > model.context_tokens_max // a remark",
        "tenant.class in ['gold', \"silver\"] && request.n in [1, -2]",
        "size(tenant.id) > 3 && tenant.id.size() < 9 && tenant.id.startsWith('a')",
        "tenant.id.endsWith('a') || tenant.id.contains('b')",
        "-request.n < -1 && request.n > -9223372036854775808",
        "!!!pool.is_overloaded",
        "!" * 400 + "pool.is_overloaded",
    ],
)
def test_the_subset_is_translated(text):
    assert isinstance(language().compile(text), Condition)
    assert parse(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "request.n / 2 > 1",
        "request.n % 2 == 1",
        "request.n > 1 ? true : false",
        "tenant.id.matches('a.*')",
        "tenant.id + 'x' == 'ax'",
        "[1, 2].exists(x, x == request.n)",
        "request.n in [1, request.prompt_tokens]",
        "tenant.id == 'a\\n'",
        "tenant.id == r'a'",
        "tenant.id == '''a'''",
        "request.n == 0x10",
        "double(request.n) > 1.5",
        "request . n > 1",
        "size([1, 2]) == request.n",
        "b'a' == b'a'",
        "1u < 2u",
    ],
)
def test_what_is_outside_of_the_subset_stays_in_cel(text):
    assert isinstance(language().compile(text), Condition)
    assert parse(text) is None


# ---------------------------------------------------------------- facts and the table


def test_facts_are_the_table():
    assert StaticFacts._fields == tuple(row.field for row in STATIC)
    assert LiveFacts._fields == tuple(row.field for row in LIVE)
    static, live = from_json({})
    assert as_json(static, live) == {row.name: row.usual for row in (*STATIC, *LIVE)}


def test_usual_values_are_within_their_ranges():
    for row in (*STATIC, *LIVE):
        assert row.sentence.endswith(".")
        if isinstance(row.usual, int) and row.usual != UNLIMITED:
            assert row.lowest <= row.usual <= max(1, row.highest)
        if row.is_closed:
            assert row.usual in row.words


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"request.max": 1}, "`request.max` does not exist"),
        ({"request.n": "1"}, "`request.n` is of type int"),
        ({"request.n": True}, "`request.n` is of type int"),
        ({"request.n": 2**63}, "does not fit in 64 bits"),
        ({"tenant.class": 1}, "`tenant.class` is of type string"),
        ({"pool.is_overloaded": 1}, "`pool.is_overloaded` is of type bool"),
    ],
)
def test_wrong_facts_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        from_json(values)


def test_the_reference_page_is_current():
    page = ROOT / "docs" / "reference" / "policy-attributes.md"
    assert page.read_text(encoding="utf-8") == reference_page(), (
        "write it again with `headway policy attributes --markdown > docs/reference/policy-attributes.md`"
    )
