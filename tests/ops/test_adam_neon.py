"""NEON gives the bits of the scalar code, and of another architecture: compiled for it, run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from infinity.ops import build

_SOURCES = Path(build.__file__).resolve().parents[2] / "csrc" / "adam"
_COMPILER, _EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")

# Prints one line for every instruction set of the machine: its name and a hash of all results of the library. Weights,
# moments and gradients come from random bits with the edges of every format; what is a NaN is hashed as one.
_DRIVER = r"""
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
#include "types.h"
using namespace infinity::adam;
extern "C" {
int32_t infinity_adam_isa_supported(int32_t);
const char* infinity_adam_isa_name(int32_t);
void* infinity_adam_pool_new(int32_t, const int32_t*, uint64_t);
void infinity_adam_pool_delete(void*);
int32_t infinity_adam_step(void*, int32_t, const Piece*, uint64_t, uint64_t*);
int32_t infinity_adam_stats(void*, int32_t, const Span*, uint64_t, double*, uint64_t*);
int32_t infinity_adam_split(void*, int32_t, const float*, uint16_t*, int16_t*, uint64_t);
int32_t infinity_adam_join(void*, int32_t, const uint16_t*, const int16_t*, float*, uint64_t);
}
static uint64_t state, hash;
static uint64_t next_random() { return state = state * 6364136223846793005u + 1442695040888963407u, state >> 32; }
static void mix(uint64_t word) { hash = (hash ^ word) * 1099511628211u; }
static void mix_floats(const std::vector<float>& values) {
    for (float value : values) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        mix(std::isnan(value) ? 0x7FC00000u : bits);
    }
}
static const float kEdges[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 1.1754944e-38f, 6e-8f, 2.9802322e-8f, 1.00390625f,
                               -1.01171875f, 1.00048828125f, 65504.0f, 65519.0f, 65520.0f, -1e30f, 3.3961775e38f};
static float value(bool edges) {
    if (edges && next_random() % 8 == 0) return kEdges[next_random() % 15];
    const auto fraction = static_cast<float>(static_cast<int32_t>(next_random()));
    return std::ldexp(fraction, static_cast<int>(next_random() % 40) - 51);
}
// Every 16-bit pattern is a value, infinities and NaNs too.
static void fill(std::vector<uint16_t>& halves) {
    for (auto& half : halves) half = static_cast<uint16_t>(next_random());
}
static void fill(std::vector<float>& floats) { for (auto& number : floats) number = value(true); }

int main() {
    constexpr uint64_t numel = 40001;
    for (int32_t isa = 0; isa < kIsaCount; ++isa) {
        if (!infinity_adam_isa_supported(isa)) continue;
        state = 1, hash = 14695981039346656037u;
        void* pool = infinity_adam_pool_new(2, nullptr, 0);
        for (int32_t storage = kPlain; storage <= kMasterBfloat; ++storage)
            for (int32_t dtype = kFloat32; dtype <= kFloat16; ++dtype)
                for (int32_t rule = kAdam; rule <= kMomentum; ++rule) {
                    std::vector<float> weight(numel), m(numel), v(numel), grad(numel);
                    std::vector<uint16_t> half_grad(numel), param(numel);
                    std::vector<int16_t> remainder(numel);
                    fill(weight), fill(m), fill(v), fill(grad), fill(half_grad);
                    for (auto& square : v) square = std::fabs(square);
                    for (uint64_t at = 0; at < numel; at += 997) grad[at] = at % 2 ? INFINITY : NAN;
                    if (storage == kSplit)
                        infinity_adam_split(pool, isa, weight.data(), param.data(), remainder.data(), numel);
                    const bool plain = storage == kPlain, wide = dtype == kFloat32;
                    const Piece piece{plain ? static_cast<void*>(weight.data()) : param.data(),
                                      wide ? static_cast<const void*>(grad.data()) : half_grad.data(),
                                      m.data(), v.data(), storage == kSplit ? remainder.data() : nullptr,
                                      storage >= kMasterHalf ? weight.data() : nullptr, numel,
                                      static_cast<Storage>(storage), static_cast<Dtype>(dtype), static_cast<Rule>(rule),
                                      0.37f, 0.01f, 0.99999f, 0.1f, 0.99f, 0.01f, 1.7f, 1e-8f, -1e-2f, 0.6f};
                    uint64_t left_out = 0;
                    for (int step = 0; step < 2; ++step) {
                        infinity_adam_step(pool, isa, &piece, 1, &left_out), mix(left_out);
                    }
                    const Span span{piece.grad, numel, piece.grad_dtype};
                    double sum = 0;
                    uint64_t bits = 0, nonfinite = 0;
                    infinity_adam_stats(pool, isa, &span, 1, &sum, &nonfinite);
                    std::memcpy(&bits, &sum, 8), mix(bits), mix(nonfinite);
                    if (storage == kSplit)
                        infinity_adam_join(pool, isa, param.data(), remainder.data(), weight.data(), numel);
                    // The parts of a split NaN are its bits, which the joined weight has too.
                    const int infinite = storage == kMasterHalf ? 0x7C00 : 0x7F80;
                    for (auto half : param) mix(storage == kSplit || (half & 0x7FFF) > infinite ? 0 : half);
                    mix_floats(weight), mix_floats(m), mix_floats(v);
                }
        infinity_adam_pool_delete(pool);
        std::printf("%s %016llx\n", infinity_adam_isa_name(isa), static_cast<unsigned long long>(hash));
    }
}
"""


def _compile(compiler: str, sources: list[Path], folder: Path) -> list[Path]:
    """The objects of `sources`, with the library's flags and without a warning."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *build._CXX_FLAGS, f"-I{_SOURCES}", "-c", str(source), "-o", str(made)]
        for source, made in zip(sources, objects, strict=True)
    ]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=100)[1] for process in running]
    assert not any(said) and all(process.returncode == 0 for process in running), said
    return objects


def _hashes(link: list[str], program: Path, *run: str) -> dict[str, str]:
    """Instruction set -> hash, as the linked driver says."""
    subprocess.run([*link, "-pthread", "-o", str(program)], check=True)
    reply = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=60, check=True)
    return dict(line.split() for line in reply.stdout.splitlines())


@pytest.mark.skipif(not _SOURCES.is_dir(), reason="the sources are not beside the package")
@pytest.mark.skipif(_COMPILER is None, reason="no cross compiler: aarch64-linux-gnu-g++")
@pytest.mark.skipif(_EMULATOR is None, reason="no emulator: qemu-aarch64")
def test_neon_gives_the_bits_of_the_scalar_code_and_of_this_machine(tmp_path: Path) -> None:
    assert _COMPILER is not None and _EMULATOR is not None
    driver = tmp_path / "driver.cpp"
    driver.write_text(_DRIVER)
    objects = _compile(_COMPILER, [*sorted(_SOURCES.glob("*.cpp")), driver], tmp_path)
    there = _hashes([_COMPILER, "-static", *map(str, objects)], tmp_path / "there", _EMULATOR)
    assert set(there) == {"scalar", "neon"}
    assert there["neon"] == there["scalar"]
    native, compiler = build._library("adam"), build._compiler()
    if native is not None and compiler is not None:
        objects = _compile(compiler, [driver], tmp_path)
        here = _hashes([compiler, *map(str, objects), str(native.path)], tmp_path / "here")
        assert set(here.values()) == {there["scalar"]}, (here, there)
