"""What README and docs name exists: files, modules, keys, targets of make; what they quote is what the code says."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from nemo_rl.config import MasterConfig, SFTMasterConfig
from nemo_rl.config.evaluation import EvalMasterConfig
from nemo_rl.config.section import Section, section_type

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SUFFIXES = ("py", "yaml", "sh", "md", "toml", "sub", "html", "txt", "tsv")
# Pages that name what others have.
FOREIGN = {"from_nemo_rl.md"}
# Written by a run, or by the reader.
WRITTEN = re.compile(r"^(logs|results|checkpoints?|step_|exp_|samples|policy|out|my_|\.|~|/)")
HOMES = ("", "nemo_rl/", "docs/", "examples/", "examples/configs/", "tests/")
TOP_LEVEL = {*MasterConfig.model_fields, *SFTMasterConfig.model_fields, *EvalMasterConfig.model_fields}


def words(page: Path) -> list[str]:
    """What a page sets in code font, without its fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    missing = []
    for word in words(page):
        path = word.split("::")[0]
        if "/" not in path or not re.fullmatch(rf"[\w./-]+\.({'|'.join(SUFFIXES)})", path) or WRITTEN.match(path):
            continue
        if page.name not in FOREIGN and not any((ROOT / home / path).exists() for home in HOMES):
            missing.append(word)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_and_names_that_a_page_gives_can_be_imported(page: Path) -> None:
    if page.name in FOREIGN:
        pytest.skip("its names are NeMo-RL's, and have a test of their own")
    missing = [word for word in words(page) if re.fullmatch(r"nemo_rl(\.\w+)+", word) and not importable(word)]
    assert missing == []


def importable(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            if importlib.util.find_spec(".".join(parts[:cut])) is None:
                continue
        except ModuleNotFoundError:
            continue
        found: object = importlib.import_module(".".join(parts[:cut]))
        return all((found := getattr(found, part, None)) is not None for part in parts[cut:])
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_are_keys(page: Path) -> None:
    if page.name in FOREIGN:
        pytest.skip("it has a test of its own")
    unknown = []
    for word in words(page):
        found = re.fullmatch(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)(?:[=:].*)?", word)
        if found and found[1].split(".")[0] in TOP_LEVEL and not is_key(found[1]):
            unknown.append(word)
    assert unknown == []


def is_key(dotted: str) -> bool:
    """Whether any of the three configurations has the key; below free-form mappings everything is one."""
    return any(_is_key_of(root, dotted.split(".")) for root in (MasterConfig, SFTMasterConfig, EvalMasterConfig))


def _is_key_of(section: type[Section], parts: list[str]) -> bool:
    for number, part in enumerate(parts):
        field = next(
            (field for name, field in section.model_fields.items() if part in (name, field.alias)),
            None,
        )
        if field is None:
            return section.model_config.get("extra") == "allow"
        inner = section_type(field)
        if inner is None:
            # A list or a mapping of entries, or a plain value.
            return number == len(parts) - 1 or "dict" in str(field.annotation) or "list" in str(field.annotation)
        section = inner
    return True


def test_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"(?:^|`|&& )make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert named and named <= targets


def test_the_design_quotes_the_step_loop_as_it_is() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    ((module, name, quoted),) = re.findall(r"<!-- quoted from (\S+): (\w+) -->\n```python\n(.*?)```", text, re.DOTALL)
    source = (ROOT / module).read_text()
    begins = source.index(f"def {name}(")
    assert quoted.strip() == source[begins : source.index("\n\n\n", begins)].strip()


def test_errors_that_the_troubleshooting_page_explains_are_raised() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "nemo_rl").rglob("*.py"))
    named = {word for word in words(ROOT / "docs" / "faq.md") if re.fullmatch(r"[A-Z]\w+", word)}
    named -= {word for word in named if word.isupper()}
    assert named and [word for word in named if f"raise {word}(" not in source] == []
