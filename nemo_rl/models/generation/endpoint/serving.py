"""vLLM's own OpenAI server classes over the run's router, in place of an engine.

vLLM parses requests, applies the chat template, reads tool calls and reasoning, and makes responses; tokens come from
`RouterEngine`. Written against 0.26 and 0.32, whose classes have the same names and signatures here.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemo_rl.config import ConfigError, PolicyConfig
from nemo_rl.config.errors import did_you_mean
from nemo_rl.data.conversations import shows
from nemo_rl.data.interfaces import DataError
from nemo_rl.data.llm_message_utils import render_chat
from nemo_rl.data.tokenizer import chat_template
from nemo_rl.models.generation.decisions import replays
from nemo_rl.models.generation.endpoint.router_engine import BadRequest, GenerateOne, RouterEngine
from nemo_rl.models.generation.endpoint.session import text_of

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter
    from transformers import PreTrainedTokenizerBase
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

_CHAT_KWARGS = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
# Keys of `vllm_kwargs` that say how a prompt is read.
_READING = ("tokenizer_mode", "revision", "tokenizer_revision", "code_revision", "hf_config_path")

# The name of the model under training, beside its path.
MODEL = "policy"


@dataclass
class Serving:
    """vLLM's handlers."""

    engine: RouterEngine
    models: OpenAIServingModels
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    tokens: Mapping[str, tuple[TypeAdapter[object], Callable[..., Awaitable[BaseModel]]]]  # by path
    chat_request: type[ChatCompletionRequest]  # the request classes
    completion_request: type[CompletionRequest]
    tokenizer: PreTrainedTokenizerBase
    template: str | None  # of chats, unless a request has its own
    _shown: set[tuple[str, str]] = field(default_factory=set)  # (key, variables) that a template is known to show

    def check_shown(self, request: ChatCompletionRequest, messages: Sequence[Mapping[str, object]]) -> None:
        """Checks that the chat template renders tools, tool calls, and the content of every role. Raises BadRequest: it
        renders the request as if they were absent.

        Args:
            messages: Those of the request, as the client sent them.
        """
        variables = {**(request.chat_template_kwargs or {}), "chat_template": request.chat_template or self.template}
        whole = [{**message, "content": text_of(message)} for message in messages]
        tools = [tool.model_dump() for tool in request.tools or ()] if request.tool_choice != "none" else []
        keys = [f"content of {role}" for role in dict.fromkeys(str(message["role"]) for message in whole)]
        keys = [key for key in keys if key != "content of assistant"] + ["tools"] * bool(tools)
        keys += ["tool_calls"] * any(message.get("tool_calls") for message in whole)
        for key in keys:
            known = (key, json.dumps(variables, sort_keys=True, default=str))
            if known in self._shown:
                continue
            try:
                shown = shows(
                    key,
                    whole,
                    tools or None,
                    lambda some, of: render_chat(self.tokenizer, some, True, of, variables),
                )
            except DataError:
                # vLLM renders it in its own way, and says what is wrong.
                return
            if not shown:
                raise BadRequest(
                    f"{key}: the chat template shows nothing of it, so that the model would be asked without it; leave "
                    "it out, or set policy.tokenizer.chat_template to a template that shows it"
                )
            self._shown.add(known)

    async def until_answer(self, request: ChatCompletionRequest, count: int) -> list[int] | None:
        """The first `count` messages of a chat as the template gives them, with nothing after them; None where it
        cannot show them alone.
        """
        alone = request.model_copy(
            update={"messages": request.messages[:count], "add_generation_prompt": False, "stream": False}
        )
        try:
            rendered = await self.chat.render_chat_request(alone)
        except Exception:  # noqa: BLE001 - templates raise whatever they like where an answer comes last
            return None
        return list(rendered[1][0]["prompt_token_ids"]) if isinstance(rendered, tuple) else None


def make_serving(
    policy: PolicyConfig,
    tokenizer: PreTrainedTokenizerBase,
    generate_one: GenerateOne,
    *,
    stop_token_ids: Sequence[int],
    seeded: bool,
) -> Serving:
    """vLLM's handlers over `generate_one`; starts no engine and touches no accelerator.

    Raises ConfigError: `http_server_serving_chat_kwargs` has a key that vLLM's class does not know, a parser that it
    does not have, or vLLM is missing or of a version without these classes.
    """
    try:
        from pydantic import TypeAdapter
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
        from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer
    except ImportError as error:
        raise ConfigError(
            [
                "policy.generation.vllm_cfg.expose_http_server: the endpoint is built from the server classes of vLLM "
                f"0.26 to 0.32, and {error}"
            ]
        ) from error
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    _load_plugins({name: getattr(vllm, name) for name in ("tool_parser_plugin", "reasoning_parser_plugin")})
    vllm_config = VllmConfig(model_config=AsyncEngineArgs(**_model_arguments(policy)).create_model_config())
    renderer = renderer_from_config(vllm_config)
    engine = RouterEngine(
        generate_one,
        vllm_config,
        renderer,
        tokenizer,
        stop_token_ids=stop_token_ids,
        stop_strings=generation.stop_strings or (),
        seeded=seeded,
        records=replays(policy),
    )
    common = _chat_arguments(policy, tokenizer, OpenAIServingChat)
    try:
        online = OnlineRenderer(vllm_config.model_config, renderer, **_taken(OnlineRenderer, common))
        names = [BaseModelPath(name, policy.model_name) for name in (MODEL, policy.model_name)]
        models = OpenAIServingModels(engine, names)
        chat = OpenAIServingChat(
            engine,
            models,
            "assistant",
            online_renderer=online,
            **_taken(OpenAIServingChat, common),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError([f"{_CHAT_KWARGS}: {error}"]) from error
    tokenization = ServingTokenization(models, online, **_taken(ServingTokenization, common))
    return Serving(
        engine,
        models,
        chat,
        OpenAIServingCompletion(engine, models, online_renderer=online, request_logger=None),
        {
            "tokenize": (TypeAdapter(TokenizeRequest), tokenization.create_tokenize),
            "detokenize": (TypeAdapter(DetokenizeRequest), tokenization.create_detokenize),
        },
        ChatCompletionRequest,
        CompletionRequest,
        tokenizer,
        template if isinstance(template := common["chat_template"], str) else None,
    )


def _model_arguments(policy: PolicyConfig) -> dict[str, object]:
    """The model arguments that vLLM needs to read requests."""
    generation, vllm = policy.generation, policy.generation.vllm_cfg
    return {
        "model": policy.model_name,
        "tokenizer": policy.tokenizer.name,
        "trust_remote_code": policy.trust_remote_code,
        "dtype": vllm.dtype,
        "max_model_len": vllm.max_model_len,
        "hf_overrides": dict(policy.hf_config_overrides),
        "generation_config": "vllm",
        "override_generation_config": {
            "max_new_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k or 0,
        },
        **{name: generation.vllm_kwargs[name] for name in _READING if name in generation.vllm_kwargs},
    }


def _chat_arguments(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, constructor: type) -> dict[str, object]:
    """Arguments of vLLM's chat class. Raises ConfigError: the configuration has one that the class does not know."""
    given = policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    options = {name: value for name, value in given.items() if value is not None}
    known = inspect.signature(constructor.__init__).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            [f"{_CHAT_KWARGS}: vLLM's {constructor.__name__} takes no {unknown[0]}.{did_you_mean(unknown[0], known)}"]
        )
    if isinstance(options.get("chat_template"), str):
        # A key of recipes: the run's own template, a file, or the template itself.
        options["chat_template"] = chat_template(options["chat_template"])
    arguments: dict[str, object] = {
        "request_logger": None,
        "chat_template": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
        "chat_template_content_format": "auto",
        "default_chat_template_kwargs": dict(policy.tokenizer.chat_template_kwargs or {}),
    }
    return arguments | {name: value for name, value in options.items() if value is not None}


def _taken(constructor: type, given: Mapping[str, object]) -> dict[str, Any]:
    """The arguments that the class's constructor takes."""
    known = inspect.signature(constructor.__init__).parameters
    return {name: value for name, value in given.items() if name in known}


def _load_plugins(plugins: Mapping[str, str | None]) -> None:
    """Imports users' files or modules, which register their parsers with vLLM. vLLM's own way goes on where one fails.

    Args:
        plugins: Path or module of each key; None for none.

    Raises ConfigError: one cannot be imported.
    """
    for key, plugin in plugins.items():
        try:
            if plugin is not None and plugin.endswith(".py"):
                _import_file(os.path.expanduser(plugin))
            elif plugin is not None:
                importlib.import_module(plugin)
        except Exception as error:
            raise ConfigError(
                [f"policy.generation.vllm_cfg.{key}: {plugin} cannot be imported: {error!r}; name a Python file"]
            ) from error


def _import_file(path: str) -> None:
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    # Parsers are classes, whose module is looked up by name.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
