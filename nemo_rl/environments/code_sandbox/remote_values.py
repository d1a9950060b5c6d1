"""Objects of one process used in another: plain values cross as JSON, others stay and are called remotely.

Changes that a call makes to a list, set or dict argument are made in the caller's too. The tests are one end, the
untrusted response the other. Invariants: nothing is unpickled; in the tests a remote value that is not plain never
equals one of their own; of the tests' objects the response reaches only its arguments, and no name that leads to their
globals.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import importlib
import io
import json
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

from plain_values import (  # pyrefly: ignore[missing-import]
    BASES,
    MUTABLE,
    PLAIN_CLASSES,
    SCALARS,
    decode_immutable,
    encode_immutable,
    refuse,
)
from reach import COMPARED, FORWARDED, refuse_reach  # pyrefly: ignore[missing-import]

# Containers by identity: the container itself, and its place in the table.
Known = dict[int, tuple[object, int]]


class Remote:
    """An object of the other process; operations on it are carried out there."""

    __slots__ = ("__weakref__", "_remote")

    def __init__(self, peer: Peer, number: int, base: type | None) -> None:
        object.__setattr__(self, "_remote", (peer, number, base))

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __copy__(self) -> object:
        return _ask(self, "copy")

    def __deepcopy__(self, memo: object) -> object:
        return _ask(self, "deepcopy")

    def __dir__(self) -> Any:
        return _ask(self, "dir")

    @property
    def __class__(self) -> object:
        # `isinstance(result, list)` holds for a list of a derived type.
        return object.__getattribute__(self, "_remote")[2] or type(self)


def _doc(self: object) -> object:
    return _ask(self, "getattr", "__doc__")


def _ask(remote: object, operation: str, *args: object, **kwargs: object) -> Any:
    peer, number, _ = object.__getattribute__(remote, "_remote")
    return peer.ask(number, operation, args, kwargs)


def _is_remote(value: object) -> bool:
    return issubclass(type(value), Remote)


def _forward(name: str) -> Callable[..., object]:
    def forwarded(self: object, *args: object, **kwargs: object) -> object:
        peer, _, base = object.__getattribute__(self, "_remote")
        if peer.is_judge and name in COMPARED and not _is_remote(args[0]):
            if base is not None:
                return getattr(operator, name)(_ask(self, "plain"), args[0])
            return name == "__ne__" if name in ("__eq__", "__ne__") else NotImplemented
        return _ask(self, name, *args, **kwargs)

    forwarded.__name__ = name
    return forwarded


_METHODS = {name: _forward(name) for name in FORWARDED}


class Peer:
    """One end of the channel of tests and response. `is_judge`: whether the other end is the (untrusted) response."""

    def __init__(self, channel: socket.socket, is_judge: bool) -> None:
        self.is_judge = is_judge
        self._file = channel.makefile("rwb")
        self._mine = {}
        self._numbers = {}
        self._theirs = {}
        self._classes = {}
        self.failures = []

    def ask(
        self, number: int, operation: str, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Has the other side carry out an operation, and serves what it asks meanwhile."""
        table: list[object] = []
        known: Known = {}
        position = 0
        message: dict[str, Any] = {"number": number, "op": operation}
        message["args"] = [self.encode(arg, table, known) for arg in args]
        message["kwargs"] = {key: self.encode(value, table, known) for key, value in (kwargs or {}).items()}
        message["table"] = table
        if self.is_judge:
            message["capture"] = sys.stdout is not sys.__stdout__
            if sys.stdin is not sys.__stdin__:
                position = sys.stdin.tell()
                message["stdin"] = sys.stdin.read()
            if builtins.input is not _INPUT:
                message["input"] = self.encode(builtins.input, table, known)
        self._send(message)
        while True:
            reply = self._receive()
            if reply is None:
                raise EOFError("the process of the response has ended")
            if "op" not in reply:
                break
            self._serve(reply)
        if self.is_judge and "stdin" in message:
            sys.stdin.seek(position + len(message["stdin"][: int(reply.get("read", 0))]))
        if reply.get("printed"):
            sys.stdout.write(str(reply["printed"]))
        originals = [value for value, _ in sorted(known.values(), key=lambda entry: entry[1])]
        objects = self._fill(reply["table"], originals)
        value = self.decode(reply["value"], objects)
        if reply["raised"]:
            raise value if isinstance(value, BaseException) else RuntimeError("no exception came with an error")
        return value

    def send_first(self, message: Mapping[str, object]) -> None:
        """Sends the first message, which is not an operation."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._send(message)

    def receive_first(self) -> object:
        """Receives the first message, which is not an operation."""
        return self._receive()

    def export(self, value: object) -> None:
        """Opens an object to the other side; the first has the number 0."""
        self._exported(value, [], {})

    def serve(self) -> None:
        """Answers until the other side closes the channel."""
        while (message := self._receive()) is not None:
            self._serve(message)

    def _serve(self, message: Mapping[str, Any]) -> None:
        objects = self._fill(message["table"], [])
        printed, given, old = io.StringIO(), None, (sys.stdout, sys.stdin, builtins.input)
        try:
            args = [self.decode(arg, objects) for arg in message["args"]]
            kwargs = {key: self.decode(value, objects) for key, value in message["kwargs"].items()}
            if not self.is_judge:
                if message.get("capture"):
                    sys.stdout = printed
                if "stdin" in message:
                    given = sys.stdin = io.StringIO(message["stdin"])
                if "input" in message:
                    builtins.input = self.decode(message["input"], objects)
            value, raised = self._carried_out(message["number"], message["op"], args, kwargs), False
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            value, raised = error, True
        finally:
            if not self.is_judge:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                sys.stdout, sys.stdin, builtins.input = old
        known = {id(kept): (kept, index) for index, kept in enumerate(objects)}
        table: list[object] = [None] * len(objects)
        for index, kept in enumerate(objects):
            table[index] = self._contents(kept, table, known)
        encoded = self.encode(value, table, known)
        self._send(
            {
                "value": encoded,
                "raised": raised,
                "table": table,
                "printed": printed.getvalue(),
                "read": given.tell() if given is not None else 0,
            }
        )

    def _carried_out(self, number: int, operation: str, args: Sequence[Any], kwargs: Mapping[str, object]) -> object:
        target = self._mine[number]
        if self.is_judge:
            refuse_reach(target, operation, args)
        match operation:
            case "getattr":
                return getattr(target, *args)
            case "setattr":
                return setattr(target, *args)
            case "delattr":
                return delattr(target, *args)
            case "dir":
                return dir(target)
            case "copy":
                return copy.copy(target)
            case "deepcopy":
                return copy.deepcopy(target)
            case "plain":
                return next(read(target) for base, read in BASES.items() if issubclass(type(target), base))
            case "await":
                return importlib.import_module("asyncio").run(target)
            case "names":
                return {
                    name: value
                    for name, value in list(vars(target).items())
                    if not name.startswith("__") and not isinstance(value, types.ModuleType)
                }
            case "__call__":
                return target(*args, **kwargs)
            case "__bool__":
                return bool(target)
            case "__instancecheck__":
                return isinstance(args[0], target)
            case "__subclasscheck__":
                return issubclass(args[0], target)
            case "__iter__":
                return iter(target)
            case _ if operation in FORWARDED:
                return getattr(type(target), operation)(target, *args, **kwargs)
        raise TypeError(f"no operation {operation!r}")

    def _send(self, message: Mapping[str, object]) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def _receive(self) -> Any:
        line = self._file.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def encode(self, value: Any, table: list[object], known: Known) -> object:
        """A value as JSON; mutable containers go into the table, so that what a call changes in them comes back."""
        kind = type(value)
        if value is None or kind in SCALARS:
            return value
        if kind.__name__ in MUTABLE and kind is MUTABLE[kind.__name__]:
            if id(value) not in known:
                known[id(value)] = (value, len(table))
                table.append(None)
                table[known[id(value)][1]] = self._contents(value, table, known)
            return ["mutable", known[id(value)][1]]
        if (sent := encode_immutable(value, partial(self.encode, table=table, known=known))) is not None:
            return sent
        if issubclass(kind, Remote):
            return ["yours", object.__getattribute__(value, "_remote")[1]]
        if issubclass(kind, _Mirrored) and (number := value.__dict__.get("_number")) is not None:
            return ["yours", number]
        if kind is type and issubclass(value, _Mirrored) and "_class_number" in value.__dict__:
            return ["yours", value.__dict__["_class_number"]]
        known_there = self.is_judge or (kind is type and (value in PLAIN_CLASSES or issubclass(value, BaseException)))
        if kind is type and known_there and getattr(builtins, value.__name__, None) is value:
            return ["builtin", value.__name__]
        if self.is_judge and isinstance(value, types.ModuleType):
            return ["import", [value.__name__, ""]]
        if self.is_judge and (isinstance(value, (types.BuiltinFunctionType, type))):
            module = getattr(value, "__module__", None)
            if module in sys.stdlib_module_names and getattr(sys.modules.get(module), value.__name__, None) is value:
                return ["import", [module, value.__name__]]
        return ["mine", self._exported(value, table, known)]

    def _contents(self, value: Any, table: list[object], known: Known) -> list[object]:
        kind = type(value)
        if kind is bytearray:
            return ["bytearray", value.hex()]
        if issubclass(kind, dict):
            pairs = [[self.encode(key, table, known), self.encode(item, table, known)] for key, item in value.items()]
            return [kind.__name__, pairs]
        return [kind.__name__, [self.encode(item, table, known) for item in value]]

    def _exported(self, value: Any, table: list[object], known: Known) -> dict[str, object]:
        number = self._numbers.setdefault(id(value), len(self._mine))
        self._mine[number] = value
        about = {"number": number, "methods": [name for name in FORWARDED if self._has(value, name)]}
        about["base"] = next((base.__name__ for base in BASES if issubclass(type(value), base)), None)
        about["awaitable"] = type(value) is types.CoroutineType
        failure = value if isinstance(value, type) else type(value)
        if issubclass(failure, BaseException):
            names = [kind.__name__ for kind in failure.__mro__ if getattr(builtins, kind.__name__, None) is kind]
            about["builtin"] = names[0]
            if isinstance(value, type):
                about["failure_class"] = [value.__name__, [self.encode(kind, table, known) for kind in value.__bases__]]
            else:
                about["failure"] = [
                    self.encode(failure, table, known),
                    self._args_of(value, table, known),
                    _text(value),
                ]
        return about

    def _args_of(self, failure: BaseException, table: list[object], known: Known) -> list[object]:
        args = failure.args if type(failure.args) is tuple else ()
        return [self.encode(arg, table, known) for arg in args]

    @staticmethod
    def _has(value: object, name: str) -> bool:
        if name in ("__instancecheck__", "__subclasscheck__"):
            return isinstance(value, type)
        if name == "__bool__":
            return True
        if name == "__iter__" and not isinstance(value, type):
            return hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
        return getattr(type(value), name, None) is not None

    def _fill(self, table: Sequence[Any], originals: Sequence[Any]) -> list[Any]:
        kept = list(originals)
        for kind, _ in table[len(kept) :]:
            kept.append(MUTABLE[kind]())
        for value, (kind, contents) in zip(kept, table, strict=True):
            if kind == "bytearray":
                value[:] = bytes.fromhex(contents)
                continue
            value.clear()
            items = contents
            if issubclass(MUTABLE[kind], dict):
                for key, item in items:
                    dict.__setitem__(value, self.decode(key, kept), self.decode(item, kept))
            else:
                add = value.add if kind == "set" else value.append
                for item in items:
                    add(self.decode(item, kept))
        return kept

    def decode(self, sent: object, objects: Sequence[object]) -> Any:
        """A value from JSON: a plain one, one of this side's, or a proxy."""
        if not isinstance(sent, list):
            return sent if sent is None or type(sent) in SCALARS else refuse(sent)
        kind, content = sent
        match kind:
            case "mutable":
                return objects[content]
            case "yours":
                return self._mine[content]
            case "builtin":
                found = getattr(builtins, content)
                if self.is_judge and found not in PLAIN_CLASSES and not issubclass(found, BaseException):
                    refuse(sent)
                return found
            case "import" if not self.is_judge:
                module = importlib.import_module(content[0])
                return getattr(module, content[1]) if content[1] else module
            case "mine":
                return self._proxy(content, objects)
        return decode_immutable(kind, content, partial(self.decode, objects=objects))

    def _proxy(self, about: Mapping[str, Any], objects: Sequence[object]) -> object:
        number = about["number"]
        if number in self._theirs:
            return self._theirs[number]
        if about.get("failure_class"):
            name, bases = about["failure_class"]
            parents: list[type] = [parent for base in bases if isinstance(parent := self.decode(base, objects), type)]
            parents = [parent for parent in parents if issubclass(parent, BaseException)]
            parents = parents or [_builtin_failure(about["builtin"])]
            if not any(issubclass(parent, _Mirrored) for parent in parents):
                parents.insert(0, _Mirrored)
            made = type(str(name), tuple(parents), {"_peer": self, "_class_number": number})
        elif about.get("failure"):
            failure, args, text = about["failure"]
            kind = self.decode(failure, objects)
            made = kind.__new__(kind, *[self.decode(arg, objects) for arg in args])
            made.args = tuple(self.decode(arg, objects) for arg in args)
            if isinstance(made, _Mirrored):
                made._number, made._text = number, str(text)
            self.failures.append(made)
            return made
        elif about["awaitable"]:
            made = self._awaited(number)
        else:
            methods = frozenset(about["methods"]) & FORWARDED
            if methods not in self._classes:
                hidden = {} if "__hash__" in methods else {"__hash__": None}
                members = {"__slots__": (), "__doc__": property(_doc)}
                members |= {name: _METHODS[name] for name in methods} | hidden
                self._classes[methods] = type("Remote", (Remote,), members)
            base = next((base for base in BASES if base.__name__ == about["base"]), None)
            made = self._classes[methods](self, number, base)
        self._theirs[number] = made
        return made

    async def _awaited(self, number: int) -> object:
        return self.ask(number, "await")


class _Mirrored:
    """The local class for an exception class of the response."""

    _peer: Peer
    _number: int
    _text: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_number" not in self.__dict__:
            raise AttributeError(name)
        return type(self)._peer.ask(self.__dict__["_number"], "getattr", (name,))

    def __str__(self) -> str:
        return self.__dict__.get("_text") or super().__str__()


_INPUT = builtins.input


def _builtin_failure(name: str) -> type[BaseException]:
    found = getattr(builtins, str(name), Exception)
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception


def _text(failure: BaseException) -> str:
    try:
        return str.__str__(str(failure))
    except BaseException:  # noqa: BLE001 - a class of the response
        return ""
