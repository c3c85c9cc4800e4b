"""Configuration: settings, their bounds, and files that nobody has to trust.

`load.py` turns TOML and `section.key=value` into frozen dataclasses, `bounds.py` says how far a number may go
and why, `files.py` reads what users and other programs wrote, `error.py` is what they are told.
"""

from penstock.config.bounds import Items, Within, check_bounds
from penstock.config.error import UNSET, ConfigError, shorten
from penstock.config.files import open_regular, parse_json, read_json, read_text
from penstock.config.load import from_dict, load, to_dict, to_toml

__all__ = [
    "UNSET",
    "ConfigError",
    "Items",
    "Within",
    "check_bounds",
    "from_dict",
    "load",
    "open_regular",
    "parse_json",
    "read_json",
    "read_text",
    "shorten",
    "to_dict",
    "to_toml",
]
