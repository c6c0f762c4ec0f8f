"""Where rank 0 can be reached by the others: an address of its machine, and a socket.

    all ranks on one machine    127.0.0.1, which no other machine can reach
    MLX_SPECULATION_HOST        the name or address that it says, on rank 0
    otherwise                   rank 0's address in what mlx.launch has set up for the
                                backend (MLX_HOSTFILE, NCCL_HOST_IP,
                                MLX_JACCL_COORDINATOR), else that of its host name

The socket listens at this address alone, and takes who knows the word that rank 0 has
sent through the group.
"""

import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HOST = "MLX_SPECULATION_HOST"
_LOOPBACK = "127.0.0.1"


def own_machine() -> dict[str, Any]:
    """Return what tells this process and its machine from others."""
    return {
        "host": socket.gethostname()[:200],
        "machine": uuid.getnode(),
        "pid": os.getpid(),
    }


def address_for(
    ranks: Sequence[Mapping[str, Any]], environment: Mapping[str, str] | None = None
) -> str:
    """Return the address at which rank 0 listens, on rank 0.

    Args:
        ranks: what `own_machine` returned on each rank.
        environment: this process's when omitted.
    """
    environment = os.environ if environment is None else environment
    if environment.get(HOST):
        return environment[HOST]
    if len({(each["host"], each["machine"]) for each in ranks}) == 1:
        return _LOOPBACK
    named = _of_backend(environment)
    return named or str(ranks[0]["host"])


def _of_backend(environment: Mapping[str, str]) -> str | None:
    """Return rank 0's address as the backend has it, without its port."""
    hosts = environment.get("MLX_HOSTFILE")
    if hosts and Path(hosts).is_file():
        listed: Any = json.loads(Path(hosts).read_text("utf-8"))
        return str(listed[0][0]).rpartition(":")[0]
    if environment.get("NCCL_HOST_IP"):
        return environment["NCCL_HOST_IP"]
    coordinator = environment.get("MLX_JACCL_COORDINATOR", "")
    return coordinator.rpartition(":")[0] or None


def watched(connection: socket.socket) -> socket.socket:
    """Let the system notice within ten seconds that the other machine is gone.

    What it cannot notice, such as a process that stands still, heartbeats show.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": 3, "TCP_KEEPALIVE": 3, "TCP_KEEPINTVL": 2}
    for name, value in {**seconds, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 9000}.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
