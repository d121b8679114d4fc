// CRC-32C (Castagnoli): reflected polynomial 0x82f63b78, as iSCSI, ext4 and NVMe use it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// Returns the checksum of earlier bytes with checksum `crc` (0: none) followed by these, in the processor's fastest
// way.
uint32_t crc32c(uint32_t crc, const void* data, size_t nbytes);

// The same by the processor's instruction, and by tables, which are the fallback and the reference of the tests.
uint32_t crc32c_by_instruction(uint32_t crc, const void* data, size_t nbytes);
uint32_t crc32c_by_tables(uint32_t crc, const void* data, size_t nbytes);

// Returns the checksum of two concatenated byte strings from theirs; the second one has `nbytes` bytes.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t nbytes);

// Returns whether the processor has an instruction for CRC-32C.
bool crc32c_is_hardware();

}  // namespace infinity::aio
