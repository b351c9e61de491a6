"""/openapi.json describes every body, and what fits it is never an error of the server."""

import asyncio
import random
from typing import Any

from support.toy_server import toy_app, toy_client

from fastinfer.server.openapi import BODIES


def test_every_body_is_described() -> None:
    paths = toy_app().openapi()["paths"]
    without_body = {"/sleep", "/wake_up", "/reset_prefix_cache", "/v1/responses/{id}/cancel"}
    posts = {path for path, methods in paths.items() if "post" in methods}
    assert posts - without_body == set(BODIES)
    assert all("requestBody" in paths[path]["post"] for path in BODIES)


def resolve(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def sample(schema: dict[str, Any], definitions: dict[str, Any], generator: random.Random, depth: int = 0) -> Any:
    """A value that fits a schema, or nearly: bounds and patterns are missed now and then."""
    schema = resolve(schema, definitions)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return generator.choice(schema["enum"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return sample(generator.choice(schema[key]), definitions, generator, depth)
    match schema.get("type"):
        case "null":
            return None
        case "boolean":
            return generator.random() < 0.5
        case "integer":
            return generator.choice([0, 1, 2, 5, 63, 64, -1, 2**31, 10**20])
        case "number":
            return generator.choice([0, 0.5, 1, 2.5, -1, 1e30])
        case "string":
            return generator.choice(["", "a", "hello", "toy", "ä", "</s>", "\x00", "x" * 600, "{", "(", "\U0001f600"])
        case "array":
            length = generator.choice([0, 1, 1, 2, 3]) if depth < 4 else 0
            return [sample(schema.get("items", {}), definitions, generator, depth + 1) for _ in range(length)]
        case "object":
            properties = schema.get("properties", {})
            required = set(schema.get("required", ()))
            chosen = [name for name in properties if name in required or generator.random() < 0.12]
            value = {name: sample(properties[name], definitions, generator, depth + 1) for name in chosen}
            return value or {"type": "string"} if generator.random() < 0.5 or value else {}
        case _:
            return generator.choice([None, 1, "x", [], {}, {"type": "object"}])


def test_no_request_is_an_error_of_the_server() -> None:
    generator = random.Random(0)
    schema = toy_app().openapi()
    definitions = schema["components"]["schemas"]

    async def main() -> None:
        statuses: dict[int, int] = {}
        async with toy_client(admin_keys=("boss",)) as client:
            for _ in range(1500):
                path = generator.choice(list(BODIES))
                content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                body = sample(content["schema"], definitions, generator)
                if isinstance(body, dict) and generator.random() < 0.7:
                    body["model"] = "toy"
                answer = await client.post(path, json=body, headers={"X-Api-Key": "boss"})
                assert answer.status_code < 500, (path, body, answer.text)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert (await client.get("/ready")).status_code == 200
        assert statuses[200] > 50
        assert statuses[400] > 500

    asyncio.run(main())
