"""What transformers, accelerate and Lightning take for granted of a machine, replaced where there is no CUDA.

    python -m tests.support.clients_without_cuda script.py [its arguments]

runs a script that nobody changed behind these replacements; `-m` before the script names a module instead. A program
of Lightning calls `install_lightning`. Nothing else of the clients is patched in the tests; infinity itself wraps two
of their methods (integrations/deepspeed/clients.py).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def install() -> None:
    """Replace these places."""
    _accelerate()
    _transformers()
    _torch()


def _accelerate() -> None:
    # Without an accelerator it takes each process for the only one, unless it is told to use the CPU: then it leaves
    # its DeepSpeed plugin alone.
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def prepare(self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> Any:
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare


def _transformers() -> None:
    # Without a GPU that computes in bf16 it refuses bf16, unless it is told to use the CPU.
    import transformers.training_args
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils, transformers.training_args):
        module.is_torch_bf16_gpu_available = lambda: True


def _torch() -> None:
    # The backward of torch's differentiable gather names ranks by their place in the group, which gloo takes for their
    # place among all.
    import torch.distributed as dist
    from torch.distributed.nn import functional

    class Places:
        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def scatter(self, output: Any, parts: Any, place: int, group: Any) -> None:
            dist.scatter(output, parts, group=group, group_src=place)

    functional.dist = Places()


def install_lightning() -> None:
    """Its strategy refuses other accelerators in a method of its own, and devices without an index in a function."""
    from lightning.pytorch.strategies import ddp, deepspeed

    deepspeed.DeepSpeedStrategy.setup_environment = ddp.DDPStrategy.setup_environment
    deepspeed._validate_device_index_selection = lambda devices: None


if __name__ == "__main__":
    install()
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        # As Python does for a script.
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
