"""Values of several kinds, such as the parts of a content, which have different fields."""

from typing import Annotated, Any, TypeGuard, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

# Type of the error of a value that is of none of the kinds.
ONE_OF = "one_of"


class OneOf:
    """Annotation of a union of models that the value of one field tells apart, perhaps with strings and lists.

    Only the errors of the kind that a value claims to be are reported. A field of an object that is null counts as
    absent: clients send such fields of other kinds, too.

    Args:
        key: name of the field, whose type is a ``Literal`` in each of the models.
        default: value of the field where it is absent.
    """

    def __init__(self, key: str, default: str | None = None) -> None:
        self._key = key
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[Any, CoreSchema] = {}
        values: list[str] = []
        forms: list[str] = []
        for kind in get_args(source) or (source,):
            schema = handler.generate_schema(kind)
            if _is_model(kind):
                names = get_args(kind.model_fields[self._key].annotation)
                choices |= {f"[{name}]": schema for name in names}
                values += names
            else:
                plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
                form = "a list" if get_origin(plain) is list else "a string"
                choices[f"[{form}]"] = schema
                forms.append(form)
        context: dict[str, str | int | float] = {
            "key": self._key,
            "values": ", ".join(values),
            "forms": " or ".join([*forms, "an object"] if values else forms),
        }
        union = core_schema.tagged_union_schema(
            choices,
            self._tag,
            custom_error_type=ONE_OF,
            custom_error_message="expected one of several kinds",
            custom_error_context=context,
        )
        return core_schema.no_info_before_validator_function(_without_nulls, union)

    def _tag(self, value: Any) -> str:
        """Return the name of a value's kind; brackets tell it from the names of fields in places of errors."""
        if isinstance(value, str):
            return "[a string]"
        if isinstance(value, list):
            return "[a list]"
        if isinstance(value, dict):
            return f"[{value.get(self._key, self._default)}]"
        return f"[{getattr(value, self._key, None)}]"


def _is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: field for name, field in value.items() if field is not None}
    return value
