"""How much more device memory the driver reports of a process than the tracker counted. Pure.

The tracker cannot see what was allocated before its probes were attached, nor what the driver
keeps for a process on its own account (contexts of another size than assumed, rounding up to
the driver's granule). The driver's per-process figure has all of it, so the difference is charged
to the instance too: that keeps promise 5 of the design.
"""

from typing import Dict, Mapping, Tuple

ProcessShare = Tuple[int, int]  # (pid, share_id)


def unseen_bytes(
    before: Mapping[ProcessShare, int],
    driver: Mapping[ProcessShare, int],
    after: Mapping[ProcessShare, int],
    last: Mapping[ProcessShare, int],
) -> Dict[ProcessShare, int]:
    """What to charge beyond the tracked bytes, by process; those with nothing are left out.

    ``before`` and ``after`` are the tracker's figures read around the driver's. Where one moved
    meanwhile the difference would be one of time, not of count: it keeps the charge of ``last``.
    A driver that reports less than was tracked (it may not have counted yet) charges nothing.
    """
    charge = {}
    for key in set(driver) | set(after):
        if before.get(key, 0) == after.get(key, 0):
            charge[key] = max(0, driver.get(key, 0) - after.get(key, 0))
        else:
            charge[key] = last.get(key, 0)
    return {key: nbytes for key, nbytes in charge.items() if nbytes}
