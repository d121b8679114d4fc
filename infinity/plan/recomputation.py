"""Which modules are computed again in backward: the blocks that a model repeats."""

from __future__ import annotations

from collections.abc import Collection

from infinity.config.resolve import ResolvedConfig
from infinity.plan.spec import ModuleNode


def repeated_blocks(root: ModuleNode, *, classes: Collection[str] = (), every: int = 1) -> tuple[str, ...]:
    """Paths of every `every`-th repeated block, the first one included, in the order of the tree.

    A block is one of several modules of one class that stand side by side, or of a class that the model names as its
    block (`classes`); it has modules of its own, or is a member of a list. What is repeated inside a block is part of
    it, unless the model names that (an encoder and a decoder of one class). A module without parameters is none: there
    is nothing to keep it apart from a function.
    """
    found: list[str] = []

    def visit(node: ModuleNode) -> None:
        members = [child for child in node.children.values() if child.all_params()]
        names = [child.class_name for child in members]
        for child in members:
            repeated = names.count(child.class_name) > 1 and (node.is_container or bool(child.children))
            named = child.class_name in classes
            repeated = repeated and not any(below.class_name in classes for below in child.walk())
            if not child.is_container and (named or repeated):
                found.append(child.path)
            else:
                visit(child)

    visit(root)
    return tuple(found[::every])


def checkpointed_blocks(config: ResolvedConfig, node: ModuleNode, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of the blocks that the configuration has computed again in backward. classes: the model's own blocks."""
    every = config.config.activation_checkpointing.every
    return repeated_blocks(node, classes=classes, every=every) if every else ()
