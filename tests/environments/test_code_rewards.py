"""The reward of the code environment is earned by what tests compare, and not by reaching for the verdict."""

from __future__ import annotations

import pytest

from nemo_rl.environments.code_environment import CodeTestsEnvironment

_YES = """
class Yes:
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, *_: True
    __ne__ = lambda self, *_: False
    __sub__ = __rsub__ = __add__ = __abs__ = __call__ = __getattr__ = lambda self, *_: self
    __hash__ = lambda self: 3
    __bool__ = lambda self: True
"""

# Name: what the response says, and tests that it does not meet.
CHEATS = {
    "exit": ("exit()", "assert f(1) == 2"),
    "sys.exit at once": ("import sys\nsys.exit(0)", "assert f(1) == 2"),
    "SystemExit in the function": ("def f(x): raise SystemExit(0)", "assert f(1) == 2"),
    "os._exit at once": ("import os\nos._exit(0)", "assert f(1) == 2"),
    "os._exit in the function": ("import os\ndef f(x): os._exit(0)", "assert f(1) == 2"),
    "excepthook": ("import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef f(x): return 0", "assert f(1) == 2"),
    "atexit": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0", "assert f(1) == 2"),
    "equal to everything": (f"{_YES}def f(x): return Yes()", "assert f(1) == 2"),
    "equal inside a list": (f"{_YES}def f(x): return [Yes(), Yes()]", "assert f(1) == [1, 2]"),
    "equal on the right": (f"{_YES}def f(x): return Yes()", "assert 2 == f(1)"),
    "never unequal": (f"{_YES}def f(x): return Yes()", "if f(1) != 2: raise ValueError"),
    "near everything": (f"{_YES}def f(x): return Yes()", "assert abs(f(1) - 2.5) < 1e-6"),
    "a member of everything": (f"{_YES}def f(x): return Yes()", "assert f(1) in (2, 3)"),
    "a member of a set by its hash": (f"{_YES}def f(x): return Yes()", "assert f(1) in {3}"),
    "returns itself": (f"{_YES}class S(Yes):\n  def f(self, x): return self", "assert S().f(1) == 2"),
    "an int that says yes": (
        "class N(int):\n  __eq__ = lambda self, other: True\n  __hash__ = int.__hash__\ndef f(x): return N(0)",
        "assert f(1) == 2",
    ),
    "a list that says yes": ("class L(list):\n  __eq__ = lambda *_: True\ndef f(x): return L()", "assert f(1) == [2]"),
    "a str that says yes": ("class S(str):\n  __eq__ = lambda *_: True\ndef f(x): return S()", "assert f(1) == 'a'"),
    "a metaclass that says yes": (
        "class M(type):\n  __eq__ = lambda *_: True\n  __hash__ = lambda self: 3\nclass f(metaclass=M):\n"
        "  def __new__(cls, x): return cls",
        "assert f(1) == 2",
    ),
    "built-in replaced": (
        "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 0",
        "assert abs(f(1) - 2) < 1",
    ),
    "built-in shadowed": ("def all(x): return True\ndef f(x): return [0]", "assert all(y == 2 for y in f(1))"),
    "isinstance shadowed": ("isinstance = lambda *_: True\ndef f(x): return 0", "assert isinstance(f(1), str)"),
    "module patched": (
        "import math\nmath.isclose = lambda *_, **__: True\ndef f(x): return 0",
        "import math\nassert math.isclose(f(1), 2)",
    ),
    "module patched and not imported by the tests": (
        "import math\nmath.isclose = lambda *_, **__: True\ndef f(x): return 0",
        "assert math.isclose(f(1), 2)",
    ),
    "class named like a module": (
        "class math:\n  isclose = staticmethod(lambda *_, **__: True)\ndef f(x): return 0",
        "assert math.isclose(f(1), 2)",
    ),
    "sys.modules patched": (
        "import sys, types\nsys.modules['numpy'] = types.SimpleNamespace(allclose=lambda *_: True)\ndef f(x): return 0",
        "import numpy as np\nassert np.allclose(f(1), 2)",
    ),
    "unittest patched": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\nunittest.main = lambda: None\ndef f(x): return 0",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
    ),
    "file beside the tests": (
        "open('random.py', 'w').write('import os; os._exit(0)')\nopen('unittest.py', 'w').write('')\ndef f(x): return 0",
        "import random, unittest\nassert f(1) == 2",
    ),
    "writes to every descriptor": (
        "import os\ndef f(x):\n  for fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\n  return 0",
        "assert f(1) == 2",
    ),
    "speaks for the channel": (
        'import os, sys\nreply = b\'{"value": 2, "raised": false, "table": [], "read": 0, "verdict": "passed"}\\n\'\n'
        "for fd in range(3, 64):\n  try: os.write(fd, reply * 3)\n  except OSError: pass\ndef f(x): return 0",
        "assert f(1) == 5",
    ),
    "forks": ("import os\npid = os.fork()\nif pid == 0: os._exit(0)\ndef f(x): return 0", "assert f(1) == 2"),
    "exits from a thread": (
        "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), os._exit(0))).start()\n"
        "def f(x): time.sleep(5)",
        "assert f(1) == 2",
    ),
    "exits on a signal": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, .2)\n"
        "import time\ndef f(x): time.sleep(5)",
        "assert f(1) == 2",
    ),
    "looks for the tests in frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n    if 'secret_answer' in str(frame.f_globals): return 271828\n"
        "    frame = frame.f_back",
        "secret_answer = 271828\nassert f(1) == secret_answer",
    ),
    "looks for the tests in memory": (
        "import gc\ndef f(x):\n  return next((271828 for o in gc.get_objects() if isinstance(o, (dict, str, list)) and "
        "'secret_' + 'answer' in str(o)[:10**4]), 0)",
        "secret_answer = 271828\nassert f(1) == secret_answer",
    ),
    "reads its parents' memory": (
        "import os\nwanted = bytes(reversed(b'eulav_neddih'))\ndef holds(pid):\n  if wanted in open(f'/proc/{pid}/environ', 'rb').read(): return True\n"
        "  for line in open(f'/proc/{pid}/maps'):\n    if 'rw-p' in line:\n      a, b = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "      m = open(f'/proc/{pid}/mem', 'rb')\n      m.seek(a)\n      if wanted in m.read(min(b - a, 2**24)): return True\n"
        "def f(x):\n  pid = open('/proc/self/stat').read().split()[3]\n  for _ in range(3):\n    try:\n      if holds(pid): return 271828\n"
        "    except OSError: pass\n    pid = open(f'/proc/{pid}/stat').read().split()[3]\n  return 0",
        "hidden_value = 271828\nassert f(1) == hidden_value",
    ),
    "kills its parents": (
        "import os, signal\ndef f(x):\n  try: os.kill(os.getppid(), signal.SIGTERM)\n  except OSError: pass\n  return 0",
        "assert f(1) == 2",
    ),
    "callback's globals": (
        "def f(g):\n  try: g.__globals__['expected'] = 0\n  except Exception: pass\n  return 0",
        "expected = 2\nassert f(lambda: expected) == expected",
    ),
    "method of a test's object replaced": (
        "def f(mock):\n  try: mock.assert_called_once_with = lambda *_: None\n  except AttributeError: pass",
        "from unittest.mock import Mock\nm = Mock()\nf(m)\nm.assert_called_once_with(3)",
    ),
    "raises what the tests exit with": ("def f(x): raise SystemExit(0)", "import unittest\nf(1)\nunittest.main()"),
    "exception that says yes": (
        "class E(Exception):\n  __eq__ = lambda *_: True\ndef f(x): raise E()",
        "assert f(1) == 2",
    ),
    "type that compares equal": (f"{_YES}def f(x): return Yes()", "assert type(f(1)) == int"),
    "main swapped": (
        "import sys\nsys.modules['__main__'] = None\nsys.modules['builtins'] = None\ndef f(x): return 0",
        "assert f(1) == 2",
    ),
    "trace function": (
        "import sys, os\nsys.settrace(lambda *_: os._exit(0))\nsys.setprofile(lambda *_: os._exit(0))\ndef f(x): return 0",
        "assert f(1) == 2",
    ),
    "clears the caller's list": ("def f(x):\n  x.clear()\n  return x", "a = [1, 2]\nassert f(a) == [1, 2]"),
}

# Name: a response, and tests that it meets.
HONEST = {
    "function": ("def f(x): return x + 1", "assert f(1) == 2\nassert f(-1) == 0"),
    "script that ends itself": (
        "import sys\ndef f(x): return 2\nif __name__ == '__main__': sys.exit()",
        "assert f(1) == 2",
    ),
    "sorts in place": ("def f(x): x.sort()", "a = [3, 1, 2]\nassert f(a) is None and a == [1, 2, 3]"),
    "nested rows in place": (
        "def f(g):\n  g[0][1] = 5\n  return g",
        "g = [[1, 2], [3]]\nassert f(g) is g and g == [[1, 5], [3]]",
    ),
    "dict and set in place": (
        "def f(d, s): d['a'] = 1; s.add(2)",
        "d, s = {}, {1}\nf(d, s)\nassert d == {'a': 1} and s == {1, 2}",
    ),
    "class": (
        "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x): self.items.append(x)\n"
        "  def pop(self): return self.items.pop()\n  def __len__(self): return len(self.items)",
        "s = Stack()\ns.push(3)\ns.push('a')\nassert len(s) == 2 and s.pop() == 'a' and s.items == [3] and isinstance(s, Stack)",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n  y: int = 0\n  def moved(self): return P(self.x + 1, self.y)",
        "assert P(1).moved() == P(2) and P(1) != P(3) and repr(P(1)) == 'P(x=1, y=0)'",
    ),
    "operators": (
        "class V:\n  def __init__(self, *c): self.c = c\n  def __add__(self, o): return V(*(a + b for a, b in zip(self.c, o.c)))\n"
        "  def __mul__(self, k): return V(*(a * k for a in self.c))\n  def __eq__(self, o): return self.c == o.c\n"
        "  def __getitem__(self, i): return self.c[i]",
        "assert V(1, 2) + V(3, 4) == V(4, 6) and (V(1, 2) * 3)[1] == 6 and list(V(1, 2)) == [1, 2]",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().x == 1 and isinstance(f(), tuple)",
    ),
    "derived list": (
        "class L(list):\n  pass\ndef f(): return L([1, 2])",
        "assert f() == [1, 2] and isinstance(f(), list) and len(f()) == 2",
    ),
    "enum": (
        "from enum import Enum, IntEnum\nclass C(Enum):\n  RED = 1\nclass N(IntEnum):\n  ONE = 1\ndef f(): return C.RED",
        "assert f() is C.RED and f() == C.RED and f().value == 1 and N.ONE == 1",
    ),
    "own exception": (
        "class E(ValueError):\n  def __init__(self, code): super().__init__(f'code {code}'); self.code = code\ndef f(x): raise E(x)",
        "try:\n  f(7)\nexcept E as error:\n  assert error.code == 7 and str(error) == 'code 7' and isinstance(error, ValueError)\nelse:\n  raise AssertionError",
    ),
    "built-in exception": (
        "def f(x):\n  if x < 0: raise ValueError('negative')",
        "import pytest\nwith pytest.raises(ValueError, match='neg'): f(-1)",
    ),
    "zero division and key error": (
        "def f(x): return 1 / x\ndef g(d): return d['a']",
        "for call in (lambda: f(0), lambda: g({})):\n  try: call()\n  except (ZeroDivisionError, KeyError): continue\n  raise AssertionError",
    ),
    "generator": (
        "def f(n):\n  for i in range(n): yield i * i",
        "g = f(3)\nassert next(g) == 0 and list(g) == [1, 4] and sum(f(4)) == 14",
    ),
    "callback": (
        "def f(g, xs): return [g(x) for x in xs]",
        "assert f(lambda x: x * 2, [1, 2]) == [2, 4] and f(len, ['ab']) == [2]",
    ),
    "sorted by a key": (
        "def f(xs, key): return sorted(xs, key=key)",
        "assert f([(2, 'a'), (1, 'b')], lambda p: p[1])[0] == (2, 'a')",
    ),
    "decorator": (
        "def twice(g):\n  def inner(*a, **k): return g(*a, **k) * 2\n  return inner",
        "@twice\ndef h(x, y=1): return x + y\nassert h(1, y=2) == 6",
    ),
    "closure": ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
    "floats": (
        "def f(x): return x / 3",
        "assert abs(f(1) - 0.333333) < 1e-5\nimport math\nassert math.isnan(f(float('nan'))) and f(float('inf')) == math.inf",
    ),
    "big numbers": ("def f(n): return 3 ** n", "assert f(200) == 3 ** 200"),
    "keywords and defaults": (
        "def f(a, *b, c=3, **d): return a + sum(b) + c + sum(d.values())",
        "assert f(1, 2, c=4, e=5) == 12",
    ),
    "tuples, sets, bytes, None": (
        "def f(): return (1, {2, 3}, frozenset([4]), b'\\xff', None, 1j, range(3))",
        "assert f() == (1, {2, 3}, frozenset([4]), b'\\xff', None, 1j, range(3))",
    ),
    "standard types": (
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date, timedelta\nfrom collections import Counter, deque, defaultdict\n"
        "def f(): return [Fraction(1, 3), Decimal('0.10'), date(2024, 2, 29) + timedelta(1), Counter('aab'), deque([1])]",
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom datetime import date\nfrom collections import Counter, deque\n"
        "assert f() == [Fraction(1, 3), Decimal('0.10'), date(2024, 3, 1), Counter(a=2, b=1), deque([1])]",
    ),
    "unicode and odd strings": ("def f(s): return s[::-1]", "assert f('añ\\n\\x00\\ud800') == '\\ud800\\x00\\nña'"),
    "numpy": (
        "import numpy as np\ndef f(x): return np.asarray(x) * 2\ndef g(): return np.float64(1.5), np.int64(3)",
        "import numpy as np\nassert np.array_equal(f([1, 2]), [2, 4]) and g() == (1.5, 3) and f(np.ones(2)).sum() == 4",
    ),
    "printed": (
        "def f(): print('hello')",
        "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as out: f()\nassert out.getvalue() == 'hello\\n'",
    ),
    "standard input": (
        "def f(): return int(input()) + int(input())",
        "import io, sys\nsys.stdin = io.StringIO('3\\n4\\n')\nassert f() == 7",
    ),
    "input patched": (
        "def f(): return input('?') + '!'",
        "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['a', 'b']): assert f() + f() == 'a!b!'",
    ),
    "coroutine": (
        "import asyncio\nasync def f(x):\n  await asyncio.sleep(0)\n  return x * 2",
        "import asyncio\nassert asyncio.run(f(2)) == 4",
    ),
    "context manager": (
        "class C:\n  def __enter__(self): return 5\n  def __exit__(self, *_): return True",
        "with C() as five:\n  assert five == 5\n  raise KeyError",
    ),
    "linked list of the tests": (
        "def f(head):\n  last = None\n  while head: head.next, last, head = last, head, head.next\n  return last",
        "class Node:\n  def __init__(self, v, next=None): self.v, self.next = v, next\nh = f(Node(1, Node(2)))\nassert h.v == 2 and h.next.v == 1 and h.next.next is None",
    ),
    "unittest": (
        "def f(x): return x + 1",
        "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(f(1), 2)\nunittest.main()",
    ),
    "check of a candidate": (
        "def add(a, b): return a + b",
        "def check(candidate):\n  assert candidate(1, 2) == 3\ncheck(add)",
    ),
    "named like a built-in": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3\nassert sum(0, 0) == 0"),
    "module of the response": (
        "import math\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)",
    ),
    "global that changes": (
        "count = 0\ndef f():\n  global count\n  count += 1",
        "assert count == 0\nf()\nassert count == 1",
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        "assert f(3000) == 3000",
    ),
    "subprocess and threads": (
        "import subprocess, threading\ndef f():\n  t = threading.Thread(target=print); t.start(); t.join()\n  return subprocess.run(['echo', 'a'], capture_output=True, text=True).stdout",
        "assert f() == 'a\\n'",
    ),
    "files": ("def f(): open('out.txt', 'w').write('done')", "f()\nassert open('out.txt').read() == 'done'"),
    "signature and documentation": (
        "def f(x: int) -> int:\n  'Adds one.'\n  return x + 1",
        "assert f.__name__ == 'f' and f.__doc__ == 'Adds one.' and callable(f) and not callable(f(1))",
    ),
}


def rewards(sandbox: str, table: dict[str, tuple[str, str]]) -> dict[str, tuple[float, str]]:
    environment = CodeTestsEnvironment({"num_workers": 4, "sandbox": sandbox, "run_timeout_s": 30.0})
    result = environment.step(
        [[{"role": "assistant", "content": f"<code>{code}</code>"}] for code, _ in table.values()],
        [{"tests": tests} for _, tests in table.values()],
    )
    environment.shutdown()
    shown = [observation["content"] for observation in result.observations]
    return dict(zip(table, zip(result.rewards.tolist(), shown, strict=True), strict=True))


@pytest.mark.slow
def test_no_trick_earns_what_its_answer_does_not() -> None:
    """In the weakest sandbox: what does not help there helps nowhere."""
    assert len(CHEATS) >= 20
    assert {name: shown for name, (reward, shown) in rewards("limits", CHEATS).items() if reward != 0.0} == {}


@pytest.mark.slow
def test_honest_code_earns_its_reward() -> None:
    """In the strictest sandbox that there is: what runs there runs everywhere."""
    assert {name: shown for name, (reward, shown) in rewards("auto", HONEST).items() if reward != 1.0} == {}
