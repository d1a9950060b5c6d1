"""Users and groups of a pool: the team file, what roles allow, and what the pool's actor makes of it."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl.config.errors import UserError
from nemo_rl.time_sharing import team as teams
from nemo_rl.time_sharing.__main__ import main
from nemo_rl.time_sharing.agents import host_use, scheduler_actor
from nemo_rl.time_sharing.log.pool_state import Submission
from nemo_rl.time_sharing.pipelines.command_config import CommandConfig
from nemo_rl.time_sharing.pipelines.grpo import PoolHandles
from nemo_rl.time_sharing.pipelines.job import Job
from nemo_rl.time_sharing.pool import PoolActor
from nemo_rl.time_sharing.pool_jobs import PoolError
from nemo_rl.time_sharing.protocol.topology import Pool
from nemo_rl.time_sharing.protocol.types import Limits
from nemo_rl.time_sharing.team import (
    ROLES,
    Owner,
    Team,
    TeamError,
    TeamFileError,
    User,
    changes,
    hash_of,
    own_token,
    read_team,
)
from nemo_rl.utils.files import NotPrivate

TOKENS = {name: f"token-of-{name}" for name in ("ann", "bob", "carol", "dan", "eve", "vic")}
GROUPS: dict[str, Any] = {
    "lab": None,
    "nlp": {"parent": "lab"},
    "vision": {"parent": "lab"},
    "ocr": {"parent": "vision"},
}
USERS: dict[str, Any] = {
    "ann": {"group": "vision"},
    "bob": {"group": "nlp", "role": "member"},
    "carol": {"group": "vision", "role": "lead"},
    "dan": {"group": "lab", "role": "admin"},
    "eve": {"group": "ocr"},
    "vic": {"group": "lab", "role": "viewer"},
}


def content() -> dict[str, Any]:
    users = {name: {**keys, "token_sha256": hash_of(TOKENS[name])} for name, keys in USERS.items()}
    return {"groups": dict(GROUPS), "users": users}


def write(folder: Path, given: object, mode: int = 0o600) -> Path:
    path = folder / "team.yaml"
    path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
    path.chmod(mode)
    return path


@pytest.fixture
def team(tmp_path: Path) -> Team:
    return read_team(write(tmp_path, content()))


def test_a_token_is_its_users_and_only_its_hash_is_kept(team: Team) -> None:
    assert {name: team.user_of(token).name for name, token in TOKENS.items()} == {name: name for name in TOKENS}
    assert team.user_of(TOKENS["ann"]).role == "member", "the default"
    assert not any(token in repr(team) or hash_of(token) in repr(team) for token in TOKENS.values())
    for wrong in ("x", TOKENS["ann"] + " ", hash_of(TOKENS["ann"]), "\u00e4"):
        with pytest.raises(TeamError, match=r"no user's of this pool's team .*revoked") as refused:
            team.user_of(wrong)
        assert TOKENS["ann"] not in str(refused.value)
    with pytest.raises(TeamError, match="set NRL_POOL_TOKEN to it, or write it to ~/.config/nemo_rl/pool_token"):
        team.user_of("")


@pytest.mark.parametrize(
    ("who", "may"),
    [
        ("ann", {"ann"}),
        ("bob", {"bob"}),
        ("carol", {"ann", "carol", "eve"}),
        ("dan", {*TOKENS}),
        ("eve", {"eve"}),
        ("vic", set()),
    ],
)
def test_a_role_reaches_own_jobs_those_of_groups_below_or_all(team: Team, who: str, may: set[str]) -> None:
    user = team.users[who]
    owners = {name: Owner(name, other.group) for name, other in team.users.items()}
    assert {name for name, owner in owners.items() if team.may_manage(user, owner)} == may
    for name, owner in owners.items():
        if name in may:
            team.check(user, "cancel", "job", owner)
        else:
            with pytest.raises(
                TeamError, match=rf"^{who} \({user.role} of {user.group}\) may not cancel job, a job of"
            ):
                team.check(user, "cancel", "job", owner)


def test_a_refusal_names_the_role_that_it_takes_and_who_has_it(team: Team) -> None:
    with pytest.raises(TeamError) as refused:
        team.check(team.users["bob"], "drain", "scan", Owner("eve", "ocr"))
    assert str(refused.value) == (
        "bob (member of nlp) may not drain scan, a job of eve (ocr): that takes its own user as a member, a lead of "
        "its group or of one above, or an admin, which carol, dan, eve are"
    )
    with pytest.raises(
        TeamError, match=r"vic \(viewer of lab\) may not submit a: .* the role member or lead or admin, which ann"
    ):
        team.check(team.users["vic"], "submit", "a")
    with pytest.raises(TeamError, match=r"carol .* may not reload f: that takes the role admin, which dan is$"):
        team.check(team.users["carol"], "reload", "f")
    # A job from before its group went, or from before there was a team, is the admins' alone.
    with pytest.raises(TeamError, match=r"a job of no user \(no group\): .*, which dan is$"):
        team.check(team.users["carol"], "cancel", "old", Owner("", ""))


names = st.sampled_from([f"g{i}" for i in range(5)])


@given(st.dictionaries(names, st.one_of(st.just(""), names), min_size=1), st.data())
def test_each_role_may_do_what_the_one_before_it_may(parents: dict[str, str], data: st.DataObject) -> None:
    groups = {name: parent for name, parent in parents.items() if parent != name and parents.get(parent) == ""} | {
        name: "" for name, parent in parents.items() if parent == ""
    }
    group = data.draw(st.sampled_from(sorted(groups) or ["none"]))
    owner = Owner(data.draw(st.sampled_from(["me", "other"])), data.draw(names))
    users = {role: User("me", group, role, ()) for role in ROLES}
    made = Team("", groups, {})
    may = [made.may_manage(users[role], owner) for role in ROLES]
    assert may == sorted(may) and not may[0] and may[-1]
    assert not may[1] or owner.user == "me"
    assert not may[2] or owner.user == "me" or group in {owner.group, groups.get(owner.group)}


def spoilt(*keys: str, value: object) -> dict[str, Any]:
    made = content()
    place = made
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return made


BAD: list[tuple[object, str]] = [
    (spoilt("userz", value={}), "userz: unknown key. Did you mean 'users'?"),
    (spoilt("users", "ann", "rol", value="lead"), "users.ann.rol: unknown key. Did you mean 'role'?"),
    (
        spoilt("users", "ann", "password", value="x"),
        "users.ann.password: unknown key. There is share, limit, jobs, waiting, group, role, token_sha256, unix_user.",
    ),
    (spoilt("groups", "nlp", value={"parents": "lab"}), "groups.nlp.parents: unknown key. Did you mean 'parent'?"),
    (
        spoilt("groups", "nlp", value={"parent": "lab", "share": 0.5}),
        "groups.vision.share: has no share, and group nlp beside it has one; give it a share (0 lets it run on what "
        "others leave)",
    ),
    (
        spoilt("groups", value={"lab": None, **{n: {"parent": "lab", "share": 0.6} for n in ("vision", "nlp", "ocr")}}),
        "groups.nlp.share: the shares of group lab add up to 1.8 (group nlp 0.6, group ocr 0.6, group vision 0.6); "
        "together they are 1 at most",
    ),
    (spoilt("groups", "nlp", value={"share": 1.5}), "groups.nlp.share: Input should be less than or equal to 1"),
    (spoilt("users", "ann", "limit", value=0), "users.ann.limit: Input should be greater than 0"),
    (spoilt("half_life_hours", value=0), "half_life_hours: Input should be greater than 0"),
    (spoilt("users", "ann", "role", value="boss"), "users.ann.role: Input should be 'viewer'.*found 'boss'"),
    (
        spoilt("users", "ann", "group", value="visoin"),
        "users.ann.group: there is no group 'visoin'. Did you mean 'vision'?",
    ),
    (spoilt("groups", "ocr", value={"parent": "x"}), "groups.ocr.parent: there is no group 'x'."),
    (
        spoilt("groups", "deep", value={"parent": "ocr"}),
        r"groups.deep: is on level 4 .deep below ocr below vision below lab",
    ),
    (spoilt("groups", "lab", value={"parent": "ocr"}), "groups.lab: is above itself"),
    (spoilt("groups", "nlp", value={"parent": "nlp"}), "groups.nlp: is above itself (nlp below nlp)"),
    (spoilt("users", "ann", "token_sha256", value="secret-token"), "users.ann.token_sha256: is no SHA-256 in 64 hexa"),
    (spoilt("users", "ann", "token_sha256", value=[]), "users.ann.token_sha256: List should have at least 1 item"),
    (spoilt("users", "ann", "token_sha256", value=hash_of(TOKENS["bob"]).upper()), "users.bob.*is there of ann too"),
    (spoilt("users", "ann", "token_sha256", value=[hash_of("a")] * 2), "users.ann.token_sha256: .* is there twice"),
    (spoilt("users", "dan", "role", value="lead"), "users: none has the role admin"),
    (
        spoilt("users", "a b", value={"group": "nlp", "token_sha256": hash_of("x")}),
        "users.a b: a name is 1 to 64 letters",
    ),
    (
        spoilt("users", "ann", value="secret-token"),
        "users.ann: expected a mapping with share, limit, jobs, waiting, group, role, token_sha256, unix_user",
    ),
    (spoilt("users", "ann", value={"group": "nlp"}), "users.ann.token_sha256: Field required"),
    ({"groups": {}}, "users: Field required"),
    ("", "the file: expected a mapping with groups, users, half_life_hours"),
    ("users: {a: 1, a: 2}", "is not YAML: "),
    ("users: [", "is not YAML: "),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_a_mistake_in_the_team_file_is_said_by_its_key_and_no_token_with_it(
    given: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TeamFileError) as refused:
        read_team(write(tmp_path, given))
    text = str(refused.value)
    assert said in text or re.search(said, text), text
    assert str(tmp_path / "team.yaml") in text and "secret-token" not in text


def test_a_team_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    for mode in (0o620, 0o602, 0o666):
        with pytest.raises(
            NotPrivate, match=r"team.yaml: a team file must .*writable by its owner alone \(chmod go-w\)"
        ):
            read_team(write(tmp_path, content(), mode))
    read_team(write(tmp_path, content(), 0o644))
    with pytest.raises(TeamFileError, match="there is no such file"):
        read_team(tmp_path / "none.yaml")
    with pytest.raises(NotPrivate, match="a team file must"):
        read_team(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_team_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    os.chown(path, 65534, -1)
    with pytest.raises(NotPrivate, match="must belong to you or root"):
        read_team(path)


def test_the_token_of_a_user_is_in_a_variable_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NRL_POOL_TOKEN", raising=False)
    assert own_token() == ""
    path = tmp_path / ".config" / "nemo_rl" / "pool_token"
    path.parent.mkdir(parents=True)
    path.write_text("of the file\n")
    path.chmod(0o600)
    assert own_token() == "of the file"
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(
            NotPrivate, match=r"pool_token: must belong to you and be readable by you alone \(chmod 600\)"
        ):
            own_token()
    monkeypatch.setenv("NRL_POOL_TOKEN", "of the variable")
    assert own_token() == "of the variable"


def test_the_command_prints_a_token_and_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token"]) == main(["token"]) == 0
    one, its_hash, other, _ = (line.partition(": ")[2] for line in capsys.readouterr().out.splitlines())
    assert hash_of(one) == its_hash and len(one) >= 40 and one != other


def test_changes_of_a_team_are_said_a_line_each(team: Team, tmp_path: Path) -> None:
    after = content()
    del after["users"]["bob"], after["groups"]["nlp"]
    after["groups"] |= {"audio": None, "ocr": {"parent": "lab"}}
    after["users"]["new"] = {"group": "audio", "token_sha256": hash_of("new")}
    after["users"]["ann"] |= {
        "role": "lead",
        "group": "ocr",
        "unix_user": "anna",
        "token_sha256": [hash_of("second"), hash_of("third")],
    }
    assert changes(team, read_team(write(tmp_path, after))) == [
        "group audio: added",
        "group nlp: removed",
        "group ocr: parent vision -> lab",
        "user ann: group vision -> ocr",
        "user ann: role member -> lead",
        "user ann: unix_user ann -> anna",
        "user ann: 2 tokens added",
        "user ann: 1 token revoked",
        "user bob (member of nlp): removed",
        "user new (member of audio): added",
    ]
    assert changes(team, team) == []
    limited = content()
    limited["groups"]["vision"] |= {"jobs": 2, "waiting": 0}
    limited["users"]["ann"]["jobs"] = 1
    assert changes(team, read_team(write(tmp_path, limited))) == [
        "group vision: jobs any -> 2",
        "group vision: waiting any -> 0",
        "user ann: jobs any -> 1",
    ]


# -- the pool's actor ------------------------------------------------------------------------------------------------


class Actor:
    """A pool's actor without Ray; `events` are what it has the scheduler write."""

    def __init__(self, folder: Path, team: Team | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str, str, str]] = []
        self.pool = PoolActor(PoolHandles(None, Pool(1, 2), "cuda", Limits(), str(folder)), team)
        monkeypatch.setattr(self.pool, "_note_acted", lambda *event: self.events.append(event))
        for name in ("end", "_drain", "_adapters"):
            monkeypatch.setattr(self.pool, name, lambda job, *_, name=name: f"{name} {self.pool._known(job).name}")
        for name, user in (("scan", "ann"), ("chat", "bob")):
            group = USERS[user]["group"]
            self.pool._submissions[name] = Submission(name, (), (0,), 0.0, user=user, group=group)


@pytest.fixture
def actor(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Actor:
    return Actor(tmp_path, team, monkeypatch)


def test_the_pool_does_what_a_role_allows_and_notes_all_of_it(actor: Actor) -> None:
    pool = actor.pool
    assert pool.cancel("scan", TOKENS["ann"]) == "end scan" and pool.drain("scan", TOKENS["carol"]) == "_drain scan"
    assert pool.adapters("chat", "list", [], TOKENS["dan"]) == "_adapters chat"
    pool.see_logs("chat", TOKENS["bob"])
    actions: list[tuple[Any, str]] = [
        (lambda token: pool.cancel("chat", token), "cancel chat"),
        (lambda token: pool.drain("chat", token), "drain chat"),
        (lambda token: pool.adapters("chat", "add", [], token), "add adapters of chat"),
        (lambda token: pool.see_logs("chat", token), "see the logs of chat"),
        (lambda token: pool.submit(SimpleNamespace(name="chat"), token), "submit chat"),
        (pool.reload, "reload /"),
    ]
    for act, what in actions:
        for token, why in ((TOKENS["ann"], f"ann .* may not {what}"), ("revoked", "no user's"), ("", "asks for your")):
            with pytest.raises(TeamError, match=why):
                act(token)
    assert pool.rights(TOKENS["carol"]).jobs == {"scan"} and pool.rights(TOKENS["dan"]).jobs == {"scan", "chat"}
    with pytest.raises(PoolError, match="no pipeline 'none'"):
        pool.cancel("none", TOKENS["ann"])
    done, refused = actor.events[:4], actor.events[4:]
    assert done == [
        ("ann", "cancel", "scan", "done"),
        ("carol", "drain", "scan", "done"),
        ("dan", "list adapters of", "chat", "done"),
        ("bob", "see the logs of", "chat", "done"),
    ]
    assert [event[0] for event in refused] == ["ann", "", ""] * 6 + ["ann"]
    assert all(outcome.startswith("refused: ") for *_, outcome in refused)


def test_a_job_has_the_user_and_group_of_its_submission(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor.pool, "_submit", lambda job: job)
    config = CommandConfig(command=["true"])
    forged = Job("new", config, (), (0,), {"slice_s": 1.0, "user": "dan", "group": "lab"})
    assert actor.pool.submit(forged, TOKENS["ann"]).options == {"slice_s": 1.0, "user": "ann", "group": "vision"}
    assert actor.pool.submit(replace(forged, name="scan"), TOKENS["carol"]).options["user"] == "carol"
    assert [event[:3] for event in actor.events] == [("ann", "submit", "new"), ("carol", "submit", "scan")]


def test_without_a_team_no_token_is_asked_for_or_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Actor(tmp_path, None, monkeypatch)
    assert alone.pool.cancel("scan") == "end scan" and alone.pool.about().team == "" and not alone.events
    assert not (tmp_path / "team.json").exists()
    for ask in (alone.pool.reload, alone.pool.rights):
        with pytest.raises(PoolError, match="the pool is for no team; open one with .* --team FILE"):
            ask("x")


def test_a_reload_says_what_changed_and_a_file_with_mistakes_changes_nothing(actor: Actor, tmp_path: Path) -> None:
    after = content()
    del after["users"]["bob"]
    write(tmp_path, after)
    assert actor.pool.rights(TOKENS["bob"]).user == "bob", "not before it is read"
    write(tmp_path, after, 0o666)
    with pytest.raises(UserError, match="chmod go-w"):
        actor.pool.reload(TOKENS["dan"])
    write(tmp_path, spoilt("users", "dan", "role", value="lead"))
    with pytest.raises(TeamFileError, match="none has the role admin"):
        actor.pool.reload(TOKENS["dan"])
    assert actor.pool.rights(TOKENS["bob"]).user == "bob"
    write(tmp_path, after)
    said = actor.pool.reload(TOKENS["dan"])
    assert said == ["user bob (member of nlp): removed", "job chat of bob, who is gone, goes on"]
    with pytest.raises(TeamError, match="revoked"):
        actor.pool.cancel("chat", TOKENS["bob"])
    assert actor.events[2] == ("dan", "reload", str(tmp_path / "team.yaml"), "done")
    assert actor.events[1][3].startswith("refused: The team file")


def test_a_restarted_actor_has_the_team_of_the_last_reload(
    actor: Actor, team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = content()
    del after["users"]["bob"]
    write(tmp_path, after)
    actor.pool.reload(TOKENS["dan"])
    kept = tmp_path / "team.json"
    assert kept.stat().st_mode & 0o777 == 0o600 and not any(token in kept.read_text() for token in TOKENS.values())
    assert "ann" in json.loads(kept.read_text())["users"]
    monkeypatch.setattr("nemo_rl.time_sharing.pool.started_anew", lambda: True)
    with pytest.raises(TeamError, match="revoked"):
        Actor(tmp_path, team, monkeypatch).pool.rights(TOKENS["bob"])
    monkeypatch.setattr("nemo_rl.time_sharing.pool.started_anew", lambda: False)
    assert Actor(tmp_path, team, monkeypatch).pool.rights(TOKENS["bob"]).user == "bob"


class Scheduler:
    """A scheduler that answers once it is there."""

    def __init__(self) -> None:
        self.up, self.quotas = True, list[object]()
        self.set_quotas = SimpleNamespace(remote=lambda nodes, half_life_s: nodes)

    def get(self, nodes: object, timeout: float) -> dict[str, float]:
        if not self.up:
            raise ray.exceptions.RayActorError
        self.quotas.append(nodes)
        return {}


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Scheduler, Callable[[], PoolActor], Team]:
    """A scheduler, what makes an actor of the pool, and a team with a limit."""
    scheduler, limits = Scheduler(), content()
    limits["groups"]["nlp"] = {"parent": "lab", "limit": 1.0}
    team = read_team(write(tmp_path, limits))
    handles = PoolHandles(scheduler, Pool(1, 2), "cuda", Limits(), str(tmp_path))  # type: ignore[arg-type]
    monkeypatch.setattr(host_use.HostWatch, "_run", lambda *_: None)
    monkeypatch.setattr(PoolActor, "_note_acted", lambda *_: None)
    monkeypatch.setattr(ray, "get", scheduler.get)
    return scheduler, lambda: PoolActor(handles, team), team


def test_an_actor_that_cannot_restart_yet_is_restarted_again(
    limited: tuple[Scheduler, Callable[[], PoolActor], Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives an actor up whose constructor raises, and every command of the pool fails then, for good."""
    scheduler, opened, team = limited
    scheduler.up = False
    with pytest.raises(ray.exceptions.RayActorError):
        opened()
    for module in ("pool", "agents.scheduler_actor"):
        monkeypatch.setattr(f"nemo_rl.time_sharing.{module}.started_anew", lambda: True)
    monkeypatch.setattr(scheduler_actor, "_AGAIN_S", 0.0)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        opened()
    scheduler.up = True

    def full(*_: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for module in ("pool", "log.pool_state"):
            patch.setattr(f"nemo_rl.time_sharing.{module}.replace_file", full)
        assert opened().about().team == team.source
    (tmp_path / "pool.json").write_text("{")
    with pytest.raises(SystemExit, match="1"):
        opened()


def test_a_reload_that_the_scheduler_does_not_hear_of_is_no_reload(
    limited: tuple[Scheduler, Callable[[], PoolActor], Team], tmp_path: Path
) -> None:
    scheduler, opened, _ = limited
    pool, raised = opened(), content()
    raised["groups"]["nlp"] = {"parent": "lab", "limit": 2.0}
    write(tmp_path, raised)
    scheduler.up = False
    with pytest.raises(PoolError, match=r"the scheduler does not answer \(RayActorError\); reload again"):
        pool.reload(TOKENS["dan"])
    scheduler.up = True
    assert pool.reload(TOKENS["dan"]) == ["group nlp: limit 1 -> 2"] and len(scheduler.quotas) == 2


def test_a_job_that_needs_more_than_its_limit_is_refused_or_waits_or_is_named(
    limited: tuple[Scheduler, Callable[[], PoolActor], Team], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, opened, _ = limited
    pool, begun = opened(), list[str]()
    monkeypatch.setattr(pool, "create_pipeline_actor", lambda job, _: begun.append(job.name))
    monkeypatch.setattr(pool, "_begin_watch", lambda _: None)

    def reload(limit: float, **keys: object) -> list[str]:
        now = content()
        now["groups"]["nlp"] = {"parent": "lab", "limit": limit, **keys}
        write(tmp_path, now)
        return pool.reload(TOKENS["dan"])

    wide = Job("wide", CommandConfig(command=["true"], gpus=2), (), (0, 1))
    above = "group nlp may have 1 GPUs at once, and it needs 2"
    with pytest.raises(PoolError, match=f"wide: {above}; make it smaller, or ask an admin for a higher limit"):
        pool.submit(wide, TOKENS["bob"])
    reload(2.0, jobs=1)
    for name in ("runs", "waits"):
        pool.submit(replace(wide, name=name), TOKENS["bob"])
    assert reload(1.0)[2:] == [
        f"job runs: {above}: it cannot go on; cancel it, or raise the limit",
        f"job waits: {above}: it cannot begin; cancel it, or raise the limit",
    ]
    assert pool.expected_start("waits").why == above and begun == ["runs"]
    reload(2.0)
    assert begun == ["runs", "waits"]


def test_the_table_of_roles_in_the_documentation_is_the_products() -> None:
    page = (Path(__file__).parents[2] / "docs" / "team_pool.md").read_text()
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == ROLES
    for name in (teams.TOKEN_VARIABLE, teams.TOKEN_FILE):
        assert name in page
