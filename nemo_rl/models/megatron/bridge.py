"""Model families through the package megatron-bridge, if installed, for families that the backend does not know.

The package gives Megatron's configuration and maps weights between files and Megatron's modules. Attention, positions,
output layer and train step stay ours; unsupported settings are refused by their names in Megatron's configuration. The
package is imported only when needed. Invariant: every rank yields the same names and full tensors in the same order.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl.config import PolicyConfig
from nemo_rl.config.errors import first_line
from nemo_rl.models.megatron.families import FAMILIES, Family, Sizes, Weight
from nemo_rl.models.megatron.groups import MegatronGroups
from nemo_rl.models.policy.model_config import CheckpointMismatchError, KernelUnavailableError, UnsupportedModelError
from nemo_rl.weight_sync.layout import TensorMeta, dtype_name

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig

_MODULE = "megatron.bridge"
_MAPPINGS = "megatron.bridge.models.conversion.param_mapping"
_KEY = "policy.megatron_cfg.enabled"
_BUILDS = "GPTModelProvider"  # whose `provide` builds Megatron's GPT and no more
_INSTEAD = "train it with policy.dtensor_cfg.enabled=true"
# Of Megatron's configuration, what attention over packed rows and positions here take; absent is the same.
_TAKEN: dict[str, tuple[object, ...]] = {
    "multi_latent_attention": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "mtp_num_layers": (None, 0),
    "cross_attention": (False,),
    "experimental_attention_variant": (None,),
    "heterogeneous_block_specs": (False,),
}
# Options that the package sets for pretraining and that its own keys here refuse: router losses, noise and updates.
_OFF: dict[str, object] = {
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_expert_capacity_factor": None,
    "moe_token_dropping": False,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_force_load_balancing": False,
}
_TAKEN_BY_LOCAL_LAYERS: dict[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm",),
    "layernorm_zero_centered_gamma": (False,),
}


def is_known(model: PretrainedConfig) -> bool:
    """Whether the backend itself knows a model's family, by its Hugging Face configuration."""
    return model.model_type in FAMILIES


def _auto_bridge(model: PretrainedConfig) -> Any:
    """The package's entry."""
    unknown = (
        f"{_KEY}: the model type {model.model_type!r} is not known; possible: {', '.join(FAMILIES)}, and with the "
        "package megatron-bridge those that it knows"
    )
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec(_MODULE) is None:
        raise UnsupportedModelError(
            f"{unknown}. It is not installed: pip install megatron-bridge (it needs Transformer Engine), or {_INSTEAD}"
        )
    try:
        return importlib.import_module(_MODULE).AutoBridge
    except (ImportError, AttributeError, OSError) as error:
        raise KernelUnavailableError(
            f"{unknown}. It is installed and cannot be imported here ({error}); repair it, or {_INSTEAD}"
        ) from error


def check(cfg: PolicyConfig, model: PretrainedConfig) -> Sizes:
    """The driver's check; returns the sizes of the model. Raises UnsupportedModelError: the package is not installed or
    does not know the model either, or the model has an unsupported part.
    """
    auto = _auto_bridge(model)
    if cfg.hf_config_overrides:
        raise UnsupportedModelError(
            f"policy.hf_config_overrides changes a model of type {model.model_type!r}, whose own files megatron-bridge "
            f"reads; leave it out, or {_INSTEAD}"
        )
    try:
        provider = auto.from_hf_config(model).to_megatron_provider(load_weights=False)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{_KEY}: megatron-bridge does not take the model type {model.model_type!r} "
            f"({first_line(error)}); {_INSTEAD}"
        ) from error
    _refuse(provider, model, _TAKEN)
    return _sizes(provider)


def _refuse(provider: object, model: PretrainedConfig, taken: Mapping[str, tuple[object, ...]]) -> None:
    if not hasattr(provider, "transformer_layer_spec"):
        raise UnsupportedModelError(
            f"{_KEY}: megatron-bridge makes a {type(provider).__name__} of the model type {model.model_type!r}, which "
            f"is no GPT; {_INSTEAD}"
        )
    builds = next((base.__name__ for base in type(provider).__mro__ if "provide" in vars(base)), _BUILDS)
    if builds != _BUILDS:
        raise UnsupportedModelError(
            f"{_KEY}: megatron-bridge builds the model type {model.model_type!r} by a way of its own "
            f"({builds}.provide), which may differ from Megatron's GPT; {_INSTEAD}"
        )
    for name, values in taken.items():
        value = getattr(provider, name, values[0])
        if value not in values:
            raise UnsupportedModelError(
                f"{_KEY}: the model type {model.model_type!r} has {name}={value!r} in Megatron's configuration, which "
                f"is not supported here; {_INSTEAD}"
            )


def _sizes(provider: TransformerConfig) -> Sizes:
    experts = provider.num_moe_experts or 0
    return Sizes(
        Family(qkv_bias=bool(provider.add_qkv_bias), qk_norm=bool(provider.qk_layernorm)),
        provider.num_layers,
        provider.hidden_size,
        provider.num_attention_heads,
        provider.num_query_groups or provider.num_attention_heads,
        provider.kv_channels or provider.hidden_size // provider.num_attention_heads,
        (provider.moe_ffn_hidden_size if experts else None) or provider.ffn_hidden_size,
        provider.vocab_size,
        experts,
        int(provider.moe_router_topk) if experts else 0,
        bool(provider.share_embeddings_and_output_weights),
        float(provider.layernorm_epsilon),
    )


class Bridge:
    """One model by way of the package. `engine`: whether Transformer Engine's layers run. Raises UnsupportedModelError:
    see `check`.
    """

    def __init__(self, cfg: PolicyConfig, model: PretrainedConfig, *, engine: bool) -> None:
        self.sizes = check(cfg, model)
        # Exporting follows the order of the model's files, so that the package wants their place.
        self._auto = _auto_bridge(model).from_hf_pretrained(cfg.model_name, trust_remote_code=cfg.trust_remote_code)
        self._provider = self._auto.to_megatron_provider(load_weights=False)
        if not engine:
            _refuse(self._provider, model, _TAKEN_BY_LOCAL_LAYERS)
        # Our layers, by the names of their classes.
        mappings = importlib.import_module(_MAPPINGS)
        mappings.AutoMapping.register_module_type("RowNorm", "replicated")

    def config(self, options: Mapping[str, object]) -> TransformerConfig:
        """Megatron's configuration of the model, changed by how this run cuts and computes it."""
        provider = self._provider
        fuses = bool(provider.bias_activation_fusion and options.get("bias_activation_fusion"))
        ours = {
            "bias_activation_fusion": fuses,
            "should_pad_vocab": False,
            # Positions come with the row.
            "position_embedding_type": "none",
            # Megatron marks how a parameter is cut where it initialises it.
            "perform_initialization": True,
        }
        for name, value in {**options, **ours, **_OFF}.items():
            setattr(provider, name, value)
        provider.finalize()
        return provider

    def layers(self, virtual: int | None) -> object:
        """The package's specification of Transformer Engine's layers, with attention over packed rows."""
        from nemo_rl.models.megatron.packed_layers import PackedAttention

        spec = self._provider.transformer_layer_spec
        if not any(hasattr(spec, part) for part in ("submodules", "layer_specs")):
            stage = {"vp_stage": virtual} if "vp_stage" in inspect.signature(spec).parameters else {}
            spec = spec(self._provider, **stage)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return spec

    def load(self, chunks: list[nn.Module], source: str) -> None:
        """Reads this rank's part of every parameter. Collective. Raises CheckpointMismatchError: the files do not fit
        the model.
        """
        try:
            self._auto.load_hf_weights(chunks, hf_path=source)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointMismatchError(f"{source}: megatron-bridge could not read the weights: {error}") from error

    def export(self, chunks: list[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors as in the model's files. Collective."""
        yield from self._auto.export_hf_weights(chunks, cpu=False, show_progress=False)


class BridgedWeights:
    """The parameters of a model that the package carries in and out, as `ShardedWeights` does others.

    Optimizer state has no names of files here: every part is kept as the rank has it that holds it first, and a
    checkpoint resumes on the same grid.

    Args:
        chunks: This rank's parts of the model.

    Attributes:
        described: This rank's parameters, by their place in the grid.
    """

    def __init__(self, chunks: Iterable[nn.Module], bridge: Bridge, groups: MegatronGroups) -> None:
        self._chunks = list(chunks)
        self._bridge = bridge
        self._metas: list[tuple[str, tuple[int, ...]]] = []
        self._own: dict[str, nn.Parameter] = {}
        for number, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                self._own[f"{_place(parameter, groups)}.{number}.{name}"] = parameter
        self.described = [Weight(name, ((name, tuple(own.shape)),)) for name, own in self._own.items()]
        everywhere: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everywhere, list(self._own))
        first = {name: rank for rank in reversed(range(len(everywhere))) for name in everywhere[rank]}
        self._kept = {name for name in self._own if first[name] == groups.rank}

    def load(self, source: str) -> None:
        """Reads this rank's part of every parameter. Collective."""
        self._bridge.load(self._chunks, source)
        if not self._metas:
            self._metas = [(name, tuple(tensor.shape)) for name, tensor in self._bridge.export(self._chunks)]

    def metas(self, dtype: torch.dtype) -> list[TensorMeta]:
        """Names, shapes and dtypes of an export, in order."""
        return [TensorMeta(name, shape, dtype_name(dtype)) for name, shape in self._metas]

    @torch.no_grad()
    def full(self, dtype: torch.dtype | None, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors. Collective."""
        for name, tensor in self._bridge.export(self._chunks):
            yield name, tensor.detach().to(device=device, dtype=dtype or tensor.dtype)

    def own(self) -> Mapping[str, nn.Parameter]:
        """This rank's parameters by their place in the grid."""
        return self._own

    def copies(self, weight: Weight) -> list[nn.Parameter]:
        """This rank's parameter."""
        return [self._own[weight.name]]

    def part(self, weight: Weight, whole: torch.Tensor) -> torch.Tensor:
        """All of it: every rank keeps its own."""
        del weight
        return whole

    def gather(
        self, weight: Weight, local: torch.Tensor | None, device: torch.device, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """This rank's part on a device."""
        if local is None:
            raise CheckpointMismatchError(f"{weight.name} has no state on this rank")
        return local.detach().to(device=device, dtype=dtype or local.dtype)

    def keeps(self, number: int, name: str) -> bool:
        """Whether this rank writes the state of a parameter."""
        del number
        return name in self._kept


def _place(parameter: nn.Parameter, groups: MegatronGroups) -> str:
    """Place in the grid that tells a parameter from others of its name; Megatron marks those of shared experts."""
    at, sizes = groups.coordinates(), groups.sizes
    if getattr(parameter, "allreduce", True):
        return f"pp{at['pipeline_parallel']}of{sizes.pp}.tp{at['tensor_parallel']}of{sizes.tp}"
    expert = f"ep{at['expert_parallel']}of{sizes.ep}.etp{groups.etp_group.rank()}of{sizes.etp}"
    return f"pp{at['pipeline_parallel']}of{sizes.pp}.{expert}"
