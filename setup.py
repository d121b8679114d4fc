"""Puts the native libraries (compiled, where a compiler is) and their sources into the wheel."""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
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


class PlatformDistribution(Distribution):
    """A distribution that belongs where a platform's packages go, although setuptools sees no extension module."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel})
