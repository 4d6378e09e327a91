"""The cards as the agent sees them, over the simulated NVML, with faults put in from outside."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional

import pytest

from mgpu.caller import Caller, NoAnswer

READER = Path(__file__).with_name("devices_reader.py")
MIB = 1024 * 1024
H200_BYTES = 143771 * MIB
A10_BYTES = 23028 * MIB


class Reader:
    """A process that reads the cards as the agent does."""

    def __init__(
        self, env: Dict[str, str], answer_s: float = 2.0, reconnect_s: float = 0.0
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(READER), str(answer_s), str(reconnect_s)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, word: str = "cards") -> Dict[str, object]:
        assert self.process.stdin and self.process.stdout
        print(word, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def cards(self) -> List[Dict[str, object]]:
        return self.ask()["cards"]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def reader(lab) -> Iterator[Reader]:
    reader = Reader(lab.env)
    yield reader
    reader.close()


def test_inventory_is_that_of_the_two_default_cards(reader: Reader) -> None:
    answer = reader.ask()
    h200, a10 = answer["cards"]
    assert h200["device"]["name"] == "NVIDIA H200 (simulated)"
    assert h200["device"]["vmem_total_bytes"] == H200_BYTES
    assert (h200["device"]["index"], a10["device"]["index"]) == (0, 1)
    assert (h200["device"]["minor"], a10["device"]["minor"]) == (0, 1)
    assert a10["device"]["name"] == "NVIDIA A10 (simulated)"
    assert a10["device"]["vmem_total_bytes"] == A10_BYTES
    assert h200["device"]["simulated"] is True
    assert h200["device"]["uuid"].startswith("GPU-")
    assert h200["device"]["uuid"] != a10["device"]["uuid"]
    assert answer["driver_version"] == "580.95.05"


def test_idle_cards_have_nothing_in_use(reader: Reader) -> None:
    for card in reader.cards():
        figures = card["figures"]
        assert card["state"] == "ok"
        assert figures["used_bytes"] == 0
        assert figures["utilisation_ratio"] == 0.0
        assert figures["free_bytes"] == figures["total_bytes"] - figures["reserved_bytes"]
        assert card["process_bytes"] == {}


def test_memory_of_a_process_is_its_allocations_and_its_context(lab, reader: Reader) -> None:
    with lab.client() as client:
        assert client.ask("alloc", 100, 1) == {"result": 0}
        h200, a10 = reader.cards()
        assert h200["process_bytes"] == {}
        assert a10["process_bytes"] == {str(client.pid): (100 + 256) * MIB}
        assert a10["figures"]["used_bytes"] == (100 + 256) * MIB
        client.kill()
        h200, a10 = reader.cards()
        assert a10["process_bytes"] == {}
        assert a10["figures"]["used_bytes"] == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("lost", "NVML says: GPU is lost"),
        ("unknown", "NVML says: Unknown Error"),
        ("timeout", "NVML says: Timeout"),
        ("hang", "NVML does not answer"),
    ],
)
def test_a_faulty_card_loses_its_figures_alone_and_comes_back(lab, fault: str, reason: str) -> None:
    reader = Reader(lab.env, answer_s=0.5 if fault == "hang" else 2.0)
    before = reader.cards()
    lab.fault(0, fault)
    for _ in range(3):  # as it is at first, and as it is after NVML was opened anew
        bad, good = reader.cards()
        assert bad["device"] == before[0]["device"]
        assert (bad["state"], bad["lost"]) == ("lost", reason)
        assert bad["figures"] is None
        assert bad["process_bytes"] is None
        assert good == before[1]
    lab.fault(0, "none")
    assert _until_ok(reader) == before
    reader.close()


def _until_ok(reader: Reader) -> List[Dict[str, object]]:
    """The hung call may need a moment to return; the next reading after that is good."""
    for _ in range(500):
        cards = reader.cards()
        if all(card["state"] == "ok" for card in cards):
            return cards
        time.sleep(0.02)
    raise AssertionError(f"still lost: {cards}")


def test_a_card_lost_before_the_agent_starts_is_found_later(lab) -> None:
    lab.fault(0, "lost")
    reader = Reader(lab.env)
    assert [card["device"]["name"] for card in reader.cards()] == ["NVIDIA A10 (simulated)"]
    lab.fault(0, "none")
    names = [card["device"]["name"] for card in reader.cards()]
    assert names == ["NVIDIA H200 (simulated)", "NVIDIA A10 (simulated)"]
    reader.close()


def test_nvml_may_come_after_the_agent(lab, tmp_path: Path) -> None:
    library = Path(lab.env["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"
    driver = tmp_path / "driver"
    driver.mkdir()
    reader = Reader(dict(lab.env, LD_LIBRARY_PATH=str(driver)))
    missing = reader.ask()
    assert missing["error"] == "not-capable"
    assert "NVML Shared Library Not Found" in missing["message"]
    assert "install the NVIDIA driver" in missing["message"]
    os.symlink(library, driver / library.name)
    assert len(reader.cards()) == 2
    reader.close()


def test_one_hung_call_holds_up_only_its_own_caller() -> None:
    release = threading.Event()
    hung, well = Caller("hung"), Caller("well")
    first = hung.ask(release.wait)
    with pytest.raises(NoAnswer):
        hung.ask(lambda: 1).result(0)
    assert well.ask(lambda: 2).result(5) == 2
    release.set()
    assert first.result(5) is True
    assert hung.ask(lambda: 3).result(5) == 3


def test_what_a_call_raises_reaches_the_asker() -> None:
    def fail() -> Optional[int]:
        raise ValueError("no")

    caller = Caller("failing")
    with pytest.raises(ValueError, match="no"):
        caller.ask(fail).result(5)
    assert caller.ask(lambda: 4).result(5) == 4
