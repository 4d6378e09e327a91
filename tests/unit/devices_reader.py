"""Reads the cards as the agent does, on demand: one JSON line for each line of standard input.

``cards`` and ``fresh`` ask Devices; the arguments are its answer_within_s and reconnect_after_s.
"""

import dataclasses
import json
import sys
from typing import Dict, List

from mgpu.devices import Devices
from mgpu.errors import MgpuError


def answer(devices: Devices, word: str) -> Dict[str, object]:
    try:
        cards = devices.fresh_cards() if word == "fresh" else devices.cards()
    except MgpuError as error:
        return {"error": error.code, "message": str(error)}
    rows: List[Dict[str, object]] = [
        dict(dataclasses.asdict(card), state=card.state) for card in cards
    ]
    return {"cards": rows, "driver_version": devices.driver_version()}


def main() -> None:
    devices = Devices(
        answer_within_s=float(sys.argv[1]), max_age_s=0.0, reconnect_after_s=float(sys.argv[2])
    )
    for line in sys.stdin:
        print(json.dumps(answer(devices, line.strip())), flush=True)


main()
