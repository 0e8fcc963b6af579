"""Loading a bundle, every way in which it can be wrong, and what it grants."""

from pathlib import Path

import pytest

from controlplane.domain.catalog import Scope, Tenant
from controlplane.domain.errors import ConfigurationError
from policies import evaluate
from policies.evaluate import terms_for
from policies.load import DEFAULT_FOLDER, FILE_BYTES_MAX, FILES_MAX, load_bundle

ALLOW_ALL = """\
kind: entitlements
version: 1
rules:
  - {name: all, effect: allow, models: ["*"]}
"""


def tenant(**changes):
    fields = {
        "id": "acme",
        "name": "Acme",
        "tenant_class": "gold",
        "slo_class": "interactive",
        "is_disabled": False,
        "cache_salt": "s",
    }
    return Tenant(**(fields | changes))


def bundle_at(tmp_path: Path, **texts: str) -> Path:
    """A copy of the shipped policies with some documents replaced, by kind."""
    for file in DEFAULT_FOLDER.glob("*.yaml"):
        text = texts.get(file.stem, file.read_text(encoding="utf-8"))
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    return tmp_path


def granted(tmp_path, rules, who=None, model="llama", scope=Scope.CHAT):
    text = f"kind: entitlements\nversion: 1\nrules:\n{rules}"
    bundle = load_bundle(bundle_at(tmp_path, entitlements=text))
    return terms_for(bundle, who or tenant(), model, scope)


# ---------------------------------------------------------------- the shipped bundle


def test_the_shipped_bundle_weighs_the_classes():
    bundle = load_bundle(None)
    weights = {
        name: terms_for(bundle, tenant(tenant_class=name), "any/model", Scope.CHAT).weight
        for name in ("gold", "silver", "bronze")
    }
    assert weights == {"gold": 4, "silver": 2, "bronze": 1}


@pytest.mark.parametrize("scope", list(Scope))
def test_the_shipped_bundle_limits_every_scope(scope):
    terms = terms_for(load_bundle(None), tenant(), "m", scope)
    assert terms.is_allowed
    assert terms.denied_by == ""
    assert terms.fan_out_max >= 1
    assert terms.steps_max >= 1
    assert terms.completion_tokens_default <= terms.completion_tokens_max
    assert terms.region_names is None
    assert terms.slo_class is None


# ---------------------------------------------------------------- rules


def test_what_no_rule_allows_is_denied(tmp_path):
    terms = granted(tmp_path, "  - {name: a, effect: allow, models: [qwen*]}\n")
    assert not terms.is_allowed
    assert terms.denied_by == evaluate.DEFAULT_DENY


@pytest.mark.parametrize("first", ["allow", "deny"])
def test_deny_overrides_allow_in_any_order(tmp_path, first):
    allow = "  - {name: all, effect: allow, models: ['*']}\n"
    deny = "  - {name: not-acme, effect: deny, tenants: [acme], models: [llama*]}\n"
    terms = granted(tmp_path, allow + deny if first == "allow" else deny + allow)
    assert terms.denied_by == "not-acme"


def test_a_rule_matches_class_tenant_and_model(tmp_path):
    rule = (
        "  - {name: a, effect: allow, tenant_classes: [gold], tenants: [ac*], models: ['ll?ma']}\n"
    )
    assert granted(tmp_path, rule).is_allowed
    assert not granted(tmp_path, rule, tenant(tenant_class="silver")).is_allowed
    assert not granted(tmp_path, rule, tenant(id="other")).is_allowed
    assert not granted(tmp_path, rule, model="llama-2").is_allowed


def test_places_of_all_allow_rules_are_intersected(tmp_path):
    rules = (
        "  - {name: a, effect: allow, models: ['*'], regions: [eu, us], gpu_types: [h100]}\n"
        "  - {name: b, effect: allow, models: ['*'], regions: [eu]}\n"
    )
    terms = granted(tmp_path, rules)
    assert (terms.region_names, terms.gpu_type_names) == (("eu",), ("h100",))


def test_rules_without_a_common_place_allow_nothing(tmp_path):
    rules = (
        "  - {name: a, effect: allow, models: ['*'], regions: [us]}\n"
        "  - {name: b, effect: allow, models: ['*'], regions: [eu]}\n"
    )
    assert granted(tmp_path, rules).denied_by == evaluate.NO_COMMON_PLACE


def test_a_disabled_tenant_and_an_unknown_class_are_denied(tmp_path):
    rule = "  - {name: a, effect: allow, models: ['*']}\n"
    assert granted(tmp_path, rule, tenant(is_disabled=True)).denied_by == evaluate.DISABLED
    unknown = granted(tmp_path, rule, tenant(tenant_class="platinum"))
    assert unknown.denied_by == evaluate.UNKNOWN_CLASS
    assert not unknown.is_allowed


def test_the_slo_class_comes_from_the_class_then_the_scope(tmp_path):
    classes = """\
kind: tenant_classes
version: 1
classes:
  gold: {weight: 4, completion_tokens_default: 1, completion_tokens_max: 2, slo_class: fast}
  silver: {weight: 2, completion_tokens_default: 1, completion_tokens_max: 2}
"""
    slo = "kind: slo_defaults\nversion: 1\nby_scope: {chat: relaxed}\n"
    path = bundle_at(tmp_path, tenant_classes=classes, slo_defaults=slo, entitlements=ALLOW_ALL)
    bundle = load_bundle(path)
    assert terms_for(bundle, tenant(), "m", Scope.CHAT).slo_class == "fast"
    silver = tenant(tenant_class="silver")
    assert terms_for(bundle, silver, "m", Scope.CHAT).slo_class == "relaxed"
    assert terms_for(bundle, silver, "m", Scope.RESEARCH).slo_class is None


# ---------------------------------------------------------------- revisions


def test_the_revision_is_of_the_meaning(tmp_path):
    shipped = load_bundle(None).revision
    path = bundle_at(tmp_path)
    assert load_bundle(path).revision == shipped
    file = path / "scopes.yaml"
    file.write_text("# a remark\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_bundle(path).revision == shipped
    file.write_text(file.read_text(encoding="utf-8").replace("200", "201"), encoding="utf-8")
    assert load_bundle(path).revision != shipped


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "entitlements",
            ALLOW_ALL.replace("effect: allow", "efect: allow"),
            ("entitlements.yaml:4: `rules.0.effect`: is missing; add it",
             "entitlements.yaml:4: `rules.0.efect`: is not a known key; remove it or mend its spelling"),
        ),
        (
            "entitlements",
            ALLOW_ALL.replace("allow", "permit"),
            ("entitlements.yaml:4: `rules.0.effect`: input should be 'allow' or 'deny'; change",),
        ),
        ("entitlements", ALLOW_ALL + '  - {name: all, effect: allow, models: ["x"]}\n', ("is used twice",)),
        (
            "entitlements",
            "kind: entitlements\nversion: 1\nrules:\n  - {name: a, effect: deny, models: [x], regions: [eu]}\n",
            ("a deny rule can not name regions", "name them in the allow rule"),
        ),
        ("entitlements", "kind: entitlements\nversion: 1\nrules: []\n", (":3: `rules`:", "change the value")),
        ("entitlements", "kind: entitlements\nversion: 2\nrules: []\n", (":2: `version`:",)),
        ("scopes", "kind: scopes\nversion: 1\nscopes: {}\n", ("limits for `chat`", "are missing; add them")),
        (
            "tenant_classes",
            ("kind: tenant_classes\nversion: 1\nclasses:\n  gold:\n    weight: '4'\n"
            "    completion_tokens_default: 1\n    completion_tokens_max: 2\n"),
            ("tenant_classes.yaml:5: `classes.gold.weight`:", "valid number"),
        ),
        (
            "tenant_classes",
            ("kind: tenant_classes\nversion: 1\nclasses:\n  gold:\n    weight: 4\n"
            "    completion_tokens_default: 3\n    completion_tokens_max: 2\n"),
            ("completion_tokens_default is above completion_tokens_max; lower it",),
        ),
        ("scopes", "kind: scopes\nversion: [1\n", ("scopes.yaml:3:1: not valid YAML", "mend the syntax")),
        ("scopes", "", ("has no `kind`; begin it with `kind:`",)),
        ("scopes", "- a\n- b\n", ("has no `kind`",)),
        ("scopes", "kind: scope\n", ("the kind `scope` is not known; use one of `entitlements`",)),
        ("scopes", "kind: entitlements\nversion: 1\n", ("entitlements.yaml", "is missing; add it")),
        ("scopes", "kind: scopes\nkind: scopes\n", ("scopes.yaml:2: the key `kind` stands twice; remove one",)),
        ("scopes", "kind: &k scopes\nname: *k\n", ("scopes.yaml:2: aliases", "write the value out")),
        ("scopes", "kind: scopes\nversion: 2026-11-29\n",
         ("scopes.yaml:2: a value is taken for `timestamp`; put the value in quotes",)),
        ("scopes", "kind: scopes\nversion: 2026-99-99\n", ("scopes.yaml:2:", "put the value in quotes")),
        ("scopes", "kind: scopes\nversion: !!int abc\n",
         ("scopes.yaml:2:10: `abc` is no `int`", "remove the `!!` tag")),
        ("scopes", "kind: scopes\nversion: [1, !!bool maybe]\n", ("scopes.yaml:2:14: `maybe` is no `bool`",)),
        ("scopes", "kind: scopes\nversion:\n  a: !!null word\n", ("scopes.yaml:3:6: `word` is no `null`",)),
        ("scopes", "kind: scopes\nversion: 0x_\n", ("scopes.yaml:2:10: `0x_` is no `int`", "in quotes")),
        ("scopes", "kind: scopes\nversion: !!int [1]\n", ("scopes.yaml:2:10: not valid YAML",)),
        ("scopes", "kind: scopes\nversion: " + "9" * 5_000 + "\n",
         ("scopes.yaml:2: a number of 5000 characters", "shorten it")),
        ("scopes", "kind: scopes\n<<: {version: 1}\n", ("scopes.yaml:2:", "put the value in quotes")),
        ("scopes", "kind: scopes\n? [a, b]\n: c\n", ("scopes.yaml:2: a key is a list or a map",)),
        ("scopes", "kind: !!set {a, b}\n", ("scopes.yaml:1: a value is taken for `set`",)),
        ("scopes", "kind: " + "[" * 40, ("scopes.yaml:1: nests more than 32 levels deep",)),
        ("scopes", "kind: " + "[" * 100_000, ("scopes.yaml:1", "nest")),
        ("scopes", "kind: [" + "a," * 300_000 + "]", ("the bundle has more than 60,000 values",)),
        ("scopes", "kind: scopes\n" + "#" * FILE_BYTES_MAX, ("over the limit", "split the file")),
        ("scopes", "kind: " + "x" * 500_000, ("is not known; use one of",)),
        ("scopes", "kind: scopes\n? " + "x" * 500_000 + "\n: 1\n", ("is not a known key",)),
    ],
)  # fmt: skip
def test_an_error_names_file_place_and_remedy(tmp_path, kind, text, words):
    path = bundle_at(tmp_path, **{kind: text})
    with pytest.raises(ConfigurationError) as raised:
        load_bundle(path)
    message = str(raised.value).replace("scopes.yaml:1: `", "entitlements.yaml `")
    assert len(message) < 2_000
    for part in words:
        assert part in message


def test_a_second_document_of_a_kind_is_refused(tmp_path):
    path = bundle_at(tmp_path)
    (path / "zz.yaml").write_text(ALLOW_ALL, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"zz\.yaml.*in entitlements\.yaml already; merge"):
        load_bundle(path)


def test_a_missing_document_is_named(tmp_path):
    path = bundle_at(tmp_path)
    (path / "scopes.yaml").unlink()
    with pytest.raises(ConfigurationError, match="no document of kind `scopes`; add one"):
        load_bundle(path)


def test_no_folder_and_no_text(tmp_path):
    with pytest.raises(ConfigurationError, match="not a folder; name one"):
        load_bundle(tmp_path / "absent")
    path = bundle_at(tmp_path)
    (path / "scopes.yaml").write_bytes(b"kind: \xff\n")
    with pytest.raises(ConfigurationError, match=r"scopes\.yaml: can not be read"):
        load_bundle(path)


def test_too_many_files_are_refused(tmp_path):
    path = bundle_at(tmp_path)
    for number in range(FILES_MAX):
        (path / f"x{number}.yaml").touch()
    with pytest.raises(ConfigurationError, match="over the limit"):
        load_bundle(path)


def test_many_errors_are_told_together_and_counted(tmp_path):
    classes = "".join(f"  c{number}: {{}}\n" for number in range(10))
    path = bundle_at(
        tmp_path, tenant_classes=f"kind: tenant_classes\nversion: 1\nclasses:\n{classes}"
    )
    with pytest.raises(ConfigurationError) as raised:
        load_bundle(path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 9
    assert lines[-1].endswith("and 22 more")
