"""The calls of models as the OpenAPI document tells of them. They are served by `gateway/`, in front of this API.

What is typed here is what the gateway checks itself; the rest of a body is checked by the engine.
"""

from typing import Any, Final

from controlplane.api.shapes import FILTER_CHARACTERS_MAX

Schema = dict[str, Any]

MODEL_CHARACTERS_MAX: Final = FILTER_CHARACTERS_MAX
MESSAGES_MAX: Final = 1_024
TOOLS_MAX: Final = 128
SEQUENCES_MAX: Final = 8
STOPS_MAX: Final = 4
LOGIT_BIASES_MAX: Final = 300
TOKENS_MAX: Final = 10_000_000
ID_CHARACTERS_MAX: Final = 128
KEY_CHARACTERS_MAX: Final = 255
STEP_MAX: Final = 1_000_000
DEADLINE_MS_MAX: Final = 24 * 3_600_000
SALT_CHARACTERS_MAX: Final = 128
TOKEN_ID_MAX: Final = 2**31 - 1

# Members that are refused unless they are null, with the reason; the same as the gateway refuses.
REFUSED_MEMBERS: Final = (
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "chat_template", "chat_template_kwargs",
    "data_parallel_rank", "kv_transfer_params", "logits_processors", "media_io_kwargs",
    "mm_processor_kwargs", "prompt_embeds",
)  # fmt: skip

_TAG: Final = "models"
_ID: Final = r"^[!-~]+$"
_MODEL: Final = "llama-3.1-8b"


def _nullable(**schema: Any) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _number() -> Schema:
    return _nullable(type="number")


def _integer(least: int, most: int) -> Schema:
    return _nullable(type="integer", minimum=least, maximum=most)


def _header(name: str, schema: Schema, description: str) -> Schema:
    return {
        "name": name, "in": "header", "required": False, "schema": schema, "description": description,
    }  # fmt: skip


_HEADERS: Final = [
    _header(
        "x-headway-workflow",
        {"type": "string", "pattern": _ID, "minLength": 1, "maxLength": ID_CHARACTERS_MAX},
        "The workflow that the call is a step of.",
    ),
    _header(
        "x-headway-step",
        {"type": "integer", "minimum": 0, "maximum": STEP_MAX},
        "Which step of its workflow it is, from 0.",
    ),
    _header(
        "x-headway-deadline-ms",
        {"type": "integer", "minimum": 1, "maximum": DEADLINE_MS_MAX},
        "Milliseconds from now after which the answer is of no use.",
    ),
    _header(
        "x-headway-dry-run",
        {"type": "string", "enum": ["true", "false"]},
        "`true`: say what would be decided; nothing is reserved, asked or charged.",
    ),
    _header(
        "x-headway-session",
        {"type": "string"},
        "Calls of one session go to the engine that has its prefix. What is no id is ignored.",
    ),
    _header(
        "idempotency-key",
        {"type": "string", "pattern": _ID, "minLength": 1, "maxLength": KEY_CHARACTERS_MAX},
        "A name of your own for this call: sent again, it is not run again.",
    ),
    _header(
        "traceparent",
        {"type": "string"},
        "W3C trace context of the caller: the call's spans become part of that trace.",
    ),
]

# An id of the model's vocabulary.
_TOKEN: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": TOKEN_ID_MAX}

_OPTIONS: Final[Schema] = {
    "type": "object",
    "properties": {
        "include_usage": _nullable(type="boolean"),
        "continuous_usage_stats": _nullable(type="boolean"),
    },
}

_SAMPLING: Final[Schema] = {
    "model": {"type": "string", "minLength": 1, "maxLength": MODEL_CHARACTERS_MAX},
    "stream": _nullable(type="boolean"),
    "stream_options": {"anyOf": [_OPTIONS, {"type": "null"}]},
    "max_tokens": _integer(1, TOKENS_MAX),
    "min_tokens": _integer(0, TOKENS_MAX),
    "n": _integer(1, SEQUENCES_MAX),
    "best_of": _integer(1, SEQUENCES_MAX),
    "stop": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "maxItems": STOPS_MAX},
            {"type": "null"},
        ]
    },
    "logit_bias": _nullable(
        type="object", additionalProperties={"type": "number"}, maxProperties=LOGIT_BIASES_MAX
    ),
    "cache_salt": _nullable(type="string", maxLength=SALT_CHARACTERS_MAX),
    "use_beam_search": _nullable(type="boolean"),
    **{
        name: _number()
        for name in (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "length_penalty",
        )
    },
    **{name: {"type": "null", "description": "Refused."} for name in REFUSED_MEMBERS},
}  # fmt: skip

_USAGE: Final[Schema] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer", "minimum": 0},
        "completion_tokens": {"type": "integer", "minimum": 0},
        "total_tokens": {"type": "integer", "minimum": 0},
        "prompt_tokens_details": _nullable(
            type="object",
            properties={"cached_tokens": _nullable(type="integer", minimum=0)},
        ),
    },
}

_FINISH: Final[Schema] = {
    "enum": ["stop", "length", "tool_calls", "content_filter", "function_call", None]
}

_MESSAGE: Final[Schema] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}},
                {"type": "null"},
            ]
        },
    },
}


def _answer(kind: str, choice: Schema) -> Schema:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["index", "finish_reason", *choice],
                    "properties": {
                        "index": {"type": "integer", "minimum": 0},
                        "finish_reason": _FINISH,
                        **choice,
                    },
                },
            },
            "usage": {"$ref": "#/components/schemas/Usage"},
        },
    }


SCHEMAS: Final[dict[str, Schema]] = {
    "Usage": _USAGE,
    "ChatMessage": _MESSAGE,
    "ChatCompletionRequest": {
        "type": "object",
        "description": "As OpenAI's. Members that are not listed are passed to the engine where it knows them, and"
        " left out otherwise.",
        "required": ["model", "messages"],
        "properties": {
            **_SAMPLING,
            "messages": {
                "type": "array",
                "minItems": 1,
                "maxItems": MESSAGES_MAX,
                "items": {"$ref": "#/components/schemas/ChatMessage"},
            },
            "max_completion_tokens": _integer(1, TOKENS_MAX),
            "tools": _nullable(type="array", maxItems=TOOLS_MAX, items={"type": "object"}),
            "response_format": _nullable(type="object"),
            "logprobs": _nullable(type="boolean"),
        },
    },
    "CompletionRequest": {
        "type": "object",
        "description": "As OpenAI's. Members that are not listed are passed to the engine where it knows them, and"
        " left out otherwise.",
        "required": ["model", "prompt"],
        "properties": {
            **_SAMPLING,
            "prompt": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": SEQUENCES_MAX,
                        "items": {"type": "string", "minLength": 1},
                    },
                    {"type": "array", "minItems": 1, "items": _TOKEN},
                    {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": SEQUENCES_MAX,
                        "items": {"type": "array", "minItems": 1, "items": _TOKEN},
                    },
                ]
            },
        },
    },
    "ChatCompletion": _answer(
        "chat.completion",
        {
            "message": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"type": "string"},
                    "content": _nullable(type="string"),
                    "tool_calls": _nullable(type="array", items={"type": "object"}),
                },
            }
        },
    ),
    "Completion": _answer("text_completion", {"text": {"type": "string"}}),
    "DryRun": {
        "type": "object",
        "description": "What would be decided now.",
        "required": ["verdict"],
        "properties": {
            "verdict": {"enum": ["admit", "queue", "refuse"]},
            "reason": _nullable(type="string"),
        },
    },
    "Model": {
        "type": "object",
        "required": ["id", "object", "created", "owned_by", "max_model_len"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer", "minimum": 1},
        },
    },
    "ModelList": {
        "type": "object",
        "required": ["object", "data"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
        },
    },
}

_HELLO: Final = [{"role": "user", "content": "hello, how are you today?"}]
_TOLD: Final = (
    " Headers tell the limits that the call counts against (`x-ratelimit-*`), the engine, and when the call waited"
    " or got another model. A refusal says in `x-headway-reason` why, in `x-should-retry` whether to come"
    " back, and in `retry-after` when."
)


def _schema(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _call(summary: str, operation: str, request: str, answer: str, example: Schema) -> Schema:
    return {
        "post": {
            "tags": [_TAG],
            "operationId": operation,
            "summary": summary,
            "description": f"{summary}.{_TOLD}",
            "security": [{"TenantKey": []}],
            "parameters": _HEADERS,
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": _schema(request),
                        "examples": {"whole": {"value": example}},
                    }
                },
            },
            "responses": {
                "200": {
                    "description": "The answer; with `stream`, as events of the form `data: CHUNK`, the last of which"
                    ' is `data: [DONE]`. A stream that can not be finished ends with `data: {"error": …}` instead.',
                    "content": {
                        "application/json": {"schema": {"anyOf": [_schema(answer), _schema("DryRun")]}},
                        "text/event-stream": {"schema": {"type": "string"}},
                    },
                },
                **{
                    str(status): {"description": ""}
                    for status in (403, 404, 409, 413, 422, 429, 502, 504)
                },
            },
        }
    }  # fmt: skip


PATHS: Final[dict[str, Schema]] = {
    "/v1/chat/completions": _call(
        "Answer a chat",
        "create_chat_completion",
        "ChatCompletionRequest",
        "ChatCompletion",
        {"model": _MODEL, "messages": _HELLO, "max_tokens": 32},
    ),
    "/v1/completions": _call(
        "Continue a text",
        "create_completion",
        "CompletionRequest",
        "Completion",
        {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 32},
    ),
    "/v1/models": {
        "get": {
            "tags": [_TAG],
            "operationId": "list_models",
            "summary": "List models",
            "description": "List the models that the calling tenant may use.",
            "security": [{"TenantKey": []}],
            "responses": {
                "200": {
                    "description": "The models, by name.",
                    "content": {"application/json": {"schema": _schema("ModelList")}},
                }
            },
        }
    },
    "/v1/models/{model}": {
        "get": {
            "tags": [_TAG],
            "operationId": "get_model",
            "summary": "Get a model",
            "description": "One model that the calling tenant may use. A name may hold slashes.",
            "security": [{"TenantKey": []}],
            "parameters": [
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                    "example": _MODEL,
                }
            ],
            "responses": {
                "200": {
                    "description": "The model.",
                    "content": {"application/json": {"schema": _schema("Model")}},
                }
            },
        }
    },
}
