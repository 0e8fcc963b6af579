"""Reads recorded traces as workloads: steps of coding agents, and conversations by block hashes.

Two formats, plain or gzip, told apart by what is in them:

    CSV     trace_id, agent, t_s, input_tokens, output_tokens, reusable_prefix_tokens, api_time_s,
            input_types, ... (kv-cache-tester): cut into tasks at what people said; agents other than
            `main` are branches of the step of it in whose pause they ran
    JSONL   timestamp, input_length, output_length, hash_ids of 512-token blocks (Mooncake): chained
            into conversations by common blocks

No row of a trace is kept in the project; the path is the caller's.
"""

import csv
import gzip
import io
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from cli.failure import CommandFailure, ExitCode
from cli.published import SUBAGENT_PREFIX_TOKENS
from cli.simulate.contracts import Branch, Step
from cli.simulate.workloads import (
    COMPLETION_TOKENS_MAX,
    CONTEXT_TOKENS_MAX,
    HISTORY_TOKENS_MAX,
    HUMAN_GAP_S_MAX,
    PREFIX_TOKENS,
    STEPS_MAX,
    TOOL_GAP_S_MAX,
    Arrival,
    Body,
    Workload,
)
from controlplane.domain.catalog import Scope

BYTES_MAX: Final = 512 * 1024 * 1024
BLOCK_TOKENS: Final = 512
# The resolution of the conversation trace's timestamps: 90 % of its gaps would be 0 without jitter.
QUANTUM_S: Final = 3.0
# Seed of the jitter: the trace is the same trace in every run.
JITTER_SEED: Final = 1

# The agent that people talk to.
MAIN_AGENT: Final = "main"
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class SubAgent:
    """A branch, and when it ended, in seconds of its trace."""

    branch: Branch
    ends_s: float


_NO_SUBAGENTS: Final[Mapping[int, Sequence[SubAgent]]] = {}
_CSV_COLUMNS: Final = frozenset(
    ("trace_id", "agent", "t_s", "input_tokens", "output_tokens", "reusable_prefix_tokens")
)


def read_trace(name: str) -> Workload:
    """The workload of a file. Raises CommandFailure that says why it is none."""
    path = Path(name)
    try:
        lines = _lines(path)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CommandFailure(
            ExitCode.USAGE,
            f"no workload is called `{name}`, and as a file it can not be read: {error}",
            "use coding, chat, bounded, subagents, mix or the path of a trace",
        ) from error
    try:
        first = next(lines, "")
        if first.lstrip().startswith("{"):
            return _conversations(path.name, _chain([first], lines))
        return _tasks(path.name, csv.DictReader(_chain([first], lines)))
    except (KeyError, ValueError, TypeError) as error:
        raise CommandFailure(ExitCode.USAGE, f"`{name}` is not a trace: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    if path.stat().st_size > BYTES_MAX:
        raise OSError(f"larger than {BYTES_MAX} bytes")
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(raw)) as unpacked:
            raw = unpacked.read(BYTES_MAX)
    return iter(raw.decode("utf-8").splitlines())


def _chain(first: Iterable[str], rest: Iterable[str]) -> Iterator[str]:
    yield from first
    yield from rest


# ------------------------------------------------------------ steps of coding agents


def _tasks(name: str, rows: "csv.DictReader[str]") -> Workload:
    missing = _CSV_COLUMNS - set(rows.fieldnames or ())
    if missing:
        raise ValueError(f"column {min(missing)} is missing")
    by_trace: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        by_trace.setdefault(row["trace_id"], {}).setdefault(row["agent"], []).append(row)
    tasks: list[Body] = []
    for agents in by_trace.values():
        subagents: dict[int, list[SubAgent]] = {}
        main = agents.get(MAIN_AGENT)
        for agent, agent_rows in agents.items():
            if main is not None and agent != MAIN_AGENT:
                place, subagent = _placed(main, agent, agent_rows)
                subagents.setdefault(place, []).append(subagent)
        for agent_rows in agents.values() if main is None else (main,):
            begin = 0
            for number, row in enumerate(agent_rows):
                is_of_a_person = "tool_result" not in row.get("input_types", "tool_result")
                if is_of_a_person and number > begin:
                    tasks.append(_task(agent_rows, begin, number, subagents))
                    begin = number
            tasks.append(_task(agent_rows, begin, len(agent_rows), subagents))
    if not tasks:
        raise ValueError("no step in it")
    return Workload(name=name, weights={"coding": 1.0}, draw=lambda random: random.choice(tasks))


def _placed(main: list[Row], agent: str, rows: list[Row]) -> tuple[int, SubAgent]:
    """A sub-agent, and the row of its parent in whose pause it ran.

    Recorders differ in when they say that it began: some say when it had ended (kv-cache-tester does: so
    read 34 of 38 lie in one pause, the others ran on beside their parent). Times that lie in a pause are
    taken as they are, others as such.
    """
    began_s, took_s = _at_s(rows[0]), _ends_s(rows[-1]) - _at_s(rows[0])
    ends = [_ends_s(row) for row in main]
    place = max(0, bisect_right(ends, began_s) - 1)
    is_last = place + 1 == len(main)
    if not is_last and began_s + took_s > _at_s(main[place + 1]):
        began_s -= took_s
        place = max(0, bisect_right(ends, began_s) - 1)
    steps = _steps(rows, SUBAGENT_PREFIX_TOKENS)
    kind = agent.rpartition(":")[2]
    return place, SubAgent(Branch(steps, SUBAGENT_PREFIX_TOKENS, kind), began_s + took_s)


def _at_s(row: Row) -> float:
    return float(row["t_s"])


def _ends_s(row: Row) -> float:
    return _at_s(row) + float(row.get("api_time_s") or 0.0)


def _task(
    rows: list[Row], begin: int, end: int, subagents: Mapping[int, Sequence[SubAgent]]
) -> Body:
    """Context of the session before the task is cut to what agents keep; a tool's time to its maximum."""
    own = {place - begin: those for place, those in subagents.items() if begin <= place < end}
    return Body(
        workflow_class="coding",
        steps=_steps(rows[begin:end], PREFIX_TOKENS, own),
        scope=Scope.COPILOT,
        prefix_tokens=PREFIX_TOKENS,
    )


def _steps(
    rows: list[Row],
    prefix_tokens: int,
    subagents: Mapping[int, Sequence[SubAgent]] = _NO_SUBAGENTS,
) -> tuple[Step, ...]:
    steps: list[Step] = []
    context = prefix_tokens
    new = min(HISTORY_TOKENS_MAX, max(1, int(rows[0]["input_tokens"]) - prefix_tokens))
    for place, row in enumerate(rows[:STEPS_MAX]):
        after = rows[place + 1] if place + 1 < len(rows) else None
        if context + new > CONTEXT_TOKENS_MAX:
            context, new = prefix_tokens, HISTORY_TOKENS_MAX
        beside = subagents.get(place, ())
        gap_s = 0.0
        if after is not None:
            # The pause begins when the last of them has ended.
            begins_s = max([_ends_s(row), *(subagent.ends_s for subagent in beside)])
            gap_s = _at_s(after) - begins_s
        steps.append(
            Step(
                new_tokens=new,
                reusable_tokens=context,
                completion_tokens=max(1, min(COMPLETION_TOKENS_MAX, int(row["output_tokens"]))),
                gap_s=max(0.0, min(TOOL_GAP_S_MAX, gap_s)),
                branches=tuple(subagent.branch for subagent in beside),
            )
        )
        if after is None:
            break
        uncached = int(after["input_tokens"]) - int(after["reusable_prefix_tokens"])
        context += new
        # A step that began anew (a compaction, an expired cache of the recorded service) is taken as
        # growth of what an agent keeps at most.
        new = max(1, min(HISTORY_TOKENS_MAX, uncached))
    return tuple(steps)


# ------------------------------------------------------------ conversations by block hashes


class _Turn:
    __slots__ = (
        "at_s",
        "blocks",
        "completion_tokens",
        "prompt_tokens",
        "reusable_tokens",
        "session",
    )

    def __init__(self, at_s: float, row: Any) -> None:
        self.at_s = at_s
        self.blocks: list[int] = row["hash_ids"]
        self.prompt_tokens = int(row["input_length"])
        self.completion_tokens = int(row["output_length"])
        self.reusable_tokens = 0
        self.session = -1


def _conversations(name: str, lines: Iterable[str]) -> Workload:
    random = Random(JITTER_SEED)  # noqa: S311  (a repeatable load, no secret)
    turns = []
    for line in lines:
        if line.strip():
            row = json.loads(line)
            turns.append(_Turn(row["timestamp"] / 1_000 + random.uniform(0.0, QUANTUM_S), row))
    turns.sort(key=lambda turn: turn.at_s)
    sessions = chained(turns)
    arrivals = tuple(
        Arrival(at_s=session[0].at_s, body=_conversation(session)) for session in sessions
    )
    if not arrivals:
        raise ValueError("no request in it")
    bodies = [arrival.body for arrival in arrivals]
    return Workload(
        name=name,
        weights={"chat": 1.0},
        draw=lambda random: random.choice(bodies),
        replay=arrivals,
    )


def chained(turns: Iterable[Any]) -> list[list[Any]]:
    """Turns in order of time, by conversation. A block's hash stands for all tokens up to it, so a turn
    that has an earlier turn's last whole block continues it; the latest such turn is the one before.
    """
    last_of: dict[int, Any] = {}
    sessions: list[list[Any]] = []
    for turn in turns:
        for place in range(len(turn.blocks) - 1, -1, -1):
            before = last_of.get(turn.blocks[place])
            # The first block is everybody's system prompt.
            if before is not None and place > 0:
                turn.session = before.session
                turn.reusable_tokens = BLOCK_TOKENS * (place + 1)
                break
        if turn.session < 0:
            turn.session = len(sessions)
            sessions.append([])
        sessions[turn.session].append(turn)
        whole = turn.prompt_tokens // BLOCK_TOKENS
        if whole > 0:
            last_of[turn.blocks[whole - 1]] = turn
    return sessions


def _conversation(turns: list[_Turn]) -> Body:
    steps: list[Step] = []
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        prompt = min(CONTEXT_TOKENS_MAX, turn.prompt_tokens)
        reusable = min(turn.reusable_tokens, steps[-1].prompt_tokens if steps else 0, prompt - 1)
        gap_s = 0.0 if after is None else after.at_s - turn.at_s
        steps.append(
            Step(
                new_tokens=prompt - reusable,
                reusable_tokens=reusable,
                completion_tokens=max(1, min(COMPLETION_TOKENS_MAX, turn.completion_tokens)),
                gap_s=max(0.0, min(HUMAN_GAP_S_MAX, gap_s)),
            )
        )
    return Body(workflow_class="chat", steps=tuple(steps), scope=Scope.CHAT, prefix_tokens=0)
