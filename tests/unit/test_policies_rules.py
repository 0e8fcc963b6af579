"""Documents of rules: every way in which they can be wrong, what they come to, and how that is explained."""

import json
from dataclasses import replace

import pytest

from controlplane.domain.errors import ConfigurationError
from policies.cases import CaseFailure, mutants, mutation_score, run_cases
from policies.compiled import VARIANTS_MAX, PhaseRules, compile_rule, compiled_of
from policies.contradictions import SETS_MAX
from policies.documents import EFFECTS_BY_PHASE, RULES_MAX, Phase, Rules
from policies.evaluate import (
    NEUTRAL,
    NO_COMMON_PLACE,
    RECHECK_EVERY,
    RULINGS_KEPT,
    UNCLEAN_FACTS,
    Defer,
    compile_policy,
)
from policies.facts import from_json
from policies.generate import CALLERS, INPUTS, inputs
from policies.load import bundle_of, files_of, load_bundle

HEAD = "kind: rules\nversion: 1\nname: limits\nlevel: enforce\nrules:\n"
CASES = "    tests: [{name: a, fires: true}, {name: b, fires: false}]\n"


def text_of(when, effect="deny: true", name="big", phase="admit"):
    return f"  - name: {name}\n    phase: {phase}\n    when: {when}\n    {effect}\n    message: refused\n{CASES}"


def files_with(*documents):
    """The shipped bundle with other rules."""
    kept = {name: text for name, text in files_of(None).items() if "kind: rules" not in text}
    return kept | {f"rules-{number}.yaml": text for number, text in enumerate(documents)}


def policy_of(*documents):
    return compile_policy(bundle_of(files_with(*documents)))


def ruling(policy, phase=Phase.ADMIT, **given):
    static, live = from_json({name.replace("__", "."): value for name, value in given.items()})
    return policy.rule(phase, policy.static_part(static), live)


def refused(*documents):
    with pytest.raises(ConfigurationError) as raised:
        bundle_of(files_with(*documents), where="policies")
    return str(raised.value)


# ---------------------------------------------------------------- loading


def test_a_bundle_of_texts_is_the_bundle_of_its_folder():
    files = files_of(None)
    bundle = bundle_of(files)
    assert bundle == load_bundle(None)
    assert bundle.files == files
    assert [document.name for document in bundle.rules] == sorted(
        document.name for document in bundle.rules
    )


def test_rules_are_part_of_the_revision():
    one = bundle_of(files_with(HEAD + text_of("request.n > 1")))
    other = bundle_of(files_with(HEAD + text_of("request.n > 2")))
    more = HEAD.replace("limits", "more") + text_of("true")
    moved = bundle_of(files_with("# a remark\n" + HEAD + text_of("request.n > 1"), more))
    assert len({one.revision, other.revision, moved.revision}) == 3
    renamed = {"other.yaml" if "rules-" in name else name: text for name, text in one.files.items()}
    assert bundle_of(renamed).revision == one.revision


@pytest.mark.parametrize(
    ("when", "place", "words"),
    [
        ("request.max_token > 5", "8:18", "column 8: the attribute `request.max_token` does not exist"),
        ('"request.max_token > 5"', "8:19", "did you mean `request.max_tokens`?"),
        ("|\n      request.n > 1 &&\n        request.m > 5", "10:16", "line 2, column 10: the attribute"),
        (">-\n      request.n > 1 &&\n      request.m > 5", "8:11", "column 25: the attribute"),
        ("request.n > 1.0", "8:21", "`>` does not take (int, double)"),
        ("request.n", "8:11", "is of type int; compare it"),
        ("request.n > 5 &&", "8:27", "mend the condition there"),
    ],
)  # fmt: skip
def test_a_wrong_condition_names_file_rule_line_column_and_remedy(when, place, words):
    message = refused(HEAD + text_of(when))
    assert message.startswith(f"policies/rules-0.yaml:{place}: rule `limits/big`: `when`, ")
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + text_of("true", "denny: true"), "`rules.0.denny`: is not a known key"),
        (HEAD + text_of("true", "annotate: {}"), "annotate"),
        (HEAD + text_of("true", "priority: null"), "has no effect; give one of deny, shed"),
        (HEAD + text_of("true", "clamp: {}"), "bounds nothing; give max_tokens or n"),
        (HEAD + text_of("true", "route: {}"), "goes nowhere; give regions, gpu_types or model"),
        (HEAD + text_of("true", "route: {model: 'a*'}"), "a route names one model"),
        (HEAD + text_of("true", "defer: {until: idle}"), "max_wait_s belongs to `until: idle`"),
        (HEAD + text_of("true", "defer: {until: {hours: [5, 5]}}"), "the window has no hours"),
        (HEAD + text_of("true", 'warn: "a\\nb"'), "should match pattern"),
        (HEAD + text_of("true", "queue_class: fast"), "queue class `fast` does not exist; use one of `interactive`"),
        (HEAD + text_of("true", "shed: {retry_after_ms: 5}"), "could refuse a later step of a workflow"),
        (HEAD + text_of("true", "priority: 1", phase="stream"), "can not be done at phase stream; use deny"),
        (HEAD + text_of("true", phase="late"), "`rules.0.phase`"),
        (HEAD + text_of("!request.is_stream"), "put the value in quotes"),
        (HEAD + text_of("true") + text_of("true"), "the rule name `big` is used twice"),
        (HEAD + text_of("true").replace("fires: false", "fires: true"), "add the other"),
        (HEAD + text_of("true").replace("name: b", "name: a"), "the test name `a` is used twice"),
        (HEAD + text_of("true").replace("name: a,", "name: a, given: {request.m: 1},"), "`request.m` does not exist"),
        (HEAD + text_of("true").replace("name: a,", "name: a, given: {request.n: x},"), "is of type int"),
        (HEAD + text_of("'" + "true||" * 700 + "true'"), "`when` is over 4,096 bytes; split the rule"),
        (HEAD + text_of("request.n / (request.n - 1) > 1"), "divide by zero) with request.n = 1"),
        (HEAD + text_of('tenant.id.matches("(")'), "invalid regular expression"),
        (HEAD + text_of("request.cost_micro_usd * workflow.spent_micro_usd > 1"), "integer overflow"),
        (HEAD.replace("enforce", "deny") + text_of("true"), "`level`"),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_refused_with_a_remedy(text, words):
    message = refused(text)
    assert message.startswith("policies/rules-0.yaml:")
    assert words in message


def test_two_documents_of_rules_need_two_names():
    message = refused(HEAD + text_of("true"), HEAD + text_of("false"))
    assert (
        "rules named `limits` are in rules-0.yaml already; give one of them another name" in message
    )


def test_too_many_rules_are_refused():
    many = "".join(text_of("true", name=f"r{number}") for number in range(RULES_MAX // 2 + 1))
    message = refused(HEAD + many, HEAD.replace("limits", "more") + many)
    assert "514 rules are over the limit of 512; merge some" in message


def test_a_condition_outside_of_the_subset_is_told_as_a_price():
    report = bundle_of(files_with(HEAD + text_of('tenant.id.matches("^a")'))).report
    assert (report.rules, report.inputs) == (1, INPUTS)
    assert len(report.notes) == 1
    assert report.notes[0].startswith(
        "rules-0.yaml:8:11: rule `limits/big`: the condition is outside"
    )
    assert "30 us" in report.notes[0]
    assert bundle_of(files_with(HEAD + text_of("true"))).report.notes == ()


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("tenant.priority >= 3", "refuses a higher priority where it lets a lower one pass"),
        ("request.max_tokens < 100", "refuses fewer tokens where it lets more of them pass"),
    ],
)
def test_a_rule_that_is_the_wrong_way_round_is_told(when, words):
    assert words in bundle_of(files_with(HEAD + text_of(when))).report.notes[0]


@pytest.mark.parametrize(
    "when",
    ["tenant.priority <= 3", "request.max_tokens > 100 && tenant.priority < 5", "request.n > 2"],
)
def test_a_rule_that_is_the_right_way_round_is_not(when):
    assert bundle_of(files_with(HEAD + text_of(when))).report.notes == ()


# ---------------------------------------------------------------- contradictions


def routes(first, second, one="regions: [eu]", other="regions: [us]"):
    return (
        HEAD
        + text_of(first, f"route: {{{one}}}", name="a")
        + text_of(second, f"route: {{{other}}}", name="b")
    )


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ("regions: [eu]", "regions: [us]", "leaves no regions together with `limits/b`"),
        ("gpu_types: [h100]", "gpu_types: [b200]", "leaves no gpu_types together with"),
        ("model: m1", "model: m2", "routes to `m2` where `limits/a` routes to `m1`"),
    ],
)
def test_routes_that_contradict_each_other_are_refused(one, other, words):
    message = refused(routes("request.n > 1", "request.n > 2", one, other))
    assert words.replace("limits/b", "limits/a") in message
    assert "rule `limits/b`" in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('tenant.class == "gold"', 'tenant.class == "bronze"'),
        (
            "|\n      'gold' == tenant.class",
            'tenant.class in ["bronze", "silver"] && request.n > 1',
        ),
        ("request.is_stream", "'!request.is_stream'"),
        ("request.n == 1", "request.n == 2"),
    ],
)
def test_routes_whose_conditions_exclude_each_other_are_taken(first, second):
    for one, other in (("regions: [eu]", "regions: [us]"), ("model: m1", "model: m2")):
        assert bundle_of(files_with(routes(first, second, one, other))).rules


def test_three_routes_without_a_common_region_are_refused():
    text = HEAD + "".join(
        text_of("true", f"route: {{regions: {regions}}}", name=f"r{number}")
        for number, regions in enumerate(("[eu, us]", "[us, ap]", "[eu, ap]"))
    )
    assert "leaves no regions together with `limits/r0`, `limits/r1`" in refused(text)


def test_windows_without_a_common_hour_are_refused():
    text = (
        HEAD
        + text_of("true", "defer: {until: {hours: [22, 6]}}", name="night")
        + text_of("true", "defer: {until: {hours: [6, 22]}}", name="day")
    )
    assert "leaves no hours together with" in refused(text)


def test_routes_that_are_not_enforced_do_not_contradict():
    text = routes("true", "true").replace("level: enforce", "level: audit")
    assert bundle_of(files_with(text)).rules


def test_a_thicket_of_routes_is_refused_rather_than_searched():
    # Every set of these leaves another set of regions, and none is empty.
    names = [f"r{number}" for number in range(18)]
    text = HEAD + "".join(
        text_of("true", f"route: {{regions: {json.dumps([n for n in names if n != name] + ['x'])}}}", name=name)
        for name in names
    )  # fmt: skip
    assert SETS_MAX < 2**18
    assert "too many rules narrow regions; merge some of them" in refused(text)


# ---------------------------------------------------------------- rulings


def test_nothing_fired_is_neutral():
    policy = policy_of(HEAD + text_of("request.n > 4"))
    assert ruling(policy, request__n=4) is NEUTRAL
    assert policy.has_rules(Phase.ADMIT)
    assert not policy.has_rules(Phase.STREAM)
    assert ruling(policy, Phase.STREAM, request__n=9) is NEUTRAL
    assert ruling(policy_of(), request__n=9) is NEUTRAL


def test_a_rule_is_asked_at_its_phase_only():
    policy = policy_of(HEAD + text_of("request.n > 4", phase="dispatch"))
    assert ruling(policy, Phase.ADMIT, request__n=5) is NEUTRAL
    assert ruling(policy, Phase.DISPATCH, request__n=5).denied_by == "limits/big"


@pytest.mark.parametrize(
    ("effect", "field", "value"),
    [
        ("deny: true", "denied_by", "limits/big"),
        ("queue_class: batch", "queue_class", "batch"),
        ("clamp: {max_tokens: 5}", "completion_tokens_max", 5),
        ("clamp: {n: 2}", "n_max", 2),
        ("route: {regions: [eu, ap]}", "region_names", ("ap", "eu")),
        ("route: {gpu_types: [h100]}", "gpu_type_names", ("h100",)),
        ("route: {model: org/small-1}", "model", "org/small-1"),
        ("priority: 3", "priority", 3),
        ("reserve_permille: 500", "reserve_permille", 500),
        ("warn: slow", "warnings", ("slow",)),
        ("annotate: {team: a}", "annotations", (("team", "a"),)),
        (
            "defer: {until: {hours: [22, 2], weekdays: [4]}}",
            "defer",
            Defer(hours=(0, 1, 22, 23), weekdays=(4,), waits_for_idle=False, wait_s_max=None),
        ),
        (
            "defer: {until: idle, max_wait_s: 60}",
            "defer",
            Defer(
                hours=tuple(range(24)), weekdays=tuple(range(7)), waits_for_idle=True, wait_s_max=60
            ),
        ),
    ],
)
def test_every_effect_has_its_field(effect, field, value):
    policy = policy_of(HEAD + text_of("request.n > 4", effect))
    made = ruling(policy, request__n=5)
    assert getattr(made, field) == value
    assert made.fired == ("limits/big",)
    untouched = {field, "fired", "message", "defer_by"}
    for name in NEUTRAL.__slots__:
        if name not in untouched:
            assert getattr(made, name) == getattr(NEUTRAL, name), name


def test_shed_tells_when_to_come_back():
    text = HEAD + text_of("workflow.step == 0", "shed: {retry_after_ms: 700}")
    made = ruling(policy_of(text))
    assert (made.shed_by, made.retry_after_ms, made.message) == ("limits/big", 700, "refused")
    assert ruling(policy_of(text), workflow__step=1) is NEUTRAL
    alone = HEAD + text_of("'!workflow.exists'", "shed: {retry_after_ms: 700}")
    assert ruling(policy_of(alone)).shed_by


@pytest.mark.parametrize(
    ("level", "denied", "warnings", "audited"),
    [
        ("enforce", "limits/big", (), ()),
        ("warn", "", ("refused",), ()),
        ("audit", "", (), ("limits/big",)),
    ],
)
def test_levels(level, denied, warnings, audited):
    made = ruling(policy_of(HEAD.replace("enforce", level) + text_of("true")))
    assert (made.denied_by, made.warnings, made.audited) == (denied, warnings, audited)


def test_rules_that_are_off_are_not_asked():
    policy = policy_of(HEAD.replace("enforce", "off") + text_of("true"))
    assert ruling(policy) is NEUTRAL
    assert not policy.has_rules(Phase.ADMIT)


def test_an_error_denies_and_is_told_apart():
    # Overflows only beyond the ranges of the table, so it is taken.
    policy = policy_of(HEAD + text_of("request.prompt_tokens + request.max_tokens > 5000"))
    made = ruling(policy, request__prompt_tokens=2**63 - 1)
    assert (made.denied_by, made.is_error, made.errors) == ("limits/big", True, ("limits/big",))
    audit = policy_of(
        HEAD.replace("enforce", "audit") + text_of("request.prompt_tokens + 1 > 5000")
    )
    made = ruling(audit, request__prompt_tokens=2**63 - 1)
    assert (made.denied_by, made.is_error, made.errors) == ("", False, ("limits/big",))


def test_a_deny_that_fired_goes_before_an_error():
    text = HEAD + text_of("request.prompt_tokens + 1 > 5000", name="a") + text_of("true", name="b")
    made = ruling(policy_of(text), request__prompt_tokens=2**63 - 1)
    assert (made.denied_by, made.is_error, made.errors) == ("limits/b", False, ("limits/a",))


@pytest.mark.parametrize("text", ["a\0b", "x" * 300, "\ud800"])
def test_facts_that_are_not_plain_are_refused_and_not_evaluated(text):
    policy = policy_of(HEAD + text_of('tenant.id == "a"'))
    static, live = from_json({})
    part = policy.static_part(static._replace(tenant_id=text))
    made = policy.rule(Phase.ADMIT, part, live)
    assert (made.denied_by, made.is_error) == (UNCLEAN_FACTS, True)


def test_places_that_only_meet_at_run_time_are_refused():
    """What loading can not see does not open a door."""
    bundle = bundle_of(files_with())
    rules = Rules.model_validate_json(
        json.dumps(
            {"kind": "rules", "version": 1, "name": "d", "level": "enforce", "rules": [
                {"name": name, "phase": "admit", "when": "true", "message": "m",
                 "route": {"regions": [region]}, "tests": [
                    {"name": "a", "fires": True}, {"name": "b", "fires": False}]}
                for name, region in (("a", "eu"), ("b", "us"))]}
        ),
        strict=True,
    )  # fmt: skip
    made = ruling(compile_policy(replace(bundle, rules=(rules,))))
    assert (made.denied_by, made.region_names) == (NO_COMMON_PLACE, ())


# ---------------------------------------------------------------- parts, memory, checks


def test_a_rule_outside_of_the_subset_is_asked_all_the_same():
    text = (
        HEAD
        + text_of('tenant.id.matches("^a") && request.n > 1', name="live")
        + text_of('tenant.id.matches("^b")', name="known")
    )
    policy = policy_of(text)
    assert ruling(policy, tenant__id="a", request__n=2).denied_by == "limits/live"
    assert ruling(policy, tenant__id="b", request__n=2).denied_by == "limits/known"
    assert ruling(policy, tenant__id="c", request__n=2) is NEUTRAL


def test_callers_to_whom_nothing_applies_are_not_asked():
    policy = policy_of(HEAD + text_of('tenant.class == "bronze" && request.n > 1'))
    gold, _ = from_json({"tenant.class": "gold"})
    bronze, _ = from_json({"tenant.class": "bronze"})
    assert policy.static_part(gold).asked == {}
    assert set(policy.static_part(bronze).asked) == {Phase.ADMIT}


def test_more_kinds_of_callers_than_functions_are_kept():
    text = HEAD + "".join(
        text_of(f'tenant.id.contains("{letter}") && request.n > 1', name=letter)
        for letter in "abcdefghi"
    )
    rules = PhaseRules(compiled_of(bundle_of(files_with(text)).rules))
    _, live = from_json({"request.n": 2})
    for number in range(512):
        letters = "".join("abcdefghi"[bit] for bit in range(9) if number >> bit & 1)
        static, _ = from_json({"tenant.id": letters})
        assert rules.fired(rules.part(static), live) == (number, 0)
    # One more than the limit: the function that asks everything.
    assert len(rules._variants) == VARIANTS_MAX + 1


def test_rulings_kept_are_bounded():
    text = HEAD + "".join(
        text_of(f"request.n * 0 + pool.queue_depth >= {bit}", "annotate: {k: v}", name=f"r{bit:04}")
        for bit in range(300)
    )
    policy = policy_of(text)
    for depth in range(300):
        ruling(policy, pool__queue_depth=depth)
    assert len(policy._rulings) == 300 <= RULINGS_KEPT
    first = ruling(policy, pool__queue_depth=7)
    assert first is ruling(policy, pool__queue_depth=7)
    assert len(first.fired) == 8


def test_one_ruling_of_many_is_checked_against_cel():
    policy = policy_of(HEAD + text_of("request.n > 1"))
    static, live = from_json({"request.n": 2})
    part = policy.static_part(static)
    # A translation gone wrong: it never fires.
    broken = replace(
        part, asked={Phase.ADMIT: replace(part.asked[Phase.ADMIT], fires=lambda _s, _v: 0)}
    )
    answers = [policy.rule(Phase.ADMIT, broken, live) for _ in range(RECHECK_EVERY * 2)]
    assert policy.disagreements == 2
    # CEL's word is taken where it was asked.
    assert sum(answer.denied_by == "limits/big" for answer in answers) == 2


def test_made_up_facts_are_always_the_same_and_reach_the_edges():
    rules = compiled_of(bundle_of(files_with(HEAD + text_of("request.n * 3 > 40"))).rules)
    made = list(inputs(rules))
    assert made == list(inputs(rules))
    assert len(made) == INPUTS
    assert len({static for static, _, _ in made}) <= CALLERS
    assert {39, 40, 41} <= {live.request_n for _, live, _ in made}
    assert {2**63 - 1, -(2**63)} <= {
        live.request_n for _, live, is_in_range in made if not is_in_range
    }
    assert all(live.request_n <= 128 for _, live, is_in_range in made if is_in_range)


# ---------------------------------------------------------------- explaining


def test_explain_shows_what_was_read_and_the_nearest_passing_value():
    text = (
        HEAD
        + text_of('tenant.class == "bronze" && request.prompt_tokens + request.max_tokens > 1000')
        + text_of("pool.queue_depth > 5", name="aaa")
    )
    policy = policy_of(text)
    static, live = from_json(
        {"tenant.class": "bronze", "request.prompt_tokens": 188, "request.max_tokens": 900}
    )
    fired, other = policy.explain(Phase.ADMIT, static, live)
    assert (fired.rule, fired.is_fired, fired.effects) == ("limits/big", True, ("deny",))
    assert fired.values == (
        ("request.max_tokens", 900), ("request.prompt_tokens", 188), ("tenant.class", "bronze"),
    )  # fmt: skip
    assert fired.nearest == "request.max_tokens <= 812"
    assert (other.rule, other.is_fired, other.nearest) == ("limits/aaa", False, "")
    assert policy.explain(Phase.STREAM, static, live) == []


@pytest.mark.parametrize(
    ("when", "given", "nearest"),
    [
        ("request.n in [1, 3]", {"request.n": 3}, "request.n == 2"),
        ("request.n < 3", {"request.n": 1}, "request.n >= 3"),
        ("request.is_stream", {"request.is_stream": True}, "request.is_stream == false"),
        ('tenant.class == "bronze"', {"tenant.class": "bronze"}, 'tenant.class != "bronze"'),
        ('pool.breaker != "closed"', {"pool.breaker": "open"}, 'pool.breaker == "closed"'),
        ("size(tenant.id) * 2 > request.n", {"tenant.id": "abc", "request.n": 1}, "request.n >= 6"),
        ("-request.n < 0", {"request.n": 1}, ""),
        ('tenant.id.matches("a")', {"tenant.id": "a"}, ""),
        ("true", {}, ""),
    ],
)
def test_nearest_passing_values(when, given, nearest):
    rules = Rules.model_validate_json(
        json.dumps(
            {"kind": "rules", "version": 1, "name": "d", "level": "enforce", "rules": [
                {"name": "r", "phase": "admit", "when": when, "message": "m", "deny": True,
                 "tests": [{"name": "a", "fires": True}, {"name": "b", "fires": False}]}]}
        ),
        strict=True,
    )  # fmt: skip
    policy = compile_policy(replace(bundle_of(files_with()), rules=(rules,)))
    view = policy.explain(Phase.ADMIT, *from_json(given))[0]
    assert view.is_fired
    assert view.nearest == nearest


def test_explain_names_an_error():
    policy = policy_of(HEAD + text_of("request.prompt_tokens + request.max_tokens > 5000"))
    view = policy.explain(Phase.ADMIT, *from_json({"request.prompt_tokens": 2**63 - 1}))[0]
    assert (view.is_fired, view.nearest) == (False, "")
    assert "integer overflow" in view.error


def test_the_oracle_names_what_fires():
    policy = policy_of(HEAD + text_of("request.n > 4"))
    assert policy.oracle(Phase.ADMIT, *from_json({"request.n": 5})) == (("limits/big",), ())
    assert policy.oracle(Phase.STREAM, *from_json({})) == ((), ())


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize(
    ("wall_ms", "wait_ms"),
    [
        # Thursday, 1 January 1970, midnight: within the night.
        (0, 0),
        (6 * 3_600_000 - 1, 0),
        (6 * 3_600_000, 16 * 3_600_000),
        (22 * 3_600_000 - 1, 1),
    ],
)
def test_a_night_opens_at_ten(wall_ms, wait_ms):
    defer = ruling(policy_of(HEAD + text_of("true", "defer: {until: {hours: [22, 6]}}"))).defer
    assert defer.opens_in_ms(wall_ms) == wait_ms


def test_a_weekend_opens_on_saturday():
    text = HEAD + text_of("true", "defer: {until: {weekdays: [5, 6]}}")
    assert ruling(policy_of(text)).defer.opens_in_ms(0) == 2 * 86_400_000


# ---------------------------------------------------------------- cases and mutants


def test_the_shipped_rules_pass_their_cases_and_notice_every_mutant():
    bundle = load_bundle(None)
    report = run_cases(compile_policy(bundle))
    assert report.failures == ()
    assert report.rules == sum(len(document.rules) for document in bundle.rules) > 0
    assert report.cases >= 2 * report.rules
    score = mutation_score(bundle)
    assert score.survivors == ()
    assert score.score_percent == 100
    assert score.mutants > 50


def test_a_case_that_comes_out_otherwise_is_told():
    report = run_cases(policy_of(HEAD + text_of("request.n == 1")))
    assert report.failures == (CaseFailure("limits/big", "b", expected=False, error=""),)
    assert (report.rules, report.cases) == (1, 2)


def test_weak_cases_let_mutants_survive():
    text = HEAD + text_of("request.n > 4").replace("name: a,", "name: a, given: {request.n: 9},")
    bundle = bundle_of(files_with(text))
    assert run_cases(compile_policy(bundle)).failures == ()
    score = mutation_score(bundle)
    assert {survivor.change for survivor in score.survivors} == {
        "`>` became `>=`", "`4` became `3`", "`4` became `5`",
    }  # fmt: skip
    assert score.score_percent == score.killed * 100 // score.mutants < 100


def test_every_kind_of_mutant():
    when = "!workflow.exists && (request.n + 1 > 2 || tenant.id.startsWith(tenant.class) || request.n in [4, 5])"
    made = {mutant.change for mutant in mutants(compiled_rule(when))}
    assert {
        "negated", "always", "never", "`&&` became `||`", "`||` became `&&`", "`!` was dropped",
        "`!workflow.exists` was dropped", "`>` became `>=`", "`>` became `<=`", "`1` became `0`",
        "`2` became `3`", "`4` was dropped from the list",
    } <= made  # fmt: skip
    outside = {mutant.change for mutant in mutants(compiled_rule("request.n / 2 > 1 // half"))}
    assert outside == {"negated", "always", "never"}


def compiled_rule(when):
    text = files_with(HEAD + text_of(json.dumps(when)))
    document = bundle_of(text).rules[0]
    return compile_rule(document, document.rules[0])


# ---------------------------------------------------------------- the shipped rules


def test_every_phase_has_effects():
    assert set(EFFECTS_BY_PHASE) == set(Phase)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"tenant.slo_class": "batch"}, "queue_class", "batch"),
        ({"tenant.slo_class": "interactive"}, "queue_class", "interactive"),
        ({"tenant.slo_class": "standard"}, "queue_class", None),
        (
            {"pool.is_overloaded": True, "pool.queue_wait_ms": 20_000, "tenant.priority": 2},
            "shed_by",
            "overload/shed-lowest",
        ),
        (
            {"pool.is_overloaded": True, "pool.queue_wait_ms": 20_000, "tenant.priority": 5},
            "shed_by",
            "",
        ),
        (
            {"pool.is_overloaded": True, "pool.queue_wait_ms": 50_000, "tenant.priority": 5},
            "shed_by",
            "overload/shed-middle",
        ),
        (
            {"pool.is_overloaded": True, "pool.queue_wait_ms": 500_000, "tenant.priority": 9},
            "shed_by",
            "",
        ),
    ],
)
def test_the_shipped_rules(given, field, value):
    policy = compile_policy(load_bundle(None))
    static, live = from_json(given)
    assert getattr(policy.rule(Phase.ADMIT, policy.static_part(static), live), field) == value


def test_the_shipped_rules_that_are_off_hold_when_turned_on():
    files = {
        name: text.replace("level: off", "level: enforce") for name, text in files_of(None).items()
    }
    policy = compile_policy(bundle_of(files))
    moved = ruling(
        policy, model__name="llama-3.3-70b", tenant__class="bronze", pool__queue_wait_ms=20_000
    )
    assert moved.model == "llama-3.1-8b"
    assert moved.warnings == ("answered by llama-3.1-8b, since llama-3.3-70b is busy",)
    assert ruling(policy, tenant__slo_class="batch", request__priority_hint=-1).defer is not None
