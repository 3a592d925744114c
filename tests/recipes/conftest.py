"""Runs draw no plot, as without the plots extra: drawing takes longer than they do themselves."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_plot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("optune.metrics.run_log.draw_plot", lambda run_dir: None)
        yield
