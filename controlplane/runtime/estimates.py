"""What is learned from finished calls: bytes per prompt token, and how long answers are."""

from collections import OrderedDict

from controlplane.domain.ids import ModelName, TenantId
from controlplane.domain.outcome import Usage
from controlplane.domain.request import Request
from controlplane.runtime.call import Call

# English text in a chat template comes to about four bytes a token with today's tokenizers.
BYTES_PER_TOKEN_FIRST = 4.0
BYTES_PER_TOKEN_MIN = 1.0
BYTES_PER_TOKEN_MAX = 16.0
COMPLETION_TOKENS_FIRST = 256.0
GAIN = 0.05
KEPT_MAX = 50_000


class Estimates:
    """Exponentially weighted means, bounded in value and in number."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[str, float] = {}
        self._completion_tokens: OrderedDict[tuple[str, str], float] = OrderedDict()

    def prompt_tokens(self, model: ModelName, prompt_bytes: int) -> int:
        """Tokens that a prompt of this many bytes comes to; at least one."""
        return max(1, int(prompt_bytes / self._bytes_per_token.get(model, BYTES_PER_TOKEN_FIRST)))

    def completion_tokens(
        self, tenant: TenantId, model: ModelName, tokens_max: int, hint: int | None
    ) -> int:
        """Tokens that the answer is likely to have, never above `tokens_max`."""
        if hint is not None and hint > 0:
            return min(hint, tokens_max)
        mean = self._completion_tokens.get((tenant, model), COMPLETION_TOKENS_FIRST)
        return max(1, min(int(mean), tokens_max))

    def learn(self, request: Request, call: Call, usage: Usage) -> None:
        if usage.prompt_tokens > 0:
            ratio = call.prompt_bytes / usage.prompt_tokens
            mean = self._bytes_per_token.get(request.model, BYTES_PER_TOKEN_FIRST)
            mean += GAIN * (ratio - mean)
            self._bytes_per_token[request.model] = min(
                BYTES_PER_TOKEN_MAX, max(BYTES_PER_TOKEN_MIN, mean)
            )
        key = (request.tenant, request.model)
        each = usage.completion_tokens / max(1, call.n)
        mean = self._completion_tokens.get(key, COMPLETION_TOKENS_FIRST)
        self._completion_tokens[key] = mean + GAIN * (each - mean)
        self._completion_tokens.move_to_end(key)
        if len(self._completion_tokens) > KEPT_MAX:
            self._completion_tokens.popitem(last=False)
