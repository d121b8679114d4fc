// CRC-32C (Castagnoli): reflected polynomial 0x82f63b78, as iSCSI, ext4 and NVMe use it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// The checksum of the bytes behind `crc`, which is 0 at the beginning, in the fastest way that the processor has.
uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes);

// The same by the processor's instruction, and by tables: where it has nothing better, and to compare with.
uint32_t crc32c_by_instruction(uint32_t crc, const void* data, size_t nbytes);
uint32_t crc32c_by_tables(uint32_t crc, const void* data, size_t nbytes);

// The checksum of two texts one behind the other, from that of each; `nbytes` are those of the second.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes);

// Whether the processor has an instruction for it.
bool crc32c_is_hardware();

}  // namespace infinity::aio
