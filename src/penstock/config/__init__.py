"""Configuration: settings, their bounds, and files that need not be trusted.

`load.py` turns TOML, YAML and `section.key=value` into frozen dataclasses, `validate.py` has pydantic check
them, `bounds.py` declares the range of every number and the reason, `files.py` reads what users and other
programs wrote, `error.py` makes the errors that they see.
"""

from penstock.config.bounds import Items, Table, Within
from penstock.config.error import UNSET, ConfigError, IndivisibleError, check_name, in_any_case, shorten
from penstock.config.files import (
    asked,
    check_no_link,
    expanded,
    is_missing,
    open_regular,
    parse_json,
    read_json,
    read_text,
)
from penstock.config.load import from_dict, load, to_dict, to_toml
from penstock.config.validate import Checked, HintWarning, OtherNameWarning, check_bounds, check_value

__all__ = [
    "UNSET",
    "Checked",
    "ConfigError",
    "HintWarning",
    "IndivisibleError",
    "Items",
    "OtherNameWarning",
    "Table",
    "Within",
    "asked",
    "check_bounds",
    "check_name",
    "check_no_link",
    "check_value",
    "expanded",
    "from_dict",
    "in_any_case",
    "is_missing",
    "load",
    "open_regular",
    "parse_json",
    "read_json",
    "read_text",
    "shorten",
    "to_dict",
    "to_toml",
]
