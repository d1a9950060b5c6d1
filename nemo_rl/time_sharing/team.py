"""The users and groups of a pool that a team shares: who a token belongs to, and what its user may do.

Decides without Ray, a clock or the pool. Invariants: a token is kept as its SHA-256 only, and no message repeats one;
what no rule allows is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.config.errors import ConfigError, UserError, did_you_mean
from nemo_rl.config.layers import read_yaml
from nemo_rl.time_sharing.job_queue import JobLimits, Owner
from nemo_rl.time_sharing.protocol.quotas import QuotaNode, share_problems
from nemo_rl.utils.files import read_trusted

ROLES = ("viewer", "member", "lead", "admin")
"""Each may do what the ones before it may."""
TOKEN_VARIABLE, TOKEN_FILE = "NRL_POOL_TOKEN", "~/.config/nemo_rl/pool_token"
"""Where a user's own token is; the variable comes first."""
SUBMIT, RELOAD, SUBMIT_HIGH = "submit", "reload", "submit with priority high"
DRAIN_NODE, ADD_NODE, GIVE_BACK = "drain-node", "add-node", "give-back"
_LEAST = {SUBMIT: "member", SUBMIT_HIGH: "lead"}
_LEAST |= dict.fromkeys((RELOAD, DRAIN_NODE, ADD_NODE, GIVE_BACK), "admin")
"""The least role for actions that are on no user's job."""
_LEVELS = 3
HALF_LIFE_HOURS = 4.0
_SHOWN = 8


class TeamError(UserError, RuntimeError):
    """A user may not do something, or is none of the team."""


class TeamFileError(ConfigError):
    """The team file cannot be used."""

    subject = "The team file"


@dataclass(frozen=True)
class User:
    """One user of the team."""

    name: str
    group: str
    role: str
    token_sha256: tuple[str, ...] = field(repr=False)
    unix_user: str = ""  # as whom the user's jobs run under --run-as-submitter, where it is not the user's own name

    @property
    def runs_as(self) -> str:
        """The Unix user of the user's jobs under --run-as-submitter."""
        return self.unix_user or self.name

    def __str__(self) -> str:
        return f"{self.name} ({self.role} of {self.group})"


@dataclass(frozen=True)
class Rights:
    """What the user of a token may do now. `jobs`: those that it may drain and cancel, and whose logs it may read."""

    user: str
    role: str
    jobs: frozenset[str]


@dataclass(frozen=True)
class Team:
    """Groups by name, each with its parent ("" at the top), and users by name. `source`: the file. `queue`: limits of
    `group NAME` and `user NAME`, where there are any. `nodes`: the same with their shares and limits of GPUs.
    `half_life_hours`: after so many, use of the pool counts half for the shares.
    """

    source: str
    groups: Mapping[str, str]
    users: Mapping[str, User]
    queue: Mapping[str, JobLimits] = field(default_factory=dict)
    nodes: tuple[QuotaNode, ...] = ()
    half_life_hours: float = HALF_LIFE_HOURS

    @property
    def shares_gpus(self) -> bool:
        """Whether it says anything about GPUs."""
        return any(node.share is not None or node.limit is not None for node in self.nodes)

    def user_of(self, token: str) -> User:
        """The user of a token. Raises TeamError: the token is no user's."""
        if not token:
            raise TeamError(
                f"the pool is for a team and asks for your token: set {TOKEN_VARIABLE} to it, or write it to "
                f"{TOKEN_FILE} (mode 0600); an admin of the team gives you one"
            )
        shown, found = hash_of(token), None
        for user in self.users.values():
            # All of them are compared, so that the time shows nothing.
            for known in user.token_sha256:
                found = user if hmac.compare_digest(known, shown) else found
        if found is None:
            raise TeamError(
                "the token is no user's of this pool's team (it may have been revoked); ask an admin of the team"
            )
        return found

    def may_manage(self, user: User, owner: Owner) -> bool:
        """Whether a user may drain and cancel a job, and read its logs."""
        rank = ROLES.index(user.role)
        own = rank >= ROLES.index("member") and user.name == owner.user
        leads = rank >= ROLES.index("lead") and f"group {user.group}" in self.above(owner)
        return own or leads or user.role == "admin"

    def check(self, user: User, action: str, subject: str, owner: Owner | None = None) -> None:
        """Raises TeamError: the user may not do this. `owner`: of the job that it concerns, if it is one's."""
        everybody, roles = self.users.values(), ROLES[ROLES.index(_LEAST.get(action, "viewer")) :]
        if user.role not in roles:
            raise TeamError(
                f"{user} may not {action} {subject}: that takes the role {' or '.join(roles)}, which "
                f"{self._named(other for other in everybody if other.role in roles)}"
            )
        if owner is not None and not self.may_manage(user, owner):
            others = self._named(other for other in everybody if self.may_manage(other, owner))
            raise TeamError(
                f"{user} may not {action} {subject}, a job of {owner.user or 'no user'} ({owner.group or 'no group'}): "
                f"that takes its own user as a member, a lead of its group or of one above, or an admin, which {others}"
            )

    @staticmethod
    def _named(users: Iterable[User]) -> str:
        names = sorted(user.name for user in users)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more} {'are' if len(names) > 1 else 'is'}"

    def above(self, owner: Owner) -> Iterator[str]:
        """What a job of this owner counts for: `user NAME`, and `group NAME` of its group and those above that."""
        yield f"user {owner.user}"
        group = owner.group
        while group in self.groups:
            yield f"group {group}"
            group = self.groups[group]


def changes(old: Team, new: Team) -> list[str]:
    """What a new version of the team file changes, a line each."""
    said, before, after = list[str](), _keys_of(old), _keys_of(new)
    for whose in sorted(before.keys() | after.keys()):
        kind, _, name = whose.partition(" ")
        if whose not in before or whose not in after:
            there, what = (old, "removed") if whose in before else (new, "added")
            said.append(f"{kind} {there.users[name] if kind == 'user' else name}: {what}")
            continue
        was, now = before[whose], after[whose]
        said += [f"{whose}: {key} {was[key]} -> {now[key]}" for key in was if was[key] != now[key]]
        if kind == "user":
            had, has = (set(team.users[name].token_sha256) for team in (old, new))
            for what, count in (("added", len(has - had)), ("revoked", len(had - has))):
                said += [f"{whose}: {count} {'token' if count == 1 else 'tokens'} {what}"] if count else []
    if old.half_life_hours != new.half_life_hours:
        said.append(f"half_life_hours: {old.half_life_hours:g} -> {new.half_life_hours:g}")
    return said


def _keys_of(team: Team) -> dict[str, dict[str, str]]:
    """What a team file says of each group and user, but for tokens, as text by key."""
    said = {f"group {name}": {"parent": parent or "none"} for name, parent in team.groups.items()}
    said |= {f"user {n}": {"group": u.group, "role": u.role, "unix_user": u.runs_as} for n, u in team.users.items()}
    for node in team.nodes:
        for key, number in (("share", node.share), ("limit", node.limit)):
            said[node.name][key] = "none" if number is None else f"{number:g}"
        for key, most in team.queue.get(node.name, JobLimits())._asdict().items():
            said[node.name][key] = "any" if most is None else str(most)
    return said


# -- tokens ----------------------------------------------------------------------------------------------------------


def new_token() -> str:
    """A fresh token."""
    return secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What a team file holds of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def own_token() -> str:
    """The token of this process's user; "" where there is none. Raises NotPrivate: others may read its file."""
    if given := os.environ.get(TOKEN_VARIABLE, ""):
        return given.strip()
    must = "must belong to you and be readable by you alone (chmod 600); what others have read is no secret any more"
    try:
        return read_trusted(Path(TOKEN_FILE).expanduser(), 0o077, {os.getuid()}, must).strip()
    except FileNotFoundError:
        return ""


# -- the file --------------------------------------------------------------------------------------------------------

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]
_HASH = re.compile(r"[0-9a-f]{64}")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _QuotaKeys(_Keys):
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    jobs: Annotated[int, Field(ge=1)] | None = None
    waiting: Annotated[int, Field(ge=0)] | None = None


class _GroupKeys(_QuotaKeys):
    parent: str | None = None


class _UserKeys(_QuotaKeys):
    group: str
    role: Literal["viewer", "member", "lead", "admin"] = "member"
    token_sha256: Annotated[list[str], Field(min_length=1), BeforeValidator(_listed)]
    unix_user: str = ""


class _TeamKeys(_Keys):
    groups: dict[_Name, _GroupKeys | None]
    users: dict[_Name, _UserKeys]
    half_life_hours: Annotated[float, Field(gt=0, le=24 * 365)] = HALF_LIFE_HOURS


def read_team(path: Path) -> Team:
    """The team of a file. Raises TeamFileError: there is none, or it has mistakes; NotPrivate: others may write it, or
    it is another user's.
    """
    source = path.resolve()
    must = (
        "a team file must belong to you or root and be writable by its owner alone (chmod go-w), since it says who may "
        "administer the pool"
    )
    try:
        content = read_yaml(read_trusted(source, 0o022, {0, os.getuid()}, must))
    except FileNotFoundError as error:
        raise TeamFileError(["there is no such file"], str(path)) from error
    except yaml.YAMLError as error:
        raise TeamFileError([f"is not YAML: {error}"], str(path)) from error
    try:
        keys = _TeamKeys.model_validate(content)
    except ValidationError as error:
        raise TeamFileError([_problem(one) for one in error.errors(include_url=False)], str(path)) from error
    users = {
        name: User(name, user.group, user.role, tuple(one.lower() for one in user.token_sha256), user.unix_user)
        for name, user in keys.users.items()
    }
    groups = {name: one or _GroupKeys() for name, one in keys.groups.items()}
    quotas: dict[str, tuple[str, _QuotaKeys]] = {f"group {n}": (one.parent or "", one) for n, one in groups.items()}
    quotas |= {f"user {name}": (one.group, one) for name, one in keys.users.items()}
    queue = {
        whose: JobLimits(one.jobs, one.waiting)
        for whose, (_, one) in quotas.items()
        if one.jobs is not None or one.waiting is not None
    }
    nodes = (
        QuotaNode(whose, above and f"group {above}", one.share, one.limit) for whose, (above, one) in quotas.items()
    )
    parents = {name: one.parent or "" for name, one in groups.items()}
    team = Team(str(source), parents, users, queue, tuple(nodes), keys.half_life_hours)
    if problems := [*_wrong_groups(team), *_wrong_users(team), *share_problems(team.nodes)]:
        raise TeamFileError(problems, str(path))
    return team


def _problem(error: ErrorDetails) -> str:
    at = [str(part) for part in error["loc"]]
    key = ".".join(at)
    if error["type"] == "model_type":
        keys = _TeamKeys if not at else _GroupKeys if at[0] == "groups" else _UserKeys
        return f"{key or 'the file'}: expected a mapping with {', '.join(keys.model_fields)}"
    if error["type"] == "extra_forbidden":
        keys = _TeamKeys if len(at) == 1 else _GroupKeys if at[0] == "groups" else _UserKeys
        known = list(keys.model_fields)
        return f"{key}: unknown key.{did_you_mean(at[-1], known) or ' There is ' + ', '.join(known) + '.'}"
    if at[-1] == "[key]":
        return f"{'.'.join(at[:-1])}: a name is 1 to 64 letters, digits and _.@-, and begins with a letter or digit"
    # What stands in another place may be a token.
    shown = f" (found {error['input']!r})" if at[-1] in ("role", "group", "parent") and len(at) == 3 else ""
    shown = "" if error["type"] == "missing" else shown
    return f"{key}: {error['msg']}{shown}"


def _wrong_groups(team: Team) -> Iterator[str]:
    for name, parent in team.groups.items():
        if parent and parent not in team.groups:
            yield f"groups.{name}.parent: there is no group {parent!r}.{did_you_mean(parent, team.groups)}"
            continue
        way = [name]
        while (above := team.groups.get(way[-1], "")) and above not in way:
            way.append(above)
        if above:
            yield f"groups.{name}: is above itself ({' below '.join([*way, above])})"
        elif len(way) > _LEVELS:
            yield f"groups.{name}: is on level {len(way)} ({' below '.join(way)}); there are {_LEVELS} at most"


def _wrong_users(team: Team) -> Iterator[str]:
    whose: dict[str, str] = {}
    for name, user in team.users.items():
        if user.group not in team.groups:
            yield f"users.{name}.group: there is no group {user.group!r}.{did_you_mean(user.group, team.groups)}"
        for known in user.token_sha256:
            if not _HASH.fullmatch(known):
                yield (
                    f"users.{name}.token_sha256: is no SHA-256 in 64 hexadecimal digits; "
                    "python -m nemo_rl.time_sharing token makes a token and prints it"
                )
            elif known in whose:
                also = "twice" if whose[known] == name else f"of {whose[known]} too"
                yield f"users.{name}.token_sha256: {known[:8]}... is there {also}; a token belongs to one user"
            whose.setdefault(known, name)
    if not any(user.role == "admin" for user in team.users.values()):
        yield "users: none has the role admin, without whom the team could not be changed; give it to one"
