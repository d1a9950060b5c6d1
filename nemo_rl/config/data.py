"""Keys of `data.*`: which datasets feed the run, and how their rows become prompts.

`train` and `validation` may be one mapping or a list in YAML; here they are lists. Keys that an entry omits come from
`data.default`. Knows the keys, not the datasets: names are looked up by `nemo_rl.data`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from nemo_rl.config.section import DefaultFrom, Section


class DatasetKeys(Section):
    """Keys of an entry of train or validation, but for its name."""

    prompt_file: str | None = "examples/prompts/step_by_step.txt"
    """Text file with one {} for the problem; null uses the problem as it is."""
    system_prompt_file: str | None = Field(None, description="Text file with the system message; null has none.")
    processor: str = Field("math_hf_data_processor", description="Name of the function that turns a row into a prompt.")
    env_name: str = Field("math", description="Which env.<name> judges the responses.")
    chat_key: str = Field("messages", description="openai_format, ResponseDataset: column of the conversation.")
    system_key: str | None = None
    """Column of the system message; null: `system` or `system_prompt`, where rows have one."""
    system_prompt: str | None = Field(None, description="System message of rows without one of their own.")
    tool_key: str | None = None
    """Column of the tools that the chat template is given; null: `tools`, where rows have it."""
    input_key: str | None = Field(None, description="Column of the problem; null: the dataset's own.")
    output_key: str | None = Field(None, description="Column of the expected answer; null: the dataset's own.")
    subset: str | None = Field(None, description="Subset (configuration) of a Hugging Face dataset.")
    split: str | None = Field(None, description="Split to read; null: the dataset's own.")
    split_validation_size: float | int = Field(0, ge=0)
    """Rows taken out of train for validation: a share below 1, a count otherwise; 0 takes none."""
    seed: int = Field(42, description="Seed of the train and validation split, and of generated data.")
    download_dir: str | None = Field(None, description="Where downloads go; null: the usual cache.")
    repeat: PositiveInt = Field(1, description="How many times the rows are repeated, e.g. for small validation sets.")
    data_path: str | None = None
    """JSON, JSONL, CSV, TSV, parquet or arrow file or its address (https), a directory of them or of save_to_disk, or a
    Hugging Face id; every dataset also reads rows of its published columns from here.
    """
    file_format: Literal["csv", "tsv", "json", "jsonl", "parquet", "arrow"] | None = None
    """What the file of data_path holds; null: what its name ends with."""
    max_samples: NonNegativeInt | None = None
    """Only the first so many rows, before any are taken for validation; 0 and null take all."""
    num_problems: PositiveInt = Field(10_000, description="Generated datasets: distinct problems of split `train`.")
    held_out: NonNegativeInt = 512
    """Generated datasets: distinct problems kept for split `validation`, never in `train`."""
    task: str | None = None
    """reasoning_gym: name of the task, such as spell_backward; digits: reverse or sort."""
    task_config: dict[str, object] = Field(default_factory=dict)
    """reasoning_gym, sliding_puzzle, digits: settings of the task's generator."""
    max_operand: PositiveInt = Field(99, description="arithmetic: largest operand.")
    operators: list[str] = Field(["+", "-"], description="arithmetic: operators among + - *.")
    slips: float = Field(0.0, ge=0, lt=1)
    """arithmetic, digits: fraction of training answers with a digit too many, as careless demonstrations have."""


class DatasetDefaults(DatasetKeys):
    """`data.default`: values for the keys that an entry of train or validation omits."""

    dataset_name: str | None = Field(None, description="Dataset of entries that name none.")


class DatasetConfig(DatasetKeys):
    """One entry of `data.train` or `data.validation`; a dataset_name with a dot is an importable class that gets every
    key of the entry.
    """

    model_config = ConfigDict(extra="allow")

    dataset_name: str = Field(description="Name in the registry, or the dotted path of a class.")

    @model_validator(mode="after")
    def _only_classes_take_further_keys(self) -> DatasetConfig:
        if self.model_extra and "." not in self.dataset_name:
            raise UnknownKeys(sorted(self.model_extra), sorted(type(self).model_fields))
        return self


class UnknownKeys(ValueError):
    """Keys that a section does not have, where pydantic could not tell by itself."""

    def __init__(self, keys: list[str], valid: list[str]) -> None:
        super().__init__(f"unknown keys: {', '.join(keys)}")
        self.keys = keys
        self.valid = valid


def _as_list(value: object) -> object:
    return [value] if isinstance(value, (Mapping, DatasetConfig)) else value


Datasets = Annotated[list[DatasetConfig], BeforeValidator(_as_list)]


class DataConfig(Section):
    """`data.*`."""

    max_input_seq_length: Annotated[PositiveInt | None, DefaultFrom("${policy.max_total_sequence_length}")] = 512
    """Longest prompt, in tokens; null, and more, is policy.max_total_sequence_length."""
    add_bos: bool = Field(True, description="SFT: begin a conversation with the tokenizer's first token.")
    add_eos: bool = True
    """SFT: end a conversation with the tokenizer's last token, unless it ends with a stop token."""
    add_generation_prompt: bool = False
    """SFT: do not train the template's opening of an answer, which belongs to the prompt."""
    shuffle: bool = Field(True, description="Shuffle the training data each epoch.")
    num_workers: NonNegativeInt = Field(1, description="Processes that prepare prompts; 0 prepares them in the driver.")
    use_multiple_dataloader: bool = Field(False, description="One loader per training dataset.")
    num_prompts_per_dataloader: PositiveInt | None = None
    """Prompts per step from each loader; read with use_multiple_dataloader."""
    custom_dataloader: str | None = None
    """Dotted path of a function that mixes several loaders; read with use_multiple_dataloader."""
    train: Datasets = Field([DatasetConfig(dataset_name="OpenMathInstruct-2", split_validation_size=0.05)])
    """Training data: a dataset or a list of them."""
    validation: Datasets | None = Field(None, description="Validation data: a dataset, a list of them, or null.")
    default: DatasetDefaults = Field(DatasetDefaults(), description="Values for keys that an entry omits.")

    @model_validator(mode="before")
    @classmethod
    def _fill_entries(cls, raw: object) -> object:
        if not isinstance(raw, Mapping) or not isinstance(raw.get("default"), Mapping):
            return raw
        filled = dict(raw)
        # What `default` cannot hold is refused there, and not once more in every entry.
        default = {key: value for key, value in raw["default"].items() if key in DatasetKeys.model_fields}
        if raw["default"].get("dataset_name") is not None:
            default["dataset_name"] = raw["default"]["dataset_name"]
        for split in ("train", "validation"):
            entries = raw.get(split)
            if isinstance(entries, Mapping):
                filled[split] = [{**default, **entries}]
            elif isinstance(entries, list):
                filled[split] = [{**default, **entry} if isinstance(entry, Mapping) else entry for entry in entries]
        return filled


def prompt_places(path: str) -> tuple[Path, Path]:
    """Places to look for a prompt file: relative to the working directory, then to the package's checkout."""
    return Path(path).expanduser(), Path(__file__).parents[2] / path
