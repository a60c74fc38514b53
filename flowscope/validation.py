"""Data from a file, checked against the annotations of a dataclass: what comes out has the types it says it has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

T = TypeVar("T")

Step = Annotated[int, Field(ge=0, lt=2**63)]
"""A step number that arrays can hold."""


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(kind: type[T], data: Any) -> T:
    """The dataclass `kind` made of a JSON object; lists become tuples, entries it does not know are left out.

    Raises:
        ValueError: an entry is missing or of another type.
    """
    known: Any = kind  # mypy takes no type[T] for hashable
    made: T = _adapter(known).validate_python(data)
    return made


def fitting(kind: type[Any]) -> AfterValidator:
    """For `Annotated`: a JSON object that stays as it is, but must be one of which `kind` could be made."""

    def check(data: Any) -> Any:
        checked(kind, data)
        return data

    return AfterValidator(check)


def as_far_as_it_fits(kind: type[T], data: Any) -> T:
    """The same, with entries that do not fit left at their defaults.

    Raises:
        ValueError: it is no JSON object, or an entry without a default is missing or does not fit.
    """
    try:
        return checked(kind, data)
    except ValidationError as error:
        if not isinstance(data, Mapping):
            raise
        wrong = {told["loc"][0] for told in error.errors(include_url=False, include_input=False) if told["loc"]}
        return checked(kind, {name: value for name, value in data.items() if name not in wrong})
