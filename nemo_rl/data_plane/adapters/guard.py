"""Access control of TransferQueue's sockets, whose messages are unpickled: only processes of the run may connect.

Every connection is authenticated and encrypted by ZMQ's CURVE (https://rfc.zeromq.org/spec/26/) with keys that only the
run's processes get, from Ray; other peers, of this host too, are dropped before a message is read. On one host the
sockets listen on the loopback address. Invariant: a process installs its guard before TransferQueue opens a socket in
it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Guard:
    """How a system's sockets are closed to others. `keys`: public and secret key of all its processes. `one_host`: they
    listen on the loopback address.
    """

    keys: tuple[bytes, bytes] = field(repr=False)
    one_host: bool

    @classmethod
    def of_cluster(cls) -> Guard:
        """The guard that this job's Ray cluster needs."""
        import ray

        one_host = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
        return cls(_keys(), one_host)

    def __str__(self) -> str:
        return "curve+loopback" if self.one_host else "curve"

    def stand(self, *namespaces: dict[str, object]) -> None:
        """Guards the sockets that TransferQueue opens in this process from now on. `namespaces`: globals of functions
        of TransferQueue that belong to no module here.
        """
        from transfer_queue.utils import zmq_utils

        original = getattr(zmq_utils.create_zmq_socket, "unguarded", zmq_utils.create_zmq_socket)
        replaced = {"create_zmq_socket": _guarded(original, self.keys)}
        if self.one_host:
            replaced["get_node_ip_address"] = lambda: LOOPBACK
        modules = [vars(module) for name, module in sys.modules.items() if name.startswith("transfer_queue")]
        for namespace in (*modules, *namespaces):
            namespace.update({name: guarded for name, guarded in replaced.items() if name in namespace})

    def actor(self, actor_class: Any) -> Any:
        """TransferQueue's actor class, behind the guard."""
        import ray

        plain = actor_class.__ray_metadata__.modified_class

        class Guarded(plain):
            def __init__(self, guard: Guard, *args: object, **kwargs: object) -> None:
                # Ray sends the class as a copy, whose methods have globals of their own.
                members = [member for kind in plain.__mro__ for member in vars(kind).values()]
                functions = [getattr(member, "__globals__", None) for member in members]
                guard.stand(*(namespace for namespace in functions if namespace is not None))
                super().__init__(*args, **kwargs)

            def start_metrics(self, port: int = 0) -> str:
                # They have no token of their own.
                node, self._node_ip = self._node_ip, LOOPBACK
                try:
                    return super().start_metrics(port)
                finally:
                    self._node_ip = node

        Guarded.__name__ = plain.__name__
        return ray.remote(Guarded)


@functools.cache
def _keys() -> tuple[bytes, bytes]:
    """Keys of this process, for every system that it starts: a process guards all its sockets alike."""
    import zmq

    return zmq.curve_keypair()


def _guarded(create: Callable[..., Any], keys: tuple[bytes, bytes]) -> Callable[..., object]:
    import zmq

    public, secret = keys

    def guarded(ctx: Any, socket_type: object, *args: object, **kwargs: object) -> Any:
        opened = create(ctx, socket_type, *args, **kwargs)
        opened.curve_secretkey = secret
        opened.curve_publickey = public
        if socket_type == zmq.ROUTER:
            opened.curve_server = True
        else:
            opened.curve_serverkey = public
        return opened

    guarded.unguarded = create  # pyrefly: ignore[missing-attribute]
    return guarded
