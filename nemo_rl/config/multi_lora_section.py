"""Keys of `multi_lora.*`: adapters that share one base model."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from nemo_rl.config.master import MasterConfig
from nemo_rl.config.section import Section


class MultiLoraConfig(Section):
    """`multi_lora`."""

    slots: PositiveInt = Field(4, description="Adapters that the job holds at once; each takes memory when it joins.")
    weight: float = Field(
        1.0, gt=0, description="Share of an adapter in training passes, relative to the others; set in its own file."
    )
    pass_tokens: PositiveInt | None = Field(
        None,
        description="Tokens of a training pass, at most: adapters whose steps do not fit wait for a later pass; one "
        "step alone may be larger. null has no limit.",
    )
    pass_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the adapters in a training pass, at most, rounded up; the others generate meanwhile. 1 "
        "has all share one pass.",
    )
    wait_s: float = Field(
        0.5, ge=0, description="Seconds that a ready adapter waits for others to share its training pass."
    )
    http_port: int = Field(
        0, ge=0, le=65535, description="Port of add, remove and list on this machine's loopback; 0 takes a free one."
    )


class MultiLoraMasterConfig(MasterConfig):
    """A run of many adapters on one base model."""

    multi_lora: MultiLoraConfig = Field(MultiLoraConfig(), description="Adapters that share one base model.")
