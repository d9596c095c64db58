"""The demo's stages: the three libraries agree, blocks do not show, and each stage does what it says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transport.demo import numpy_stages, photographs, plan
from transport.demo.check import BYTE_TOLERANCE, FLOAT_TOLERANCE, Check


@pytest.fixture(scope="module")
def frame() -> Any:
    """A small frame of photographs, of an odd size."""
    return photographs.window(photographs.mosaic(0.25), 0.25, 3)[:, 40:251, 100:337]


def through(module: Any, value: Any) -> dict[str, Any]:
    return {name: np.asarray(each) for name, each in module.finish(module.filter_bank(module.denoise(value))).items()}


def as_torch(array: Any) -> Any:
    return importlib.import_module("torch").from_numpy(array)


def as_jax(array: Any) -> Any:
    return importlib.import_module("jax.numpy").asarray(array)


@pytest.mark.parametrize(("library", "to_kind"), [("torch", as_torch), ("jax", as_jax)])
def test_the_libraries_agree(library: str, to_kind: Callable[[Any], Any], frame: Any) -> None:
    frame = np.ascontiguousarray(frame)
    module = importlib.import_module(plan.MODULES[library])
    value, expected = module.denoise(to_kind(frame)), numpy_stages.denoise(frame)
    assert type(value).__module__.startswith(library)
    np.testing.assert_allclose(np.asarray(value), expected, atol=FLOAT_TOLERANCE, rtol=0)
    got, want = through(module, to_kind(frame)), through(numpy_stages, frame)
    assert {name: (each.shape, each.dtype) for name, each in got.items()} == {
        "image": (frame.shape, np.uint8),
        "edges": (frame.shape[1:], np.uint8),
        "corners": (frame.shape[1:], np.float32),
    }
    np.testing.assert_allclose(got["corners"], want["corners"], atol=FLOAT_TOLERANCE, rtol=0)
    for name in ("image", "edges"):
        assert np.abs(got[name].astype(int) - want[name].astype(int)).max() <= 255 * BYTE_TOLERANCE


@pytest.mark.parametrize("rows", [16, 17, 64, 1000])
def test_numpy_blocks_do_not_show(rows: int, frame: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_stages, "BLOCK_BYTES", 10**9)
    whole = through(numpy_stages, frame)
    monkeypatch.setattr(numpy_stages, "BLOCK_BYTES", rows * 4 * frame.shape[-1])
    for name, each in through(numpy_stages, frame).items():
        np.testing.assert_array_equal(each, whole[name], err_msg=name)


def test_denoise_removes_noise_and_keeps_an_edge() -> None:
    clean = np.full((3, 64, 64), 0.2, np.float32)
    clean[:, :, 32:] = 0.8
    noisy = clean + np.random.default_rng(1).normal(0, 0.03, clean.shape).astype(np.float32)
    left = numpy_stages.denoise(noisy)
    assert np.abs(left - clean).mean() < 0.5 * np.abs(noisy - clean).mean()
    assert np.abs(left - clean)[:, :, 31:33].max() < 0.15


@pytest.mark.parametrize("direction", [(0, 1), (1, 0), (1, 1), (1, -1), (1, 2), (2, -1)])
def test_edges_are_thin_and_where_the_step_is(direction: tuple[int, int]) -> None:
    rows, columns = np.mgrid[-24:24, -24:24].astype(np.float32)
    distance = rows * direction[0] + columns * direction[1]
    image = np.broadcast_to(np.clip(distance / 4 + 0.5, 0, 1), (3, 48, 48)).astype(np.float32)
    found = numpy_stages.filter_bank(image)["edges"][4:-4, 4:-4]
    near = np.abs(distance[4:-4, 4:-4])
    assert found[near == 0].min() > 200
    assert found[near > 3].max() < 25


def test_corners_answer_to_a_corner_and_not_to_an_edge() -> None:
    image = np.zeros((3, 48, 48), np.float32)
    image[:, 24:, 24:] = 1.0
    found = numpy_stages.finish(numpy_stages.filter_bank(image))
    assert found["corners"][22:27, 22:27].max() > 0.9
    assert found["corners"][36:44, 20:28].max() < 0.05
    assert found["image"][:, 40, 40].min() == 255
    assert found["image"][:, 4, 4].max() == 0


def test_inputs_are_not_written(frame: Any) -> None:
    before = frame.copy()
    frame.flags.writeable = False
    through(numpy_stages, frame)
    np.testing.assert_array_equal(frame, before)


def test_frames_are_the_same_every_time_and_pan() -> None:
    first, again = photographs.mosaic(0.1), photographs.mosaic(0.1)
    np.testing.assert_array_equal(first, again)
    frames = [photographs.window(first, 0.1, index) for index in range(4)]
    assert all(each.dtype == np.float32 and each.flags.c_contiguous for each in frames)
    assert frames[0].shape == (3, *photographs.frame_shape(0.1))
    rows, columns = photographs.PAN
    np.testing.assert_array_equal(frames[0][:, rows:, columns:], frames[1][:, :-rows, :-columns])
    last = photographs.window(first, 0.1, photographs.PERIOD)
    assert last.shape == frames[0].shape
    np.testing.assert_array_equal(photographs.window(first, 0.1, 2 * photographs.PERIOD - 1), frames[1])


def test_four_and_twenty_four_megapixels() -> None:
    for megapixels in plan.MEGAPIXELS.values():
        height, width = photographs.frame_shape(megapixels)
        assert height * width == pytest.approx(megapixels * 1e6, rel=0.01)


def test_the_check_sees_one_wrong_pixel(frame: Any) -> None:
    right = through(numpy_stages, frame)
    check = Check({0: right})
    check.add(0, 0, {name: each.copy() for name, each in right.items()})
    assert check.finish()
    for name, wrong in (("image", 9), ("edges", 9), ("corners", 0.01)):
        output = {name: each.copy() for name, each in right.items()}
        output[name][..., 5, 7] = output[name][..., 5, 7] // 2 + wrong + 100 if name != "corners" else 2.0
        check.add(7, 0, output)
    check.add(8, 0, {"image": right["image"]})
    check.add(9, 0, {**right, "edges": right["edges"][1:]})
    nothing = {**right, "corners": np.full_like(right["corners"], np.nan)}
    check.add(10, 0, nothing)
    assert not check.finish()
    assert check.wrong == [7, 7, 7, 8, 9, 10]
