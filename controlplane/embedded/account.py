"""The unprivileged account under which PostgreSQL runs when Headway runs as root, and what it can
reach.
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from controlplane.domain.errors import ConfigurationError

# A dedicated account is used where an administrator made one; `nobody` exists on every Linux.
ACCOUNT_NAMES = ("headway", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    name: str
    uid: int
    gid: int

    def can_traverse(self, folder: Path) -> bool:
        """Whether the permission bits of `folder` and everything above it let this account pass."""
        return all(self._may_enter(part) for part in (folder, *folder.parents))

    def _may_enter(self, folder: Path) -> bool:
        facts = folder.stat()
        if facts.st_uid == self.uid:
            return bool(facts.st_mode & stat.S_IXUSR)
        if facts.st_gid == self.gid:
            return bool(facts.st_mode & stat.S_IXGRP)
        return bool(facts.st_mode & stat.S_IXOTH)

    def take(self, folder: Path) -> None:
        """Make everything under `folder` this account's, unless it already is."""
        if folder.stat().st_uid == self.uid:
            return
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(Path(parent) / name, self.uid, self.gid, follow_symlinks=False)
        # Last, so that an interrupted walk is repeated.
        os.chown(folder, self.uid, self.gid)


def unprivileged_account() -> Account | None:
    """Whom to become before starting PostgreSQL, which refuses root; None when not root."""
    if os.geteuid() != 0:
        return None
    for name in ACCOUNT_NAMES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise ConfigurationError(
        "PostgreSQL does not run as root, and this machine has none of the accounts"
        f" {', '.join(ACCOUNT_NAMES)}: create one, run as another user, or set DATABASE_URL"
    )
