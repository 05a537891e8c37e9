"""Hypothesis profiles for all tests: `fast` by default, `deep` with HYPOTHESIS_PROFILE=deep (nightly, or before a release)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines anywhere: the machine is shared, and how long an example takes says nothing about the code.
settings.register_profile("fast", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
