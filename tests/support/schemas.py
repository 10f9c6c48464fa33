"""JSON schemas, and a validator of the keywords that they use."""

import re

TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}


def obj(required=None, more=False, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": more,
    }


STR, INT, NUM, BOOL = ({"type": name} for name in ("string", "integer", "number", "boolean"))
TREE = {"$defs": {"node": obj(["v"], v=BOOL, next={"$ref": "#/$defs/node"})}, "$ref": "#/$defs/node"}
LIST = {
    "$defs": {"item": {"anyOf": [BOOL, {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 2}]}},
    "type": "array",
    "items": {"$ref": "#/$defs/item"},
    "maxItems": 3,
}

SCHEMAS = [
    STR,
    INT,
    NUM,
    BOOL,
    {"type": "null"},
    {"type": ["string", "null"]},
    {"enum": ["red", "green", 7, None, True]},
    {"const": {"a": [1, "two"]}},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "pattern": "^(\\d{3})-(\\d{2})$"},
    {"type": "integer", "minimum": 10, "maximum": 312},
    {"type": "integer", "minimum": -5, "exclusiveMaximum": 7},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": BOOL},
    {"type": "array", "prefixItems": [BOOL, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": BOOL, "maxItems": 2}, "maxItems": 2},
    obj(),
    obj(name=STR, age=INT),
    obj([], a=INT, b=BOOL),
    obj(["b"], a=INT, b=BOOL, c={"type": "null"}),
    obj(more=True, a=BOOL),
    obj(more=BOOL, a=INT),
    obj(inner=obj(deep=obj(deeper={"enum": ["x", "y"]}))),
    obj(tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}, ok=BOOL),
    {"anyOf": [STR, INT]},
    {"anyOf": [obj(kind={"const": "a"}, x=INT), obj(kind={"const": "b"}, y=BOOL)]},
    obj(v={"anyOf": [INT, {"type": "null"}]}),
    {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
    TREE,
    LIST,
    {"$defs": {"p": obj(x=INT, y=INT)}, **obj(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"})},
    obj(**{"naïve 日本": BOOL, 'quo"te': BOOL, "a\\b": BOOL}),
    {"type": "object", "patternProperties": {"^x_": BOOL}, "additionalProperties": False},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 2},
]


def composed(dice):
    """A schema drawn from those above, some levels deep."""
    parts = [schema for schema in SCHEMAS if "$defs" not in schema]
    one, other = dice.choice(parts), dice.choice(parts)
    return dice.choice(
        [
            one,
            obj(one=one, other=other),
            obj(["b"], a=one, b=other),
            {"type": "array", "items": one, "maxItems": 2},
            {"type": "array", "prefixItems": [one, other], "items": False, "minItems": 2},
            obj(deep=obj(one=one), list={"type": "array", "items": other, "maxItems": 1}),
            {"anyOf": [obj(a=one), obj(b=other)]},
            {"type": "object", "additionalProperties": one, "maxProperties": 1},
        ]
    )


FORMATS = {
    "date": r"\d{4}-\d\d-\d\d",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"\d+(\.\d+){3}",
}


def same(a, b):
    """Equal as JSON: true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def valid(value, schema, root=None):
    """Whether a value is as a schema says; keywords that are not known here fail loudly."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(keyword(name, told, value, schema, root) for name, told in schema.items())


def keyword(name, told, value, schema, root):
    is_number = TYPES["number"](value)
    match name:
        case "$defs":
            return True
        case "$ref":
            return valid(value, root["$defs"][told.removeprefix("#/$defs/")], root)
        case "type":
            return any(TYPES[one](value) for one in ([told] if isinstance(told, str) else told))
        case "enum":
            return any(same(value, one) for one in told)
        case "const":
            return same(value, told)
        case "anyOf":
            return any(valid(value, one, root) for one in told)
        case "allOf":
            return all(valid(value, one, root) for one in told)
        case "minimum" | "maximum" | "exclusiveMaximum" | "multipleOf":
            return not is_number or number(name, told, value)
        case "minLength" | "maxLength" | "pattern" | "format":
            return not isinstance(value, str) or text(name, told, value)
        case "items" | "prefixItems" | "minItems" | "maxItems":
            return not isinstance(value, list) or array(name, told, value, schema, root)
        case _:
            return not isinstance(value, dict) or members(name, told, value, schema, root)


def number(name, told, value):
    match name:
        case "minimum":
            return value >= told
        case "maximum":
            return value <= told
        case "exclusiveMaximum":
            return value < told
        case "multipleOf":
            return value % told == 0


def text(name, told, value):
    match name:
        case "minLength":
            return len(value) >= told
        case "maxLength":
            return len(value) <= told
        case "pattern":
            return re.search(told, value) is not None
        case "format":
            return re.fullmatch(FORMATS[told], value) is not None


def array(name, told, value, schema, root):
    first = len(schema.get("prefixItems", []))
    match name:
        case "items":
            return all(valid(one, told, root) for one in value[first:])
        case "prefixItems":
            return all(valid(one, part, root) for one, part in zip(value, told, strict=False))
        case "minItems":
            return len(value) >= told
        case "maxItems":
            return len(value) <= told


def members(name, told, value, schema, root):
    match name:
        case "properties":
            return all(valid(value[key], one, root) for key, one in told.items() if key in value)
        case "required":
            return set(told) <= set(value)
        case "patternProperties":
            return all(valid(v, one, root) for p, one in told.items() for k, v in value.items() if re.search(p, k))
        case "additionalProperties":
            patterns = schema.get("patternProperties", {})
            rest = set(value) - set(schema.get("properties", {}))
            return all(valid(value[k], told, root) for k in rest if not any(re.search(p, k) for p in patterns))
        case "minProperties":
            return len(value) >= told
        case "maxProperties":
            return len(value) <= told
    raise AssertionError(f"the validator knows no {name}")
