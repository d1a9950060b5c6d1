"""Starts no server: plays in place of the agent `simple_agent` and the model server `vllm_model`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Any

_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
_TOOL = {"function": {"name": "add", "description": "", "parameters": _PARAMETERS}, "type": "function"}


@dataclass
class Response:
    """An answer over HTTP."""

    status: int
    body: bytes

    async def read(self) -> bytes:
        """Its body."""
        return self.body


class RunHelper:
    """Plays rows of one question."""

    def start(self, config: Any) -> None:
        """Takes the address of the model."""
        self._given = dict(config.initial_global_config_dict)
        self._processes: dict[str, Any] = {}
        self._server_client = self

    async def post(self, server_name: str, url_path: str, json: dict[str, Any]) -> Response:
        """One row, as an agent's `/run` takes it."""
        if (server_name, url_path) != ("adder", "/run") or "temperature" in json["responses_create_params"]:
            return Response(422, f"not a row for {server_name}{url_path}".encode())
        return await asyncio.to_thread(self._play, json["responses_create_params"]["metadata"])

    def _play(self, metadata: dict[str, str]) -> Response:
        told: list[dict[str, Any]] = [{"content": "Help.", "role": "developer"}, {"role": "user", "content": "1+2?"}]
        answer = self._asked(told, metadata)
        (call,) = answer["tool_calls"]
        function = {"arguments": call["function"]["arguments"], "name": "add"}
        again = {"id": call["id"], "function": function, "type": "function"}
        told += [
            {"role": "assistant", "content": None, "tool_calls": [again]},
            {"content": "3", "role": "tool", "tool_call_id": call["id"]},
        ]
        right = self._asked(told, metadata)["content"] == "It is cold."
        return Response(200, json.dumps({"reward": float(right)}).encode())

    def _asked(self, messages: list[dict[str, Any]], metadata: dict[str, str]) -> dict[str, Any]:
        further = json.loads(metadata["extra_body"])
        body = {"model": self._given["policy_model_name"], "messages": messages, "tools": [_TOOL]}
        headers = {"Authorization": f"Bearer {self._given['policy_api_key']}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self._given['policy_base_url']}/chat/completions",
            json.dumps(body | {"metadata": metadata} | further).encode(),
            headers,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]["message"]
