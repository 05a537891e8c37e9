"""How many prompt bytes make a token, learned per model from what the engines report.

Decides the conversion between our bytes and the engines' tokens, nothing else.
"""

from __future__ import annotations

__all__ = ["BytesPerToken"]

_LEAST, _MOST = 0.5, 64.0
"""Reports outside these bounds are not of one text prompt (images, token ids) and teach nothing."""
_WEIGHT = 0.05
"""Of one report in the running mean: some twenty requests decide, one odd prompt does not."""
_MAX_MODELS = 1000
"""Names come from clients: beyond this many, further ones use the mean of all."""


class BytesPerToken:
    """Running means of prompt bytes per prompt token, per model and over all models."""

    def __init__(self, prior: float) -> None:
        """Start from `prior` bytes per token, used until a model has been reported on."""
        self._mean = prior
        self._by_model: dict[str, float] = {}

    def of(self, model: str) -> float:
        """Return bytes per token of `model`; the mean over all models where it is not known."""
        return self._by_model.get(model, self._mean)

    @property
    def mean(self) -> float:
        """Bytes per token over all models."""
        return self._mean

    def learn(self, model: str | None, prompt_bytes: int, prompt_tokens: int, *, requests: int = 1) -> None:
        """Take note of finished requests (model None: of several); implausible pairs are ignored."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_bytes / prompt_tokens
        if not _LEAST <= ratio <= _MOST:
            return
        weight = _WEIGHT if requests == 1 else 1.0 - (1.0 - _WEIGHT) ** requests
        self._mean += weight * (ratio - self._mean)
        if model is None:
            return
        known = self._by_model.get(model)
        if known is not None:
            self._by_model[model] = known + weight * (ratio - known)
        elif len(self._by_model) < _MAX_MODELS:
            self._by_model[model] = ratio
