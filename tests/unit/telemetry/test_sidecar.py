"""A watch by hand, in the foreground."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import pytest
from tests.unit.telemetry.real_watches import end_reason, samples_of, wait_until

from paceline.telemetry.sidecar import SidecarOptions, run_sidecar


def test_it_ends_when_its_lifetime_is_over(options: SidecarOptions) -> None:
    run_sidecar(replace(options, max_lifetime_s=0.5))
    assert end_reason(options) == "lifetime reached"
    assert len(samples_of(options)) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_watch_by_hand_and_leaves_the_mask_as_it_was(
    options: SidecarOptions, number: signal.Signals
) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    main = threading.get_ident()

    def signal_it() -> None:
        wait_until(lambda: len(samples_of(options)) >= 2)
        signal.pthread_kill(main, number)

    thread = threading.Thread(target=signal_it)
    thread.start()
    run_sidecar(options)
    thread.join(timeout=10)
    assert end_reason(options) == "asked"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
