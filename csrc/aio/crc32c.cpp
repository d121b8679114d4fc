// The instruction accepts 8 bytes a cycle with a latency of three cycles, so three streams run in parallel and tables
// combine them (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011).
// Combining multiplies by a power of x modulo the polynomial (Mark Adler's zlib, crc32_combine).

#include "crc32c.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
#define INFINITY_FOLD_TARGET __attribute__((target("sse4.2,avx512f,vpclmulqdq")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace infinity::aio {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;
// x^0 and x^8; the highest bit is the lowest power.
constexpr uint32_t kOne = 0x80000000;
constexpr uint32_t kByte = 0x00800000;

// a * b modulo the polynomial.
uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = b & 1 ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return product;
}

// The factor by which `nbytes` appended zero bytes multiply a remainder.
uint32_t shift_by(uint64_t nbytes) {
    uint32_t power = kOne;
    for (uint32_t square = kByte; nbytes != 0; nbytes >>= 1) {
        if (nbytes & 1) power = multiply(square, power);
        square = multiply(square, square);
    }
    return power;
}

// multiply(factor, .), a byte of the operand at a time.
class Multiplier {
  public:
    explicit Multiplier(uint32_t factor) {
        for (uint32_t place = 0; place < 4; ++place) {
            for (uint32_t byte = 0; byte < 256; ++byte) table_[place][byte] = multiply(factor, byte << (8 * place));
        }
    }
    uint32_t operator()(uint32_t value) const {
        return table_[0][value & 255] ^ table_[1][(value >> 8) & 255] ^ table_[2][(value >> 16) & 255] ^
               table_[3][value >> 24];
    }

  private:
    uint32_t table_[4][256];
};

// table[k][b]: the remainder of byte b followed by k zero bytes.
struct ByteTables {
    ByteTables() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ kPolynomial : crc >> 1;
            table[0][byte] = crc;
        }
        for (int place = 1; place < 8; ++place) {
            for (uint32_t byte = 0; byte < 256; ++byte) {
                const uint32_t before = table[place - 1][byte];
                table[place][byte] = (before >> 8) ^ table[0][before & 255];
            }
        }
    }
    uint32_t table[8][256];
};

#ifdef INFINITY_CRC_TARGET

#if defined(__x86_64__)
INFINITY_CRC_TARGET inline uint64_t step(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
INFINITY_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#else
// The builtins of arm_acle.h, which some compilers declare only if all code is built for the extension.
INFINITY_CRC_TARGET inline uint64_t step(uint64_t crc, uint64_t word) {
    uint32_t next;
    asm("crc32cx %w0, %w1, %x2" : "=r"(next) : "r"(static_cast<uint32_t>(crc)), "r"(word));
    return next;
}
INFINITY_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) {
    uint32_t next;
    asm("crc32cb %w0, %w1, %w2" : "=r"(next) : "r"(crc), "r"(static_cast<uint32_t>(byte)));
    return next;
}
#endif

inline uint64_t word_at(const char* at) {
    uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

// Processes whole rounds of three streams of kStream bytes, from *at on.
template <size_t kStream>
INFINITY_CRC_TARGET uint64_t run_streams(uint64_t crc, const char** at, const char* end) {
    static const Multiplier behind(shift_by(kStream));
    const char* next = *at;
    for (; static_cast<size_t>(end - next) >= 3 * kStream; next += 3 * kStream) {
        uint64_t second = 0;
        uint64_t third = 0;
        for (size_t index = 0; index < kStream; index += sizeof(uint64_t)) {
            crc = step(crc, word_at(next + index));
            second = step(second, word_at(next + kStream + index));
            third = step(third, word_at(next + 2 * kStream + index));
        }
        crc = behind(static_cast<uint32_t>(crc)) ^ second;
        crc = behind(static_cast<uint32_t>(crc)) ^ third;
    }
    *at = next;
    return crc;
}

INFINITY_CRC_TARGET uint32_t by_instruction(uint32_t before, const char* at, size_t nbytes) {
    const char* const end = at + nbytes;
    uint64_t crc = run_streams<4096>(~before, &at, end);
    crc = run_streams<256>(crc, &at, end);
    for (; end - at >= 8; at += 8) crc = step(crc, word_at(at));
    for (; at != end; ++at) crc = step_byte(static_cast<uint32_t>(crc), static_cast<uint8_t>(*at));
    return ~static_cast<uint32_t>(crc);
}

#ifdef INFINITY_FOLD_TARGET

// Folds four vectors of 512 bits, each onto the one 256 bytes further on: carry-less products with x^(8 * 256 + 32) and
// x^(8 * 256 - 32) modulo the polynomial keep the remainder of the whole (Gopal et al., "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009). The instruction processes the last 256
// bytes. This runs at memory bandwidth, and four times as fast as the instruction on cached bytes. It does not
// keep the bytes in the last-level cache, which the drive's copies need: a checked write at 7.5 GB/s costs 5 % instead
// of 7 %.
constexpr size_t kFoldNbytes = 256;
constexpr size_t kFoldAhead = 2048;

INFINITY_FOLD_TARGET inline __m512i folded(__m512i vector, __m512i factors, const char* onto) {
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(vector, factors, 0x00),
                                     _mm512_clmulepi64_epi128(vector, factors, 0x11), _mm512_loadu_si512(onto), 0x96);
}

INFINITY_FOLD_TARGET uint32_t by_folding(uint32_t before, const char* at, size_t nbytes) {
    if (nbytes < 2 * kFoldNbytes) return by_instruction(before, at, nbytes);
    static const uint64_t low = uint64_t{shift_by(kFoldNbytes + 4)} << 1;
    static const uint64_t high = uint64_t{shift_by(kFoldNbytes - 4)} << 1;
    const __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)));
    const char* const end = at + nbytes;
    __m512i a = _mm512_loadu_si512(at);
    __m512i b = _mm512_loadu_si512(at + 64);
    __m512i c = _mm512_loadu_si512(at + 128);
    __m512i d = _mm512_loadu_si512(at + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(~before))));
    for (at += kFoldNbytes; static_cast<size_t>(end - at) >= kFoldNbytes; at += kFoldNbytes) {
        for (size_t line = 0; line < kFoldNbytes; line += 64) _mm_prefetch(at + kFoldAhead + line, _MM_HINT_NTA);
        a = folded(a, factors, at);
        b = folded(b, factors, at + 64);
        c = folded(c, factors, at + 128);
        d = folded(d, factors, at + 192);
    }
    alignas(64) char left[kFoldNbytes];
    _mm512_store_si512(left, a);
    _mm512_store_si512(left + 64, b);
    _mm512_store_si512(left + 128, c);
    _mm512_store_si512(left + 192, d);
    // by_instruction inverts its start value, so ~0 starts the folded bytes with a remainder of 0.
    return by_instruction(by_instruction(~uint32_t{0}, left, kFoldNbytes), at, static_cast<size_t>(end - at));
}

#endif

bool has_instruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    constexpr unsigned long kHwcapCrc32 = 1 << 7;
    return getauxval(AT_HWCAP) & kHwcapCrc32;
#endif
}

#endif

}  // namespace

uint32_t crc32c_by_tables(uint32_t before, const void* data, size_t nbytes) {
    static const ByteTables tables;
    const auto& table = tables.table;
    const auto* at = static_cast<const uint8_t*>(data);
    uint32_t crc = ~before;
    for (; nbytes >= 8; at += 8, nbytes -= 8) {
        // Assembled byte by byte, so that the processor's byte order does not matter.
        crc = table[7][(crc ^ at[0]) & 255] ^ table[6][((crc >> 8) ^ at[1]) & 255] ^
              table[5][((crc >> 16) ^ at[2]) & 255] ^ table[4][(crc >> 24) ^ at[3]] ^ table[3][at[4]] ^
              table[2][at[5]] ^ table[1][at[6]] ^ table[0][at[7]];
    }
    for (; nbytes != 0; ++at, --nbytes) crc = (crc >> 8) ^ table[0][(crc ^ *at) & 255];
    return ~crc;
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes) {
    return multiply(shift_by(nbytes), first) ^ second;
}

uint32_t crc32c_by_instruction(uint32_t crc, const void* data, size_t nbytes) {
#ifdef INFINITY_CRC_TARGET
    if (crc32c_is_hardware()) return by_instruction(crc, static_cast<const char*>(data), nbytes);
#endif
    return crc32c_by_tables(crc, data, nbytes);
}

bool crc32c_is_hardware() {
#ifdef INFINITY_CRC_TARGET
    static const bool has = has_instruction();
    return has;
#else
    return false;
#endif
}

uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes) {
#ifdef INFINITY_FOLD_TARGET
    static const bool folds = crc32c_is_hardware() && __builtin_cpu_supports("avx512f") &&
                              __builtin_cpu_supports("vpclmulqdq");
    if (folds) return by_folding(crc, static_cast<const char*>(data), nbytes);
#endif
    return crc32c_by_instruction(crc, data, nbytes);
}

}  // namespace infinity::aio
