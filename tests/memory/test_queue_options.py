"""How the drives are used: the configuration's word first, then the profile's, then the defaults."""

from __future__ import annotations

import logging

import pytest

from infinity.config import ResolveContext, load_config, resolve
from infinity.errors import ConfigError
from infinity.log import _said
from infinity.memory.drives import queue_options
from infinity.memory.tiers.base import QueueOptions
from infinity.plan.hardware import ASSUMED, Drive, save_profile

DRIVE = Drive(
    folder="", read_rate=1.0, write_rate=1.0, mixed_rate=1.0, block_nbytes=128 << 10, queue_depth=64
)  # fmt: skip


def options(folder, drives, directories, **aio):
    path = folder / "profile.json"
    save_profile(ASSUMED.model_copy(update={"drives": tuple(drives)}), path)
    config = resolve(load_config({"hardware_profile": str(path), "aio": aio}), ResolveContext())
    return queue_options(config, [str(each) for each in directories])


def test_without_a_profile_the_defaults_serve(tmp_path):
    config = resolve(load_config({}), ResolveContext())
    assert queue_options(config, [str(tmp_path)]) == QueueOptions(timeout_seconds=600.0)


def test_a_profile_gives_block_and_depth_of_the_drive_behind_the_folder(tmp_path):
    found = options(tmp_path, [DRIVE.model_copy(update={"folder": str(tmp_path)})], [tmp_path / "not" / "there"])
    assert (found.block_nbytes, found.depth) == (128 << 10, 64)


def test_what_the_configuration_says_goes_before_the_profile(tmp_path):
    drive = DRIVE.model_copy(update={"folder": str(tmp_path)})
    found = options(tmp_path, [drive], [tmp_path], block_size=1 << 20, queue_depth=4)
    assert (found.block_nbytes, found.depth) == (1 << 20, 4 * found.threads)


@pytest.mark.parametrize(("rates", "weights"), [((2.0, 1.0), (2.0, 1.0)), ((1.0, 0.9), (1.0, 1.0))])
def test_shares_of_several_drives_are_their_mixed_rates(tmp_path, monkeypatch, rates, weights):
    folders = [tmp_path / "one", tmp_path / "two"]
    # Two folders of one drive stand for two drives.
    monkeypatch.setattr("infinity.memory.drives._device", str)
    drives = [DRIVE.model_copy(update={"folder": str(at), "mixed_rate": rate})
              for at, rate in zip(folders, rates, strict=True)]  # fmt: skip
    assert options(tmp_path, drives, folders).weights == weights
    assert options(tmp_path, drives, folders, drive_weights=[1, 3]).weights == (1.0, 3.0)


def test_a_drive_that_was_not_measured_is_said_and_the_defaults_serve(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("infinity.memory.drives._device", str)
    monkeypatch.setattr(logging.getLogger("infinity"), "propagate", True)
    _said.discard("profile-drive")
    # An engine of an earlier test may have left another level.
    with caplog.at_level(logging.WARNING, "infinity"):
        found = options(tmp_path, [DRIVE], [tmp_path / "other"])
    assert (found.block_nbytes, found.weights) == (QueueOptions().block_nbytes, ())
    assert "infinity bench --drive" in caplog.text


def test_a_profile_that_is_not_there_is_an_error_with_the_remedy(tmp_path):
    config = resolve(load_config({"hardware_profile": str(tmp_path / "none.json")}), ResolveContext())
    with pytest.raises(ConfigError, match="infinity bench"):
        queue_options(config, [str(tmp_path)])
