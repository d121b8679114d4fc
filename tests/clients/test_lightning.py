"""Lightning's DeepSpeedStrategy, unchanged: fit, checkpoint, resume, validate give what its DDP gives."""

from __future__ import annotations

import pytest

from tests.clients.test_trl import run

pytestmark = pytest.mark.timeout(600)
NVME = {
    "offload_optimizer": True, "offload_parameters": True, "offload_optimizer_device": "nvme",
    "offload_params_device": "nvme", "remote_device": "nvme",
}  # fmt: skip
CELLS = [{}, {"stage": 2}, {"stage": 3, "in_hook": True, "strategy": NVME}]


def assert_all_alike(found: list[dict]) -> None:
    """Losses of both fits, the rate and three validations: after the fit, after the resumed one, of a fresh module."""
    plain = found[0]
    assert plain["strategy"] == "DDPStrategy" and len(plain["losses"]) == 6
    assert plain["val_loss"][0] == plain["val_loss"][2] != plain["val_loss"][1]
    for each in found[1:]:
        assert each["strategy"] == "DeepSpeedStrategy" and each["engine"] == "infinity.engine.engine"
        assert each["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert each["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)
        assert (each["steps"], each["rate"]) == (plain["steps"], plain["rate"])


@pytest.mark.matrix
def test_fit_checkpoint_resume_and_validate():
    assert_all_alike(run("lightning_cells", CELLS, ranks=1))


@pytest.mark.matrix
@pytest.mark.slow
def test_two_ranks_fit_checkpoint_resume_and_validate():
    assert_all_alike(run("lightning_cells", CELLS, ranks=2))
