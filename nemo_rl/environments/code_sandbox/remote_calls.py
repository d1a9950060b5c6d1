"""The border between tests and response, each in a process of its own: calls go out, plain values come back.

The tests (`Response`) are one end, the untrusted response (`serve`) the other. Invariant: what tests compare is of
their own process. A function gives plain values (`plain_values.py`); an instance that tests made of a class of the
response has attributes, methods, `len`, `str`, `repr` and iteration, each of which gives plain values, and no other
operator. What is not plain fails the tests with its reason, whatever they catch.
"""

from __future__ import annotations

import asyncio
import builtins
import collections.abc
import contextlib
import io
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import socket

from plain_values import Encoder, NotPlain, decoded, filled  # pyrefly: ignore[missing-import]

_LINE_LIMIT_BYTES = 256 * 1024**2
_CONVERSIONS: dict[str, Callable[[Any], object]] = {"__len__": len, "__str__": str, "__repr__": repr, "__iter__": iter}
_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_INPUT = builtins.input


class Channel:
    """Messages as lines of JSON."""

    def __init__(self, channel: socket.socket) -> None:
        self._file = channel.makefile("rwb")

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message."""
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> Any:
        """The next message; None once the other end is closed."""
        line = self._file.readline(_LINE_LIMIT_BYTES)
        return json.loads(line) if line.endswith(b"\n") else None


class Response:
    """The response, in the process of its tests.

    `refusals`: why values did not cross; any fails the tests. `failures`: exceptions that the response raised.
    `left_out`: names of it that tests cannot use, and what they are.
    """

    def __init__(self, channel: Channel) -> None:
        self.refusals: list[str] = []
        self.failures: list[BaseException] = []
        self.left_out: dict[str, str] = {}
        self._channel = channel
        self._made: dict[int, object] = {}
        self._numbers: dict[int, int] = {}

    def names(self, wanted: Iterable[str]) -> dict[str, object]:
        """The wanted names that the response has and tests can use."""
        reply = self._exchange({"op": "names", "number": 0, "args": sorted(wanted), "kwargs": {}, "table": []})
        found: dict[str, object] = {}
        try:
            containers = filled(reply["table"], [])
            for name, (kind, content) in reply["value"].items():
                if kind == "left out":
                    self.left_out[name] = str(content)
                elif kind == "plain":
                    found[name] = decoded(content, containers)
                else:
                    # PEP 8: a class is named in CapWords. By another name it is a function to the tests.
                    found[name] = self._made_of(kind if name[:1].isupper() else "function", content)
        except _UNREADABLE as error:
            self.refuse(f"the names of the response cannot be read: {error}")
        return found

    def ask(
        self,
        op: str,
        number: int,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        kinds: Sequence[str] = ("plain",),
        what: str = "",
    ) -> Any:
        """Calls an operation of the response; returns its result, or raises its exception.

        Args:
            number: the response's number of the object.
            kinds: allowed kinds of its result.
            what: the operation in messages.
        """
        encoder = Encoder(self._number_of)
        try:
            encoded = [encoder.encode(arg) for arg in args]
            named = {key: encoder.encode(value) for key, value in (kwargs or {}).items()}
        except (NotPlain, RecursionError) as error:
            self.refuse(f"argument of {what}: {error}; arguments are plain values or objects of the response")
        message = {"op": op, "number": number, "args": encoded, "kwargs": named, "table": encoder.table}
        reply = self._exchange(message)
        try:
            containers = filled(reply["table"], encoder.originals)
            kind, content = reply["kind"], reply["value"]
            if kind == "plain":
                return decoded(content, containers)
            if kind in kinds:
                return self._made_of(kind, content)
            failure = self._failure(content, containers) if kind == "raised" else None
        except _UNREADABLE as error:
            self.refuse(f"{what} gave what cannot be read: {error}")
        if failure is None:
            self.refuse(f"{what} gave what tests cannot compare: {content!s:.200}")
        self.failures.append(failure)
        raise failure

    def refuse(self, reason: str) -> NoReturn:
        """Fails the tests. Raises TypeError."""
        self.refusals.append(reason)
        raise TypeError(reason)

    def _number_of(self, value: object) -> int | None:
        return self._numbers.get(id(value))

    def keep(self, made: object, number: int) -> None:
        """Notes which object of the response stands behind one of the tests', and keeps that one, so that its id stays
        its own.
        """
        self._numbers[id(made)] = number
        self._made.setdefault(number, made)

    def kept(self, number: int) -> object:
        """The tests' object of a number; None if there is none."""
        return self._made.get(number)

    def numbered(self, made: object) -> int:
        """The response's number of an object of the tests."""
        return self._numbers[id(made)]

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, position = sys.stdin, 0
        message |= {"capture": sys.stdout is not sys.__stdout__, "input": builtins.input is not _INPUT}
        if stdin is not sys.__stdin__:
            position = stdin.tell()
            message["stdin"] = stdin.read()
        self._channel.send(message)
        while isinstance(reply := self._channel.receive(), dict) and "prompt" in reply:
            self._channel.send({"line": str(builtins.input(str(reply["prompt"])))})
        if not isinstance(reply, dict):
            raise EOFError("the process of the response has ended")
        if "stdin" in message:
            stdin.seek(position + len(message["stdin"][: int(reply.get("read", 0))]))
        if reply.get("printed"):
            sys.stdout.write(str(reply["printed"]))
        return reply

    def _made_of(self, kind: str, content: Any) -> Any:
        number, name = int(content["number"]), str(content["name"])
        if kind == "instance":
            return _Number(number)
        if number not in self._made:
            match kind:
                case "function":
                    made = self._function(number, name, content["doc"])
                case "class":
                    members = {
                        method: _converted(method) for method in content["conversions"] if method in _CONVERSIONS
                    }
                    members |= {"__slots__": ("__weakref__",), "__doc__": content["doc"], "__module__": "__main__"}
                    made = _InstanceType(name, (_Instance,), members)
                    type.__setattr__(made, "_response", self)
                case "failure":
                    made = type(name, (_builtin_failure(content["builtin"]),), {"__module__": "__main__"})
                case "iterator":
                    return _Items(self, number, name)
                case "coroutine":
                    return self._awaited(number, name)
                case _:
                    raise TypeError(f"there is no kind {kind!s:.80}")
            self.keep(made, number)
        return self._made[number]

    def _function(self, number: int, name: str, doc: object) -> Callable[..., object]:
        def called(*args: object, **kwargs: object) -> object:
            return self.ask("call", number, args, kwargs, ("plain", "iterator", "coroutine"), name)

        called.__name__ = called.__qualname__ = name
        called.__doc__ = doc if isinstance(doc, str) else None
        return called

    async def _awaited(self, number: int, name: str) -> object:
        return self.ask("await", number, what=name)

    def _failure(self, content: Mapping[str, Any], containers: Sequence[object]) -> BaseException:
        known = self._made.get(content["number"])
        kind = known if isinstance(known, type) and issubclass(known, BaseException) else None
        kind = kind or _builtin_failure(content["builtin"])
        args = [decoded(arg, containers) for arg in content["args"]]
        try:
            failure = kind(*args)
        except Exception:  # noqa: BLE001 - what the response passed is not for this class
            failure = Exception(*args)
        for name, value in content["attributes"].items():
            if not name.startswith("_"):
                setattr(failure, name, decoded(value, containers))
        return failure


class _Number(int):
    """The response's number of an instance that it made."""


class _InstanceType(type):
    """A class of the response; its own attributes are asked for."""

    _response: Response

    def __getattr__(cls, name: str) -> Any:
        # Libraries look for such names on any object to find out what it can do.
        if name.startswith("__") or name == "_response":
            raise AttributeError(name)
        return _attribute(cls._response, cls, cls.__name__, name)


class _Instance(metaclass=_InstanceType):
    """An object of the response that tests made."""

    __slots__ = ()
    _response: Response

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        response = cls._response
        given = response.ask("call", response.numbered(cls), args, kwargs, ("instance",), cls.__name__)
        if type(given) is not _Number:
            return given
        made = response.kept(given)
        if not isinstance(made, cls):
            made = object.__new__(cls)
            response.keep(made, given)
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __init_subclass__(cls, **kwargs: object) -> None:
        response = getattr(cls.__base__, "_response", None)
        if isinstance(response, Response):
            response.refuse(f"tests derive {cls.__name__} from a class of the response, which is in another process")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _attribute(type(self)._response, self, type(self).__name__, name)

    def __setattr__(self, name: str, value: object) -> None:
        response, what = type(self)._response, f"{type(self).__name__}.{name}"
        response.ask("setattr", response.numbered(self), (name, value), what=what)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        type(self)._response.refuse(f"tests compare a {type(self).__name__}, an object of the response")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__


def _attribute(response: Response, target: object, owner: str, name: str) -> Any:
    return response.ask("getattr", response.numbered(target), (name,), kinds=("function",), what=f"{owner}.{name}")


def _converted(method: str) -> Callable[[_Instance], Any]:
    def converted(self: _Instance) -> Any:
        response, what = type(self)._response, f"{method} of a {type(self).__name__}"
        return response.ask("convert", response.numbered(self), (method,), kinds=("iterator",), what=what)

    return converted


class _Items:
    """Items of an iterator of the response, one by one."""

    def __init__(self, response: Response, number: int, name: str) -> None:
        self._asked = (response, number, name)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> object:
        response, number, name = self._asked
        return response.ask("next", number, what=name)

    def __contains__(self, item: object) -> bool:
        # One that gives every value would hold any.
        self._asked[0].refuse("tests look for a value in an iterator of the response; only its items can be compared")


def _builtin_failure(name: object) -> type[BaseException]:
    found = getattr(builtins, str(name), Exception)
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception


class _Refused(Exception):
    """The result of an operation cannot cross."""


def serve(channel: Channel, module: types.ModuleType) -> None:
    """Answers for the response's names until the tests are done."""
    server = _Server(channel, module)
    while (message := channel.receive()) is not None:
        channel.send(server.answer(message))


class _Server:
    """The response's side. Nothing here guards anything: the response can do in its process what it likes."""

    def __init__(self, channel: Channel, module: types.ModuleType) -> None:
        self._channel = channel
        self._module = module
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, message: Mapping[str, Any]) -> dict[str, object]:
        """Carries out one operation."""
        containers = filled(message["table"], [])
        printed, given, old = io.StringIO(), None, (sys.stdout, sys.stdin, builtins.input)
        try:
            args = [decoded(arg, containers, self._objects.__getitem__) for arg in message["args"]]
            kwargs = {
                name: decoded(value, containers, self._objects.__getitem__) for name, value in message["kwargs"].items()
            }
            if message["capture"]:
                sys.stdout = printed
            if "stdin" in message:
                given = sys.stdin = io.StringIO(message["stdin"])
            if message["input"]:
                builtins.input = self._asked_line
            value, raised = self._carried_out(message["op"], message["number"], args, kwargs), False
        except BaseException as error:  # noqa: BLE001 - it is for the tests
            value, raised = error, True
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            sys.stdout, sys.stdin, builtins.input = old
        try:
            reply = self._reply(message, value, raised, containers)
        except (_Refused, NotPlain, RecursionError) as error:
            reply = {"kind": "refused", "value": str(error), "table": message["table"]}
        return reply | {"printed": printed.getvalue(), "read": given.tell() if given is not None else 0}

    def _asked_line(self, prompt: object = "") -> str:
        self._channel.send({"prompt": str(prompt)})
        return self._channel.receive()["line"]

    def _carried_out(self, op: str, number: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        if op == "names":
            return args
        target = self._objects[number]
        match op:
            case "call":
                return target(*args, **kwargs)
            case "getattr":
                return getattr(target, *args)
            case "setattr":
                return setattr(target, *args)
            case "convert":
                return _CONVERSIONS[args[0]](target)
            case "next":
                return next(target)
            case "await":
                return asyncio.run(target)
        raise _Refused(f"there is no operation {op!r}")

    def _reply(
        self, message: Mapping[str, Any], value: Any, raised: bool, containers: Sequence[object]
    ) -> dict[str, object]:
        encoder = Encoder(originals=containers)
        if message["op"] == "names" and not raised:
            return {"kind": "names", "value": dict(self._names(value, encoder)), "table": encoder.table}
        if raised:
            return {"kind": "raised", "value": self._failure(value, encoder), "table": encoder.table}
        target = self._objects[message["number"]] if message["op"] == "call" else None
        if isinstance(target, type) and target.__module__ == "__main__" and isinstance(value, target):
            kind = "instance"
        elif _is_plain(value):
            return {"kind": "plain", "value": encoder.encode(value), "table": encoder.table}
        elif isinstance(value, types.CoroutineType):
            kind = "coroutine"
        elif isinstance(value, collections.abc.Iterator):
            kind = "iterator"
        elif callable(value) and message["op"] == "getattr":
            kind = "function"
        else:
            # Says what is in the way, which may be deep inside.
            return {"kind": "plain", "value": Encoder().encode(value), "table": encoder.table}
        return {"kind": kind, "value": self._about(value), "table": encoder.table}

    def _names(self, wanted: Sequence[str], encoder: Encoder) -> Iterator[tuple[str, list[object]]]:
        for name, value in list(vars(self._module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType):
                continue
            if isinstance(value, type):
                yield name, ["failure" if issubclass(value, BaseException) else "class", self._about(value)]
            elif name in wanted and _is_plain(value):
                yield name, ["plain", encoder.encode(value)]
            elif callable(value):
                yield name, ["function", self._about(value)]
            elif name in wanted:
                yield name, ["left out", type(value).__name__]

    def _about(self, value: Any) -> dict[str, object]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        doc = getattr(value, "__doc__", None)
        about: dict[str, object] = {
            "number": number,
            "name": str(getattr(value, "__name__", type(value).__name__)),
            "doc": doc if type(doc) is str else None,
        }
        if isinstance(value, type):
            about["conversions"] = [
                method
                for method in _CONVERSIONS
                if getattr(value, method, None) not in (None, getattr(object, method, None))
            ]
            about["builtin"] = _builtin_name(value)
        return about

    def _failure(self, failure: BaseException, encoder: Encoder) -> dict[str, object]:
        kind = type(failure)
        args = failure.args if type(failure.args) is tuple else ()
        return {
            "number": self._numbers.get(id(kind)),
            "builtin": _builtin_name(kind),
            "args": [encoder.encode(arg) if _is_plain(arg) else str(arg) for arg in args],
            "attributes": {
                name: encoder.encode(value)
                for name, value in getattr(failure, "__dict__", {}).items()
                if name != "__notes__" and _is_plain(value)
            },
        }


def _builtin_name(kind: type) -> str:
    return next((base.__name__ for base in kind.__mro__ if getattr(builtins, base.__name__, None) is base), "object")


def _is_plain(value: object) -> bool:
    try:
        Encoder().encode(value)
    except (NotPlain, RecursionError):
        return False
    return True
