"""Rules keep their promises: the translation is CEL, refusals are monotone, deny is final, order is nothing."""

import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product

import cel as second_cel
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.attributes import ATTRIBUTES, BY_NAME, INT_MAX, INT_MIN, Kind
from policies.compiled import PhaseRules, compiled_of
from policies.documents import Phase, Rules
from policies.evaluate import NEUTRAL, Defer, compile_policy
from policies.facts import as_json, from_json
from policies.language import Condition, Failure, language
from policies.load import bundle_of, files_of, load_bundle
from policies.translate import (
    Among,
    Arithmetic,
    Both,
    Call,
    Compare,
    Literal,
    Negative,
    Not,
    Overflow,
    Read,
    as_cel,
    function_of,
    parse,
    reads,
)

SHIPPED = compile_policy(load_bundle(None))

# ---------------------------------------------------------------- made-up conditions and facts

INTS = ("request.max_tokens", "request.n", "tenant.priority", "workflow.step")
TEXTS = ("tenant.class", "model.name", "region.home")
FLAGS = ("pool.is_overloaded", "workflow.exists")
# Small numbers meet each other; the ends of 64 bits overflow.
NUMBERS = st.integers(-3, 3) | st.sampled_from((INT_MIN, INT_MIN + 1, INT_MAX - 1, INT_MAX))
WORDS = st.sampled_from(("", "a", "b", "ab", "é", "'", "\U0001f600", "￿"))


SIGNS = ("==", "!=", "<", "<=", ">", ">=")
METHODS = ("startsWith", "endsWith", "contains")


def numbers(depth=2):
    leaf = st.builds(Literal, NUMBERS) | st.sampled_from(INTS).map(Read)
    if depth == 0:
        return leaf
    deeper = numbers(depth - 1)
    return (
        leaf
        | st.builds(Arithmetic, st.sampled_from("+-*"), deeper, deeper)
        | st.builds(Negative, st.sampled_from(INTS).map(Read))
        | st.builds(lambda of: Call("size", of, None), texts())
    )


def texts():
    return st.builds(Literal, WORDS) | st.sampled_from(TEXTS).map(Read)


def conditions(depth=2):
    sign = st.sampled_from(SIGNS)
    leaf = (
        st.builds(Compare, sign, numbers(), numbers())
        | st.builds(Compare, sign, texts(), texts())
        | st.builds(Among, numbers(1), st.lists(NUMBERS, max_size=3).map(tuple))
        | st.builds(Among, texts(), st.lists(WORDS, max_size=3).map(tuple))
        | st.builds(Call, st.sampled_from(METHODS), texts(), texts())
        | st.sampled_from(FLAGS).map(Read)
        | st.booleans().map(Literal)
    )
    if depth == 0:
        return leaf
    deeper = conditions(depth - 1)
    return (
        leaf
        | st.builds(Not, deeper)
        | st.builds(
            Both, st.sampled_from(("&&", "||")), st.lists(deeper, min_size=2, max_size=3).map(tuple)
        )
    )


def facts():
    return st.fixed_dictionaries(
        dict.fromkeys(INTS, NUMBERS)
        | dict.fromkeys(TEXTS, WORDS)
        | dict.fromkeys(FLAGS, st.booleans())
    ).map(from_json)


class Error(Exception):
    """The oracle's word for an evaluation that fails."""


def truth(node, known):
    """An interpreter of its own: CEL's meaning of a tree, errors beside `&&` and `||` included."""
    match node:
        case Literal(value):
            return value
        case Read(name):
            return known[name]
        case Not(of):
            return not truth(of, known)
        case Negative(of):
            return in_64_bits(-truth(of, known))
        case Arithmetic(operator, left, right):
            one, other = truth(left, known), truth(right, known)
            return in_64_bits({"+": one + other, "-": one - other, "*": one * other}[operator])
        case Compare(operator, left, right):
            one, other = truth(left, known), truth(right, known)
            return {
                "==": one == other, "!=": one != other, "<": one < other,
                "<=": one <= other, ">": one > other, ">=": one >= other,
            }[operator]  # fmt: skip
        case Among(of, values):
            return truth(of, known) in values
        case Call("size", of, None):
            return len(truth(of, known))
        case Call(method, of, argument):
            one, other = truth(of, known), truth(argument, known)
            return {
                "startsWith": one[: len(other)] == other,
                "endsWith": one[len(one) - len(other) :] == other and len(other) <= len(one),
                "contains": other in one,
            }[method]
        case Both(operator, parts):
            decides = operator == "||"
            answers = [attempt(part, known) for part in parts]
            if decides in answers:
                return decides
            if None in answers:
                raise Error
            return not decides
    raise AssertionError(node)


def attempt(node, known):
    try:
        return truth(node, known)
    except Error:
        return None


def in_64_bits(value):
    if not -(2**63) <= value < 2**63:
        raise Error
    return value


def document(name, rules, level="enforce"):
    return Rules.model_validate_json(
        json.dumps({"kind": "rules", "version": 1, "name": name, "level": level, "rules": rules}),
        strict=True,
    )


TESTS = [{"name": "a", "fires": True}, {"name": "b", "fires": False}]


def rule(name, when, **effects):
    return {"name": name, "phase": "admit", "when": when, "message": "m", "tests": TESTS} | (
        effects or {"deny": True}
    )


# ---------------------------------------------------------------- the translation is CEL


@given(conditions(), facts())
def test_a_translated_condition_is_the_condition(tree, known):
    text = as_cel(tree)
    condition = language().compile(text)
    assert isinstance(condition, Condition), text
    expected = attempt(tree, as_json(*known))

    by_cel = language().evaluate(condition, as_json(*known))
    assert (None if isinstance(by_cel, Failure) else by_cel) == expected

    again = parse(text)
    assert again is not None
    assert reads(again) == reads(tree)
    try:
        translated = function_of([(1, (again,))])(*known) == 1
    except Overflow:
        return
    assert translated is expected


def test_every_method_and_comparison_of_text_is_translated():
    words = ("", "a", "b", "ab", "ba", "é", "\U0001f600", "\uffff")
    static, live = from_json({})
    for one, other in product(words, repeat=2):
        trees = [
            *(Call(name, Read("tenant.id"), Literal(other)) for name in METHODS),
            *(Compare(sign, Read("tenant.id"), Literal(other)) for sign in SIGNS),
        ]
        known = static._replace(tenant_id=one), live
        for tree in trees:
            expected = truth(tree, as_json(*known))
            assert function_of([(1, (tree,))])(*known) == expected, (tree, one)
            condition = language().compile(as_cel(tree))
            assert language().evaluate(condition, as_json(*known)) is expected


def test_every_comparison_and_sum_of_numbers_is_translated():
    numbers_tried = (INT_MIN, -1, 0, 1, 2, INT_MAX)
    static, live = from_json({})
    for one, other, operator in product(numbers_tried, numbers_tried, "+-*"):
        total = Arithmetic(operator, Read("request.n"), Literal(other))
        known = static, live._replace(request_n=one)
        for sign in SIGNS:
            tree = Compare(sign, total, Literal(0))
            expected = attempt(tree, as_json(*known))
            try:
                assert function_of([(1, (tree,))])(*known) == expected, (tree, one)
            except Overflow:
                assert expected is None


@given(st.lists(conditions(), min_size=1, max_size=6), st.lists(facts(), min_size=1, max_size=4))
def test_rules_split_into_static_and_live_fire_as_the_whole(trees, moments):
    texts = [rule(f"r{number}", as_cel(tree)) for number, tree in enumerate(trees)]
    rules = PhaseRules(compiled_of([document("d", texts)]))
    for known in moments:
        expected = [attempt(tree, as_json(*known)) for tree in trees]
        fired, erred = rules.fired(rules.part(known[0]), known[1])
        assert [bool(fired >> number & 1) for number in range(len(trees))] == [
            answer is True for answer in expected
        ]
        assert [bool(erred >> number & 1) for number in range(len(trees))] == [
            answer is None for answer in expected
        ]
        assert rules.oracle(*known) == (fired, erred)


@given(conditions(), facts())
def test_a_second_cel_agrees_where_nothing_overflows(tree, known):
    values = as_json(*known)
    expected = attempt(tree, values)
    assume(expected is not None and not has_error(tree, values))
    nested = {}
    for name, value in values.items():
        group, field = name.split(".")
        nested.setdefault(group, {})[field] = value
    assert second_cel.evaluate(as_cel(tree), nested) is expected


def has_error(tree, values):
    """An error anywhere, which the second CEL may treat otherwise where it does not count."""
    from policies.translate import walk

    return any(attempt(node, values) is None for node in walk(tree))


# ---------------------------------------------------------------- the shipped bundle is monotone

CLASSES = (("bronze", 2), ("silver", 5), ("gold", 9))


def near_edges():
    """Facts of calls around the edges of the shipped rules."""
    values = {
        "pool.is_overloaded": st.booleans(),
        "pool.queue_wait_ms": st.sampled_from((0, 15_000, 15_001, 45_000, 45_001, 90_000)),
        "workflow.step": st.integers(0, 2),
        "workflow.exists": st.booleans(),
        "workflow.steps_expected": st.integers(0, 1),
        "tenant.slo_class": st.sampled_from(("interactive", "standard", "batch")),
        "request.priority_hint": st.integers(-3, 1),
        "request.max_tokens": st.integers(1, 20_000),
        "request.prompt_tokens": st.integers(1, 20_000),
        "model.name": st.sampled_from(("llama-3.3-70b", "llama-3.1-8b")),
    }
    return st.fixed_dictionaries(values)


def refuses(values):
    static, live = from_json(values)
    rulings = [
        SHIPPED.rule(phase, SHIPPED.static_part(static), live)
        for phase in (Phase.ADMIT, Phase.STEP, Phase.DISPATCH)
    ]
    return any(ruling.denied_by or ruling.shed_by for ruling in rulings)


@given(near_edges())
def test_raising_the_class_never_turns_allow_into_deny(values):
    answers = [
        refuses(values | {"tenant.class": name, "tenant.priority": priority})
        for name, priority in CLASSES
    ]
    assert all(lower or not higher for lower, higher in pairwise(answers))


@given(near_edges(), st.sampled_from(CLASSES), st.integers(1, 20_000))
def test_asking_for_fewer_tokens_never_turns_allow_into_deny(values, who, fewer):
    assume(fewer < values["request.max_tokens"])
    caller = values | {"tenant.class": who[0], "tenant.priority": who[1]}
    assert refuses(caller) or not refuses(caller | {"request.max_tokens": fewer})


@given(near_edges(), st.sampled_from(CLASSES))
def test_a_step_of_a_begun_workflow_is_never_shed(values, who):
    values |= {"tenant.priority": who[1], "workflow.exists": True}
    assume(values["workflow.step"] > 0)
    static, live = from_json(values)
    assert not SHIPPED.rule(Phase.ADMIT, SHIPPED.static_part(static), live).shed_by


# ---------------------------------------------------------------- what many rules come to

EFFECTS = st.fixed_dictionaries(
    {},
    optional={
        "deny": st.just(value=True),
        "shed": st.builds(lambda ms: {"retry_after_ms": ms}, st.integers(1, 3)),
        "queue_class": st.sampled_from(("interactive", "standard", "batch")),
        "clamp": st.sampled_from(
            ({"max_tokens": 1}, {"max_tokens": 2}, {"n": 1}, {"n": 2, "max_tokens": 3})
        ),
        "priority": st.integers(0, 3),
        "reserve_permille": st.integers(1, 3),
        "defer": st.sampled_from(
            (
                {"until": {"hours": [22, 6]}},
                {"until": {"weekdays": [5, 6]}},
                {"until": "idle", "max_wait_s": 5},
                {"until": "idle", "max_wait_s": 7},
            )
        ),
        "warn": st.sampled_from(("w1", "w2")),
        "annotate": st.sampled_from(({"k": "1"}, {"k": "2"}, {"l": "3"})),
    },
).filter(bool)

LEVELS = st.sampled_from(("enforce", "enforce", "enforce", "warn", "audit", "off"))


def bundle_with(*documents):
    kept = {name: text for name, text in files_of(None).items() if "kind: rules" not in text}
    for number, text in enumerate(documents):
        kept[f"rules-{number}.yaml"] = json.dumps(text)
    return kept


def rules_text(name, level, rules):
    return {"kind": "rules", "version": 1, "name": name, "level": level, "rules": rules}


def ruling_of(policy, values):
    static, live = from_json(values)
    return policy.rule(Phase.ADMIT, policy.static_part(static), live)


def compiled(*documents):
    """A policy of documents whose bundle was not tried out: quick."""
    from dataclasses import replace

    return compile_policy(
        replace(
            SHIPPED.bundle,
            rules=tuple(
                sorted(
                    (document(text["name"], text["rules"], text["level"]) for text in documents),
                    key=lambda made: made.name,
                )
            ),
        )
    )


# Conditions over the number of answers, so that any set of rules can fire.
WHEN = st.integers(0, 3).map(lambda number: f"request.n >= {number}")


@st.composite
def documents_of_rules(draw):
    made = []
    for number in range(draw(st.integers(2, 3))):
        rules = [
            rule(f"r{index}", draw(WHEN)) | {"deny": None} | draw(EFFECTS)
            for index in range(draw(st.integers(2, 3)))
        ]
        made.append(rules_text(f"d{number}", draw(LEVELS), rules))
    return made


@given(documents_of_rules(), st.integers(1, 3))
def test_deny_can_not_be_overridden(documents, asked):
    guard = rules_text("m", "enforce", [rule("guard", "request.n >= 1")])
    ruling = ruling_of(compiled(*documents, guard), {"request.n": asked})
    assert ruling.denied_by
    assert not ruling.is_error
    assert "m/guard" in ruling.fired


@given(documents_of_rules(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_order_of_rules_and_documents_is_nothing(documents, asked, shuffler):
    before = ruling_of(compiled(*documents), {"request.n": asked})
    shuffled = [
        dict(text, rules=shuffler.sample(text["rules"], len(text["rules"]))) for text in documents
    ]
    shuffler.shuffle(shuffled)
    assert ruling_of(compiled(*shuffled), {"request.n": asked}) == before


@settings(max_examples=200)
@given(documents_of_rules(), st.integers(1, 3))
def test_a_ruling_is_the_strictest_of_what_fired(documents, asked):
    ruling = ruling_of(compiled(*documents), {"request.n": asked})
    fired = {
        level: [
            (f"{text['name']}/{one['name']}", one)
            for text in documents
            if text["level"] == level
            for one in text["rules"]
            if asked >= int(one["when"].split()[-1])
        ]
        for level in ("enforce", "warn", "audit")
    }
    enforced = fired["enforce"]

    def given_for(effect):
        return [one[effect] for _, one in enforced if one.get(effect) is not None]

    def first_with(effect):
        return min((name for name, one in enforced if one.get(effect)), default="")

    def least(values):
        return min((value for value in values if value is not None), default=None)

    assert ruling.denied_by == first_with("deny")
    assert ruling.shed_by == first_with("shed")
    assert ruling.defer_by == first_with("defer")
    assert (ruling.defer is not None) == bool(ruling.defer_by)
    assert ruling.retry_after_ms == max((s["retry_after_ms"] for s in given_for("shed")), default=0)
    assert ruling.completion_tokens_max == least(c.get("max_tokens") for c in given_for("clamp"))
    assert ruling.n_max == least(c.get("n") for c in given_for("clamp"))
    assert ruling.priority == least(given_for("priority"))
    assert ruling.reserve_permille == max(given_for("reserve_permille"), default=None)
    weight = {"batch": 0, "standard": 1, "interactive": 2}
    assert ruling.queue_class == min(given_for("queue_class"), key=weight.get, default=None)
    if ruling.defer is not None:
        idle = [d["max_wait_s"] for d in given_for("defer") if d["until"] == "idle"]
        assert ruling.defer.waits_for_idle == bool(idle)
        assert ruling.defer.wait_s_max == least(idle)
    assert set(ruling.fired) == {name for name, _ in (*enforced, *fired["warn"])}
    assert set(ruling.audited) == {name for name, _ in fired["audit"]}
    if not any(fired.values()):
        assert ruling is NEUTRAL


@given(near_edges(), st.sampled_from(CLASSES))
def test_the_same_digest_and_input_give_the_same_output(values, who):
    other = OTHER_SHIPPED
    assert other.revision == SHIPPED.revision
    values |= {"tenant.class": who[0], "tenant.priority": who[1]}
    assert ruling_of(other, values) == ruling_of(SHIPPED, values) == ruling_of(SHIPPED, values)
    assert SHIPPED.disagreements == other.disagreements == 0


# The same documents in other files, with remarks.
OTHER_SHIPPED = compile_policy(
    bundle_of(
        {f"z-{name}": f"# a remark\n{text}" for name, text in reversed(files_of(None).items())}
    )
)


# ---------------------------------------------------------------- contradictions

REGIONS = ("eu", "us", "ap")
SOME = st.lists(st.sampled_from(("gold", "silver", "bronze")), min_size=1, max_size=2, unique=True)


@st.composite
def routes(draw):
    classes = draw(st.none() | SOME)
    streams = draw(st.sampled_from(("", "request.is_stream", "!request.is_stream")))
    among = "" if classes is None else f"tenant.class in {json.dumps(classes)}"
    when = " && ".join(part for part in (among, streams) if part) or "true"
    return when, draw(st.lists(st.sampled_from(REGIONS), min_size=1, max_size=2, unique=True))


@given(st.lists(routes(), min_size=2, max_size=4))
def test_routes_that_load_leave_a_region_to_every_call(made):
    rules = [
        rule(f"r{number}", when) | {"deny": None, "route": {"regions": regions}}
        for number, (when, regions) in enumerate(made)
    ]
    conflict = any(
        not left
        for name, is_stream in product(("gold", "silver", "bronze", "x"), (False, True))
        if (left := regions_left(made, name, is_stream)) is not None
    )
    from policies.contradictions import contradictions

    found = list(contradictions(compiled_of([document("d", rules)])))
    # Constants tell all there is to these conditions.
    assert bool(found) == conflict


def regions_left(made, tenant_class, is_stream):
    left = None
    for when, regions in made:
        known = as_json(*from_json({"tenant.class": tenant_class, "request.is_stream": is_stream}))
        tree = parse(when)
        assert tree is not None
        if truth(tree, known):
            left = set(regions) if left is None else left & set(regions)
    return left


# ---------------------------------------------------------------- windows, advice, records


@given(
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)),  # noqa: DTZ001
    st.sets(st.integers(0, 23), min_size=1),
    st.sets(st.integers(0, 6), min_size=1),
)
def test_a_window_opens_at_the_first_instant_that_is_in_it(now, hours, weekdays):
    now = now.replace(tzinfo=UTC, microsecond=now.microsecond // 1000 * 1000)
    defer = Defer(
        hours=tuple(hours), weekdays=tuple(weekdays), waits_for_idle=False, wait_s_max=None
    )
    wait_ms = defer.opens_in_ms(round(now.timestamp() * 1000))

    def is_open(instant):
        return instant.hour in hours and instant.weekday() in weekdays

    assert is_open(now + timedelta(milliseconds=wait_ms))
    step = now
    while step < now + timedelta(milliseconds=wait_ms):
        assert not is_open(step)
        step = step.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)


SMALL = st.integers(0, 4).map(Literal) | st.sampled_from(INTS).map(Read)
SUMS = SMALL | st.builds(Arithmetic, st.sampled_from("+-"), SMALL, SMALL)
PLAIN = (
    st.builds(Compare, st.sampled_from(SIGNS), SUMS, SUMS)
    | st.builds(Among, SMALL, st.lists(st.integers(0, 4), max_size=3).map(tuple))
    | st.builds(Compare, st.sampled_from(("==", "!=")), texts(), texts())
    | st.sampled_from(FLAGS).map(Read)
)
PLAINS = PLAIN | st.builds(
    Both, st.sampled_from(("&&", "||")), st.lists(PLAIN, min_size=2, max_size=3).map(tuple)
)


@given(
    PLAINS,
    st.fixed_dictionaries(
        dict.fromkeys(INTS, st.integers(1, 5))
        | dict.fromkeys(TEXTS, WORDS)
        | dict.fromkeys(FLAGS, st.booleans())
    ),
)
def test_advice_is_true(tree, known):
    """What is told to be the nearest passing value passes, and none nearer does."""
    from policies.nearest import nearest_pass

    values = as_json(*from_json(known))
    if attempt(tree, values) is False:
        tree = Not(tree)
    condition = language().compile(as_cel(tree))
    advice = nearest_pass(condition, tree, values)
    if not advice:
        return
    name, sign, told = advice.split(" ", 2)
    value = json.loads(told)
    if sign == "!=":
        assert attempt(tree, values | {name: "another-one"}) is False
        return
    assert attempt(tree, values | {name: value}) is False
    row = BY_NAME[name]
    if row.kind is Kind.INT:
        nearer = abs(value - values[name]) - 1
        for other in range(max(row.lowest, values[name] - nearer), values[name] + nearer + 1):
            assert attempt(tree, values | {name: other}) is True
        if sign != "==":
            # The words promise all of it; beyond 20 no condition of these turns any more.
            promised = range(row.lowest, value + 1) if sign == "<=" else range(value, 20)
            for other in promised:
                assert attempt(tree, values | {name: other}) is False


def any_value(row):
    match row.kind:
        case Kind.INT:
            return st.integers(INT_MIN, INT_MAX)
        case Kind.BOOL:
            return st.booleans()
        case Kind.STRING:
            return st.text(
                st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), max_size=9
            )


@given(st.fixed_dictionaries({row.name: any_value(row) for row in ATTRIBUTES}))
def test_facts_survive_being_recorded(values):
    static, live = from_json(json.loads(json.dumps(values)))
    assert as_json(static, live) == values
    assert from_json(as_json(static, live)) == (static, live)
