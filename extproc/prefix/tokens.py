"""Estimates of the number of tokens of a prompt, learned from what engines report.

    tokens = template + scale * plain bytes

`template` is what a model's chat template adds to a prompt however short; `scale` how many tokens a byte of plain text
makes (`text`), per model and kind of text. Short prompts teach the template, long ones the scale. A prompt whose
beginning was reported before has the scale of that beginning instead. Also estimates the bytes per cached token.

Clients choose their texts, so no report counts for more than its bounds (Huber's: beyond a few per cent of error a
report only says "more" or "less"), no named user counts for more than a quarter of the latest reports, each kind of
text learns on its own, and all are drawn slightly towards the values of other kinds and the prior.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping
from math import exp, log
from typing import Final

from extproc.prefix.text import IDS, KINDS, Text

__all__ = ["TokenEstimates"]

_LEAST_SCALE, _MOST_SCALE = 1 / 64, 2.0
"""Tokens per plain byte: sixteen bytes of text a token, of which each may count four times; or two tokens a byte."""
_MOST_TEMPLATE: Final = 2048.0
_LEAST_BYTES, _MOST_BYTES = 0.5, 16.0
"""Of one token, in the cache."""
_MOST_TOKENS_PER_BYTE: Final = 2
_BEYOND_TEXT: Final = 4096
"""A prompt with more tokens than two a byte and these is not its text alone, and teaches nothing."""
_GAIN: Final = 0.04
"""Of one report once some have come: twenty-five decide."""
_CLIP: Final = 0.12
"""Error beyond which a report pulls no harder: about the spread of honest texts of one kind."""
_ANCHOR: Final = 0.06
"""Pull towards what the other kinds say (and of all kinds towards the prior), as a share of a report's."""
_LONG_BYTES: Final = 2000.0
"""Plain bytes of a prompt that teaches the scale fully; shorter ones teach it less, by their share of this."""
_SHORT_TOKENS: Final = 64.0
"""Tokens of text beside which the template is still a good part of the prompt."""
_NAMED: Final = 64
_NAMED_SHARE: Final = 0.25
"""Of the last so many reports of named users, how many of one user count fully."""
_NAME_LENGTH: Final = 64
_MAX_MODELS: Final = 1000
_LONGEST_MODEL: Final = 256
"""Names come from clients: beyond these bounds they have the estimate of all models together."""
_WARM: Final = 100.0
_PAUSE_S: Final = 0.02
"""A model on which so many long prompts have reported learns from one report in this time: a burst counts once."""
_MAX_BEGINNINGS: Final = 8192
_LEAST_BLOCKS: Final = 8
"""Prompts of fewer blocks have too little of a beginning to be known by."""
_MOST_WEIGHED: Final = 4096.0
_CACHE_WEIGHT: Final = 0.02


class _Model:
    """What is known of one model."""

    __slots__ = ("learned_at", "pooled", "pooled_seen", "scales", "seen", "template", "template_seen")

    def __init__(self, scale: float) -> None:
        self.pooled = scale
        """Of all kinds of text: what holds for a kind not yet seen."""
        self.pooled_seen = 0.0
        self.scales = [0.0] * KINDS
        self.seen = [0.0] * KINDS
        self.template = 0.0
        self.template_seen = 0.0
        self.learned_at = -1e9

    def inherited(self) -> _Model:
        """Return the initial state of a new model: what has been learned from all others."""
        made = _Model(self.pooled)
        made.scales = self.scales.copy()
        made.template = self.template
        return made

    def learn(self, plains: Mapping[int, float], tokens: float, requests: int, influence: float, prior: float) -> None:
        """Learn from the tokens of `requests` prompts together; `plains` are their plain bytes by kind, above 0 in all."""
        scales, template = self.scales, self.template
        parts = {kind: plain * (scales[kind] or self.pooled) for kind, plain in plains.items()}
        text = sum(parts.values())
        expected = requests * template + text
        error = log(tokens / expected)
        size = sum(plains.values()) / requests
        weight = min(1.0, size / _LONG_BYTES) * (text / expected) ** 2
        for kind, part in parts.items():
            known = scales[kind] or self.pooled
            moved = _moved(known, self.pooled, error, weight * part / text, self.seen[kind], influence, requests)
            scales[kind] = min(max(moved, _LEAST_SCALE), _MOST_SCALE)
            self.seen[kind] += weight * part / text * requests
        moved = _moved(self.pooled, prior, error, weight, self.pooled_seen + 0.5, influence, requests)
        self.pooled = min(max(moved, _LEAST_SCALE), _MOST_SCALE)
        self.pooled_seen += weight * requests
        weight = 1.0 / (1.0 + text / requests / _SHORT_TOKENS) ** 2
        bound = max(2.0 * _CLIP, 2.0 / (1.0 + self.template_seen)) * (template + 16.0)
        missing = min(max((tokens - expected) / requests, -bound), bound)
        gain = influence * weight * _gain(self.template_seen, requests)
        self.template = min(max(template + gain * missing, 0.0), _MOST_TEMPLATE)
        self.template_seen += weight * requests


def _gain(seen: float, requests: int) -> float:
    one = max(_GAIN, 1.0 / (seen + 1.0))
    return one if requests == 1 else 1.0 - (1.0 - one) ** min(requests, 25)


def _moved(
    scale: float, towards: float, error: float, weight: float, seen: float, influence: float, requests: int
) -> float:
    """Return a scale after one report; its influence falls with the number of reports seen, and is bounded."""
    bound = max(_CLIP, 2.0 / (1.0 + 0.5 * seen))
    pull = min(max(error, -bound), bound) + _ANCHOR * log(towards / scale)
    return scale * exp(influence * weight * _gain(seen, requests) * pull)


class TokenEstimates:
    """Estimates of prompt tokens, per model; a model without reports has the estimate over all models."""

    def __init__(self, bytes_per_token: float) -> None:
        """Start from `bytes_per_token` bytes of plain text a token."""
        self._prior = min(max(1.0 / bytes_per_token, _LEAST_SCALE), _MOST_SCALE)
        self._all = _Model(self._prior)
        self._models: dict[str, _Model] = {}
        self._beginnings: dict[int, float] = {}
        self._names: deque[str] = deque(maxlen=_NAMED)
        self._named: Counter[str] = Counter()
        # As if one prompt of the prior had been reported; a ratio of sums, because the cache is filled by long ones.
        self._cache_bytes, self._cache_tokens = bytes_per_token * _MOST_WEIGHED, _MOST_WEIGHED

    def of(self, model: str, text: Text, chain: array[int] | None = None) -> int:
        """Return how many tokens a prompt will have; `chain` are its blocks, if it has any."""
        state = self._models.get(model, self._all)
        kind = text.kind
        if kind == IDS:
            return int(text.plain_bytes)
        scale = state.scales[kind] or state.pooled
        if chain is not None and (blocks := len(chain)) >= _LEAST_BLOCKS:
            scale = self._beginnings.get(chain[(1 << (blocks.bit_length() - 1)) - 1], scale)
        return round(state.template * text.prompts + scale * text.plain_bytes)

    @property
    def cache_bytes_per_token(self) -> float:
        """Bytes of prompt that a token of an engine's cache stands for, over all models; templates count as tokens."""
        return self._cache_bytes / self._cache_tokens

    def template_of(self, model: str) -> float:
        """Return the tokens that a prompt of `model` has beside its text."""
        return self._models.get(model, self._all).template

    def learn(
        self, model: str, text: Text, tokens: int, *, now: float, user: str = "", chain: array[int] | None = None
    ) -> None:
        """Learn from the tokens that an engine has reported for one prompt."""
        plain = text.plain_bytes
        if not text.teaches or plain <= 0.0 or not 0 < tokens < _MOST_TOKENS_PER_BYTE * text.n_bytes + _BEYOND_TEXT:
            return
        state = self._models.get(model) or self._state(model)
        beginning = 0
        if chain is not None and (blocks := len(chain)) >= _LEAST_BLOCKS:
            beginning = chain[(1 << (blocks.bit_length() - 1)) - 1]
        if state.pooled_seen > _WARM and now - state.learned_at < _PAUSE_S:
            if beginning and beginning not in self._beginnings:
                self._note_beginning(beginning, (tokens - state.template) / plain)
            return
        state.learned_at = now
        if beginning:
            self._note_beginning(beginning, (tokens - state.template) / plain)
        self._learn(state, {text.kind: plain}, tokens, 1, self._influence(user) if user else 1.0)
        self._weigh_cache(text.n_bytes, tokens, 1)

    def learn_sum(
        self, model: str | None, plains: Mapping[int, float], n_bytes: int, tokens: int, *, requests: int
    ) -> None:
        """Learn from the tokens of several prompts together (model None: of several models)."""
        plains = dict(plains)
        tokens -= int(plains.pop(IDS, 0.0))
        if (
            tokens <= 0
            or sum(plains.values()) <= 0.0
            or tokens > _MOST_TOKENS_PER_BYTE * n_bytes + _BEYOND_TEXT * requests
        ):
            return
        self._learn(self._all if model is None else self._state(model), plains, tokens, requests, 1.0)
        self._weigh_cache(n_bytes, tokens, requests)

    def _learn(self, state: _Model, plains: Mapping[int, float], tokens: int, requests: int, influence: float) -> None:
        state.learn(plains, tokens, requests, influence, self._prior)
        if state is not self._all:
            self._all.learn(plains, tokens, requests, influence, self._prior)

    def _state(self, model: str) -> _Model:
        state = self._models.get(model)
        if state is None:
            if len(self._models) >= _MAX_MODELS or len(model) > _LONGEST_MODEL:
                return self._all
            state = self._models[model] = self._all.inherited()
        return state

    def _influence(self, user: str) -> float:
        """Return the weight of a report on this user's request; it falls with the user's share of the latest reports."""
        user = user[:_NAME_LENGTH]
        names, named = self._names, self._named
        if len(names) == _NAMED:
            oldest = names[0]
            named[oldest] -= 1
            if not named[oldest]:
                del named[oldest]
        names.append(user)
        named[user] += 1
        return min(1.0, max(1.0, _NAMED_SHARE * len(names)) / named[user])

    def _note_beginning(self, key: int, scale: float) -> None:
        known = self._beginnings.pop(key, None)
        if known is None and len(self._beginnings) >= _MAX_BEGINNINGS:
            del self._beginnings[next(iter(self._beginnings))]
        scale = min(max(scale, _LEAST_SCALE), _MOST_SCALE)
        self._beginnings[key] = scale if known is None else (known + scale) / 2

    def _weigh_cache(self, n_bytes: int, tokens: int, requests: int) -> None:
        # A prompt of a million tokens counts as one of four thousand.
        weight = _CACHE_WEIGHT * requests * min(1.0, _MOST_WEIGHED * requests / tokens)
        weight = min(weight, 0.5)
        per_token = min(max(n_bytes / tokens, _LEAST_BYTES), _MOST_BYTES)
        each = tokens / requests
        self._cache_bytes += weight * (each * per_token - self._cache_bytes)
        self._cache_tokens += weight * (each - self._cache_tokens)
