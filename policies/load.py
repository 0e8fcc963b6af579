"""Reads a folder of policy documents, checks it as a whole, and hashes it to a revision.

A bundle that has an error is not loaded at all; the error says file, line, path and remedy.
"""

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from controlplane.domain.errors import ConfigurationError
from policies.documents import (
    DOCUMENTS,
    Admission,
    Document,
    Entitlements,
    Scopes,
    SloDefaults,
    TenantClasses,
)

DEFAULT_FOLDER: Final = Path(__file__).parent / "default"
FILES_MAX: Final = 64
FILE_BYTES_MAX: Final = 1024 * 1024
# Errors told at once; the rest is counted.
ERRORS_TOLD_MAX: Final = 8

_KINDS: Final = ", ".join(f"`{kind}`" for kind in DOCUMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A checked set of documents. `revision` is the SHA-256 of their meaning: comments do not count."""

    revision: str
    entitlements: Entitlements
    tenant_classes: TenantClasses
    scopes: Scopes
    slo_defaults: SloDefaults
    admission: Admission


def load_bundle(path: Path | None) -> Bundle:
    """The bundle in the folder `path`, or the one that ships when it is None.

    Raises ConfigurationError.
    """
    folder = DEFAULT_FOLDER if path is None else path
    found: dict[str, tuple[Path, Document]] = {}
    for file in _files(folder):
        document = _read(file)
        earlier = found.get(document.kind)
        if earlier is not None:
            raise ConfigurationError(
                f"{file}: a document of kind `{document.kind}` is in {earlier[0].name} already;"
                " merge the two files"
            )
        found[document.kind] = (file, document)
    documents: list[Document] = []
    for kind in DOCUMENTS:
        if kind not in found:
            raise ConfigurationError(
                f"{folder}: no document of kind `{kind}`; add one, for example a copy of"
                f" {DEFAULT_FOLDER.name}/{kind}.yaml of the policies that ship"
            )
        documents.append(found[kind][1])
    entitlements, tenant_classes, scopes, slo_defaults, admission = documents
    assert isinstance(entitlements, Entitlements)
    assert isinstance(tenant_classes, TenantClasses)
    assert isinstance(scopes, Scopes)
    assert isinstance(slo_defaults, SloDefaults)
    assert isinstance(admission, Admission)
    return Bundle(
        revision=_revision(documents),
        entitlements=entitlements,
        tenant_classes=tenant_classes,
        scopes=scopes,
        slo_defaults=slo_defaults,
        admission=admission,
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


def _read(file: Path) -> Document:
    """One checked document."""
    try:
        size = file.stat().st_size
        if size > FILE_BYTES_MAX:
            raise ConfigurationError(
                f"{file}: {size:,} bytes are over the limit of {FILE_BYTES_MAX:,}; split the file"
            )
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{file}: can not be read ({error}); make it readable UTF-8 text"
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_surprises(file, text, root)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f":{mark.line + 1}"
        raise ConfigurationError(
            f"{file}{where}: not valid YAML: {error.problem}; mend the syntax there"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"{file}: not valid YAML: {error}; mend the syntax") from error
    if not isinstance(content, dict) or "kind" not in content:
        raise ConfigurationError(
            f"{file}: has no `kind`; begin it with `kind:` and one of {_KINDS}"
        )
    kind = content["kind"]
    shape = DOCUMENTS.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise ConfigurationError(f"{file}: the kind `{kind}` is not known; use one of {_KINDS}")
    try:
        return shape.model_validate_json(json.dumps(content), strict=True)
    except (ValidationError, TypeError, ValueError) as error:
        raise ConfigurationError(_told(file, root, error)) from error


def _refuse_surprises(file: Path, text: str, root: yaml.Node | None) -> None:
    """Duplicate keys, of which YAML keeps the last silently, and aliases, which can grow without end."""
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ConfigurationError(
                f"{file}:{_line_at(event.start_mark)}: aliases (`*{event.anchor}`) are not"
                " allowed; write the value out"
            )
    pending = [] if root is None else [root]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)
        if not isinstance(node, yaml.MappingNode):
            continue
        seen: set[Hashable] = set()
        for key, value in node.value:
            pending.append(value)
            if key.value in seen and isinstance(key.value, str):
                raise ConfigurationError(
                    f"{file}:{key.start_mark.line + 1}: the key `{key.value}` stands twice;"
                    " remove one"
                )
            if isinstance(key.value, str):
                seen.add(key.value)


def _told(file: Path, root: yaml.Node | None, error: Exception) -> str:
    """Every error with file, line, path and remedy."""
    if not isinstance(error, ValidationError):
        return f"{file}: {error}; use plain values: text, numbers, true, false, null, lists, maps"
    lines: list[str] = []
    for entry in error.errors(include_url=False)[:ERRORS_TOLD_MAX]:
        path = entry["loc"]
        shown = ".".join(str(part) for part in path if part != "[key]") or "the document"
        lines.append(
            f"{file}:{_line(root, path)}: `{shown}`: {_remedy(entry['type'], entry['msg'])}"
        )
    rest = error.error_count() - len(lines)
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


def _revision(documents: list[Document]) -> str:
    content = {document.kind: document.model_dump(mode="json") for document in documents}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
