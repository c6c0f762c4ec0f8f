"""Random JSON schemas with short texts, values that fit them, and a check."""

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ("a", "name", 'qu"ote', "é→😀", "x y")
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.tuples(st.integers(-20, 20), st.integers(0, 300)).map(
        lambda t: {"type": "integer", "minimum": t[0], "maximum": t[0] + t[1]}
    ),
    st.integers(0, 4).map(lambda n: {"type": "string", "maxLength": n}),
    st.lists(
        st.sampled_from([0, 1.5, True, None, "", "a", "né", '"\\', [1, {}], {"k": 2}]),
        min_size=1,
        max_size=3,
    ).map(lambda values: {"enum": values}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    """Draw a closed schema of an object, with some of its properties required."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
    }


def arrays(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    sizes = st.tuples(st.integers(0, 2), st.integers(0, 1))
    return st.tuples(inner, sizes).map(
        lambda t: {
            "type": "array",
            "items": t[0],
            "minItems": t[1][0],
            "maxItems": sum(t[1]),
        }
    )


SCHEMAS: st.SearchStrategy[Schema] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda members: {"anyOf": members}),
    ),
    max_leaves=4,
)


def fits(schema: Schema, value: Any) -> bool:
    if "anyOf" in schema:
        return any(fits(one, value) for one in schema["anyOf"])
    if "enum" in schema:
        return any(same(value, one) for one in schema["enum"])
    if schema["type"] == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema["minimum"] <= value <= schema["maximum"]
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if schema["type"] == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(fits(schema["items"], item) for item in value)
        )
    if schema["type"] == "object":
        inner = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(inner)
            and all(fits(inner[name], item) for name, item in value.items())
        )
    return value is None if schema["type"] == "null" else isinstance(value, bool)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON, in which true differs from 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy of values that fit, with properties in the schema's order."""
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "string":
        return st.text('ab"\\\n é→😀', max_size=schema["maxLength"])
    if kind == "array":
        return st.lists(
            values(schema["items"]),
            min_size=schema["minItems"],
            max_size=schema["maxItems"],
        )
    if kind == "object":
        inner = schema["properties"]
        needed = {n: values(s) for n, s in inner.items() if n in schema["required"]}
        rest = {n: values(s) for n, s in inner.items() if n not in needed}
        drawn = st.fixed_dictionaries(needed, optional=rest)
        return drawn.map(lambda d: {n: d[n] for n in inner if n in d})
    return st.none() if kind == "null" else st.booleans()
