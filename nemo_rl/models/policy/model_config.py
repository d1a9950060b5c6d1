"""The model's small configuration file, read before any weights: whether the model exists, whether its sizes divide,
and the model without weights (`empty_model`).

Refuses before Ray starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from nemo_rl.config import DTensorConfig, PolicyConfig
from nemo_rl.config.errors import UserError, did_you_mean, first_line
from nemo_rl.config.policy import can_name_a_model
from nemo_rl.config.world_sizes import divisors

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


class UnsupportedModelError(UserError, ValueError):
    """The model cannot be cut the way the configuration asks."""


class CheckpointMismatchError(UserError, ValueError):
    """Weights do not belong to the configured model."""


class ModelNotFoundError(UserError, ValueError):
    """There is no loadable model at `policy.model_name`."""


class KernelUnavailableError(UserError, ValueError):
    """The configuration asks for a kernel that this machine cannot run or that is not installed."""


def compute_dtype(precision: str) -> torch.dtype:
    """The torch dtype of `policy.precision`."""
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[precision]


def model_config(cfg: PolicyConfig, source: str | None = None) -> PretrainedConfig:
    """The Hugging Face configuration of the model, with `policy.hf_config_overrides` applied. Raises
    ModelNotFoundError: nothing can be loaded from there; UnsupportedModelError: an override names nothing that the
    model has.
    """
    from transformers import AutoConfig

    name = source or cfg.model_name
    if looks_like_a_path(name) and not Path(name).expanduser().exists():
        raise ModelNotFoundError(f"policy.model_name={name!r}: there is no such directory; {_nearest_directory(name)}")
    if not can_name_a_model(name):
        raise ModelNotFoundError(
            f"policy.model_name={name!r} is neither a directory nor an id on the hub; name the model to train"
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"policy.model_name={name!r}: {_how_to_convert(name)}"
            if _is_gguf(name)
            else f"policy.model_name={name!r}: no model configuration could be loaded from there "
            f"({_instead_of(Path(name).expanduser()) or first_line(error)})"
        ) from error
    for key, value in cfg.hf_config_overrides.items():
        if not hasattr(config, key):
            near = did_you_mean(key, config.to_dict())
            raise UnsupportedModelError(
                f"policy.hf_config_overrides.{key}: {value!r}: the configuration of a {config.model_type} model has no "
                f"such key.{near}"
            )
        setattr(config, key, value)
    return config


def _instead_of(folder: Path) -> str | None:
    """Suggestion for a directory that is no model; None if its content suggests nothing."""
    if (folder / "adapter_config.json").is_file():
        return f"it holds an adapter; merge it with its base: python -m nemo_rl.utils.convert to-hf {folder} OUT"
    inside = [file.parent for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/config.json")]
    newest = max(inside, key=lambda path: path.stat().st_mtime, default=None)
    return f"it has no config.json; {newest} has one" if newest is not None else None


def _is_gguf(name: str) -> bool:
    folder = Path(name).expanduser()
    return name.lower().endswith("gguf") or (folder.is_dir() and any(folder.glob("*.gguf")))


def _how_to_convert(name: str) -> str:
    path = Path(name).expanduser()
    file = path if path.is_file() else next(iter(sorted(path.glob("*.gguf"))), None)
    source, gguf = (repr(name), "FILE") if file is None else (repr(str(file.parent)), repr(file.name))
    return (
        "GGUF files hold quantised weights, which are not trained; name the original checkpoint, or convert once, in "
        f"Python with gguf and accelerate installed: AutoModelForCausalLM.from_pretrained({source}, gguf_file={gguf})"
        f".save_pretrained(OUT), likewise AutoTokenizer, then take quantization_config out of OUT/config.json"
    )


def generation_config(cfg: PolicyConfig, model: PretrainedConfig) -> GenerationConfig:
    """The model's `generation_config.json`, which checkpoints carry on with its stop tokens; without one, what follows
    from the model's configuration.
    """
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(cfg.model_name)
    except OSError:
        return GenerationConfig.from_model_config(model)


def looks_like_a_path(name: str) -> bool:
    """Whether a name can only be meant as a directory: one on the hub has one slash, and no folder here begins it."""
    first, *rest = Path(name).parts or ("",)
    return name.startswith(("/", ".", "~")) or len(rest) > 1 or (len(rest) == 1 and Path(first).is_dir())


def _nearest_directory(name: str) -> str:
    """Content of the nearest existing parent of a missing directory."""
    parent = Path(name).expanduser().absolute().parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    inside = sorted(path.name for path in parent.iterdir() if path.is_dir())[:8]
    return f"{parent} holds {', '.join(inside) or 'no directory'}"


def number_of_experts(config: PretrainedConfig) -> int:
    """Experts of a layer by the model's Hugging Face configuration, 0 for a model without."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return 0


def check_not_quantized(config: PretrainedConfig, cfg: PolicyConfig) -> None:
    """Whether the model's files hold its weights in full. Raises UnsupportedModelError: they are quantised, so that
    they could not be read without their scales.
    """
    quantized = getattr(text_config(config), "quantization_config", None) or getattr(
        config, "quantization_config", None
    )
    if quantized:
        known = quantized if isinstance(quantized, dict) else vars(quantized)
        raise UnsupportedModelError(
            f"policy.model_name={cfg.model_name}: its weights are quantised ({known.get('quant_method', 'unknown')}), "
            "and training needs them in full; name a checkpoint that is not quantised (dequantised with transformers "
            "and saved without quantization_config). Engines can quantise: policy.generation.vllm_cfg.precision=fp8"
        )


def check_replay(config: PretrainedConfig, cfg: PolicyConfig) -> None:
    """Whether the model has routes that could be replayed, if they are to be. Raises UnsupportedModelError: it has no
    experts.
    """
    if cfg.router_replay.enabled and not number_of_experts(text_config(config)):
        raise UnsupportedModelError(
            f"policy.router_replay.enabled=true, but policy.model_name={cfg.model_name} (a "
            f"{getattr(config, 'model_type', 'model of unknown type')} model) has no experts, so generation chooses "
            "none; set it to false"
        )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a model's configuration that describes its decoder."""
    return getattr(config, "text_config", None) or config


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_LFS_POINTER = b"version https://git-lfs"


def check_weights(model_name: str) -> None:
    """Whether a model's directory holds its weights. Raises ModelNotFoundError: files of them are missing."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir() or (folder / "adapter_config.json").is_file():
        return
    names = [name for name in _WEIGHTS if (folder / name).is_file()]
    for index in (folder / f"{name}.index.json" for name in _WEIGHTS):
        if not names and index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, LookupError, AttributeError) as error:
                raise ModelNotFoundError(
                    f"policy.model_name={model_name!r}: {index.name} cannot be read ({error}); download the model again"
                ) from error
    if not names and _is_gguf(model_name):
        raise ModelNotFoundError(f"policy.model_name={model_name!r}: {_how_to_convert(model_name)}")
    if not names:
        raise ModelNotFoundError(
            f"policy.model_name={model_name!r}: the directory holds a configuration and no weights (neither of "
            f"{', '.join(_WEIGHTS)}, nor an index of several files); copy the model's weights there"
        )
    for name in names:
        file = folder / name
        pointer = file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS_POINTER)
        if not file.is_file() or pointer:
            what = "a pointer of git-lfs and no weights (run git lfs pull there)" if pointer else "missing"
            raise ModelNotFoundError(
                f"policy.model_name={model_name!r}: {name} is {what}; download the model again, whole"
            )


# Where configurations of different families say how many positions their models have.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
# Of these RoPE scalings, as engines read them, the configured length is the scaled one.
_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def longest_sequence(config: PretrainedConfig) -> tuple[int, str] | None:
    """Tokens that a model takes at most, and the key of its configuration that says so; None where none does."""
    text = text_config(config)
    known = [(getattr(text, key), key) for key in _LENGTHS if isinstance(getattr(text, key, None), int)]
    if not known:
        return None
    length, key = min(known)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    if "gemma3" not in str(getattr(text, "model_type", "")):
        factors = [one.get("factor") or 1.0 for one in kinds if one.get("rope_type", "default") not in _SCALED]
        length = int(length * max(factors, default=1.0))
    return length, key


def check_vision(config: PretrainedConfig, model_name: str) -> None:
    """Whether engines can run a model whose text is a part of it: vLLM imports what prepares the other parts' input.
    Raises UnsupportedModelError: a package for that is missing.
    """
    if getattr(config, "text_config", None) is not None and importlib.util.find_spec("torchvision") is None:
        raise UnsupportedModelError(
            f"policy.model_name={model_name}: engines run a {config.model_type} model with its vision tower, whose "
            "processor needs torchvision; it is not installed here, and there is none for machines without GPUs. Take "
            "GPUs, or save the model's text part alone and name that"
        )


def check_length(config: PretrainedConfig, model_name: str, lengths: Mapping[str, int], *, generates: bool) -> None:
    """Whether the model takes sequences as long as configured.

    Args:
        lengths: Tokens, by the dotted key that asks for them.
        generates: Whether engines run it, which take no longer ones. Training alone may go beyond the positions of a
            model that rotates them.

    Raises UnsupportedModelError: it does not.
    """
    limit = longest_sequence(config)
    rotates = getattr(text_config(config), "rope_parameters", None) is not None
    allowed = rotates and (not generates or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1")
    if limit is None or allowed:
        return
    for key, length in lengths.items():
        if length > limit[0]:
            raise UnsupportedModelError(
                f"{key}={length}: {model_name} takes {limit[0]} tokens at most ({limit[1]} of its config.json); lower "
                f"{key} to {limit[0]} or less"
                + (
                    ". A model that is meant for longer ones says so with policy.hf_config_overrides (its RoPE scaling)"
                    if rotates
                    else ""
                )
            )


def layers_with_experts(config: PretrainedConfig) -> tuple[int, ...]:
    """The decoder layers, from 0, whose feed-forward is a mixture of experts, by the model's Hugging Face
    configuration.
    """
    config = text_config(config)
    if not number_of_experts(config):
        return ()
    kinds = getattr(config, "mlp_layer_types", None)
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    first = getattr(config, "first_k_dense_replace", None) or 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    return tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if (kinds[layer] == "sparse" if kinds else layer >= first and layer not in dense and (layer + 1) % step == 0)
    )


def check_experts(config: PretrainedConfig, cfg: DTensorConfig) -> None:
    """Whether the model's experts can be shared out as configured. `config`: the model's Hugging Face configuration.
    `cfg`: `policy.dtensor_cfg`. Raises UnsupportedModelError: it has none, or they do not divide.
    """
    ranks, experts = cfg.expert_parallel_size, number_of_experts(config)
    key = f"policy.dtensor_cfg.expert_parallel_size={ranks}"
    if ranks > 1 and experts == 0:
        raise UnsupportedModelError(
            f"{key}, but the model ({getattr(config, 'model_type', 'unknown type')}) has no experts; set it to 1"
        )
    if experts % ranks:
        raise UnsupportedModelError(
            f"{key} does not divide the model's {experts} experts; possible: {divisors(experts)}"
        )


_CUT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_divisible(config: PretrainedConfig, tp: int, key: str, sizes: Sequence[str] = _CUT_SIZES) -> None:
    """Whether heads and vocabulary divide over `tp` ranks. `config`: the model's Hugging Face configuration. `key`:
    where the number comes from, for the message. Raises UnsupportedModelError: they do not.
    """
    for what in sizes:
        value = getattr(config, what, None)
        if value is not None and value % tp:
            raise UnsupportedModelError(f"{key}={tp} does not divide the model's {what}={value}")


def decoder_of(model: Any) -> Any:
    """The module with `layers` and `embed_tokens` of a model: its base, or the text tower of a model of images too."""
    base = model.base_model
    return base if hasattr(base, "layers") else getattr(base, "language_model", base)


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' auto class of a text-generating model: causal LM, or image-text-to-text; None if it has neither for
    this model type.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    ):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else None


# Hugging Face's constructors set PyTorch's default dtype for the whole process while they run.
_ONE_AT_A_TIME = threading.Lock()
_BUILDING = threading.local()


def empty_model(config: PretrainedConfig, *, trust_remote_code: bool = False, **further: object) -> PreTrainedModel:
    """A causal language model by its Hugging Face configuration, its parameters on the meta device (shapes, no
    values), its buffers real. `further`: what `from_config` takes besides (`dtype`, `attn_implementation`). Threads
    may call it: modules that others build at the same time are left alone.
    """
    with _ONE_AT_A_TIME:
        _watch_parameters()
        _BUILDING.here = True
        try:
            return auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **further)
        finally:
            _BUILDING.here = False


_INSTALLED: list[object] = []


def _watch_parameters() -> None:
    """Watches parameters from now on. It stays: PyTorch's table of hooks may not change while a module is built."""
    if not _INSTALLED:
        _INSTALLED.append(register_module_parameter_registration_hook(_without_values))


def _without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    if parameter is None or not getattr(_BUILDING, "here", False):
        return None
    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty
