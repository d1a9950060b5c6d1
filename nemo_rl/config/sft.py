"""Keys of `sft.*`: supervised fine-tuning, which shares every other section with GRPO.

Knows nothing of models. Invariant: sections shared with GRPO have the same schema here.
"""

from __future__ import annotations

from pydantic import Field, PositiveInt

from nemo_rl.config.section import Section


class SFTConfig(Section):
    """`sft.*`."""

    max_num_epochs: PositiveInt = Field(1, description="Passes over the training data.")
    max_num_steps: PositiveInt = Field(60, description="Optimizer steps; whichever of epochs and steps is reached first ends the run.")
    val_period: int = Field(10, description="Steps between validations; 0 or less switches them off.")
    val_batches: int = Field(8, description="Batches per validation; 0 or less takes all.")
    val_global_batch_size: PositiveInt = Field(32, description="Samples per validation batch.")
    val_micro_batch_size: PositiveInt = Field(1, description="Samples per validation microbatch and data-parallel rank.")
    val_at_start: bool = Field(True, description="Validate before the first step; logged as step 0.")
    val_at_end: bool = Field(False, description="Validate after the last step.")
    seed: int = Field(42, description="Seed of the run: data order and initial weights.")
