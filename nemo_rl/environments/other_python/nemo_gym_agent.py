"""Plays rows of NeMo-Gym with the agents, tools and verifiers of the package `nemo-gym` (0.4): `env.nemo_gym`.

Runs in the interpreter of `env.nemo_gym.python`, which has that package, and imports nothing of this one. Starts
NeMo-Gym's servers with the first episode; each of them installs what it needs at its first start. Invariant: the
servers end with this process, however it ends.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# Their tokens come from the run, drawn and trained with the run's own settings.
_OF_THE_RUN = ("temperature", "top_p")
_NOWHERE = "http://127.0.0.1:9/v1"
_OURS = "NRL_NEMO_GYM"
_PRINTED = "What its servers print is in actors/AgentEnvironment-*.log of the run's log directory."
# Ends the servers once this process is gone, however it ended: every process that has this one's mark.
_REAPER = f"""
import os, psutil, sys
sys.stdin.read()
for process in psutil.process_iter():
    try:
        if process.pid != os.getpid() and process.environ().get({_OURS!r}) == sys.argv[1]:
            process.kill()
    except psutil.Error:
        pass
"""


class NemoGym:
    """Plays rows with NeMo-Gym's agents.

    Args:
        config_paths: NeMo-Gym's configurations of a model server named `policy_model`, of agents and of resources.
        start_timeout_s: Seconds that the servers may take to start, as a part of the first episodes
            (`env.<name>.step_timeout_s`); the first start installs their packages.
        servers: Further keys of NeMo-Gym's configuration.

    Raises ValueError: the configurations do not name an agent, or no `policy_model`; NeMo-Gym's own errors where a file
    is missing or a value is.
    """

    def __init__(self, config_paths: list[str], start_timeout_s: float = 540.0, **servers: object) -> None:
        # A Ray of its own: that of the run may have another Python.
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        # Its servers import themselves from their own folders.
        os.environ.pop("PYTHONPATH", None)
        # It runs `uv`, which its package brings along.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        self._config: Any = importlib.import_module("nemo_gym.global_config")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            head: dict[str, object] = {"host": "127.0.0.1", "port": free.getsockname()[1]}
        self._given: dict[str, Any] = {"head_server": head, "config_paths": list(config_paths), **servers}
        known = self._config.GlobalConfigDictParser().parse(self._parsed(_NOWHERE, "none", "policy"))
        model = (known.get("policy_model") or {}).get("responses_api_models") or {}
        if not model:
            raise ValueError(
                f"config_paths={config_paths}: none has the model server policy_model; name one, such as "
                "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
            )
        # The run records tokens where they are drawn; NeMo-Gym need not ask for them as well.
        ids = {
            kind: {"return_token_id_information": False}
            for kind, of in model.items()
            if "return_token_id_information" in of
        }
        self._given["policy_model"] = _merged(self._given.get("policy_model") or {}, {"responses_api_models": ids})
        sections = ((name, section) for name, section in known.items() if isinstance(section, Mapping))
        self.agents = [name for name, section in sections if section.get("responses_api_agents")]
        if not self.agents:
            raise ValueError(f"config_paths={config_paths}: none has an agent (responses_api_agents)")
        self._start_timeout_s = start_timeout_s
        self._helper: Any = None
        self._starting: asyncio.Task[None] | None = None

    def _parsed(self, base_url: str, key: str, model: str) -> object:
        policy = {"policy_base_url": base_url, "policy_api_key": key, "policy_model_name": model}
        given = importlib.import_module("omegaconf").OmegaConf.create(self._given | policy)
        return self._config.GlobalConfigDictParserConfig(
            initial_global_config_dict=given, skip_load_from_cli=True, skip_load_from_dotenv=True
        )

    async def run(self, task: dict[str, Any], base_url: str, session: Any) -> float:
        """Plays the task's row, `nemo_gym_row`; the reward of its verifier."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start(base_url, session))
        await asyncio.shield(self._starting)
        row: dict[str, Any] = task["nemo_gym_row"]
        agent = (row.get("agent_ref") or {}).get("name") or self.agents[0]
        if agent not in self.agents:
            raise ValueError(f"agent_ref.name={agent!r} of a row is no agent of config_paths: {', '.join(self.agents)}")
        result = await self._post(agent, row | {"responses_create_params": _of_session(row, session.id)})
        return float(result["reward"])

    async def _post(self, agent: str, row: dict[str, object]) -> dict[str, Any]:
        response = await self._helper._server_client.post(server_name=agent, url_path="/run", json=row)
        text = (await response.read()).decode()
        if response.status != 200:
            # Its servers ask each other, and a refusal of the model's comes back as an error without its words.
            raise _GymError(f"NeMo-Gym's agent {agent} answered {response.status}: {text:.2000}", response.status)
        return json.loads(text)

    async def _start(self, base_url: str, session: Any) -> None:
        """Starts the servers, whose model is the run's endpoint outside of any session: each row names its own."""
        root = base_url.partition("/session/")[0]
        os.environ[_OURS] = mark = f"{os.getpid()}-{self._given['head_server']['port']}"
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", _REAPER, mark], stdin=subprocess.PIPE, start_new_session=True
        )
        self._helper = importlib.import_module("nemo_gym.cli.env").RunHelper()
        parsed = self._parsed(f"{root}/v1", session.api_key, session.model)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.to_thread(self._helper.start, parsed)
        except TimeoutError:
            names = ", ".join(self._helper._processes)
            raise RuntimeError(
                f"the servers of NeMo-Gym ({names}) did not all start within start_timeout_s={self._start_timeout_s:g} "
                f"s; raise it where packages are still being installed. {_PRINTED}"
            ) from None
        except RuntimeError as error:
            raise RuntimeError(f"{error} {_PRINTED}") from error


class _GymError(RuntimeError):
    """An answer of NeMo-Gym's servers, with its HTTP status."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(under[name], value) if isinstance(under.get(name), dict) else value
        for name, value in over.items()
    }
    return under | both


def _of_session(row: dict[str, Any], session_id: str) -> dict[str, Any]:
    """Parameters of a row whose requests name their session; NeMo-Gym's model server passes `extra_body` on."""
    params = {name: value for name, value in row["responses_create_params"].items() if name not in _OF_THE_RUN}
    metadata = dict(params.get("metadata") or {})
    metadata["extra_body"] = json.dumps(json.loads(metadata.get("extra_body", "{}")) | {"session": session_id})
    return params | {"metadata": metadata}
