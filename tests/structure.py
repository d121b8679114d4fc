"""How the house is built, in numbers that should fall: `python -m tests.structure [ROOT]`.

Prints: files directly in infinity/, instance attributes of the largest class, assignments to attributes of other
objects, public names that two modules define, and code tokens (no comments, docstrings, blank lines) of infinity/ and
estimators/.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

# Attributes that torch means to be assigned from outside.
_TORCHS = {"data", "grad", "__class__", "requires_grad", "training", "forward"}
_QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
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


def attributes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(class, attributes that its methods set on `self`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            targets = (target for child in ast.walk(node) for target in _targets(child))
            yield node.name, len({target.attr for target in targets if _is_own(target)})


def foreign(tree: ast.Module) -> Iterator[str]:
    """Assignments to an attribute of anything but `self` and `cls`, torch's own excepted."""
    for node in ast.walk(tree):
        for target in _targets(node):
            if not isinstance(target, ast.Attribute) or target.attr in _TORCHS:
                continue
            if not _is_own(target):
                yield f"{target.lineno}: {ast.unparse(target)}"


def public(tree: ast.Module) -> set[str]:
    """Names of classes and functions of the module's top level without an underscore."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


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
    trees = {path: ast.parse(path.read_text()) for path in sources(root)}
    loose = [path.name for path in root.glob("infinity/*.py")]
    print(f"files directly in infinity/: {len(loose)}")
    counts = sorted(
        ((n, f"{path.stem}.{name}") for path, tree in trees.items() for name, n in attributes(tree)), reverse=True
    )
    print(f"attributes of the largest class: {counts[0][0]} ({', '.join(f'{name} {n}' for n, name in counts[:8])})")
    found = [f"{path.relative_to(root)}:{where}" for path, tree in trees.items() for where in foreign(tree)]
    print(f"assignments to another object's attributes: {len(found)}")
    print("\n".join(f"  {where}" for where in found))
    owners = Counter(name for tree in trees.values() for name in public(tree))
    twice = sorted(name for name, count in owners.items() if count > 1)
    print(f"public names defined in two modules: {len(twice)} ({', '.join(twice)})")
    print(f"code tokens: {sum(code_tokens(path.read_text()) for path in trees)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1])
