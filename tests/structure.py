"""The structure of the code in numbers that should fall: `python -m tests.structure [ROOT]`.

Prints: files directly in infinity/, instance attributes of the largest class, imports of the module that imports most,
assignments to attributes of other objects, public names that two modules define, names of the old vocabulary, and code
tokens (no comments, docstrings, blank lines) of infinity/ and estimators/. tests/test_structure.py holds the limits.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from tests.support.syntax import parsed, statements

# Attributes that torch, ctypes and Python itself mean to be assigned from outside.
_THEIRS = {
    "data", "grad", "__class__", "__dict__", "__kwdefaults__", "requires_grad", "training", "forward",
    "restype", "argtypes",
}  # fmt: skip
# Objects of torch, transformers and the standard library that are meant to be written to: the context of an
# autograd.Function, the user's modules and tensors, `sys`, a logger, an argparse action.
_THEIR_OBJECTS = {"ctx", "module", "model", "inner", "param", "buffer", "sys", "logger", "action"}
_QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


# Public names that several modules define on purpose, and why.
PAIRS = {
    "main": "the entry points of two commands, infinity and infinity-estimate",
    "add_arguments": "each module of a command has it",
    "run": "each module of a command has it",
    "show": "each module of a command that prints a table has it",
    "adam_step": "the door in ops/adam, its CUDA path in ops/kernels, its reference implementation in ops/reference",
    "grad_stats": "as adam_step",
    "read_grad_stats": "as adam_step, but for the door",
    "join": "as adam_step",
    "split": "as adam_step",
}
# Names of the vocabulary before, as whole identifiers, and the modules (prefixes) in which none may stand.
OLD_NAMES = {
    "Keeper": "infinity", "keeper_of": "infinity", "keeper": "infinity", "spool": "infinity", "question": "infinity",
    "announce_begin": "infinity", "announce_end": "infinity",
    "Scope": "infinity/zero", "Gathered": "infinity/zero", "let_go": "infinity/zero", "strayed": "infinity/zero",
    "Method": "infinity/optim", "Cut": "infinity/optim", "Run": "infinity/optim", "Sweep": "infinity/optim",
    "begin_early": "infinity", "forgo": "infinity/optim", "judge": "infinity/engine",
    "despair": "infinity", "hopeless": "infinity/engine", "Rescue": "infinity", "give_up": "infinity/engine",
    "Leases": "infinity/checkpoint", "Kept": "infinity/checkpoint", "together": "infinity/checkpoint",
    "take_off": "infinity", "land": "infinity", "Flight": "infinity/observability", "Level": "infinity/observability",
    "Tally": "infinity", "Coarse": "infinity", "Turns": "infinity", "Lane": "infinity", "Lanes": "infinity",
    "Question": "infinity", "Use": "infinity/plan", "Parties": "infinity", "Slabs": "infinity", "sever": "infinity",
    "Board": "infinity", "Mesh": "infinity", "Spool": "infinity", "Origin": "infinity/zero", "Stopwatch": "infinity",
    "Unspeakable": "infinity", "CheckpointExtent": "infinity", "Parts": "infinity", "_Rehearsal": "infinity",
}  # fmt: skip


def sources(root: Path) -> list[Path]:
    """Our own modules."""
    return sorted([*root.glob("infinity/**/*.py"), *root.glob("estimators/**/*.py")])


def code_tokens(text: str) -> int:
    """Tokens of a module that are code: no comments, no docstrings, no layout."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _QUIET and token.start[0] not in lines for token in tokens)


def attributes(tree: ast.Module, stateful: Collection[str] = ()) -> Iterator[tuple[str, int]]:
    """(class, attributes that its methods set on `self`). Fields count where one holds an object of a stateful class: a
    section of a file's keys and a value of numbers and names are free, a bag of parts is not.
    """
    for node in statements(tree):
        if isinstance(node, ast.ClassDef):
            targets = (target for child in statements(node) for target in _targets(child))
            own = {target.attr for target in targets if _is_own(target)}
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            if any(ast.unparse(each.annotation) in stateful for each in fields):
                own |= {ast.unparse(each.target) for each in fields}
            yield node.name, len(own)


def foreign(tree: ast.Module) -> Iterator[str]:
    """Assignments to an attribute of anything but `self` and `cls`; torch's own and autograd's `ctx` excepted."""
    for node in statements(tree):
        for target in _targets(node):
            if not isinstance(target, ast.Attribute) or target.attr in _THEIRS:
                continue
            if not _is_own(target) and ast.unparse(target.value) not in _THEIR_OBJECTS:
                yield f"{target.lineno}: {ast.unparse(target)}"


def public(tree: ast.Module) -> set[str]:
    """Names of classes and functions of the module's top level without an underscore."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def fan_out(tree: ast.Module) -> int:
    """How many of our own modules a module imports."""
    nodes = [*statements(tree)]
    found = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    found += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return len({name for name in found if name.split(".")[0] in ("infinity", "estimators")})


def old_names(path: str, text: str) -> Iterator[str]:
    """Identifiers of the old vocabulary in a module."""
    words = {*re.findall(r"\w+", text)} & OLD_NAMES.keys()
    if not any(path.startswith(OLD_NAMES[word]) for word in words):
        # A tokenizer takes longer than all else here; comments and strings are all that it leaves out.
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and path.startswith(OLD_NAMES.get(token.string, "?")):
            yield f"{path}:{token.start[0]}: {token.string}"


def largest(trees: Mapping[Path, ast.Module]) -> list[tuple[int, str]]:
    """(attributes, module.class) of every class, most first."""
    # A `Flag` of the simulator's is none of the configuration's.
    acting = (tree for path, tree in trees.items() if not {"config", "estimators"} & {*path.parts})
    stateful = {name for tree in acting for name, n in attributes(tree) if n}
    found = ((n, f"{path.stem}.{name}") for path, tree in trees.items() for name, n in attributes(tree, stateful))
    return sorted(found, reverse=True)


def named_twice(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Public names that two modules define, but for PAIRS and for the names of another project."""
    ours = [tree for path, tree in trees.items() if "integrations/deepspeed" not in path.as_posix()]
    owners = Counter(name for tree in ours for name in public(tree))
    return sorted(name for name, count in owners.items() if count > 1 and name not in PAIRS)


def _is_own(target: ast.expr) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in ("self", "cls")
    )  # fmt: skip


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def main(root: Path) -> None:
    """Print the numbers, and what makes them."""
    texts = {path: path.read_text() for path in sources(root)}
    trees = {path: parsed(path) for path in texts}
    loose = [path.name for path in root.glob("infinity/*.py")]
    print(f"files directly in infinity/: {len(loose)}")
    counts = largest(trees)
    print(f"attributes of the largest class: {counts[0][0]} ({', '.join(f'{name} {n}' for n, name in counts[:8])})")
    imports = sorted(((fan_out(tree), str(path.relative_to(root))) for path, tree in trees.items()), reverse=True)
    print(f"modules that one imports: {imports[0][0]} ({', '.join(f'{name} {n}' for n, name in imports[:4])})")
    found = [f"{path.relative_to(root)}:{where}" for path, tree in trees.items() for where in foreign(tree)]
    print(f"assignments to another object's attributes: {len(found)}")
    print("\n".join(f"  {where}" for where in found))
    twice = named_twice(trees)
    print(f"public names defined in two modules: {len(twice)} ({', '.join(twice)}), and {len(PAIRS)} with a reason")
    old = [name for path, text in texts.items() for name in old_names(str(path.relative_to(root)), text)]
    print(f"names of the old vocabulary: {len(old)}")
    print("\n".join(f"  {where}" for where in old))
    print(f"code tokens: {sum(code_tokens(text) for text in texts.values())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
