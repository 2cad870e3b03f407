"""The rules of the house, each as a function over a module's syntax tree, with an example that breaks it."""

from __future__ import annotations

import ast
import re

import pytest

MAX_FILE_LINES = 320
MAX_FUNCTION_LINES = 75  # without the docstring
MAX_LINE = 120

# The folder that touches the operating system's files, and who may besides: `places` looks for stores under a path that
# a person typed, `sizing` asks how much memory is left, the command line writes reports, pccheck.testing breaks things,
# and `replay.places` makes and empties folders for processes that are killed, and forgets what they had in the cache;
# `probing.place` makes the folder that a probe works in, and removes it.
FILE_ROOMS = {"storage", "testing", "cli", "reading.places", "saving.sizing", "replay.places", "probing.place"}
OS_FILE_CALLS = re.compile(
    r"os\.(open|fdopen|read|write|pread|preadv|pwrite|pwritev|fsync|fdatasync|sync|ftruncate|truncate|posix_fallocate"
    r"|rename|replace|link|unlink|remove|removedirs|mkdir|makedirs|rmdir|symlink|chmod|listdir|scandir|stat|fstat"
    r"|sendfile|copy_file_range)"
)
PATH_FILE_CALLS = re.compile(r"(read|write)_(text|bytes)|touch|hardlink_to|symlink_to|iterdir|r?glob|mkdir|rmdir")


def dotted(node: ast.expr) -> str:
    """Give `a.b.c` of an expression of names; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def calls(module):
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]


def functions(module):
    return [n for n in ast.walk(module.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def classes(module):
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]


def no_print(module):
    if module.name != "pccheck.cli" and not module.name.startswith("pccheck.commands."):
        yield from ((c.lineno, "print") for c in calls(module) if dotted(c.func) == "print")


def no_exit(module):
    if module.name != "pccheck.cli":
        for c in calls(module):
            probe = dotted(c.func) == "os.kill" and ast.unparse(c.args[1]) == "0"  # asks whether a process lives
            if dotted(c.func) in ("sys.exit", "os._exit", "exit", "quit", "os.abort", "os.kill") and not probe:
                yield c.lineno, dotted(c.func)


def no_del(module):
    yield from ((f.lineno, "__del__") for f in functions(module) if f.name == "__del__")


def no_signal_handlers(module):
    """`notice` alone sets some: while the `with` block of somebody who asked for it runs. A number handles nothing."""
    if module.name == "pccheck.control.notice":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "signal":
            yield from ((node.lineno, a.name) for a in node.names if not a.name.startswith("SIG"))
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] == "signal")


def no_environment_switches(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.getenv", "os.environb", "os.putenv"):
            yield node.lineno, dotted(node)


def no_pickle(module):
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    yield from ((line, name) for line, name in module.imports(frozenset()) if name.split(".")[0] in banned)
    for c in calls(module):
        measured = module.name == "pccheck_torch.contenders" and dotted(c.func).startswith("torch.")  # as a peer
        runs = ("eval", "exec", "torch.load", "torch.save", "builtins.eval", "builtins.exec")
        if dotted(c.func) in runs and not measured:
            yield c.lineno, dotted(c.func)


def no_loose_ends(module):
    words = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    for number, line in enumerate(module.text.splitlines(), start=1):
        if found := words.search(line):
            yield number, found[0]


def no_import_side_effects(module):
    """Nothing is called for its effect while a module is imported."""
    for node in module.tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.lineno, ast.unparse(node)[:60]


def no_wild_imports(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node.lineno, "import *"


def no_global_statements(module):
    """State lives in objects that somebody made and somebody closes, not in a module.

    `forks` alone replaces a lock of its module, in a forked child: the thread that held it does not live there.
    """
    if module.name == "pccheck.storage.forks":
        return
    yield from ((n.lineno, f"global {', '.join(n.names)}") for n in ast.walk(module.tree) if isinstance(n, ast.Global))


def no_mixins(module):
    yield from ((c.lineno, c.name) for c in classes(module) if c.name.lower().endswith("mixin"))


def files_are_touched_below_only(module):
    package, _, room = module.name.partition(".")
    if package != "pccheck" or {room, room.split(".")[0]} & FILE_ROOMS:
        return
    for c in calls(module):
        name = dotted(c.func)
        attribute = c.func.attr if isinstance(c.func, ast.Attribute) else ""
        receiver = ast.unparse(c.func.value) if isinstance(c.func, ast.Attribute) else ""
        machine_fact = re.match(r"Path\('/(proc|sys)/", receiver)  # about the machine, not about a store
        anonymous = name == "mmap.mmap" and c.args and ast.unparse(c.args[0]) == "-1"
        if (
            name in ("open", "io.open", "mmap.mmap", "fcntl.flock", "fcntl.fcntl", "fcntl.ioctl")
            or OS_FILE_CALLS.fullmatch(name)
            or name.startswith(("shutil.", "tempfile."))
            or (PATH_FILE_CALLS.fullmatch(attribute) and not machine_fact)
            or (attribute in ("open", "unlink", "rename", "replace") and receiver.startswith("Path("))
        ) and not anonymous:
            yield c.lineno, ast.unparse(c.func)


def files_stay_short(module):
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines, at most {MAX_FILE_LINES}: split by verb"


def functions_stay_short(module):
    for f in functions(module):
        first = f.body[1] if ast.get_docstring(f) and len(f.body) > 1 else f.body[0]
        lines = (f.end_lineno or f.lineno) - first.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f.lineno, f"{f.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def first_line_says_what_it_is(module):
    doc = ast.get_docstring(module.tree, clean=False) or ""
    if not doc.split("\n", 1)[0].strip():
        yield 1, "the module's docstring must begin with what it is, on its first line"


RULES = {
    no_print: "def f():\n    print('x')\n",
    no_exit: "import sys\nsys.exit(1)\n",
    no_del: "class A:\n    def __del__(self): ...\n",
    no_signal_handlers: "def f():\n    import signal\n",
    no_environment_switches: "import os\nx = os.environ.get('A')\n",
    no_pickle: "from pickle import loads\n",
    no_loose_ends: "x = 1  # fixme: y".upper(),
    no_import_side_effects: "import atexit\natexit.register(print)\n",
    no_wild_imports: "from os import *\n",
    no_global_statements: "def f():\n    global x\n    x = 1\n",
    no_mixins: "class SaveMixin: ...\n",
    files_are_touched_below_only: "from pathlib import Path\ndef f(p):\n    return Path(p).read_bytes()\n",
    files_stay_short: "x = 1\n" * (MAX_FILE_LINES + 1),
    functions_stay_short: "def f():\n    'doc'\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1),
    first_line_says_what_it_is: "'''\nWhat it is.'''\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule, core, adapters):
    broken = [f"{m.path}:{line}: {what}" for m in (*core, *adapters) for line, what in rule(m)]
    assert not broken, f"{rule.__name__.replace('_', ' ')}:\n" + "\n".join(broken)


@pytest.mark.parametrize(("rule", "example"), RULES.items(), ids=[rule.__name__ for rule in RULES])
def test_the_rule_bites(rule, example, parse):
    assert list(rule(parse("pccheck.room", "room.py", example))), f"{rule.__name__} lets its own example pass"


def unfinal_classes(modules):
    """Give (path, line, class, base) where a class that is neither abstract nor an error is subclassed."""
    every = {c.name: (m, c) for m in modules for c in classes(m)}

    def bases(c):
        return [dotted(b.value if isinstance(b, ast.Subscript) else b).split(".")[-1] for b in c.bases]

    def is_abstract(c):
        names = {dotted(d).split(".")[-1] for f in c.body if isinstance(f, ast.FunctionDef) for d in f.decorator_list}
        return bool({"ABC", "Protocol"} & set(bases(c)) or "abstractmethod" in names)

    def is_error(name, depth=0):
        if name.endswith(("Error", "Exception", "Warning")) and name not in every:
            return True
        return depth < 10 and name in every and any(is_error(b, depth + 1) for b in bases(every[name][1]))

    return [
        (m.path, c.lineno, c.name, base)
        for m, c in every.values()
        for base in bases(c)
        if base in every and not is_abstract(every[base][1]) and not is_error(base)
    ]


def test_classes_are_abstract_or_final(core, adapters):
    wrong = [
        f"{path}:{line}: {name} derives from {base}, which is neither abstract nor an error"
        for path, line, name, base in unfinal_classes((*core, *adapters))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_concrete_base_is_found(parse):
    text = "class A: ...\nclass B(A): ...\nclass E(ValueError): ...\nclass F(E): ...\n"
    text += "from abc import ABC\nclass G(ABC): ...\nclass H(G): ...\n"
    assert [found[2:] for found in unfinal_classes([parse("pccheck.x", "x.py", text)])] == [("B", "A")]


def test_c_sources_keep_to_the_house(root):
    sources = sorted((root / "pccheck" / "_native").glob("*.[ch]"))
    assert sources, "the C sources are gone"
    wrong = []
    for source in sources:
        for number, line in enumerate(source.read_text().splitlines(), start=1):
            where = f"{source.relative_to(root)}:{number}"
            if re.match(r"\s*#\s*include\s*[<\"](Python|module)\.h", line) and not source.name.startswith("module"):
                wrong.append(f"{where}: Python belongs into the module files only")
            if re.search(r"\b(f?printf|puts|abort|exit|getenv|signal|sigaction)\s*\(", line):
                wrong.append(f"{where}: prints, exits or reads the environment: {line.strip()}")
            if re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b", line):
                wrong.append(f"{where}: a loose end: {line.strip()}")
            if len(line) > MAX_LINE:
                wrong.append(f"{where}: {len(line)} columns, at most {MAX_LINE}")
        lines = source.read_text().count("\n")
        if lines > MAX_FILE_LINES:
            wrong.append(f"{source.relative_to(root)}: {lines} lines, at most {MAX_FILE_LINES}")
    assert not wrong, "\n".join(wrong)


def test_tests_and_examples_leave_no_loose_ends(root, parse):
    files = sorted((*(root / "tests").rglob("*.py"), *(root / "examples").rglob("*.py")))
    broken = [
        f"{file.relative_to(root)}:{line}: {word}"
        for file in files
        for line, word in no_loose_ends(parse("test", str(file), file.read_text()))
    ]
    assert not broken, "\n".join(broken)
