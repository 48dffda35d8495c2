"""Two network namespaces with one link of limited rate as two machines; needs root and iproute2."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

NAMESPACES = ("powersgd-left", "powersgd-right")
INTERFACES = ("powersgd0", "powersgd1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str | None:
    """Return what is missing here for a link, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs {', '.join(missing)} of iproute2" if missing else None


@contextmanager
def two_machines() -> Iterator[None]:
    """Make the namespaces and the link between them, until the end."""
    try:
        for name in NAMESPACES:
            _run("ip", "netns", "add", name)
        first, second = INTERFACES
        _run("ip", "link", "add", first, "netns", NAMESPACES[0], "type", "veth", "peer", second, "netns", NAMESPACES[1])
        for name, interface, address in zip(NAMESPACES, INTERFACES, ADDRESSES, strict=True):
            inside = ("ip", "-n", name)
            _run(*inside, "address", "add", f"{address}/24", "dev", interface)
            _run(*inside, "link", "set", interface, "up")
            _run(*inside, "link", "set", "lo", "up")
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True)


def start(machine: int, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a Python process inside one of the machines."""
    command = ["ip", "netns", "exec", NAMESPACES[machine], sys.executable, *arguments]
    variables = {**os.environ, **environment, "GLOO_SOCKET_IFNAME": INTERFACES[machine]}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def limit(machine: int, megabits: int | None) -> None:
    """Limit what leaves this machine; to be called inside of it."""
    interface = INTERFACES[machine]
    subprocess.run(("tc", "qdisc", "delete", "dev", interface, "root"), check=False, capture_output=True)
    if megabits is not None:
        settings = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "500ms")
        _run("tc", "qdisc", "add", "dev", interface, "root", "tbf", *settings)


def bytes_that_left(machine: int) -> int:
    """Return the bytes that the kernel has counted; to be called inside the machine."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACES[machine]:
                return int(counters.split()[8])
    raise LookupError(f"no interface {INTERFACES[machine]} here")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
