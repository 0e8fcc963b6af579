"""Reads a folder of policy documents, checks it as a whole, and hashes it to a revision.

A bundle that has an error is not loaded at all; the error says file, line, path or column, and remedy.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from controlplane.domain.errors import ConfigurationError
from policies.check import check
from policies.compiled import RuleFlaw
from policies.documents import (
    DOCUMENTS,
    Admission,
    Document,
    Entitlements,
    ModelChoice,
    Rules,
    Scopes,
    SloDefaults,
    TenantClasses,
)

DEFAULT_FOLDER: Final = Path(__file__).parent / "default"
FILES_MAX: Final = 64
FILE_BYTES_MAX: Final = 1024 * 1024
# Nodes of all documents of a bundle together, and how deep they may nest: bounds on the time and memory
# that reading takes, some 50 us and 700 bytes a node.
NODES_MAX: Final = 60_000
DEPTH_MAX: Final = 32
# Characters of a value that is not text, such as a number.
PLAIN_CHARS_MAX: Final = 64
# Errors told at once; the rest is counted.
ERRORS_TOLD_MAX: Final = 8
# Characters of what a document says that an error repeats.
TOLD_CHARS_MAX: Final = 80

# libyaml's parser where the package was built with it: a fifteenth of the time, which is Python's lock.
_PARSER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset(
    _TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map")
)

_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))

_KINDS: Final = ", ".join(f"`{kind}`" for kind in DOCUMENTS)
# Of these there is at most one document in a bundle.
_OPTIONAL_KINDS: Final = ("model_choice",)
# Of these there is exactly one.
_SINGLE_KINDS: Final = tuple(
    kind for kind in DOCUMENTS if kind != "rules" and kind not in _OPTIONAL_KINDS
)
NO_MODEL_CHOICE: Final = ModelChoice(kind="model_choice", version=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What checking the rules told: how many, on how many inputs, and the slowest hundredth of asking
    all rules of all phases once. `notes` are what works and could be better.
    """

    rules: int
    inputs: int
    p99_us: int
    notes: tuple[str, ...]


NOTHING_TRIED: Final = Report(rules=0, inputs=0, p99_us=0, notes=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A checked set of documents. `revision` is the SHA-256 of their meaning: comments do not count.

    `rules` are in the order of their names; `files` are the texts that the bundle was read from.
    """

    revision: str
    entitlements: Entitlements
    tenant_classes: TenantClasses
    scopes: Scopes
    slo_defaults: SloDefaults
    admission: Admission
    model_choice: ModelChoice = NO_MODEL_CHOICE
    rules: tuple[Rules, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    report: Report = field(default=NOTHING_TRIED, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Source:
    """A document and where it was read from."""

    file: str
    text: str
    root: yaml.Node | None
    document: Document


def load_bundle(path: Path | None) -> Bundle:
    """The bundle in the folder `path`, or the one that ships when it is None.

    Raises ConfigurationError.
    """
    folder = DEFAULT_FOLDER if path is None else path
    return bundle_of(files_of(path), where=str(folder))


def files_of(folder: Path | None) -> dict[str, str]:
    """Texts of the documents in a folder, or of those that ship, by file name.

    Raises ConfigurationError.
    """
    texts: dict[str, str] = {}
    for file in _files(DEFAULT_FOLDER if folder is None else folder):
        try:
            size = file.stat().st_size
            if size > FILE_BYTES_MAX:
                raise _too_large(str(file), size)
            texts[file.name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{file}: can not be read ({error}); make it readable UTF-8 text"
            ) from error
    return texts


def bundle_of(files: Mapping[str, str], where: str = "", *, report: Report | None = None) -> Bundle:
    """The bundle of documents given as texts by file name; `where` they are from is told in errors.

    `report` is what trying the rules of the very same files out has told; without one that is done here.
    Raises ConfigurationError.
    """
    prefix = f"{where}/" if where else ""
    if len(files) > FILES_MAX:
        raise ConfigurationError(
            f"{where or 'the bundle'}: {len(files)} files are over the limit of {FILES_MAX};"
            " merge some"
        )
    sources: list[_Source] = []
    nodes = 0
    for name in sorted(files):
        file = f"{prefix}{name}"
        size = len(files[name].encode(errors="replace"))
        if size > FILE_BYTES_MAX:
            raise _too_large(file, size)
        nodes += _nodes_of(file, files[name], NODES_MAX - nodes)
        sources.append(_read(file, files[name]))
    single: dict[str, _Source] = {}
    rules: dict[str, _Source] = {}
    for source in sources:
        document = source.document
        known, key = (
            (rules, document.name) if isinstance(document, Rules) else (single, document.kind)
        )
        if key in known:
            raise ConfigurationError(_second(source, known[key]))
        known[key] = source
    for kind in _SINGLE_KINDS:
        if kind not in single:
            raise ConfigurationError(
                f"{where or 'the bundle'}: no document of kind `{kind}`; add one, for example a"
                f" copy of {DEFAULT_FOLDER.name}/{kind}.yaml of the policies that ship"
            )
    entitlements, tenant_classes, scopes, slo_defaults, admission = (
        single[kind].document for kind in _SINGLE_KINDS
    )
    assert isinstance(entitlements, Entitlements)
    assert isinstance(tenant_classes, TenantClasses)
    assert isinstance(scopes, Scopes)
    assert isinstance(slo_defaults, SloDefaults)
    assert isinstance(admission, Admission)
    choice = single["model_choice"].document if "model_choice" in single else NO_MODEL_CHOICE
    assert isinstance(choice, ModelChoice)
    named = [rules[name] for name in sorted(rules)]
    if report is None:
        report = _checked(named, admission)
    documents = [source.document for source in [*single.values(), *named]]
    return Bundle(
        revision=_revision(documents),
        entitlements=entitlements,
        tenant_classes=tenant_classes,
        scopes=scopes,
        slo_defaults=slo_defaults,
        admission=admission,
        model_choice=choice,
        rules=_rules_of(named),
        files=dict(files),
        report=report,
    )


# ---------------------------------------------------------------- files


def _second(source: _Source, earlier: _Source) -> str:
    name = earlier.file.rpartition("/")[2]
    if isinstance(source.document, Rules):
        return (
            f"{source.file}: rules named `{source.document.name}` are in {name} already;"
            " give one of them another name"
        )
    return (
        f"{source.file}: a document of kind `{source.document.kind}` is in {name} already;"
        " merge the two files"
    )


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: not a folder; name one that holds policy documents (*.yaml)"
        )
    files = sorted(
        file for file in folder.iterdir() if file.suffix in {".yaml", ".yml"} and file.is_file()
    )
    if len(files) > FILES_MAX:
        raise ConfigurationError(f"{folder}: {len(files)} files are over the limit of {FILES_MAX}")
    return files


def _too_large(file: str, size: int) -> ConfigurationError:
    return ConfigurationError(
        f"{file}: {size:,} bytes are over the limit of {FILE_BYTES_MAX:,}; split the file"
    )


def _nodes_of(file: str, text: str, nodes_max: int) -> int:
    """How many values a document has. Ends early where it has too many or nests them too deeply.

    Raises ConfigurationError for that, for aliases, which can grow without end, and for syntax.
    """
    nodes = depth = 0
    try:
        for event in yaml.parse(text, Loader=_PARSER):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigurationError(
                    f"{file}:{_line_at(event.start_mark)}: aliases (`*{_clipped(event.anchor)}`) are"
                    " not allowed; write the value out"
                )
            if isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            elif isinstance(event, yaml.NodeEvent):
                nodes += 1
                depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > DEPTH_MAX:
                raise ConfigurationError(
                    f"{file}:{_line_at(event.start_mark)}: nests more than {DEPTH_MAX} levels deep;"
                    " write it flatter"
                )
            if nodes > nodes_max:
                raise ConfigurationError(
                    f"{file}:{_line_at(event.start_mark)}: the bundle has more than {NODES_MAX:,}"
                    " values; merge rules or leave some out"
                )
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise _not_yaml(file, error) from error
    return nodes


def _not_yaml(file: str, error: Exception) -> ConfigurationError:
    if not isinstance(error, yaml.MarkedYAMLError):
        return ConfigurationError(f"{file}: not valid YAML: {_clipped(error)}; mend the syntax")
    mark = error.problem_mark
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    return ConfigurationError(
        f"{file}{where}: not valid YAML: {error.problem}; mend the syntax there"
    )


def _clipped(text: object) -> str:
    said = str(text)
    return said if len(said) <= TOLD_CHARS_MAX else f"{said[:TOLD_CHARS_MAX]}..."


def _read(file: str, text: str) -> _Source:
    """One document, checked by itself."""
    try:
        root = yaml.compose(text, Loader=_PARSER)
        _refuse_surprises(file, root)
        content = _content(file, root)
    except yaml.YAMLError as error:
        raise _not_yaml(file, error) from error
    if not isinstance(content, dict) or "kind" not in content:
        raise ConfigurationError(
            f"{file}: has no `kind`; begin it with `kind:` and one of {_KINDS}"
        )
    kind = content["kind"]
    shape = DOCUMENTS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise ConfigurationError(
            f"{file}: the kind `{_clipped(kind)}` is not known; use one of {_KINDS}"
        )
    try:
        document = shape.model_validate_json(json.dumps(content), strict=True)
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigurationError(_told(file, root, error)) from error
    return _Source(file, text, root, document)


def _content(file: str, root: yaml.Node | None) -> object:
    """The plain data of a document. Raises ConfigurationError, yaml.YAMLError."""
    if root is None:
        return None
    try:
        content: object = yaml.SafeLoader("").construct_document(root)
    except (ValueError, LookupError) as error:
        # `!!int abc`, `!!bool maybe`, `0x_`
        raise _unfit(file, next(filter(_is_unfit, _scalars(root)))) from error
    return content


def _scalars(root: yaml.Node) -> Iterator[yaml.ScalarNode]:
    if isinstance(root, yaml.ScalarNode):
        yield root
    elif isinstance(root, yaml.SequenceNode):
        for node in root.value:
            yield from _scalars(node)
    elif isinstance(root, yaml.MappingNode):
        for pair in root.value:
            for node in pair:
                yield from _scalars(node)


def _is_unfit(node: yaml.ScalarNode) -> bool:
    """Whether a value can not be read as what its tag, given or inferred, says."""
    try:
        yaml.SafeLoader("").construct_document(node)
    except (ValueError, LookupError):
        return True
    return False


def _unfit(file: str, node: yaml.ScalarNode) -> ConfigurationError:
    mark = node.start_mark
    return ConfigurationError(
        f"{file}:{mark.line + 1}:{mark.column + 1}: `{_clipped(node.value)}` is no"
        f" `{node.tag.removeprefix(_TAG)}`, as its tag says; remove the `!!` tag or put it in quotes"
    )


def _refuse_surprises(file: str, root: yaml.Node | None) -> None:
    """Duplicate keys, of which YAML keeps the last silently, and what is not plain data."""
    pending = [] if root is None else [root]
    while pending:
        node = pending.pop()
        _refuse_odd(file, node)
        if isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        if not isinstance(node, yaml.MappingNode):
            continue
        seen: set[str] = set()
        for key, value in node.value:
            pending += (key, value)
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigurationError(f"{file}:{line}: a key is a list or a map; make it a word")
            if key.value in seen:
                raise ConfigurationError(
                    f"{file}:{line}: the key `{_clipped(key.value)}` stands twice; remove one"
                )
            seen.add(key.value)


def _refuse_odd(file: str, node: yaml.Node) -> None:
    """Values of kinds that documents do not have: dates, sets, merges, objects, numbers without end."""
    line = node.start_mark.line + 1
    if node.tag not in _TAGS:
        # A condition that begins with `!` looks like a tag, and a date like a date.
        raise ConfigurationError(
            f"{file}:{line}: a value is taken for `{_clipped(node.tag.removeprefix(_TAG))}`;"
            " put the value in quotes"
        )
    if (
        isinstance(node, yaml.ScalarNode)
        and node.tag != f"{_TAG}str"
        and len(node.value) > PLAIN_CHARS_MAX
    ):
        raise ConfigurationError(
            f"{file}:{line}: a number of {len(node.value)} characters is over the limit of"
            f" {PLAIN_CHARS_MAX}; put the value in quotes or shorten it"
        )
    if node.tag == f"{_TAG}null" and node.value not in _NULLS:
        # YAML's reader would take any text with this tag for nothing, silently.
        assert isinstance(node, yaml.ScalarNode)
        raise _unfit(file, node)


def _told(file: str, root: yaml.Node | None, error: Exception) -> str:
    """Every error with file, line, path and remedy."""
    if not isinstance(error, ValidationError):
        return f"{file}: {error}; use plain values: text, numbers, true, false, null, lists, maps"
    lines: list[str] = []
    entries = error.errors(include_url=False)
    wrong = {entry["loc"][:length] for entry in entries for length in range(len(entry["loc"]))}
    # A list of which a part is wrong is called too short as well.
    entries = [
        entry for entry in entries if entry["type"] != "too_short" or entry["loc"] not in wrong
    ]
    for entry in entries[:ERRORS_TOLD_MAX]:
        path = entry["loc"]
        shown = _clipped(".".join(str(part) for part in path if part != "[key]")) or "the document"
        lines.append(
            f"{file}:{_line(root, path)}: `{shown}`: {_remedy(entry['type'], entry['msg'])}"
        )
    rest = len(entries) - len(lines)
    if rest > 0:
        lines.append(f"{file}: and {rest} more")
    return "\n".join(lines)


def _remedy(kind: str, message: str) -> str:
    match kind:
        case "extra_forbidden":
            return "is not a known key; remove it or mend its spelling"
        case "missing":
            return "is missing; add it"
        case "value_error":
            return message.removeprefix("Value error, ")
        case _:
            said = message[:1].lower() + message[1:]
            return f"{said}; change the value"


def _line_at(mark: object) -> int:
    """Line of a YAML mark, from 1."""
    line = getattr(mark, "line", 0)
    return int(line) + 1


def _line(root: yaml.Node | None, path: tuple[int | str, ...]) -> int:
    """Line of the node at `path`, or of the deepest one before it that exists."""
    node = root
    line = 1
    for part in path:
        step: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    line, step = key.start_mark.line + 1, value
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            step = node.value[part]
            line = step.start_mark.line + 1
        if step is None:
            break
        node = step
    return line


# ---------------------------------------------------------------- rules


def _checked(sources: Sequence[_Source], admission: Admission) -> Report:
    """Raises ConfigurationError when a rule can not be used."""
    found = check(_rules_of(sources), admission)
    if isinstance(found, list):
        raise _flawed(sources, found)
    notes = tuple(_told_of_rule(sources, note) for note in found.notes)
    return Report(rules=found.rules, inputs=found.inputs, p99_us=found.p99_us, notes=notes)


def _rules_of(sources: Sequence[_Source]) -> tuple[Rules, ...]:
    return tuple(source.document for source in sources if isinstance(source.document, Rules))


def _flawed(sources: Sequence[_Source], flaws: Sequence[RuleFlaw]) -> ConfigurationError:
    lines = [_told_of_rule(sources, flaw) for flaw in flaws[:ERRORS_TOLD_MAX]]
    if len(flaws) > ERRORS_TOLD_MAX:
        lines.append(f"and {len(flaws) - ERRORS_TOLD_MAX} more")
    return ConfigurationError("\n".join(lines))


def _told_of_rule(sources: Sequence[_Source], flaw: RuleFlaw) -> str:
    return (
        f"{_place_of(sources, flaw)}: rule `{flaw.document}/{flaw.rule}`:"
        f" {_in_condition(flaw)}{flaw.flaw.message}"
    )


def _in_condition(flaw: RuleFlaw) -> str:
    """Where in the condition, since a folded one stands elsewhere in the file."""
    if not flaw.is_in_condition:
        return ""
    line = f"line {flaw.flaw.line}, " if flaw.flaw.line > 1 else ""
    return f"`when`, {line}column {flaw.flaw.column}: "


def _place_of(sources: Sequence[_Source], flaw: RuleFlaw) -> str:
    """File, line and column of a rule's condition, or of what is wrong in it."""
    for source in sources:
        document = source.document
        assert isinstance(document, Rules)
        if document.name != flaw.document:
            continue
        index = next(number for number, rule in enumerate(document.rules) if rule.name == flaw.rule)
        node = _node_at(source.root, ("rules", index, "when"))
        if not isinstance(node, yaml.ScalarNode):
            return source.file
        line, column = _place_in(source.text, node, flaw)
        return f"{source.file}:{line}:{column}"
    return ""


def _place_in(text: str, node: yaml.ScalarNode, flaw: RuleFlaw) -> tuple[int, int]:
    """Line and column from 1; the start of the condition where YAML has folded its lines."""
    start = node.start_mark
    line, column = start.line + 1, start.column + 1
    if not flaw.is_in_condition:
        return line, column
    if node.style == "|":
        row = start.line + flaw.flaw.line
        lines = text.splitlines()
        first = lines[start.line + 1] if start.line + 1 < len(lines) else ""
        indent = len(first) - len(first.lstrip(" "))
        return row + 1, indent + flaw.flaw.column
    if node.start_mark.line == node.end_mark.line and flaw.flaw.line == 1:
        return line, column + (1 if node.style else 0) + flaw.flaw.column - 1
    return line, column


def _node_at(root: yaml.Node | None, path: tuple[int | str, ...]) -> yaml.Node | None:
    node = root
    for part in path:
        step: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            step = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            step = node.value[part]
        node = step
    return node


def _revision(documents: Sequence[Document]) -> str:
    """Rules of one name are one document, wherever they stand."""
    content = {
        f"rules {document.name}" if isinstance(document, Rules) else document.kind: (
            document.model_dump(mode="json")
        )
        for document in documents
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
