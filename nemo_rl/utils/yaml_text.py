"""Plain YAML by libyaml, several times as fast as by Python, where PyYAML was built with it."""

from typing import Any

import yaml

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_yaml(text: str) -> Any:
    """The value of a document. Raises yaml.YAMLError: it is none."""
    return yaml.load(text, Loader=_Loader)


def dump_yaml(value: object, **options: Any) -> str:
    """The document of a value of plain types, with its keys in their order. `options`: those of `yaml.dump`."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, **options))
