"""What one engine's prefix cache holds, as a tree of blocks, and how much of each session is in it.

Blocks are named by the hashes that the engine gives them; a session is whatever name a request carried
into the engine. Knows no socket and no clock, and never sees a token.

A cache finds a prefix from its first block on and stops at the first that is missing. So what is held
of a session is the unbroken run of blocks from the beginning to the last one that it stored. Engines
evict the ends of sequences first, and the run gets shorter block by block; a block that goes while
others hang on it stays in the tree as a hole until they are gone too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

BLOCKS_MAX: Final = 1 << 20
SESSIONS_MAX: Final = 16_384
# A session is told again when it has grown by this share, and once it has stopped growing for so long.
GROWTH_RATIO: Final = 0.125
QUIET_S: Final = 0.5

Hash = int | bytes


class TooManyBlocks(Exception):
    """An engine holds more blocks than are followed."""


class _Node:
    """One block. `copies` is how often the engine has it; 0 is a hole that others hang on."""

    __slots__ = ("children", "copies", "depth", "group", "name", "parent")

    def __init__(self, name: Hash, parent: "_Node | None", depth: int) -> None:
        self.name = name
        self.parent = parent
        self.depth = depth
        self.copies = 0
        self.children: set[_Node] | None = None
        self.group: _Group | None = None


class _Group:
    """Sessions whose last block is the same. Moved as one, however many they are."""

    __slots__ = ("node", "sessions")

    def __init__(self, node: _Node) -> None:
        self.node = node
        self.sessions: dict[str, _Session] = {}


class _Session:
    """`told` is the number of blocks that was told last, -1 before the first time."""

    __slots__ = ("group", "grown_s", "told")

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.told = -1
        self.grown_s = 0.0


@dataclass(slots=True)
class News:
    """Held tokens by session. Whoever applies them takes `shorter` first: what one session lost, another
    may have stored again since.
    """

    shorter: dict[str, int] = field(default_factory=dict)
    longer: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shorter) + len(self.longer)


class KvTree:
    """`block_tokens` is known from the first block on."""

    def __init__(self, *, blocks_max: int = BLOCKS_MAX, sessions_max: int = SESSIONS_MAX) -> None:
        self.block_tokens = 0
        # Cached blocks whose parent was not known, so that nobody can say where they belong.
        self.unplaced = 0
        self._blocks_max = blocks_max
        self._sessions_max = sessions_max
        self._nodes: dict[Hash, _Node] = {}
        self._sessions: dict[str, _Session] = {}
        self._holes = 0
        self._grown: dict[str, _Session] = {}
        self._cut: set[_Group] = set()
        self._gone: set[str] = set()

    @property
    def blocks(self) -> int:
        """Different blocks that are cached and have a place."""
        return len(self._nodes) - self._holes

    def __len__(self) -> int:
        """Everything that takes memory, holes and sessions included."""
        return (
            len(self._nodes)
            + len(self._sessions)
            + len(self._grown)
            + len(self._cut)
            + len(self._gone)
        )

    def clear(self) -> None:
        """Nothing is cached, and nothing of it is told: whoever hears of it is told so once."""
        self._nodes.clear()
        self._sessions.clear()
        self._grown.clear()
        self._cut.clear()
        self._gone.clear()
        self._holes = 0
        self.unplaced = 0

    def stored(
        self,
        hashes: Sequence[Hash],
        parent: Hash | None,
        block_tokens: int,
        session: str | None,
        now_s: float,
    ) -> None:
        """Blocks were cached, each behind the one before, the first behind `parent`.

        Raises TooManyBlocks; the tree must be cleared then.
        """
        if not hashes:
            return
        self.block_tokens = block_tokens
        above = None if parent is None else self._nodes.get(parent)
        if parent is not None and above is None:
            self.unplaced += len(hashes)
            return
        depth = 0 if above is None else above.depth
        nodes = self._nodes
        for name in hashes:
            depth += 1
            node = nodes.get(name)
            if node is None:
                if len(nodes) >= self._blocks_max:
                    raise TooManyBlocks(f"more than {self._blocks_max} blocks")
                node = nodes[name] = _Node(name, above, depth)
                if above is not None:
                    if above.children is None:
                        above.children = {node}
                    else:
                        above.children.add(node)
            elif node.copies == 0:
                self._holes -= 1
                self._touch_below(node)
            node.copies += 1
            above = node
        if session is not None and above is not None:
            self._reached(session, above, now_s)

    def removed(self, hashes: Sequence[Hash]) -> None:
        """Blocks were evicted. Unknown ones are those whose place was never known."""
        for name in hashes:
            node = self._nodes.get(name)
            if node is None:
                self.unplaced = max(0, self.unplaced - 1)
                continue
            if node.copies == 0:
                continue
            node.copies -= 1
            if node.copies:
                continue
            self._holes += 1
            if node.children:
                self._touch_below(node)
            else:
                self._prune(node)

    def held_tokens(self, session: str) -> int:
        """Leading tokens of a session that are cached; 0 when nothing is, or nothing is known."""
        known = self._sessions.get(session)
        return 0 if known is None else self._held(known.group.node) * self.block_tokens

    def retell(self) -> None:
        """Let the next news name all sessions again."""
        self._gone.clear()
        self._cut.clear()
        for name, session in self._sessions.items():
            session.told = -1
            self._grown[name] = session

    def news(self, now_s: float) -> News:
        """What changed since the last time: losses at once, growth when it is worth telling."""
        found = News(shorter=dict.fromkeys(self._gone, 0))
        self._gone.clear()
        tokens = self.block_tokens
        for group in self._cut:
            blocks = self._held(group.node)
            for name, session in group.sessions.items():
                if session.told > blocks:
                    session.told = blocks
                    found.shorter[name] = blocks * tokens
                elif session.told >= 0 and session.told < blocks:
                    # A hole was filled.
                    self._grown.setdefault(name, session)
        self._cut.clear()
        told: list[str] = []
        for name, session in self._grown.items():
            blocks = self._held(session.group.node)
            is_worth_telling = session.told <= 0 or blocks >= session.told * (1 + GROWTH_RATIO)
            if not is_worth_telling and now_s - session.grown_s < QUIET_S:
                continue
            told.append(name)
            if blocks != session.told:
                session.told = blocks
                found.longer[name] = blocks * tokens
        for name in told:
            del self._grown[name]
        return found

    # ------------------------------------------------------------ inside

    def _reached(self, name: str, node: _Node, now_s: float) -> None:
        """The session has stored up to `node`; of several answers the longest counts."""
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= self._sessions_max:
                self._drop(next(iter(self._sessions)))
            session = self._sessions[name] = _Session(_join(node))
            session.group.sessions[name] = session
            self._gone.discard(name)
        elif session.group.node.depth < node.depth:
            self._leave(name, session)
            session.group = _join(node)
            session.group.sessions[name] = session
        else:
            return
        session.grown_s = now_s
        self._grown[name] = session

    def _leave(self, name: str, session: _Session) -> None:
        group = session.group
        del group.sessions[name]
        if not group.sessions:
            group.node.group = None
            self._cut.discard(group)

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name)
        self._leave(name, session)
        self._grown.pop(name, None)
        self._gone.add(name)

    def _prune(self, node: _Node) -> None:
        """Take out a hole that nothing hangs on; its sessions end one block before it."""
        while True:
            del self._nodes[node.name]
            self._holes -= 1
            above = node.parent
            if above is not None and above.children is not None:
                above.children.discard(node)
                if not above.children:
                    above.children = None
            if node.group is not None:
                self._move(node.group, above)
                node.group = None
            if above is None or above.copies or above.children:
                return
            node = above

    def _move(self, group: _Group, node: _Node | None) -> None:
        if node is None:
            for name in group.sessions:
                del self._sessions[name]
                self._grown.pop(name, None)
                self._gone.add(name)
            self._cut.discard(group)
            return
        other = node.group
        if other is None:
            group.node = node
            node.group = group
            self._cut.add(group)
            return
        # The smaller joins the larger, so that a session seldom changes its group.
        small, large = (
            (group, other) if len(group.sessions) < len(other.sessions) else (other, group)
        )
        for name, session in small.sessions.items():
            session.group = large
            large.sessions[name] = session
        large.node = node
        node.group = large
        self._cut.discard(small)
        self._cut.add(large)

    def _touch_below(self, node: _Node) -> None:
        """Whoever hangs on this block has become shorter, or longer again."""
        self._cut.update(each.group for each in _walk(node) if each.group is not None)

    def _held(self, node: _Node) -> int:
        """Blocks from the beginning to `node`, or to the first hole before it."""
        held = node.depth
        if not self._holes:
            return held
        at: _Node | None = node
        while at is not None:
            if at.copies == 0:
                held = at.depth - 1
            at = at.parent
        return held


def _join(node: _Node) -> _Group:
    if node.group is None:
        node.group = _Group(node)
    return node.group


def _walk(node: _Node) -> Iterator[_Node]:
    open_nodes = [node]
    while open_nodes:
        at = open_nodes.pop()
        yield at
        if at.children:
            open_nodes.extend(at.children)
