"""A setting that is a table: names and values that this package does not interpret."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


class Table(tuple[tuple[str, Any], ...]):
    """Pairs of a name and a value, sorted by name, so that equal tables compare equal and can be hashed."""

    def __new__(cls, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> Self:
        return super().__new__(cls, sorted(dict(items).items()))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._read)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "object"}

    @classmethod
    def _read(cls, items: Any) -> Self:
        try:
            return cls(items)
        except TypeError as error:
            raise ValueError("must be pairs of a name and a value") from error
