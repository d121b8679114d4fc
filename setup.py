"""Puts into the wheel what pyproject.toml cannot: the native libraries, compiled if a compiler is there, their sources,
and the README with absolute links.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A Markdown link or picture whose target is neither absolute nor on the same page.
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")
# A build front end does not put the project on the path; the builder and what it imports need no dependency.
sys.path.insert(0, str(ROOT))

from infinity.errors import ExtensionError  # noqa: E402
from infinity.ops.build import build_into  # noqa: E402


class BuildWithNative(build_py):
    """`build_py` that adds `infinity/_csrc` and, where a compiler is, `infinity/_native`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            # A checkout builds from csrc/ on first use, so that an edit of a source is seen.
            return
        package = Path(self.build_lib).resolve() / "infinity"
        # A build folder that was used before may hold sources or libraries that no longer exist.
        shutil.rmtree(package / "_csrc", ignore_errors=True)
        shutil.rmtree(package / "_native", ignore_errors=True)
        shutil.copytree(ROOT / "csrc", package / "_csrc")
        try:
            build_into(package / "_native")
        except ExtensionError as error:
            shutil.rmtree(package / "_native", ignore_errors=True)
            print(f"the wheel carries sources only, which are built on first use: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 of one platform: the libraries are plain C, they know no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def with_absolute_links(text: str, source: str) -> str:
    """Markdown whose links to files of the tree lead to the public repository: the package index has no tree."""

    def absolute(link: re.Match[str]) -> str:
        picture, opening, target = link.groups()
        return f"{picture}{opening}{source}/{'raw' if picture else 'blob'}/main/{target}"

    return RELATIVE_LINK.sub(absolute, text)


class PlatformDistribution(Distribution):
    """A distribution that belongs where a platform's packages go, although setuptools sees no extension module."""

    def parse_config_files(self, *args: Any, **kwargs: Any) -> None:
        """Read pyproject.toml, then turn the README's relative links into links below its `Source` URL."""
        super().parse_config_files(*args, **kwargs)
        self.metadata.long_description = with_absolute_links(README, self.metadata.project_urls["Source"])

    def has_ext_modules(self) -> bool:
        return True


setup(
    long_description=README,
    long_description_content_type="text/markdown",
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
)
